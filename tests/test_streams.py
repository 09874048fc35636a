"""The stream lab: what it measures, that it resumes to the same bytes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import Outcome
from small_data import make_folders

from testtime import load_encoder, metrics, toy
from testtime.encoding.store import Features, save_features
from testtime.experiments import sources, stream_runs, streams
from testtime.experiments.plan import Plan
from testtime.experiments.run import find_columns, find_experiment, page, run_experiment, selected
from testtime.experiments.scenarios import KINDS, Images, Stream, make_stream
from testtime.experiments.sources import SEVERAL, SINGLE, find_domains, open_stored
from testtime.methods.base import leaves
from testtime.session.session import Session
from testtime.types import FeatureError, InputError

ROWS = ["zero-shot", "DPE", "TDA"]
FEW = ("sorted", "10% of classes", "open set 50%")  # the second cannot be made of 12 classes
Run = Callable[..., dict[str, Any]]


def write(path: Path, *, labelled: bool = True, classes: int = 12, images: int = 260, dim: int = 64) -> Path:
    """A feature file of a synthetic stream of two views."""
    task, stream, labels = toy(classes=classes, images=images, dim=dim, views=2)
    made = {"labels": labels} if labelled else {}
    return save_features(path, stream, task.text, classnames=task.classnames, metadata={"encoder": "mine"}, **made)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "toy.safetensors")


@pytest.fixture
def run(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The experiment on a feature file, on some streams, in a folder below the test's own."""

    def go(folder: str = "out", rows: list[str] = ROWS, kinds: tuple[str, ...] = FEW, **more: Any) -> dict[str, Any]:
        monkeypatch.setattr(sources, "SINGLE", kinds)
        seeds = more.pop("seeds", (1, 2))
        plan = Plan(tmp_path / folder, load_encoder("tiny"), seeds, report=lambda line: None)
        stored = open_stored(file)
        return run_experiment("streams", {"tiny": plan}, {stored.name: stored}, rows, **more)

    return go


def of(result: dict[str, Any], stream: str, row: str, guard: bool = False) -> dict[str, Any]:
    """One record of a result."""
    key = (stream, row, guard)
    (found,) = (each for each in result["rows"] if (each["stream"], each["row"], each["guard"]) == key)
    return found


class Decision(NamedTuple):
    """What a guard says of an image."""

    known: float
    learned: bool = True
    refused: str = ""
    answer: str = "frozen"


class Guarded(Session):
    """A session whose guard always gives the frozen answer, and refuses every third image."""

    def __init__(self, task: Any, method: Any, guard: bool) -> None:
        super().__init__(task, method)
        self.wary, self.told = guard, list[Decision]()

    @property
    def decisions(self) -> Any:
        return self.told

    def scan(self, stream: torch.Tensor) -> torch.Tensor:
        logits = super().scan(stream)
        if not self.wary:
            return logits
        frozen = self.task.zero_shot(stream[:, 0])
        self.told = [Decision(float(x), k % 3 > 0, "copy" * (k % 3 == 0)) for k, x in enumerate(frozen.amax(-1))]
        return frozen


# what is measured


def test_every_stream_of_a_file_has_a_record_for_each_method(run: Run) -> None:
    result = run(kinds=SINGLE, rows=["zero-shot", "TDA"], seeds=(1,))
    assert [row["stream"] for row in result["rows"][::3]] == list(SINGLE) and result["columns"] == ["toy"]
    named = [(row["row"], row["guard"]) for row in result["rows"][:3]]
    assert named == [("zero-shot", False), ("TDA", False), ("TDA", True)]
    assert result["guard"]["veto"] is True
    missing = {row["stream"]: row["not run"] for row in result["rows"] if "not run" in row}
    assert missing == {"10% of classes": "10% of 12 classes are 1, and up to 4 are other streams"}
    for row in result["rows"]:
        if "not run" not in row:
            assert row["gap"] == pytest.approx(row["accuracy"] - row["zero_shot"], abs=1e-12)
            assert row["spread"] is None and row["tail_accuracy"] == row["accuracy"] and row["tail_gap"] == row["gap"]
            assert ("auroc" in row) == row["stream"].startswith("open set")
            assert ("attacked" in row) == row["stream"].startswith(("poisoned", "attacker"))
        if row["row"] == "zero-shot" and "not run" not in row:
            assert row["gap"] == row["worst_gap"] == row["tail_gap"] == 0 and row["guard"] is False


def test_a_cell_is_a_session_over_the_stream_of_each_seed(run: Run, file: Path) -> None:
    features = Features(file)
    assert features.labels is not None
    task = features.task()
    images = Images(task, features.read(0, len(features))[:, :1], features.labels)
    row = of(run(rows=["DPE"]), "sorted", "DPE")
    keys = ("accuracy", "macro_f1", "calibration_error", "brier")
    found: dict[str, list[float]] = {key: [] for key in (*keys, "zero_shot", "worst")}
    for seed in (1, 2):
        stream = make_stream("sorted", images, seed)
        assert isinstance(stream, Stream)
        views = stream.views[stream.rows]
        logits = Session(task, "dpe", **row["settings"]).scan(views)
        answers, frozen = logits.argmax(-1), task.zero_shot(views[:, 0]).argmax(-1)
        scores = metrics.Scores(12).update(logits.softmax(-1), stream.labels, predictions=answers).compute()
        for key in keys:
            found[key].append(scores[key])
        found["zero_shot"].append(metrics.accuracy(frozen, stream.labels))
        found["worst"].append(float(metrics.running_accuracy(answers, stream.labels, 200)[199:].min()))
    assert row["tail_accuracy"] == min(found["accuracy"]) and row["spread"] > 0
    for key, values in found.items():
        expected = min(values) if key == "worst" else sum(values) / 2
        assert row[key] == pytest.approx(expected, abs=1e-9), key
    assert 0 <= row["calibrated_error"] < 1 and row["images"] == 260


def test_foreign_images_are_held_out_classes_or_those_given(run: Run, tmp_path: Path) -> None:
    kinds = ("open set 30%",)
    held = of(run(rows=["zero-shot"], kinds=kinds), "open set 30%", "zero-shot")
    others = write(tmp_path / "others.safetensors", labelled=False, classes=5)
    given = of(run("given", rows=["zero-shot"], kinds=kinds, foreign=others), "open set 30%", "zero-shot")
    assert held["images"] < 200 and given["images"] == 260
    assert 0 < given["fpr95"] <= 1 and given["auroc"] != held["auroc"]


def test_an_attacker_takes_the_candidate_that_does_most_harm(file: Path, monkeypatch) -> None:
    features = Features(file)
    assert features.labels is not None
    task = features.task()
    stream = make_stream("attacker 5%", Images(task, features.read(0, 260)[:, :1], features.labels), 1)
    assert isinstance(stream, Stream) and stream.turns is not None
    session = Session(task, "tda")
    session.scan(stream.views[stream.rows[:100]])
    before = leaves(session.state)
    chosen = stream_runs.most_harmful(session, stream, look=2)
    own = stream.rows[stream.scored & (stream.labels == stream.attacked)][: stream_runs.PROBES]
    margins = {}
    for number in (6, 7, 8):
        copy = session.fork()
        copy.step(stream.views[stream.candidates[number]])
        logits = [copy.predict(stream.views[probe]).logits for probe in own]
        a = stream.attacked
        margins[number] = sum(float(x[a] - torch.cat([x[:a], x[a + 1 :]]).max()) for x in logits)
    assert margins[chosen] == min(margins.values())
    assert all(torch.equal(*pair) for pair in zip(before, leaves(session.state), strict=True))
    monkeypatch.setattr(stream_runs, "LOOKS", 4)  # of 14 turns: every third one
    answers = stream_runs.run_stream(Session(task, "tda"), stream)
    sent = answers.rows[stream.turns] - stream.candidates[0]
    assert ((sent >= 0) & (sent < len(stream.candidates))).all() and stream.recipes == 16
    assert torch.equal(sent[1:3] % 16, sent[:2] % 16) and len(sent[:3].unique()) == 3  # alike, of other images
    assert torch.equal(answers.rows[~stream.turns], stream.rows[~stream.turns])


# the guard


def test_the_guard_is_compared_with_the_same_method_without_it(run: Run, monkeypatch) -> None:
    monkeypatch.setattr(streams, "Session", Guarded)
    result = run()
    for row in result["rows"]:
        if row["guard"] and "not run" not in row:
            assert (
                row["gap"] == 0 and row["learned"] == pytest.approx(2 / 3, abs=0.1) and set(row["refused"]) == {"copy"}
            )
    open_set = of(result, "open set 50%", "DPE", True), of(result, "open set 50%", "DPE")
    assert open_set[0]["auroc"] != open_set[1]["auroc"]  # by its own score, not by the confidence of the answer
    with pytest.raises(ValueError):
        of(result, "sorted", "zero-shot", True)
    summary = {(each["row"], each["guard"]): each for each in result["summary"]}
    assert summary["DPE", True]["harmless"] == 1 and summary["DPE", True]["gain_kept"] == 0
    assert summary["", False]["cells"] == 2 * summary["DPE", False]["cells"] == 4
    shown = page(result, {}, "")
    assert "DPE guarded" in shown and "hollow" in shown


def test_the_summary_counts_harm_and_the_gain_that_is_kept() -> None:
    def row(stream: str, guard: bool, gap: float) -> dict[str, Any]:
        return {
            "row": "DPE",
            "method": "dpe",
            "column": "a",
            "stream": stream,
            "guard": guard,
            "gap": gap,
            "worst_gap": 0,
        }

    off, on = (0.04, 0.02, 0.003, -0.01, -0.05), (0.03, 0.018, 0.0, 0.0, -0.011)
    rows = [row(str(n), guard, gap) for guard, gaps in ((False, off), (True, on)) for n, gap in enumerate(gaps)]
    without, guarded = streams.overview(rows)[:2]
    assert (without["harmless"], guarded["harmless"]) == (0.8, 0.8)  # one point is tolerated
    assert guarded["gain_kept"] == pytest.approx(0.048 / 0.06) and without["gain_kept"] == pytest.approx(1)
    assert without["lowest_gap"] == -0.05 and guarded["gap"] == pytest.approx(sum(on) / 5)


# files


def test_a_run_that_is_killed_resumes_to_the_same_bytes(run: Run, tmp_path: Path, monkeypatch) -> None:
    kinds = ("shuffled", "sorted", "poisoned 5%")
    whole, left = run("whole", kinds=kinds), 11

    def killed(*arguments: Any) -> dict[str, Any]:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return real(*arguments)

    real = stream_runs.score
    monkeypatch.setattr(streams, "score", killed)
    with pytest.raises(KeyboardInterrupt):
        run("killed", kinds=kinds)
    finished = set((tmp_path / "killed" / "cells").iterdir())
    monkeypatch.setattr(streams, "score", real)
    assert 2 <= len(finished) < 10 and run("killed", kinds=kinds) == whole
    names = sorted(path.name for path in (tmp_path / "whole" / "cells").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "killed" / "cells").iterdir())
    for name in names:
        assert (tmp_path / "whole" / "cells" / name).read_bytes() == (tmp_path / "killed" / "cells" / name).read_bytes()


def test_cells_do_not_depend_on_the_number_of_cores(run: Run, monkeypatch) -> None:
    one = run("one", rows=["DPE"])
    monkeypatch.setattr(streams, "parallel_steppers", lambda device: 3)
    assert run("three", rows=["DPE"]) == one


def test_finished_cells_need_no_images(run: Run, monkeypatch) -> None:
    first = run(rows=["zero-shot"], kinds=("sorted",))
    monkeypatch.setattr(sources.Features, "read", lambda *rows: pytest.fail("read again"))
    assert run(rows=["zero-shot"], kinds=("sorted",)) == first


def test_a_damaged_cell_is_named(run: Run, tmp_path: Path) -> None:
    run(rows=["zero-shot"])
    path = next((tmp_path / "out" / "cells").glob("toy-sorted-*"))
    path.write_text('{"scores": [1]}')
    with pytest.raises(InputError, match=f"{path.name} is damaged"):
        run(rows=["zero-shot"])


# what it runs on


def test_domains_are_found_by_their_classes(tmp_path: Path) -> None:
    for domain in ("art", "photo"):
        make_folders(tmp_path / "sets" / domain, images=2)
    assert [path.name for path in find_domains(tmp_path / "sets")] == ["art", "photo"]
    assert find_domains(tmp_path / "sets" / "art") == [] and find_domains(tmp_path / "no such folder") == []
    make_folders(tmp_path / "sets" / "sketch", names=("cat", "cow"), images=2)
    assert find_domains(tmp_path / "sets") == []  # other classes: these are no domains of one dataset
    for part in ("train", "test"):
        make_folders(tmp_path / "parts" / part, images=2)
    assert find_domains(tmp_path / "parts") == []


def test_a_folder_of_domains_adds_streams_over_all_of_them(tmp_path: Path) -> None:
    for domain in ("art", "photo"):
        make_folders(tmp_path / "sets" / domain, images=5)
    experiment = find_experiment("streams")
    columns = find_columns(experiment, tmp_path / "sets")
    assert list(columns) == ["art", "photo"]
    plan = Plan(tmp_path / "out", load_encoder("tiny"), (1,), report=lambda line: None)
    result = run_experiment("streams", {"tiny": plan}, columns, ["zero-shot", "TDA"])
    assert result["columns"] == ["art", "photo", sources.ALL]
    assert [row["stream"] for row in result["rows"] if row["column"] == sources.ALL][::3] == list(SEVERAL)
    together = next(row for row in result["rows"] if row["stream"] == "domains mixed")
    assert together["images"] == 30
    assert "Text on art, photo: 'a photo of a {}.'." in streams.remarks(result)
    assert "Not run: '50 images' on art, photo: 50 of 15 images are all." in streams.remarks(result)


def test_every_row_that_remembers_is_in_the_table_and_slow_ones_run_on_request() -> None:
    from testtime.registry import method_class, method_names

    rows = find_experiment("streams").rows
    remembering = {name for name in method_names() if method_class(name).remembers}
    assert {row.method for row in rows} == remembering | {"zeroshot"}
    assert {row.text for row in rows} == {"given"}  # one task for all
    assert [row.label for row in selected(find_experiment("streams"), None) if row.invalid] == [
        *("DOTA", "MCP", "DLAE", "OGA")
    ]
    assert not any(row.invalid for row in selected(find_experiment("streams"), ["mcp"]))
    assert len(find_experiment("streams").seeds) == 20 and set(SEVERAL + SINGLE) == set(KINDS)


# the command


def test_the_command_runs_on_a_feature_file_without_an_encoder(cli, file: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("testtime.encoding.encoders.load_encoder", lambda *given: pytest.fail("loaded"))
    monkeypatch.setattr(sources, "SINGLE", ("Dirichlet 0.01", "open set 10%", "poisoned 10%"))
    out = tmp_path / "o"
    done: Outcome = cli("bench", "streams", file, "--row", "TDA", "--row", "zero-shot", "--seeds", "1,2", "-o", out)
    assert done.code == 0, done.err
    assert "Dirichlet 0.01" in done.out and "a long table, so listed only in streams.md" in " ".join(done.err.split())
    result = json.loads((out / "streams.json").read_text())
    assert result["facts"]["encoder"] == "mine" and result["facts"]["seeds"] == [1, 2]
    shown, html = (out / "streams.md").read_text(), (out / "streams.html").read_text()
    assert "| poisoned 10% |" in shown and "AUROC" in shown and "## Every score" in shown
    assert "Gap to zero-shot on each stream" in html and html.count("<svg") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["UNLABELLED"], "has no labels to score with"),
        (["FILE", "--encoder", "tiny"], "--encoder: "),
        (["FILE", "--descriptions", "FILE"], "--descriptions: "),
        (["FILE", "--views", "4"], "--views 4"),
        (["FILE", "--dry-run"], "has no estimate"),
        (["FILE", "--after", "3"], "--after"),
        (["FILE", "--foreign", "NARROW"], "holds features of size 16 from mine"),
        (["FILE", "--seeds", "1,1"], "each once"),
        (["ONE"], "No row of 'streams' could run. needs images of two or more classes"),
        ([], "give its folder"),
        (["nowhere.safetensors"], "nowhere.safetensors"),
    ],
)
def test_what_cannot_run_is_exit_code_two(arguments: list[str], message: str, cli, file: Path, tmp_path: Path) -> None:
    task, stream, _ = toy(views=1)
    paths = {
        "FILE": file,
        "UNLABELLED": write(tmp_path / "unlabelled.safetensors", labelled=False),
        "NARROW": write(tmp_path / "narrow.safetensors", dim=16),
        "ONE": save_features(
            tmp_path / "one.safetensors", stream, task.text, labels=torch.zeros(160, dtype=torch.long)
        ),
    }
    given = [paths.get(argument, argument) for argument in arguments]
    row = ["--row", "zero-shot"]
    done = cli("bench", "streams", *given, *row, "--out", tmp_path / "o")
    assert done.code == 2 and message in done.err.replace("\n", " "), done.err


def test_foreign_images_are_for_the_streams_alone(run: Run, file: Path, tmp_path: Path) -> None:
    plan = Plan(tmp_path, load_encoder("tiny"))
    with pytest.raises(InputError, match="leave out --foreign"):
        run_experiment("losses", {"tiny": plan}, {}, None, None, file)
    with pytest.raises(FeatureError):
        run(foreign=tmp_path / "none.safetensors", rows=["zero-shot"])

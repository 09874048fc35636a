"""The leaderboard: what it runs, that it resumes and adds only what is new, its files, and how they are verified."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
import torch
from conftest import Outcome
from small_data import make_folders

from testtime import load_encoder, registry, save_features, toy
from testtime.encoding.store import Features
from testtime.experiments import leaderboard, recipes, sources, submission
from testtime.experiments.lab import fingerprint, provenance
from testtime.experiments.leaderboard_tables import ALL, remarks, sheets, standings, write_board
from testtime.experiments.oracle import WEIGHTS
from testtime.experiments.plan import Plan
from testtime.experiments.scenarios import KINDS, Images, Stream, make_stream
from testtime.experiments.sources import SINGLE
from testtime.methods.tda import TDA
from testtime.metrics import accuracy
from testtime.session.session import Session
from testtime.types import InputError

KINDS_RUN = "shuffled,4 classes,open set 30%"
Cli = Callable[..., Outcome]


def write(path: Path, views: int = 1, **made: Any) -> Path:
    task, stream, labels = toy(classes=12, images=120, dim=48, views=views, **made)
    return save_features(
        path, stream, task.text, classnames=task.classnames, labels=labels, metadata={"encoder": "mine"}
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "toy.safetensors")


@pytest.fixture
def run(tmp_path: Path, file: Path, cli: Cli) -> Callable[..., dict[str, Any]]:
    """The command on a feature file, and the file that it writes."""

    def go(*more: object, out: str = "out", methods: str = "tda,dmn", data: Path = file) -> dict[str, Any]:
        folder = tmp_path / out
        done = cli(
            "leaderboard", data, "--methods", methods, "--streams", KINDS_RUN, "--orders", 3, "--out", folder, *more
        )
        assert done.code == 0, done.err
        return json.loads((folder / "leaderboard.json").read_text())

    return go


def entry(board: dict[str, Any], label: str, stream: str, track: str = "one-setting") -> dict[str, Any]:
    (found,) = (e for e in board["entries"] if (e["label"], e["stream"], e["track"]) == (label, stream, track))
    return found


def cells_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "cells").iterdir() if not path.name.startswith(".")}


# what is run


def test_a_board_has_the_labs_own_scores_of_each_method_and_stream(
    run, file: Path, tmp_path: Path, cli: Cli, monkeypatch
) -> None:
    board = run()
    assert [(e["label"], e["stream"]) for e in board["entries"]] == [
        (label, stream) for stream in KINDS_RUN.split(",") for label in ("zeroshot", "tda", "dmn")
    ]
    before = cells_in(tmp_path / "out")
    plan = Plan(tmp_path / "out", load_encoder("tiny"), (1, 2, 3), report=lambda line: None)
    (source,) = leaderboard.open_sources(plan, str(tmp_path / "toy.safetensors"))
    (cell,) = (each.cell for each in leaderboard.entries_of(plan, [source], ["tda"], ["4 classes"]))
    stored = json.loads((tmp_path / "out" / "cells" / leaderboard.streams.path_of(Path(), cell).name).read_text())
    mine = entry(board, "tda", "4 classes")
    for order, scores in zip(mine["scores"], stored["scores"], strict=True):
        assert order == {key: scores[key] for key in order}
    assert mine["settings"] == registry.settings_of(TDA()) and mine["made"] == 0
    assert (
        mine["milliseconds"] > 0
        and mine["state_bytes"] > 0
        and entry(board, "zeroshot", "shuffled")["state_bytes"] == 0
    )
    assert len(before) == 9
    # the stream lab finds the same cells in the folder, and runs only what the board has not
    monkeypatch.setattr(sources, "SINGLE", tuple(KINDS_RUN.split(",")))
    assert cli("bench", "streams", file, "--row", "TDA", "--seeds", "1,2,3", "--out", tmp_path / "out").code == 0
    added = cells_in(tmp_path / "out").items() - before.items()
    assert len(added) == 3 and all("guarded" in name for name, _ in added)


def test_a_new_method_adds_its_own_cells_and_leaves_the_others_alone(run, tmp_path: Path) -> None:
    first = run()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "cells").iterdir()}
    second = run(methods="tda,dmn,evidence")
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "cells").iterdir()}
    assert before.items() <= after.items() and len(after) == len(before) + 3
    assert all("evidence" in path.name for path in after.keys() - before.keys())
    kept = [e for e in second["entries"] if e["label"] != "evidence"]
    assert kept == first["entries"]


def test_tracks_are_the_authors_settings_where_there_are_any_and_the_oracle_if_asked_for(file: Path, tmp_path) -> None:
    plan = Plan(tmp_path, load_encoder("tiny"), (1,), report=lambda line: None)
    (source,) = leaderboard.open_sources(plan, str(file))
    known = source._replace(entry=recipes.recipe("dtd"))
    labels = ["zeroshot", "tda", "dmn", "dpe", "dpe:paper"]
    found = leaderboard.entries_of(plan, [source, known], labels, ["shuffled"], oracle=True)
    tracks = {(e.track, e.cell.row.label) for e in found if e.cell.source is known}
    assert tracks - {("one-setting", label) for label in labels} == {
        ("per-dataset", "tda"), ("per-dataset", "dpe"), ("oracle", "dmn"),
    }  # fmt: skip
    assert {e.track for e in found if e.cell.source is source} == {"one-setting", "oracle"}
    by_track = {e.track: e.cell.method for e in found if e.cell.source is known and e.cell.row.label == "tda"}
    assert by_track["one-setting"] == plan.method("tda", None)
    told = recipes.recipe("dtd").settings["tda"].items()
    assert told and all(getattr(by_track["per-dataset"], key) == value for key, value in told)
    assert any(getattr(by_track["one-setting"], key) != value for key, value in told)


def test_an_oracle_never_does_worse_than_any_fixed_weight(run) -> None:
    board = run("--oracle", methods="dmn")
    assert set(standings(board)) == {"one-setting", "oracle"}
    for stream in KINDS_RUN.split(","):
        told, fixed = entry(board, "dmn", stream, "oracle"), entry(board, "dmn", stream)
        assert fixed["settings"]["fusion_memory"] in WEIGHTS and told["method"].startswith("dmn (oracle")
        for best, plain in zip(told["scores"], fixed["scores"], strict=True):
            assert best["accuracy"] >= plain["accuracy"]


def test_slow_methods_and_those_that_need_views_are_left_out_and_named(monkeypatch) -> None:
    @dataclass(frozen=True)
    class Viewed(TDA):
        name: ClassVar[str] = "viewed"
        remembers: ClassVar[bool] = False
        assumes: ClassVar[tuple[str, ...]] = ("views",)

    monkeypatch.setitem(registry.METHODS.ours, "viewed", registry.Entry(Viewed))
    names, left_out = leaderboard.chosen_methods(None)
    assert names[0] == "zeroshot" and {"tda", "dpe", "evidence", "dmn"} <= set(names)
    assert {"tpt", "ctpt", "difftpt", "viewed"} <= left_out.keys() and not set(names) & left_out.keys()
    assert "views" in left_out["viewed"] and "prompt tuning" in left_out["tpt"]
    assert leaderboard.chosen_methods(["viewed"]) == (["zeroshot", "viewed"], {})
    names, left_out = leaderboard.chosen_methods(None, views=2)
    assert {"viewed", "zero", "tps", "mta"} <= set(names) and set(left_out) == {"tpt", "ctpt", "difftpt"}
    with pytest.raises(InputError, match="Did you mean 'tda'"):
        leaderboard.chosen_methods(["tdaa"])


def test_slow_methods_run_in_as_many_orders_as_fit_unless_they_are_named(
    run, cli: Cli, file, tmp_path, monkeypatch
) -> None:
    seconds = {"tda": 1500.0, "dmn": 1e6}
    monkeypatch.setattr(leaderboard, "chosen_methods", lambda names, views: (["zeroshot", "tda", "dmn"], {}))
    monkeypatch.setattr(leaderboard, "estimate", lambda plan, entries: seconds)
    call = "leaderboard", file, "--streams", "shuffled,4 classes", "--orders", 4, "--out", tmp_path / "slow"
    done = cli(*call)
    assert done.code == 0, done.err
    assert "tda: 2 orders; all 4 orders would take about 25 min here" in done.err and "Left out: dmn: " in done.err
    board = json.loads((tmp_path / "slow" / "leaderboard.json").read_text())
    assert {e["label"]: len(e["scores"]) for e in board["entries"]} == {"zeroshot": 4, "tda": 2}
    assert "277 h 47 min" in board["left_out"]["dmn"]
    assert "Orders of each stream: 4; fewer of tda 2." in remarks(board)
    rows = standings(board)["one-setting"][ALL]
    assert all(row["rank"] for row in rows) and {row["label"]: row["cells"] for row in rows} == {
        "zeroshot": 8,
        "tda": 4,
    }
    (lines,) = (sheet.rows for sheet in sheets(board) if "rank" in sheet.header)
    assert {line[0]: line[2].endswith(", 4 cells)") for line in lines} == {"zeroshot": False, "tda": True}
    # named, they run in all orders, and what was run is neither left out nor run again
    assert cli(*call, "--methods", "dmn").code == 0
    again = cli(*call)
    assert again.code == 0 and "dmn:" not in again.err and "Left out" not in again.err
    board = json.loads((tmp_path / "slow" / "leaderboard.json").read_text())
    assert {e["label"]: len(e["scores"]) for e in board["entries"]} == {"zeroshot": 4, "tda": 4, "dmn": 4}
    assert not board["left_out"]
    assert {len(e["scores"]) for e in run(methods="tda")["entries"]} == {3}


@pytest.mark.parametrize(("threads", "orders"), [(1, {"tda": 4, "dota": 0}), (2, {"tda": 4, "dota": 2}), (16, {})])
def test_fewer_orders_are_whole_rounds_of_the_cores(tmp_path: Path, monkeypatch, threads, orders) -> None:
    monkeypatch.setattr(leaderboard, "parallel_steppers", lambda device: threads)
    plan = Plan(tmp_path, load_encoder("tiny"), tuple(range(20)))
    found = leaderboard.affordable(plan, {"tda": 4000.0, "dpe": 60.0, "dota": 11000.0})
    assert found == (orders or {"tda": 0, "dota": 0})  # two rounds of 16: one takes longer than it may


def test_who_resumes_gets_the_same_number_of_orders(file: Path, tmp_path: Path, monkeypatch) -> None:
    plan = Plan(tmp_path, load_encoder("tiny"), (1, 2, 3), report=lambda line: None)
    (source,) = leaderboard.open_sources(plan, str(file))
    entries = leaderboard.entries_of(plan, [source], ["zeroshot", "tda"], ["shuffled"])
    first = leaderboard.estimate(plan, entries)
    monkeypatch.setattr(leaderboard, "_seconds", None)  # a second measurement would fail
    assert first and leaderboard.estimate(plan, entries) == first
    few = leaderboard.shortened(plan, entries, {"tda": 2, "zeroshot": 0})
    assert [(e.cell.row.label, e.cell.about["orders"]) for e in few] == [("tda", [1, 2])]
    assert leaderboard.estimate(plan, few)["tda"] < first["tda"]
    (scores,) = leaderboard.streams.run_cells(plan, [few[0].cell])
    assert [each["seed"] for each in scores] == [1, 2]
    assert leaderboard.estimate(plan, few) == {}  # what was run costs nothing
    # and is kept, whatever the number of orders is the next time
    for number in (0, 1, 3):
        assert leaderboard.shortened(plan, entries, {"tda": number, "zeroshot": 0}) == few


def test_methods_get_the_views_that_are_asked_for(run, cli: Cli, tmp_path: Path) -> None:
    file = write(tmp_path / "four.safetensors", views=4)
    board = run("--views", 4, methods="zero,tps", data=file)
    store = Features(file)
    views, assumed = store.read(0, len(store)), {e["label"]: e["assumes"] for e in board["entries"]}
    assert store.labels is not None and assumed["zero"] == ["views"]
    stream = make_stream("shuffled", Images(store.task(), views, store.labels), 1)
    assert isinstance(stream, Stream) and stream.views.shape == (120, 4, 48)
    for label in ("zero", "tps"):
        answers = Session(store.task(), label).scan(stream.views[stream.rows]).argmax(1)
        assert entry(board, label, "shuffled")["scores"][0]["accuracy"] == accuracy(answers, stream.labels)
    one = run(methods="tps", data=file, out="one")
    assert entry(one, "tps", "shuffled")["scores"] != entry(board, "tps", "shuffled")["scores"]
    both = submission.merge([("four", board), ("one", one)])
    assert set(submission.shown_names(both["sources"], both["sources"]).values()) == {"four", "four, 4 views"}
    assert remarks(both)[0].startswith("four, 4 views: 120 images, 12 classes, 4 views of each, encoder mine")
    # a file says how many views it is of
    written = tmp_path / "out" / "leaderboard.json"
    assert cli("leaderboard", "verify", written, "--tolerance", 0, "--out", tmp_path / "v").code == 0
    for option, words in ((["--views", 5], "has 4 of each image"), (["--augmix"], "leave it out")):
        refused = cli("leaderboard", file, *option, "--out", tmp_path / "more")
        assert refused.code == 2 and words in refused.err


def test_views_of_images_are_encoded(tmp_path: Path, cli: Cli) -> None:
    photos = make_folders(tmp_path / "photos")
    call = "leaderboard", photos, "--encoder", "tiny", "--methods", "zero", "--streams", "shuffled", "--orders", 2
    for option, shape in ((["--views", 3], (3, False)), (["--views", 3, "--augmix"], (3, True)), ([], (1, False))):
        assert cli(*call, *option, "--out", tmp_path / "out").code == 0
        board = submission.read(tmp_path / "out" / "leaderboard.json")
        assert [submission.views_of(each["about"]) for each in board["sources"].values()] == [shape]
    refused = cli(*call, "--augmix", "--out", tmp_path / "out")
    assert refused.code == 2 and "--views N" in refused.err


@pytest.mark.parametrize("stored", [True, False])
def test_copies_of_the_images_are_the_same_and_changed_ones_are_not(stored, file, tmp_path: Path, cli: Cli) -> None:
    given = file if stored else make_folders(tmp_path / "photos")
    out, encoder = tmp_path / "out", [] if stored else ["--encoder", "tiny"]
    call = "leaderboard", given, *encoder, "--methods", "tda", "--streams", "shuffled", "--orders", 1, "--out", out
    assert cli(*call).code == 0
    before = cells_in(out)
    there = tmp_path / "there" / given.name
    there.parent.mkdir()
    given.rename(there)  # and no longer where the file says
    files = [path for path in [there, *there.rglob("*")] if path.is_file()]
    for path in files:
        os.utime(path, ns=(0, 0))
    board = out / "leaderboard.json"
    again = cli("leaderboard", "verify", board, there, "--tolerance", 0, "--out", tmp_path / "v")
    assert again.code == 0 and "0 differ" in again.err, again.err
    assert cli("leaderboard", there, *call[2:]).code == 0 and cells_in(out) == before  # nothing was run again
    changed = files[0].read_bytes()
    files[0].write_bytes(changed[:-1] + bytes([changed[-1] ^ 1]))
    refused = cli("leaderboard", "verify", board, there, "--out", tmp_path / "v")
    assert refused.code == 2 and "is not what was submitted: it differs in data" in refused.err


def test_streams_are_one_of_a_kind_unless_named() -> None:
    assert set(leaderboard.chosen_streams(None)) < set(KINDS) and "attacker 5%" not in leaderboard.chosen_streams(None)
    assert leaderboard.chosen_streams(["all"]) == list(KINDS)
    assert leaderboard.chosen_streams(["burst", "burst"]) == ["burst"]
    with pytest.raises(InputError, match="Did you mean 'sorted'"):
        leaderboard.chosen_streams(["sortd"])


def test_an_estimate_counts_only_what_is_still_to_run(run, file: Path, tmp_path: Path, cli: Cli) -> None:
    call = (
        "leaderboard",
        file,
        "--methods",
        "tda",
        "--streams",
        "shuffled,sorted",
        "--orders",
        2,
        "--out",
        tmp_path / "e",
    )
    planned = cli(*call, "--dry-run")
    assert planned.code == 0 and "About " in planned.err and "tda" in planned.err
    assert not (tmp_path / "e" / "leaderboard.json").exists()
    assert "About " in cli(*call).err and "About " not in cli(*call).err


def test_a_stream_that_cannot_be_made_is_named(run) -> None:
    board = run("--streams", "shuffled,10% of classes")
    assert {each["stream"] for each in board["not_run"]} == {"10% of classes"}
    said = [line for line in remarks(board) if line.startswith("Not run")]
    reason = "10% of 12 classes are 1, and up to 4 are other streams"
    assert said == [f"Not run: '10% of classes' on toy: {reason}."]
    board["not_run"] = board["not_run"][1:2]
    assert f"Not run: '10% of classes' on toy (tda): {reason}." in remarks(board)


def test_domains_are_sources_of_their_own_and_together(tmp_path: Path, monkeypatch, file: Path) -> None:
    other = write(tmp_path / "other.safetensors", seed=1)
    plan = Plan(tmp_path / "d", load_encoder("tiny"), (1,), report=lambda line: None)
    found = sources.find_sources(plan, [sources.open_stored(file), sources.open_stored(other)])
    entries = leaderboard.entries_of(plan, found, ["tda"], leaderboard.STREAMS)
    together = [e.cell.kind for e in entries if e.cell.source.name == sources.ALL]
    assert together == ["domains in sequence", "domains mixed"]
    assert {e.cell.source.name for e in entries if e.cell.kind in SINGLE} == {"toy", "other"}


def test_two_sources_of_one_name_are_refused(file: Path, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "again").mkdir()
    other = write(tmp_path / "again" / "toy.safetensors", seed=1)
    done = cli(
        "leaderboard",
        file,
        other,
        "--methods",
        "zeroshot",
        "--streams",
        "shuffled",
        "--orders",
        1,
        "--out",
        tmp_path / "o",
    )
    assert done.code == 2 and "both have a source named 'toy'" in done.err and "leaderboard add" in done.err


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--orders", 0], "at least one"),
        (["--orders", 2, "--seeds", "1"], "one of the two"),
        (["--seeds", "1,1"], "each once"),
        (["--methods", "tpd"], "Unknown method"),
        (["--streams", "wild"], "Unknown stream"),
        (["--limit", 0], "at least one image"),
        (["--encoder", "tiny"], "have their own features"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(wrong, said, file: Path, tmp_path: Path, cli: Cli) -> None:
    done = cli("leaderboard", file, "--out", tmp_path / "o", *wrong)
    assert done.code == 2 and said in done.err and not (tmp_path / "o" / "cells").exists()


# resuming


def test_a_run_that_is_killed_resumes_to_the_same_cells(run, file: Path, tmp_path: Path) -> None:
    board = run(out="whole", methods="tda,dmn,dpe,evidence,mcp")
    call = [sys.executable, "-m", "testtime", "leaderboard", str(file), "--methods", "tda,dmn,dpe,evidence,mcp",
            "--streams", KINDS_RUN, "--orders", "3", "--out", str(tmp_path / "killed")]  # fmt: skip
    whole, kept = cells_in(tmp_path / "whole"), 0
    source = Path(submission.__file__).parents[2]
    for _ in range(2):
        process = subprocess.Popen(call, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                   env=os.environ | {"PYTHONPATH": str(source)})  # fmt: skip
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
            if (tmp_path / "killed" / "cells").is_dir() and len(cells_in(tmp_path / "killed")) > kept:
                process.send_signal(signal.SIGKILL)
                break
        process.wait()
        found = cells_in(tmp_path / "killed")
        assert found.items() <= whole.items() and kept < len(found)
        kept = len(found)
    again = run(out="killed", methods="tda,dmn,dpe,evidence,mcp")
    assert cells_in(tmp_path / "killed") == whole
    assert [e["scores"] for e in again["entries"]] == [e["scores"] for e in board["entries"]]


# its files


def test_a_submission_has_everything_to_repeat_it(run) -> None:
    board = run()
    (made,) = board["made"]
    assert {"version", "commit", "torch", "python", "machine"} <= made.keys() and made["machine"]
    ((identity, source),) = board["sources"].items()
    assert identity == fingerprint(source["about"]) and source["given"].endswith("toy.safetensors")
    assert {"data", "encoder", "images", "classes"} <= source["about"].keys()
    assert {e["source"] for e in board["entries"]} == {identity}
    assert [order["seed"] for order in board["entries"][0]["scores"]] == [1, 2, 3]


def test_the_files_agree_and_the_json_is_what_is_printed(run, tmp_path: Path, file: Path, cli: Cli) -> None:
    board = run()
    printed = json.loads(cli("leaderboard", file, "--methods", "tda,dmn", "--streams", KINDS_RUN, "--orders", 3,
                             "--out", tmp_path / "out", "--json").out)  # fmt: skip
    assert printed == board == submission.read(tmp_path / "out" / "leaderboard.json")
    text = (tmp_path / "out" / "leaderboard.md").read_text()
    page = (tmp_path / "out" / "leaderboard.html").read_text()
    for row in board["standings"]["one-setting"][ALL]:
        assert f"| {row['label']} |" in text and f"{100 * row['accuracy']:.2f}" in text
        assert f'data-value="{row["accuracy"]:.10g}"' in page
    assert "worst tenth of the cells" in text and "t intervals" in text


def test_boards_merge_by_method_stream_and_order(run, tmp_path: Path, cli: Cli) -> None:
    run(out="a", methods="tda")
    done = cli("leaderboard", tmp_path / "toy.safetensors", "--methods", "tda,dmn", "--streams", "shuffled",
               "--seeds", "3,4", "--out", tmp_path / "b")  # fmt: skip
    assert done.code == 0, done.err
    for name in ("a", "b", "a"):  # the last changes nothing
        done = cli("leaderboard", "add", tmp_path / name / "leaderboard.json", "--out", tmp_path / "both")
        assert done.code == 0, done.err
    board = submission.read(tmp_path / "both" / "leaderboard.json")
    assert [o["seed"] for o in entry(board, "tda", "shuffled")["scores"]] == [1, 2, 3, 4]
    assert [o["seed"] for o in entry(board, "dmn", "shuffled")["scores"]] == [3, 4]
    assert len(board["entries"]) == 7 and len(board["made"]) == 1 and len(board["sources"]) == 1
    rows = {row["label"]: row for row in board["standings"]["one-setting"][ALL]}
    assert rows["tda"]["rank"] == 1 or rows["zeroshot"]["rank"] == 1
    assert rows["dmn"]["rank"] is None and not rows["dmn"]["whole"]


def test_boards_that_contradict_one_another_do_not_merge(run) -> None:
    board = run()
    for change, said in ((("scores", 0, "accuracy"), "other scores"), (("settings", "alpha"), "other settings")):
        other = json.loads(json.dumps(board))
        place = entry(other, "tda", "shuffled")
        for key in change[:-1]:
            place = place[key]
        place[change[-1]] = 0.5
        with pytest.raises(InputError, match=f"yours: tda on 'shuffled' .one setting.*{said}"):
            submission.merge([("mine", board), ("yours", other)])


def damage(board: dict[str, Any], how: str) -> None:
    first = board["entries"][0]
    match how:
        case "format":
            board["format"] = "something else"
        case "no entries":
            del board["entries"]
        case "track":
            first["track"] = "best"
        case "score":
            first["scores"][0]["accuracy"] = 1.5
        case "part of an image":
            first["scores"][0]["accuracy"] = 0.5001
        case "nan":
            first["scores"][0]["calibration_error"] = float("nan")
        case "seed twice":
            first["scores"][1]["seed"] = first["scores"][0]["seed"]
        case "source":
            first["source"] = "elsewhere"
        case "identity":
            next(iter(board["sources"].values()))["about"]["images"] = 7
        case "entry twice":
            board["entries"].append(first)
        case "run":
            first["made"] = -1
        case "reason":
            board["left_out"] = {"tda": 3}
        case "package":
            del first["package"]
        case "name":
            first["label"] = "x" * 1000


DAMAGE = (
    "format|no entries|track|score|part of an image|nan|seed twice|source|identity|entry twice|run|reason|package|name"
)


@pytest.mark.parametrize("how", DAMAGE.split("|"))
def test_a_malformed_file_is_refused_with_exit_code_2(how, tmp_path: Path, cli: Cli, made_board) -> None:
    board = json.loads(made_board.read_text())
    damage(board, how)
    (tmp_path / "wrong.json").write_text(json.dumps(board))
    for command in (["verify", tmp_path / "wrong.json"], ["add", tmp_path / "wrong.json", "--out", tmp_path / "o"]):
        done = cli("leaderboard", *command)
        assert done.code == 2 and "wrong.json" in done.err and not (tmp_path / "o" / "leaderboard.html").exists()


@pytest.fixture(scope="module")
def made_board(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A board of a feature file beside it."""
    folder = tmp_path_factory.mktemp("board")
    plan = Plan(folder, load_encoder("tiny"), (1, 2), report=lambda line: None)
    given = str(write(folder / "toy.safetensors"))
    found = leaderboard.open_sources(plan, given)
    entries = leaderboard.entries_of(plan, found, ["zeroshot", "tda"], ["shuffled", "4 classes"])
    board = leaderboard.run(plan, [(given, found)], entries)
    (folder / "leaderboard.json").write_text(json.dumps(board))
    return folder / "leaderboard.json"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": "testtime leaderboard 1"}', "[" * 100_000])
def test_what_is_no_board_is_refused(text, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "wrong.json").write_text(text)
    assert cli("leaderboard", "verify", tmp_path / "wrong.json").code == 2


# verifying


def test_an_honest_board_is_repeated_to_the_same_bits(made_board: Path, tmp_path: Path, cli: Cli) -> None:
    done = cli("leaderboard", "verify", made_board, "--cells", 6, "--tolerance", 0, "--json", "--out", tmp_path)
    assert done.code == 0, done.err
    said = json.loads(done.out)
    assert len(said["cells"]) == 6 and said["differ"] == 0 and "0 differ" in done.err


def forged(path: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], *labels: str) -> Path:
    board = json.loads(path.read_text())
    for each in board["entries"]:
        if each["label"] in (labels or ("tda",)):
            change(each)
    (tmp_path / "forged.json").write_text(json.dumps(board))
    return tmp_path / "forged.json"


def test_a_forged_score_is_found(made_board: Path, tmp_path: Path, cli: Cli) -> None:
    def better(each: dict[str, Any]) -> None:
        order = each["scores"][1]
        order["accuracy"] = (round(order["accuracy"] * order["images"]) - 3) / order["images"]

    file = forged(made_board, tmp_path, better)
    done = cli("leaderboard", "verify", file, "--cells", 8, "--json", "--out", tmp_path)
    assert done.code == 1 and "DIFFERS: accuracy was" in done.err
    wrong = [(each["label"], each["seed"]) for each in json.loads(done.out)["cells"] if each["problem"]]
    assert wrong == [("tda", 2)] * 2


def test_settings_other_than_the_tracks_are_found(made_board: Path, tmp_path: Path, cli: Cli) -> None:
    file = forged(made_board, tmp_path, lambda each: each["settings"].update(alpha=9.0))
    done = cli("leaderboard", "verify", file, "--cells", 8, "--out", tmp_path)
    assert done.code == 1 and "settings are not those of the track 'one-setting': alpha" in done.err
    file = forged(made_board, tmp_path, lambda each: each.update(track="per-dataset"))
    done = cli("leaderboard", "verify", file, "--cells", 8, "--out", tmp_path)
    assert done.code == 1 and "has no track 'per-dataset'" in done.err


def test_assumptions_that_are_kept_silent_are_found(made_board: Path, tmp_path: Path, cli: Cli) -> None:
    file = forged(made_board, tmp_path, lambda each: each.update(assumes=["batch"]), "zeroshot")
    done = cli("leaderboard", "verify", file, "--cells", 8, "--out", tmp_path)
    assert done.code == 1 and "zeroshot, order 1: DIFFERS: it assumes nothing, and not batch" in done.err


def test_a_baseline_that_is_lowered_for_one_method_is_refused(made_board: Path, tmp_path: Path, cli: Cli) -> None:
    def lower(each: dict[str, Any]) -> None:
        order = each["scores"][0]
        order["zero_shot"] = (round(order["zero_shot"] * order["images"]) - 2) / order["images"]

    file = forged(made_board, tmp_path, lower)
    for command in (["verify", file], ["add", file, "--out", tmp_path / "o"]):
        done = cli("leaderboard", *command)
        assert done.code == 2 and "order 1, is not the same beside zeroshot and beside tda" in done.err
    # nor in a file of its own, which says nothing of the other methods
    alone = json.loads(file.read_text())
    alone["entries"] = [each for each in alone["entries"] if each["label"] == "tda"]
    file.write_text(json.dumps(alone))
    done = cli("leaderboard", "add", made_board, file, "--out", tmp_path / "o")
    assert done.code == 2 and "has other scores than on the board" in done.err
    alone["entries"] = [each | {"label": "tda:mine"} for each in alone["entries"]]
    file.write_text(json.dumps(alone))
    done = cli("leaderboard", "add", made_board, file, "--out", tmp_path / "o")
    assert done.code == 2 and "beside zeroshot and beside tda:mine" in done.err


def test_times_of_several_machines_have_no_mean(made_board: Path) -> None:
    board = submission.read(made_board)
    assert all(row["milliseconds"] is not None for row in standings(board)["one-setting"][ALL])
    board["made"].append(board["made"][0] | {"machine": "A Fast One"})
    moved = [each for each in board["entries"] if each["label"] == "tda"][0]
    moved["made"] = 1
    choices = standings(board)["one-setting"]
    assert {row["label"]: row["milliseconds"] is None for row in choices[ALL]}["tda"]
    alone = {row["label"]: row for row in choices[f"stream: {moved['stream']}"]}
    assert alone["tda"]["milliseconds"] == moved["milliseconds"]


def test_times_of_a_gpu_are_said_to_be_its(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A Fast One")
    assert submission.made(torch.device("cuda"))["machine"].startswith("A Fast One; ")
    assert provenance(torch.device("cuda"))["machine"].startswith("A Fast One; ")
    assert "A Fast One" not in submission.made(torch.device("cpu"))["machine"]


def test_orders_that_may_have_been_chosen_are_named(made_board: Path, tmp_path: Path) -> None:
    def choose(each: dict[str, Any]) -> None:
        each["scores"][1]["seed"] = 7

    told = "Not the first orders, which may have been chosen by their scores: tda."
    assert told in remarks(submission.read(forged(made_board, tmp_path, choose)))
    assert told not in remarks(submission.read(made_board))


def test_a_method_that_is_not_installed_is_named_with_its_package(made_board: Path, tmp_path: Path, cli: Cli) -> None:
    file = forged(made_board, tmp_path, lambda each: each.update(label="mine", package="my-package 1.0"))
    done = cli("leaderboard", "verify", file, "--cells", 8, "--out", tmp_path)
    assert done.code == 2 and "'mine' is of the package my-package 1.0; install it" in done.err


def test_other_images_are_no_verification(made_board: Path, tmp_path: Path, cli: Cli) -> None:
    other = write(tmp_path / "toy.safetensors", seed=3)
    done = cli("leaderboard", "verify", made_board, other, "--out", tmp_path)
    assert done.code == 2 and "'toy' is not what was submitted: it differs in data" in done.err
    done = cli("leaderboard", "verify", made_board, write(tmp_path / "else.safetensors"), "--out", tmp_path)
    assert done.code == 2 and "was not found" in done.err


def test_the_sample_depends_on_its_seed_alone(made_board: Path) -> None:
    from testtime.experiments.verification import sample

    board = submission.read(made_board)
    drawn = [[(e["label"], e["stream"], o["seed"]) for e, o in sample(board, 3, seed)] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2] and len(sample(board, 99, 0)) == 8


def test_a_table_says_what_a_method_assumes_and_where_it_is_from(made_board: Path, tmp_path: Path) -> None:
    file = forged(made_board, tmp_path, lambda each: each.update(assumes=["stream length"], package="mine 1.0"))
    (sheet, by_stream) = sheets(submission.read(file))
    (row,) = (row for row in sheet.rows if row[0] == "tda")
    assert row[sheet.header.index("assumes")] == "stream length" and by_stream.header == [
        "method",
        "shuffled",
        "4 classes",
    ]


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something is in plain data, everything in it included."""
    if place:
        yield place
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside:
        yield from places(part, (*place, key))


def test_a_file_damaged_at_random_is_refused_or_shown(made_board: Path, tmp_path: Path) -> None:
    text, draw = made_board.read_text(), Random(0)
    values = [None, True, -1, 0, 3, 1e308, math.nan, "", "x" * 300, "<script>alert(1)</script>", [], {}, [1], {"a": 1}]
    everywhere, refused = list(places(json.loads(text))), 0
    for _ in range(200):
        board = json.loads(text)
        *above, last = draw.choice(everywhere)
        part = board
        for key in above:
            part = part[key]
        if draw.random() < 0.3:
            del part[last]
        else:
            part[last] = draw.choice(values)
        (tmp_path / "odd.json").write_text(json.dumps(board))
        try:
            found = submission.merge([("odd", submission.read(tmp_path / "odd.json"))])
            if found["entries"]:
                write_board(tmp_path, found)
                assert "<script>alert" not in (tmp_path / "leaderboard.html").read_text()
        except InputError:
            refused += 1
    assert 100 < refused < 200

"""Logs of a run: what is in them, and that nothing that happens to them happens to the run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from small_data import make_folders
from test_interrupts import stop_at

import testtime as tt
from testtime.session import logs
from testtime.session.logs import check_logs, open_log
from testtime.types import InputError, MissingPart, Prediction

IMAGES = 230  # more than the window


def toy(images: int = IMAGES, **options: Any) -> tuple[tt.Session, Any, list[int]]:
    task, stream, labels = tt.toy(classes=6, dim=16, images=images, views=2)
    return tt.Session(task, "dpe", **options), stream, labels.tolist()


def read(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a log of JSON lines says once, and its points."""
    first, *points = [json.loads(line) for line in file.read_text().splitlines()]
    return first["about"], points


def mean(values: Any) -> float:
    found = list(values)
    return round(sum(found) / len(found), 6)


def expected(answers: list[Prediction], labels: list[int | None]) -> dict[str, float]:
    """The same values, computed from the answers in one go."""
    values: dict[str, list[float]] = {
        "accuracy": [a.index == y for a, y in zip(answers, labels, strict=True) if y is not None],
        "zero_shot_accuracy": [a.zero_shot_index == y for a, y in zip(answers, labels, strict=True) if y is not None],
        "learned": [a.learned for a in answers],
        "changed": [a.label != a.zero_shot for a in answers],
        "confidence": [a.confidence for a in answers],
        "zero_shot_confidence": [a.zero_shot_confidence for a in answers],
        "entropy": [a.entropy for a in answers],
    }
    every = {f"all/{name}": mean(row) for name, row in values.items() if row}
    return every | {f"last_200/{name}": mean(row[-200:]) for name, row in values.items() if row}


def test_points_hold_means_over_all_images_and_over_the_last_200(tmp_path) -> None:
    session, stream, labels = toy()
    given = [label if number % 3 else None for number, label in enumerate(labels)]
    with open_log(f"jsonl:{tmp_path}/log", session, given, every=100) as log:
        assert log in session.observers
        answers = [answer for _, answer in session.run(stream)]
    assert log not in session.observers
    about, points = read(tmp_path / "log")
    assert [point["step"] for point in points] == [100, 200, 230]
    for point in points:
        values = expected(answers[: point["step"]], given[: point["step"]])
        assert {name: point[name] for name in values} == pytest.approx(values, abs=2e-6)
        assert point["all/skipped"] == 0 and point["all/milliseconds"] > 0 and point["last_200/milliseconds"] > 0
    assert points[-1]["all/entropy"] != points[-1]["last_200/entropy"]
    assert about["method"] == "dpe" and about["settings"]["alpha"] == session.method.alpha  # type: ignore[attr-defined]
    assert about["classnames"] == list(session.task.classnames) and about["versions"]["testtime"] == tt.__version__


def test_without_labels_there_are_no_accuracies_and_no_end_to_the_stream(tmp_path) -> None:
    session, stream, _ = toy(images=50)
    with open_log(f"{tmp_path}/log.jsonl", session):
        for views in stream:
            session.step(views)
    _, points = read(tmp_path / "log.jsonl")
    assert [point["step"] for point in points] == [20, 40, 50]
    assert not any("accuracy" in name for point in points for name in point) and "all/entropy" in points[0]


@pytest.mark.parametrize("images, most", [(7, 7), (999, 501), (1100, 501)])
def test_a_run_has_a_bounded_number_of_points(tmp_path, images, most) -> None:
    session, stream, labels = toy(images=images)
    with open_log(f"jsonl:{tmp_path}/log", session, labels):
        for _ in session.run(stream):
            pass
    points = read(tmp_path / "log")[1]
    assert len(points) <= most and points[-1]["step"] == images


def test_a_log_changes_no_answer(tmp_path) -> None:
    session, stream, labels = toy()
    plain = [answer.logits for _, answer in toy()[0].run(stream)]
    with open_log(f"jsonl:{tmp_path}/log", session, labels):
        logged = [answer.logits for _, answer in session.run(stream)]
    assert all((a == b).all() for a, b in zip(plain, logged, strict=True))


# TensorBoard


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """All curves in a folder, read as TensorBoard reads them."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_reads_the_same_points(tmp_path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    session, stream, labels = toy()
    with (
        open_log(f"tensorboard:{tmp_path}/runs/1", session, labels, every=50),
        open_log(f"jsonl:{tmp_path}/log", session, labels, every=50),
    ):
        for _ in session.run(stream):
            pass
    about, points = read(tmp_path / "log")
    curves = scalars(tmp_path / "runs" / "1")
    for name in points[-1]:
        if name != "step" and "milliseconds" not in name:
            assert curves[name] == [(point["step"], pytest.approx(point[name])) for point in points]
    events = EventAccumulator(str(tmp_path / "runs" / "1"))
    events.Reload()
    (text,) = events.Tensors("about/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert json.loads(shown.removeprefix("```").removesuffix("```")) == about


@pytest.mark.parametrize("kind", ["jsonl", "tensorboard"])
def test_a_resumed_session_continues_the_numbers_and_drops_points_that_its_state_has_not_seen(tmp_path, kind) -> None:
    """A run is killed after image 130; its state is of image 100."""
    spec = f"{kind}:{tmp_path}/log"
    session, stream, labels = toy()
    with open_log(spec, session, labels, every=10):
        for views in stream[:100]:
            session.step(views)
        state = session.save(tmp_path / "s.safetensors")
        for views in stream[100:130]:
            session.step(views)
    if kind == "jsonl":
        with open(tmp_path / "log", "ab") as file:
            file.write(b'{"step": 14')
    resumed = tt.Session.load(state)
    with open_log(spec, resumed, labels[100:], every=40):
        for views in stream[100:]:
            resumed.step(views)
    if kind == "jsonl":
        entries = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
        assert [entry["about"]["seen"] for entry in entries if "about" in entry] == [0, 100]
        steps = [entry["step"] for entry in entries if "step" in entry]
    else:
        steps = [step for step, _ in scalars(tmp_path / "log")["all/accuracy"]]
    assert steps == [*range(10, 101, 10), 120, 160, 200, 230]


def test_a_new_run_replaces_an_old_log(tmp_path) -> None:
    for images in (60, 40):
        session, stream, labels = toy(images=images)
        with open_log(f"jsonl:{tmp_path}/log", session, labels, every=20):
            for _ in session.run(stream):
                pass
    assert [point["step"] for point in read(tmp_path / "log")[1]] == [20, 40]


# Weights & Biases


class Wandb(ModuleType):
    """A stand-in for the package that keeps what it is given."""

    class UsageError(Exception):
        pass

    Settings = SimpleNamespace
    __file__ = "wandb/__init__.py"

    def __init__(self, problem: Exception | None = None) -> None:
        super().__init__("wandb")
        self.problem = problem
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished: list[int] = []

    def init(self, **options: Any) -> Any:
        self.options = options
        if self.problem:
            raise self.problem
        return SimpleNamespace(
            log=lambda values, step: self.logged.append((step, values)),
            finish=lambda exit_code: self.finished.append(exit_code),
        )


@pytest.mark.parametrize(
    "spec, project, mode",
    [("wandb", "testtime", None), ("wandb:pets", "pets", None), ("wandb-offline:pets", "pets", "offline")],
)
def test_wandb_gets_the_settings_once_and_the_points_by_image_number(monkeypatch, spec, project, mode) -> None:
    fake = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    session, stream, labels = toy(images=40)
    with open_log(spec, session, labels, every=15):
        for _ in session.run(stream):
            pass
    assert (fake.options["project"], fake.options["mode"]) == (project, mode)
    assert fake.options["config"]["method"] == "dpe" and fake.options["settings"].console == "off"
    assert [step for step, _ in fake.logged] == [15, 30, 40] and fake.finished == [0]


def test_wandb_is_told_that_a_run_failed(monkeypatch) -> None:
    fake = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    session, stream, labels = toy(images=40)
    with pytest.raises(RuntimeError), open_log("wandb", session, labels, every=15):
        session.step(stream[0])
        raise RuntimeError
    assert [step for step, _ in fake.logged] == [1] and fake.finished == [1]


def test_wandb_without_a_key_is_refused_before_the_run_and_without_a_network_left_out(monkeypatch) -> None:
    session, stream, labels = toy(images=40)
    monkeypatch.setitem(sys.modules, "wandb", Wandb(Wandb.UsageError("no API key configured")))
    with pytest.raises(InputError, match="no API key configured.*wandb-offline"):
        open_log("wandb", session, labels)
    monkeypatch.setitem(sys.modules, "wandb", Wandb(ConnectionError("no route to host")))
    lines: list[str] = []
    with open_log("wandb", session, labels, on_failure=lines.append):
        assert sum(1 for _ in session.run(stream)) == 40
    assert len(lines) == 1 and "no route to host" in lines[0] and "goes on" in lines[0]


OFFLINE = """
import testtime as tt
from testtime.session.logs import open_log
task, stream, labels = tt.toy(classes=6, dim=16, images=30, views=2)
session = tt.Session(task, "tda")
with open_log("wandb-offline:pets", session, labels.tolist(), every=10, on_failure=print):
    for _ in session.run(stream):
        pass
"""


def test_wandb_itself_writes_a_run_offline_with_no_network(tmp_path) -> None:
    pytest.importorskip("wandb")
    apart = ["unshare", "-rn"]  # a network of its own with nothing in it
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], capture_output=True).returncode:
        apart = []
    own = {"WANDB_DIR": str(tmp_path), "WANDB_CACHE_DIR": str(tmp_path / "c"), "WANDB_CONFIG_DIR": str(tmp_path / "d")}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")} | own
    done = subprocess.run(
        [*apart, sys.executable, "-c", OFFLINE], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0 and done.stdout == "", done.stderr
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    content = file.read_bytes()
    for word in ("all/accuracy", "last_200/zero_shot_accuracy", "all/milliseconds", "tda", "class 5", "pets"):
        assert word.encode() in content


# What goes wrong


@pytest.mark.parametrize("when", ["write", "close"])
def test_a_log_that_fails_is_reported_once_and_the_run_goes_on(tmp_path, monkeypatch, when) -> None:
    def full(writer: Any, *_: object) -> None:
        if when == "close":
            writer._stack.close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(logs._JsonLines, when, full)
    session, stream, labels = toy()
    lines: list[str] = []
    with open_log(f"jsonl:{tmp_path}/log", session, labels, every=10, on_failure=lines.append):
        assert sum(1 for _ in session.run(stream)) == IMAGES
    (line,) = lines
    assert f"jsonl:{tmp_path}/log" in line and "No space left on device" in line and "\n" not in line
    assert session.count == IMAGES


def test_in_python_a_failure_is_a_warning(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(logs._JsonLines, "write", lambda *_: 1 / 0)
    session, stream, labels = toy(images=4)
    with pytest.warns(RuntimeWarning, match="goes on without it"), open_log(f"{tmp_path}/a.jsonl", session, labels):
        session.step(stream[0])


def test_a_full_disk_loses_nothing_but_the_log(tmp_path) -> None:
    """A file may grow to a few kilobytes, and no further."""
    script = """
import resource, signal, sys
import testtime as tt
from testtime.session.logs import open_log
task, stream, labels = tt.toy(classes=6, dim=16, images=90, views=2)
session, lines = tt.Session(task, "dpe"), []
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
with open_log(sys.argv[1], session, labels.tolist(), on_failure=lines.append):
    for _ in session.run(stream):
        pass
print(session.count, len(lines), lines[0])
"""
    for spec in (f"jsonl:{tmp_path}/log", f"tensorboard:{tmp_path}/runs"):
        if spec.startswith("tensorboard"):
            pytest.importorskip("tensorboard")
        done = subprocess.run([sys.executable, "-c", script, spec], capture_output=True, text=True, check=True)
        assert done.stdout.startswith("90 1 The log ") and "File too large" in done.stdout, done
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "spec, part",
    [
        ("tensorbord:x", "tensorboard:FOLDER"),
        ("runs", "jsonl:FILE"),
        ("", "jsonl:FILE"),
        ("tensorboard", "tensorboard:runs/1"),
        ("jsonl:", "jsonl:log.jsonl"),
    ],
)
def test_unknown_logs_are_refused_with_what_to_write(spec, part) -> None:
    with pytest.raises(InputError, match=part):
        check_logs([spec])
    with pytest.raises(InputError, match=part):
        open_log(spec, toy()[0])


def test_places_that_cannot_be_written_are_refused(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    for spec in (f"jsonl:{tmp_path}", f"tensorboard:{tmp_path}/file", f"jsonl:{tmp_path}/file/log"):
        with pytest.raises(InputError, match="Cannot write"):
            check_logs([spec])
        with pytest.raises(InputError, match="Cannot write"):
            open_log(spec, toy()[0])
    with pytest.raises(InputError, match="twice"):
        check_logs([f"jsonl:{tmp_path}/log"] * 2)


def test_a_file_that_is_no_log_is_not_continued(tmp_path) -> None:
    session, stream, _ = toy()
    session.step(stream[0])
    (tmp_path / "notes").write_text("my notes\n")
    with pytest.raises(InputError, match="not JSON"):
        open_log(f"jsonl:{tmp_path}/notes", session)
    assert (tmp_path / "notes").read_text() == "my notes\n"


# The command


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_folders(tmp_path / "photos", images=4)


def test_run_writes_every_log_and_skipped_images_count(cli, photos, tmp_path) -> None:
    (photos / "dog" / "1.png").write_text("no image")
    log, runs, rows = tmp_path / "log.jsonl", tmp_path / "runs", tmp_path / "rows.csv"
    done = cli("run", photos, "-e", "tiny", "--out", rows, "--json", "--log", log, "--log", f"tensorboard:{runs}")
    assert done.code == 0
    summary = json.loads(done.err.splitlines()[-1])
    about, points = read(log)
    assert about["encoder"] == "tiny" and about["classnames"] == ["cat", "dog", "fox"]
    assert points[-1]["step"] == 12 and points[-1]["all/skipped"] == 1
    assert points[-1]["all/accuracy"] == pytest.approx(summary["accuracy"], abs=1e-6)
    assert scalars(runs)["all/zero_shot_accuracy"][-1] == (12, pytest.approx(summary["zero_shot_accuracy"], abs=1e-6))


def test_an_interrupted_run_closes_its_logs_and_a_resumed_one_continues_them(
    cli, photos, tmp_path, monkeypatch
) -> None:
    fake = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log, state = tmp_path / "log.jsonl", tmp_path / "s.safetensors"
    run = ["run", photos, "-e", "tiny", "--out", tmp_path / "r.csv", "--save", state, "--log", log, "--log", "wandb"]
    with monkeypatch.context() as patch:
        stop_at(patch, tt.Session, "_advance", 6)
        assert cli(*run).code == 130
    assert read(log)[1][-1]["step"] == 5 and fake.logged[-1][0] == 5 and len(fake.finished) == 1
    assert not (tmp_path / ".log.jsonl.lock").exists()
    assert cli(*run, "--resume", state).code == 0
    steps = [entry["step"] for line in log.read_text().splitlines() if "step" in (entry := json.loads(line))]
    assert steps == list(range(1, 13)) and [step for step, _ in fake.logged] == steps and len(fake.finished) == 2


def test_a_strict_run_that_stops_closes_its_logs(cli, photos, tmp_path) -> None:
    (photos / "dog" / "1.png").write_text("no image")
    log = tmp_path / "log.jsonl"
    assert cli("run", photos, "-e", "tiny", "--out", tmp_path / "r.csv", "--strict", "--log", log).code == 2
    assert [point["step"] for point in read(log)[1]] == [1, 2, 3, 4, 5]


def test_a_log_that_fails_does_not_fail_the_command(cli, photos, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(logs._JsonLines, "write", lambda *_: 1 / 0)
    rows = tmp_path / "rows.csv"
    done = cli("run", photos, "-e", "tiny", "--out", rows, "--log", tmp_path / "log.jsonl")
    assert done.code == 0 and len(rows.read_text().splitlines()) == 13
    assert done.err.count("goes on without it") == 1


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_before_the_encoder_is_loaded(cli, photos, tmp_path, monkeypatch, kind) -> None:
    monkeypatch.setitem(sys.modules, kind, None)
    monkeypatch.setattr("testtime.encoding.encoders.load_encoder", lambda *_: pytest.fail("the encoder was loaded"))
    spec = kind if kind == "wandb" else f"{kind}:{tmp_path}/runs"
    done = cli("run", photos, "-e", "tiny", "--out", tmp_path / "r.csv", "--log", spec)
    assert done.code == 2 and f"pip install 'testtime[{kind}]'" in done.err


def test_a_folder_named_like_the_package_is_not_the_package(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))  # as a folder without __init__.py is imported
    with pytest.raises(MissingPart, match="pip install"):
        check_logs(["wandb"])


@pytest.mark.parametrize("option", ["--out", "--save", "--report"])
def test_a_log_never_goes_to_another_output(cli, photos, tmp_path, option) -> None:
    done = cli("run", photos, "-e", "tiny", option, tmp_path / "x.csv", "--log", f"jsonl:{tmp_path}/x.csv")
    assert done.code == 2 and "are the same file" in done.err


def test_a_log_never_overwrites_an_input(cli, photos, tmp_path) -> None:
    names = tmp_path / "names.txt"
    names.write_text("cat\ndog\nfox\n")
    done = cli("run", photos, "-e", "tiny", "--classes-file", names, "--log", f"jsonl:{names}")
    assert done.code == 2 and "would overwrite" in done.err and names.read_text().startswith("cat")

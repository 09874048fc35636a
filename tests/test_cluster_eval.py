"""Cells on a Ray cluster of two nodes: the same bytes as here, resumed in either way, and the same errors."""

from __future__ import annotations

import gc
import json
import os
import pickle
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome
from small_data import make_folders

from testtime import load_encoder, save_features, toy
from testtime.cli.live import Jobs
from testtime.datasets import open_dataset
from testtime.encoding.store import Features
from testtime.experiments import cells
from testtime.experiments.cells import run_cells
from testtime.experiments.jobs import Executor, Job, Place, Where, in_order
from testtime.experiments.lab import Cell, Lab
from testtime.experiments.plan import Plan
from testtime.experiments.scores import evaluate
from testtime.methods.dmn import DMN
from testtime.methods.dpe import DPE
from testtime.methods.tda import TDA
from testtime.methods.zeroshot import ZeroShot
from testtime.types import InputError, MissingPart

ray = pytest.importorskip("ray")
Cli = Callable[..., Outcome]
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # Ray's own
METHODS = "zeroshot,tda,dpe,tpt"


@contextmanager
def rays_own_sockets() -> Iterator[None]:
    """Collect the sockets that Ray leaves open as it looks for free ports, without their warnings, errors here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two nodes of one CPU each, and this process connected to them."""
    from ray import cloudpickle
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    with rays_own_sockets():
        nodes = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
        nodes.add_node(**node)
        ray.init(address=nodes.address, log_to_driver=False, configure_logging=False)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    with rays_own_sockets():
        ray.shutdown()
        nodes.shutdown()


@pytest.fixture
def executor(cluster: None) -> Executor:
    from testtime.cluster.jobs import on_ray

    return on_ray(Jobs)


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    return make_folders(tmp_path / "pets")


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(tmp_path / "out", load_encoder("tiny"), (1, 2), report=lambda line: None)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    task, stream, labels = toy(classes=12, images=120, dim=48, views=1)
    named = {"classnames": task.classnames, "labels": labels, "metadata": {"encoder": "mine"}}
    return save_features(tmp_path / "toy.safetensors", stream, task.text, **named)


def cells_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "cells").iterdir() if not path.name.startswith(".")}


def both(cli: Cli, folder: Path, *words: object) -> tuple[Path, Path]:
    """The folders of a command that was run here, and on the cluster; both have the same cells."""
    here, there = folder / "here", folder / "there"
    for out, on in ((here, ()), (there, ("--on", "ray"))):
        done = cli(*words, "--out", out, *on)
        assert done.code == 0, done.err
        assert (" finished: " in done.err) == bool(on)
    assert cells_in(there) == cells_in(here)
    return here, there


def without_times(data: Any) -> Any:
    """Plain data without what differs from run to run, at any depth."""
    if isinstance(data, list):
        return [without_times(each) for each in data]
    if not isinstance(data, dict):
        return data
    return {key: without_times(each) for key, each in data.items() if key not in ("milliseconds", "machine", "made")}


# the same as here


def test_an_evaluation_has_the_same_bytes(cluster: None, cli: Cli, pets: Path, tmp_path: Path) -> None:
    here, there = both(cli, tmp_path, "eval", pets, "-e", "tiny", "-m", METHODS, "--seeds", "1,2", "--views", 2)
    assert len(cells_in(there)) == 8
    for name in ("results.json", "results.md"):
        assert (there / name).read_bytes() == (here / name).read_bytes()


def test_settings_that_run_side_by_side_have_the_same_bytes(
    cluster: None, cli: Cli, pets: Path, tmp_path: Path
) -> None:
    here, there = both(cli, tmp_path, "bench", "components", pets, "-e", "tiny", "--seeds", "1")
    assert (there / "components.json").read_bytes() == (here / "components.json").read_bytes()


def test_a_leaderboard_has_the_same_scores_and_is_repeated_there(
    cluster: None, cli: Cli, file: Path, tmp_path: Path
) -> None:
    streams = "shuffled,10% of classes,open set 30%"
    words = ("leaderboard", file, "--methods", "tda,dmn", "--streams", streams, "--orders", 2, "--oracle")
    boards = [json.loads((out / "leaderboard.json").read_text()) for out in both(cli, tmp_path, *words)]
    for board in boards:
        assert all(entry["milliseconds"] > 0 for entry in board["entries"])
    assert without_times(boards[0]) == without_times(boards[1]) and len(boards[0]["not_run"]) == 4
    told = tmp_path / "here" / "leaderboard.json"
    done = cli("leaderboard", "verify", told, "--cells", 4, "--tolerance", 0, "--out", tmp_path / "v", "--on", "ray")
    assert done.code == 0 and "4 cells repeated of 16; 0 differ." in done.err
    assert done.err.count("the same") == 4


# interrupted


def killed_once(marker: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function, but the first process that calls it is killed."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return function(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_changes_nothing(executor: Executor, plan: Plan, pets: Path, tmp_path: Path) -> None:
    def deadly(jobs: Iterable[Job]) -> Iterator[tuple[Any, Any]]:
        return executor(
            job._replace(function=partial(killed_once, str(tmp_path / f"killed {number}"), job.function))
            if number in (1, 2)
            else job
            for number, job in enumerate(jobs)
        )

    datasets, methods = [open_dataset(pets)], ["zeroshot", "tda"]
    whole = evaluate(plan, datasets, methods)
    there = replace(plan, folder=tmp_path / "there", executor=deadly)
    assert evaluate(there, datasets, methods) == whole and cells_in(there.folder) == cells_in(plan.folder)
    assert len(list(tmp_path.glob("killed *"))) == 2


def stopped_after(count: int, executor: Executor) -> Executor:
    """An executor that is interrupted after some results."""

    def run(jobs: Iterable[Job]) -> Iterator[tuple[Any, Any]]:
        for number, found in enumerate(executor(jobs)):
            if number == count:
                raise KeyboardInterrupt
            yield found

    return run


@pytest.mark.parametrize("begun_there", [True, False])
def test_a_run_is_resumed_where_it_was_not_begun(
    executor: Executor, plan: Plan, pets: Path, tmp_path: Path, begun_there: bool
) -> None:
    first, second = (executor, in_order) if begun_there else (in_order, executor)
    datasets, methods = [open_dataset(pets)], ["zeroshot", "tda", "dpe"]
    whole = evaluate(replace(plan, folder=tmp_path / "whole"), datasets, methods)
    with pytest.raises(KeyboardInterrupt):
        evaluate(replace(plan, executor=stopped_after(2, first)), datasets, methods)
    before = {path: path.stat().st_mtime_ns for path in (plan.folder / "cells").iterdir()}
    assert len(before) == 2
    assert evaluate(replace(plan, executor=second), datasets, methods) == whole
    assert cells_in(plan.folder) == cells_in(tmp_path / "whole")
    assert {path: path.stat().st_mtime_ns for path in before} == before  # not run again


# errors


def test_the_error_is_that_of_the_first_cell_in_order(executor: Executor, pets: Path, tmp_path: Path) -> None:
    wrong = [
        Cell(DMN()),  # before the others, which are sorted by seed and name
        Cell(DPE(beta=1e308)),
        Cell(TDA(pos_alpha=1e308)),
        Cell(ZeroShot(), seed=2),
    ]
    errors = []
    for name, where in (("here", in_order), ("there", executor)):
        lab = Lab(tmp_path / name, load_encoder("tiny"), open_dataset(pets), report=lambda line: None, executor=where)
        with pytest.raises(InputError, match="NaN or infinity") as caught:
            run_cells(lab, wrong)
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1] and "'dpe'" in errors[0][1]
    assert len(cells_in(tmp_path / "here")) == 1
    assert cells_in(tmp_path / "here").items() <= cells_in(tmp_path / "there").items()


def answer(where: Where, shared: int, own: int) -> int:
    if own == 2:
        raise MissingPart("no part")
    if own == 5:
        raise ZeroDivisionError("a bug")
    return shared + own


def test_what_is_missing_is_a_result_and_a_bug_keeps_its_class(executor: Executor) -> None:
    here = Where(load_encoder("tiny").device, print)
    jobs = [Job(own, f"job {own}", answer, 10, (own,), here) for own in range(4)]
    found = dict(executor(iter(jobs)))
    assert str(found.pop(2)) == "no part" and found == {0: 10, 1: 11, 3: 13}
    with pytest.raises(ZeroDivisionError, match="a bug"):
        list(executor([Job(5, "job 5", answer, 10, (5,), here)]))


def test_an_error_while_jobs_are_made_comes_after_those_before_it(executor: Executor) -> None:
    def jobs() -> Iterator[Job]:
        here = Where(load_encoder("tiny").device, print)
        yield from (Job(own, f"job {own}", answer, 10, (own,), here) for own in (0, 1))
        raise InputError("no such images")

    found = []
    with pytest.raises(InputError, match="no such images"):
        for each in executor(jobs()):
            found.append(each)
    assert sorted(found) == [(0, 10), (1, 11)]


def test_a_method_that_workers_cannot_import_is_named(
    executor: Executor, pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plugged_in.py").write_text(
        "from dataclasses import dataclass\nfrom testtime.methods.tda import TDA\n\n"
        "@dataclass(frozen=True)\nclass Mine(TDA):\n    name = 'mine'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from plugged_in import Mine  # type: ignore[import-not-found]

    lab = Lab(tmp_path / "out", load_encoder("tiny"), open_dataset(pets), report=lambda line: None, executor=executor)
    with pytest.raises(InputError, match="pets, mine, seed 1: the machine .* cannot import .*plugged_in.*Install the"):
        run_cells(lab, [Cell(Mine())])


def test_a_store_that_a_machine_does_not_see_or_that_is_another_is_named(file: Path, tmp_path: Path) -> None:
    place = Place.of(Features(file))
    sent = pickle.dumps(place)
    assert len(pickle.loads(sent).store) == 120 and place.path.is_absolute()
    shutil.copy(file, tmp_path / "kept")
    task, stream, labels = toy(classes=12, images=100, dim=48, views=1)
    save_features(file, stream, task.text, labels=labels)
    with pytest.raises(InputError, match="has another .*toy.safetensors.*every machine sees"):
        _ = pickle.loads(sent).store
    file.unlink()
    with pytest.raises(InputError, match="cannot use .*toy.safetensors.*every machine sees"):
        _ = pickle.loads(sent).store


def test_a_machine_with_other_versions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from testtime.cluster import jobs

    wanted = jobs.versions()
    jobs._check_versions("n1", wanted)
    for mine, told in (("0.1", "has numba 0.1"), ("", "has no numba")):
        monkeypatch.setattr(jobs, "versions", lambda mine=mine: wanted | {"numba": mine})
        with pytest.raises(InputError, match=f"n1 of the Ray cluster {told}, but this one has numba"):
            jobs._check_versions("n1", wanted)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("eval", "PETS", "--on", "spark"), "--on spark"),
        (("bench", "tsne", "PETS", "--on", "ray"), "'tsne' is one run over one stream; leave it out"),
        (("bench", "components", "PETS", "--on", "ray", "--dry-run"), "--dry-run runs no cells; leave it out"),
        (("leaderboard", "PETS", "--on", "ray", "--dry-run"), "--dry-run runs no cells; leave it out"),
    ],
)
def test_an_option_that_does_not_fit_is_refused(words: tuple[str, ...], told: str, cli: Cli, pets: Path) -> None:
    out = pets.parent / "out"
    done = cli(*(word.replace("PETS", str(pets)) for word in words), "--encoder", "tiny", "--out", out)
    assert done.code == 2 and told in done.err


# times, and what is shown


def test_times_are_measured_here(pets: Path, tmp_path: Path) -> None:
    lines: list[str] = []

    def elsewhere(jobs: Iterable[Job]) -> Iterator[tuple[Any, Any]]:
        pytest.fail("not on this machine")

    dataset = open_dataset(pets)
    lab = Lab(tmp_path / "out", load_encoder("tiny"), dataset, report=lines.append, executor=elsewhere)
    run_cells(lab, [Cell(ZeroShot())], alone=True)
    assert cells.costs(lab, Cell(ZeroShot()))["milliseconds"] > 0
    assert "times are measured: cells run on this machine, one after another" in lines


def test_the_table_shows_what_runs_where(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    with Jobs() as jobs:
        for number in range(20):
            jobs.started(number, f"pets, dpe, seed {number}", "node-a")
        jobs.started(19, "pets, dpe, seed 19", "node-b")  # again
        jobs.finished(0, "pets, dpe, seed 0", "node-a", 1.25)
        console = Console(width=100)
        with console.capture() as captured:
            console.print(jobs.table())
    shown = captured.get()
    assert "1 finished, 19 running" in shown and "7 more" in shown
    assert [line.split()[-2] for line in shown.splitlines() if "seed 0 " in line] == ["1.2"]
    assert "1 job finished: 1 on node-a." in capsys.readouterr().err

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from testtime import bench as benches
from testtime import load_encoder
from testtime.bench import Bench, System, run_systems
from testtime.cli import main
from testtime.datasets import open_dataset
from testtime.types import InputError

SYSTEMS = (System("zero-shot", "zeroshot"), System("ensemble", "zeroshot", "imagenet7"), System("DPE", "dpe"))


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    noise = np.random.default_rng(0)
    for name in ("cat", "dog", "fox"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(3):
            pixels = noise.integers(0, 255, (36, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pets" / name / f"{number}.png")
    return tmp_path / "pets"


@pytest.fixture
def plan(folders, tmp_path) -> Bench:
    lines: list[str] = []
    return Bench(tmp_path / "runs", load_encoder("tiny"), open_dataset(folders), report=lines.append)


def test_every_system_gets_a_row_with_accuracy_time_and_memory(plan) -> None:
    rows = run_systems(plan, SYSTEMS)
    assert [row["system"] for row in rows] == ["zero-shot", "ensemble", "DPE"]
    for row in rows:
        assert 0 <= row["accuracy"] <= 1 and row["milliseconds"] > 0 and row["images"] == 9
    assert rows[2]["state_megabytes"] > rows[0]["state_megabytes"] == 0


def test_an_oracle_is_a_row_of_its_own_that_says_so(plan) -> None:
    systems = (System("DMN-ZS", "dmn"), System("DMN-ZS (oracle)", "dmn", oracle=True))
    honest, oracle = run_systems(plan, systems)
    assert set(systems) < set(benches.SYSTEMS)
    assert honest["method"] == "dmn" and "oracle" not in honest
    assert oracle["method"] == "dmn (oracle: fusion weight chosen with test labels)" and oracle["oracle"] is True
    assert oracle["settings"]["fusion_memory"] == oracle["weight"]
    assert oracle["accuracy"] == max(oracle["accuracy_by_weight"].values())
    assert oracle["accuracy_by_weight"]["1"] == honest["accuracy"]


def test_finished_cells_and_shards_are_not_done_again(plan, monkeypatch) -> None:
    first = run_systems(plan, SYSTEMS[:2])

    def broken(*arguments: object, **settings: object) -> None:
        raise AssertionError("done again")

    monkeypatch.setattr("testtime.encode._encode_part", broken)
    ran: list[str] = []
    real = benches._run
    monkeypatch.setattr(benches, "_run", lambda *a: (ran.append(a[2].name), real(*a))[1])
    again = run_systems(plan, SYSTEMS)
    assert again[:2] == first and ran == ["DPE"]


def test_an_interrupted_bench_ends_with_the_same_rows(plan, tmp_path, monkeypatch) -> None:
    real = benches._run

    def interrupted(bench: Bench, store: object, system: System, prompts: Path | None) -> dict:
        if system.name == "DPE":
            raise KeyboardInterrupt
        return real(bench, store, system, prompts)

    monkeypatch.setattr(benches, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_systems(plan, SYSTEMS)
    monkeypatch.setattr(benches, "_run", real)
    resumed = run_systems(plan, SYSTEMS)
    whole = run_systems(plan._replace(folder=tmp_path / "whole"), SYSTEMS)
    assert [row["accuracy"] for row in resumed] == [row["accuracy"] for row in whole]


def test_a_system_that_cannot_run_says_what_it_needs_and_is_tried_again(plan) -> None:
    row = run_systems(plan, (System("CoOp", "zeroshot", coop=True),))[0]
    assert "--prompts" in row["skipped"]
    assert not (plan.folder / "cells" / "coop.json").exists()


def test_another_bench_in_the_same_folder_is_refused(plan) -> None:
    run_systems(plan, SYSTEMS[:1])
    with pytest.raises(InputError, match="seed 1, this one is of 2"):
        run_systems(plan._replace(seed=2), SYSTEMS[:1])


def test_the_command_prints_a_table_and_json(folders, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(benches, "run_systems", lambda plan, prompts=None: run_systems(plan, SYSTEMS, prompts))
    arguments = ["bench", "systems", str(folders), "--encoder", "tiny", "--out", str(tmp_path / "b")]
    for extra in ([], ["--json"]):
        try:
            main([*arguments, *extra])
        except SystemExit as stop:
            assert not stop.code
        text = capsys.readouterr().out
        if extra:
            assert [row["system"] for row in json.loads(text)["rows"]] == ["zero-shot", "ensemble", "DPE"]
        else:
            assert "DPE" in text and "%" in text


def test_an_unknown_experiment_is_an_error(folders, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "sistems", str(folders)])
    assert stop.value.code == 2 and "Did you mean 'systems'" in capsys.readouterr().err

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from small_data import make_folders

import testtime as tt
from testtime import load_encoder
from testtime.datasets import open_dataset
from testtime.experiments import cells
from testtime.experiments.cells import run_cells
from testtime.experiments.lab import Cell, Lab, Text
from testtime.methods.dpe import DPE
from testtime.methods.tda import TDA
from testtime.methods.tpt import TPT
from testtime.methods.zeroshot import ZeroShot
from testtime.types import InputError, ViewPlan


@pytest.fixture(scope="module")
def encoder():
    return load_encoder("tiny")


@pytest.fixture
def lab(tmp_path, encoder) -> Lab:
    lines: list[str] = []
    return Lab(tmp_path / "out", encoder, open_dataset(make_folders(tmp_path / "pets")), report=lines.append)


def test_a_cell_is_the_score_of_a_session_over_the_shuffled_store(lab) -> None:
    cell = Cell(DPE(), seed=3)
    result = run_cells(lab, [cell])[0]
    store = lab.store(ViewPlan(), 3)
    order = torch.randperm(len(store), generator=torch.Generator().manual_seed(3))
    logits = tt.Session(lab.task(Text()), DPE()).scan(torch.cat(list(store.chunks(order.tolist()))))
    assert store.labels is None  # which may be corrected: they are the dataset's
    assert result["right"] == int((logits.argmax(1) == lab.labels_of(store)[order]).sum())
    assert result["accuracy"] == result["right"] / 12 and result["skipped"] == 0


def test_a_finished_cell_is_read_and_not_run_again(lab, monkeypatch) -> None:
    first = run_cells(lab, [Cell(ZeroShot()), Cell(DPE())])
    monkeypatch.setattr(cells, "sweep", None)
    assert run_cells(lab, [Cell(DPE()), Cell(ZeroShot())]) == first[::-1]


def test_results_hold_no_times_and_times_are_stored_separately(lab) -> None:
    run_cells(lab, [Cell(ZeroShot())])
    record = json.loads(lab.path(Cell(ZeroShot())).read_text())
    assert not {"seconds", "machine", "torch"} & record.keys()
    note = lab.noted(lab.path(Cell(ZeroShot())).stem)
    assert note is not None and note["seconds"] > 0 and note["together"] == 1
    assert lab.noted(f"encode-{lab.store_path(ViewPlan(), 1).name}")["images"] == 12
    assert lab.noted("nothing") is None


def test_whatever_a_result_depends_on_makes_another_cell(lab, tmp_path) -> None:
    described = tmp_path / "d.json"
    described.write_text('{"cat": ["a"], "dog": ["b"], "fox": ["c"]}')
    variants = [
        Cell(DPE()),
        Cell(DPE(alpha=1.0)),
        Cell(TDA()),
        Cell(DPE(), seed=2),
        Cell(DPE(), views=ViewPlan(2)),
        Cell(DPE(), views=ViewPlan(2, True)),
        Cell(DPE(), Text(("a {}.",))),
        Cell(DPE(), Text(descriptions=described)),
    ]
    paths = {lab.path(cell) for cell in variants}
    described.write_text('{"cat": ["a"], "dog": ["b"], "fox": ["d"]}')
    paths.add(lab.path(variants[-1]))
    limited = Lab(lab.folder, lab.encoder, lab.dataset, limit=5)
    paths.add(limited.path(variants[0]))
    assert len(paths) == len(variants) + 2


def test_one_view_needs_one_store_for_every_seed_and_several_need_their_own(lab) -> None:
    assert lab.store_path(ViewPlan(), 1) == lab.store_path(ViewPlan(), 2)
    assert lab.store_path(ViewPlan(4), 1) != lab.store_path(ViewPlan(4), 2)
    assert lab.store_path(ViewPlan(4), 1) != lab.store_path(ViewPlan(4, True), 1)
    run_cells(lab, [Cell(ZeroShot(), seed=seed) for seed in (1, 2)])
    assert len(list((lab.folder / "stores").iterdir())) == 1


def test_features_are_found_again_however_the_folder_is_written(lab, tmp_path, monkeypatch) -> None:
    lab.store(ViewPlan(), 1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(type(lab.encoder), "encode_images", None)
    assert len(Lab(lab.folder, lab.encoder, open_dataset("pets")).store(ViewPlan(), 1)) == 12


def test_a_limit_takes_the_same_images_for_every_seed(lab) -> None:
    limited = Lab(lab.folder, lab.encoder, lab.dataset, limit=5)
    assert len(limited.indices) == 5 and limited.indices == sorted(limited.indices)
    assert run_cells(limited, [Cell(ZeroShot())])[0]["images"] == 5
    assert Lab(lab.folder, lab.encoder, lab.dataset, limit=99).indices == list(range(12))
    with pytest.raises(InputError, match="limit=0"):
        Lab(lab.folder, lab.encoder, lab.dataset, limit=0)


def test_text_prototypes_are_made_once_and_read_back_the_same(lab) -> None:
    text = Text(("a {}.", "the {}."))
    made = lab.task(text)
    again = Lab(lab.folder, lab.encoder, lab.dataset)
    assert torch.equal(again.task(text).text, made.text) and again.task(text).classnames == made.classnames
    assert len(list((lab.folder / "text").iterdir())) == 1


def test_prompt_tuning_gets_its_tower_or_says_what_it_lacks(lab, monkeypatch) -> None:
    assert "accuracy" in run_cells(lab, [Cell(TPT())])[0]
    monkeypatch.setattr(Lab, "task", lambda self, text, tower: tt.toy()[0])
    assert "text tower" in run_cells(lab, [Cell(TPT(), seed=2)])[0]["not run"]
    assert not lab.path(Cell(TPT(), seed=2)).exists()  # it may be there next time


def test_an_unreadable_image_is_skipped_and_counted(lab) -> None:
    Path(lab.dataset.paths[0]).write_bytes(b"not an image")
    result = run_cells(lab, [Cell(ZeroShot())])[0]
    assert result["skipped"] == 1
    assert any("skipped" in line for line in lab.report.__self__)  # type: ignore[attr-defined]


def test_cells_that_do_not_fit_in_memory_together_run_in_parts(lab, monkeypatch) -> None:
    counts = []
    real = cells.sweep
    monkeypatch.setattr(cells, "sweep", lambda task, methods, s: counts.append(len(methods)) or real(task, methods, s))
    monkeypatch.setattr(cells, "LOGITS", 2 * 4 * 12 * 3)
    many = [Cell(DPE(alpha=float(a))) for a in range(5)]
    run_cells(lab, many)
    assert counts == [2, 2, 1]


def test_cells_that_run_alone_have_their_own_costs(lab, monkeypatch) -> None:
    grid = [Cell(DPE(beta=float(b))) for b in range(2)]
    together = run_cells(lab, grid)
    assert cells.costs(lab, grid[0])["peak_megabytes"] is None  # which a run beside others cannot tell
    monkeypatch.setattr(cells, "sweep", None)
    assert run_cells(lab, grid, alone=True) == together
    found = cells.costs(lab, grid[0])
    assert found["milliseconds"] > 0 and found["state_megabytes"] > 0 and found["peak_megabytes"] >= 0
    monkeypatch.setattr(cells, "Session", None)
    assert run_cells(lab, grid, alone=True) == together and cells.costs(lab, grid[0]) == found


def test_a_damaged_cell_and_a_missing_file_are_named(lab, tmp_path) -> None:
    run_cells(lab, [Cell(ZeroShot())])
    for content in ("{", "{}", '{"accuracy": 1.0}', "[" * 100_000):
        lab.path(Cell(ZeroShot())).write_text(content)
        with pytest.raises(InputError, match="remove it.*"):
            run_cells(lab, [Cell(ZeroShot())])
    with pytest.raises(InputError, match="gone.json"):
        lab.path(Cell(ZeroShot(), Text(descriptions=tmp_path / "gone.json")))

from __future__ import annotations

import copy

import pytest
import torch

import testtime as tt
from testtime import steppers
from testtime.methods.dpe import DPE
from testtime.methods.tda import TDA
from testtime.ops import unit_views
from testtime.steppers import memory_needed
from testtime.steppers import sweep as sweeps
from testtime.steppers.fast import FAST
from testtime.types import InputError

GRID = [
    *(DPE(alpha=alpha, beta=beta) for alpha in (2.0, 6.0) for beta in (3.0, 8.0)),
    *(DPE(queue=queue, entropy_threshold=tau) for queue in (1, 3) for tau in (0.0, 0.3)),
    DPE(align_weight=0.0),
    DPE(text_update="none"),
    DPE(text_update="full"),
    DPE(lr_text=0.0),
    DPE(steps=0),
    DPE(steps=2),
    DPE.paper(),
    TDA(),
]


@pytest.mark.parametrize("views", [1, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_settings_side_by_side_give_exactly_what_each_gives_alone(views, dtype) -> None:
    task, stream, _ = tt.toy(classes=12, dim=48, images=60, views=views)
    task, stream = task.to(dtype=dtype), stream.to(dtype)
    together = tt.sweep(task, GRID, stream.split(25))
    for method, logits in zip(GRID, together, strict=True):
        assert torch.equal(logits, tt.Session(task, method).scan(stream)), method


def test_settings_that_do_not_fit_in_memory_together_run_in_turns(monkeypatch) -> None:
    task, stream, _ = tt.toy(images=20)
    grid = [DPE(alpha=float(alpha)) for alpha in range(1, 6)]
    expected = tt.sweep(task, grid, [stream])
    monkeypatch.setitem(sweeps.GROUP_BYTES, "cpu", 2 * memory_needed(task, grid[0]))
    monkeypatch.setattr(sweeps, "GROUPS_PER_THREAD", 1)
    for threads, sizes in ((1, [1, 2, 2]), (2, [1, 1, 1, 2]), (16, [1] * 5)):
        assert [len(group) for group in sweeps.grouped(task, grid, threads)] == sizes
    for one, other in zip(expected, tt.sweep(task, grid, [stream]), strict=True):
        assert torch.equal(one, other)


def test_threads_have_many_groups_each_so_that_none_waits_long() -> None:
    task, _, _ = tt.toy()
    grid = [DPE(alpha=float(alpha)) for alpha in range(1, 201)]
    assert len(sweeps.grouped(task, grid, 1)) == 1
    groups = sweeps.grouped(task, grid, 2)
    assert len(groups) == 2 * sweeps.GROUPS_PER_THREAD
    assert sorted(index for group in groups for index in group) == list(range(200))
    assert {len(group) for group in groups} == {6, 7}


def test_a_chunk_is_made_ready_once_for_all_groups(monkeypatch) -> None:
    task, stream, _ = tt.toy(images=20)
    grid = [DPE(alpha=float(alpha)) for alpha in range(1, 6)]
    seen = []
    monkeypatch.setattr(sweeps, "unit_views", lambda chunk, *_: seen.append(len(chunk)) or unit_views(chunk, *_))
    monkeypatch.setitem(sweeps.GROUP_BYTES, "cpu", memory_needed(task, grid[0]))
    assert len(sweeps.grouped(task, grid, 1)) == 5
    tt.sweep(task, grid, stream.split(12))
    assert seen == [12, 8]


def test_on_a_gpu_the_buffers_of_kernels_count_too(monkeypatch) -> None:
    pytest.importorskip("triton")
    from testtime.steppers.gpu import dpe

    monkeypatch.setattr(steppers, "FAST", [fast._replace(device="meta") for fast in FAST if fast.device == "cuda"])
    task, _, _ = tt.toy()
    ghost = copy.copy(task)  # a tensor that is not on the CPU, and takes no memory
    object.__setattr__(ghost, "text", task.text.to("meta"))
    assert memory_needed(ghost, DPE()) == memory_needed(task, DPE()) + dpe.scratch_bytes(task)
    assert memory_needed(ghost, TDA()) == memory_needed(task, TDA())


def test_an_empty_sweep_is_refused() -> None:
    task, stream, _ = tt.toy(images=8)
    with pytest.raises(InputError, match="at least one setting"):
        tt.sweep(task, [], [stream])

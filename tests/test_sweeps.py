from __future__ import annotations

import copy

import pytest
import torch
from tolerances import assert_close

import testtime as tt
from testtime import sweeps
from testtime.fast import forms, fused
from testtime.fast.abreast import Abreast
from testtime.fast.graph import Runner
from testtime.features import unit_views
from testtime.methods.dpe import DPE
from testtime.methods.tda import TDA
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
    monkeypatch.setitem(sweeps.ABREAST, "cpu", 2 * sweeps._size(task, grid[0]))
    monkeypatch.setattr(sweeps, "TURNS", 1)
    for threads, sizes in ((1, [1, 2, 2]), (2, [1, 1, 1, 2]), (16, [1] * 5)):
        assert [len(group) for group in sweeps._abreast(task, grid, threads)] == sizes
    for one, other in zip(expected, tt.sweep(task, grid, [stream]), strict=True):
        assert torch.equal(one, other)


def test_threads_have_many_groups_each_so_that_none_waits_long() -> None:
    task, _, _ = tt.toy()
    grid = [DPE(alpha=float(alpha)) for alpha in range(1, 201)]
    assert len(sweeps._abreast(task, grid, 1)) == 1
    groups = sweeps._abreast(task, grid, 2)
    assert len(groups) == 2 * sweeps.TURNS
    assert sorted(place for group in groups for place in group) == list(range(200))
    assert {len(group) for group in groups} == {6, 7}


def test_a_chunk_is_made_ready_once_for_all_groups(monkeypatch) -> None:
    task, stream, _ = tt.toy(images=20)
    grid = [DPE(alpha=float(alpha)) for alpha in range(1, 6)]
    seen = []
    monkeypatch.setattr(sweeps, "unit_views", lambda chunk, *_: seen.append(len(chunk)) or unit_views(chunk, *_))
    monkeypatch.setitem(sweeps.ABREAST, "cpu", sweeps._size(task, grid[0]))
    assert len(sweeps._abreast(task, grid, 1)) == 5
    tt.sweep(task, grid, stream.split(12))
    assert seen == [12, 8]


def test_on_a_gpu_the_buffers_of_kernels_count_too() -> None:
    task, _, _ = tt.toy()
    ghost = copy.copy(task)  # a tensor that is not on the CPU, and takes no memory
    object.__setattr__(ghost, "text", task.text.to("meta"))
    assert sweeps._size(ghost, DPE()) == sweeps._size(task, DPE()) + fused.room(task)


def test_an_empty_sweep_is_refused() -> None:
    task, stream, _ = tt.toy(images=8)
    with pytest.raises(InputError, match="at least one setting"):
        tt.sweep(task, [], [stream])


@pytest.mark.parametrize("views", [1, 12])
def test_the_step_with_a_settings_axis_is_each_method_s_own(views) -> None:
    task, stream, _ = tt.toy(classes=12, dim=48, images=40, views=views)
    task, stream = task.to(dtype=torch.float64), stream.double()
    odd = DPE(renormalise_text=True, gate_keeps="above", entropy_unit="ln", prompt_count=0, scale_affinity=True)
    shapes = {}
    for method in [*GRID, odd, DPE(queue=0), DPE(text_update="exponential", entropy_weight=0.0)]:
        if isinstance(method, DPE) and forms.fits(method):
            shapes.setdefault(forms.shape(method), []).append(method)
    assert len(shapes) == 4
    for methods in shapes.values():
        together = Abreast(task, methods)
        state = together.init(task)
        plain = [method.init(task) for method in methods]
        for image in stream:
            logits, state = together.step(task, state, image)
            for place, method in enumerate(methods):
                expected, plain[place] = method.step(task, plain[place], image)
                assert_close(logits[place], expected, "twin", f"{method}")
        for place, end in enumerate(plain):
            assert int(state.updates[place]) == int(end.updates)
            torch.testing.assert_close(state.text[place], end.text)


def test_a_graph_of_settings_side_by_side_starts_at_the_beginning() -> None:
    task, stream, _ = tt.toy(images=20)
    methods = [DPE(), DPE(alpha=2.0)]
    together = Runner(Abreast(task, methods), task, stream.shape[1], steps=8)  # type: ignore[arg-type]
    for logits, method in zip(together.run(stream).transpose(0, 1), methods, strict=True):
        assert_close(logits, tt.Session(task, method, reference=True).scan(stream), "stream")

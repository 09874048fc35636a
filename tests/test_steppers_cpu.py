"""The compiled loops of TDA, TPS and DMN-ZS against the methods, from the same states and over whole streams."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_steppers_cpu_dpe import assert_resumes
from tolerances import assert_close

import testtime as tt
from testtime import steppers
from testtime.experiments import oracle
from testtime.methods.base import leaves
from testtime.methods.dmn import DMN
from testtime.methods.tda import TDA
from testtime.methods.tps import TPS
from testtime.steppers import aligned_task, fast_of, group_key, open_stepper
from testtime.steppers.plain import Plain
from testtime.steppers.sweep import sweep

CASES = {
    "tda, released": TDA(),
    "tda, no positive cache": TDA(pos_capacity=0),
    "tda, no negative cache": TDA(neg_capacity=0),
    "tda, no cache": TDA(pos_capacity=0, neg_capacity=0),
    "tda, one slot each": TDA(pos_capacity=1, neg_capacity=1),
    "tda, every class possible": TDA(neg_mask_lower=0.0, neg_entropy_lower=0.0, neg_entropy_upper=1.0),
    "tda, less than nothing possible": TDA(neg_mask_lower=-1.0, neg_entropy_upper=1.0, neg_alpha=0.5),
    "tda, unlikely classes possible": TDA(neg_mask_lower=1e-4, neg_mask_upper=0.3, neg_entropy_lower=0.01),
    "tda, blunt": TDA(pos_beta=0.0, neg_beta=0.0),
    "tda, all views": TDA(selection=1.0),
    "tps, released": TPS(),
    "tps, no step": TPS(steps=0),
    "tps, slow": TPS(lr=1e-4, adamw_eps=1e-2, adamw_betas=(0.5, 0.5), adamw_weight_decay=0.3),
    "tps, all views": TPS(selection=1.0),
    "dmn, released": DMN(),
    "dmn, small": DMN(memory_size=3, beta=1.0, fusion_memory=0.3),
    "dmn, one slot": DMN(memory_size=1, fusion_text=0.0),
    "dmn, no memory": DMN(memory_size=0),
    "dmn, all views": DMN(selection=1.0, beta=0.0),
}
every_case = pytest.mark.parametrize("method", CASES.values(), ids=CASES.keys())
one_of_each = pytest.mark.parametrize("method", [TDA(), TPS(), DMN(memory_size=3)], ids=lambda method: method.name)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def toy(dtype: torch.dtype = torch.float32, views: int = 12, images: int = 60) -> tuple[tt.Task, torch.Tensor]:
    task, stream, _ = tt.toy(classes=10, dim=24, images=images, views=views)
    return task.to(dtype=dtype), stream.to(dtype)


def with_ties(task: tt.Task, stream: torch.Tensor) -> tuple[tt.Task, torch.Tensor]:
    """The same with duplicate prototypes, repeated images and equal views."""
    text = task.text.clone()
    text[7], text[9] = text[2], text[4]
    stream = torch.cat([stream, stream[::3], stream[::3]])
    if stream.shape[1] > 3:
        stream[:, 3:6] = stream[:, 2:3]
    return replace(task, text=text), stream


def assert_same_steps(task: tt.Task, method: Any, stream: torch.Tensor) -> None:
    """Compare every step of the loops, from the plain state, with the method's own."""
    state = method.init(task)
    for image in stream:
        stepper = open_stepper(task, [method], [state])
        assert not isinstance(stepper, Plain)
        kept = [leaf.clone() for leaf in leaves(state)]
        (logits,), (learned,) = stepper.step(image)
        expected, after = method.step(aligned_task(task), state, image)
        assert_close(logits, expected, "stepper", "logits")
        assert learned == method.learned(state, after)
        assert all(map(torch.equal, leaves(state), kept)), "the given state is not modified"
        assert all(map(torch.equal, leaves(stepper.snapshot()[0]), leaves(after)))
        state = after


@every_case
@every_dtype
@pytest.mark.parametrize("views", [1, 20])
def test_each_step_is_the_method_s_own_from_the_same_state(method: Any, dtype: torch.dtype, views: int) -> None:
    task, stream = toy(dtype, views)
    assert_same_steps(task, method, stream[:30])


@every_case
@pytest.mark.parametrize("views", [1, 12])
def test_ties_are_broken_as_in_the_method(method: Any, views: int) -> None:
    task, stream = with_ties(*toy(views=views, images=24))
    assert_same_steps(task, method, stream)


@every_case
def test_a_stream_ends_where_the_method_s_own_does(method: Any) -> None:
    task, stream = toy(images=200)
    ours, plain = tt.Session(task, method), tt.Session(task, method, reference=True)
    logits, expected = ours.scan(stream), plain.scan(stream)
    assert_close(logits, expected, "stepper")
    assert torch.equal(logits.argmax(1), expected.argmax(1))
    assert all(map(torch.equal, leaves(ours.state), leaves(plain.state)))


@one_of_each
def test_a_run_that_is_saved_and_loaded_resumes_bit_for_bit(method: Any, tmp_path) -> None:
    task, stream = toy()
    assert_resumes(task, method, stream, tmp_path)


GRIDS = {
    "tda": [TDA(pos_alpha=alpha, pos_capacity=slots) for alpha in (1.0, 3.0) for slots in (0, 2)],
    "tps": [TPS(lr=rate, adamw_eps=eps) for rate in (1e-3, 5e-3) for eps in (1e-8, 1e-3)],
    "dmn": [DMN(beta=beta, memory_size=slots) for beta in (1.0, 5.5) for slots in (0, 3)],
}


@pytest.mark.parametrize("methods", GRIDS.values(), ids=GRIDS.keys())
def test_settings_side_by_side_give_what_each_gives_alone(methods: list[Any]) -> None:
    task, stream = toy()
    assert len({group_key(task, method) for method in methods}) == 1
    side_by_side = sweep(task, methods, stream.split(25))
    for method, logits in zip(methods, side_by_side, strict=True):
        assert torch.equal(logits, tt.Session(task, method).scan(stream))


def test_different_methods_never_run_side_by_side() -> None:
    task, _ = toy()
    assert len({group_key(task, method) for method in (TDA(), TPS(), DMN(), TDA(selection=0.2))}) == 4


def test_several_steps_of_tps_use_the_plain_stepper() -> None:
    task, stream = toy()
    assert isinstance(open_stepper(task, [TPS(steps=2)]), Plain)
    plain = tt.Session(task, TPS(steps=2), reference=True).scan(stream)
    assert torch.equal(tt.Session(task, TPS(steps=2)).scan(stream), plain)


def test_a_subclass_of_a_method_runs_its_own_steps() -> None:
    class Own(TDA):
        pass

    task, _ = toy()
    assert fast_of(task, Own()) is None
    assert fast_of(task, oracle.oracle_of(DMN())) is None


def test_a_state_with_invalid_probabilities_is_used_in_full() -> None:
    """A state comes from a file, which may contain anything: here every class is likely."""
    task, stream = toy()
    method = TDA()
    state = method.init(task)
    negative = state.negative._replace(keys=state.negative.keys + 0.1, cost=torch.zeros_like(state.negative.cost))
    state = state._replace(negative=negative, negative_prob=torch.full_like(state.negative_prob, 0.9))
    (logits,), _ = open_stepper(task, [method], [state]).step(stream[0])
    assert_close(logits, method.step(task, state, stream[0])[0], "stepper")


@one_of_each
def test_without_numba_the_method_s_own_steps_are_used(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    task, stream = toy()
    monkeypatch.setattr(steppers, "find_spec", lambda name: None)
    assert isinstance(open_stepper(task, [method]), Plain)
    assert torch.equal(tt.Session(task, method).scan(stream), tt.Session(task, method, reference=True).scan(stream))

"""TPS against autograd and PyTorch's own AdamW."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tolerances import assert_close

from testtime import ops, toy
from testtime.checks import check_method
from testtime.methods.tps import TPS, State, gradient
from testtime.types import SettingError


def stream_of(images: int = 12, views: int = 20, classes: int = 6, scale: float = 100.0, seed: int = 0):
    task, stream, _ = toy(classes=classes, dim=16, images=images, views=views, seed=seed, dtype=torch.float64)
    return replace(task, scale=scale), stream


def reference(task, views, m: TPS):
    """Logits and shift of one image."""
    shift = torch.nn.Parameter(torch.zeros_like(task.text))
    optimiser = torch.optim.AdamW(
        [shift], lr=m.lr, eps=m.adamw_eps, betas=m.adamw_betas, weight_decay=m.adamw_weight_decay
    )

    def predict(rows):
        shifted = task.text + shift
        return task.scale * rows @ (shifted / shifted.norm(dim=1, keepdim=True)).T

    for _ in range(m.steps):
        p = predict(views).softmax(1)
        entropy = [-sum(x * math.log(x) for x in row if x > 0) for row in p.tolist()]
        chosen = sorted(range(len(views)), key=entropy.__getitem__)[: max(1, int(len(views) * m.selection))]
        log_p = predict(views[chosen]).log_softmax(1)
        log_mean = log_p.logsumexp(0) - math.log(len(chosen))
        optimiser.zero_grad()
        (-(log_mean.exp() * log_mean).sum()).backward()
        optimiser.step()
    with torch.no_grad():
        return predict(views[:1])[0], shift.detach()


CASES = {
    "one step": (dict(), dict()),
    "three steps": (dict(), dict(steps=3)),
    "two large steps": (dict(), dict(steps=2, lr=5e-2, adamw_weight_decay=0.5, adamw_betas=(0.8, 0.95))),
    "no step": (dict(), dict(steps=0)),
    "one view": (dict(views=1), dict()),
    "one view, three steps": (dict(views=1), dict(steps=3)),
    "two views": (dict(views=2), dict(steps=2)),
    "all views": (dict(), dict(selection=1.0, steps=2)),
    "large epsilon": (dict(), dict(adamw_eps=1e-1, steps=2)),
    "soft scale": (dict(scale=20.0), dict(steps=3, selection=0.3)),
    "two classes": (dict(classes=2, scale=30.0), dict(steps=2)),
}


@pytest.mark.parametrize(("made", "settings"), CASES.values(), ids=CASES)
def test_it_is_autograd_and_adamw(made, settings):
    task, stream = stream_of(**made)
    method = TPS(**settings)
    for views in stream:
        expected, shift = reference(task, views, method)
        logits, _ = method.step(task, State(), views)
        within = "stream" if method.steps < 2 else "second step"
        assert_close(logits, expected, within, "logits")
        assert_close(method.shift(task, views), shift, within, "shift")


def test_the_gradient_is_that_of_the_marginal_entropy():
    task, stream = stream_of(scale=30.0)
    vectors = (1.7 * task.text).requires_grad_()  # not of length one
    ops.marginal_entropy(task.scale * stream[0] @ ops.unit(vectors).T).backward()
    ours = gradient(stream[0], ops.prototypes(vectors.detach()), task.scale)
    assert_close(ours, vectors.grad, "closed form")


def test_views_are_chosen_anew_at_every_step():
    """With a long first step other views become the confident ones, and the second step follows them."""
    task, stream = stream_of(scale=30.0)
    method = TPS(steps=2, lr=0.1)
    changed = 0
    for views in stream:
        before = ops.confident(task.zero_shot(views), method.selection)
        moved = ops.unit(task.text + replace(method, steps=1).shift(task, views))
        after = ops.confident(task.scale * views @ moved.T, method.selection)
        if set(before.tolist()) == set(after.tolist()):
            continue
        changed += 1
        fixed = method.shift(task, views[before])  # few views: selection would keep one of them only
        assert not torch.allclose(method.shift(task, views), fixed)
        assert_close(method.step(task, State(), views)[0], reference(task, views, method)[0], "second step")
    assert changed


def test_the_first_step_is_nearly_a_sign():
    task, stream = stream_of(scale=20.0)
    shift = TPS().shift(task, stream[0])
    rows = stream[0][ops.confident(task.zero_shot(stream[0]), 0.1)]
    grad = gradient(rows, ops.prototypes(task.text), task.scale)
    assert_close(shift, -5e-3 * grad.sign(), "golden")


def test_the_entropy_falls():
    task, stream = stream_of(scale=30.0)
    for views in stream:
        chosen = ops.confident(task.zero_shot(views), 0.1)
        moved = ops.unit(task.text + TPS().shift(task, views))
        after = ops.marginal_entropy(task.scale * views[chosen] @ moved.T)
        assert after < ops.marginal_entropy(task.zero_shot(views[chosen]))


def test_nothing_is_remembered():
    task, stream = stream_of()
    method = TPS()
    alone, _ = method.step(task, method.init(task), stream[-1])
    logits, state = method.scan(task, method.init(task), stream)
    assert torch.equal(logits[-1], alone)
    assert state == State() and not method.learned(State(), state)


@pytest.mark.parametrize("steps", [1, 3])
def test_single_precision_takes_the_same_signs(steps):
    """Rounding must not decide the sign of a coordinate's step, whatever the size of its gradient."""
    method = TPS(steps=steps)
    for seed in range(4):
        task, stream = stream_of(images=25, views=64, classes=10, seed=seed)
        single = task.to(dtype=torch.float32)
        views = ops.unit(stream.float())
        logits, _ = method.scan(single, State(), views)
        assert logits.dtype == torch.float32
        exact, _ = method.scan(single.to(dtype=torch.float64), State(), views.double())
        assert_close(logits, exact, "golden")


@pytest.mark.parametrize("settings", [dict(), dict(steps=3, lr=1e-2), dict(steps=0), dict(selection=0.5)], ids=str)
def test_it_keeps_every_promise(settings):
    check_method(TPS(**settings))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -1e-3),
        ("lr", math.nan),
        ("steps", -1),
        ("selection", 0.0),
        ("selection", 1.5),
        ("adamw_eps", 0.0),
        ("adamw_betas", (1.0, 0.999)),
        ("adamw_betas", (0.9, -0.1)),
        ("adamw_weight_decay", -0.1),
    ],
)
def test_settings_out_of_range_are_refused_by_name_and_value(name, value):
    with pytest.raises(SettingError) as caught:
        TPS(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)

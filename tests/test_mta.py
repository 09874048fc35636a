"""MTA against plain loops that stop when they have converged."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tolerances import assert_close

from testtime import toy
from testtime.checks import check_method
from testtime.methods.mta import MTA, State, settled
from testtime.types import SettingError


def stream_of(images: int = 10, views: int = 16, classes: int = 6, scale: float = 50.0, seed: int = 0):
    task, stream, _ = toy(classes=classes, dim=16, images=images, views=views, seed=seed, dtype=torch.float64)
    return replace(task, scale=scale), stream


def reference(task, views, m: MTA):
    """Logits of one image, and whether any inner loop stopped before its limit."""
    count, early = len(views), False
    prob = (task.scale * views @ task.text.T).softmax(1)
    near = max(1, int(m.bandwidth_fraction * (count - 1)))
    bandwidth = []
    for i in range(count):
        squares = sorted(float((views[i] - views[j]).square().sum()) for j in range(count) if j != i)[:near]
        bandwidth.append(math.sqrt(0.5 * sum(squares) / len(squares)))

    def density(mode):
        squares = [float((view - mode).square().sum()) for view in views]
        return views.new_tensor([math.exp(-d / (2 * b * b)) for d, b in zip(squares, bandwidth, strict=True)])

    y, mode = torch.full((count,), 1 / count, dtype=torch.float64), views[0]
    for _ in range(m.max_iter):
        k = density(mode)
        for i in range(m.max_iter):
            old, y = y, ((k + m.lambda_q * (prob @ (prob.T @ y))) / m.lambda_y).softmax(0)
            if (y - old).norm() < m.threshold:
                early |= i + 1 < m.max_iter
                break
        for i in range(m.max_iter):
            weight = density(mode) * y
            old, mode = mode, (weight[:, None] * views).sum(0) / weight.sum()
            mode = mode / mode.norm()
            if (mode - old).norm() < m.threshold:
                early |= i + 1 < m.max_iter
                break
    return task.scale * task.text @ mode, early


CASES = {
    "released": (dict(), dict()),
    "sixty-four views": (dict(views=64, images=4), dict()),
    "two views": (dict(views=2), dict()),
    "four views": (dict(views=4), dict()),
    "one iteration": (dict(), dict(max_iter=1)),
    "many iterations": (dict(), dict(max_iter=12)),
    "loose threshold": (dict(), dict(threshold=1e-2)),
    "views do not talk": (dict(), dict(lambda_q=0.0)),
    "even inlierness": (dict(), dict(lambda_y=10.0)),
    "sharp inlierness": (dict(), dict(lambda_y=0.05)),
    "wide": (dict(), dict(bandwidth_fraction=1.0)),
    "narrow": (dict(), dict(bandwidth_fraction=0.05)),
    "two classes": (dict(classes=2), dict()),
}


@pytest.mark.parametrize(("made", "settings"), CASES.values(), ids=CASES)
def test_it_is_the_plain_loop(made, settings):
    task, stream = stream_of(**made)
    method = MTA(**settings)
    expected = torch.stack([reference(task, views, method)[0] for views in stream])
    logits, _ = method.scan(task, State(), stream)
    assert_close(logits, expected, "stream")


def test_loops_stop_early_somewhere():
    task, stream = stream_of()
    assert any(reference(task, views, MTA(threshold=1e-2))[1] for views in stream)
    assert any(reference(task, views, MTA(max_iter=12))[1] for views in stream)


def test_settled_keeps_the_update_that_fell_below_the_threshold_and_no_later_one():
    half = lambda x: x / 2  # noqa: E731
    start = torch.tensor([1.0])
    assert settled(half, start, 3, 0.0).item() == 0.125
    assert settled(half, start, 9, 0.3).item() == 0.25  # 1 -> 1/2 moved by 1/2, 1/2 -> 1/4 by 1/4
    assert settled(half, start, 9, 0.25).item() == 0.125  # a move of just the threshold goes on
    assert settled(half, start, 0, 0.3).item() == 1.0


def test_one_view_is_its_own_mode():
    task, stream = stream_of(views=1)
    logits, _ = MTA().scan(task, State(), stream)
    assert_close(logits, task.zero_shot(stream[:, 0]), "arithmetic")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("views", [2, 5, 40])
def test_copies_of_a_view_change_nothing(views, dtype):
    task, stream = stream_of(views=1)
    task, stream = task.to(dtype=dtype), stream.to(dtype).expand(-1, views, -1)
    logits, _ = MTA().scan(task, State(), stream)
    assert_close(logits, task.zero_shot(stream[:, 0]), "golden")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_views_in_far_clusters_of_copies_give_numbers(dtype):
    """Bandwidths are next to nothing, and densities elsewhere underflow."""
    task, stream = stream_of(views=4)
    stream = stream.repeat_interleave(3, dim=1)
    logits, _ = MTA(lambda_y=0.01).scan(task.to(dtype=dtype), State(), stream.to(dtype))
    assert logits.isfinite().all()


def test_the_mode_leaves_out_an_outlier():
    task, stream = stream_of(views=16)
    views = stream[0].clone()
    views[5] = -views[0]
    near = MTA().step(task, State(), stream[0])[0]
    far = MTA().step(task, State(), views)[0]
    moved = task.scale * (views.mean(0) / views.mean(0).norm() - stream[0].mean(0) / stream[0].mean(0).norm())
    assert (far - near).norm() < (task.text @ moved).norm()


def test_single_precision_stays_near_double():
    task, stream = stream_of(views=64)
    exact, _ = MTA().scan(task, State(), stream)
    logits, _ = MTA().scan(task.to(dtype=torch.float32), State(), stream.float())
    assert logits.dtype == torch.float32
    assert_close(logits, exact, "golden")


@pytest.mark.parametrize(
    "settings", [dict(max_iter=2), dict(max_iter=1, lambda_q=0.0, bandwidth_fraction=1.0)], ids=str
)
def test_it_keeps_every_promise(settings):
    check_method(MTA(**settings))


def test_it_keeps_every_promise_as_released():
    task, stream, _ = toy(images=8, views=12)
    check_method(MTA(), task, stream)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lambda_y", 0.0),
        ("lambda_y", math.nan),
        ("lambda_q", -1.0),
        ("bandwidth_fraction", 0.0),
        ("bandwidth_fraction", 1.5),
        ("max_iter", -1),
        ("threshold", -1e-6),
    ],
)
def test_settings_out_of_range_are_refused_by_name_and_value(name, value):
    with pytest.raises(SettingError) as caught:
        MTA(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)

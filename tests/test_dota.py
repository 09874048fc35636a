"""DOTA against weighted estimates computed after the stream, and a plain loop with a matrix inverse."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerances import assert_close

from testtime import ops, toy
from testtime.checks import check_method
from testtime.methods.dota import DOTA
from testtime.types import SettingError, Task


def stream_of(classes: int = 5, dim: int = 12, images: int = 40, views: int = 1, seed: int = 0, dtype=torch.float64):
    task, stream, _ = toy(classes=classes, dim=dim, images=images, views=views, seed=seed, dtype=dtype)
    return Task(task.text, task.classnames, scale=30.0), stream  # soft predictions: every class receives something


def confident_rows(task, views, fraction):
    """The chosen views (R, D) and their logits (R, C)."""
    logits = torch.stack([task.scale * task.text @ view for view in views])
    entropies = [-sum(float(x) * math.log(float(x)) for x in row.softmax(0) if x > 0) for row in logits]
    order = sorted(range(len(views)), key=entropies.__getitem__)[: max(1, int(len(views) * fraction))]
    return views[order], logits[order]


def batch_estimates(task, stream, m: DOTA):
    """Means (C, D), counts (C,) and pooled covariance (D, D), from all samples at once, class by class."""
    chosen = [confident_rows(task, views, m.selection) for views in stream]
    x = torch.cat([rows for rows, _ in chosen]) if chosen else task.text[:0]
    y = torch.cat([logits.softmax(1) for _, logits in chosen]) if chosen else x.new_zeros(0, task.classes)
    start = task.text if m.start == "text" else torch.full_like(task.text, 1e-3)
    means, counts, scatter = [], [], torch.zeros(task.dim, task.dim, dtype=x.dtype)
    for c in range(task.classes):
        samples, weights = torch.cat([start[c : c + 1], x]), torch.cat([y.new_ones(1), y[:, c]])
        mean = (weights[:, None] * samples).sum(0) / weights.sum()
        scatter += sum(w * torch.outer(s - mean, s - mean) for w, s in zip(weights, samples, strict=True))
        scatter += m.sigma * torch.eye(task.dim, dtype=x.dtype)
        means.append(mean)
        counts.append(weights.sum())
    return torch.stack(means), torch.stack(counts), scatter / sum(counts)


def gaussian_logits(m: DOTA, mean, covariance, feature):
    """Discriminants by the inverse itself: (C,)."""
    inverse = torch.linalg.inv((1 - m.epsilon) * covariance + m.epsilon * torch.eye(len(covariance), dtype=mean.dtype))
    return torch.stack([feature @ inverse @ mu - mu @ inverse @ mu / 2 for mu in mean])


def reference(task, stream, m: DOTA):
    """Logits of every image, with estimates made from scratch wherever the classifier is made anew."""
    answers, count = [], torch.ones(task.classes, dtype=torch.float64)
    for index, views in enumerate(stream):
        made = index - index % m.refresh  # images that the classifier knows
        mean, _, covariance = batch_estimates(task, stream[:made], m)
        rows, logits = confident_rows(task, views, m.selection)
        trust = min(m.rho * float(count.mean()) / len(rows), m.eta)
        answers.append(logits.mean(0) + trust * gaussian_logits(m, mean, covariance, rows.mean(0)))
        count = count + logits.softmax(1).sum(0)
    return torch.stack(answers)


CASES = {
    "every image": (dict(), dict(refresh=1, epsilon=1e-2)),
    "every fourth": (dict(), dict(refresh=4, epsilon=1e-2)),
    "many views": (dict(views=25, images=20), dict(refresh=3, epsilon=1e-2)),
    "more views chosen": (dict(views=6, images=20), dict(refresh=1, selection=0.6, epsilon=1e-2)),
    "from the prompts": (dict(), dict(refresh=1, start="text", epsilon=1e-2)),
    "features outnumber images": (dict(dim=48, images=14), dict(refresh=1, epsilon=1e-2)),
    "no variance to start from": (dict(images=10), dict(refresh=1, sigma=0.0, epsilon=1e-2)),
    "identity alone": (dict(images=10), dict(refresh=1, epsilon=1.0)),
    "defaults": (dict(images=36), dict()),
}


@pytest.mark.parametrize(("made", "settings"), CASES.values(), ids=CASES)
def test_it_is_the_plain_loop_with_an_inverse(made, settings):
    task, stream = stream_of(**made)
    method = DOTA(**settings)
    logits, _ = method.scan(task, method.init(task), stream)
    assert_close(logits, reference(task, stream, method), "stream")


@given(
    classes=st.integers(2, 7),
    dim=st.integers(2, 20),
    images=st.integers(0, 15),
    views=st.integers(1, 12),
    seed=st.integers(0, 999),
    start=st.sampled_from(["faint", "text"]),
    selection=st.floats(0.05, 1.0),
)
def test_streaming_estimates_equal_those_of_the_whole_stream(classes, dim, images, views, seed, start, selection):
    task, stream = stream_of(classes, dim, images, views, seed)
    method = DOTA(start=start, selection=selection)
    _, state = method.scan(task, method.init(task), stream)
    mean, count, covariance = batch_estimates(task, stream, method)
    assert_close(state.mean, mean, "stream", "means")
    assert_close(state.counts, count, "stream", "counts")
    pooled = method.covariance(task, state.mean, state.counts, state.moment)
    assert_close(pooled, covariance, "stream", "covariance")
    assert torch.linalg.eigvalsh(pooled).min() > -1e-12


@given(seed=st.integers(0, 999), start=st.sampled_from(["faint", "text"]))
def test_estimates_do_not_depend_on_the_order_of_the_images(seed, start):
    task, stream = stream_of(images=12, seed=seed)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    method = DOTA(start=start, refresh=1)
    _, one = method.scan(task, method.init(task), stream)
    _, other = method.scan(task, method.init(task), stream[order])
    for name in ("mean", "counts", "moment", "weight", "bias"):
        assert_close(getattr(one, name), getattr(other, name), "stream", name)


@given(seed=st.integers(0, 999))
def test_a_rotated_space_gives_the_same_logits(seed):
    task, stream = stream_of(images=12, seed=seed)
    noise = torch.randn(12, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    turn = torch.linalg.qr(noise).Q
    turned = Task(task.text @ turn, task.classnames, task.scale)
    method = DOTA(start="text", refresh=1)
    one, _ = method.scan(task, method.init(task), stream)
    other, _ = method.scan(turned, method.init(turned), stream @ turn)
    assert_close(one, other, "stream")


@pytest.mark.parametrize("epsilon", [1e-6, 1e-4, 1e-2])
def test_more_features_than_images_stay_finite_and_float32_follows_float64(epsilon):
    """With one image in 200 dimensions the covariance has rank one, but for what it starts from."""
    method = DOTA(epsilon=epsilon, sigma=0.0, refresh=1)
    runs = {}
    for dtype in (torch.float64, torch.float32):
        task, stream = stream_of(dim=200, images=20, dtype=dtype)
        runs[dtype], _ = method.scan(task, method.init(task), stream)
        assert torch.isfinite(runs[dtype]).all()
    assert torch.equal(runs[torch.float32].argmax(1), runs[torch.float64].argmax(1))
    gap = (runs[torch.float32].double() - runs[torch.float64]).abs().max() / runs[torch.float64].abs().max()
    assert gap < 1e-3


def test_small_soft_labels_add_up_in_float32():
    """A count of 1e5 in float32 cannot grow by 1e-3; a thousand such images must be seen all the same."""
    task, stream = stream_of(images=1, dtype=torch.float32)
    method = DOTA()
    state = method.init(task)
    state = state._replace(counts=state.counts + 1e5)
    for _ in range(1000):
        _, state = method.step(task, state, stream[0])
    assert float(state.counts.sum()) == pytest.approx(task.classes * (1e5 + 1) + 1000, abs=1e-3)


def test_nothing_is_said_before_anything_is_learned():
    task, stream = stream_of()
    logits, _ = DOTA().step(task, DOTA().init(task), stream[0])
    difference = logits - task.zero_shot(stream[0, 0])
    assert_close(difference, difference.mean().expand_as(difference), "stream")  # one shift for all classes


def test_without_weight_it_is_zero_shot_over_the_confident_views():
    task, stream = stream_of(views=30)
    method = DOTA(eta=0.0)
    logits, _ = method.scan(task, method.init(task), stream)
    for answer, views in zip(logits, stream, strict=True):
        chosen = ops.confident(task.zero_shot(views), method.selection)
        assert_close(answer, task.zero_shot(views[chosen]).mean(0), "arithmetic")


def test_the_weight_grows_with_the_images_and_stops_at_eta():
    task, stream = stream_of(images=30)
    method = DOTA(rho=0.02, eta=0.05, refresh=1)
    state, weights = method.init(task), []
    for views in stream:
        logits, after = method.step(task, state, views)
        gaussian = state.weight @ views[0] - state.bias
        gained = logits - task.zero_shot(views[0])
        spread = gaussian - gaussian.mean()
        weights.append(float((gained - gained.mean()) @ spread / (spread @ spread)))
        state = after
    expected = [min(0.02 * (1 + n / task.classes), 0.05) for n in range(30)]
    assert weights[1:] == pytest.approx(expected[1:], rel=1e-6)  # the first classifier says the same of every class
    assert expected[-1] == 0.05 > expected[5]


def test_the_classifier_is_made_anew_every_refresh_images_also_across_chunks():
    task, stream = stream_of(images=11)
    method = DOTA(refresh=4)
    state, changed = method.init(task), []
    for chunk in stream.split([3, 1, 5, 2]):
        for views in chunk:
            _, after = method.step(task, state, views)
            changed.append(not torch.equal(state.weight, after.weight))
            state = after
    assert changed == [number % 4 == 0 for number in range(1, 12)]
    whole, last = method.scan(task, method.init(task), stream)
    first, middle = method.scan(task, method.init(task), stream[:3])
    second, end = method.scan(task, middle, stream[3:])
    assert torch.equal(torch.cat([first, second]), whole)
    assert all(map(torch.equal, last, end))


def test_a_step_that_may_not_look_gives_the_same_numbers():
    task, stream, _ = toy(images=40, views=3)
    method = DOTA(refresh=4)
    state = blind = method.init(task)
    for views in stream:
        logits, state = method.step(task, state, views)
        # as on a GPU, where whether a classifier is due stays a tensor
        unseen, blind = method._step(task, blind, views, (blind.images + 1) % method.refresh == 0)
        assert torch.equal(logits, unseen) and all(map(torch.equal, state, blind))


@pytest.mark.parametrize(
    "settings",
    [dict(), dict(refresh=1), dict(refresh=7, start="text", selection=0.5), dict(eta=0.0), dict(epsilon=1.0, rho=1.0)],
    ids=str,
)
def test_it_keeps_every_promise(settings):
    check_method(DOTA(**settings))


def test_it_keeps_every_promise_in_double():
    check_method(DOTA(), *toy(images=24, views=12, dtype=torch.float64)[:2])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eta", -0.1),
        ("rho", math.nan),
        ("sigma", -1e-3),
        ("epsilon", 0.0),
        ("epsilon", 1.5),
        ("start", "prompt"),
        ("refresh", 0),
        ("selection", 0.0),
    ],
)
def test_settings_out_of_range_are_refused_by_name_and_value(name, value):
    with pytest.raises(SettingError) as caught:
        DOTA(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)

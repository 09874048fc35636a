"""DOTA against a plain loop over classes with a matrix inverse, as the released code computes it."""

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


def reference(task, stream, m: DOTA):
    """Logits of every image, and the means, counts and covariances by class, one class and one sample at a time."""
    identity = torch.eye(task.dim, dtype=torch.float64)
    means = [text.clone() if m.start == "text" else torch.full_like(text, 1e-3) for text in task.text]
    counts = [1.0] * task.classes
    covariances = [m.sigma * identity for _ in means]
    precision, used, answers = identity / m.sigma, list(means), []
    for number, views in enumerate(stream, 1):
        rows, logits = confident_rows(task, views, m.selection)
        feature = sum(rows) / len(rows)
        gaussian = torch.stack([mu @ precision @ feature - mu @ precision @ mu / 2 for mu in used])
        trust = min(m.rho * sum(counts) / len(counts) / len(rows), m.eta)
        answers.append(logits.mean(0) + trust * gaussian)
        labels = logits.softmax(1)
        for c in range(task.classes):
            weights = labels[:, c].tolist()
            total = counts[c] + sum(weights)
            outer = sum(w * torch.outer(x - means[c], x - means[c]) for w, x in zip(weights, rows, strict=True))
            covariances[c] = (counts[c] * covariances[c] + outer) / total
            means[c] = (counts[c] * means[c] + sum(w * x for w, x in zip(weights, rows, strict=True))) / total
            counts[c] = total
        if number % m.refresh == 0:
            mean = sum(covariances) / task.classes
            precision, used = torch.linalg.inv((1 - m.epsilon) * mean + m.epsilon * identity), list(means)
    return torch.stack(answers), torch.stack(means), torch.tensor(counts, dtype=torch.float64), torch.stack(covariances)


CASES = {
    "defaults": (dict(images=36), dict()),
    "strong": (dict(), dict(epsilon=1e-2, eta=3.0, rho=0.5)),
    "every fourth": (dict(), dict(refresh=4, epsilon=1e-2)),
    "many views": (dict(views=25, images=20), dict(refresh=3, epsilon=1e-2)),
    "views alike in weight": (dict(views=6, images=20), dict(selection=1.0)),
    "from the prompts": (dict(), dict(start="text")),
    "wide to start from": (dict(images=10), dict(sigma=0.5)),
    "identity alone": (dict(images=10), dict(epsilon=1.0)),
}


@pytest.mark.parametrize(("made", "settings"), CASES.values(), ids=CASES)
def test_it_is_the_plain_loop_with_an_inverse(made, settings):
    task, stream = stream_of(**made)
    method = DOTA(**settings)
    logits, state = method.scan(task, method.init(task), stream)
    expected, means, counts, covariances = reference(task, stream, method)
    assert_close(logits, expected, "stream")
    assert_close(state.mean, means, "stream", "means")
    assert_close(state.counts, counts, "stream", "counts")
    assert_close(state.covariance, covariances, "stream", "covariances")


@given(classes=st.integers(2, 7), images=st.integers(1, 8), views=st.integers(1, 12), seed=st.integers(0, 999))
def test_it_is_the_plain_loop_on_any_stream(classes, images, views, seed):
    task, stream = stream_of(classes, 6, images, views, seed)
    logits, _ = DOTA().scan(task, DOTA().init(task), stream)
    assert_close(logits, reference(task, stream, DOTA())[0], "stream")


def test_one_covariance_is_the_mean_of_those_of_the_classes_while_they_agree():
    """After one image the classes differ; their mean does not need to know that yet."""
    task, stream = stream_of()
    own, shared = DOTA(), DOTA(class_memory=0)
    for method, rows in ((own, task.classes), (shared, 1)):
        assert method.init(task).covariance.shape == (rows, task.dim, task.dim)
    one, other = (method.scan(task, method.init(task), stream[:2]) for method in (own, shared))
    assert_close(other[0], one[0], "stream")
    first = [method.step(task, method.init(task), stream[0])[1].covariance.mean(0) for method in (own, shared)]
    assert_close(first[1], first[0], "stream")


def test_one_covariance_answers_almost_as_those_of_the_classes():
    task, stream = stream_of(images=200)
    own, _ = DOTA().scan(task, DOTA().init(task), stream)
    shared = DOTA(class_memory=0)
    other, _ = shared.scan(task, shared.init(task), stream)
    assert (own.argmax(1) == other.argmax(1)).double().mean() > 0.97
    assert not torch.equal(own, other)


def test_the_classes_share_a_covariance_where_their_own_would_take_too_much_memory():
    large, _ = stream_of(classes=70, dim=512, images=1, dtype=torch.float32)
    small = Task(large.text[:64], large.classnames[:64])
    assert DOTA().init(small).covariance.shape[0] == 64  # 64 MiB
    assert DOTA().init(large).covariance.shape[0] == 1
    assert DOTA(class_memory=70).init(large).covariance.shape[0] == 70


@given(seed=st.integers(0, 999), memory=st.sampled_from([0, 64]))
def test_a_rotated_space_gives_the_same_logits(seed, memory):
    task, stream = stream_of(images=12, seed=seed)
    noise = torch.randn(12, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    turn = torch.linalg.qr(noise).Q
    turned = Task(task.text @ turn, task.classnames, task.scale)
    method = DOTA(start="text", class_memory=memory)
    one, _ = method.scan(task, method.init(task), stream)
    other, _ = method.scan(turned, method.init(turned), stream @ turn)
    assert_close(one, other, "stream")


@pytest.mark.parametrize("memory", [0, 64])
@pytest.mark.parametrize("epsilon", [1e-6, 1e-4, 1e-2])
def test_more_features_than_images_stay_finite_and_float32_follows_float64(epsilon, memory):
    """With one image in 200 dimensions the covariance has rank one, but for what it starts from."""
    method = DOTA(epsilon=epsilon, class_memory=memory)
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
        gaussian = state.white @ torch.linalg.solve(state.factor.mT, views[0]) - state.bias
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
            changed.append(not torch.equal(state.white, after.white))
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
    [
        dict(),
        dict(class_memory=0),
        dict(refresh=7, start="text", selection=0.5),
        dict(eta=0.0),
        dict(epsilon=1.0, rho=1.0),
    ],
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
        ("sigma", 0.0),
        ("epsilon", 0.0),
        ("epsilon", 1.5),
        ("start", "prompt"),
        ("refresh", 0),
        ("class_memory", -1),
        ("selection", 0.0),
    ],
)
def test_settings_out_of_range_are_refused_by_name_and_value(name, value):
    with pytest.raises(SettingError) as caught:
        DOTA(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)

"""OnZeta against a plain loop over lists, and what its settings mean."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerances import assert_close

from testtime import toy
from testtime.checks import check_method
from testtime.methods.onzeta import OnZeta
from testtime.types import SettingError


def stream_of(classes: int = 6, images: int = 40, seed: int = 0):
    return toy(classes=classes, dim=16, images=images, views=1, seed=seed, dtype=torch.float64)


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    powers = [math.exp(x - top) for x in logits]
    return [x / sum(powers) for x in powers]


def reference(task, stream, m: OnZeta):
    """Scores of every image, proxies and dual variables, one class and one number at a time."""
    proxies, dual, answers = [row.tolist() for row in task.text], [0.0] * task.classes, []
    for i, views in enumerate(stream, 1):
        x = views[0].tolist()
        cosines = [sum(a * b for a, b in zip(row, x, strict=True)) for row in task.text.tolist()]
        p = softmax([cosine / m.tau_text for cosine in cosines])
        p = [a * math.exp(rho) for a, rho in zip(p, dual, strict=True)]
        p = [a / sum(p) for a in p]
        q = softmax([sum(a * b for a, b in zip(w, x, strict=True)) / m.tau_image for w in proxies])
        passed = min(i / m.stream_length, 1) if m.stream_length else i / (i + 10 * task.classes)
        b = m.mix * math.sqrt(passed)
        answers.append([b * own + (1 - b) * text for own, text in zip(q, p, strict=True)])
        for c in range(task.classes):
            dual[c] = max(0.0, dual[c] - m.lr_label / math.sqrt(i) * (p[c] - m.balance / task.classes))
            step = m.lr_image / math.sqrt(i) / m.tau_image * (q[c] - p[c])
            moved = [w - step * a for w, a in zip(proxies[c], x, strict=True)]
            length = math.sqrt(sum(w * w for w in moved))
            proxies[c] = [w / length for w in moved]
    return (torch.tensor(part, dtype=torch.float64) for part in (answers, proxies, dual))


CASES = {
    "released": dict(stream_length=40),
    "longer than it said": dict(stream_length=25),
    "shorter than it said": dict(),
    "unknown length": dict(stream_length=0),
    "short steps": dict(stream_length=40, lr_image=0.02, lr_label=0.5),
    "half the share": dict(stream_length=40, balance=0.5),
    "no balance": dict(stream_length=40, balance=0.0),
    "other temperatures": dict(stream_length=40, tau_text=0.02, tau_image=0.1),
    "proxies alone at the end": dict(stream_length=40, mix=1.0),
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_it_is_the_plain_loop(settings):
    task, stream, _ = stream_of()
    method = OnZeta(**settings)
    scores, state = method.scan(task, method.init(task), stream)
    answers, proxies, dual = reference(task, stream, method)
    assert_close(scores, answers, "stream")
    assert_close(state.image, proxies, "stream")
    assert_close(state.dual, dual, "stream")


@given(classes=st.integers(2, 9), images=st.integers(1, 12), seed=st.integers(0, 999))
def test_scores_are_probabilities_and_dual_variables_are_not_negative(classes, images, seed):
    task, stream, _ = stream_of(classes, images, seed=seed)
    scores, state = OnZeta().scan(task, OnZeta().init(task), stream)
    assert_close(scores.sum(1), torch.ones(images).double(), "arithmetic")
    assert scores.min() >= 0 and state.dual.min() >= 0
    assert_close(state.image.norm(dim=1), torch.ones(classes).double(), "arithmetic")
    assert torch.equal(OnZeta().probabilities(scores), scores)


def test_a_known_length_changes_the_mix_and_nothing_that_is_learned():
    task, stream, _ = stream_of()
    (short, one), (long, other) = (
        method.scan(task, method.init(task), stream) for method in (OnZeta(stream_length=40), OnZeta())
    )
    assert all(map(torch.equal, one, other))
    assert not torch.equal(short, long)


def test_without_proxies_and_dual_variables_it_is_zero_shot():
    task, stream, _ = stream_of()
    method = OnZeta(mix=0.0, lr_label=0.0)
    scores, _ = method.scan(task, method.init(task), stream)
    assert_close(scores, task.zero_shot(stream[:, 0]).softmax(1), "arithmetic")


def test_another_logit_scale_gives_the_same_proportions():
    """An encoder whose cosines are twice as spread has half the scale; temperatures follow it."""
    task, stream, _ = stream_of()
    method = OnZeta(mix=0.0, lr_label=0.0)
    half = replace(task, scale=50.0)
    scores, _ = method.scan(half, method.init(half), stream)
    assert_close(scores, half.zero_shot(stream[:, 0]).softmax(1), "arithmetic")


def test_a_class_that_never_comes_is_raised():
    task, stream, labels = stream_of(images=120)
    method = OnZeta(mix=0.0, lr_label=1.0)
    state = method.scan(task, method.init(task), stream[labels != 2])[1]
    assert state.dual.argmax().item() == 2 and state.dual[2] > 1


def test_steps_for_few_classes_stay_near_zero_shot_where_the_released_ones_do_not():
    task, stream, labels = stream_of(classes=10, images=200)
    right = {
        name: (method.scan(task, method.init(task), stream)[0].argmax(1) == labels).double().mean().item()
        for name, method in (("ours", OnZeta.unknown_length()), ("released", OnZeta.released(stream_length=200)))
    }
    frozen = (task.zero_shot(stream[:, 0]).argmax(1) == labels).double().mean().item()
    assert 0.3 < frozen < 0.95
    assert right["ours"] > frozen - 0.03 > right["released"]


@pytest.mark.parametrize("method", [OnZeta(), OnZeta.unknown_length(), OnZeta(stream_length=24)], ids=str)
def test_it_keeps_every_promise(method):
    check_method(method)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream_length", -1),
        ("tau_text", 0.0),
        ("tau_image", -0.1),
        ("lr_image", math.nan),
        ("lr_label", -1.0),
        ("balance", -0.5),
        ("mix", 1.1),
    ],
)
def test_settings_out_of_range_are_refused_by_name_and_value(name, value):
    with pytest.raises(SettingError) as caught:
        OnZeta(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)

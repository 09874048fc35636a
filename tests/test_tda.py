"""TDA against a plain loop over dictionaries of lists, and each cache on its own."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tolerances import assert_close

from testtime import toy
from testtime.checks import check_method
from testtime.methods.tda import TDA
from testtime.types import SettingError


def stream_of(images: int = 60, views: int = 1, classes: int = 6, scale: float = 40.0, seed: int = 0):
    """A stream with soft predictions, so that images reach the negative cache too."""
    task, stream, _ = toy(classes=classes, dim=16, images=images, views=views, seed=seed, dtype=torch.float64)
    return replace(task, scale=scale), stream


def entropy_of(p):
    return -sum(float(x) * math.log(float(x)) for x in p if x > 0)


def put(cache, label, item, capacity):
    row = cache.setdefault(label, [])
    if len(row) < capacity:
        row.append(item)
    elif item[1] < row[-1][1]:
        row[-1] = item
    row.sort(key=lambda kept: kept[1])


def reference(task, stream, m: TDA):
    """Logits of every image, and the two caches: class -> [(feature, entropy, probabilities)], best first."""
    positive, negative, answers = {}, {}, []
    for views in stream:
        logits = [task.scale * task.text @ view for view in views]
        probs = [row.softmax(0) for row in logits]
        order = sorted(range(len(views)), key=lambda i: entropy_of(probs[i]))
        chosen = order[: max(1, int(len(views) * m.selection))]
        feature = sum(views[i] for i in chosen) / len(chosen)
        answer = sum(logits[i] for i in chosen) / len(chosen)
        prob = sum(probs[i] for i in chosen) / len(chosen)
        label, cost = int(answer.argmax()), entropy_of(prob)
        if m.pos_capacity:
            put(positive, label, (feature, cost, prob), m.pos_capacity)
        if m.neg_capacity and m.neg_entropy_lower < cost / math.log2(task.classes) < m.neg_entropy_upper:
            put(negative, label, (feature, cost, prob), m.neg_capacity)
        answer = answer.tolist()
        for c, row in positive.items():
            for key, _, _ in row:
                answer[c] += m.pos_alpha * math.exp(-m.pos_beta * (1 - float(feature @ key)))
        for row in negative.values():
            for key, _, held in row:
                weight = m.neg_alpha * math.exp(-m.neg_beta * (1 - float(feature @ key)))
                for c in range(task.classes):
                    if m.neg_mask_lower < held[c] < m.neg_mask_upper:
                        answer[c] -= weight
        answers.append(answer)
    return torch.tensor(answers, dtype=torch.float64), positive, negative


def assert_cache(bank, rows, prob=None):
    for c in range(len(bank.cost)):
        row = rows.get(c, [])
        assert bank.cost[c].isfinite().sum() == len(row)
        for slot, (feature, cost, held) in enumerate(row):
            assert_close(bank.keys[c, slot], feature, "stream")
            assert bank.cost[c, slot].item() == pytest.approx(cost, abs=1e-9)
            if prob is not None:
                assert_close(prob[c, slot], held, "stream")


CASES = {
    "one view": (dict(), dict()),
    "many views": (dict(views=30), dict()),
    "more views chosen": (dict(views=12), dict(selection=0.4)),
    "other positive cache": (dict(), dict(pos_alpha=5.0, pos_beta=7.0, pos_capacity=5)),
    "positive cache of one": (dict(), dict(pos_capacity=1)),
    "strong negative cache": (dict(), dict(neg_alpha=2.0, neg_beta=3.0, neg_capacity=4)),
    "wide entropy gate": (dict(), dict(neg_entropy_lower=0.0, neg_entropy_upper=1.0, neg_alpha=1.0)),
    "narrow mask": (dict(), dict(neg_mask_lower=0.2, neg_mask_upper=0.6, neg_alpha=1.0)),
    "mask of everything": (dict(images=20), dict(neg_mask_lower=-1.0, neg_alpha=1.0)),
    "no positive cache": (dict(), dict(pos_capacity=0, neg_alpha=1.0)),
    "no negative cache": (dict(), dict(neg_capacity=0)),
    "two classes": (dict(classes=2), dict(neg_alpha=1.0)),
}


@pytest.mark.parametrize(("made", "settings"), CASES.values(), ids=CASES)
def test_it_is_the_plain_loop(made, settings):
    task, stream = stream_of(**made)
    method = TDA(**settings)
    expected, positive, negative = reference(task, stream, method)
    logits, state = method.scan(task, method.init(task), stream)
    assert_close(logits, expected, "stream")
    assert_cache(state.positive, positive)
    assert_cache(state.negative, negative, state.negative_prob)


def test_the_stream_meets_both_sides_of_every_choice():
    task, stream = stream_of()
    _, positive, negative = reference(task, stream, TDA())
    offered = sum(len(row) for row in reference(task, stream, TDA(neg_capacity=1000))[2].values())
    kept = sum(len(row) for row in negative.values())
    assert 0 < kept < offered < len(stream)  # the gate opens and closes, and a row overflowed
    assert sum(len(row) for row in positive.values()) < len(stream)


def test_without_caches_it_is_zero_shot():
    task, stream = stream_of()
    method = TDA(pos_capacity=0, neg_capacity=0)
    logits, state = method.scan(task, method.init(task), stream)
    assert_close(logits, task.zero_shot(stream[:, 0]), "arithmetic")
    assert not method.learned(method.init(task), state)


def test_it_predicts_with_the_mean_of_the_confident_views():
    task, stream = stream_of(views=30)
    method = TDA(pos_capacity=0, neg_capacity=0)
    views = stream[0]
    p = task.zero_shot(views).softmax(1)
    chosen = (-(p * p.log()).sum(1)).topk(3, largest=False).indices
    logits, _ = method.step(task, method.init(task), views)
    assert_close(logits, task.zero_shot(views[chosen].mean(0)), "arithmetic")


def test_each_cache_moves_logits_its_own_way():
    task, stream = stream_of()
    frozen = task.zero_shot(stream[:, 0])
    raising, lowering = TDA(neg_capacity=0), TDA(pos_capacity=0)
    up, _ = raising.scan(task, raising.init(task), stream)
    down, _ = lowering.scan(task, lowering.init(task), stream)
    assert (up - frozen).min() > -1e-9 and (up - frozen).max() > 1
    assert (down - frozen).max() < 1e-9 and (down - frozen).min() < -0.1


def test_the_image_is_in_its_cache_before_it_is_predicted():
    task, stream = stream_of()
    logits, _ = TDA(neg_capacity=0).step(task, TDA(neg_capacity=0).init(task), stream[0])
    frozen = task.zero_shot(stream[0, 0])
    raised = logits - frozen
    assert raised[frozen.argmax()].item() == pytest.approx(2.0)  # alpha, at similarity one
    assert raised.count_nonzero() == 1


def test_learned_says_whether_a_cache_took_the_image_in():
    task, stream = stream_of()
    method = TDA()
    state, said, true = method.init(task), [], []
    for views in stream:
        _, after = method.step(task, state, views)
        said.append(bool(method.learned(state, after)))
        pairs = (state.positive, after.positive), (state.negative, after.negative)
        true.append(any(not torch.equal(old.keys, new.keys) for old, new in pairs))
        state = after
    assert said == true and set(said) == {True, False}


@pytest.mark.parametrize(
    "settings",
    [dict(), dict(pos_capacity=0), dict(neg_capacity=0), dict(pos_capacity=5, neg_capacity=3, selection=0.5)],
    ids=str,
)
def test_it_keeps_every_promise(settings):
    check_method(TDA(**settings))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pos_alpha", -1.0),
        ("pos_beta", math.nan),
        ("pos_capacity", -1),
        ("neg_alpha", -0.1),
        ("neg_beta", -1.0),
        ("neg_capacity", -2),
        ("neg_entropy_lower", 0.6),
        ("neg_mask_lower", 1.5),
        ("selection", 0.0),
        ("selection", 1.1),
    ],
)
def test_settings_out_of_range_are_refused_by_name_and_value(name, value):
    with pytest.raises(SettingError) as caught:
        TDA(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)

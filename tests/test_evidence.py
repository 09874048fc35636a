"""Evidence against least squares on the stored observations, and what it must and must not make of a stream."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tolerances import assert_close

from testtime import ops, toy
from testtime.checks import check_method
from testtime.methods.evidence import Evidence, fit
from testtime.types import SettingError, Task


def stream_of(views: int = 1, images: int = 60, classes: int = 6, scale: float = 30.0, seed: int = 0):
    task, stream, _ = toy(classes=classes, dim=16, images=images, views=views, seed=seed, dtype=torch.float64)
    return replace(task, scale=scale), stream


def entropy_of(logits):
    p = np.exp(logits - logits.max())
    p /= p.sum()
    return -sum(x * np.log(x) for x in p if x > 0)


def reference(task, stream, method):
    """Logits of every image: dictionaries of lists, and a regression from scratch on all earlier observations."""
    text, kept, observations, images, answers = task.text.numpy(), {}, [], 0, []
    for views in stream.numpy():
        logits = task.scale * views @ text.T
        order = sorted(range(len(views)), key=lambda i: entropy_of(logits[i]))
        chosen = order[: max(1, int(len(views) * method.selection))]
        feature, answer = views[chosen].mean(0), logits[chosen].mean(0)
        feature = feature / np.linalg.norm(feature)
        label, seen = int(answer.argmax()), sorted(kept)
        similar = np.array([np.mean([feature @ other for _, other in kept[k]]) for k in seen])
        triples = [
            (float(k == label) - float(label in seen) / len(seen), answer[k] - answer[seen].mean(), s - similar.mean())
            for k, s in zip(seen, similar, strict=True)
        ]
        result = answer.copy()
        if observations:
            # one more image says that membership means nothing, and leaves an average spread unexplained
            rows = np.array([*observations, (1.0, 0.0, 0.0)])
            (a, b), *_ = np.linalg.lstsq(rows[:, :2], rows[:, 2], rcond=None)
            left = ((rows[:, 2] - rows[:, :2] @ (a, b)) ** 2).sum() + (rows[:, 2] ** 2).sum() / images
            variance = left / images * (1 + task.classes / images)
            a = max(a, 0)
            for k, (_, z, c) in zip(seen, triples, strict=True):
                ratio = a / variance * (c - b * z - a * (0.5 - 1 / len(seen)))
                result[k] += min(max(ratio, -method.limit), method.limit)
        answers.append(result)
        row = kept.setdefault(label, [])
        if any(feature @ other > method.duplicate for _, other in row):
            continue
        if len(seen) > 1:
            observations += [np.array(triple) / len(seen) ** 0.5 for triple in triples]
            images += 1
        row.append((entropy_of(answer), feature))
        row.sort(key=lambda item: item[0])  # stable: among equals the older comes first
        del row[method.capacity :]
    return torch.tensor(np.array(answers))


@pytest.mark.parametrize(
    "options, settings",
    [
        (dict(), dict()),
        (dict(views=30), dict()),
        (dict(views=5, seed=3), dict(selection=0.5)),
        (dict(images=150, scale=8.0), dict(capacity=1)),
        (dict(classes=2, scale=10.0), dict(limit=0.3, capacity=5)),
        (dict(images=80, classes=20), dict(duplicate=0.9)),
    ],
)
def test_agrees_with_least_squares_on_stored_observations(options, settings):
    task, stream = stream_of(**options)
    method = Evidence(**settings)
    logits, _ = method.scan(task, method.init(task), stream)
    assert_close(logits, reference(task, stream, method), "stream")
    assert float((logits - reference(task, stream, replace(method, limit=0.0))).abs().max()) > 0.01


def test_fit_finds_membership_and_echo():
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(5000, generator=generator, dtype=torch.float64)
    member = (z + torch.randn(5000, generator=generator, dtype=torch.float64) > 1).double()
    noise = 0.1 * torch.randn(5000, generator=generator, dtype=torch.float64)
    for strength in (0.2, 0.0):
        rows = torch.stack([member, z, strength * member + 0.05 * z + noise])
        found = fit(rows @ rows.T, torch.tensor(5000), classes=50)
        assert float(found.member) == pytest.approx(strength, abs=0.01)
        assert float(found.echo) == pytest.approx(0.05, abs=0.005)
        assert float(found.variance) == pytest.approx(0.01 * 1.01, rel=0.05)


def test_before_anything_is_learned_there_is_no_evidence():
    none = fit(torch.zeros(3, 3, dtype=torch.float64), torch.tensor(0), classes=10)
    assert none.member == 0
    task, stream = stream_of(images=2)
    logits, _ = Evidence().scan(task, Evidence().init(task), stream)
    assert_close(logits, task.zero_shot(stream[:, 0]), "arithmetic")


def test_classes_without_images_keep_their_text_logits():
    task, stream = stream_of(classes=30, images=40)
    method, state = Evidence(), Evidence().init(task)
    for views in stream:
        unseen = state.bank.cost[:, 0].isinf()
        logits, state = method.step(task, state, views)
        assert torch.equal(logits[unseen], task.zero_shot(views[0])[unseen])
    assert unseen.any() and not torch.equal(logits, task.zero_shot(views[0]))


@pytest.mark.parametrize("off", [dict(capacity=0), dict(limit=0.0)])
def test_without_a_bank_or_a_limit_it_is_zero_shot(off):
    task, stream = stream_of()
    logits, _ = Evidence(**off).scan(task, Evidence(**off).init(task), stream)
    assert_close(logits, task.zero_shot(stream[:, 0]), "arithmetic")


def test_evidence_stays_within_its_limit():
    task, stream = stream_of(images=200)
    for limit in (0.1, 1.0):
        logits, _ = Evidence(limit=limit).scan(task, Evidence().init(task), stream)
        assert float((logits - task.zero_shot(stream[:, 0])).abs().max()) == pytest.approx(limit, abs=1e-9)


def test_a_repeated_image_teaches_nothing():
    task, stream = stream_of()
    method = Evidence()
    _, state = method.scan(task, method.init(task), stream)
    _, once = method.step(task, state, stream[0] * 0 + ops.unit(task.text[:1]))  # as confident as can be: it is kept
    _, twice = method.step(task, once, stream[0] * 0 + ops.unit(task.text[:1]))
    assert method.learned(state, once) and not method.learned(once, twice)
    assert torch.equal(once.products, twice.products) and torch.equal(once.bank.keys, twice.bank.keys)


def clustered(share: float, seed: int = 0) -> tuple[Task, torch.Tensor, torch.Tensor]:
    """Images of 10 classes: the text's direction, noise, and with `share` a direction that only the images share."""
    generator = torch.Generator().manual_seed(seed)
    text = ops.unit(torch.randn(10, 64, generator=generator))
    visual = ops.unit(torch.randn(10, 64, generator=generator))
    labels = torch.randint(10, (800,), generator=generator)
    noise = torch.randn(800, 64, generator=generator) / 8
    images = ops.unit(0.3 * text[labels] + share * visual[labels] + noise)
    return Task(text, tuple(map(str, range(10))), 30.0), images[:, None], labels


def gap(task, stream, labels):
    """Right answers gained over zero-shot, in points."""
    logits, _ = Evidence().scan(task, Evidence().init(task), stream)
    right, frozen = logits.argmax(1) == labels, task.zero_shot(stream[:, 0]).argmax(1) == labels
    return 100 * float(right.float().mean() - frozen.float().mean())


def test_gains_where_images_of_a_class_are_alike():
    assert gap(*clustered(share=1.0)) > 10


@pytest.mark.parametrize("seed", range(3))
def test_loses_next_to_nothing_where_images_share_only_the_texts_opinion(seed):
    assert gap(*clustered(share=0.0, seed=seed)) > -1.0


def test_many_images_do_not_wear_the_sums_out():
    task, stream = stream_of(images=30)
    method = Evidence()
    _, state = method.scan(task, method.init(task), stream)
    old = state._replace(products=state.products * 1e9, images=state.images * 10**9)
    _, after = method.step(task, old, stream[0])  # a float32 sum would not change any more
    assert (after.images > old.images) == (after.products[2, 2] > old.products[2, 2])
    assert after.images > old.images or not method.learned(old, after)


@pytest.mark.parametrize("settings", [dict(), dict(capacity=1, limit=1.0), dict(selection=1.0)])
def test_contract(settings):
    check_method(Evidence(**settings))


@pytest.mark.parametrize(
    "settings", [dict(capacity=-1), dict(limit=-1.0), dict(selection=0.0), dict(selection=1.5), dict(capacity=2.5)]
)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(SettingError, match=next(iter(settings))):
        Evidence(**settings)

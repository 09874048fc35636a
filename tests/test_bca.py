"""BCA against a plain loop over lists, and what its settings mean."""

from __future__ import annotations

import math

import pytest
import torch
from tolerances import assert_close

from testtime import toy
from testtime.checks import check_method
from testtime.methods.bca import BCA
from testtime.types import SettingError


def stream_of(views: int = 1, images: int = 60):
    return toy(classes=5, dim=12, images=images, views=views, dtype=torch.float64)


def softmax(logits: list[float]) -> list[float]:
    powers = [math.exp(x - max(logits)) for x in logits]
    return [x / sum(powers) for x in powers]


def entropy(share: list[float]) -> float:
    return -sum(p * math.log(p) for p in share if p > 0)


def mean(rows: list[list[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def dot(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def reference(task, stream, m: BCA):
    """Scores of every image, class embeddings and priors, one class and one number at a time."""
    classes, answers = range(task.classes), []
    embeddings, seen = [row.tolist() for row in task.text], [m.mean_count] * task.classes
    priors, weighed = [[float(a == b) for b in classes] for a in classes], [m.prior_count] * task.classes
    for views in stream.tolist():
        logits = [[task.scale * dot(view, row) for row in embeddings] for view in views]
        order = sorted(range(len(views)), key=lambda v: entropy(softmax(logits[v])))
        chosen = order[: max(1, int(len(views) * m.selection))]
        feature, likely = mean([views[v] for v in chosen]), softmax(mean([logits[v] for v in chosen]))
        scores = [sum(likely[k] * priors[k][c] for k in classes) for c in classes]
        answers.append(scores)
        best = max(classes, key=lambda c: scores[c])
        sure = scores[best]
        if sure > m.mean_threshold:
            moved = [(seen[best] * a + b) / (seen[best] + 1) for a, b in zip(embeddings[best], feature, strict=True)]
            length = math.sqrt(dot(moved, moved))
            embeddings[best], seen[best] = [a / length for a in moved], seen[best] + 1
        if sure > m.prior_threshold:
            row = [(weighed[best] * a + b) / (weighed[best] + 1) for a, b in zip(priors[best], scores, strict=True)]
            priors[best], weighed[best] = row, weighed[best] + 1
    return (torch.tensor(part, dtype=torch.float64) for part in (answers, embeddings, priors, seen, weighed))


CASES = {
    "as it comes": (1, {}),
    "short memories": (1, dict(mean_count=3, prior_threshold=0.4)),
    "no prompt in the mean": (1, dict(mean_count=0, prior_count=0)),
    "unsure ones teach nothing": (1, dict(mean_count=2, mean_threshold=0.7, prior_threshold=0.9)),
    "several views": (20, dict(mean_count=3)),
    "fewer views than ten": (6, dict(mean_count=3)),
}


@pytest.mark.parametrize(("views", "settings"), CASES.values(), ids=CASES)
def test_it_is_the_plain_loop(views, settings):
    task, stream, _ = stream_of(views)
    method = BCA(**settings)
    scores, state = method.scan(task, method.init(task), stream)
    for ours, theirs in zip((scores, *state), reference(task, stream, method), strict=True):
        assert_close(ours, theirs, "stream")
    assert 0 < (state.embedded - method.mean_count).sum() <= len(stream)


def test_without_learning_it_is_zero_shot():
    task, stream, _ = stream_of()
    method = BCA(mean_threshold=1.0, prior_threshold=1.0)
    scores, state = method.scan(task, method.init(task), stream)
    assert_close(scores, task.zero_shot(stream[:, 0]).softmax(1), "arithmetic")
    assert torch.equal(state.prior, torch.eye(5).double())


def test_it_learned_if_either_part_did():
    task, stream, _ = stream_of()
    method = BCA(mean_threshold=0.99, prior_threshold=0.5)
    state, told = method.init(task), []
    for views in stream:
        scores, after = method.step(task, state, views)
        assert bool(method.learned(state, after)) == bool(scores.max() > 0.5)
        told.append(bool(method.learned(state, after)))
        state = after
    assert len(set(told)) == 2


def test_it_keeps_every_promise():
    check_method(BCA())
    check_method(BCA(mean_count=1, prior_threshold=0.2))


@pytest.mark.parametrize("settings", [{"mean_threshold": 1.5}, {"prior_count": -1}, {"selection": 0.0}])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(SettingError, match=next(iter(settings))):
        BCA(**settings)

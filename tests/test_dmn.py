"""DMN-ZS against a plain loop over lists, and its memory on its own."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tolerances import assert_close

from testtime import Session, toy
from testtime.checks import check_method
from testtime.methods.dmn import DMN, State
from testtime.types import SettingError


def stream_of(images: int = 50, views: int = 1, classes: int = 5, scale: float = 60.0, seed: int = 0):
    task, stream, _ = toy(classes=classes, dim=16, images=images, views=views, seed=seed, dtype=torch.float64)
    return replace(task, scale=scale), stream


def softmax(values):
    top = max(values)
    weights = [math.exp(v - top) for v in values]
    return [w / sum(weights) for w in weights]


def reference(task, stream, m: DMN):
    """Scores, text and memory probabilities of every image, and the memory: class -> [[feature, entropy]]."""
    memory = {c: [] for c in range(task.classes)}
    scores, parts = [], []
    for views in stream:
        probs = [softmax([task.scale * float(t @ view) for t in task.text]) for view in views]
        spread = [-sum(p * math.log(p + 1e-6) for p in row) for row in probs]
        chosen = sorted(range(len(views)), key=spread.__getitem__)[: max(1, int(len(views) * m.selection))]
        vote = [sum(probs[i][c] for i in chosen) / len(chosen) for c in range(task.classes)]
        label, cost = vote.index(max(vote)), -sum(q * math.log(q + 1e-8) for q in vote)
        row = memory[label]
        if len(row) < m.memory_size:
            row.append([views[0], cost])
        elif row:
            worst = max(range(len(row)), key=lambda i: row[i][1])
            if cost < row[worst][1]:
                row[worst] = [views[0], cost]
        logits = []
        for c, text in enumerate(task.text):
            keys = [feature for feature, _ in memory[c]] + [text]
            vector = sum(math.exp(-m.beta * (1 - float(key @ views[0]))) * key for key in keys)
            logits.append(task.scale * float(vector @ views[0]) / float(vector.norm()))
        parts.append((probs[0], softmax(logits)))
        scores.append([m.fusion_text * a + m.fusion_memory * b for a, b in zip(*parts[-1], strict=True)])
    return torch.tensor(scores, dtype=torch.float64), torch.tensor(parts, dtype=torch.float64), memory


CASES = {
    "one view": (dict(), dict()),
    "many views": (dict(views=32), dict()),
    "more views vote": (dict(views=12), dict(selection=0.5)),
    "small memory": (dict(), dict(memory_size=2)),
    "memory of one, many views": (dict(views=20), dict(memory_size=1)),
    "no memory": (dict(), dict(memory_size=0)),
    "other weights": (dict(), dict(fusion_memory=0.3, fusion_text=2.0)),
    "memory alone": (dict(), dict(fusion_text=0.0)),
    "text alone": (dict(), dict(fusion_memory=0.0)),
    "blunt": (dict(views=4), dict(beta=0.0, memory_size=3)),
    "sharp": (dict(views=4), dict(beta=20.0)),
    "two classes": (dict(classes=2), dict(memory_size=4)),
}


@pytest.mark.parametrize(("made", "settings"), CASES.values(), ids=CASES)
def test_it_is_the_plain_loop(made, settings):
    task, stream = stream_of(**made)
    method = DMN(**settings)
    expected, _, memory = reference(task, stream, method)
    scores, state = method.scan(task, method.init(task), stream)
    assert_close(scores, expected, "stream")
    for c, row in memory.items():
        assert state.entropy[c].isfinite().tolist() == [slot < len(row) for slot in range(method.memory_size)]
        for slot, (feature, cost) in enumerate(row):
            assert torch.equal(state.features[c, slot], feature)  # the clean view, as it came
            assert state.entropy[c, slot].item() == pytest.approx(cost, abs=1e-9)
        assert not state.features[c, len(row) :].any()


def test_parts_are_the_two_classifiers_that_the_score_adds_up():
    task, stream = stream_of(views=12)
    method = DMN(fusion_memory=3.0)
    _, parts, _ = reference(task, stream, method)
    state = method.init(task)
    for views, expected in zip(stream, parts, strict=True):
        score, after = method.step(task, state, views)
        state = method.remember(task, state, views)
        text, memory = method.parts(task, state, views)
        assert_close(torch.stack([text, memory]), expected, "stream")
        assert_close(text + 3.0 * memory, score, "arithmetic")
        assert torch.equal(state.entropy, after.entropy)


def test_a_full_row_replaces_the_first_of_the_most_uncertain():
    task, stream = stream_of(views=4)
    method = DMN(memory_size=3)
    label = method.vote(task, stream[0]).argmax()
    fresh = method.init(task)
    full = State(fresh.features, fresh.entropy.index_fill(0, label, 2.0))
    full.entropy[label, 0] = 1e-12  # more certain than the image
    after = method.remember(task, full, stream[0])
    assert torch.equal(after.features[label, 1], stream[0, 0])
    assert after.entropy[label, 1] < 2.0 and after.entropy[label, 2] == 2.0
    assert after.features.count_nonzero() == task.dim


def test_an_image_as_uncertain_as_the_worst_is_not_kept():
    task, stream = stream_of()
    method = DMN(memory_size=1)
    once = method.remember(task, method.init(task), stream[0])
    twice = method.remember(task, once, stream[0])
    assert torch.equal(once.entropy, twice.entropy)
    assert method.learned(method.init(task), once) and not method.learned(once, twice)


def test_an_empty_memory_and_the_text_agree():
    task, stream = stream_of()
    text, memory = DMN().parts(task, DMN().init(task), stream[0])
    assert_close(memory, text, "arithmetic")


def test_probabilities_sum_to_one_and_keep_the_order():
    task, stream = stream_of()
    method = DMN(fusion_memory=10.0)
    scores, _ = method.scan(task, method.init(task), stream)
    p = method.probabilities(scores)
    assert_close(scores.sum(1), torch.full((len(stream),), 11.0), "stream")
    assert_close(p.sum(1), torch.ones(len(stream)), "arithmetic")
    assert torch.equal(p.argsort(1), scores.argsort(1))
    prediction = Session(task, method).step(stream[0])
    assert 0 < prediction.confidence <= 1


def test_the_memory_can_be_pure_because_it_is_copied():
    task, stream = stream_of()
    method = DMN(memory_size=2)
    start = method.init(task)
    method.scan(task, start, stream)
    assert not start.features.any() and start.entropy.isinf().all()


@pytest.mark.parametrize("settings", [dict(), dict(memory_size=2), dict(memory_size=0), dict(fusion_text=0.0)], ids=str)
def test_it_keeps_every_promise(settings):
    check_method(DMN(**settings))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory_size", -1),
        ("fusion_memory", -1.0),
        ("fusion_memory", math.nan),
        ("fusion_text", -0.5),
        ("beta", -1.0),
        ("selection", 0.0),
        ("selection", 2.0),
    ],
)
def test_settings_out_of_range_are_refused_by_name_and_value(name, value):
    with pytest.raises(SettingError) as caught:
        DMN(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)


def test_someone_has_to_be_heard():
    with pytest.raises(SettingError, match="fusion_memory"):
        DMN(fusion_memory=0.0, fusion_text=0.0)

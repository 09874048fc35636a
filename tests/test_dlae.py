"""DLAE against a plain loop over lists with autograd and torch's own AdamW."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tolerances import assert_close

from testtime import toy
from testtime.checks import check_method
from testtime.methods.dlae import DLAE
from testtime.methods.dpe import DPE
from testtime.types import SettingError


def stream_of(images: int = 60, views: int = 1, classes: int = 6, scale: float = 40.0, seed: int = 0):
    task, stream, _ = toy(classes=classes, dim=16, images=images, views=views, seed=seed, dtype=torch.float64)
    return replace(task, scale=scale), stream


def entropy_of(p):
    return -(p * p.log()).sum()


def look(views, weights, scale, predicted, confidence, m: DLAE):
    """Mean feature, mean damped logits (with gradients), mean probability, label, and label without damping."""
    logits = scale * views @ weights.T
    count = max(1, int(len(views) * m.selection))

    def chosen(rows):
        return sorted(range(len(rows)), key=lambda i: float(entropy_of(rows[i].softmax(0))))[:count]

    kept = chosen(logits.detach())
    first = int(logits[kept].mean(0).argmax())
    p1 = float(logits[kept].detach().softmax(1).mean(0)[first])
    damped = torch.stack(
        [
            logits[:, c] * math.exp(-m.adjustment * (1 - (p1 - confidence[first])) * predicted[c] / sum(predicted))
            for c in range(logits.shape[1])
        ],
        1,
    )
    kept = chosen(damped.detach())
    z = damped[kept].mean(0)
    return views[kept].mean(0), z, damped[kept].softmax(1).mean(0), int(z.argmax()), first


def offer(row, item, weight, prompt, now, m: DLAE):
    """A queue of [entropy, feature, time] after an offer; full rows age first."""
    if len(row) < m.queue:
        row.append(item)
        return
    for held in row:
        if float(held[1] @ weight) < float(held[1] @ prompt):
            held[0], held[2] = held[0] * math.exp((now - held[2]) * m.ageing), now
    row.sort(key=lambda held: held[0])
    if item[0] < row[-1][0]:
        row[-1] = item
    row.sort(key=lambda held: held[0])


def reference(task, stream, m: DLAE):
    """Logits of every image, evolved text, queues, counts and confidences."""
    text, updates, classes = task.text.clone(), 0, task.classes
    queues = {c: [] for c in range(classes)}
    predicted, confidence, answers = [1.0] * classes, [0.0] * classes, []
    for now, views in enumerate(stream):
        d_text = torch.zeros_like(text, requires_grad=True)
        weights = F.normalize(text + d_text, dim=1)
        feature, z, p, label, first = look(views, weights, task.scale, predicted, confidence, m)
        cost, p = float(entropy_of(p.detach())), p.detach()
        if label != first:
            cost *= math.exp(-m.doubt_discount * float(weights[label].detach() @ weights[first].detach()))
        predicted[label] += 1
        confidence[label] += (float(p[label]) - confidence[label]) / (predicted[label] - 1)
        offer(queues[label], [cost, feature, now], weights[label].detach(), task.text[label], now, m)

        known = [c for c in range(classes) if queues[c]]
        means = torch.stack([sum(x for _, x, _ in queues[c][:3]) / len(queues[c]) for c in known])
        d_visual = torch.zeros_like(means, requires_grad=True)
        adam = torch.optim.AdamW(
            [d_text, d_visual], lr=m.lr_text, eps=m.adamw_eps, betas=m.adamw_betas, weight_decay=m.adamw_weight_decay
        )
        visual = F.normalize(means + d_visual, dim=1)
        s = z.index_add(0, torch.tensor(known), m.alpha * (m.beta * (visual @ feature - 1)).exp())
        loss = m.entropy_weight * entropy_of(s.softmax(0))
        similarity = visual @ weights[known].T / m.align_temperature
        (loss + m.align_weight * F.cross_entropy(similarity, torch.arange(len(known)))).backward()
        adam.step()
        adapted = F.normalize(text + d_text.detach(), dim=1)
        visual = F.normalize(means + d_visual.detach(), dim=1)

        rows = views if m.multi_view_prediction else views[:1]
        feature, logits, *_ = look(rows, adapted, task.scale, predicted, confidence, m)
        logits = logits.index_add(0, torch.tensor(known), m.alpha * (m.beta * (visual @ feature - 1)).exp())
        if float(entropy_of(logits.softmax(0))) / math.log2(classes) < m.entropy_threshold:
            updates += 1
            text = text * updates / (updates + 1) + adapted / (updates + 1)
        answers.append(logits)
    return torch.stack(answers), text, queues, predicted, confidence


CASES = {
    "ImageNet's": (dict(), dict()),
    "DTD's": (dict(), dict(adjustment=2.0, doubt_discount=0.5, ageing=0.02, align_weight=0.2, beta=3.0)),
    "many views": (dict(views=30, images=30), dict(adjustment=3.2, doubt_discount=0.5, ageing=0.01)),
    "reselected views": (dict(views=25, images=30), dict(multi_view_prediction=True, adjustment=2.0)),
    "long queues": (dict(images=90), dict(queue=5, ageing=0.05, adjustment=1.0)),
    "a queue of one": (dict(), dict(queue=1, ageing=0.05)),
    "no alignment": (dict(images=30), dict(align_weight=0.0, adjustment=2.0)),
    "sharp": (dict(scale=100.0), dict(adjustment=2.0, ageing=0.02)),
}


@pytest.mark.parametrize(("made", "settings"), CASES.values(), ids=CASES)
def test_it_is_the_plain_loop(made, settings):
    task, stream = stream_of(**made)
    method = DLAE(**settings)
    logits, state = method.scan(task, method.init(task), stream)
    expected, text, queues, predicted, confidence = reference(task, stream, method)
    assert_close(logits, expected, "stream")
    assert_close(state.text, text, "stream", "text")
    assert state.predicted.tolist() == predicted
    assert state.confidence.tolist() == pytest.approx(confidence, abs=1e-9)
    for c, row in queues.items():
        assert state.queue.cost[c].isfinite().sum() == len(row)
        for slot, (cost, feature, time) in enumerate(row):
            assert_close(state.queue.keys[c, slot], feature, "stream")
            assert state.queue.cost[c, slot].item() == pytest.approx(cost, abs=1e-9)
            assert state.time[c, slot].item() == time


def test_the_streams_meet_doubt_and_ageing():
    """What never happens would not be compared."""
    task, stream = stream_of()
    strong = DLAE(adjustment=2.0, doubt_discount=0.5, ageing=0.02)
    without_doubt, without_age = replace(strong, doubt_discount=0.0), replace(strong, ageing=0.0)
    runs = [method.scan(task, method.init(task), stream)[0] for method in (strong, without_doubt, without_age)]
    assert not torch.allclose(runs[0], runs[1]) and not torch.allclose(runs[0], runs[2])


def test_without_damping_it_is_dpe_with_unsorted_queues():
    task, stream = stream_of()
    plain = DLAE(adjustment=0.0, ageing=0.0)
    same = DPE(lr_image=plain.lr_text)
    logits, _ = plain.scan(task, plain.init(task), stream)
    expected, _ = same.scan(task, same.init(task), stream)
    assert_close(logits, expected, "stream")


def test_a_class_that_is_predicted_often_loses():
    """Two classes that an image cannot tell apart: the rarer one wins."""
    task, stream = stream_of(classes=2)
    between = F.normalize(task.text.sum(0, keepdim=True), dim=1)
    method = DLAE(adjustment=2.0, queue=0, lr_text=0.0)
    state = method.init(task)._replace(predicted=torch.tensor([9.0, 1.0]).double())
    assert method.step(task, state, between)[0].argmax() == 1


def test_every_image_is_learned_from():
    task, stream = stream_of()
    _, after = DLAE().step(task, DLAE().init(task), stream[0])
    assert DLAE().learned(DLAE().init(task), after)


@pytest.mark.parametrize(
    "settings",
    [dict(), dict(adjustment=2.0, ageing=0.02), dict(multi_view_prediction=True), dict(queue=0), dict(steps=2)],
    ids=str,
)
def test_it_keeps_every_promise(settings):
    check_method(DLAE(**settings))


@pytest.mark.parametrize(
    ("name", "value"), [("adjustment", -1.0), ("doubt_discount", -0.1), ("ageing", math.nan), ("queue", -1)]
)
def test_settings_out_of_range_are_refused_by_name_and_value(name, value):
    with pytest.raises(SettingError) as caught:
        DLAE(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)

"""MCP and MCP++ against a plain loop over lists, with autograd and torch's own AdamW."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tolerances import assert_close

from testtime import toy
from testtime.checks import check_method
from testtime.methods.mcp import MCP
from testtime.types import SettingError


def stream_of(images: int = 50, views: int = 12, classes: int = 6, scale: float = 40.0, seed: int = 0):
    """A stream with soft predictions, so that images reach the negative cache too."""
    task, stream, _ = toy(classes=classes, dim=16, images=images, views=views, seed=seed, dtype=torch.float64)
    return replace(task, scale=scale), stream


def entropy_of(p):
    return -(p * p.log()).sum()


def near(x, key, alpha, beta):
    return alpha * math.exp(-beta * (1 - float(x @ key)))


def vote_of(task, views, text, m: MCP):
    probs = [(task.scale * text @ view).softmax(0) for view in views]
    order = sorted(range(len(views)), key=lambda i: -float((probs[i] * (probs[i] + 1e-6).log()).sum()))
    chosen = order[: max(1, int(len(views) * m.selection))]
    return sum(probs[i] for i in chosen) / len(chosen)


def offer(row, capacity, cost, *item):
    """Append where there is room, else replace the last if the cost is lower; then sort."""
    if len(row) < capacity:
        row.append((cost, *item))
    elif row and cost < row[-1][0]:
        row[-1] = (cost, *item)
    row.sort(key=lambda held: held[0])


def plus(task, feature, z, protos, negatives, lowered, m: MCP):
    """MCP++: adapted text (C, D) and prototype logits, by autograd."""
    known = sorted(protos)
    start = torch.stack([protos[c] for c in known])
    d_text, d_visual = torch.zeros_like(task.text, requires_grad=True), torch.zeros_like(start, requires_grad=True)
    groups = [{"params": [d_text], "lr": m.lr_text}, {"params": [d_visual], "lr": m.lr_image}]
    adam = torch.optim.AdamW(groups, eps=m.adamw_eps, betas=m.adamw_betas, weight_decay=m.adamw_weight_decay)
    away = torch.stack(
        [sum(x for _, x, _ in negatives[c]) / len(negatives[c]) if negatives[c] else 0 * feature for c in known]
    )

    def visual_term(v):
        return torch.zeros_like(z).index_add(0, torch.tensor(known), m.alpha * (m.beta * (v @ feature - 1)).exp())

    t, v = F.normalize(task.text + d_text, dim=1), F.normalize(start + d_visual, dim=1)
    s = task.scale * t @ feature + visual_term(v) - lowered
    query, key = F.normalize(v.T, dim=1), F.normalize(t[known].T, dim=1)
    loss = entropy_of(s.softmax(0))
    loss = loss + m.align_weight * F.cross_entropy(query @ key.T / m.align_temperature, torch.arange(len(query)))
    contrast = -(1 - F.cosine_similarity(v, away, dim=1) + 1e-7).log()
    (loss + m.contrast_weight * contrast.mean()).backward()
    adam.step()
    after = F.normalize(start + d_visual.detach(), dim=1)
    return F.normalize(task.text + d_text.detach(), dim=1), s.detach() + visual_term(after) - lowered


def reference(task, stream, m: MCP):
    """The three parts of every image, and the caches and prototypes by class."""
    confident, central, negative = ({c: [] for c in range(task.classes)} for _ in range(3))
    protos, memory, answers, bits = {}, {}, [], math.log2(task.classes)
    for views in stream:
        clean = views[0]
        feature, z = clean, task.scale * task.text @ clean
        h = float(entropy_of(z.softmax(0)))
        if m.multi_view_prediction:
            logits = [task.scale * task.text @ view for view in views]
            order = sorted(range(len(views)), key=lambda i: float(entropy_of(logits[i].softmax(0))))
            chosen = order[: max(1, int(len(views) * m.selection))]
            feature, z = views[chosen].mean(0), torch.stack([logits[i] for i in chosen]).mean(0)
            h = float(entropy_of(torch.stack([logits[i].softmax(0) for i in chosen]).mean(0)))
        q = vote_of(task, views, task.text, m)
        own, voted = int(z.argmax()), int(q.argmax())
        h_q = -float((q * q.clamp_min(1e-8).log()).sum())

        offer(confident[own], m.entropy_capacity, h, feature)
        prompt = task.text[voted]
        centre = m.centre * protos[voted] + (1 - m.centre) * prompt if voted in protos else prompt
        row = central[voted]
        if len(row) < m.align_capacity or (clean - centre).norm() < (row[-1][1] - centre).norm():
            offer(row, m.align_capacity, h_q, clean)
        for c in {own, voted}:
            memory[c] = [x for _, x in central[c] + confident[c]]
            protos[c] = sum(memory[c]) / len(memory[c])

        if m.neg_entropy_lower < h / bits < m.neg_entropy_upper:
            w = z.clone()
            for c, row in confident.items():
                w[c] += sum(near(feature, x, m.alpha, m.beta) for _, x in row)
            h_w, label = float(entropy_of(w.softmax(0))), int(w.argmax())
            if m.neg_entropy_lower < h_w / bits < m.neg_entropy_upper:
                offer(negative[label], m.neg_capacity, h_w, feature, w.softmax(0))
            elif h_w / bits <= m.neg_entropy_lower:
                offer(confident[label], m.entropy_capacity, h_w, feature)
        lowered = torch.zeros_like(z)
        for row in negative.values():
            for _, x, prob in row:
                possible = (m.neg_mask_lower < prob) & (prob < m.neg_mask_upper)
                lowered += near(feature, x, m.neg_alpha, m.neg_beta) * possible.double()

        if m.residual:
            text, logits = plus(task, feature, z, protos, negative, lowered, m)
            q = vote_of(task, views, text, m)
        else:
            logits = z - lowered
            for c, proto in protos.items():
                logits[c] += near(feature, proto, m.alpha, m.beta)
        vectors = []
        for c in range(task.classes):
            keys = [x / x.norm() for x in memory.get(c, [])] + [task.text[c]]
            vectors.append(F.normalize(sum(near(clean, k, 1.0, m.memory_beta) * k for k in keys), dim=0))
        answers.append(torch.stack([q, (task.scale * torch.stack(vectors) @ clean).softmax(0), logits.softmax(0)]))
    return torch.stack(answers, 1), confident, central, negative, protos


def parts_of(task, stream, method: MCP):
    state, rows = method.init(task), []
    for views in stream:
        parts, state = method.parts(task, state, views)
        rows.append(parts)
    return torch.stack(rows, 1), state


def assert_cache(bank, rows, dim):
    for c in range(len(bank.cost)):
        assert bank.cost[c].isfinite().sum() == len(rows[c])
        for slot, (cost, feature, *_) in enumerate(rows[c]):
            assert_close(bank.keys[c, slot, :dim], feature, "stream")
            assert bank.cost[c, slot].item() == pytest.approx(cost, abs=1e-9)


SMALL = dict(entropy_capacity=2, align_capacity=2)
CASES = {
    "defaults": (dict(), dict()),
    "one view": (dict(views=1), SMALL),
    "many views": (dict(views=30), SMALL),
    "more views chosen": (dict(), dict(selection=0.4)),
    "ImageNet-A": (dict(views=25), dict(multi_view_prediction=True, **SMALL)),
    "unequal capacities": (dict(), dict(entropy_capacity=1, align_capacity=3)),
    "blunt": (dict(scale=15.0), dict(neg_alpha=2.0, neg_beta=3.0, neg_capacity=1, alpha=1.0, **SMALL)),
    "reflecting": (dict(scale=15.0), dict(alpha=9.0, beta=1.0, **SMALL)),
    "no negative cache": (dict(), dict(neg_capacity=0)),
    "two classes": (dict(classes=2), SMALL),
    "the prompt as the centre": (dict(), dict(centre=0.0, **SMALL)),
    "MCP++": (dict(), dict(residual=True, lr_text=4e-4, lr_image=4e-4)),
    "MCP++, different rates": (dict(scale=15.0), dict(residual=True, lr_text=1e-3, lr_image=3e-3, **SMALL)),
    "MCP++, ImageNet-A": (dict(views=25, images=25), dict(residual=True, multi_view_prediction=True)),
    "MCP++, contrast": (dict(scale=15.0), dict(residual=True, align_weight=0.0, contrast_weight=5.0, lr_image=0.01)),
}  # fmt: skip


@pytest.mark.parametrize(("made", "settings"), CASES.values(), ids=CASES)
def test_it_is_the_plain_loop(made, settings):
    task, stream = stream_of(**made)
    method = MCP(**settings)
    expected, confident, central, negative, protos = reference(task, stream, method)
    parts, state = parts_of(task, stream, method)
    assert_close(parts, expected, "stream")
    for bank, rows in ((state.entropy, confident), (state.align, central), (state.negative, negative)):
        assert_cache(bank, rows, task.dim)
    for c in range(task.classes):
        assert_close(state.prototypes[c], protos.get(c, torch.zeros_like(task.text[c])), "stream")
    scores, _ = method.scan(task, method.init(task), stream)
    assert_close(scores, parts[0] + parts[1] + parts[2], "arithmetic")


def test_the_streams_meet_both_sides_of_every_choice():
    task, stream = stream_of(scale=15.0)
    reflecting = MCP(alpha=9.0, beta=1.0, **SMALL)
    unlimited = replace(reflecting, entropy_capacity=1000)
    _, confident, *_ = reference(task, stream, unlimited)
    assert sum(map(len, confident.values())) > len(stream)  # some came twice: they were reflected
    _, _, _, negative, _ = reference(task, stream, MCP(alpha=1.0, neg_capacity=1000))
    assert max(map(len, negative.values())) > 3 and sum(map(len, negative.values())) < len(stream)
    _, confident, central, _, _ = reference(task, stream, reflecting)
    assert sum(map(len, central.values())) < len(stream)
    assert any({id(x) for _, x in confident[c]} != {id(x) for _, x in central[c]} for c in confident)


@given(classes=st.integers(2, 6), images=st.integers(1, 12), seed=st.integers(0, 99), residual=st.booleans())
def test_it_is_the_plain_loop_on_any_stream(classes, images, seed, residual):
    task, stream = stream_of(images=images, views=3, classes=classes, seed=seed)
    method = MCP(residual=residual, **SMALL)
    assert_close(parts_of(task, stream, method)[0], reference(task, stream, method)[0], "stream")


def test_a_scan_leaves_its_state_alone():
    """It overwrites a copy."""
    task, stream = stream_of()
    method = MCP(**SMALL)
    state = method.init(task)
    first, after = method.scan(task, state, stream)
    again, _ = method.scan(task, state, stream)
    assert torch.equal(first, again) and not state.held.any()
    one, same = parts_of(task, stream, method)
    assert_close(method.fused(one), first, "arithmetic")
    assert_close(same.gram, after.gram, "arithmetic")


def test_fusion_weights_weigh_the_parts():
    task, stream = stream_of(images=5)
    parts, _ = parts_of(task, stream, MCP())
    method = MCP(fusion_memory=0.3, fusion_prototype=10.0)
    scores, _ = method.scan(task, method.init(task), stream)
    assert_close(scores, parts[0] + 0.3 * parts[1] + 10 * parts[2], "arithmetic")
    assert_close(method.probabilities(scores).sum(1), torch.ones(5).double(), "arithmetic")


def test_learned_says_whether_a_cache_took_the_image_in():
    task, stream = stream_of(images=80)
    method = MCP(**SMALL)
    state, said = method.init(task), []
    for views in stream:
        _, after = method.step(task, state, views)
        held = (after.entropy.keys, after.align.keys, after.negative.keys[..., : task.dim])
        assert method.learned(state, after) == any((keys == views[0]).all(2).any() for keys in held)
        said.append(bool(method.learned(state, after)))
        state = after
    assert set(said) == {True, False}


@pytest.mark.parametrize(
    "settings",
    [dict(), dict(residual=True), dict(residual=True, steps=2), dict(neg_capacity=0), dict(multi_view_prediction=True)],
    ids=str,
)
def test_it_keeps_every_promise(settings):
    check_method(MCP(**settings))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alpha", -1.0),
        ("beta", math.nan),
        ("entropy_capacity", 0),
        ("align_capacity", 0),
        ("centre", 1.5),
        ("fusion_memory", -1.0),
        ("neg_alpha", -0.1),
        ("neg_capacity", -2),
        ("neg_entropy_lower", 0.6),
        ("neg_mask_lower", 1.5),
        ("align_temperature", 0.0),
        ("contrast_weight", -0.2),
        ("lr_text", -1e-3),
        ("steps", -1),
        ("adamw_eps", 0.0),
        ("adamw_betas", (0.9, 1.0)),
        ("selection", 1.1),
    ],
)
def test_settings_out_of_range_are_refused_by_name_and_value(name, value):
    with pytest.raises(SettingError) as caught:
        MCP(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)

"""MCP against a plain loop over lists with autograd and torch's own AdamW, and each cache on its own."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tolerances import assert_close

from testtime import bank as banks
from testtime import toy
from testtime.checks import check_method
from testtime.methods.mcp import MCP, draw_near
from testtime.types import SettingError


def stream_of(images: int = 50, views: int = 1, classes: int = 6, scale: float = 40.0, seed: int = 0):
    """A stream with soft predictions, so that images reach the negative cache too."""
    task, stream, _ = toy(classes=classes, dim=16, images=images, views=views, seed=seed, dtype=torch.float64)
    return replace(task, scale=scale), stream


def entropy_of(p):
    return -sum(float(x) * math.log(float(x)) for x in p if x > 0)


def put(row, item, capacity):
    """Keep the items of lowest cost, which stands first in each; the older comes first among equals."""
    row.append(item)
    row.sort(key=lambda kept: kept[0])
    del row[capacity:]


def tuned(task, feature, visual, m: MCP):
    """Unit text (C, D) and visual prototypes by class, after the residual steps of torch."""
    text, known = task.text.clone(), sorted(visual)
    start = torch.stack([visual[c] for c in known]) if known else text[:0]
    d_text, d_visual = torch.zeros_like(text, requires_grad=True), torch.zeros_like(start, requires_grad=True)
    groups = [{"params": [d_text], "lr": m.lr_text}, {"params": [d_visual], "lr": m.lr_image}]
    adam = torch.optim.AdamW(groups, eps=m.adamw_eps, betas=m.adamw_betas, weight_decay=m.adamw_weight_decay)
    for _ in range(m.steps):
        adam.zero_grad()
        t, v = F.normalize(text + d_text, dim=1), F.normalize(start + d_visual, dim=1)
        logits = task.scale * (t @ feature)
        logits = logits.index_add(
            0, torch.tensor(known, dtype=torch.int64), m.alpha * (m.beta * (v @ feature - 1)).exp()
        )
        p = logits.softmax(0)
        loss = -m.entropy_weight * (p * p.log()).sum()
        if known:
            similarity = v @ t[known].T / m.align_temperature
            loss = loss + m.align_weight * F.cross_entropy(similarity, torch.arange(len(known)))
        loss.backward()
        adam.step()
    text = F.normalize(text + d_text.detach(), dim=1)
    adapted = F.normalize(start + d_visual.detach(), dim=1)
    return text, dict(zip(known, adapted, strict=True))


def reference(task, stream, m: MCP):
    """Logits of every image, and the three caches: class -> [(cost, feature, ...)], best first."""
    confident, central, negative = ({c: [] for c in range(task.classes)} for _ in range(3))
    answers = []
    for views in stream:
        logits = [task.scale * task.text @ view for view in views]
        probs = [row.softmax(0) for row in logits]
        order = sorted(range(len(views)), key=lambda i: entropy_of(probs[i]))
        chosen = order[: max(1, int(len(views) * m.selection))]
        feature = sum(views[i] for i in chosen) / len(chosen)
        label = int((task.text @ feature).argmax())

        put(confident[label], (entropy_of(sum(probs[i] for i in chosen) / len(chosen)), feature), m.entropy_capacity)
        centre = task.text[label].clone()
        if confident[label]:
            mean = sum(key for _, key in confident[label]) / len(confident[label])
            centre = centre + mean / mean.norm()
        centre = centre / centre.norm()
        central[label] = [(1 - float(key @ centre / key.norm()), key) for _, key in central[label]]
        put(central[label], (1 - float(feature @ centre / feature.norm()), feature), m.align_capacity)

        kept = {c: [key for _, key in confident[c] + central[c]] for c in range(task.classes)}
        visual = {c: sum(keys) / len(keys) for c, keys in kept.items() if keys}
        text, visual = tuned(task, feature, visual, m)
        clean = views[0]
        answer = (task.scale * text @ clean).tolist()
        for c, prototype in visual.items():
            answer[c] += m.alpha * math.exp(-m.beta * (1 - float(prototype @ clean)))
        for c, row in central.items():
            for _, key in row:
                answer[c] += m.align_alpha * math.exp(-m.align_beta * (1 - float(key @ clean)))

        prob = torch.tensor(answer, dtype=torch.float64).softmax(0)
        uncertainty = entropy_of(prob)
        if m.neg_entropy_lower < uncertainty / math.log2(task.classes) < m.neg_entropy_upper:
            put(negative[int(prob.argmax())], (uncertainty, feature, prob), m.neg_capacity)
        for row in negative.values():
            for _, key, held in row:
                weight = m.neg_alpha * math.exp(-m.neg_beta * (1 - float(key @ clean)))
                for c in range(task.classes):
                    if m.neg_mask_lower < held[c] < m.neg_mask_upper:
                        answer[c] -= weight
        answers.append(answer)
    return torch.tensor(answers, dtype=torch.float64), confident, central, negative


def assert_cache(bank, rows):
    for c in range(len(bank.cost)):
        assert bank.cost[c].isfinite().sum() == len(rows[c])
        for slot, (cost, feature, *_) in enumerate(rows[c]):
            assert_close(bank.keys[c, slot], feature, "stream")
            assert bank.cost[c, slot].item() == pytest.approx(cost, abs=1e-7)


CASES = {
    "one view": (dict(), dict()),
    "many views": (dict(views=30), dict()),
    "more views chosen": (dict(views=12), dict(selection=0.4)),
    "two steps": (dict(images=30), dict(steps=2)),
    "no residuals": (dict(), dict(steps=0)),
    "no entropy cache": (dict(), dict(entropy_capacity=0)),
    "no align cache": (dict(), dict(align_capacity=0)),
    "no cache of what images are": (dict(), dict(entropy_capacity=0, align_capacity=0)),
    "no negative cache": (dict(), dict(neg_capacity=0)),
    "negative cache of one": (dict(scale=15.0), dict(neg_capacity=1, neg_alpha=1.0)),
    "strong negative cache": (dict(scale=15.0), dict(neg_alpha=2.0, neg_beta=3.0, neg_capacity=4)),
    "strong align cache": (dict(), dict(align_alpha=9.0, align_beta=3.0, align_capacity=5)),
    "no losses": (dict(images=20), dict(entropy_weight=0.0, align_weight=0.0)),
    "two classes": (dict(classes=2), dict()),
}


@pytest.mark.parametrize(("made", "settings"), CASES.values(), ids=CASES)
def test_it_is_the_plain_loop(made, settings):
    task, stream = stream_of(**made)
    method = MCP(**settings)
    expected, confident, central, negative = reference(task, stream, method)
    logits, state = method.scan(task, method.init(task), stream)
    assert_close(logits, expected, "stream")
    for bank, rows in ((state.entropy, confident), (state.align, central), (state.negative, negative)):
        assert_cache(bank, rows)
    for c, row in negative.items():
        for slot, (_, _, prob) in enumerate(row):
            assert_close(state.negative_prob[c, slot], prob, "stream")


def test_the_stream_meets_both_sides_of_every_choice():
    task, stream = stream_of(scale=15.0)
    _, confident, central, negative = reference(task, stream, MCP(neg_capacity=1))
    offered = sum(map(len, reference(task, stream, MCP(neg_capacity=1000))[3].values()))
    assert 0 < sum(map(len, negative.values())) < offered < len(stream)  # the gate opens and closes, a row overflowed
    assert sum(map(len, confident.values())) < len(stream)
    different = [{id(k) for _, k in confident[c]} != {id(k) for _, k in central[c]} for c in confident]
    assert any(different)  # confident is not the same as central


def test_without_caches_and_residuals_it_is_zero_shot():
    task, stream = stream_of()
    method = MCP(entropy_capacity=0, align_capacity=0, neg_capacity=0, steps=0)
    logits, state = method.scan(task, method.init(task), stream)
    assert_close(logits, task.zero_shot(stream[:, 0]), "arithmetic")
    assert not method.learned(method.init(task), state)


rows_of = st.integers(1, 4).flatmap(
    lambda slots: st.tuples(st.just(slots), st.lists(st.integers(0, 10_000), min_size=1, max_size=12))
)


@given(rows_of)
def test_a_row_keeps_the_features_nearest_to_a_centre_that_stays(case):
    slots, seeds = case
    features = torch.stack([torch.randn(5, generator=torch.Generator().manual_seed(s)) for s in seeds]).double()
    centre, bank = F.normalize(torch.ones(5).double(), dim=0), banks.empty(torch.zeros(3, 5).double(), slots)
    for feature in features:
        bank = draw_near(bank, torch.tensor(1), feature, centre)
    nearest = (1 - F.cosine_similarity(features, centre[None], dim=1)).sort().values[:slots]
    assert_close(bank.cost[1, : len(nearest)], nearest, "arithmetic")
    assert not bank.cost[1, len(nearest) :].isfinite().any() and not bank.cost[[0, 2]].isfinite().any()
    assert not bank.keys[[0, 2]].any()


def test_a_centre_that_moves_is_measured_from_anew():
    east, north, between = (F.normalize(torch.tensor(v), dim=0) for v in ([1.0, 0.0], [0.0, 1.0], [1.0, 1.0]))
    bank, label = banks.empty(torch.zeros(1, 2), 2), torch.tensor(0)
    for feature in (east, between):
        bank = draw_near(bank, label, feature, east)
    assert torch.equal(bank.keys[0], torch.stack([east, between]))
    bank = draw_near(bank, label, north, north)
    assert torch.equal(bank.keys[0], torch.stack([north, between]))  # what was nearest is now the farthest
    assert_close(bank.cost[0], torch.tensor([0.0, 1 - math.sqrt(0.5)]), "arithmetic")


def test_a_part_moves_logits_its_own_way():
    task, stream = stream_of(scale=15.0)
    plain = MCP(entropy_capacity=0, align_capacity=0, neg_capacity=0, steps=0)
    frozen, _ = plain.scan(task, plain.init(task), stream)
    raised, lowered = replace(plain, align_capacity=3), replace(plain, neg_capacity=2)
    up, _ = raised.scan(task, raised.init(task), stream)
    down, _ = lowered.scan(task, lowered.init(task), stream)
    assert (up - frozen).min() > -1e-9 and (up - frozen).max() > 1
    assert (down - frozen).max() < 1e-9 and (down - frozen).min() < -0.1


def test_learned_says_whether_a_cache_took_the_image_in():
    task, stream = stream_of(images=80)
    method = MCP()
    state, said = method.init(task), []
    for views in stream:
        _, after = method.step(task, state, views)
        taken = any((bank.keys == views[0]).all(2).any() for bank in (after.entropy, after.align, after.negative))
        assert method.learned(state, after) == bool(taken)
        said.append(bool(method.learned(state, after)))
        state = after
    assert set(said) == {True, False}


@pytest.mark.parametrize(
    "settings",
    [
        dict(),
        dict(steps=2, selection=0.5),
        dict(entropy_capacity=0),
        dict(align_capacity=0),
        dict(neg_capacity=0, steps=0),
        dict(entropy_capacity=0, align_capacity=0, neg_capacity=4),
    ],
    ids=str,
)
def test_it_keeps_every_promise(settings):
    check_method(MCP(**settings))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alpha", -1.0),
        ("beta", math.nan),
        ("entropy_capacity", -1),
        ("align_capacity", -1),
        ("align_alpha", -2.0),
        ("neg_alpha", -0.1),
        ("neg_capacity", -2),
        ("neg_entropy_lower", 0.6),
        ("neg_mask_lower", 1.5),
        ("align_temperature", 0.0),
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

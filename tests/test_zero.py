"""ZERO against a plain count of votes, with its ties."""

from __future__ import annotations

import math

import pytest
import torch
from tolerances import assert_close

from testtime import Session, Task, registry, toy
from testtime.checks import check_method
from testtime.methods.zero import ZERO, State, read_temperature
from testtime.types import SettingError


def noise(images: int = 200, views: int = 8, classes: int = 7, dim: int = 12, likeness: float = 0.0):
    """A task and views that agree on nothing, so that ties are frequent; alike texts have near cosines."""
    random = torch.Generator().manual_seed(0)

    def directions(*shape):
        x = torch.randn(*shape, dim, generator=random, dtype=torch.float64)
        return x / x.norm(dim=-1, keepdim=True)

    text = directions(classes) + likeness * directions(1)
    text = text / text.norm(dim=1, keepdim=True)
    return Task(text, tuple(map(str, range(classes))), scale=20.0), directions(images, views)


def largest(values):
    return max(range(len(values)), key=lambda i: (values[i], -i))


def reference(task, views, gamma, temperature=None):
    """Votes after tie-breaking, and how a tie was broken: '', 'view', 'mirror' or 'nobody'."""
    cosines = [[float(text @ view) for text in task.text] for view in views]

    def entropy(row):
        weights = [math.exp(task.scale * x) for x in row]
        return -sum(w / sum(weights) * math.log(w / sum(weights)) for w in weights)

    cosines.sort(key=entropy)
    count = max(1, int(len(views) * gamma))
    votes = [0.0] * task.classes
    for row in cosines[:count]:
        if temperature is None:
            votes[largest(row)] += 1
        else:
            weights = [math.exp((x - max(row)) / temperature) for x in row]
            votes = [v + w / sum(weights) for v, w in zip(votes, weights, strict=True)]
    tied = [c for c in range(task.classes) if votes[c] == max(votes)]
    if len(tied) == 1:
        return votes, ""
    for row in cosines[count:]:
        if largest(row) in tied:
            votes[largest(row)] += 1
            return votes, "view"
    if count == len(cosines):
        return votes, "nobody"
    row = list(cosines[count])
    for c in tied:
        row[-c - 1] = -math.inf
    votes[largest(row)] += 1
    return votes, "mirror"


@pytest.mark.parametrize(
    ("views", "gamma", "ways"),
    [
        (8, 0.3, {"", "view", "mirror"}),
        (20, 0.3, {"", "view"}),
        (10, 0.5, {"", "view", "mirror"}),
        (5, 1.0, {"", "nobody"}),
        (1, 0.3, {""}),
        (2, 0.3, {""}),
        (3, 0.7, {"", "view", "mirror"}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_it_is_the_plain_count_with_the_released_ties(views, gamma, ways, dtype):
    task, stream = noise(views=views)
    expected, how = zip(*(reference(task, rows, gamma) for rows in stream), strict=True)
    assert set(how) >= ways
    method = ZERO(gamma=gamma)
    votes, _ = method.scan(task.to(dtype=dtype), State(), stream.to(dtype))
    assert votes.dtype == dtype
    assert votes.tolist() == list(expected)


@pytest.mark.parametrize("temperature", [2**-10, 0.02, 1.0])
def test_a_temperature_makes_votes_soft(temperature):
    task, stream = noise(views=20, likeness=30.0)
    method = ZERO(zero_temperature=str(temperature))
    expected = [reference(task, rows, 0.3, temperature)[0] for rows in stream]
    votes, _ = method.scan(task, State(), stream)
    assert_close(votes, torch.tensor(expected, dtype=torch.float64), "stream")
    hard, _ = ZERO().scan(task, State(), stream)
    assert (votes - hard).abs().max() > 0.01


def test_soft_whole_votes_tie_as_hard_ones_do():
    task, stream = noise(images=400)
    method = ZERO(zero_temperature=str(2**-20))
    assert_close(method.scan(task, State(), stream)[0], ZERO().scan(task, State(), stream)[0], "golden")


def view(winner: int, other: int, doubt: float) -> torch.Tensor:
    """A view that says `winner`, and `other` next; the less doubt, the lower its entropy."""
    row = torch.zeros(6, dtype=torch.float64)
    row[winner], row[other] = 1, doubt
    return row / row.norm()


AXES = Task(torch.eye(6, dtype=torch.float64), tuple("abcdef"), scale=8.0)


def test_a_tie_goes_to_the_most_confident_of_the_other_views_that_can_decide():
    # two of seven views vote, for 1 and 4; of the others the surest says 2, the next 4, and a later one 1
    voting = [view(1, 0, 0.0), view(4, 0, 0.1)]
    others = [view(1, 2, 0.5), view(4, 3, 0.4), view(2, 3, 0.3), view(3, 5, 0.7), view(3, 5, 0.8)]
    views = torch.stack(others + voting)
    votes, _ = ZERO().step(AXES, State(), views)
    assert votes.tolist() == [0, 1, 0, 0, 2, 0]
    assert reference(AXES, views, 0.3) == (votes.tolist(), "view")


def test_where_no_view_can_decide_the_mirrored_classes_are_left_out():
    # 1 and 5 are tied, so 4 and 0 are left out of the surest other view, which says 4, then 2
    others = [view(4, 2, 0.3), *(view(3, 2, doubt) for doubt in (0.4, 0.5, 0.6, 0.7))]
    views = torch.stack([view(1, 0, 0.0), view(5, 0, 0.1), *others])
    votes, _ = ZERO().step(AXES, State(), views)
    assert votes.tolist() == [0, 1, 1, 0, 0, 1]
    assert reference(AXES, views, 0.3) == (votes.tolist(), "mirror")
    assert Session(AXES, ZERO()).step(views).label == "b"  # several still share the top: the lowest index


def test_the_tie_may_go_to_an_outsider_ahead_of_nobody():
    task, stream = noise(views=8)
    broken = [reference(task, rows, 0.3) for rows in stream]
    assert any(how == "mirror" and sum(v == max(votes) for v in votes) > 1 for votes, how in broken)


def test_one_view_is_its_own_vote():
    task, stream = noise(views=1)
    votes, _ = ZERO().scan(task, State(), stream)
    assert torch.equal(votes.argmax(1), task.zero_shot(stream[:, 0]).argmax(1))
    assert (votes.sum(1) == 1).all()


def test_probabilities_are_shares_of_the_votes():
    votes = torch.tensor([[3.0, 1.0, 0.0], [0.0, 5.0, 0.0]])
    assert ZERO().probabilities(votes).tolist() == [[0.75, 0.25, 0.0], [0.0, 1.0, 0.0]]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("hard", 0.0),
        ("float64 eps (hard votes)", 0.0),
        ("0", 0.0),
        ("0.0009765625", 2**-10),
        ("0.0009765625 (half precision)", 2**-10),
        ("float16 eps (soft votes)", 2**-10),
        ("float32 eps", torch.finfo(torch.float32).eps),
        ("float64 eps", torch.finfo(torch.float64).eps),
        ("bfloat16 eps", torch.finfo(torch.bfloat16).eps),
    ],
)
def test_temperatures_are_read_from_text(text, value):
    assert read_temperature(text) == value
    assert registry.make_method("zero", settings={"zero_temperature": text}).zero_temperature == text


def test_a_number_typed_as_a_setting_is_kept_as_text():
    assert registry.make_method("zero", settings={"zero_temperature": 2**-10}) == ZERO(zero_temperature="0.0009765625")


@pytest.mark.parametrize(
    "settings",
    [dict(), dict(gamma=1.0), dict(zero_temperature="0.0009765625"), dict(gamma=0.5, zero_temperature="0.1")],
    ids=str,
)
def test_it_keeps_every_promise(settings):
    check_method(ZERO(**settings))


def test_it_keeps_every_promise_on_double_views():
    task, stream, _ = toy(images=12, views=12, dtype=torch.float64)
    check_method(ZERO(), task, stream)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gamma", 0.0),
        ("gamma", 1.5),
        ("gamma", math.nan),
        ("zero_temperature", "warm"),
        ("zero_temperature", "-1"),
        ("zero_temperature", "inf"),
        ("zero_temperature", "nan"),
        ("zero_temperature", ""),
        ("zero_temperature", 0.5),
    ],
)
def test_settings_out_of_range_are_refused_by_name_and_value(name, value):
    with pytest.raises(SettingError) as caught:
        ZERO(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)


def test_views_are_sorted_by_tsallis_entropy_if_asked():
    task, views = noise(views=10)
    method = ZERO(filter="tsallis", tsallis_q=0.5, gamma=0.1)  # one view votes
    changed = 0
    for each in views:
        shares = [[math.exp(task.scale * float(text @ view)) for text in task.text] for view in each]
        shares = [[x / sum(row) for x in row] for row in shares]
        entropies = [(1 - sum(math.sqrt(p) for p in row)) / (0.5 - 1) for row in shares]
        chosen = shares[entropies.index(min(entropies))]
        votes = method.step(task, State(), each)[0]
        assert votes.argmax().item() == largest(chosen) and votes.sum() == 1
        changed += votes.argmax().item() != ZERO(gamma=0.1).step(task, State(), each)[0].argmax().item()
    assert changed
    check_method(method)


@pytest.mark.parametrize("order", [0.0, 1.0, -1.0])
def test_orders_that_tsallis_entropy_does_not_have_are_refused(order):
    with pytest.raises(SettingError, match="tsallis_q"):
        ZERO(filter="tsallis", tsallis_q=order)

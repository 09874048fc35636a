"""Summaries of answers: the same for rows one by one and many at once, and honest about what is not finite."""

from types import SimpleNamespace

import pytest
import torch
from tolerances import TOLERANCES
from torch import Tensor

import testtime as tt
from testtime.registry import make_method
from testtime.session import summaries
from testtime.session.summaries import ROWS, Summaries

COUNT = 2 * ROWS
NAN = float("nan")


@pytest.fixture
def answers() -> tuple[tt.Task, tuple[Tensor, Tensor, Tensor]]:
    task, stream, _ = tt.toy(classes=7, dim=16, images=COUNT)
    features = stream[:, 0]
    return task, (task.zero_shot(features) / 8, features, torch.arange(COUNT) % 3 == 0)


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("method", ["dpe", "mta"])
def test_many_rows_at_once_are_as_each_by_itself(
    answers: tuple[tt.Task, tuple[Tensor, Tensor, Tensor]],
    method: str,
    guarded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(summaries, "capture", lambda launch, **_: SimpleNamespace(replay=launch))
    task, inputs = answers
    summarise = Summaries(task, make_method(method), guarded)
    numbers, shares = summarise(*inputs)
    first = 0
    for group in zip(*(each.split([1, 5, ROWS, COUNT - ROWS - 6]) for each in inputs), strict=True):
        for several, single in zip(summarise._captured(*group), (numbers, shares), strict=True):
            expected = single[first : first + len(group[0])]
            torch.testing.assert_close(several, expected, **TOLERANCES["arithmetic"][torch.float32])
        first += len(group[0])


def test_numbers_are_those_of_the_logits(answers: tuple[tt.Task, tuple[Tensor, Tensor, Tensor]]) -> None:
    task, (logits, features, learned) = answers
    numbers, shares = Summaries(task, make_method("dpe"), False)(logits, features, learned)
    probabilities = logits.softmax(1)
    assert torch.equal(shares[:, 0], logits)
    torch.testing.assert_close(shares[:, 1], probabilities)
    finite, learns, best, frozen_best, confidence, frozen_confidence, entropy = numbers.T[:7]
    assert finite.all() and torch.equal(learns.bool(), learned)
    assert torch.equal(best.long(), logits.argmax(1))
    assert torch.equal(frozen_best.long(), task.zero_shot(features).argmax(1))
    torch.testing.assert_close(confidence, probabilities.amax(1).double())
    torch.testing.assert_close(
        frozen_confidence, task.zero_shot(features).softmax(1).amax(1).double(), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(entropy, torch.special.entr(probabilities.double()).sum(1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("part", [0, 1])
def test_what_is_not_finite_is_marked(answers: tuple[tt.Task, tuple[Tensor, Tensor, Tensor]], part: int) -> None:
    task, inputs = answers
    inputs[part][3, 2] = NAN
    numbers, _ = Summaries(task, make_method("dpe"), False)(*inputs)
    assert numbers[:, 0].tolist() == [float(row != 3) for row in range(COUNT)]

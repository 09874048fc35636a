"""The method keeps testtime's promises, agrees with plain loops, and is found by its name."""

from __future__ import annotations

import math

from testtime_balanced import Balanced

import testtime as tt
from testtime import registry
from testtime.checks import check_method


def test_it_keeps_the_promises_of_a_method() -> None:
    check_method(Balanced())


def test_it_is_found_by_its_name() -> None:
    assert registry.method_class("balanced") is Balanced


def test_it_agrees_with_plain_loops() -> None:
    task, stream, _ = tt.toy(classes=4, images=30, dim=6, views=1)
    method = Balanced(strength=0.7, prior=2.0)
    logits, _ = method.scan(task, method.init(task), stream)
    answers = [2.0] * 4
    for row, image in enumerate(stream[:, 0].tolist()):
        frozen = [task.scale * sum(a * b for a, b in zip(text, image, strict=True)) for text in task.text.tolist()]
        total = sum(math.exp(value - max(frozen)) for value in frozen)
        answers = [old + math.exp(value - max(frozen)) / total for old, value in zip(answers, frozen, strict=True)]
        mean = sum(answers) / 4
        for found, value, answer in zip(logits[row].tolist(), frozen, answers, strict=True):
            assert abs(found - (value - 0.7 * math.log(answer / mean))) < 1e-3

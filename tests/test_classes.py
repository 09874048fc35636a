"""Classes added to and removed from a session that goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import testtime as tt
from testtime import registry
from testtime.methods.base import leaves
from testtime.session.classes import with_classes

METHODS = [name for name in registry.METHODS.ours if not getattr(registry.METHODS.find(name), "needs_tower", False)]


def chosen(task: tt.Task, rows: list[int]) -> tt.Task:
    return replace(task, text=task.text[rows], classnames=tuple(task.classnames[row] for row in rows))


def learned(name: str, classes: list[int], guard: bool = True) -> tuple[tt.Task, Any, tt.Session]:
    task, stream, _ = tt.toy(classes=8, images=60, views=4)
    session = tt.Session(chosen(task, classes), name, guard=guard)
    for views in stream[:40]:
        session.step(views)
    return task, stream, session


@pytest.mark.parametrize("name", METHODS)
def test_a_class_that_comes_and_goes_leaves_everything_as_it_was(name: str) -> None:
    task, _, session = learned(name, [0, 1, 2, 3, 4, 5])
    more = with_classes(session, chosen(task, [7, 0, 1, 2, 6, 3, 4, 5]))
    back = with_classes(more, session.task)
    for one, other in zip(leaves(session.state), leaves(back.state), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(leaves(session.guard_memory), leaves(back.guard_memory), strict=True):
        assert torch.equal(one, other)
    assert (back.count, back.position) == (session.count, session.position)
    assert torch.equal(back.calibration.sums, session.calibration.sums)


@pytest.mark.parametrize("name", METHODS)
def test_a_changed_session_steps_saves_and_loads(name: str, tmp_path: Any) -> None:
    task, stream, session = learned(name, [0, 1, 2, 3, 4])
    changed = with_classes(session, chosen(task, [0, 2, 5, 6, 7]))
    again = tt.Session.load(changed.save(tmp_path / "state.safetensors"))
    for views in stream[40:]:
        one, other = changed.step(views), again.step(views)
        assert torch.equal(one.logits, other.logits) and len(one.logits) == 5


def test_a_kept_class_answers_as_before_and_a_new_one_from_its_prompt() -> None:
    task, stream, session = learned("dpe", [0, 1, 2, 3, 4, 5], guard=False)
    more = with_classes(session, chosen(task, [5, 6, 0, 1, 2, 3, 4]))
    rows, was = [2, 3, 4, 5, 6, 0], [0, 1, 2, 3, 4, 5]
    assert torch.equal(more.state.text[rows], session.state.text[was])
    assert torch.equal(more.state.queue.cost[rows], session.state.queue.cost[was])
    assert torch.equal(more.state.text[1], task.text[6]) and more.state.queue.cost[1].isinf().all()


def test_disputed_images_keep_their_classes_under_new_numbers() -> None:
    task, stream, session = learned("dpe", [0, 1, 2, 3])
    memory = session.guard_memory
    assert memory is not None
    disputed = memory.disputed.clone()
    disputed[:3] = torch.tensor([[5, 0, 1], [6, 2, 3], [7, 1, 0]])
    session.guard_memory = memory._replace(disputed=disputed)
    changed = with_classes(session, chosen(task, [1, 0, 7]))
    assert changed.guard_memory is not None
    assert changed.guard_memory.disputed[:3].tolist() == [[5, 1, 0], [0, 0, 0], [7, 0, 1]]


def test_prompts_of_classes_that_stay_must_not_change() -> None:
    task, _, session = learned("dpe", [0, 1, 2])
    other = replace(task, text=task.text.flip(0))
    with pytest.raises(tt.InputError, match="must not change"):
        with_classes(session, other)


def test_a_session_none_of_whose_classes_stays_starts_from_the_prompts() -> None:
    task, _, session = learned("dpe", [0, 1, 2], guard=False)
    changed = with_classes(session, chosen(task, [5, 6]))
    assert torch.equal(changed.state.text, task.text[[5, 6]]) and changed.state.queue.cost.isinf().all()

"""The guard: which images may teach, which answers are given, and that all of it resumes bit for bit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import testtime as tt
from testtime.guard import Decision, Guard
from testtime.guard.course import Course
from testtime.guard.stepper import Guarded
from testtime.methods.base import leaves
from testtime.ops import unit
from testtime.session.session import Session
from testtime.types import InputError, SettingError, StateError

GATE_ONLY = {"veto": False, "judge": False}
OPEN = {"foreign": 0.0, "duplicate": 1.0, "view_agreement": 0.0, "budget": 0, "text_anchor": 0, "drift": "ignore"}


def toy(**options: Any) -> tuple[tt.Task, Tensor, Tensor]:
    return tt.toy(**({"views": 1, "images": 120} | options))


def hard() -> tuple[tt.Task, Tensor, Tensor]:
    """A stream that is hard for the frozen classifier, so that answers differ often."""
    task, stream, labels = toy(classes=20, images=300, seed=3)
    noise = torch.randn(stream.shape, generator=torch.Generator().manual_seed(0))
    return replace(task, scale=15.0), unit(stream + 0.3 * noise), labels


def tensors(session: Session) -> list[Tensor]:
    return [*leaves(session.state), *leaves(session.guard_memory or [])]


def same(one: Session, other: Session) -> bool:
    return all(map(torch.equal, tensors(one), tensors(other)))


def decided(session: Session, stream: Tensor) -> list[Decision]:
    return [prediction.decision for views in stream if (prediction := session.step(views)).decision is not None]


def test_without_a_guard_nothing_is_decided() -> None:
    task, stream, _ = toy()
    session = Session(task, "dpe")
    assert session.step(stream[0]).decision is None
    assert session.decisions == [] and session.guard_memory is None
    with pytest.raises(InputError, match="has none"):
        session.label(0, 1)


def test_a_guard_that_does_nothing_changes_nothing() -> None:
    task, stream, _ = toy()
    free = Session(task, "dpe", guard=Guard(**GATE_ONLY, **OPEN))
    assert torch.equal(free.scan(stream), Session(task, "dpe").scan(stream))
    assert {each.answer for each in free.decisions} == {"adapted"} and not any(e.refused for e in free.decisions)


def reference_veto(task: tt.Task, stream: Tensor, adapted: np.ndarray, slots: int) -> np.ndarray:
    """The answers after the referee's veto, written once more: lists of features by class, in double precision."""
    queues: dict[int, list[tuple[float, int, np.ndarray]]] = {}
    answers = []
    frozen = task.zero_shot(stream[:, 0]).double()
    entropy = -(frozen.softmax(1) * frozen.log_softmax(1)).sum(1)
    for number, feature in enumerate(stream[:, 0].double().numpy()):
        mine, plain = int(adapted[number].argmax()), int(frozen[number].argmax())

        def cosine(label: int, feature: np.ndarray = feature) -> float:
            mean = np.mean([key for _, _, key in queues[label]], axis=0)
            return float(mean @ feature / np.linalg.norm(mean))

        supported = mine not in queues or (plain in queues and cosine(mine) > cosine(plain))
        answers.append(mine if mine == plain or supported else plain)
        queue = queues.setdefault(plain, [])
        queue.append((float(entropy[number]), number, feature))
        queue.sort(key=lambda entry: entry[:2])
        del queue[slots:]
    return np.array(answers)


@pytest.mark.parametrize(("method", "settings"), [("tda", {}), ("tda", {"pos_alpha": 8.0}), ("dpe", {"lr_text": 0.02})])
def test_the_veto_is_that_of_its_reference(method: str, settings: dict[str, float]) -> None:
    task, stream, _ = hard()
    plain = Session(task, method, **settings).scan(stream)
    guarded = Session(task, method, guard=Guard(**OPEN, judge=False), **settings)
    answers = guarded.scan(stream).argmax(1).numpy()
    np.testing.assert_array_equal(answers, reference_veto(task, stream, plain.numpy(), 3))
    taken_back = [each for each in guarded.decisions if each.answer == "frozen"]
    assert 0 < len(taken_back) < sum(each.disputed for each in guarded.decisions)
    assert [each.adapted for each in guarded.decisions] == plain.argmax(1).tolist()
    assert [each.frozen for each in guarded.decisions] == task.zero_shot(stream[:, 0]).argmax(1).tolist()


def test_an_answer_taken_back_is_the_frozen_one_with_its_confidence() -> None:
    task, stream, _ = hard()
    session = Session(task, "tda", guard=True)
    predictions = [session.step(views) for views in stream]
    taken_back = [p for p in predictions if p.decision is not None and p.decision.answer == "frozen"]
    assert taken_back
    for prediction in taken_back:
        assert prediction.label == prediction.zero_shot
        assert prediction.confidence == pytest.approx(prediction.zero_shot_confidence, abs=1e-5)


def test_a_thousand_copies_teach_as_much_as_one() -> None:
    task, stream, _ = toy()
    once, often = (Session(task, "dpe", guard=True) for _ in range(2))
    once.scan(stream[:20])
    often.scan(torch.cat([stream[:20], stream[19:20].expand(1000, -1, -1)]))
    assert all(map(torch.equal, leaves(once.state), leaves(often.state)))
    assert {each.refused for each in often.decisions[20:]} == {"near-duplicate"}


def foreign_images(task: tt.Task, count: int) -> Tensor:
    noise = torch.randn(count, 1, task.dim, generator=torch.Generator().manual_seed(1))
    return unit(noise - (noise @ task.text.T @ torch.linalg.pinv(task.text.T)))


def test_foreign_images_teach_nothing_and_are_unknown_on_request() -> None:
    task, stream, _ = toy()
    strange = foreign_images(task, 10)
    session = Session(task, "dpe", guard=Guard(reject=True))
    session.scan(stream)
    before = session.state
    predictions = [session.step(views) for views in strange]
    assert {p.decision.refused for p in predictions if p.decision} == {"foreign"}
    assert {p.label for p in predictions} == {"unknown"} and not any(p.learned for p in predictions)
    assert not any(p.is_right(p.index) for p in predictions)
    assert all(map(torch.equal, leaves(before), leaves(session.state)))
    assert session.predict(strange[0]).label == "unknown"
    assert Session(task, "dpe", guard=True).step(strange[0]).label != "unknown"


def test_a_class_teaches_only_within_its_budget() -> None:
    task, stream, _ = toy(images=400)
    label = task.zero_shot(stream[:, 0]).argmax(1)
    mine = stream[label == label.bincount().argmax()]
    session = Session(task, "tda", guard=Guard(budget=5, period=20, foreign=0.0))
    decisions = decided(session, mine[:30])
    assert [each.refused for each in decisions] == [*[""] * 5, *["class over budget"] * 15, *[""] * 5] + [
        "class over budget"
    ] * 5


def test_images_whose_views_disagree_teach_nothing() -> None:
    task, stream, _ = toy(views=8)
    label = int(task.zero_shot(stream[0, 0]).argmax())
    others = task.text[[k for k in range(task.classes) if k != label]][:7]
    torn = torch.cat([stream[0, :1], others])
    session = Session(task, "dpe", guard=True)
    assert session.step(torn).decision.refused == "views disagree"  # type: ignore[union-attr]
    assert session.step(stream[1, :1].expand(8, -1)).decision.refused == ""  # type: ignore[union-attr]


def test_the_anchor_sets_the_count_of_the_prompts_where_a_method_has_one() -> None:
    task, _, _ = toy()
    assert Session(task, "dpe", guard=True).method.prompt_count == Guard().text_anchor  # type: ignore[attr-defined]
    assert Session(task, "dpe", guard=True, prompt_count=99).method.prompt_count == 99  # type: ignore[attr-defined]
    assert Session(task, "tda", guard=True).method == tt.make_method("tda")


# The judge


def test_trust_falls_without_support_and_recovers() -> None:
    course = Course()
    assert course.trust(0.3, 0.6) == 1
    for _ in range(60):
        course.dispute(False)
    assert course.trust(0.3, 0.6) == 0
    levels = []
    for _ in range(200):
        course.dispute(True)
        levels.append(course.trust(0.3, 0.6))
    assert levels == sorted(levels) and levels[-1] == 1 and any(0 < level < 1 for level in levels)


def test_blended_answers_lie_between_the_adapted_and_the_frozen_one() -> None:
    task, stream, _ = hard()
    session = Session(task, "tda", guard=Guard(support_low=0.0, support_high=1.0, **OPEN))
    logits, plain = session.scan(stream), Session(task, "tda").scan(stream)
    frozen = task.zero_shot(stream[:, 0])
    rows = [each.index for each in session.decisions if each.answer == "blended"]
    assert rows
    for row in rows:
        trust = session.decisions[row].trust
        expected = trust * plain[row].log_softmax(0) + (1 - trust) * frozen[row].log_softmax(0)
        torch.testing.assert_close(logits[row].log_softmax(0), expected.log_softmax(0), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("claim", ["helps", "harms"])
def test_late_labels_prove_what_is_true_and_decide_then(claim: str) -> None:
    task, stream, _ = hard()
    session = Session(task, "tda", guard=True)
    session.scan(stream)
    disputed = [each for each in session.decisions if each.disputed]
    assert len(disputed) > 8 and session.proven == ""
    for each in disputed:
        assert session.label(each.index, each.adapted if claim == "helps" else each.frozen)
    assert session.proven == f"adapting {claim}"
    later = Session(task, "tda", guard=True)
    later.state, later.guard_memory = session.state, session.guard_memory
    answers = {each.answer for each in decided(later, unit(stream + 0.01)) if each.disputed}
    assert answers == {"adapted" if claim == "helps" else "frozen"}


def test_a_label_counts_once_and_only_where_answers_differ() -> None:
    task, stream, _ = hard()
    session = Session(task, "dpe", guard=True)
    session.scan(stream)
    disputed = next(each for each in session.decisions if each.disputed)
    agreed = next(each for each in session.decisions if not each.disputed)
    assert session.label(disputed.index, disputed.frozen) and not session.label(disputed.index, disputed.frozen)
    assert not session.label(agreed.index, agreed.frozen) and not session.label(10**6, 0)
    with pytest.raises(InputError, match="Label 20"):
        session.label(0, 20)


def test_by_chance_labels_prove_something_in_at_most_one_of_twenty_streams() -> None:
    draws = np.random.default_rng(0)
    for claim in ("helps", "harms"):
        fooled = 0
        for _ in range(400):
            course = Course()
            for win in draws.random(200) < 0.5:
                course.label(bool(win), not win)
                if course.proven == claim:
                    fooled += 1
                    break
        assert fooled / 400 <= 1 / 20 + 0.03  # three deviations of a share of 400 draws


# Drift


def test_the_alarm_is_silent_on_a_steady_stream_and_finds_a_shift() -> None:
    draws = np.random.default_rng(0)
    steady, course = draws.normal(30, 2, 5000), Course()
    assert not any(course.drifted(float(top)) for top in steady)
    for direction in (-2.0, 2.0):
        course = Course()
        for top in steady[:500]:
            course.drifted(float(top))
        shifted = draws.normal(30 + direction, 2, 200)
        found = [number for number, top in enumerate(shifted) if course.drifted(float(top))]
        assert found and found[0] < 120


def test_a_restart_goes_back_to_a_snapshot_before_the_change(tmp_path: Path) -> None:
    task, stream, _ = toy(images=460)
    changed = unit(stream[:120] + 1.5 * foreign_images(task, 120))
    session = Session(task, "dpe", guard=Guard(drift="restart", foreign=0.0))
    session.scan(stream[:200])
    first = session.state
    session.scan(stream[200:])
    reached = session.state
    loaded = Session.load(session.save(tmp_path / "state.safetensors"))
    assert same(session, loaded)
    for each in (session, loaded):
        alarm = next(n for n, views in enumerate(changed) if each.step(views).decision.drift)  # type: ignore[union-attr]
        assert alarm > 5
        assert all(map(torch.equal, leaves(each.state), leaves(first)))
        assert not all(map(torch.equal, leaves(each.state), leaves(reached)))


# The session


@pytest.mark.parametrize(
    "method",
    ["bca", "dpe", "dlae", "tda", "tps", "dmn", "dota", "mcp", "oga", "onzeta", "zero", "mta", "zeroshot", "evidence"],
)
def test_a_guarded_stream_resumes_bit_for_bit_wherever_it_is_cut(method: str, tmp_path: Path) -> None:
    task, stream, _ = toy(views=6, images=40, classes=6)
    whole = Session(task, method, guard=True)
    expected, decisions = whole.scan(stream), whole.decisions
    assert torch.isfinite(expected).all()
    for cut in (1, 13, 39):
        first = Session(task, method, guard=True)
        rows = [first.scan(stream[:cut])]
        second = Session.load(first.save(tmp_path / f"{cut}.safetensors"))
        assert second.guard == first.guard and same(first, second)
        rows.append(second.scan(stream[cut:]))
        assert torch.equal(torch.cat(rows), expected)
        assert second.decisions == decisions[cut:]
        assert same(second, whole)


def test_single_steps_a_scan_and_a_fork_agree_exactly() -> None:
    task, stream, _ = toy(images=60)
    scanned, stepped = (Session(task, "dpe", guard=True) for _ in range(2))
    logits = scanned.scan(stream)
    answers = torch.stack([stepped.step(views).logits for views in stream[:30]])
    fork = stepped.fork()
    more = torch.stack([fork.step(views).logits for views in stream[30:]])
    assert torch.equal(logits, torch.cat([answers, more]))
    assert same(fork, scanned) and not same(fork, stepped)


def test_predicting_leaves_everything_as_it_was() -> None:
    task, stream, _ = toy()
    session = Session(task, "dpe", guard=True)
    session.scan(stream[:50])
    before = [leaf.clone() for leaf in tensors(session)]
    foretold = [session.predict(stream[50]) for _ in range(3)][-1]
    assert all(map(torch.equal, before, tensors(session)))
    assert foretold.decision is not None and foretold.decision.refused == "not asked to learn"
    assert torch.equal(foretold.logits, session.predict(stream[50]).logits)


def test_chunks_decide_like_single_images() -> None:
    """What a GPU does: whole chunks through the code that a CPU runs on one image at a time."""
    task, stream, _ = hard()
    task, stream = task.to(dtype=torch.float64), unit(stream.double())
    stream = torch.cat([stream, stream[100:110]])
    single = Session(task, "tda", guard=True)
    expected = single.scan(stream)
    other = Session(task, "tda", guard=True)
    stepper = other._steps()
    assert isinstance(stepper, Guarded)
    rows, decisions = [], []
    with torch.inference_mode():
        for part in stream.split(64):
            rows.append(stepper._advance(part)[0])
            decisions += stepper.decisions
            stepper.index += len(part)
    torch.testing.assert_close(torch.cat(rows), expected, atol=1e-9, rtol=0)
    told = [(d.index, d.answer, d.refused, d.adapted, d.frozen, d.drift) for d in decisions]
    assert told == [(d.index, d.answer, d.refused, d.adapted, d.frozen, d.drift) for d in single.decisions]
    assert {d.refused for d in decisions} >= {"near-duplicate", "foreign", ""}
    for one, two in zip(leaves(stepper.memory), leaves(single.guard_memory or []), strict=True):
        torch.testing.assert_close(one, two, atol=1e-9, rtol=0)


def test_an_answer_that_is_not_finite_is_refused_and_not_replaced_by_the_frozen_one() -> None:
    task, stream, _ = toy()
    session = Session(task, "dpe", guard=True)
    session.scan(stream[:50])
    broken = session.state._replace(text=session.state.text * math.nan)
    memory = session.guard_memory
    assert memory is not None
    harmed = Course.of(memory.course)
    harmed.harms_1 = harmed.harms_2 = harmed.harms_3 = 100.0  # only frozen answers are given
    session.state, session.guard_memory = broken, memory._replace(course=harmed.tensor())
    assert session.proven == "adapting harms"
    with pytest.raises(InputError, match="NaN or infinity for image 50"):
        session.step(stream[50])
    with pytest.raises(StateError):
        session.step(stream[51])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slots": 0}, "slots=0: must be 1 or more"),
        ({"foreign": -1.0}, "foreign=-1.0: must be 0 or more"),
        ({"support_low": 0.7}, "support_low=0.7: must be below"),
        ({"drift": "panic"}, "drift='panic': expected ignore or alarm or restart"),
        ({"budget": 1.5}, "budget=1.5: expected a whole number"),
        ({"veto": "perhaps"}, "veto='perhaps': expected true or false"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Guard(**settings)


@pytest.mark.parametrize("damage", ["guard", "cost", "course", "keys"])
def test_a_damaged_memory_is_refused(damage: str, tmp_path: Path) -> None:
    task, stream, _ = toy()
    session = Session(task, "dpe", guard=True)
    session.scan(stream[:20])
    path = session.save(tmp_path / "state.safetensors")
    with safe_open(path, "pt") as file:
        parts = {name: file.get_tensor(name) for name in file.keys()}
        metadata = dict(file.metadata())
    if damage == "guard":
        metadata["guard"] = json.dumps({"slots": -3})
    else:
        parts[f"guard.{damage}"] = parts[f"guard.{damage}"] * math.nan
    save_file(parts, path, metadata)
    with pytest.raises(StateError, match="damaged"):
        Session.load(path)


# The commands


@pytest.fixture
def features(tmp_path: Path) -> Path:
    task, stream, labels = hard()
    path = tmp_path / "features.safetensors"
    tt.save_features(path, stream, task.text, labels=labels, scale=task.scale)
    return path


def test_replay_tells_what_the_guard_did(features: Path, cli: Callable[..., Any]) -> None:
    plain, guarded = (
        json.loads(cli("replay", features, "-m", "tda", "--json", *more).out) for more in ([], ["--guard"])
    )
    assert "guard" not in plain
    assert guarded["guard"]["answers"]["frozen"] > 0 and guarded["guard"]["refused"]["foreign"] > 0
    shown = cli("replay", features, "-m", "tda", "--labelled", "10", "--guard-set", "budget=3")
    assert "taken back" in shown.err and "class over budget" in shown.err and "10 labels of 10 used" in shown.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--guard-set", "bugdet=3"], "Did you mean 'budget'?"),
        (["--guard-set", "budget"], "KEY=VALUE"),
        (["--labelled", "-1"], "must be 0 or more"),
        (["--guard", "--report", "page.html"], "leave out one"),
    ],
)
def test_wrong_options_are_refused(features: Path, cli: Callable[..., Any], arguments: list[str], message: str) -> None:
    outcome = cli("replay", features, *arguments)
    assert outcome.code == 2 and message in outcome.err

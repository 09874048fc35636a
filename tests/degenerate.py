"""Degenerate tasks and images: fast steps compared with the method's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from testtime.methods.base import leaves
from testtime.methods.dmn import DMN
from testtime.methods.dpe import DPE
from testtime.methods.tda import TDA
from testtime.methods.tps import TPS
from testtime.ops import unit
from testtime.steppers import aligned_task, open_stepper
from testtime.types import Task

METHODS = {
    "dpe": DPE(),
    "dpe, views reselected": DPE(multi_view_prediction=True, entropy_threshold=0.5),
    "dpe, no queues": DPE(queue=0),
    "dpe, no residuals": DPE(steps=0),
    "dpe, no alignment": DPE(align_weight=0.0),
    "dpe, all views": DPE(selection=1.0, queue=1),
    "dpe, text replaced": DPE(renormalise_text=True, gate_keeps="above", text_update="full"),
    "tda": TDA(),
    "tda, all views": TDA(selection=1.0, neg_entropy_lower=0.0, neg_entropy_upper=1.0, neg_mask_lower=0.0),
    "tps": TPS(),
    "tps, all views": TPS(selection=1.0),
    "dmn": DMN(memory_size=2),
    "dmn, all views": DMN(memory_size=2, selection=1.0),
}
TEXTS = ("random", "same", "duplicate", "opposite", "axes", "signs")
VIEWS = ("random", "equal", "prototype", "opposite", "between", "orthogonal", "cancelling", "axes")
CLOSE = {torch.float32: 2e-3, torch.float64: 1e-9}  # logits of size 100
ROUNDING = {torch.float32: 1e-6, torch.float64: 4e-15}  # rounding error of a number of size 1


class Case(NamedTuple):
    method: str
    text: str
    classes: int
    dim: int
    dtype: torch.dtype
    views: int
    scale: float
    images: tuple[str, ...]


def cases(seed: int, count: int) -> Iterator[tuple[Case, torch.Generator]]:
    random = torch.Generator().manual_seed(seed)

    def pick(choices: Any) -> Any:
        return choices[int(torch.randint(0, len(choices), (1,), generator=random))]

    for _ in range(count):
        names = pick(tuple(METHODS)), pick(TEXTS), pick((2, 3, 5, 17)), pick((2, 3, 8, 24))
        rest = pick((torch.float32, torch.float64)), pick((1, 2, 5, 20)), pick((1.0, 100.0))
        yield Case(*names, *rest, tuple(pick(VIEWS) for _ in range(5))), random


def prototypes(case: Case, random: torch.Generator) -> Tensor:
    shape = case.classes, case.dim
    text = torch.randn(shape, generator=random, dtype=torch.float64)
    match case.text:
        case "same":
            text = text[:1].expand(shape).clone()
        case "duplicate":
            text[-1] = text[0]
        case "opposite":
            text[1] = -text[0]
        case "axes":
            text = torch.eye(max(shape), dtype=torch.float64)[: case.classes, : case.dim]
            text[text.sum(1) == 0, 0] = 1
        case "signs":
            text = 2.0 * torch.randint(0, 2, shape, generator=random).double() - 1
    return unit(text.to(case.dtype))


def image(kind: str, text: Tensor, views: int, random: torch.Generator) -> Tensor:
    text, (classes, dim) = text.double(), text.shape
    made = torch.randn(views, dim, generator=random, dtype=torch.float64)
    one = text[int(torch.randint(0, classes, (1,), generator=random))]
    match kind:
        case "equal":
            made = made[:1].expand(views, dim)
        case "prototype":
            made = one.expand(views, dim)
        case "opposite":
            made = -one.expand(views, dim)
        case "between":
            middle = text[0] + text[1]
            made = (middle if middle.norm() > 1e-3 else one).expand(views, dim)
        case "orthogonal" if classes < dim:
            basis = torch.linalg.qr(text.T)[0]
            made = made - (made @ basis) @ basis.T
        case "cancelling":
            made = made[:1].repeat(views, 1)
            made[1::2] *= -1
        case "axes":
            made = torch.eye(dim, dtype=torch.float64)[torch.randint(0, dim, (views,), generator=random)]
    return unit(made)


class Outcome(NamedTuple):
    logits: Tensor
    learned: bool
    state: list[Tensor]


def outcome(stepper: Any, views: Tensor) -> Outcome:
    with torch.inference_mode():
        (logits,), (learned,) = stepper.step(views)
        return Outcome(logits, bool(learned), leaves(stepper.snapshot()[0]))


def alike(one: Outcome, other: Outcome) -> bool:
    near = CLOSE[one.logits.dtype]
    states = all(
        torch.allclose(a.double(), b.double(), atol=1e-5, rtol=0) for a, b in zip(one.state, other.state, strict=True)
    )
    return states and one.learned == other.learned and bool((one.logits - other.logits).abs().max() <= near)


def decided_by_rounding(task: Task, method: Any, state: Any, views: Tensor, random: torch.Generator) -> bool:
    """Whether rounding decides the method's own step: it differs if its inputs change by rounding errors."""
    expected = outcome(open_stepper(task, [method], [state], reference=True), views)
    for _ in range(40):
        other = aligned_task(Task(task.text + noise(task.text, random), task.classnames, task.scale))
        moved = open_stepper(other, [method], [perturbed(state, random)], reference=True)
        if not alike(outcome(moved, views + noise(views, random)), expected):
            return True
    return False


def perturbed(state: Any, random: torch.Generator) -> Any:
    """The state with rounding errors added; zeros and infinities stay."""
    if not isinstance(state, Tensor):
        return type(state)(*(perturbed(part, random) for part in state))
    if not state.is_floating_point():
        return state
    return torch.where((state == 0) | state.isinf(), state, state + noise(state, random))


def noise(numbers: Tensor, random: torch.Generator) -> Tensor:
    return ROUNDING[numbers.dtype] * torch.randn(numbers.shape, generator=random, dtype=numbers.dtype)


def disagreements(seed: int, count: int) -> tuple[int, list[str]]:
    """The number of steps, and those where the fast one and the method's own differ by more than rounding."""
    steps, found = 0, []
    for case, random in cases(seed, count):
        method, text = METHODS[case.method], prototypes(case, random)
        task = aligned_task(Task(text, tuple(map(str, range(case.classes))), case.scale))
        state = method.init(task)
        for kind in case.images:
            views = image(kind, text, case.views, random).to(case.dtype)
            plain = open_stepper(task, [method], [state], reference=True)
            fast, expected = outcome(open_stepper(task, [method], [state]), views), outcome(plain, views)
            steps += 1
            if not (fast.logits.isfinite().all() and expected.logits.isfinite().all()):
                found.append(f"not finite: {case}, {kind}")
            elif not alike(fast, expected) and not decided_by_rounding(task, method, state, views, random):
                apart = float((fast.logits - expected.logits).abs().max())
                found.append(f"{apart:.2g} apart: {case}, {kind}, learned {fast.learned} {expected.learned}")
            state = plain.snapshot()[0]
    return steps, found

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

import testtime as tt
from testtime import checks, registry
from testtime.methods.base import Base
from testtime.methods.dpe import DPE

CONTEXT_METHODS = {"tpt", "ctpt", "difftpt"}  # need a text tower, checked with one elsewhere
METHODS = [name for name in registry.method_names() if name not in CONTEXT_METHODS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_keeps_every_promise(name: str, dtype: torch.dtype) -> None:
    task, stream, _ = tt.toy(images=24, views=12, dtype=dtype)
    checks.check_method(tt.make_method(name), task, stream)


@pytest.mark.parametrize("preset", DPE.presets)
def test_both_presets_of_dpe_keep_every_promise(preset: str) -> None:
    checks.check_method(tt.make_method("dpe", preset))


class Memory(NamedTuple):
    seen: torch.Tensor


@dataclass(frozen=True)
class Broken(Base):
    """A method with one fault, by name."""

    name = "broken"
    summary = "for tests"
    fault: str = "none"

    def init(self, task: tt.Task) -> Memory:
        return Memory(torch.zeros(1))

    def step(self, task: tt.Task, state: Any, views: torch.Tensor) -> tuple[torch.Tensor, Any]:
        logits = task.zero_shot(views[0])
        if self.fault == "NaN":
            logits = logits * torch.nan
        if self.fault == "impure":
            with torch.inference_mode():
                state.seen.add_(1)
        if self.fault == "grows":
            return logits, Memory(torch.cat([state.seen, state.seen]))
        if self.fault == "order":
            logits = logits + torch.arange(task.classes)
        if self.fault == "random":
            logits = logits + torch.rand(())
        return logits, Memory(state.seen + 1)

    def scan(self, task: tt.Task, state: Any, stream: torch.Tensor) -> tuple[torch.Tensor, Any]:
        logits, state = super().scan(task, state, stream)
        return (logits + 1 if self.fault == "scan" else logits), state


@pytest.mark.parametrize(
    ("fault", "promise"),
    [
        ("NaN", "finite"),
        ("impure", "old state alone"),
        ("grows", "shapes and types"),
        ("order", "class order"),
        ("random", "same logits"),
        ("scan", "scan equals single steps"),
    ],
)
def test_a_broken_promise_is_named(fault: str, promise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.METHODS.ours, "broken", registry.Entry(Broken))
    task, stream, _ = tt.toy(images=12, views=4)
    named = {
        "finite": checks.finite_logits,
        "old state alone": checks.pure_steps,
        "shapes and types": checks.fixed_state,
        "class order": checks.class_order_irrelevant,
        "same logits": checks.pure_steps,
        "scan equals single steps": checks.scan_is_steps,
    }
    with pytest.raises(checks.CheckFailed, match=promise):
        named[promise](Broken(fault), task, stream)


def test_a_sound_method_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.METHODS.ours, "broken", registry.Entry(Broken))
    checks.check_method(Broken())


def test_the_method_in_contributing_keeps_every_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    import re
    import sys
    import textwrap
    import types
    from pathlib import Path

    guide = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    code = re.search(r"```python\n(.*?)```", guide, re.DOTALL)
    assert code is not None
    module = types.ModuleType("nearest")
    monkeypatch.setitem(sys.modules, "nearest", module)
    exec(compile(textwrap.dedent(code[1]), "CONTRIBUTING.md", "exec"), module.__dict__)
    monkeypatch.setitem(registry.METHODS.ours, "nearest", registry.Entry("nearest:Nearest"))
    checks.check_method(tt.make_method("nearest"))

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from small_data import make_folders
from torch.nn.functional import normalize

import testtime as tt
from testtime import checks, registry
from testtime.datasets import Dataset, open_dataset
from testtime.encoding.encoders import Deferred
from testtime.methods.base import Base, overwrites
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


BUFFER = torch.zeros(8)


@dataclass(frozen=True)
class Placing(Broken):
    """A method whose step in place has one fault, by name."""

    def step(self, task: tt.Task, state: Any, views: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return task.zero_shot(views[0]), Memory(state.seen + 1)

    def step_in_place(self, task: tt.Task, state: Any, views: torch.Tensor) -> tuple[torch.Tensor, Any, bool]:
        logits, after = self.step(task, state, views)
        if self.fault == "logits":
            logits = logits + 1
        if self.fault == "buffer":
            logits = BUFFER.copy_(logits + (state.seen > 10))
        if self.fault == "views":
            views.mul_(2)
        return logits, state if self.fault == "state" else after, self.fault != "learned"


class Inherits(Placing):
    """A step of its own: the inherited one in place is another method's."""

    def step(self, task: tt.Task, state: Any, views: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return task.zero_shot(views[0]) + state.seen, Memory(state.seen + 1)


@pytest.mark.parametrize(
    ("fault", "promise"),
    [
        ("logits", "logits of a step"),
        ("state", "state of a step"),
        ("learned", "learns where a step does"),
        ("views", "modify the views"),
        ("buffer", "modify the logits of the one before"),
    ],
)
def test_a_broken_promise_of_a_step_in_place_is_named(fault: str, promise: str) -> None:
    task, stream, _ = tt.toy(classes=8, images=20, views=4)
    with pytest.raises(checks.CheckFailed, match=promise):
        checks.pure_steps(Placing(fault), task, stream)
    checks.pure_steps(Placing("none"), task, stream)


def test_an_inherited_step_in_place_does_not_replace_a_step_of_ones_own() -> None:
    task, stream, _ = tt.toy(images=6, views=4)
    assert overwrites(Placing()) and not overwrites(Inherits())
    checks.pure_steps(Inherits(), task, stream)
    odd = tt.toy(images=6, views=1, dim=49)  # rows that are not aligned are stepped one by one
    found = tt.Session(odd[0], Inherits()).scan(odd[1])
    frozen = odd[0].zero_shot(odd[1][:, 0])
    torch.testing.assert_close(found - frozen, torch.arange(6.0)[:, None].expand_as(frozen), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("fault", "promise"),
    [
        ("NaN", "finite"),
        ("impure", "not modify the old state"),
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
        "not modify the old state": checks.pure_steps,
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


# --- encoders ---


class Spoilt:
    """The tiny encoder with one fault, by name."""

    def __init__(self, fault: str) -> None:
        self.whole, self.fault, self.calls = tt.load_encoder("tiny"), fault, 0

    def __getattr__(self, name: str) -> Any:
        spoilt = {"name": "tiny:4", "dim": 0, "scale": float("nan"), "device": "cpu", "preprocess": None}
        return spoilt[name] if name == self.fault else getattr(self.whole, name)

    def encode_images(self, pixels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.fault == "any shape":
            pixels = pixels.expand(-1, 3, -1, -1) if pixels.ndim == 4 else pixels[None]
        if self.fault == "empty" and len(pixels) == 0:
            return torch.zeros(0)
        rows = self.whole.encode_images(pixels)
        changed = {
            "length": lambda: 2 * rows,
            "double": lambda: rows.double(),
            "one row": lambda: rows[:1],
            "moody": lambda: normalize(rows + 1e-3 * self.calls, dim=1),
            "company": lambda: normalize(rows - 0.1 * rows.mean(dim=0), dim=1),
            "blind": lambda: rows.new_full(rows.shape, rows.shape[1] ** -0.5),
        }
        return changed.get(self.fault, lambda: rows)()

    def encode_texts(self, texts: Any) -> torch.Tensor:
        if self.fault == "letters":
            texts = list(texts)
        rows = self.whole.encode_texts(texts)
        return normalize(rows + 1, dim=1) if self.fault == "prompts" else rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_tiny_encoder_keeps_every_promise(dtype: torch.dtype) -> None:
    checks.check_encoder(tt.load_encoder("tiny:3", dtype=dtype))
    checks.check_encoder(Deferred("tiny"))


@pytest.mark.parametrize(
    ("fault", "promise"),
    [
        ("dim", "`dim` is a whole number above 0; it is 0"),
        ("scale", "`scale` is above 0; it is nan"),
        ("device", "`device` is a torch.device; it is 'cpu'"),
        ("preprocess", "`preprocess` is a Preprocess; it is None"),
        ("one row", r"features of images are \(n, D\); they are \(1, 32\)"),
        ("length", "features of images are unit rows; a length is off by 1"),
        ("double", "features of images are float32"),
        ("moody", "the same images have the same features"),
        ("company", "an image's features do not depend on the batch; they differ by"),
        ("empty", r"no images have features \(0, D\)"),
        ("any shape", r"images \(3, H, W\) are refused as InputError"),
        ("letters", "texts that are one string are refused"),
        ("blind", "different images have different features"),
        ("prompts", "soft prompts start at texts; they differ by"),
        ("name", "loaded again, images are the same"),
    ],
)
def test_an_encoder_s_broken_promise_is_named(fault: str, promise: str) -> None:
    with pytest.raises(checks.CheckFailed, match=promise):
        checks.check_encoder(Spoilt(fault))


def test_an_encoder_that_no_name_loads_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = tt.load_encoder("tiny")
    monkeypatch.setattr(encoder, "name", "mine")
    with pytest.raises(checks.CheckFailed, match="an encoder's name loads it again; Unknown encoder 'mine'"):
        checks.check_encoder(encoder)


def test_an_encoder_without_soft_prompts_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(Spoilt):
        def __getattr__(self, name: str) -> Any:
            if name == "soft_prompts":
                raise AttributeError(name)
            return super().__getattr__(name)

    checks.check_encoder(Plain("none"))


# --- datasets ---


@pytest.fixture
def pets(tmp_path: Path) -> Dataset:
    return open_dataset(make_folders(tmp_path / "pets"))


def test_folders_keep_every_promise_with_labels_and_without(pets: Dataset) -> None:
    checks.check_dataset(pets)
    checks.check_dataset(open_dataset(Path(str(pets.paths[0])).parent))


class Shaken(list):  # type: ignore[type-arg]
    """Images in another order every time."""

    def __iter__(self) -> Any:
        self.reverse()
        return super().__iter__()


@pytest.mark.parametrize(
    ("changed", "promise"),
    [
        (lambda data: {"paths": [], "labels": []}, "a dataset has images"),
        (lambda data: {"labels": data.labels[1:]}, "12 images have 11 labels"),
        (lambda data: {"labels": [3, *data.labels[1:]]}, "whole numbers below 3; label 0 is 3"),
        (lambda data: {"labels": [*data.labels[1:], -1]}, "label 11 is -1"),
        (lambda data: {"labels": [None, *data.labels[1:]]}, "label 0 is None"),
        (lambda data: {"labels": [0] * 12, "classnames": ["cat"]}, "class names can be used; Give two classes"),
        (lambda data: {"classnames": ["cat", "", "fox"]}, "class names can be used; Class name 2 of 3 is empty"),
        (lambda data: {"paths": [*data.paths[:-1], Path("gone.png")]}, "image 11 is not: gone.png: no such file"),
        (lambda data: {"paths": Shaken(data.paths)}, "same order every time"),
        (lambda data: {"paths": [*data.paths[:-1], data.paths[0]]}, "a unique name; 1 of 12 share one"),
    ],
)
def test_a_dataset_s_broken_promise_is_named(pets: Dataset, changed: Any, promise: str) -> None:
    with pytest.raises(checks.CheckFailed, match=promise):
        checks.check_dataset(replace(pets, **changed(pets)))

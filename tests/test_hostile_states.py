"""States that are damaged, settings that overflow, and inputs that leave nothing to decide."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import degenerate
import fuzz_states
import pytest
import torch
from safetensors.torch import save

import testtime as tt
from testtime import Session
from testtime.methods.dpe import DPE
from testtime.steppers import fast_of, open_stepper
from testtime.steppers.plain import Plain
from testtime.types import InputError, SettingError, StateError, Task, ViewPlan

METHODS = sorted(set(fuzz_states.METHODS.ours) - set(fuzz_states.TOWERED))
both = pytest.mark.parametrize("reference", [False, True], ids=["fast", "plain"])


def rewritten(folder: Path, method: str, facts: dict[str, str] | None = None, **tensors: torch.Tensor) -> Path:
    """A saved state with other metadata or tensors."""
    stored, known = fuzz_states.parts(fuzz_states.saved(method, True)[0])
    path = folder / "s.safetensors"
    changed = {name.replace("__", "."): tensor.contiguous() for name, tensor in tensors.items()}
    path.write_bytes(save(stored | changed, known | (facts or {})))
    return path


def test_damaged_states_are_refused_or_answer() -> None:
    found = fuzz_states.run(150, seed=1)
    assert sum(found.values()) == 150 and found["answers"] and found["refused by load"]


# What is loaded


@pytest.mark.parametrize("method", METHODS)
def test_nan_in_a_state_is_refused(method: str, tmp_path: Path) -> None:
    stored, _ = fuzz_states.parts(fuzz_states.saved(method, True)[0])
    for name, tensor in stored.items():
        for number in (math.nan, -math.inf) if tensor.is_floating_point() else (-1, 2**62):
            spoilt = tensor.clone()
            spoilt.view(-1)[-1] = number
            path = rewritten(tmp_path, method, **{name.replace(".", "__"): spoilt})
            with pytest.raises(StateError, match=f"{path}.*(damaged|{name})"):
                Session.load(path)


def test_infinity_is_where_a_slot_is_empty(tmp_path: Path) -> None:
    path = rewritten(tmp_path, "dpe", state__queue__cost=torch.full((5, 3), math.inf))
    assert Session.load(path).state.queue.cost.isinf().all()
    path = rewritten(tmp_path, "dpe", state__visual=torch.full((5, 8), math.inf))
    with pytest.raises(StateError, match=r"'state\.visual' holds infinity"):
        Session.load(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("count", "-1"),
        ("count", "9" * 30),
        ("position", "9" * 5000),
        ("position", "-3"),
        ("scale", "1e400"),
        ("scale", "nan"),
        ("scale", "-1"),
        ("views", "0"),
        ("views", "1000000000"),
        ("seed", "-1"),
        ("seed", str(2**64)),
        ("augmix", "1"),
        ("classnames", "[" * 100_000),
        ("classnames", '{"a": 1}'),
        ("classnames", "[1, 2, 3, 4, 5]"),
        ("settings", '{"alpha": ' * 100_000),
        ("settings", '{"alpha": 1' + "0" * 400 + "}"),
        ("settings", '{"queue": 99999999999999999999}'),
    ],
    ids=lambda text: text[:20],
)
def test_metadata_out_of_range_is_refused(key: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(StateError) as caught:
        Session.load(rewritten(tmp_path, "dpe", {key: value}))
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


def test_state_that_does_not_fit_in_memory_is_refused_before_it_is_made(tmp_path: Path) -> None:
    for call in (
        lambda: Session.load(rewritten(tmp_path, "dpe", {"settings": json.dumps({"queue": 2**31 - 1})})),
        lambda: Session(tt.toy()[0], "dpe", queue=2**31 - 1),
        lambda: Session(tt.toy()[0], "dmn", memory_size=2**30),
    ):
        with pytest.raises(SettingError, match=r"would need [\d,]+ GB"):
            call()
    with pytest.raises(SettingError, match="must be below"):
        DPE(queue=2**31)
    with pytest.raises(SettingError, match="finite"):
        DPE(alpha=10**400)
    with pytest.raises(InputError, match="views=10001"):
        ViewPlan(10_001)


# What is answered


OVERFLOWING: list[tuple[str, dict[str, Any]]] = [
    ("dpe", {"alpha": 1e38, "scale_affinity": True}),
    ("dpe", {"alpha": 1e300}),
    ("tda", {"pos_alpha": 1e300}),
    ("dmn", {"fusion_text": 1e300}),
    ("mcp", {"alpha": 1e300}),
]


@both
@pytest.mark.parametrize(("method", "settings"), OVERFLOWING, ids=lambda given: str(given))
def test_answer_that_is_not_finite_is_refused_and_not_counted(
    method: str, settings: dict[str, Any], reference: bool, tmp_path: Path
) -> None:
    task, stream, _ = tt.toy()
    session = Session(task, method, reference=reference, **settings)
    good = session.save(tmp_path / "good.safetensors").read_bytes()
    with pytest.raises(InputError, match=f"Method '{method}' gives NaN or infinity for image 0"):
        session.predict(stream[0])
    session.save(tmp_path / "good.safetensors")  # nothing was learned
    for call in (lambda: session.step(stream[0]), lambda: list(session.run(stream))):
        with pytest.raises(InputError, match="for image 0"):
            call()
    assert session.count == session.position == 0
    with pytest.raises(StateError, match=r"image 0.*not written to .*good\.safetensors"):
        session.save(tmp_path / "good.safetensors")
    assert (tmp_path / "good.safetensors").read_bytes() == good
    session.reset()
    with pytest.raises(InputError, match="for image 0"):
        session.scan(stream)
    assert session.count == 0


def test_scan_names_the_first_image_whose_answer_is_not_finite() -> None:
    class Failing(DPE):
        def step(self, task: Task, state: Any, views: torch.Tensor) -> tuple[torch.Tensor, Any]:
            logits, after = super().step(task, state, views)
            return logits + (math.inf if int(after.updates) + int(after.queue.cost.isfinite().sum()) > 9 else 0), after

    task, stream, _ = tt.toy()
    session = Session(task, Failing())
    with pytest.raises(InputError, match=r"'dpe' gives NaN or infinity for image [1-9]"):
        session.scan(stream)
    with pytest.raises(StateError):
        session.step(stream[0])


def test_state_that_has_become_nan_is_not_saved(tmp_path: Path) -> None:
    session = Session(tt.toy()[0], "dpe")
    session.state = session.state._replace(visual=session.state.visual.fill_(math.nan))
    with pytest.raises(StateError, match=r"'state\.visual' holds NaN.*not written"):
        session.save(tmp_path / "s.safetensors")
    assert not (tmp_path / "s.safetensors").exists()


def test_command_line_refuses_settings_that_overflow(cli: Any, tmp_path: Path) -> None:
    task, stream, labels = tt.toy(images=5)
    store = tt.save_features(tmp_path / "f.safetensors", stream, task.text, labels=labels)
    for reference in ([], ["--reference"]):
        ended = cli("replay", store, "--set", "alpha=1e300", *reference)
        assert ended.code == 2 and "gives NaN or infinity" in ended.err


# What leaves nothing to decide


def test_fast_and_plain_steps_differ_by_rounding_at_most() -> None:
    steps, found = degenerate.disagreements(seed=3, count=60)
    assert steps == 300 and not found


def test_task_of_one_prototype_is_left_to_the_method() -> None:
    text = torch.nn.functional.normalize(torch.ones(4, 8), dim=1)
    task = Task(text, tuple("abcd"))
    for method in degenerate.METHODS.values():
        assert fast_of(task, method) is None and isinstance(open_stepper(task, [method]), Plain)


@both
def test_views_that_cancel_give_finite_answers(reference: bool) -> None:
    task, stream, _ = tt.toy(views=1)
    session = Session(task, "dpe", selection=1.0, reference=reference)
    views = torch.cat([stream[0], -stream[0]])
    for _ in range(3):
        assert math.isfinite(session.step(views).confidence)
    assert torch.isfinite(session.state.text).all() and torch.isfinite(session.state.visual).all()


@both
def test_queue_does_not_take_a_denormal_cost_for_a_lower_one(reference: bool) -> None:
    """exp(-100) is a denormal to one and zero to the other."""
    task = Task(torch.eye(2, 8), ("a", "b"))
    session = Session(task, "dpe", queue=1, reference=reference)
    taken = [session.step(torch.eye(8)[:1]).learned for _ in range(2)]
    keys = session.state.queue.keys[0, 0]
    session.step(torch.eye(8)[0] + 1e-3 * torch.eye(8)[2])
    assert taken[0] and torch.equal(session.state.queue.keys[0, 0], keys)


def test_loops_that_cannot_be_cached_on_disk_are_compiled_again() -> None:
    """Where neither the installation nor the home folder can be written."""
    program = """
import numba.core.caching as caching, numpy, warnings
def full(self):
    raise OSError(30, "Read-only file system")
caching._CacheLocator.ensure_cache_path = full
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    from testtime.steppers.cpu import loops, dpe, tda
assert [str(one.message)[:45] for one in said] == ["Compiled loops cannot be kept on disk, and ar"], said
print(loops.filled(numpy.array([1.0, 2.0, numpy.inf])))
"""
    environment = {**os.environ, "HOME": "/nonexistent", "PYTHONPATH": str(Path(tt.__file__).parents[1])}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (ended.returncode, ended.stdout) == (0, "2\n"), ended.stderr

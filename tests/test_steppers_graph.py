"""Scans in graphs give what a method's own scan gives; what a GPU must not do is caught on the meta device."""

from __future__ import annotations

import copy
import os
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor

import testtime as tt
from testtime.fast import capture, graph
from testtime.methods.base import Base, leaves
from testtime.types import FeatureError, Task

METHODS = ("dmn", "dota", "dpe", "mcp", "mta", "tda", "tps", "zero", "zeroshot")


class Total(NamedTuple):
    mean: Tensor  # (D,)
    count: Tensor  # ()


@dataclass(frozen=True)
class Drift(Base):
    """The least method there is that remembers something: small, so that compiling it is quick."""

    name: ClassVar[str] = "drift"
    rate: float = 0.1

    def init(self, task: Task) -> Total:
        return Total(torch.zeros_like(task.text[0]), torch.zeros((), dtype=torch.int64, device=task.text.device))

    def step(self, task: Task, state: Total, views: Tensor) -> tuple[Tensor, Total]:
        mean = torch.lerp(state.mean, views[0], self.rate)
        return task.zero_shot(views[0] - mean), Total(mean, state.count + 1)


def same(first: Any, second: Any) -> bool:
    return all(map(torch.equal, leaves(first), leaves(second)))


@pytest.fixture(autouse=True)
def forget() -> Any:
    graph._runners.clear()
    capture._said.clear()
    yield
    graph._runners.clear()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("images", [1, 31, 32, 70])
def test_scan_is_the_methods_own(name: str, images: int) -> None:
    task, stream, _ = tt.toy(images=images, views=12)
    method = tt.make_method(name)
    start = method.init(task)
    kept = [leaf.clone() for leaf in leaves(start)]
    with torch.inference_mode():
        expected, after = method.scan(task, start, stream)
        logits, state = graph.scan(method, task, start, stream)
    assert torch.equal(logits, expected) and same(state, after)
    assert all(map(torch.equal, leaves(start), kept))


def test_second_scan_goes_on_from_the_state_given_and_not_from_its_own() -> None:
    task, stream, _ = tt.toy(images=40, views=12)
    method = tt.make_method("dpe")
    _, halfway = graph.scan(method, task, method.init(task), stream[:20])
    kept = [leaf.clone() for leaf in leaves(halfway)]
    twice = [graph.scan(method, task, halfway, stream[20:]) for _ in range(2)]
    whole, last = method.scan(task, method.init(task), stream)
    assert torch.equal(twice[0][0], twice[1][0]) and torch.equal(twice[0][0], whole[20:])
    assert same(twice[0][1], last) and all(map(torch.equal, leaves(halfway), kept))
    assert len(graph._runners) == 1


def test_task_of_the_same_shape_is_told_apart() -> None:
    first, stream, _ = tt.toy(images=10)
    second = tt.toy(seed=1)[0]
    method = tt.make_method("tda")
    graph.scan(method, first, method.init(first), stream)
    logits, _ = graph.scan(method, second, method.init(second), stream)
    assert torch.equal(logits, method.scan(second, method.init(second), stream)[0])


def test_few_runners_are_kept() -> None:
    method = tt.make_method("zeroshot")
    for classes in range(3, 12):
        task, stream, _ = tt.toy(classes=classes, images=2)
        graph.scan(method, task, method.init(task), stream)
    assert len(graph._runners) == graph.KEPT


def test_no_images_give_no_logits() -> None:
    task, stream, _ = tt.toy(images=2)
    method = tt.make_method("dpe")
    state = method.init(task)
    logits, after = graph.scan(method, task, state, stream[:0])
    assert logits.shape == (0, 8) and same(after, state)


def test_features_of_another_shape_are_refused() -> None:
    task, stream, _ = tt.toy(images=2)
    with pytest.raises(FeatureError, match="takes features"):
        graph.Runner(tt.make_method("dpe"), task, 7).run(stream)


@pytest.mark.parametrize("views", [1, 12])
@pytest.mark.parametrize("name", [name for name in METHODS if name != "zeroshot"])
def test_step_never_reads_a_number_back(name: str, views: int) -> None:
    # a meta tensor has no numbers, so whatever asks for one fails here, as it would stall a GPU or end a capture
    task, stream, _ = tt.toy(images=1, views=views)
    ghost = copy.copy(task)
    object.__setattr__(ghost, "text", task.text.to("meta"))
    method = tt.make_method(name)
    logits, _ = method.step(ghost, method.init(ghost), stream[0].to("meta"))
    assert logits.shape == (8,)


def test_compiled_steps_give_the_same(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # traced, and its writes to the state taken apart, as on a GPU; only the kernels at the end are ready-made ones
    monkeypatch.setattr(graph, "compiled", partial(capture.compiled, backend="aot_eager"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    task, stream, _ = tt.toy(images=9)
    method = Drift()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own, of which there is nothing to learn
        runner = graph.Runner(method, task, 4, steps=4, compile=True)
        logits = runner.run(stream)
        runner.load(task, method.init(task))
        again = runner.run(stream)
    assert runner._step is not graph._step and not capture._said
    expected, after = method.scan(task, method.init(task), stream)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert torch.equal(again, logits)
    assert int(runner.state().count) == int(after.count) == 9
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / ".cache" / "testtime" / "inductor")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")


def test_step_that_cannot_be_compiled_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Tensor:
        raise RuntimeError("no kernel for that\nand a long story")

    monkeypatch.setattr(graph, "compiled", lambda function: broken)
    task, stream, _ = tt.toy(images=5)
    runner = graph.Runner(Drift(), task, 4, compile=True)
    with pytest.warns(RuntimeWarning, match=r"'drift' cannot be compiled.*no kernel for that\)"):
        logits = runner.run(stream)
    assert torch.equal(logits, Drift().scan(task, Drift().init(task), stream)[0])


def test_steps_that_cannot_be_captured_run_one_by_one_and_it_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(launch: Any) -> Any:
        launch()  # a warm-up changes the state before the capture fails
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graph, "capture", refused)
    task, stream, _ = tt.toy(images=5)
    expected = Drift().scan(task, Drift().init(task), stream)[0]
    with pytest.warns(RuntimeWarning, match="'drift' cannot be captured") as said:
        for _ in range(2):
            logits = graph.Runner(Drift(), task, 4, steps=2, graphs=True).run(stream)
            assert torch.equal(logits, expected)
    assert len(said) == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("CUDA error: failed\nSearch for `cudaErrorStreamCaptureInvalidated' in"), "reads a value back"),
        (RuntimeError("operation not permitted when stream is capturing"), "reads a value back"),
        (ValueError("Consider this. Could not guard on data-dependent expression\n\nmore"), "a tensor's values"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nGPU 0 has"), "memory is full"),
        (RuntimeError(f"{'long ' * 60}\nand more"), "RuntimeError: long"),
        (KeyError(), "KeyError"),
    ],
)
def test_why_it_failed_is_one_short_line(error: Exception, said: str) -> None:
    line = capture.reason(error)
    assert said in line and "\n" not in line and len(line) < 120


def test_replayed_steps_use_the_graph_of_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = []

    class Replays:
        def __init__(self, launch: Any) -> None:
            captured.append(self)
            launch()
            self.replay = launch

    monkeypatch.setattr(graph, "capture", Replays)
    task, stream, _ = tt.toy(images=11)
    method = Drift()
    logits = graph.Runner(method, task, 4, steps=4, graphs=True).run(stream)
    assert torch.equal(logits, method.scan(task, method.init(task), stream)[0])
    assert len(captured) == 2  # one of four steps, one of a single step


def test_precision_of_products_is_set_back() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with capture.exact_products():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_answers_of_another_shape_than_logits_keep_it() -> None:
    from testtime.methods.dmn import DMN
    from testtime.oracle import parts_of

    task, stream, _ = tt.toy(images=20, views=3)
    method = parts_of(DMN())
    expected, _ = method.scan(task, method.init(task), stream)
    ours = graph.Runner(method, task, 3, steps=8)
    ours.load(task, method.init(task))
    torch.testing.assert_close(ours.run(stream), expected)

"""Steps for graphs give what a method's own give; device synchronisation is caught on the meta device."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor

import testtime as tt
from testtime.machine import capture
from testtime.methods.base import Base, leaves
from testtime.methods.dpe import DPE
from testtime.steppers.gpu import graph
from testtime.types import FeatureError, Task

METHODS = (
    "bca",
    "dlae",
    "dmn",
    "dota",
    "dpe",
    "evidence",
    "mcp",
    "mta",
    "oga",
    "onzeta",
    "tda",
    "tps",
    "zero",
    "zeroshot",
)


class Total(NamedTuple):
    mean: Tensor  # (D,)
    count: Tensor  # ()


@dataclass(frozen=True)
class Drift(Base):
    """A minimal method that remembers something."""

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
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_warned", set())


def opened(task: Task, method: Any, **options: Any) -> graph.Stepper:
    return graph.Stepper(task, [method], [method.init(task)], **options)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("images", [1, 31, 32, 70])
def test_scan_is_the_methods_own(name: str, images: int) -> None:
    task, stream, _ = tt.toy(images=images, views=12)
    method = tt.make_method(name)
    start = method.init(task)
    kept = [leaf.clone() for leaf in leaves(start)]
    stepper = graph.Stepper(task, [method], [start])
    with torch.inference_mode():
        expected, after = method.scan(task, start, stream)
        (logits,), (state,) = stepper.scan(stream), stepper.snapshot()
    assert torch.equal(logits, expected) and same(state, after)
    assert all(map(torch.equal, leaves(start), kept))


def test_a_stepper_continues_from_the_restored_state_and_not_from_its_own() -> None:
    task, stream, _ = tt.toy(images=40, views=12)
    method = tt.make_method("dpe")
    stepper = opened(task, method)
    stepper.scan(stream[:20])
    halfway = stepper.snapshot()
    kept = [leaf.clone() for leaf in leaves(halfway)]
    whole, last = method.scan(task, method.init(task), stream)
    for _ in range(2):
        stepper.restore(halfway)
        assert torch.equal(stepper.scan(stream[20:])[0], whole[20:]) and same(stepper.snapshot()[0], last)
    assert all(map(torch.equal, leaves(halfway), kept))


def test_tensors_of_a_captured_peek_live_as_long_as_its_stepper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph stores addresses and keeps no tensor alive: something else must."""
    used = []

    def captured(launch: Any, **options: Any) -> Any:
        closure = dict(zip(launch.__code__.co_freevars, launch.__closure__, strict=True))
        used.extend(weakref.ref(leaf) for leaf in leaves(closure["before"].cell_contents))
        return SimpleNamespace(replay=lambda: None)

    monkeypatch.setattr(graph, "capture", captured)
    task, stream, _ = tt.toy(images=1)
    stepper = opened(task, DPE(), graphs=True)
    stepper.peek(stream[0])
    gc.collect()
    assert used and all(reference() is not None for reference in used)


@pytest.mark.parametrize("images", [*range(18), 31, 32, 64, 70])
def test_a_stream_is_split_into_few_launches_of_known_sizes_and_no_empty_one(images: int) -> None:
    task, stream, _ = tt.toy(images=max(images, 1))
    parts = opened(task, DPE())._parts(stream[:images])
    sizes = [len(part) for part in parts]
    assert set(sizes) <= set(graph._sizes()) and sizes == sorted(sizes, reverse=True)
    assert len(sizes) <= (2 if images <= 16 else images // graph.STEPS + 3)
    assert torch.equal(torch.cat([*parts, stream[:0]]), stream[:images])


def test_returned_tensors_belong_to_the_caller() -> None:
    task, stream, _ = tt.toy(images=40)
    stepper = opened(task, DPE())
    returned = [stepper.step(stream[0]), stepper.peek(stream[1]), stepper.scan(stream[2:35]), stepper.snapshot()]
    kept = [leaf.clone() for leaf in leaves(returned)]
    stepper.peek(stream[0])
    stepper.step(stream[1])
    stepper.scan(stream)
    assert all(map(torch.equal, leaves(returned), kept))


def test_images_with_another_number_of_views_continue_from_the_same_state() -> None:
    task, stream, _ = tt.toy(images=30, views=12)
    method = DPE(entropy_threshold=0.3)
    stepper, state = opened(task, method), method.init(task)
    for part, views in zip(stream.split(10), (12, 1, 12), strict=True):
        expected, state = method.scan(task, state, part[:, :views])
        assert torch.equal(stepper.scan(part[:, :views])[0], expected)
    assert same(stepper.snapshot()[0], state)


def test_settings_side_by_side_give_what_each_gives_alone() -> None:
    task, stream, _ = tt.toy(images=40)
    methods = [DPE(), DPE(alpha=2.0), DPE(entropy_threshold=0.0)]
    stepper = graph.Stepper(task, methods, [method.init(task) for method in methods])
    logits, learned = stepper.step(stream[0])
    together = torch.cat([logits[:, None], stepper.scan(stream[1:])], 1)
    assert learned.tolist() == [True] * 3
    for method, rows, state in zip(methods, together, stepper.snapshot(), strict=True):
        expected, after = method.scan(task, method.init(task), stream)
        assert torch.equal(rows, expected) and same(state, after)


@pytest.mark.parametrize("name", METHODS)
def test_each_step_reports_whether_it_learned(name: str) -> None:
    task, stream, _ = tt.toy(images=20)
    method = tt.make_method(name)
    stepper, state = opened(task, method), method.init(task)
    for image in stream:
        _, after = method.step(task, state, image)
        _, learned = stepper.step(image)
        assert learned.dtype == torch.bool and learned.tolist() == [bool(method.learned(state, after))]
        state = after


def test_no_images_give_no_logits() -> None:
    task, stream, _ = tt.toy(images=2)
    methods = [DPE(), DPE(alpha=2.0)]
    stepper = graph.Stepper(task, methods, [method.init(task) for method in methods])
    assert stepper.scan(stream[:0]).shape == (2, 0, 8)
    stepper.step(stream[0])
    before = stepper.snapshot()
    assert stepper.scan(stream[:0]).shape == (2, 0, 8) and same(stepper.snapshot(), before)


def test_features_of_another_shape_are_rejected_and_change_nothing() -> None:
    task, stream, _ = tt.toy(images=2)
    stepper = opened(task, DPE())
    stepper.step(stream[0])
    before = stepper.snapshot()
    with pytest.raises(FeatureError, match=r"must be \(V, 32\)"):
        stepper.step(stream[1][:, :-1])
    assert same(stepper.snapshot(), before)


@pytest.mark.parametrize("views", [1, 12])
@pytest.mark.parametrize("name", [name for name in METHODS if name != "zeroshot"])
def test_step_never_reads_a_number_back(name: str, views: int) -> None:
    # a meta tensor has no data, so reading a number fails here, as it would stall a GPU or abort a capture
    task, stream, _ = tt.toy(images=1, views=views)
    ghost = copy.copy(task)
    object.__setattr__(ghost, "text", task.text.to("meta"))
    method = tt.make_method(name)
    before = method.init(ghost)
    logits, after = method.step(ghost, before, stream[0].to("meta"))
    assert logits.shape == (8,)
    learned = method.learned(before, after)  # a tensor that was not read
    assert learned.shape == () and learned.dtype == torch.bool


def test_steps_that_cannot_be_captured_run_one_by_one_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(launch: Any, **_: Any) -> Any:
        launch()  # a warm-up changes the state before the capture fails
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graph, "capture", refused)
    monkeypatch.setattr(graph, "STEPS", 2)
    task, stream, _ = tt.toy(images=5)
    expected = Drift().scan(task, Drift().init(task), stream)[0]
    with pytest.warns(RuntimeWarning, match="'drift' cannot be captured") as warnings:
        for _ in range(2):
            stepper = opened(task, Drift(), graphs=True)
            logits = [stepper.peek(stream[0]), *stepper.scan(stream[:3])[0], stepper.step(stream[3])[0]]
            assert torch.equal(torch.stack([row.reshape(-1) for row in logits]), expected[[0, 0, 1, 2, 3]])
    assert len(warnings) == 1


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("CUDA error: failed\nSearch for `cudaErrorStreamCaptureInvalidated' in"), "reads a value back"),
        (RuntimeError("operation not permitted when stream is capturing"), "reads a value back"),
        (ValueError("Consider this. Could not guard on data-dependent expression\n\nmore"), "a tensor's values"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nGPU 0 has"), "memory is full"),
        (RuntimeError(f"{'long ' * 60}\nand more"), "RuntimeError: long"),
        (KeyError(), "KeyError"),
    ],
)
def test_the_reason_of_a_failure_is_one_short_line(error: Exception, expected: str) -> None:
    line = capture.reason(error)
    assert expected in line and "\n" not in line and len(line) < 120


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Graphs of four steps and of one, each captured as on a GPU: after warm-ups, which change the state."""
    graphs = []

    class Replays:
        def __init__(self, launch: Any, warm_up: Any, priority: int, exact: bool) -> None:
            graphs.append(self)
            for _ in range(capture.WARM_UPS):
                warm_up()
            self.replay = launch

    monkeypatch.setattr(graph, "capture", Replays)
    monkeypatch.setattr(graph, "STEPS", 4)
    return graphs


def test_replayed_steps_use_the_graph_of_their_number(captured: list[Any]) -> None:
    task, stream, _ = tt.toy(images=11)
    method = Drift()
    (logits,) = opened(task, method, graphs=True).scan(stream)
    assert torch.equal(logits, method.scan(task, method.init(task), stream)[0])
    assert len(captured) == 2  # of four steps, and of three


def test_a_peek_has_its_own_graph_that_leaves_the_state_unchanged(captured: list[Any]) -> None:
    task, stream, _ = tt.toy(images=11)
    method = Drift()
    expected, after = method.scan(task, method.init(task), stream)
    stepper = opened(task, method, graphs=True)
    for image, row in zip(stream, expected, strict=True):
        for _ in range(2):
            assert torch.equal(stepper.peek(image)[0], row)
        assert torch.equal(stepper.step(image)[0][0], row)
    assert same(stepper.snapshot()[0], after) and len(captured) == 2


def test_after_a_warm_up_a_stream_captures_nothing_more(captured: list[Any]) -> None:
    task, stream, _ = tt.toy(images=11)
    method = Drift()
    stepper = opened(task, method, graphs=True)
    stepper.warm_up(stream.shape[1])
    ready = len(captured)
    (logits,) = stepper.scan(stream)
    assert torch.equal(logits, method.scan(task, method.init(task), stream)[0])
    assert len(captured) == ready


def test_precision_of_products_is_restored() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with capture.exact_products():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_answers_of_another_shape_than_logits_keep_their_shape() -> None:
    from testtime.experiments.oracle import oracle_of
    from testtime.methods.dmn import DMN

    task, stream, _ = tt.toy(images=20, views=3)
    method = oracle_of(DMN())
    expected, _ = method.scan(task, method.init(task), stream)
    assert torch.equal(opened(task, method).scan(stream)[0], expected)


def test_several_steps_at_once_say_which_images_were_learned_from() -> None:
    task, stream, _ = tt.toy(images=15)
    stream = stream.repeat(3, 1, 1)  # the second time, the queues have them already
    method = DPE(entropy_threshold=0.0)
    together, apart = opened(task, method), opened(task, method)
    logits, learned = together.steps(stream)
    one_by_one = [apart.step(views) for views in stream]
    assert torch.equal(logits[0], torch.cat([each for each, _ in one_by_one]))
    assert torch.equal(learned[0], torch.cat([each for _, each in one_by_one]))
    assert 0 < learned.sum() < 45 and same(together.snapshot()[0], apart.snapshot()[0])

"""What every stepper promises: fast ones list what they support, peeks change nothing, and results are reproducible."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import testtime as tt
from testtime import ops, steppers
from testtime.methods.base import kinds, leaves
from testtime.methods.dmn import DMN
from testtime.methods.dota import DOTA
from testtime.methods.dpe import DPE
from testtime.methods.tda import TDA
from testtime.methods.tps import TPS
from testtime.session import session as engine
from testtime.steppers import ALIGNMENT, aligned, aligned_task, fast_of, open_stepper, rows_aligned
from testtime.steppers.fast import FAST, SHARES, Fast, supported
from testtime.steppers.gpu import graph
from testtime.steppers.plain import Plain

METHODS: dict[str, Any] = {
    "dlae": tt.make_method("dlae", settings={"ageing": 0.02, "doubt_discount": 0.5, "entropy_threshold": 0.3}),
    "dmn": DMN(memory_size=2),
    "bca": tt.make_method("bca", settings={"mean_count": 5, "prior_threshold": 0.3}),
    "dota": DOTA(refresh=3),
    "dota, one covariance": DOTA(class_memory=0),
    "dpe": DPE(entropy_threshold=0.3),
    "dpe, views reselected": DPE(multi_view_prediction=True, entropy_threshold=0.3, queue=1),
    "dpe, as printed": DPE.paper(),
    "evidence": tt.make_method("evidence"),
    "mcp": tt.make_method("mcp"),
    "mta": tt.make_method("mta"),
    "oga": tt.make_method("oga"),
    "oga, pseudo-inverse": tt.make_method("oga", settings={"inverse": "MoorePenrose"}),
    "onzeta": tt.make_method("onzeta"),
    "tda": TDA(neg_entropy_lower=0.0, neg_entropy_upper=1.0),
    "tps": TPS(),
    "zero": tt.make_method("zero"),
    "zeroshot": tt.make_method("zeroshot"),
}
STEPPERS: dict[str, Callable[..., Any]] = {
    "chosen": open_stepper,
    "reference": partial(open_stepper, reference=True),
    "graph": graph.Stepper,  # as on a GPU, without capturing
}
COMPILED = {"dpe": DPE, "tda": TDA, "tps": TPS, "dmn": DMN}

every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
every_stepper = pytest.mark.parametrize("opened", STEPPERS.values(), ids=STEPPERS.keys())
every_fast = pytest.mark.parametrize("fast", FAST, ids=lambda fast: f"{fast.module.rpartition('.')[2]}-{fast.device}")


def same(first: Any, second: Any) -> bool:
    return all(map(torch.equal, leaves(first), leaves(second)))


def copied(states: Any) -> list[Tensor]:
    return [leaf.clone() for leaf in leaves(states)]


def off_alignment(tensor: Tensor) -> Tensor:
    """The same numbers, starting 8 bytes after a multiple of ALIGNMENT."""
    skip = 8 // tensor.element_size()
    numbers = tensor.new_empty(tensor.numel() + skip)[skip:].view(tensor.shape).copy_(tensor)
    assert numbers.data_ptr() % ALIGNMENT == 8
    return numbers


def all_off_alignment(state: Any) -> Any:
    return off_alignment(state) if isinstance(state, Tensor) else type(state)(*map(all_off_alignment, state))


# Choosing a stepper


def method_of(fast: Fast) -> Any:
    module, _, name = fast.method.rpartition(".")
    return getattr(import_module(module), name)


def with_invalid(method: Any, name: str, value: object) -> Any:
    """The method with a value that its class would reject."""
    changed = copy.copy(method)
    object.__setattr__(changed, name, value)
    return changed


def all_values(kind: Any) -> tuple[object, ...] | None:
    """All values of a Literal or bool type."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return (False, True) if kind is bool else None


@every_fast
def test_a_fast_stepper_lists_exactly_the_settings_of_its_method(fast: Fast) -> None:
    settings = kinds(method_of(fast))
    assert fast.supports.keys() == settings.keys()
    assert set(fast.group_by) <= settings.keys()


@every_fast
def test_supported_values_of_literals_and_switches_are_listed(fast: Fast) -> None:
    for name, kind in kinds(method_of(fast)).items():
        values = all_values(kind)
        if values is not None:
            known = fast.supports[name]
            assert isinstance(known, tuple), name
            assert known and set(known) <= set(values), name


@every_fast
def test_a_value_that_is_not_listed_falls_back_to_the_plain_stepper(
    fast: Fast, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(fast.needs)
    monkeypatch.setattr(steppers, "FAST", [fast._replace(device="cpu")])
    task, _, _ = tt.toy()
    method = method_of(fast)()
    assert fast_of(task, method) is not None
    unlisted = 0
    for name, kind in kinds(type(method)).items():
        known = fast.supports[name]
        values: tuple[object, ...] = ("novel",)
        if isinstance(known, tuple):
            values += tuple(value for value in (*(all_values(kind) or ()), 7) if value not in known)
        for value in values:
            other = with_invalid(method, name, value)
            assert fast_of(task, other) is None, f"{name}={value!r}"
            assert isinstance(open_stepper(task, [other], [method.init(task)]), Plain)
            unlisted += 1
    assert unlisted >= len(fast.supports)


@every_fast
def test_a_setting_that_is_not_listed_is_not_supported(fast: Fast) -> None:
    method = method_of(fast)()
    assert supported(fast, method)
    for name in fast.supports:
        known = {other: values for other, values in fast.supports.items() if other != name}
        assert not supported(fast._replace(supports=known), method), name


def test_every_text_update_rule_has_a_share() -> None:
    assert SHARES.keys() == set(get_args(kinds(DPE)["text_update"]))


@pytest.mark.parametrize("name", COMPILED)
def test_the_fastest_stepper_is_chosen_unless_the_reference_is_requested(name: str) -> None:
    task, _, _ = tt.toy()
    method = COMPILED[name]()
    assert type(open_stepper(task, [method])).__module__ == f"testtime.steppers.cpu.{name}"
    assert isinstance(open_stepper(task, [method], reference=True), Plain)


@pytest.mark.parametrize("methods", [[DPE(), TDA()], [DPE(), DPE(queue=2)], [METHODS["mta"]] * 2], ids=str)
def test_runs_that_cannot_share_a_stepper_are_refused(methods: list[Any]) -> None:
    with pytest.raises(tt.InputError, match=r"2 runs that cannot share a stepper; open one for each\."):
        open_stepper(tt.toy()[0], methods)


# Peeks, snapshots and threads


@every_method
@every_stepper
@pytest.mark.parametrize("views", [1, 12])
def test_a_peek_gives_what_the_next_step_gives_and_leaves_the_state_unchanged(
    method: Any, opened: Callable[..., Any], views: int
) -> None:
    task, stream, _ = tt.toy(classes=7, dim=30, images=24, views=views)
    undisturbed, stepper = (opened(task, [method], [method.init(task)]) for _ in range(2))
    for index, image in enumerate(stream):
        before = copied(stepper.snapshot())
        peeks = [stepper.peek(image), stepper.peek(stream[index * 7 % 24]), stepper.peek(image)]
        assert all(map(torch.equal, leaves(stepper.snapshot()), before))
        (logits, learned), (expected, expected_learned) = stepper.step(image), undisturbed.step(image)
        assert torch.equal(peeks[0], logits) and torch.equal(peeks[2], logits)
        assert torch.equal(logits, expected) and same(stepper.snapshot(), undisturbed.snapshot())
        assert learned.shape == (1,) and learned.dtype == torch.bool and torch.equal(learned, expected_learned)


@every_method
@every_stepper
@pytest.mark.parametrize("views", [1, 12])
def test_several_peeks_are_those_of_each_image_alone(method: Any, opened: Callable[..., Any], views: int) -> None:
    task, stream, _ = tt.toy(classes=7, dim=32, images=24, views=views)  # rows of 128 bytes: all places are aligned
    stepper = opened(task, [method], [method.init(task)])
    stepper.steps(stream[:10])
    before = copied(stepper.snapshot())
    peeks = stepper.peeks(stream)
    assert torch.equal(peeks, torch.stack([stepper.peek(image) for image in stream], 1))
    assert all(map(torch.equal, leaves(stepper.snapshot()), before))


@pytest.mark.parametrize("name", COMPILED)
def test_a_peek_at_settings_side_by_side_gives_what_each_gives_alone(name: str) -> None:
    number = {"dpe": "alpha", "tda": "pos_alpha", "tps": "lr", "dmn": "beta"}[name]
    methods = [COMPILED[name](**{number: value}) for value in (0.5, 2.0)]
    task, stream, _ = tt.toy(classes=7, dim=30, images=24, views=12)
    together, alone = open_stepper(task, methods), [open_stepper(task, [method]) for method in methods]
    for image in stream:
        peek = together.peek(image)
        assert torch.equal(peek, torch.cat([stepper.peek(image) for stepper in alone]))
        assert torch.equal(together.step(image)[0], peek)
        for stepper in alone:
            stepper.step(image)
    assert not torch.equal(peek[0], peek[1])


@every_method
@every_stepper
def test_a_restored_stepper_repeats_the_same_logits(method: Any, opened: Callable[..., Any]) -> None:
    task, stream, _ = tt.toy(classes=7, dim=32, images=30, views=2)
    stepper = opened(task, [method], [method.init(task)])
    stepper.scan(stream[:10])
    early = stepper.snapshot()
    kept = copied(early)
    first = stepper.scan(stream[10:])
    late = copied(stepper.snapshot())
    assert all(map(torch.equal, leaves(early), kept)), "a snapshot is a copy"
    stepper.restore(early)
    assert torch.equal(stepper.scan(stream[10:]), first)
    assert all(map(torch.equal, leaves(stepper.snapshot()), late))
    assert all(map(torch.equal, leaves(early), kept)), "a restored state is copied"
    other = opened(task, [method], early)
    assert torch.equal(other.scan(stream[10:]), first)


def test_sessions_in_threads_give_what_each_gives_alone() -> None:
    task, _, _ = tt.toy(classes=20, dim=64)
    streams = [tt.toy(classes=20, dim=64, images=60, views=12, seed=seed)[1] for seed in range(3)]
    methods = [DPE(), DPE(alpha=2.0, entropy_threshold=0.3), TDA()]

    def answers(method: Any, stream: Tensor, start: Callable[[], object]) -> Tensor:
        session, rows = tt.Session(task, method), []
        start()
        for image in stream:
            rows += [session.predict(image).logits, session.step(image).logits]
        return torch.stack(rows)

    alone = [answers(method, stream, lambda: None) for method, stream in zip(methods, streams, strict=True)]
    together: dict[int, Tensor] = {}
    ready = threading.Barrier(len(methods))

    def run(index: int) -> None:
        together[index] = answers(methods[index], streams[index], ready.wait)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(methods))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, expected in enumerate(alone):
        assert torch.equal(together[index], expected)


class Spied:
    """A stepper that records which of its methods are used."""

    def __init__(self, stepper: Any) -> None:
        self.stepper, self.calls = stepper, []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self.stepper, name)


@pytest.mark.parametrize("reference", [False, True], ids=["chosen", "reference"])
def test_a_prediction_is_one_peek_and_no_copy(reference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    spies = []

    def spied(*arguments: Any, **options: Any) -> Any:
        spies.append(Spied(open_stepper(*arguments, **options)))
        return spies[-1]

    monkeypatch.setattr(engine, "open_stepper", spied)
    monkeypatch.setattr(tt.Session, "fork", lambda self: pytest.fail("a session was forked"))
    task, stream, _ = tt.toy(images=3)
    session = tt.Session(task, "dpe", reference=reference)
    session.step(stream[0])
    for image in stream:
        prediction = session.predict(image)
        assert not prediction.learned
    assert [spy.calls for spy in spies] == [["steps", "peek", "peek", "peek"]]
    assert session.count == 1


# The same bits wherever a stream is split


PRODUCTS = {
    *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "addr", "linear", "matmul", "inner"),
    *("_scaled_mm", "einsum", "tensordot", "linalg_vecdot", "linalg_multi_dot", "_addmm_activation"),
}


class Products(TorchDispatchMode):
    """Records the memory layout of the operands of every matrix and vector product."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name.rstrip("_") in PRODUCTS or name in PRODUCTS:
            factors = [tensor for tensor in args if isinstance(tensor, Tensor)]
            layouts = [(tuple(t.shape), t.stride(), t.data_ptr() % ALIGNMENT) for t in factors]
            self.found.append((name, *layouts))
        return func(*args, **(kwargs or {}))


def products(session: tt.Session, chunks: Any) -> tuple[list[tuple[Any, ...]], Tensor]:
    """The products of a session over a stream in chunks, and its logits."""
    with Products() as recorded:
        logits = torch.cat([session.scan(chunk) for chunk in chunks])
    return recorded.found, logits


@every_method
@pytest.mark.parametrize("views", [1, 12])
@pytest.mark.parametrize("dim", [30, 32])
@pytest.mark.parametrize("text", [aligned, off_alignment], ids=["text aligned", "text 8 bytes off"])
def test_operands_have_the_same_layout_wherever_a_stream_is_split(
    method: Any, views: int, dim: int, text: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    whole_task, stream, _ = tt.toy(classes=7, dim=dim, images=16, views=views)
    task = replace(whole_task, text=text(whole_task.text))
    opened = partial(tt.Session, method=method, reference=True)
    whole, expected = products(opened(whole_task), [stream])
    assert whole

    session = opened(task)
    session.scan(stream[:7])
    loaded = tt.Session.load(session.save(tmp_path / "s.safetensors"), task, reference=True)
    given = opened(task)
    given.state, given.count = all_off_alignment(session.state), session.count
    splits = {
        "uninterrupted": products(session, [stream[7:]]),
        "loaded": products(loaded, [stream[7:]]),
        "from a state off alignment": products(given, [stream[7:]]),
        "split elsewhere": products(_after(opened(task), stream[:7].split([2, 4, 1])), stream[7:].split([1, 5, 3])),
        "one by one": products(_after(opened(task), stream[:7].split(1)), stream[7:].split(1)),
    }
    for name, (found, logits) in splits.items():
        assert found == whole[len(whole) - len(found) :] and found, name
        assert torch.equal(logits, expected[7:]), name


def _after(session: tt.Session, chunks: Any) -> tt.Session:
    for chunk in chunks:
        session.scan(chunk)
    return session


def test_tensors_are_copied_only_if_they_are_not_aligned() -> None:
    task, stream, _ = tt.toy(dim=32)
    task = aligned_task(task)
    assert aligned_task(task) is task and aligned(task.text) is task.text
    shifted = aligned_task(replace(task, text=off_alignment(task.text)))
    assert shifted.text.data_ptr() % ALIGNMENT == 0 and torch.equal(shifted.text, task.text)
    assert aligned(task.text.T).is_contiguous()
    assert rows_aligned(stream) and not rows_aligned(off_alignment(stream)) and not rows_aligned(stream[:, :3])
    assert not rows_aligned(tt.toy(dim=30, views=1)[1])


def arrays(part: Any) -> Iterator[tuple[str, Any]]:
    """The arrays of nested NamedTuples, with their names."""
    for name, value in part._asdict().items():
        if hasattr(value, "_asdict"):
            yield from ((f"{name}.{inner}", array) for inner, array in arrays(value))
        else:
            yield name, value


@pytest.mark.parametrize("settings", [{}, {"multi_view_prediction": True}, {"align_weight": 0.0}], ids=str)
def test_matrices_of_compiled_loops_are_aligned_to_cache_lines(settings: dict[str, Any]) -> None:
    dpe = pytest.importorskip("testtime.steppers.cpu.dpe")
    task, stream, _ = tt.toy(classes=7, dim=30, images=24, views=3)
    stepper = dpe.Stepper(task, [DPE(entropy_threshold=0.5, **settings)], [DPE().init(task)])
    evolutions = set()
    for image in stream:
        stepper.peek(image)
        stepper.step(image)
        (run,) = stepper.runs
        evolutions.add(int(run.run.updates[0]) % 2)
        # vectors with one number per class are never operands, and need no alignment
        matrices = [(name, array) for name, array in arrays(run.run) if array.ndim > 1]
        for name, array in [*matrices, *arrays(run.scratch)]:
            assert not array.size or (array.ctypes.data % ALIGNMENT == 0 and array.flags.c_contiguous), name
    assert evolutions == {0, 1}  # text prototypes swap buffers with the evolved ones


@pytest.mark.parametrize(("dim", "views"), [(32, 2), (30, 1), (30, 12)])
def test_compiled_loops_give_the_same_wherever_images_lie(dim: int, views: int) -> None:
    pytest.importorskip("testtime.steppers.cpu.dpe_loops")
    task, stream, _ = tt.toy(dim=dim, images=9, views=views)
    expected = open_stepper(task, [DPE()]).scan(aligned(stream))
    for images in (off_alignment(stream), stream.mT.contiguous().mT):
        assert torch.equal(open_stepper(task, [DPE()]).scan(images), expected)
        one_by_one = open_stepper(task, [DPE()])
        assert torch.equal(torch.stack([one_by_one.step(views)[0] for views in images], 1), expected)


def test_compiled_loops_round_in_the_order_written() -> None:
    """With reordered sums, a freshly compiled loop and a cached one would differ in the last bit."""
    pytest.importorskip("numba")
    from numba.core.dispatcher import Dispatcher

    folder = Path(steppers.__file__).parent / "cpu"
    modules = [import_module(f"testtime.steppers.cpu.{path.stem}") for path in sorted(folder.glob("[a-z]*.py"))]
    found = 0
    for module in modules:
        for name, function in vars(module).items():
            if isinstance(function, Dispatcher):
                assert not function.targetoptions.get("fastmath"), f"{module.__name__}.{name}"
                found += 1
    assert found > 30
    for path in folder.glob("*.py"):  # functions compiled inside their callers have their own options
        assert "fastmath=" not in path.read_text() and '"fastmath"' not in path.read_text(), path


# Denormals


def denormals(tensor: Tensor) -> int:
    return int(((tensor != 0) & (tensor.abs() < torch.finfo(tensor.dtype).tiny)).sum())


@pytest.mark.parametrize("kind", ["nearly equal", "at right angles"])
def test_the_alignment_contains_no_denormals(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = torch.Generator().manual_seed(0)
    task, _, _ = tt.toy(classes=24, dim=64)
    wobble = torch.randn(24, 64, generator=noise)
    rows = task.text[:1] + 1e-3 * wobble if kind == "nearly equal" else torch.eye(24, 64) + 2e-2 * wobble
    task = replace(task, text=ops.unit(rows))
    original, seen = ops._logit_gradient, []

    def spy(similarity: Tensor, dim: int) -> Tensor:
        seen.append((denormals(similarity.softmax(dim)), original(similarity, dim).clone()))
        return seen[-1][1].clone()

    monkeypatch.setattr(ops, "_logit_gradient", spy)
    stream = ops.unit(task.text + 1e-3 * torch.randn(24, 64, generator=noise))[:, None]
    open_stepper(task, [DPE()], reference=True).scan(stream)
    assert len(seen) == 24 and all(denormals(pull) == 0 for _, pull in seen)
    assert any(before for before, _ in seen) == (kind == "at right angles"), "without the threshold there would be some"


def test_probabilities_below_the_threshold_become_zero_and_others_are_kept() -> None:
    gaps = torch.tensor([0.0, -30.0, -60.0, -68.0, -70.0, -88.0, -95.0, -103.0])
    rows = gaps[None].repeat(8, 1)
    plain = rows.double().softmax(1)
    pull = ops._logit_gradient(rows.clone(), 1) + torch.eye(8)
    kept = plain >= ops.NEGLIGIBLE
    off = ~torch.eye(8, dtype=torch.bool)
    assert torch.equal(pull[off] > 0, kept[off]) and not denormals(pull)
    torch.testing.assert_close(pull[off & kept], plain.float()[off & kept], rtol=1e-4, atol=0)

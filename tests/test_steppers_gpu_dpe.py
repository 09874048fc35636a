"""DPE's kernels, run by Triton's interpreter on the CPU, take the method's own steps."""

from __future__ import annotations

import inspect
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_steppers_cpu_dpe import SETTINGS
from tolerances import TOLERANCES

import testtime as tt
from testtime import steppers
from testtime.machine import capture
from testtime.methods.dpe import DPE
from testtime.steppers.fast import FAST, Numbers, supported
from testtime.steppers.gpu import dpe, graph

pytest.importorskip("triton")

(KERNELS,) = (fast for fast in FAST if fast.device == "cuda")
UNSUPPORTED = {"no queues", "views reselected"}
FITTING = [name for name in SETTINGS if name not in UNSUPPORTED]

# Settings to run side by side that differ in every number and switch; the second has no alignment
SIDE_BY_SIDE: list[dict[str, Any]] = [
    {"entropy_threshold": 0.01},
    {"align_weight": 0.0, "lr_text": 2e-3, "entropy_threshold": 0.02},
    {
        "alpha": 2.0,
        "beta": 3.0,
        "entropy_weight": 0.5,
        "align_weight": 0.2,
        "align_temperature": 0.05,
        "lr_image": 2e-3,
    },
    {"text_update": "none", "adamw_eps": 1e-2},
    {"text_update": "full", "gate_keeps": "above", "entropy_threshold": 0.2},
    {"text_update": "exponential", "text_decay": 0.9, "renormalise_text": True, "entropy_threshold": 0.2},
    {"prompt_count": 0, "entropy_unit": "ln", "scale_affinity": True, "alpha": 0.5, "entropy_threshold": 0.01},
]
SHAPES = ["one view", "more classes", "first images", "all views", "whole sums"]

# Triton decides whether to interpret when it is imported, so this needs its own process
PROGRAM = """
import gc, json, sys
from dataclasses import replace
import torch
sys.path.insert(0, sys.argv[1])
from test_steppers_cpu_dpe import SETTINGS
from test_steppers_gpu_dpe import FITTING, SIDE_BY_SIDE
import testtime as tt
from testtime.bank import Bank
from testtime.methods.base import leaves
from testtime.methods.dpe import DPE
from testtime.steppers.gpu import dpe, graph

gc.disable()  # the interpreter creates many objects, and no reference cycles
# small tiles, so that small tasks have several of each
dpe.PAD, dpe.SMALL_BELOW = 32, 0
for name, tile in {
    "view_logits": dict(VIEWS=16, DEPTH=16), "choose": dict(PART=16), "rows": dict(CELLS=512),
    "similarity": dict(ROWS=16, COLUMNS=32, DEPTH=16), "logit_gradient": dict(ROWS=16, COLUMNS=32),
    "pull": dict(ROWS=32, COLUMNS=16, DEPTH=16),
}.items():
    dpe.TILES[name].update(tile)

def difference(ours, plain):
    ours, plain = ours.double(), plain.double()
    same = (ours == plain) | (ours - plain).abs().lt(1e-30)
    return float(torch.where(same, 0.0, (ours - plain).abs()).max())

def late(classes, views, images=23, start=20, **settings):
    task, stream, _ = tt.toy(classes=classes, dim=24, images=images, views=views)
    method = DPE(**settings)
    return task, method, method.scan(task, method.init(task), stream[:start])[1], stream[start:]

def step(method, task, state, image):
    logits, kernels = torch.empty(1, task.classes), dpe.Kernels([method], task, len(image))
    graph.overwrite(kernels.states, (state,))
    kernels.refresh()
    kernels.step(image, logits)
    return logits[0], kernels.states[0], kernels

def steps_apart(classes, views, start, settings):
    task, method, state, stream = late(classes, views, images=start + 2, start=start, **settings)
    logits_apart = state_apart = 0.0
    learned_alike = True
    for image in stream:
        logits, reached, kernels = step(method, task, state, image)
        expected, after = method.step(task, state, image)
        logits_apart = max(logits_apart, difference(logits, expected))
        state_apart = max(state_apart, *map(difference, leaves(reached), leaves(after)))
        learned_alike &= bool(kernels.learned[0]) == bool(method.learned(state, after))
        state = after
    return logits_apart, state_apart, learned_alike

found = {}
for name in FITTING:
    found[name] = steps_apart(10, 12, 20, SETTINGS[name])
found["one view"] = steps_apart(10, 1, 20, {})
found["more classes"] = steps_apart(37, 20, 30, {})
found["first images"] = steps_apart(7, 3, 0, {})
found["all views"] = steps_apart(10, 20, 20, {"selection": 1.0})
enough, dpe.ENOUGH_PROGRAMS = dpe.ENOUGH_PROGRAMS, 0
found["whole sums"] = steps_apart(37, 5, 20, {})
dpe.ENOUGH_PROGRAMS = enough

# a stream through a stepper, in two parts, and with peeks in between
graph.STEPS = 4
task, stream, _ = tt.toy(classes=10, dim=24, images=7, views=12)
method = DPE(entropy_threshold=0.3)
expected, last = method.scan(task, method.init(task), stream)
stepper = dpe.Stepper(task, [method], [method.init(task)])
whole = stepper.scan(stream)[0]
assert isinstance(stepper._body, dpe.Kernels)
found["stream"] = [difference(whole, expected), float((whole.argmax(1) == expected.argmax(1)).float().mean())]
found["stream updates"] = [int(stepper.snapshot()[0].updates), int(last.updates)]
stepper.restore([method.init(task)])
first = stepper.scan(stream[:4])[0]
half = stepper.snapshot()
stepper.scan(stream[:1])
stepper.restore(half)
found["stream in two parts"] = difference(torch.cat([first, stepper.scan(stream[4:])[0]]), whole)
stepper.restore(half)
apart, changed = 0.0, 0.0
for image, logits in zip(stream[4:], whole[4:]):
    before = stepper.snapshot()
    peeks = [stepper.peek(image), stepper.peek(stream[0]), stepper.peek(image)]
    changed = max(changed, *map(difference, leaves(stepper.snapshot()), leaves(before)))
    answer = stepper.step(image)[0]
    apart = max(apart, *(difference(each[0], logits) for each in (peeks[0], peeks[2], answer)))
found["peeks"] = [apart, changed]

# the products of the alignment: recomputed only if a prototype has changed
task, method, state, stream = late(10, 3, entropy_threshold=0.0)
state = state._replace(queue=Bank(state.queue.keys, torch.zeros_like(state.queue.cost)))
logits, state, steps = step(method, task, state, stream[0])
steps.similarities.fill_(7)
steps.logit_gradients.fill_(7)
steps.step(stream[0], kept := torch.empty(1, task.classes))
found["cached"] = [difference(kept[0], logits), float((steps.similarities - 7).abs().max())]
steps.cost.fill_(9)
steps.step(stream[1], kept)
found["recomputed"] = float((steps.similarities - 7).abs().min())

# settings side by side, each from its own state
task, stream, _ = tt.toy(classes=7, dim=24, images=40, views=3)
methods = [DPE(**settings) for settings in SIDE_BY_SIDE]
states = []
for run, method in enumerate(methods):
    state = method.init(task)._replace(text=task.text.roll(run, 0))  # an image has a different label in every run
    states.append(method.scan(task, state, stream[: 2 + 2 * run])[1])
stream = stream[[25, 29]]  # the first is of a class that no run has seen
stepper = dpe.Stepper(task, methods, states)
stepper.warm_up(3)
found["seen"] = stepper._body.seen.tolist()
together, moves = [], []
for image in stream:
    before = [state.updates for state in stepper.snapshot()]
    together.append(stepper.step(image)[0])
    moves.append([int(state.updates - old) for state, old in zip(stepper.snapshot(), before)])
found["moves"] = moves
found["pulls"] = stepper._body.pulls.abs().amax((1, 2, 3, 4)).tolist()
found["side by side"] = []
for run, (method, state) in enumerate(zip(methods, states)):
    logits, same = torch.empty(1, 7), True
    alone = dpe.Kernels([method], task, 3)
    graph.overwrite(alone.states, (state,))
    alone.refresh()
    for image, rows in zip(stream, together):
        alone.step(image, logits)
        same = same and torch.equal(rows[run], logits[0])
    ends = leaves(alone.states[0]), leaves(stepper.snapshot()[run])
    found["side by side"].append(same and all(map(torch.equal, *ends)))

# ties: the first class of equal logits; inserted after equal costs, and only if better than the worst
task, method, state, stream = late(10, 1, text_update="none")
label = int(task.zero_shot(stream[0][0]).argmax())
text = task.text.clone()
text[0] = text[9] = text[label]
task = replace(task, text=text)
state = method.init(task)
_, reached, _ = step(method, task, state, stream[0])
found["first of equals"] = reached.queue.cost.isfinite().any(1).nonzero().flatten().tolist()
price = reached.queue.cost[0, 0]
keys = torch.zeros_like(state.queue.keys)
keys[0, 0, 0] = keys[0, 1, 1] = keys[0, 2, 2] = 1
orders = []
for costs in ([1, 1, torch.inf], [1, 1, 1], [0.5, 1, 2], [2, 3, 4]):
    cost = state.queue.cost.clone()
    cost[0] = price * torch.tensor(costs)
    filled = cost[0].isfinite()
    full = state._replace(queue=Bank(keys * filled[None, :, None], cost), visual=keys.sum(1) / filled.sum())
    _, reached, _ = step(method, task, full, stream[0])
    rows = [[difference(row, key) for row in (*keys[0], stream[0][0])].index(0) for key in reached.queue.keys[0]]
    orders.append(rows)
found["orders"] = orders
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Differences between the interpreter's steps and the method's own, by comparison."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", PROGRAM, str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", [*FITTING, *SHAPES])
def test_each_step_is_the_method_s_own_from_the_same_state(found: dict[str, Any], name: str) -> None:
    logits, state, learned_alike = found[name]
    assert logits < TOLERANCES["stepper"][torch.float32]["atol"]
    assert state < 1e-5 and learned_alike


def test_a_stream_ends_where_the_method_s_own_does(found: dict[str, Any]) -> None:
    apart, alike = found["stream"]
    assert apart < TOLERANCES["stream"][torch.float32]["atol"] and alike == 1
    ours, expected = found["stream updates"]
    assert ours == expected > 1


def test_a_run_resumes_bit_for_bit_from_a_restored_state(found: dict[str, Any]) -> None:
    assert found["stream in two parts"] == 0


def test_a_peek_gives_what_the_step_gives_and_changes_nothing(found: dict[str, Any]) -> None:
    assert found["peeks"] == [0, 0]


def test_the_alignment_is_recomputed_only_after_a_prototype_has_changed(found: dict[str, Any]) -> None:
    assert found["cached"] == [0, 0]
    assert found["recomputed"] > 0


def test_settings_side_by_side_give_bit_for_bit_what_each_gives_alone(found: dict[str, Any]) -> None:
    assert found["side by side"] == [True] * len(SIDE_BY_SIDE)
    # which runs' text prototypes learned from the first image, and which from the second
    assert found["moves"] == [[1, 1, 1, 0, 0, 1, 1], [0, 0, 0, 0, 1, 0, 0]]
    assert len({*found["seen"]}) > 4


def test_a_run_without_alignment_is_not_affected_by_that_of_others(found: dict[str, Any]) -> None:
    assert [pull > 0 for pull in found["pulls"]] == [bool(DPE(**each).align_weight) for each in SIDE_BY_SIDE]


def test_the_first_class_of_equal_logits_gets_the_image(found: dict[str, Any]) -> None:
    assert found["first of equals"] == [0]


def test_a_queue_inserts_a_feature_after_its_equals_and_keeps_the_better_ones(found: dict[str, Any]) -> None:
    # 0, 1 and 2 are the previous features, in this order; 3 is the new one
    assert found["orders"] == [[0, 1, 3], [0, 1, 2], [0, 1, 3], [3, 0, 1]]


OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


class Launches:
    """A stand-in for the kernel modules: records what would be launched, and with how many programs."""

    def __init__(self) -> None:
        self.programs: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        from testtime.steppers.gpu import dpe_alignment, dpe_kernels

        kernel = getattr(dpe_kernels, name, None) or getattr(dpe_alignment, name)

        class Kernel:
            fn = staticmethod(kernel.fn)

            def __getitem__(_, grid: tuple[int, ...]) -> Any:
                def launch(*arguments: Any, **named: Any) -> None:
                    options = {option: named.pop(option) for option in OPTIONS if option in named}
                    bound = inspect.signature(kernel.fn).bind(*arguments, **named)  # every argument exactly once
                    self.programs[name] = math.prod(grid)
                    self.launch(kernel, bound.arguments, options)

                return launch

        return Kernel()

    def launch(self, kernel: Any, arguments: dict[str, Any], options: dict[str, Any]) -> None:
        """Nothing happens."""


class Compiles(Launches):
    """Compiles what would be launched for an H100 or H200, down to machine code."""

    def launch(self, kernel: Any, arguments: dict[str, Any], options: dict[str, Any]) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        constants = {name: value for name, value in arguments.items() if name.isupper()}
        signature = {name: "constexpr" if name in constants else kind(value) for name, value in arguments.items()}
        # what Triton would infer about the arguments: pointers and sizes that are multiples of 16
        even = {
            (index,): [["tt.divisibility", 16]]
            for index, (name, value) in enumerate(arguments.items())
            if isinstance(value, torch.Tensor) or (name not in constants and isinstance(value, int) and value % 16 == 0)
        }
        source = ASTSource(kernel, signature, constants, even)
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]


def kind(value: Any) -> str:
    """Triton's name for the type of an argument."""
    names = {torch.float64: "*fp64", torch.float32: "*fp32", torch.float16: "*fp16", torch.int32: "*i32"}
    if isinstance(value, torch.Tensor):
        return names.get(value.dtype, "*i64")
    return "fp32" if isinstance(value, float) else "i32"


def launches(
    monkeypatch: pytest.MonkeyPatch,
    classes: int,
    dim: int,
    runs: int = 1,
    recorder: Launches | None = None,
    **settings: Any,
) -> dict[str, int]:
    """The kernels of one step and their number of programs."""
    task, stream, _ = tt.toy(classes=classes, dim=dim, images=1, views=64)
    methods, recorder = [DPE(**settings)] * runs, recorder or Launches()
    with monkeypatch.context() as patch:
        patch.setattr(dpe.Kernels, "refresh", lambda self: None)
        steps = dpe.Kernels(methods, task, 64)
    steps.kernels = steps.alignment = recorder  # type: ignore[assignment]
    steps.refresh()
    assert set(recorder.programs) == {"normalise"} and steps.stale.tolist() == [1] * runs
    recorder.programs.clear()
    steps.step(stream[0], torch.empty(runs, classes))
    return recorder.programs


def test_a_step_is_eight_launches_and_fewer_with_parts_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    front, pull, back = (
        ["view_logits", "choose", "push"],
        ["similarity", "logit_gradient", "pull"],
        ["answer", "evolve"],
    )
    assert list(launches(monkeypatch, 10, 24)) == front + pull + back
    assert list(launches(monkeypatch, 10, 24, align_weight=0.0)) == front + back
    assert list(launches(monkeypatch, 10, 24, steps=0)) == front + back
    assert list(launches(monkeypatch, 10, 24, text_update="none")) == front + pull + back[:1]


def test_products_have_as_many_programs_as_a_gpu_has_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    thousand = launches(monkeypatch, 1000, 512)
    assert thousand["similarity"] == 256 and thousand["pull"] == 128
    more = launches(monkeypatch, 1600, 512)
    assert more["pull"] == 13 * 8  # enough without splitting sums


def test_settings_side_by_side_need_the_same_launches_and_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = launches(monkeypatch, 100, 512)
    together = launches(monkeypatch, 100, 512, runs=5)
    assert together == {name: 5 * programs for name, programs in alone.items()}
    assert alone["similarity"] == 2 * 2 and alone["pull"] == 2 * 4 * 2


def test_scratch_bytes_counts_the_buffers_beside_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dpe.Kernels, "refresh", lambda self: None)
    for classes, dim in ((100, 512), (1000, 512), (37, 100)):
        task, _, _ = tt.toy(classes=classes, dim=dim, images=1)
        methods = [DPE(), DPE(alpha=2.0)]
        steps = dpe.Kernels(methods, task, 1)
        buffers = vars(steps).keys() - {"text", "updates", "keys", "cost", "visual"}  # without the states
        taken = sum(getattr(getattr(steps, name), "nbytes", 0) for name in buffers)
        assert 0.8 * taken < 2 * dpe.scratch_bytes(task) < 1.6 * taken


def test_indices_of_settings_are_those_of_the_table() -> None:
    from testtime.steppers.gpu import dpe_kernels

    indices = [getattr(dpe_kernels, name.upper()).value for name in Numbers._fields]
    assert indices == [*range(len(Numbers._fields))]


def test_every_kernel_compiles_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = launches(monkeypatch, 100, 64, recorder=Compiles(), runs=2)
    assert len(compiled) == 8


def test_stages_fit_in_shared_memory() -> None:
    tile = {"ROWS": 128, "COLUMNS": 128, "DEPTH": 64}
    assert [dpe._stages(tile, shared_memory) for shared_memory in (232_448, 166_912, 101_376, 49_152)] == [3, 2, 1, 1]


@pytest.mark.parametrize(
    "settings", [{"queue": 0}, {"multi_view_prediction": True}, {"steps": 2}, {"align_both": True}], ids=str
)
def test_unsupported_settings_are_rejected(settings: dict[str, Any]) -> None:
    assert supported(KERNELS, DPE())
    assert not supported(KERNELS, DPE(**settings))


def test_other_methods_precisions_and_sizes_are_rejected() -> None:
    class Own(DPE):
        pass

    task, _, _ = tt.toy()
    assert not supported(KERNELS, Own()) and not supported(KERNELS, tt.make_method("tda"))
    assert dpe.fits(task) and not dpe.fits(task.to(dtype=torch.float64))
    ghost = SimpleNamespace(text=task.text, classes=dpe.MOST_CLASSES + 1)
    assert not dpe.fits(ghost)  # type: ignore[arg-type]


def test_settings_that_differ_in_shapes_or_views_do_not_share_a_stepper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steppers, "FAST", [KERNELS._replace(device="cpu")])
    task, _, _ = tt.toy()
    grid = [DPE(), DPE(alpha=2.0), DPE(queue=2), DPE(selection=0.5), DPE(steps=0)]
    keys = [steppers.group_key(task, method) for method in grid]
    assert None not in keys and keys[0] == keys[1] and len(set(keys)) == 4


@pytest.mark.parametrize(("limit", "most"), [("MOST_VIEWS", 3), ("MOST_RUNS", 1)])
def test_more_views_or_runs_than_kernels_support_fall_back_to_the_method(
    limit: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dpe, limit, most)
    task, stream, _ = tt.toy(images=5, views=4)
    methods = [DPE(), DPE(alpha=2.0)]
    stepper = dpe.Stepper(task, methods, [method.init(task) for method in methods])
    for method, logits in zip(methods, stepper.scan(stream), strict=True):
        assert torch.equal(logits, method.scan(task, method.init(task), stream)[0])
    assert isinstance(stepper._body, graph.MethodSteps)


def test_kernels_that_cannot_be_launched_fall_back_to_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: dpe.Kernels, views: torch.Tensor, out: torch.Tensor) -> None:
        self.text.zero_()  # a partial update
        raise RuntimeError("out of memory\nand more details")

    monkeypatch.setattr(capture, "_warned", set())
    monkeypatch.setattr(dpe.Kernels, "refresh", lambda self: None)
    monkeypatch.setattr(dpe.Kernels, "step", broken)
    task, stream, _ = tt.toy(images=5)
    stepper = dpe.Stepper(task, [DPE()], [DPE().init(task)])
    with pytest.warns(RuntimeWarning, match=r"kernels of 'dpe' cannot be launched.*out of memory\)"):
        (logits,) = stepper.scan(stream)
    assert torch.equal(logits, DPE().scan(task, DPE().init(task), stream)[0])

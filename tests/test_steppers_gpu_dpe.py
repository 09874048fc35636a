"""DPE's kernels, run by Triton's interpreter on the CPU, take the method's own steps."""

from __future__ import annotations

import inspect
import json
import math
import os
import subprocess
import sys
import warnings
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_fast import SETTINGS
from tolerances import TOLERANCES

import testtime as tt
from testtime.fast import abreast, capture, fused, graph
from testtime.methods.dpe import DPE

pytest.importorskip("triton")

NOT_FOR_KERNELS = {"no queues", "views chosen again"}
FITTING = [name for name in SETTINGS if name not in NOT_FOR_KERNELS]

# Settings that run side by side, which differ in every number and in every switch; the second has no alignment
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

# Triton asks whether to interpret when it is imported, so this needs a process of its own
PROGRAM = """
import gc, json, sys
from dataclasses import replace
import torch
sys.path.insert(0, sys.argv[1])
from test_fast import SETTINGS
from test_fast_fused import FITTING, SIDE_BY_SIDE
import testtime as tt
from testtime.bank import Bank
from testtime.fast import abreast, fused, graph
from testtime.methods.base import leaves
from testtime.methods.dpe import DPE

gc.disable()  # the interpreter makes many objects, and no rings of them
# small tiles, so that small tasks have several of each
fused.PAD, fused.FEW = 32, 0
for name, tile in {
    "view_logits": dict(VIEWS=16, DEPTH=16), "choose": dict(PART=16), "rows": dict(CELLS=512),
    "similarity": dict(ROWS=16, COLUMNS=32, DEPTH=16), "misplace": dict(ROWS=16, COLUMNS=32),
    "pull": dict(ROWS=32, COLUMNS=16, DEPTH=16),
}.items():
    fused.TILES[name].update(tile)

def far(ours, plain):
    ours, plain = ours.double(), plain.double()
    same = (ours == plain) | (ours - plain).abs().lt(1e-30)
    return float(torch.where(same, 0.0, (ours - plain).abs()).max())

def late(classes, views, images=23, start=20, **settings):
    task, stream, _ = tt.toy(classes=classes, dim=24, images=images, views=views)
    method = DPE(**settings)
    return task, method, method.scan(task, method.init(task), stream[:start])[1], stream[start:]

def step(method, task, state, image):
    state, logits = graph._copied(state), torch.empty(task.classes)
    steps = fused.Fused([method], task, abreast.alone(state), len(image))
    steps.step(image, logits)
    return logits, state, steps

def steps_apart(classes, views, start, settings):
    task, method, state, stream = late(classes, views, images=start + 2, start=start, **settings)
    logits_apart = state_apart = 0.0
    for image in stream:
        logits, reached, _ = step(method, task, state, image)
        expected, state = method.step(task, state, image)
        logits_apart = max(logits_apart, far(logits, expected))
        state_apart = max(state_apart, *map(far, leaves(reached), leaves(state)))
    return logits_apart, state_apart

found = {}
for name in FITTING:
    found[name] = steps_apart(10, 12, 20, SETTINGS[name])
found["one view"] = steps_apart(10, 1, 20, {})
found["more classes"] = steps_apart(37, 20, 30, {})
found["first images"] = steps_apart(7, 3, 0, {})
found["all views"] = steps_apart(10, 20, 20, {"selection": 1.0})
room, fused.ROOM = fused.ROOM, 0
found["whole sums"] = steps_apart(37, 5, 20, {})
fused.ROOM = room

# a stream through a runner, in two goes
task, stream, _ = tt.toy(classes=10, dim=24, images=7, views=12)
method = DPE(entropy_threshold=0.3)
expected, last = method.scan(task, method.init(task), stream)
runner = graph.Runner(method, task, 12, steps=4, kernels=True)
assert runner._fused is not None
whole = runner.run(stream)
found["stream"] = [far(whole, expected), float((whole.argmax(1) == expected.argmax(1)).float().mean())]
found["stream updates"] = [int(runner.state().updates), int(last.updates)]
runner.load(task, method.init(task))
first = runner.run(stream[:4])
half = runner.state()
runner.run(stream[:1])
runner.load(task, half)
found["stream in two goes"] = far(torch.cat([first, runner.run(stream[4:])]), whole)

# the products of the alignment: not again unless a prototype has changed
task, method, state, stream = late(10, 3, entropy_threshold=0.0)
state = state._replace(queue=Bank(state.queue.keys, torch.zeros_like(state.queue.cost)))
logits, state, steps = step(method, task, state, stream[0])
steps.similarity.fill_(7)
steps.misplaced.fill_(7)
steps.step(stream[0], kept := torch.empty_like(logits))
found["kept"] = [far(kept, logits), float((steps.similarity - 7).abs().max())]
steps.state.cost.fill_(9)
steps.step(stream[1], kept)
found["anew"] = float((steps.similarity - 7).abs().min())

# settings side by side, each from a state of its own
fused.TILES["similarity"]["SPLIT"] = 2
task, stream, _ = tt.toy(classes=7, dim=24, images=40, views=3)
methods = [DPE(**settings) for settings in SIDE_BY_SIDE]
states = []
for run, method in enumerate(methods):
    state = method.init(task)._replace(text=task.text.roll(run, 0))  # an image has another label in every run
    states.append(method.scan(task, state, stream[: 2 + 2 * run])[1])
stream = stream[[25, 29]]  # the first is of a class that none has seen
runner = graph.Runner(abreast.Abreast(task, methods), task, 3, steps=2, kernels=True)
runner.load(task, abreast.State(*map(torch.stack, zip(*map(leaves, states)))))
found["seen"] = runner._fused.seen.tolist()
together, moves = [], []
for image in stream:
    before = runner.state().updates
    together.append(runner.run(image[None])[0])
    moves.append((runner.state().updates - before).tolist())
found["moves"] = moves
found["pulls"] = runner._fused.pulls.abs().amax((1, 2, 3, 4)).tolist()
found["side by side"] = []
for run, (method, end) in enumerate(zip(methods, states)):
    logits, same = torch.empty(7), True
    steps = fused.Fused([method], task, abreast.alone(end), 3)
    for image, rows in zip(stream, together):
        steps.step(image, logits)
        same = same and torch.equal(rows[run], logits)
    found["side by side"].append(same and all(map(torch.equal, leaves(end), [leaf[run] for leaf in runner._state])))

# ties: the first class of equal logits; behind equal costs, and only if better than the worst
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
    rows = [[far(row, key) for row in (*keys[0], stream[0][0])].index(0) for key in reached.queue.keys[0]]
    orders.append(rows)
found["orders"] = orders
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the interpreter's steps differ by from the method's own, by what was compared."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", PROGRAM, str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", [*FITTING, *SHAPES])
def test_each_step_is_the_method_s_own_from_the_same_state(found: dict[str, Any], name: str) -> None:
    logits, state = found[name]
    assert logits < TOLERANCES["twin"][torch.float32]["atol"]
    assert state < 1e-5


def test_a_stream_ends_where_the_method_s_own_does(found: dict[str, Any]) -> None:
    apart, alike = found["stream"]
    assert apart < TOLERANCES["stream"][torch.float32]["atol"] and alike == 1
    ours, expected = found["stream updates"]
    assert ours == expected > 1


def test_a_run_goes_on_bit_for_bit_from_a_state_that_is_loaded(found: dict[str, Any]) -> None:
    assert found["stream in two goes"] == 0


def test_the_alignment_is_computed_anew_only_after_a_prototype_has_changed(found: dict[str, Any]) -> None:
    assert found["kept"] == [0, 0]
    assert found["anew"] > 0


def test_settings_side_by_side_give_bit_for_bit_what_each_gives_alone(found: dict[str, Any]) -> None:
    assert found["side by side"] == [True] * len(SIDE_BY_SIDE)
    # whose text prototypes learned from the first image, and whose from the second
    assert found["moves"] == [[1, 1, 1, 0, 0, 1, 1], [0, 0, 0, 0, 1, 0, 0]]
    assert len({*found["seen"]}) > 4


def test_a_run_without_alignment_is_not_pulled_by_that_of_others(found: dict[str, Any]) -> None:
    assert [pull > 0 for pull in found["pulls"]] == [bool(DPE(**each).align_weight) for each in SIDE_BY_SIDE]


def test_the_first_class_of_equal_logits_gets_the_image(found: dict[str, Any]) -> None:
    assert found["first of equals"] == [0]


def test_a_queue_puts_a_feature_behind_its_equals_and_keeps_the_better_ones(found: dict[str, Any]) -> None:
    # 0, 1 and 2 are those it held, in this order; 3 is the new one
    assert found["orders"] == [[0, 1, 3], [0, 1, 2], [0, 1, 3], [3, 0, 1]]


OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


class Launches:
    """Stands in for the modules of kernels: writes down what would be launched, and with how many programs."""

    def __init__(self) -> None:
        self.programs: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        from testtime.fast import fused_alignment, fused_kernels

        kernel = getattr(fused_kernels, name, None) or getattr(fused_alignment, name)

        class Kernel:
            def __getitem__(_, grid: tuple[int, ...]) -> Any:
                def launch(*arguments: Any, **named: Any) -> None:
                    options = {option: named.pop(option) for option in OPTIONS if option in named}
                    bound = inspect.signature(kernel.fn).bind(*arguments, **named)  # each argument, and once
                    self.programs[name] = math.prod(grid)
                    self.launch(kernel, bound.arguments, options)

                return launch

        return Kernel()

    def launch(self, kernel: Any, arguments: dict[str, Any], options: dict[str, Any]) -> None:
        """Nothing happens."""


class Compiles(Launches):
    """Compiles what would be launched for an H100 or H200, down to what they run."""

    def launch(self, kernel: Any, arguments: dict[str, Any], options: dict[str, Any]) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        constants = {name: value for name, value in arguments.items() if name.isupper()}
        signature = {name: "constexpr" if name in constants else kind(value) for name, value in arguments.items()}
        # what Triton would find out about the arguments: places and sizes that are multiples of 16
        even = {
            (place,): [["tt.divisibility", 16]]
            for place, (name, value) in enumerate(arguments.items())
            if isinstance(value, torch.Tensor) or (name not in constants and isinstance(value, int) and value % 16 == 0)
        }
        source = ASTSource(kernel, signature, constants, even)
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]


def kind(value: Any) -> str:
    """What Triton calls the type of an argument."""
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
    """The kernels of one step and their numbers of programs."""
    task, stream, _ = tt.toy(classes=classes, dim=dim, images=1, views=64)
    methods, recorder = [DPE(**settings)] * runs, recorder or Launches()
    with monkeypatch.context() as patch:
        patch.setattr(fused.Fused, "refresh", lambda self: None)
        steps = fused.Fused(methods, task, abreast.Abreast(task, methods).init(task), 64)
    steps.kernels = steps.alignment = recorder  # type: ignore[assignment]
    steps.refresh()
    assert set(recorder.programs) == {"aim"} and steps.stale.tolist() == [1] * runs
    recorder.programs.clear()
    steps.step(stream[0], torch.empty(runs, classes))
    return recorder.programs


def test_a_step_is_eight_launches_and_fewer_where_parts_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    front, pull, back = ["view_logits", "choose", "push"], ["similarity", "misplace", "pull"], ["answer", "evolve"]
    assert list(launches(monkeypatch, 10, 24)) == front + pull + back
    assert list(launches(monkeypatch, 10, 24, align_weight=0.0)) == front + back
    assert list(launches(monkeypatch, 10, 24, steps=0)) == front + back
    assert list(launches(monkeypatch, 10, 24, text_update="none")) == front + pull + back[:1]


def test_products_have_as_many_programs_as_a_gpu_has_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    thousand = launches(monkeypatch, 1000, 512)
    assert thousand["similarity"] == 256 and thousand["pull"] == 128
    more = launches(monkeypatch, 1600, 512)
    assert more["pull"] == 13 * 8  # enough without splitting sums


def test_settings_side_by_side_are_as_many_launches_with_the_same_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = launches(monkeypatch, 100, 512)
    together = launches(monkeypatch, 100, 512, runs=5)
    assert together == {name: 5 * programs for name, programs in alone.items()}
    assert alone["similarity"] == 2 * 2 and alone["pull"] == 2 * 4 * 2


def test_room_counts_what_a_run_takes_beside_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused.Fused, "refresh", lambda self: None)
    for classes, dim in ((100, 512), (1000, 512), (37, 100)):
        task, _, _ = tt.toy(classes=classes, dim=dim, images=1)
        methods = [DPE(), DPE(alpha=2.0)]
        steps = fused.Fused(methods, task, abreast.Abreast(task, methods).init(task), 1)
        taken = sum(buffer.nbytes for buffer in vars(steps).values() if isinstance(buffer, torch.Tensor))
        assert 0.8 * taken < 2 * fused.room(task) < 1.6 * taken


def test_every_kernel_compiles_for_a_gpu_that_is_not_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = launches(monkeypatch, 100, 64, recorder=Compiles(), runs=2)
    assert len(compiled) == 8


def test_stages_find_room_in_shared_memory() -> None:
    tile = {"ROWS": 128, "COLUMNS": 128, "DEPTH": 64}
    assert [fused._stages(tile, room) for room in (232_448, 166_912, 101_376, 49_152)] == [3, 2, 1, 1]


@pytest.mark.parametrize(
    "settings", [{"queue": 0}, {"multi_view_prediction": True}, {"steps": 2}, {"align_both": True}], ids=str
)
def test_settings_that_the_kernels_are_not_written_for_are_left_alone(settings: dict[str, Any]) -> None:
    task, _, _ = tt.toy()
    assert fused.fits([DPE()], task, 4)
    assert not fused.fits([DPE(**settings)], task, 4)


def test_other_methods_dtypes_and_shapes_are_left_alone() -> None:
    class Own(DPE):
        pass

    task, _, _ = tt.toy()
    assert fused.fits([DPE(), DPE(alpha=2.0)], task, 4)
    assert not fused.fits([DPE(), DPE(queue=2)], task, 4)
    assert not fused.fits([DPE(), Own()], task, 4)
    assert not fused.fits([DPE()] * (fused.MOST_RUNS + 1), task, 4)
    assert not fused.fits([Own()], task, 4)
    assert not fused.fits([tt.make_method("tda")], task, 4)
    assert not fused.fits([DPE()], task.to(dtype=torch.float64), 4)
    assert not fused.fits([DPE()], task, fused.MOST_VIEWS + 1)
    assert not fused.fits([DPE()], replace(task, text=task.text.T.contiguous().T), 4)


def test_kernels_that_cannot_be_launched_leave_the_step_to_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: fused.Fused, views: torch.Tensor, out: torch.Tensor) -> None:
        self.state.text.zero_()  # half way
        raise RuntimeError("no room for that\nand a long story")

    capture._said.clear()
    monkeypatch.setattr(fused.Fused, "refresh", lambda self: None)
    monkeypatch.setattr(fused.Fused, "step", broken)
    task, stream, _ = tt.toy(images=5)
    with pytest.warns(RuntimeWarning, match=r"kernels of 'dpe' cannot be launched.*no room for that\)"):
        runner = graph.Runner(DPE(), task, 4, kernels=True)
    assert torch.equal(runner.run(stream), DPE().scan(task, DPE().init(task), stream)[0])


@pytest.mark.parametrize("launched", [True, False])
def test_a_stream_that_becomes_long_keeps_its_kernels(launched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: fused.Fused, views: torch.Tensor, out: torch.Tensor) -> None:
        if not launched:
            raise RuntimeError("no room for that")

    monkeypatch.setattr(fused.Fused, "refresh", lambda self: None)
    monkeypatch.setattr(fused.Fused, "step", step)
    monkeypatch.setattr(graph, "Runner", partial(graph.Runner, kernels=True))
    monkeypatch.setattr(graph, "_runners", OrderedDict())
    monkeypatch.setattr(graph, "compiled", lambda function: function)
    task, _, _ = tt.toy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        short, long = (graph.runner_for(DPE(), task, 4, compile=compile) for compile in (False, True))
    assert (short is long) == launched == short.has_kernels
    assert graph.runner_for(DPE(), task, 4, compile=False) is short

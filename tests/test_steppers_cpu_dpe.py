"""DPE's compiled loops against the method itself: one step at a time from the same state, and over whole streams."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from tolerances import assert_close

import testtime as tt
from testtime import steppers
from testtime.methods.base import leaves
from testtime.methods.dpe import DPE
from testtime.steppers import aligned_task, fast_of, open_stepper
from testtime.steppers.cpu import dpe, dpe_loops, gemm, lanes, loops
from testtime.steppers.plain import Plain

SETTINGS = {
    "released": {},
    "no alignment": {"align_weight": 0.0},
    "no entropy": {"entropy_weight": 0.0},
    "no residuals": {"steps": 0},
    "no queues": {"queue": 0},
    "one slot": {"queue": 1},
    "text fixed": {"text_update": "none"},
    "text replaced": {"text_update": "full", "entropy_threshold": 0.5},
    "text averaged": {"text_update": "exponential", "text_decay": 0.9},
    "text held": {"text_update": "exponential", "text_decay": 1.0},
    "text not nudged": {"lr_text": 0.0},
    "other bookkeeping": {"renormalise_text": True, "gate_keeps": "above", "entropy_unit": "ln", "prompt_count": 0},
    "scaled affinity": {"scale_affinity": True, "alpha": 0.5},
    "views reselected": {"multi_view_prediction": True, "entropy_threshold": 0.5},
}
every_setting = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def toy(dtype: torch.dtype, views: int = 1, images: int = 60):
    task, stream, labels = tt.toy(classes=10, dim=24, images=images, views=views)
    return task.to(dtype=dtype), stream.to(dtype), labels


@every_setting
@every_dtype
@pytest.mark.parametrize("views", [1, 20])
def test_each_step_is_the_method_s_own_from_the_same_state(settings, dtype, views) -> None:
    task, stream, _ = toy(dtype, views)
    method = DPE(**settings)
    state = method.init(task)
    for image in stream[:25]:
        stepper = dpe.Stepper(task, [method], [state])
        (logits,), (learned,) = stepper.step(image)
        expected, after = method.step(aligned_task(task), state, image)
        assert_close(logits, expected, "stepper", "logits")
        assert learned == method.learned(state, after)
        for ours, plain in zip(leaves(stepper.snapshot()[0]), leaves(after), strict=True):
            torch.testing.assert_close(ours, plain, atol=1e-5, rtol=0)
        state = after


@every_setting
def test_a_stream_ends_where_the_method_s_own_does(settings) -> None:
    task, stream, labels = toy(torch.float32, views=12, images=160)
    method = DPE(**settings)
    ours, expected = (tt.Session(task, method, reference=reference).scan(stream) for reference in (False, True))
    assert_close(ours, expected, "stream")
    assert int((ours.argmax(1) == labels).sum()) == int((expected.argmax(1) == labels).sum())


@pytest.mark.parametrize(
    "settings",
    [{"steps": 2}, {"view_average": "probabilities"}, {"align_both": True}, {"adam_state": "fp16"}],
    ids=str,
)
def test_unsupported_settings_use_the_plain_stepper(settings) -> None:
    task, stream, _ = toy(torch.float32, views=12)
    assert fast_of(task, DPE(**settings)) is None
    assert isinstance(open_stepper(task, [DPE(**settings)]), Plain)
    assert torch.equal(
        tt.Session(task, DPE(**settings)).scan(stream), tt.Session(task, DPE(**settings), reference=True).scan(stream)
    )


def test_a_subclass_of_the_method_runs_its_own_steps() -> None:
    class Own(DPE):
        pass

    task, _, _ = toy(torch.float32)
    assert fast_of(task, Own()) is None and isinstance(open_stepper(task, [Own()]), Plain)


def test_the_alignment_is_recomputed_only_after_a_prototype_has_changed() -> None:
    task, stream, _ = toy(torch.float32)
    stepper = open_stepper(task, [DPE()])
    before, kept = None, 0
    for image in stream:
        corrupted = copy.deepcopy(stepper)
        corrupted.runs[0].run.text.pull[:] = torch.nan
        logits, learned = corrupted.step(image)
        # a push of this image counts, as it comes before the residuals; evolving the text counts for the next image
        if before is False and not learned.any():
            assert logits.isnan().all()
            kept += 1
        elif before is not False:
            assert logits.isfinite().all()
        before = bool(stepper.step(image)[1])
    assert 0 < kept < len(stream)


def assert_resumes(task, method, stream, folder) -> None:
    """A run that is saved and loaded, or forked, resumes bit for bit."""
    whole = tt.Session(task, method).scan(stream)
    session = tt.Session(task, method)
    session.scan(stream[:31])
    session.save(folder / "s.safetensors")
    assert torch.equal(tt.Session.load(folder / "s.safetensors", task).scan(stream[31:]), whole[31:])
    fork = session.fork()
    session.scan(stream[31:40])
    assert torch.equal(fork.scan(stream[31:]), whole[31:])


def test_a_run_that_is_saved_and_loaded_resumes_bit_for_bit(tmp_path) -> None:
    task, stream, _ = toy(torch.float32, views=12)
    assert_resumes(task, DPE(), stream, tmp_path)


def test_after_an_interrupted_step_no_state_is_returned(monkeypatch) -> None:
    task, stream, _ = toy(torch.float32)
    stepper = open_stepper(task, [DPE()])
    monkeypatch.setattr(dpe_loops, "scan", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        stepper.step(stream[0])
    with pytest.raises(RuntimeError, match="saved state"):
        stepper.snapshot()


def test_without_numba_the_method_s_own_steps_are_used(monkeypatch) -> None:
    task, stream, _ = toy(torch.float32, views=12)
    monkeypatch.setattr(steppers, "find_spec", lambda name: None)
    assert isinstance(open_stepper(task, [DPE()]), Plain)
    assert len(tt.Session(task, DPE()).scan(stream)) == len(stream)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("views", [1, 12])
def test_a_run_split_over_threads_is_the_same_bit_for_bit(views, monkeypatch, tmp_path) -> None:
    task, stream, _ = toy(torch.float32, views=views)
    alone = open_stepper(task, [DPE()]).scan(stream)
    monkeypatch.setattr(dpe, "PARALLEL_THRESHOLD", 0)
    assert torch.equal(open_stepper(task, [DPE()]).scan(stream), alone)
    assert_resumes(task, DPE(), stream, tmp_path)


@pytest.mark.usefixtures("two_threads")
def test_small_runs_use_one_thread_and_give_what_a_sweep_gives() -> None:
    task, stream, _ = tt.toy(classes=60, dim=512, images=250, views=1)  # long enough for rounding to show
    grid = [DPE(), DPE(alpha=1.0), DPE(beta=2.0)]
    alone = [tt.Session(task, method).scan(stream) for method in grid]
    for logits, row in zip(alone, tt.sweep(task, grid, stream.split(100)), strict=True):
        assert torch.equal(logits, row)
    torch.set_num_threads(1)
    assert torch.equal(tt.Session(task, DPE()).scan(stream), alone[0])


@pytest.mark.parametrize("real", [np.float32, np.float64])
@pytest.mark.parametrize(
    "sides", [(1, 1, 1), (3, 2, 5), (4, 3, 64), (9, 65, 33), (6, 130, 100), (130, 7, 200)], ids=str
)
def test_products_do_not_depend_on_where_rows_lie_or_how_they_are_split(real, sides) -> None:
    rows, columns, depth = sides
    noise = np.random.default_rng(0)
    a, b, c = (noise.normal(size=shape).astype(real) for shape in ((rows, depth), (columns, depth), (depth, columns)))
    transposed = np.ascontiguousarray(a.T).T
    for product, expected, left, right in (
        (gemm.dot_rows, a @ b.T, a, b),
        (gemm.combine_rows, a @ c, a, c),
        (gemm.combine_rows, a @ c, transposed, c),
    ):
        out = np.empty((rows, columns), real)
        product(left, right, out)
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e3 * np.finfo(real).eps)
        parts = np.empty_like(out)
        for start, stop in ((0, rows // 3), (rows // 3, rows)):
            product(left[start:stop], right, parts[start:stop])
        assert (parts == out).all()
        memory = np.empty(right.size + 1, real)  # off the alignment of the other
        memory[1:] = right.ravel()
        product(left, memory[1:].reshape(right.shape), parts)
        assert (parts == out).all()


def test_a_nearly_certain_image_leaves_no_denormals() -> None:
    # denormals slow down every loop twentyfold
    task, stream, _ = toy(torch.float32)
    stepper = open_stepper(task, [DPE()])
    stepper.scan(tt.ops.unit(task.text + 1e-4 * stream[0])[:, None])
    for side in (stepper.runs[0].run.text, stepper.runs[0].run.visual):
        for numbers in side:
            assert not ((abs(numbers) > 0) & (abs(numbers) < torch.finfo(torch.float32).tiny)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_arrays_are_aligned_to_cache_lines(dtype) -> None:
    for shape in ((), (5,), (3, 7), (2, 3, 5)):
        tensor = torch.randn(shape, dtype=dtype).mT if len(shape) > 1 else torch.randn(shape, dtype=dtype)
        array = loops.to_array(tensor)
        assert array.ctypes.data % loops.CACHE_LINE == 0 and array.flags.c_contiguous
        assert (torch.from_numpy(array) == tensor).all() and array.shape == tuple(tensor.shape)


@loops.compiled
def logs(numbers, out) -> None:
    for index in range(len(numbers)):
        out[index] = lanes.log(numbers[index])


@pytest.mark.parametrize("real", [np.float32, np.float64])
def test_logarithms_are_accurate_to_the_last_two_digits(real) -> None:
    noise = np.random.default_rng(1)
    chances, powers = noise.random(10_000), 10.0 ** noise.uniform(-37, 37, 10_000)
    numbers = np.concatenate([chances, powers, [0.5, 2.0, 1 - 1e-4, 1 + 1e-4]]).astype(real)
    out = np.empty_like(numbers)
    logs(numbers, out)
    expected = np.log(numbers.astype(np.longdouble))
    assert (abs(out - expected) <= 2 * np.finfo(real).eps * abs(expected)).all()
    logs(np.array([0.0, 1.0], real), out)
    assert math.isfinite(out[0]) and out[1] == 0  # zero times the first is zero


def test_loops_do_not_change_torch_s_number_of_threads() -> None:
    code = """
import torch, testtime as tt
task, stream, _ = tt.toy()
tt.Session(task, "dpe").scan(stream)
print(torch.get_num_threads())
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1"]


def test_a_warm_up_compiles_all_that_a_stream_needs() -> None:
    code = """
import gc, torch, testtime as tt
from numba.core.dispatcher import Dispatcher
from testtime.steppers import FAST, open_stepper

def compiled():
    return {each: len(each.signatures) for each in gc.get_objects() if isinstance(each, Dispatcher)}

torch.manual_seed(0)
text = torch.eye(10, 24)  # each class is sure of its own prototype, and an image of two of them is not
stream = text[torch.arange(120) % 10] + 0.97 * text[torch.arange(120) * 7 % 10]
stream = stream[:, None] + 0.01 * torch.randn(120, 3, 24)
stream, task = torch.nn.functional.normalize(stream, dim=2), tt.Task(text, tuple("abcdefghij"))
for name in sorted(fast.module.rpartition(".")[2] for fast in FAST if fast.device == "cpu"):
    stepper = open_stepper(task, [tt.make_method(name)])
    stepper.warm_up(3)
    before = compiled()
    learned = stepper.steps(stream)[1]
    late = [each.__name__ for each, count in compiled().items() if count > before.get(each, 0)]
    print(name, bool(learned.any()), late)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    found = done.stdout.splitlines()
    assert found == ["dmn True []", "dpe True []", "tda True []", "tps False []"]

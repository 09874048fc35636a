"""TPT and C-TPT against stored runs of the released code, and against PyTorch's own AdamW."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from text_tower import read, stored_task
from tolerances import TOLERANCES, assert_close

from testtime import MissingPart, Session, SettingError, Task, build_task, load_encoder, ops, registry, toy
from testtime.checks import check_method
from testtime.methods.base import kinds
from testtime.methods.tpt import CTPT, TPT, State
from testtime.text.contexts import build_context

NAMES = ("cat", "dog", "fox", "grand piano", "oak tree")
TRACES = {"tpt_v64_c10": TPT, "ctpt_v64_c10": CTPT}
# hp.* that describe the run or its text tower, and are no settings
REMARKS = {
    *("activation", "class_position", "context_length", "ctx_init", "ln_eps", "n_ctx", "reset"),
    *("text_heads", "text_layers", "text_width"),
}
each_trace = pytest.mark.parametrize("name", TRACES)
each_method = pytest.mark.parametrize("method", [TPT, CTPT])
each_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


def method_of(facts: dict[str, str], kind: type[TPT]) -> TPT:
    """The method with a trace's settings; whatever is neither a setting nor a known remark is an error."""
    stored = {key.removeprefix("hp."): value for key, value in facts.items() if key.startswith("hp.")}
    settings = {key: value for key, value in stored.items() if key not in REMARKS}
    assert set(settings) == set(kinds(kind)) - {"batch"}
    return registry.make_method(kind.name, None, settings)


@cache
def tiny_task(dtype: torch.dtype) -> Task:
    return build_task(load_encoder("tiny"), NAMES, dtype=dtype, context=True)


def tuned_task(images: int = 6, views: int = 20, dtype: torch.dtype = torch.float64, seed: int = 0):
    """A task with the tiny encoder's text tower, and views scattered around its prototypes."""
    task = tiny_task(dtype)
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(NAMES), (images,), generator=random)
    noise = 0.15 * torch.randn(images, views, task.dim, generator=random, dtype=torch.float64)
    return task, ops.unit(task.text[labels][:, None] + noise).to(dtype)


def reference(task: Task, views: torch.Tensor, m: TPT):
    """Logits and prompt of one image."""
    prompt = torch.nn.Parameter(task.context.start.to(views).clone())
    optimiser = torch.optim.AdamW(
        [prompt], lr=m.lr, eps=m.adamw_eps, betas=m.adamw_betas, weight_decay=m.adamw_weight_decay
    )
    chosen = None
    for _ in range(m.steps):
        text = task.context(prompt)
        p = (task.scale * views @ text.T).softmax(1)
        if chosen is None:
            entropy = [-sum(x * math.log(x) for x in row if x > 0) for row in p.tolist()]
            chosen = sorted(range(len(views)), key=entropy.__getitem__)[: max(1, int(len(views) * m.selection))]
        mean = p[chosen].mean(0)
        loss = -(mean * mean.log()).sum()
        if isinstance(m, CTPT):
            loss = loss - m.dispersion_weight * sum((t - text.mean(0)).pow(2).sum().sqrt() for t in text) / len(text)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        return task.scale * task.context(prompt) @ views[0], prompt.detach()


@each_trace
@each_dtype
def test_a_stored_run_comes_out_again(golden, name, dtype):
    tensors, facts = read(golden / f"{name}.safetensors")
    task, stream = stored_task(tensors, facts, dtype)
    method = method_of(facts, TRACES[name])
    session = Session(task, method)
    logits = session.scan(stream)
    assert logits.dtype == dtype
    assert_close(logits, tensors["expected_logits"], "golden", "logits")
    assert torch.equal(logits.argmax(1), tensors["expected_pred"])
    assert_close(method.tune(task, stream), tensors["state.ctx"], "golden", "context")
    accuracy = 100 * (logits.argmax(1) == tensors["labels"]).double().mean().item()
    assert accuracy == pytest.approx(float(facts["accuracy"]), abs=1e-4)


@each_trace
def test_a_stored_run_comes_out_again_in_batches(golden, name):
    tensors, facts = read(golden / f"{name}.safetensors")
    task, stream = stored_task(tensors, facts, torch.float64)
    method = replace(method_of(facts, TRACES[name]), batch=7)
    assert_close(Session(task, method).scan(stream), tensors["expected_logits"], "golden", "logits")


@each_trace
@pytest.mark.parametrize("slip", [dict(adamw_weight_decay=0.0), dict(selection=0.12), dict(steps=2)], ids=str)
def test_a_slip_shows_in_double_precision(golden, name, slip):
    """Each of these is far outside the tolerance, weight decay too, which single precision would not notice."""
    tensors, facts = read(golden / f"{name}.safetensors")
    task, stream = stored_task(tensors, facts, torch.float64)
    wrong = Session(task, replace(method_of(facts, TRACES[name]), **slip)).scan(stream)
    gap = (wrong - tensors["expected_logits"]).abs().max().item()
    assert gap > 5 * TOLERANCES["golden"][torch.float64]["atol"]


def test_without_its_dispersion_ctpt_is_tpt():
    task, stream = tuned_task()
    plain = TPT().scan(task, State(), stream)[0]
    assert torch.equal(CTPT(dispersion_weight=0.0).scan(task, State(), stream)[0], plain)
    assert not torch.allclose(CTPT().scan(task, State(), stream)[0], plain)


CASES = {
    "one step": dict(),
    "three steps": dict(steps=3),
    "other moments": dict(steps=2, lr=2e-2, adamw_weight_decay=0.5, adamw_betas=(0.8, 0.95)),
    "no step": dict(steps=0),
    "all views": dict(selection=1.0),
    "large epsilon": dict(adamw_eps=1e-1, steps=2),
}


@each_method
@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_it_is_autograd_and_adamw(method, settings):
    task, stream = tuned_task(images=3)
    tuning = method(**settings)
    for views in stream:
        expected, prompt = reference(task, views, tuning)
        assert_close(tuning.step(task, State(), views)[0], expected, "stream", "logits")
        assert_close(tuning.tune(task, views[None])[0], prompt, "stream", "prompt")


@each_method
def test_batches_give_what_single_images_give(method):
    task, stream = tuned_task(images=7)
    together, _ = method(batch=3, steps=2).scan(task, State(), stream)
    assert_close(together, method(steps=2).scan(task, State(), stream)[0], "stream")


@each_method
def test_many_classes_give_what_few_do(method):
    """Where the graph of the start is not kept for all classes, it is made again; the numbers stay."""
    task, stream = tuned_task(images=10)
    context = build_context(load_encoder("tiny"), NAMES, chunk=2)
    chunked, _ = method(steps=2).scan(replace(task, context=context), State(), stream)
    assert_close(chunked, method(steps=2).scan(task, State(), stream)[0], "stream")


def test_a_scan_is_its_steps_to_the_last_bit():
    task, stream = tuned_task(images=11, dtype=torch.float32)
    steps = torch.stack([TPT().step(task, State(), views)[0] for views in stream])
    assert torch.equal(TPT().scan(task, State(), stream)[0], steps)


def test_without_steps_it_is_the_frozen_prompt():
    task, stream = tuned_task()
    logits, _ = TPT(steps=0).scan(task, State(), stream)
    with torch.no_grad():
        text = task.context(task.context.start.double())
    assert_close(logits, task.scale * stream[:, 0] @ text.T, "arithmetic")


def test_the_entropy_falls():
    task, stream = tuned_task()
    for views in stream:
        rows = views[ops.confident(task.zero_shot(views), 0.1)]
        tuned = task.context(TPT().tune(task, views[None])[0])
        assert TPT().loss(task, rows, tuned) < TPT().loss(task, rows, task.context(task.context.start.double()))


def test_ctpt_spreads_the_prototypes():
    task, stream = tuned_task(images=1)

    def spread(method):
        text = task.context(method.tune(task, stream)[0])
        return (text - text.mean(0)).norm(dim=1).mean()

    assert spread(CTPT()) > spread(TPT())


def test_nothing_is_remembered_and_the_start_stays():
    task, stream = tuned_task()
    start = task.context.start.clone()
    alone = TPT().step(task, State(), stream[-1])[0]
    logits, state = TPT().scan(task, TPT().init(task), stream)
    assert torch.equal(logits[-1], alone)
    assert state == State() and not TPT().learned(State(), state)
    assert torch.equal(task.context.start, start)
    assert TPT().scan(task, State(), stream[:0])[0].shape == (0, len(NAMES))


@each_method
@each_dtype
def test_it_keeps_every_promise(method, dtype):
    check_method(method(), *tuned_task(images=12, views=12, dtype=dtype))


def test_a_task_without_a_text_tower_is_refused_before_the_stream():
    task, _, _ = toy()
    for name in ("tpt", "ctpt", "difftpt"):
        with pytest.raises(MissingPart, match=f"'{name}'.*this task has none.*--encoder open_clip:"):
            Session(task, name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -1e-3),
        ("lr", math.nan),
        ("steps", -1),
        ("selection", 0.0),
        ("selection", 1.5),
        ("adamw_eps", 0.0),
        ("adamw_betas", (1.0, 0.999)),
        ("adamw_weight_decay", -0.1),
        ("batch", 0),
        ("dispersion_weight", -1.0),
    ],
)
def test_settings_out_of_range_are_refused_by_name_and_value(name, value):
    with pytest.raises(SettingError) as caught:
        CTPT(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)

"""DPE against two independent loops, and each of its parts on its own."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from released import Outcome, printed, released
from tolerances import assert_close

from testtime import toy
from testtime.methods.dpe import DIFFERENCES, DPE, State
from testtime.types import SettingError

ALWAYS = 10.0  # a threshold that every image passes


def stream_of(images: int = 24, views: int = 1, classes: int = 5, scale: float = 100.0, seed: int = 0):
    task, stream, _ = toy(classes=classes, dim=16, images=images, views=views, seed=seed, dtype=torch.float64)
    return replace(task, scale=scale), stream


def assert_same(method: DPE, task, stream, expected: Outcome) -> State:
    """Logits of every image and the whole state after the last are those of the reference."""
    logits, state = method.scan(task, method.init(task), stream)
    assert_close(logits, expected.logits, "stream", "logits")
    assert_close(state.text, expected.text, "stream", "text")
    assert state.updates.item() == expected.updates
    for label in range(task.classes):
        row = expected.queues.get(label, [])
        assert state.queue.cost[label].isfinite().sum().item() == len(row)
        for slot, (feature, cost) in enumerate(row):
            assert_close(state.queue.keys[label, slot], feature, "stream", f"queue {label}, slot {slot}")
            assert state.queue.cost[label, slot].item() == pytest.approx(cost, abs=1e-9)
    return state


# --- whole streams ---

RELEASED = {
    "one view": dict(views=1),
    "sixteen views": dict(views=16),
    "more views chosen": dict(views=16, selection=0.3),
    "predicts from views": dict(views=16, selection=0.3, multi_view_prediction=True),
    "no alignment": dict(views=4, align_weight=0.0),
    "strong alignment": dict(align_weight=2.5, align_temperature=0.1),
    "queue of one": dict(views=4, queue=1),
    "queue of five": dict(queue=5, images=40),
    "no queue": dict(queue=0),
    "no step": dict(views=4, steps=0),
    "three steps": dict(views=4, steps=3),
    "three large steps": dict(steps=3, lr_text=2e-2, lr_image=1e-2, adamw_weight_decay=0.5, adamw_betas=(0.8, 0.95)),
    "prompt counts for ten": dict(prompt_count=10),
    "prompt counts for none": dict(prompt_count=0),
    "two rates": dict(lr_text=1e-3, lr_image=5e-3),
    "small epsilon": dict(adamw_eps=1e-8),
    "other affinity": dict(alpha=15.0, beta=8.0),
    "other scale": dict(scale=40.0, views=4),
    "threshold never met": dict(entropy_threshold=0.0),
    "threshold always met": dict(entropy_threshold=ALWAYS),
    "two classes": dict(classes=2),
}
STREAM = ("images", "views", "classes", "scale")


@pytest.mark.parametrize("settings", RELEASED.values(), ids=RELEASED)
def test_released_is_the_released_loop(settings):
    task, stream = stream_of(**{key: value for key, value in settings.items() if key in STREAM})
    settings = {key: value for key, value in settings.items() if key not in STREAM}
    expected = released(task.text, stream, scale=task.scale, **settings)
    assert_same(DPE.released(**settings), task, stream, expected)


def test_the_stream_meets_both_sides_of_every_choice():
    task, stream = stream_of()
    outcome = released(task.text, stream)
    assert 0 < outcome.updates < len(stream)  # the gate opens and closes
    held = sum(len(row) for row in outcome.queues.values())
    assert held < len(stream)  # some queue overflowed
    early = released(task.text, stream[:3])
    assert len(early.queues) < task.classes  # classes are unseen for a while


PAPER = {
    "as printed": dict(views=8),
    "one view": dict(),
    "several confident views": dict(views=8, selection=0.5),
    "two steps": dict(views=8, steps=2, selection=0.3),
    "strong alignment": dict(align_weight=5.0),
    "queue of one": dict(queue=1, lr_text=2e-3),
    "always evolves": dict(entropy_threshold=ALWAYS, views=4),
    "soft scale": dict(scale=10.0, views=8, alpha=1.0, selection=0.5),
}


@pytest.mark.parametrize("settings", PAPER.values(), ids=PAPER)
def test_paper_is_the_printed_equations(settings):
    task, stream = stream_of(**{key: value for key, value in settings.items() if key in STREAM})
    settings = {key: value for key, value in settings.items() if key not in STREAM}
    expected = printed(task.text, stream, scale=task.scale, **settings)
    assert_same(DPE.paper(**settings), task, stream, expected)


def test_the_two_presets_differ():
    task, stream = stream_of(views=8)
    ours, theirs = DPE.released(), DPE.paper()
    difference = ours.scan(task, ours.init(task), stream)[0] - theirs.scan(task, theirs.init(task), stream)[0]
    assert difference.abs().max() > 1


def test_single_precision_stays_near_double():
    task, stream = stream_of(views=4)
    exact, _ = DPE().scan(task, DPE().init(task), stream)
    single = task.to(dtype=torch.float32)
    logits, state = DPE().scan(single, DPE().init(single), stream.float())
    assert logits.dtype == state.text.dtype == state.queue.cost.dtype == torch.float32
    assert_close(logits, exact, "stream")


def test_step_leaves_the_state_it_was_given_alone():
    task, stream = stream_of(views=4)
    method = DPE(entropy_threshold=ALWAYS)
    _, state = method.scan(task, method.init(task), stream[:10])
    before = [x.clone() for x in (state.text, state.updates, *state.queue)]
    _, after = method.step(task, state, stream[10])
    assert after.updates == state.updates + 1
    assert all(torch.equal(x, y) for x, y in zip(before, (state.text, state.updates, *state.queue), strict=True))
    assert torch.equal(task.text, method.init(task).text)


# --- each part can be switched off ---


def later(method: DPE, images: int = 12, views: int = 4):
    """A task, a state some way into its stream, and the next image's views."""
    task, stream = stream_of(images=images + 2, views=views)
    _, state = DPE().scan(task, DPE().init(task), stream[:images])
    if method.queue == 0:
        state = state._replace(queue=method.init(task).queue)
    return task, state, stream[images:]


def adapted_text(method: DPE, task, state, views) -> torch.Tensor:
    """The text prototypes after residual learning, which the rule `full` stores as they are."""
    method = replace(method, text_update="full", entropy_threshold=ALWAYS, gate_keeps="below")
    return method.step(task, state, views)[1].text


def test_without_queue_the_visual_prototypes_count_for_nothing():
    task, stream = stream_of(views=4)
    method = DPE(queue=0)
    logits, state = method.scan(task, method.init(task), stream)
    assert state.queue.keys.shape == (task.classes, 0, task.dim)
    assert state.updates > 0  # the text evolves all the same
    for other in (
        DPE(queue=0, alpha=50.0, beta=1.0),
        DPE(queue=0, align_weight=9.0),
        DPE(queue=0, lr_image=1.0),
    ):
        assert torch.equal(other.scan(task, other.init(task), stream)[0], logits)


def test_without_text_update_the_text_stays():
    task, stream = stream_of(views=4)
    method = DPE(text_update="none", entropy_threshold=ALWAYS)
    logits, state = method.scan(task, method.init(task), stream)
    assert torch.equal(state.text, task.text)
    assert state.updates == 0
    assert state.queue.cost.isfinite().any()  # the queues fill all the same


def test_without_steps_the_prototypes_are_used_as_they_are():
    method = DPE(steps=0)
    task, state, (views, _) = later(method)
    logits, after = method.step(task, state, views)
    text = state.text / state.text.norm(dim=1, keepdim=True)
    for c in range(task.classes):
        expected = 100 * float(views[0] @ text[c])
        held = after.queue.keys[c][after.queue.cost[c].isfinite()]
        if len(held):
            visual = held.mean(0) / held.mean(0).norm()
            expected += 6 * math.exp(-5 * (1 - float(views[0] @ visual)))
        assert logits[c].item() == pytest.approx(expected, rel=1e-12)
    assert_close(adapted_text(method, task, state, views), text, "arithmetic")


def test_without_entropy_weight_residuals_ignore_the_image():
    method = DPE(entropy_weight=0.0, queue_update="after")
    task, state, (one, other) = later(method)
    moved = adapted_text(method, task, state, one)
    assert torch.equal(moved, adapted_text(method, task, state, other))
    assert not torch.allclose(moved, state.text / state.text.norm(dim=1, keepdim=True))  # alignment still pulls
    with_entropy = replace(method, entropy_weight=1.0)
    assert not torch.equal(adapted_text(with_entropy, task, state, one), adapted_text(with_entropy, task, state, other))


def test_without_align_weight_the_alignment_settings_do_nothing():
    method = DPE(align_weight=0.0)
    task, state, (views, _) = later(method)
    logits, _ = method.step(task, state, views)
    assert torch.equal(replace(method, align_temperature=1.0, align_both=True).step(task, state, views)[0], logits)
    aligned = DPE(align_weight=0.5)
    plain = aligned.step(task, state, views)[0]
    assert not torch.equal(plain, logits)
    assert not torch.equal(replace(aligned, align_temperature=1.0).step(task, state, views)[0], plain)
    assert not torch.equal(replace(aligned, align_both=True).step(task, state, views)[0], plain)


def test_without_either_loss_nothing_moves():
    method = DPE(entropy_weight=0.0, align_weight=0.0)
    task, state, (views, _) = later(method)
    assert_close(method.step(task, state, views)[0], DPE(steps=0).step(task, state, views)[0], "arithmetic")


def test_without_text_rate_only_visual_residuals_move():
    method = DPE(lr_text=0.0)
    task, state, (views, _) = later(method)
    assert_close(adapted_text(method, task, state, views), torch.nn.functional.normalize(state.text), "arithmetic")
    assert not torch.allclose(method.step(task, state, views)[0], DPE(steps=0).step(task, state, views)[0])


def test_without_image_rate_only_text_residuals_move():
    method = DPE(lr_image=0.0)
    task, state, (views, _) = later(method)
    logits, after = method.step(task, state, views)
    text = adapted_text(method, task, state, views)
    assert torch.equal(text, adapted_text(DPE(), task, state, views))  # one step: the rates are independent
    unmoved = task.scale * views[0] @ torch.nn.functional.normalize(state.text).T
    boost = DPE(steps=0).step(task, state, views)[0] - unmoved
    assert_close(logits, task.scale * views[0] @ text.T + boost, "closed form")
    assert not torch.allclose(logits, DPE().step(task, state, views)[0])


def test_with_everything_off_it_is_zero_shot():
    task, stream = stream_of(views=4)
    method = DPE(queue=0, steps=0, text_update="none")
    logits, _ = method.scan(task, method.init(task), stream)
    assert_close(logits, task.zero_shot(stream[:, 0]), "arithmetic")
    assert not method.learned(method.init(task), method.step(task, method.init(task), stream[0])[1])


def test_the_direction_of_the_text_stands_in_for_an_unseen_class():
    task, stream = stream_of(views=4)
    method = DPE(empty_queue="text", lr_text=0.0)  # so that only what stands in can feel the length of the text
    state = method.init(task)
    logits, _ = method.step(task, state, stream[0])
    longer, _ = method.step(task, state._replace(text=3 * state.text), stream[0])
    assert_close(longer, logits, "stream")
    unmoved, _ = DPE(empty_queue="text", steps=0, queue_update="after").step(task, state, stream[0])
    cosine = stream[0, 0] @ task.text.T
    assert_close(unmoved, 100 * cosine + 6 * torch.exp(-5 * (1 - cosine)), "arithmetic")


# --- text evolution ---


@pytest.mark.parametrize(
    ("settings", "keep"),
    [
        (dict(text_update="none"), lambda n: 1.0),
        (dict(text_update="full"), lambda n: 0.0),
        (dict(text_update="exponential", text_decay=0.99), lambda n: 0.99),
        (dict(text_update="exponential", text_decay=0.95), lambda n: 0.95),
        (dict(text_update="cumulative"), lambda n: (n + 1) / (n + 2)),
    ],
    ids=["none", "full", "exponential 0.99", "exponential 0.95", "cumulative"],
)
@pytest.mark.parametrize("renormalise", [False, True])
def test_text_update_rules(settings, keep, renormalise):
    method = DPE(entropy_threshold=ALWAYS, renormalise_text=renormalise, **settings)
    task, state, (views, _) = later(method)
    assert state.updates > 1
    new = adapted_text(DPE(), task, state, views)
    weight = keep(state.updates.item())
    expected = weight * state.text + (1 - weight) * new
    if renormalise and settings["text_update"] != "none":
        expected = expected / expected.norm(dim=1, keepdim=True)
    after = method.step(task, state, views)[1]
    assert_close(after.text, expected, "arithmetic")
    assert after.updates == state.updates + (settings["text_update"] != "none")


def test_the_first_accepted_image_has_the_weight_that_the_prompt_count_leaves():
    task, stream = stream_of()
    for count, weight in ((0, 1.0), (1, 0.5), (3, 0.25)):
        method = DPE(prompt_count=count, entropy_threshold=ALWAYS)
        new = adapted_text(method, task, method.init(task), stream[0])
        after = method.step(task, method.init(task), stream[0])[1]
        assert_close(after.text, (1 - weight) * task.text + weight * new, "arithmetic")


def test_the_gate_keeps_images_below_the_threshold_or_above():
    task, stream = stream_of(images=30)
    below, above = DPE(), DPE(gate_keeps="above")
    state, kept = below.init(task), []
    for views in stream:
        logits, after = below.step(task, state, views)
        p = logits.softmax(0)
        low = -(p * p.log()).sum() / math.log2(task.classes) < 0.1
        kept.append(bool(low))
        assert after.updates == state.updates + low
        assert above.step(task, state, views)[1].updates == state.updates + (not low)
        state = after
    assert 0 < sum(kept) < len(kept)


def test_the_initial_gate_asks_the_frozen_classifier():
    task, stream = stream_of(images=30)
    method = DPE(text_gate="initial", entropy_unit="ln", entropy_threshold=0.3)
    state = method.init(task)
    for views in stream:
        p = (100 * views[0] @ task.text.T).softmax(0)
        low = -(p * p.log()).sum() / math.log(task.classes) < 0.3
        _, after = method.step(task, state, views)
        assert after.updates == state.updates + low
        state = after
    assert 0 < state.updates < len(stream)


def test_units_of_entropy_move_the_same_threshold():
    task, stream = stream_of(images=30)
    bits = DPE(entropy_threshold=0.1)
    nats = DPE(entropy_threshold=0.1 / math.log(2), entropy_unit="ln")
    logits, state = bits.scan(task, bits.init(task), stream)
    same, other = nats.scan(task, nats.init(task), stream)
    assert_close(same, logits, "stream")
    assert_close(other.queue.cost * math.log(2), state.queue.cost, "stream")


# --- the table of differences, and settings ---


def test_the_table_lists_all_sixteen_differences():
    assert sorted({difference.number for difference in DIFFERENCES}) == list(range(1, 17))
    assert [d.number for d in DIFFERENCES] == sorted(d.number for d in DIFFERENCES)
    options = [d.option for d in DIFFERENCES]
    assert len(options) == len(set(options))
    assert all(d.meaning for d in DIFFERENCES)


SETTINGS = {field.name: field.default for field in fields(DPE)}
OPTIONS = [difference for difference in DIFFERENCES if difference.option in SETTINGS]


@pytest.mark.parametrize("difference", OPTIONS, ids=lambda d: d.option)
def test_each_option_has_the_released_default_and_the_printed_preset(difference):
    assert SETTINGS[difference.option] == difference.released
    assert getattr(DPE(), difference.option) == getattr(DPE.released(), difference.option) == difference.released
    assert getattr(DPE.paper(), difference.option) == difference.paper
    assert difference.released != difference.paper


def test_options_cover_the_differences_that_a_method_decides():
    assert {d.number for d in OPTIONS} == {3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}


@pytest.mark.parametrize("difference", OPTIONS, ids=lambda d: d.option)
def test_each_option_changes_something(difference):
    task, stream = stream_of(views=16)
    shared = {"selection": 0.3, "lr_text": 5e-3}  # a longer step, for the options whose part is small
    if difference.option == "align_classes":
        shared["empty_queue"] = "text"  # there is nothing else to align an unseen class with
    base, changed = DPE(**shared), DPE(**shared, **{difference.option: difference.paper})
    logits, state = base.scan(task, base.init(task), stream)
    other, after = changed.scan(task, changed.init(task), stream)
    if difference.option == "entropy_unit":  # decides no image of this stream otherwise, and shows in the queue
        assert (state.queue.cost[:, 0] < after.queue.cost[:, 0]).all()
    else:
        assert (logits - other).abs().max() > 1e-5


def test_presets_take_settings():
    assert DPE.paper(alpha=2.0, align_both=False) == replace(DPE.paper(), alpha=2.0, align_both=False)
    assert DPE.released(queue=7).queue == 7
    assert DPE.paper().lr_text == DPE.paper().lr_image == 5e-4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alpha", -1.0),
        ("alpha", math.nan),
        ("beta", -0.1),
        ("queue", -1),
        ("steps", -1),
        ("prompt_count", -1),
        ("align_weight", -0.5),
        ("align_temperature", 0.0),
        ("entropy_weight", -1.0),
        ("lr_text", -1e-4),
        ("lr_image", -1e-4),
        ("entropy_threshold", -0.1),
        ("selection", 0.0),
        ("selection", 1.5),
        ("text_decay", 1.1),
        ("text_decay", -0.1),
        ("adamw_eps", 0.0),
        ("adamw_weight_decay", -0.1),
        ("text_update", "sometimes"),
        ("adam_state", "fp8"),
        ("view_choice", "both"),
        ("gate_keeps", "all"),
        ("align_classes", "all"),
    ],
)
def test_settings_out_of_range_are_refused_by_name_and_value(name, value):
    with pytest.raises(SettingError) as caught:
        DPE(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)


@pytest.mark.parametrize("wrong", [dict(adamw_betas=(1.0, 0.999)), dict(adamw_betas=(0.9, -1.0)), dict(alpha=math.inf)])
def test_settings_that_give_no_numbers_are_refused(wrong):
    with pytest.raises(SettingError):
        DPE(**wrong)


def test_aligning_all_classes_is_fine_where_it_can_be_done():
    assert DPE(align_classes="all", empty_queue="text").align_classes == "all"
    assert DPE(align_classes="all", align_weight=0.0).align_classes == "all"


# --- the optimiser as shipped ---


@pytest.mark.parametrize("steps", [1, 3])
def test_half_precision_moments_change_the_logits_a_little(steps):
    task, stream = stream_of(views=4)
    exact, half = DPE(steps=steps), DPE(steps=steps, adam_state="fp16")
    logits, _ = exact.scan(task, exact.init(task), stream)
    other, state = half.scan(task, half.init(task), stream)
    assert other.dtype == state.text.dtype == torch.float64
    assert other.isfinite().all() and state.text.isfinite().all()
    assert 1e-4 < (other - logits).abs().max() < 1.0 * steps
    assert ((other - logits).abs().median()) < 0.1 * steps


def test_learned_says_whether_a_queue_or_the_text_changed():
    task, stream = stream_of()
    method = DPE(entropy_threshold=0.0)
    state = method.init(task)
    said, true = [], []
    for views in stream:
        _, after = method.step(task, state, views)
        said.append(bool(method.learned(state, after)))
        true.append(not torch.equal(state.queue.keys, after.queue.keys))
        state = after
    assert said == true and set(said) == {True, False}
    gated = DPE(queue=0, entropy_threshold=ALWAYS)
    assert gated.learned(gated.init(task), gated.step(task, gated.init(task), stream[0])[1])

"""OGA against a plain loop over lists that fits everything anew, and its batches."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from tolerances import assert_close

import testtime as tt
from testtime.checks import check_method
from testtime.cli.app import main
from testtime.methods.base import leaves
from testtime.methods.oga import OGA, Gram, Scatter
from testtime.report.gather import stream_report
from testtime.steppers.sweep import sweep
from testtime.types import InputError, SettingError, Task


def stream_of(classes: int = 5, dim: int = 8, images: int = 60, seed: int = 0, scale: float = 40.0):
    task, stream, _ = tt.toy(classes=classes, dim=dim, images=images, views=1, seed=seed, dtype=torch.float64)
    return Task(task.text, task.classnames, scale), stream


def fitted(task, memory, m: OGA):
    """Means (C, D) and precision (D, D) of what the memory holds: class -> [(entropy, feature)]."""
    means = task.text.clone()
    for c, row in memory.items():
        if len(row) >= 2:
            means[c] = sum(x for _, x in row) / m.capacity
            if m.normalise_mean:
                means[c] = means[c] / means[c].norm()
    identity = torch.eye(task.dim, dtype=torch.float64)
    if max(map(len, memory.values())) <= 2:
        return means, task.dim * identity
    residuals = torch.stack([x - means[c] for c, row in memory.items() for _, x in row])
    n, covariance = len(residuals), torch.cov(residuals.T)
    if m.inverse == "Ridge" or (m.inverse == "RidgeMoorePenrose" and n <= 4 * task.dim):
        return means, task.dim * torch.linalg.inv((n - 1) * covariance + covariance.trace() * identity)
    return means, torch.linalg.pinv(covariance)


def reference(task, stream, m: OGA):
    """Posteriors of every image, and the memory."""
    memory, answers = {c: [] for c in range(task.classes)}, []
    for batch in stream.split(m.batch):
        for views in batch:
            p = (task.scale * task.text @ views[0]).softmax(0)
            entropy, row = -float((p * (p + 1e-9).log()).sum()), memory[int(p.argmax())]
            if len(row) < m.capacity:
                row.append((entropy, views[0]))
            elif entropy < max(row, key=lambda item: item[0])[0]:
                row[max(range(len(row)), key=lambda slot: row[slot][0])] = (entropy, views[0])
        means, precision = fitted(task, memory, m)
        for views in batch:
            p = (task.scale * task.text @ views[0]).softmax(0)
            logs = torch.stack([-(views[0] - mu) @ precision @ (views[0] - mu) / 2 for mu in means])
            score = p * (m.tau * logs).softmax(0)
            answers.append(score / score.sum())
    return torch.stack(answers), memory


CASES = {
    "defaults": (dict(), dict()),
    "few features, shrunk throughout": (dict(dim=30), dict()),
    "many features, shrunk at first": (dict(dim=4, images=80), dict(tau=0.5)),
    "always shrunk": (dict(dim=4, images=80), dict(inverse="Ridge")),
    "never shrunk": (dict(dim=4, images=40), dict(inverse="MoorePenrose")),
    "never shrunk, of low rank": (dict(dim=30, images=20), dict(inverse="MoorePenrose")),
    "unit means": (dict(), dict(normalise_mean=True)),
    "a memory of three": (dict(), dict(capacity=3)),
    "a memory of one": (dict(), dict(capacity=1)),
    "batches": (dict(), dict(batch=7)),
    "one batch": (dict(), dict(batch=100)),
    "batches, never shrunk": (dict(dim=4), dict(batch=16, inverse="MoorePenrose")),
}


@pytest.mark.parametrize(("made", "settings"), CASES.values(), ids=CASES)
def test_it_is_the_plain_loop(made, settings):
    task, stream = stream_of(**made)
    method = OGA(**settings)
    expected, memory = reference(task, stream, method)
    scores, state = method.scan(task, method.init(task), stream)
    assert_close(scores, expected, "stream")
    for c, row in memory.items():
        assert state.entropy[c].isfinite().sum() == len(row)
        for slot, (entropy, feature) in enumerate(row):
            assert torch.equal(state.features[c, slot], feature)
            assert state.entropy[c, slot].item() == pytest.approx(entropy, abs=1e-12)


def test_the_cases_reach_both_estimators_and_a_full_memory():
    task, stream = stream_of(dim=4, images=80)
    _, memory = reference(task, stream, OGA())
    assert sum(map(len, memory.values())) > 4 * task.dim
    assert max(map(len, memory.values())) == 8 and len(stream) > sum(map(len, memory.values()))


@given(classes=st.integers(2, 6), dim=st.integers(2, 9), images=st.integers(1, 30), seed=st.integers(0, 999))
def test_residuals_that_are_carried_along_are_those_of_the_memory(classes, dim, images, seed):
    task, stream = stream_of(classes, dim, images, seed)
    _, state = OGA(capacity=3).scan(task, OGA(capacity=3).init(task), stream)
    held = state.entropy.isfinite()
    centred = (state.features - state.mean[:, None])[held]
    rows = torch.zeros(classes * 3, dim, dtype=torch.float64)
    rows[held.flatten()] = centred - centred.mean(0)
    expected = rows @ rows.T if 3 * classes <= dim else rows.T @ rows
    assert_close(state.residuals.centred(held.flatten().double()), expected, "stream")


@pytest.mark.parametrize("inverse", ["RidgeMoorePenrose", "Ridge", "MoorePenrose"])
@pytest.mark.parametrize("dim", [39, 40, 41])  # around the 5 x 8 slots of the memory
def test_precision_and_likelihoods_are_those_of_the_covariance(inverse, dim):
    task, stream = stream_of(dim=dim)
    method = OGA(inverse=inverse)
    inner = dim >= 40 and inverse != "MoorePenrose"
    for images in (0, 3, 15, 60):
        state = method.init(task)
        if images:
            _, state = method.scan(task, state, stream[:images])
        assert isinstance(state.residuals, Gram if inner else Scatter)
        memory = {
            c: [(0.0, x) for x in row[held]]
            for c, (row, held) in enumerate(zip(state.features, state.entropy.isfinite(), strict=True))
        }
        means, precision = fitted(task, memory, method)
        assert_close(method.precision(state) / dim, precision / dim, "stream")
        rows = stream[0, 0] - means
        assert_close(method.log_likelihood(state, stream[0, 0]), -(rows @ precision * rows).sum(1) / 2, "stream")


def test_images_that_are_all_alike_leave_the_zero_shot_answer():
    task, stream = stream_of()
    same = stream[:1].expand(12, -1, -1)
    scores, _ = OGA().scan(task, OGA().init(task), same)
    assert torch.isfinite(scores).all()
    assert_close(scores[5:], task.zero_shot(same[5:, 0]).softmax(1), "golden")


def test_without_weight_it_is_zero_shot():
    task, stream = stream_of()
    scores, _ = OGA(tau=0.0).scan(task, OGA(tau=0.0).init(task), stream)
    assert_close(scores, task.zero_shot(stream[:, 0]).softmax(1), "arithmetic")
    assert torch.equal(OGA().probabilities(scores), scores)


def test_a_pseudo_inverse_which_waits_for_the_gpu_is_not_captured():
    assert OGA().capturable and OGA(inverse="Ridge").capturable and not OGA(inverse="MoorePenrose").capturable


def test_a_batch_is_learned_before_its_first_image_is_answered():
    task, stream = stream_of(images=32)
    one, many = OGA(), OGA(batch=32)
    single, after = one.scan(task, one.init(task), stream)
    ahead, same = many.scan(task, many.init(task), stream)
    assert all(map(torch.allclose, leaves(after), leaves(same)))  # what is learned is the same
    assert_close(ahead[-1], single[-1], "stream")
    assert not torch.allclose(ahead[0], single[0])  # but the first image is answered with all 32 in the memory
    logits = task.zero_shot(stream[0, 0]) + one.tau * one.log_likelihood(after, stream[0, 0])
    assert_close(ahead[0], logits.softmax(0), "stream")


def test_a_session_answers_a_batch_only_as_a_whole():
    task, stream = stream_of()
    session = tt.Session(task, "oga", batch=16)
    for attempt in (session.step, session.predict):
        with pytest.raises(InputError, match="batch=16 reads 16 images before it answers one.*batch=1"):
            attempt(stream[0])
    whole = tt.Session(task, "oga", batch=16).scan(stream)
    parts = [session.scan(part) for part in stream.split(16)]
    assert_close(torch.cat(parts), whole, "arithmetic")
    with pytest.raises(InputError, match="part of a batch, which ends its stream"):
        session.scan(stream[:16])
    with pytest.raises(
        InputError, match="The guard is for methods that answer one image at a time; use batch=1, not 16"
    ):
        tt.Session(task, "oga", batch=16, guard=True)


def test_what_cannot_say_so_refuses_a_batch():
    task, stream = stream_of()
    ahead = OGA(batch=16)
    with pytest.raises(InputError, match="A report is for methods .* use batch=1, not 16"):
        stream_report(task, stream, None, ["zeroshot", ahead])
    with pytest.raises(InputError, match="A sweep is for methods"):
        sweep(task, [OGA(), ahead], [stream])


def test_a_replay_says_that_it_saw_the_batch_first(tmp_path, capsys):
    task, stream = stream_of(images=40)
    file, output = tmp_path / "features.safetensors", tmp_path / "out.safetensors"
    save_file({"views": stream.float(), "text": task.text.float()}, file)
    said = "each image was answered after its whole batch of 16 had been read"

    def run(*options: str) -> None:
        with pytest.raises(SystemExit) as done:
            main(["replay", str(file), "--method", "oga", *options])
        assert not done.value.code

    run("--set", "batch=16", "--json", "--out", str(output))
    found = json.loads(capsys.readouterr().out)
    assert (found["batch"], found["reads_ahead"]) == (16, said)
    with safe_open(output, "pt") as written:
        assert json.loads(written.metadata()["reads_ahead"]) == said
    run("--set", "batch=16")
    assert said in " ".join(capsys.readouterr().err.split())
    run("--json")
    assert "reads_ahead" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "settings",
    [dict(), dict(inverse="Ridge"), dict(inverse="MoorePenrose"), dict(capacity=1), dict(batch=8), dict(batch=100)],
    ids=str,
)
def test_it_keeps_every_promise(settings):
    check_method(OGA(**settings))


@pytest.mark.parametrize(
    ("name", "value"),
    [("tau", -0.1), ("tau", math.nan), ("capacity", 0), ("batch", 0), ("inverse", "ridge")],
)
def test_settings_out_of_range_are_refused_by_name_and_value(name, value):
    with pytest.raises(SettingError) as caught:
        OGA(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)

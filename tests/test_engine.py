"""Session: stepping, forking, saving, resuming, and refusing what it cannot use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tolerances import assert_close

import testtime
from testtime import Session, Task, toy
from testtime.methods.base import leaves
from testtime.methods.dpe import DPE
from testtime.types import Encoder, FeatureError, ImageError, InputError, Preprocess, StateError, UnknownName, ViewPlan


@pytest.fixture
def session() -> Session:
    """A session some way into its stream."""
    task, stream, _ = toy()
    session = Session(replace(task, encoder="tiny"), "dpe", alpha=4.0, views=4, seed=3)
    session.scan(stream[:20])
    return session


@pytest.fixture
def stream() -> torch.Tensor:
    """What follows in the stream of `session`."""
    return toy()[1][20:40]


def snapshot(session: Session) -> tuple[int, int, list[torch.Tensor]]:
    return session.count, session.position, [leaf.clone() for leaf in leaves(session.state)]


def assert_unchanged(session: Session, before: tuple[int, int, list[torch.Tensor]]) -> None:
    assert (session.count, session.position) == before[:2]
    assert all(torch.equal(x, y) for x, y in zip(leaves(session.state), before[2], strict=True))


# --- step, predict, scan, fork, reset ---


def test_step_predicts_and_then_learns(session, stream):
    before = session.state
    expected, after = session.method.step(session.task, before, stream[0])
    prediction = session.step(stream[0])
    assert session.count == 21
    assert_close(prediction.logits, expected, "arithmetic")
    assert torch.equal(session.state.updates, after.updates)
    for ours, plain in zip(leaves(session.state), leaves(after), strict=True):
        assert_close(ours.float(), plain.float(), "arithmetic")


def test_a_prediction_has_a_label_and_a_confidence(session, stream):
    learned = []
    for views in stream:
        frozen = session.task.zero_shot(views[0])
        before = session.state
        prediction = session.step(views)
        p = prediction.logits.double().softmax(0)
        assert prediction.index == prediction.logits.argmax().item()
        assert prediction.label == session.task.classnames[prediction.index]
        assert prediction.confidence == pytest.approx(p.max().item(), abs=1e-5)
        assert prediction.entropy == pytest.approx(float(-(p * p.log()).sum()), abs=1e-5)
        assert prediction.zero_shot_index == frozen.argmax().item()
        assert prediction.zero_shot == session.task.classnames[prediction.zero_shot_index]
        assert prediction.zero_shot_confidence == pytest.approx(frozen.softmax(0).max().item(), abs=1e-5)
        changed = any(not torch.equal(x, y) for x, y in zip(leaves(before), leaves(session.state), strict=True))
        assert prediction.learned == changed
        learned.append(prediction.learned)
    assert True in learned


def test_predict_is_the_next_step_without_learning(session, stream):
    before = snapshot(session)
    guess = session.predict(stream[0])
    assert_unchanged(session, before)
    assert torch.equal(guess.logits, session.step(stream[0]).logits)


def test_scan_is_many_steps(session, stream):
    other = session.fork()
    logits = session.scan(stream)
    assert torch.equal(logits, torch.stack([other.step(views).logits for views in stream]))
    assert session.count == other.count == 40
    assert_unchanged(session, snapshot(other))


def test_scan_in_chunks_is_scan(session, stream):
    other = session.fork()
    whole = session.scan(stream)
    assert torch.equal(whole, torch.cat([other.scan(stream[:7]), other.scan(stream[7:8]), other.scan(stream[8:])]))


def test_forks_learn_independently(session, stream):
    before = snapshot(session)
    fork = session.fork()
    fork.scan(stream)
    assert_unchanged(session, before)
    assert fork.count == 40
    session.step(stream[5])
    assert fork.count == 40


def test_reset_forgets_the_stream(session):
    session.reset()
    fresh = Session(session.task, session.method)
    assert_unchanged(session, snapshot(fresh))
    assert session.count == session.position == 0


def test_one_view_may_come_without_its_axis(session, stream):
    fork = session.fork()
    assert torch.equal(session.step(stream[0, 0]).logits, fork.step(stream[0, :1]).logits)


def test_features_are_normalised(session, stream):
    fork = session.fork()
    assert_close(session.step(7 * stream[0]).logits, fork.step(stream[0]).logits, "stream")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_features_of_another_precision_are_cast_to_that_of_the_task(session, stream, dtype):
    fork = session.fork()
    prediction = session.step(stream[0].to(dtype))
    assert prediction.logits.dtype == torch.float32
    assert all(leaf.dtype in (torch.float32, torch.int64) for leaf in leaves(session.state))
    torch.testing.assert_close(prediction.logits, fork.step(stream[0]).logits, atol=1.0, rtol=0.0)
    assert session.scan(stream[1:4].to(dtype)).dtype == torch.float32


def test_zero_shot_session_learns_nothing():
    task, stream, _ = toy()
    session = Session(task, "zeroshot")
    assert_close(session.scan(stream), task.zero_shot(stream[:, 0]), "arithmetic")
    assert not session.step(stream[0]).learned


# --- making a session ---


def test_settings_and_preset_go_to_the_method():
    task, *_ = toy()
    assert Session(task, "dpe", preset="paper", alpha="2").method == DPE.paper(alpha=2.0)


def test_settings_beside_a_ready_made_method_are_refused():
    task, *_ = toy()
    for extra in ({"alpha": 2.0}, {"preset": "paper"}):
        with pytest.raises(InputError, match="ready-made"):
            Session(task, DPE(), **extra)


def test_a_session_needs_at_least_one_view():
    with pytest.raises(InputError, match="views=0"):
        Session(toy()[0], views=0)


def test_an_unknown_method_is_refused():
    with pytest.raises(UnknownName, match="Did you mean 'dpe'"):
        Session(toy()[0], "dpee")


# --- what cannot be used is refused, and nothing changes ---


def spoiled(views: torch.Tensor, how: str) -> torch.Tensor:
    views = views.clone()
    if how == "nan":
        views[..., 1, 3] = torch.nan
    elif how == "infinity":
        views[..., 2, 0] = torch.inf
    elif how == "zero":
        views[..., 1, :] = 0
    elif how == "dimension":
        views = views[..., :-1]
    elif how == "whole numbers":
        views = (10 * views).long()
    elif how == "no views":
        views = views[..., :0, :]
    return views


BAD = {
    "nan": "image 20, view 1, hold NaN or infinity",
    "infinity": "image 20, view 2, hold NaN or infinity",
    "zero": "image 20, view 1, are all zero",
    "dimension": r"\(N, V, 32\).*31",
    "whole numbers": "floating point; got torch.int64",
    "no views": "at least one view",
}


@pytest.mark.parametrize(("how", "message"), BAD.items(), ids=BAD)
@pytest.mark.parametrize("call", ["step", "predict", "scan"])
def test_bad_features_are_refused_and_change_nothing(session, stream, call, how, message):
    before = snapshot(session)
    views = spoiled(stream[0], how)
    with pytest.raises(FeatureError, match=message):
        getattr(session, call)(views[None] if call == "scan" else views)
    assert_unchanged(session, before)
    session.step(stream[0])  # and it goes on
    assert session.count == 21


def test_features_that_overflow_in_the_cast_are_refused(session, stream):
    before = snapshot(session)
    with pytest.raises(FeatureError):
        session.step(stream[0].double() * 1e60)
    assert_unchanged(session, before)


def test_a_chunk_is_processed_completely_or_not_at_all(session, stream):
    before = snapshot(session)
    stream = stream.clone()
    stream[5, 2, 0] = torch.nan
    with pytest.raises(FeatureError, match="image 25, view 2"):
        session.scan(stream)
    assert_unchanged(session, before)


@pytest.mark.parametrize("shape", [(), (2, 3, 4, 32)])
def test_features_of_unknown_shape_are_refused(session, shape):
    before = snapshot(session)
    with pytest.raises(FeatureError):
        session.step(torch.ones(shape))
    assert_unchanged(session, before)


# --- saving and resuming ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", ["dpe", "zeroshot"])
def test_a_loaded_session_resumes_bit_for_bit(tmp_path, dtype, method):
    task, stream, _ = toy(dtype=dtype)
    session = Session(task, method)
    session.scan(stream[:50])
    session.save(tmp_path / "a.safetensors")
    loaded = Session.load(tmp_path / "a.safetensors")
    assert_unchanged(loaded, snapshot(session))
    assert torch.equal(loaded.scan(stream[50:]), session.scan(stream[50:]))
    assert_unchanged(loaded, snapshot(session))


def test_a_file_holds_everything(session, tmp_path):
    path = session.save(tmp_path / "a.safetensors")
    loaded = Session.load(path)
    assert loaded.method == session.method
    assert loaded.plan == session.plan == ViewPlan(4, False, 3)
    assert (loaded.count, loaded.position) == (20, 20)
    assert loaded.task.classnames == session.task.classnames
    assert (loaded.task.scale, loaded.task.encoder) == (session.task.scale, "tiny")
    assert torch.equal(loaded.task.text, session.task.text)
    assert loaded.save(tmp_path / "b.safetensors").read_bytes() == path.read_bytes()


def test_a_file_records_the_position_in_the_input(session, stream, tmp_path):
    session.position = 23  # three images could not be read
    path = session.save(tmp_path / "a.safetensors")
    loaded = Session.load(path)
    assert (loaded.count, loaded.position) == (20, 23)
    loaded.scan(stream[:5])
    assert (loaded.count, loaded.position) == (25, 28)


def test_an_older_file_without_a_position_has_no_gaps(session, tmp_path):
    session.position = 23
    path = rewritten(saved(session, tmp_path), drop="position")
    loaded = Session.load(path)
    assert (loaded.count, loaded.position) == (20, 20)


CHILD = """
import sys, torch
from safetensors.torch import load_file, save_file
from testtime import Session
session = Session.load(sys.argv[1])
logits = session.scan(load_file(sys.argv[2])["views"])
session.save(sys.argv[3])
save_file({"logits": logits}, sys.argv[4])
"""


def test_a_new_process_resumes_bit_for_bit(session, stream, tmp_path):
    names = [str(tmp_path / name) for name in ("before", "views", "after", "logits")]
    session.save(names[0])
    save_file({"views": stream.contiguous()}, names[1])
    source = str(Path(testtime.__file__).parents[1])
    subprocess.run([sys.executable, "-c", CHILD, *names], check=True, env={**os.environ, "PYTHONPATH": source})
    assert torch.equal(load_file(names[3])["logits"], session.scan(stream))
    assert_unchanged(Session.load(names[2]), snapshot(session))


def test_extra_metadata_is_kept_and_cannot_hide_ours(session, tmp_path):
    path = session.save(tmp_path / "a.safetensors", {"note": "pets", "count": "99"})
    with safe_open(path, "pt") as file:
        assert file.metadata()["note"] == "pets"
    assert Session.load(path).count == 20


def test_saving_makes_the_folder_it_needs(session, tmp_path):
    assert session.save(tmp_path / "new" / "folder" / "a.safetensors").exists()


def test_saving_where_no_file_can_be_is_refused(session, tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "a.safetensors"):
        with pytest.raises(InputError, match=f"Cannot write {path}"):
            session.save(path)


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["disk", "stop"])
def test_a_failed_save_leaves_the_old_file(session, stream, tmp_path, monkeypatch, failure):
    path = session.save(tmp_path / "a.safetensors")
    content = path.read_bytes()
    session.scan(stream)

    def fail(*_):
        raise failure

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(InputError if isinstance(failure, OSError) else KeyboardInterrupt) as caught:
        session.save(path)
    if isinstance(failure, OSError):
        assert str(path) in str(caught.value) and "No space left" in str(caught.value)
    monkeypatch.undo()
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]
    assert Session.load(path).count == 20


# --- files that do not fit ---


def saved(session: Session, path: Path) -> Path:
    return session.save(path / "a.safetensors")


def rewritten(path: Path, drop: str = "", **facts: str) -> Path:
    """The same file with other metadata, and without one tensor or one entry of it."""
    tensors = {name: tensor for name, tensor in load_file(path).items() if name != drop}
    with safe_open(path, "pt") as file:
        facts = file.metadata() | facts
    save_file(tensors, path, {name: value for name, value in facts.items() if name != drop})
    return path


def names_of(task: Task, **changes: str) -> tuple[str, ...]:
    return tuple(changes.get(name.replace(" ", "_"), name) for name in task.classnames)


def test_loading_with_the_same_task_is_fine(session, tmp_path):
    path = saved(session, tmp_path)
    task = replace(session.task, context=torch.sin)
    loaded = Session.load(path, task)
    assert loaded.task.context is torch.sin
    assert Session.load(path, session.task.to(dtype=torch.float64)).count == 20


def test_another_class_list_is_refused(session, tmp_path):
    path = saved(session, tmp_path)
    other = replace(session.task, classnames=names_of(session.task, class_3="tiger"))
    with pytest.raises(StateError, match=r"a\.safetensors holds 8 classes.*'class 3' saved, 'tiger' given"):
        Session.load(path, other)


def test_the_same_classes_in_another_order_are_refused(session, tmp_path):
    path = saved(session, tmp_path)
    task = session.task
    other = replace(task, text=task.text.flip(0), classnames=task.classnames[::-1])
    with pytest.raises(StateError, match="'class 0' saved, 'class 7' given"):
        Session.load(path, other)


def test_a_longer_class_list_is_refused(session, tmp_path):
    path = saved(session, tmp_path)
    task = session.task
    other = replace(task, text=torch.cat([task.text, task.text[:1]]), classnames=(*task.classnames, "tiger"))
    with pytest.raises(StateError, match="8 classes, this task has 9.*longer"):
        Session.load(path, other)


def test_another_dimension_is_refused(session, tmp_path):
    path = saved(session, tmp_path)
    with pytest.raises(StateError, match="32 dimensions, this task of 16"):
        Session.load(path, replace(toy(dim=16)[0], encoder="tiny"))


def test_another_encoder_is_refused(session, tmp_path):
    path = saved(session, tmp_path)
    with pytest.raises(StateError, match="encoder 'tiny', this task with 'large'"):
        Session.load(path, replace(session.task, encoder="large"))
    with pytest.raises(StateError, match="encoder 'tiny', not 'random:32'"):
        Session.load(path, encoder=RandomEncoder(32))


def test_other_prompts_or_another_scale_are_refused(session, tmp_path):
    path = saved(session, tmp_path)
    other = replace(toy(seed=1)[0], encoder="tiny")
    for task in (other, replace(session.task, scale=50.0)):
        with pytest.raises(StateError, match="other text prototypes or another logit scale"):
            Session.load(path, task)


@pytest.mark.parametrize("version", ["0", "2", "99"])
def test_another_format_version_is_refused(session, tmp_path, version):
    path = rewritten(saved(session, tmp_path), version=version)
    with pytest.raises(StateError, match=f"format version {version}, this program reads 1"):
        Session.load(path)


def test_settings_that_do_not_fit_the_stored_state_are_refused(session, tmp_path):
    settings = testtime.registry.settings_of(session.method) | {"queue": 5}
    path = rewritten(saved(session, tmp_path), settings=json.dumps(settings))
    with pytest.raises(StateError, match=r"'state\.queue\.keys'.*\(8, 3, 32\).*needs.*\(8, 5, 32\)"):
        Session.load(path)


@pytest.mark.parametrize("name", ["state.text", "state.queue.cost", "task.text"])
def test_a_missing_tensor_is_named(session, tmp_path, name):
    path = rewritten(saved(session, tmp_path), drop=name)
    with pytest.raises(StateError, match=f"'{name}'"):
        Session.load(path)


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.999])
def test_a_file_cut_short_is_refused(session, tmp_path, part):
    path = saved(session, tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * part)])
    with pytest.raises(StateError, match=r"a\.safetensors.*cut short"):
        Session.load(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("classnames", "not json"),
        ("settings", "{"),
        ("settings", "[1]"),
        ("count", "many"),
        ("position", "here"),
        ("scale", "wide"),
    ],
)
def test_damaged_metadata_is_refused(session, tmp_path, key, value):
    path = rewritten(saved(session, tmp_path), **{key: value})
    with pytest.raises(StateError, match=f"{key}"):
        Session.load(path)


def test_files_that_are_not_sessions_are_refused(session, tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("not tensors at all, but long enough to look like something")
    with pytest.raises(StateError, match=r"notes\.txt"):
        Session.load(text)
    features = testtime.save_features(tmp_path / "f.safetensors", toy()[1], session.task.text)
    with pytest.raises(StateError, match=r"f\.safetensors is not a saved session"):
        Session.load(features)
    with pytest.raises(StateError, match="is a folder"):
        Session.load(tmp_path)
    with pytest.raises(StateError, match="No file"):
        Session.load(tmp_path / "nothing.safetensors")


# --- images ---


class RandomEncoder:
    """A fixed random projection of the pixels."""

    scale = 100.0
    preprocess = Preprocess(size=8, resize=8)
    device = torch.device("cpu")

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.name = f"random:{dim}"
        self.weight = torch.randn(3 * 8 * 8, dim, generator=torch.Generator().manual_seed(0))

    def encode_images(self, pixels: torch.Tensor) -> torch.Tensor:
        # a row at a time, so that features do not depend on the size of the batch
        return torch.nn.functional.normalize(torch.stack([p.flatten() @ self.weight for p in pixels]), dim=1)

    def encode_texts(self, texts) -> torch.Tensor:
        rows = [torch.randn(self.dim, generator=torch.Generator().manual_seed(sum(map(ord, t)))) for t in texts]
        return torch.nn.functional.normalize(torch.stack(rows), dim=1)


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (12, 16, 3), dtype=np.uint8))


@pytest.fixture
def encoder() -> RandomEncoder:
    return RandomEncoder(24)


def viewing(encoder: RandomEncoder, method: str = "dpe", **settings) -> Session:
    names = ("cat", "dog", "fox", "owl")
    task = Task(encoder.encode_texts(names), names, encoder=encoder.name)
    return Session(task, method, encoder=encoder, **settings)


def test_the_random_encoder_is_an_encoder(encoder):
    assert isinstance(encoder, Encoder)


def test_an_image_and_its_file_are_the_same(encoder, tmp_path):
    picture(1).save(tmp_path / "a.png")
    session = viewing(encoder, views=3)
    expected = session.predict(picture(1)).logits
    assert torch.equal(session.predict(tmp_path / "a.png").logits, expected)
    assert torch.equal(session.predict(str(tmp_path / "a.png")).logits, expected)


def test_run_is_one_step_after_another_in_order(encoder):
    images = [picture(seed) for seed in range(8)]
    session, other = viewing(encoder, views=3, seed=5), viewing(encoder, views=3, seed=5)
    found = list(session.run(images))
    assert [image for image, _ in found] == images
    for (_, prediction), image in zip(found, images, strict=True):
        assert torch.equal(prediction.logits, other.step(image).logits)
    assert session.count == session.position == 8


def test_a_second_run_continues_where_the_first_ended(encoder):
    images = [picture(seed) for seed in range(8)]
    session, other = viewing(encoder, views=3, seed=5), viewing(encoder, views=3, seed=5)
    found = [*session.run(images[:3]), *session.run(images[3:])]
    for (_, prediction), (_, expected) in zip(found, other.run(images), strict=True):
        assert torch.equal(prediction.logits, expected.logits)


def test_run_that_is_left_has_learned_what_it_has_answered(encoder):
    session, other = viewing(encoder, views=3), viewing(encoder, views=3)
    run = session.run([picture(seed) for seed in range(8)])
    next(run), next(run)
    run.close()
    list(other.run([picture(seed) for seed in range(2)]))
    assert_unchanged(session, snapshot(other))


def test_run_reads_only_a_few_images_ahead(encoder):
    read = []

    def source():
        for seed in range(100):
            read.append(seed)
            yield picture(seed)

    run = viewing(encoder).run(source())
    next(run)
    few = len(read)
    assert few <= 2 + 2 * torch.get_num_threads()
    next(run), next(run)
    assert len(read) == few + 2


def test_run_takes_features_too(session, stream):
    fork, features = session.fork(), list(stream)
    found = list(session.run(features))
    assert all(given is views for (given, _), views in zip(found, features, strict=True))
    assert torch.equal(torch.stack([p.logits for _, p in found]), fork.scan(stream))


@pytest.fixture
def photographs(tmp_path) -> list[Path]:
    """Six files, of which the third and the fifth are no images."""
    paths = [tmp_path / f"{n}.png" for n in range(6)]
    for seed, path in enumerate(paths):
        picture(seed).save(path)
    paths[2].write_text("no image")
    paths[4].write_bytes(paths[4].read_bytes()[:40])
    return paths


def test_run_passes_bad_images_to_the_handler_and_continues(encoder, photographs):
    session, other = viewing(encoder, views=2), viewing(encoder, views=2)
    bad = []
    found = list(session.run(photographs, on_error=lambda source, error: bad.append((source, error))))
    assert [source for source, _ in bad] == [photographs[2], photographs[4]]
    assert all(isinstance(error, ImageError) for _, error in bad)
    good = [photographs[n] for n in (0, 1, 3, 5)]
    assert [source for source, _ in found] == good
    assert (session.count, session.position) == (4, 6)
    for (_, prediction), path in zip(found, good, strict=True):
        other.position = photographs.index(path)  # a bad image has its place in the input
        assert torch.equal(prediction.logits, other.step(path).logits)


def test_whether_an_image_can_be_read_changes_no_view_of_those_after_it(encoder, photographs):
    found = []
    for _ in range(2):
        session = viewing(encoder, "zero", views=4)  # which learns nothing
        run = session.run(photographs, on_error=lambda *_: None)
        found.append({path: prediction.logits for path, prediction in run})
        picture(2).save(photographs[2])
    assert len(found[1]) == len(found[0]) + 1
    assert all(torch.equal(found[1][path], logits) for path, logits in found[0].items())


def test_run_that_ends_with_a_bad_image_moves_past_it(encoder, photographs):
    session = viewing(encoder)
    list(session.run(photographs[:5], on_error=lambda *_: None))
    assert (session.count, session.position) == (3, 5)


def test_run_without_a_handler_stops_at_the_bad_image(encoder, photographs):
    session = viewing(encoder)
    found = []
    with pytest.raises(ImageError, match=r"2\.png"):
        for source, _ in session.run(photographs):
            found.append(source)
    assert found == photographs[:2]
    assert session.count == session.position == 2


def test_views_depend_on_the_seed_and_the_position_in_the_stream(encoder):
    session = viewing(encoder, views=4, multi_view_prediction=True, selection=1.0)
    first = session.predict(picture(0)).logits
    other = viewing(encoder, views=4, multi_view_prediction=True, selection=1.0, seed=1)
    assert not torch.equal(other.predict(picture(0)).logits, first)
    assert torch.equal(session.predict(picture(0)).logits, first)
    moved = session.fork()
    moved.position = 1  # the same image and memory, one place later
    assert not torch.equal(moved.predict(picture(0)).logits, first)


def test_a_bad_image_changes_nothing(encoder, photographs):
    session = viewing(encoder)
    session.step(photographs[0])
    before = snapshot(session)
    for call in (session.step, session.predict):
        with pytest.raises(ImageError, match=r"2\.png"):
            call(photographs[2])
    assert_unchanged(session, before)


def test_a_resumed_session_sees_the_same_views(encoder, tmp_path):
    session = viewing(encoder, views=3, seed=7)
    list(session.run([picture(seed) for seed in range(3)]))
    loaded = Session.load(session.save(tmp_path / "a.safetensors"), encoder=encoder)
    for seed in range(3, 6):
        assert torch.equal(loaded.step(picture(seed)).logits, session.step(picture(seed)).logits)


def test_an_image_without_an_encoder_is_refused(session):
    before = snapshot(session)
    with pytest.raises(InputError, match=r"no encoder.*encoder="):
        session.step(picture(0))
    assert_unchanged(session, before)


def test_an_encoder_of_another_dimension_is_refused():
    with pytest.raises(InputError, match="random:24 has feature size 24, the task has 32"):
        Session(toy()[0], encoder=RandomEncoder(24))

"""One stream of features: in order, errors in their turn, and the same bits wherever it is split."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tolerances import assert_close
from torch import Tensor

import testtime as tt
from testtime import load_encoder
from testtime.encoding import stream as streams
from testtime.encoding.compiled import Compiled
from testtime.encoding.encoders import Deferred
from testtime.encoding.encoders.tiny import tiny
from testtime.encoding.stream import ROWS, Encoded, stream
from testtime.images.reading import read_image
from testtime.images.views import views
from testtime.machine.threads import workers
from testtime.ops import unit
from testtime.types import FeatureError, ImageError, InputError, ViewPlan

pytestmark = pytest.mark.usefixtures("pillow_on_device")
TINY = load_encoder("tiny")
NAMES = ["cat", "dog", "fox"]
Way = Callable[..., Iterator[Encoded]]


def by_threads(encoder: Any, images: Any, plan: ViewPlan, first: int = 0) -> Iterator[Encoded]:
    return streams._on_cpu(encoder, iter(enumerate(images, first)), plan, None)


def by_device(encoder: Any, images: Any, plan: ViewPlan, first: int = 0) -> Iterator[Encoded]:
    """As on a GPU, but on the CPU: the same code without graphs, and with views by Pillow."""
    return streams._Device(encoder, plan, None).run(iter(enumerate(images, first)))


@pytest.fixture(params=[by_threads, by_device])
def way(request: pytest.FixtureRequest) -> Way:
    return request.param


def photo(seed: int, width: int = 60, height: int = 44) -> Image.Image:
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("photos")
    for number in range(9):
        photo(number, 50 + 7 * number).save(folder / f"{number}.jpg", quality=95)
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def broken(paths: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Eleven images; the third cannot be read and the eighth is missing."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "text.jpg").write_text("no image")
    return [*paths[:2], folder / "text.jpg", *paths[2:6], folder / "missing.jpg", *paths[6:]]


def pillow(image: Any, index: int, plan: ViewPlan, encoder: Any = TINY) -> Tensor:
    """Features (V, D) of an image without a stream: Pillow's views, all at once."""
    image = read_image(image) if isinstance(image, Path) else image
    made = views(image, plan.count, encoder.preprocess, seed=plan.seed, index=index, augmix=plan.augmix)
    return unit(encoder.encode_images(made))


def same(one: Encoded, other: Encoded) -> bool:
    """Whether two entries are bitwise equal."""
    if one.features is None or other.features is None:
        return one.features is other.features and one.index == other.index and str(one.error) == str(other.error)
    return one.index == other.index and torch.equal(one.features, other.features)


# Results


@pytest.mark.parametrize("count", [1, 5, 20])
def test_features_are_those_of_pillow_views_in_order(paths: list[Path], count: int) -> None:
    plan = ViewPlan(count, augmix=True, seed=7)
    found = list(stream(TINY, paths, plan, indices=range(3, 12)))
    assert [entry.index for entry in found] == list(range(3, 12))
    assert [entry.source for entry in found] == paths
    for entry in found:
        assert_close(entry.features, pillow(entry.source, entry.index, plan), "arithmetic")


def test_features_of_the_device_are_those_of_pillow_up_to_rounding(paths: list[Path]) -> None:
    plan = ViewPlan(5, augmix=True, seed=7)
    found = list(by_device(TINY, paths, plan, 3))
    assert [entry.index for entry in found] == list(range(3, 12))
    for entry in found:
        assert_close(entry.features, pillow(entry.source, entry.index, plan), "arithmetic")


def test_long_strip_goes_through_pillow(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ViewPlan(5, augmix=True, seed=7)
    images = [read_image(paths[0]), photo(2, 9, 70), read_image(paths[1])]
    whole = list(by_device(TINY, images, plan))
    made, seen = streams.grey_views, []
    monkeypatch.setattr(streams, "LONGEST", 60)
    monkeypatch.setattr(streams, "grey_views", lambda given, *rest: (seen.extend(given), made(given, *rest))[1])
    found = list(by_device(TINY, images, plan))
    assert [max(pixels.shape) for pixels in seen] == [50, 57] and all(map(same, found, whole))


def test_features_are_unit_rows_in_the_requested_precision(paths: list[Path]) -> None:
    task = torch.zeros(2, TINY.dim, dtype=torch.float64)
    for entry in stream(TINY, paths[:2], ViewPlan(3), like=task):
        assert entry.features.dtype == torch.float64
        assert_close(entry.features.norm(dim=1), torch.ones(3), "arithmetic")
    assert next(stream(TINY, paths, ViewPlan(3))).features.dtype == torch.float32


class Member:
    """An image in an archive."""

    def __init__(self, path: Path) -> None:
        self.read_bytes = path.read_bytes


def test_images_are_files_members_pillow_images_or_pixels(way: Way, paths: list[Path]) -> None:
    image = read_image(paths[0])
    kinds = (paths[0], str(paths[0]), Member(paths[0]), image, torch.from_numpy(np.array(image)))
    # all at index 0: only the kind of source differs
    rows = [next(way(TINY, [given], ViewPlan(3))).features for given in kinds]
    assert all(torch.equal(rows[0], other) for other in rows[1:])


def test_rotated_photograph_is_turned_upright(way: Way, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    photo(1, 90, 40).save(tmp_path / "turned.png", exif=exif)
    photo(1, 90, 40).transpose(Image.Transpose.ROTATE_270).save(tmp_path / "upright.png")
    rows = [next(way(TINY, [tmp_path / f"{name}.png"], ViewPlan(3))).features for name in ("turned", "upright")]
    assert torch.equal(*rows)


def test_given_features_pass_through(paths: list[Path]) -> None:
    rows = torch.randn(3, 4, TINY.dim)
    rows[1, 2, 0] = torch.nan
    found = list(stream(None, [rows[0], rows[1], rows[2, 0]], ViewPlan(9), indices=range(5, 8)))
    assert [entry.index for entry in found] == [5, 6, 7]
    assert_close(found[0].features, unit(rows[0]), "arithmetic")
    assert found[2].features.shape == (1, TINY.dim)
    assert isinstance(found[1].error, FeatureError) and "image 6, view 2, hold NaN" in str(found[1].error)
    with pytest.raises(InputError, match=r"no encoder.*encoder="):
        next(stream(None, paths, ViewPlan()))


# Errors


def test_bad_image_is_reported_in_its_turn(way: Way, paths: list[Path], tmp_path: Path) -> None:
    cut, text = tmp_path / "cut.jpg", tmp_path / "text.jpg"
    cut.write_bytes(paths[0].read_bytes()[:300])
    text.write_text("no image")
    given = [paths[0], cut, text, tmp_path / "missing.jpg", paths[1]]
    found = list(way(TINY, given, ViewPlan(2)))
    assert [entry.index for entry in found] == [0, 1, 2, 3, 4]
    assert [entry.error is None for entry in found] == [True, False, False, False, True]
    assert [entry.features is None for entry in found] == [False, True, True, True, False]
    for entry, name in zip(found[1:4], ("cut", "text", "missing"), strict=True):
        assert isinstance(entry.error, ImageError) and f"{name}.jpg" in str(entry.error)


def test_all_images_bad_gives_only_errors(way: Way, tmp_path: Path) -> None:
    found = list(way(TINY, [tmp_path / "a.jpg", tmp_path / "b.jpg"], ViewPlan()))
    assert len(found) == 2 and all(isinstance(entry.error, ImageError) for entry in found)


def test_no_images_give_nothing() -> None:
    encoder = Deferred("tiny")
    assert list(stream(encoder, [], ViewPlan())) == [] and not encoder.is_loaded
    assert len(list(stream(encoder, torch.randn(2, 32), ViewPlan()))) == 2 and not encoder.is_loaded
    assert next(stream(encoder, [photo(0)], ViewPlan())).features is not None and encoder.is_loaded


class Blind:
    """The tiny encoder, with NaN features for black images."""

    name, dim, scale, preprocess = "blind", TINY.dim, TINY.scale, TINY.preprocess
    device, dtype = torch.device("cpu"), torch.float32
    encode_texts = TINY.encode_texts

    def encode_images(self, pixels: Tensor) -> Tensor:
        return self.image_tower()(pixels)

    def image_tower(self) -> Callable[[Tensor], Tensor]:
        black = -torch.tensor(self.preprocess.mean) / torch.tensor(self.preprocess.std)

        def tower(pixels: Tensor) -> Tensor:
            seen = (pixels.mean((2, 3)) - black).abs().sum(1) > 1e-3
            return TINY.encode_images(pixels) * torch.where(seen, 1, torch.nan)[:, None]

        return tower


def test_features_that_cannot_be_used_are_an_error_in_its_turn(way: Way) -> None:
    images = [photo(0), Image.new("RGB", (40, 40)), photo(1)]
    found = list(way(Blind(), images, ViewPlan(2), 6))
    assert [entry.features is None for entry in found] == [False, True, False]
    assert isinstance(found[1].error, FeatureError) and "image 7, view 0, hold NaN" in str(found[1].error)


def test_unexpected_failure_is_raised(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(path: Path, admit: object) -> Image.Image:
        raise KeyError("a bug")

    monkeypatch.setattr("testtime.images.reading.read_image", bug)
    with pytest.raises(KeyError, match="a bug"):
        list(way(TINY, [Path("x")], ViewPlan()))


# The same bits wherever it is split


@pytest.mark.parametrize("count", [1, 5])
def test_split_stream_equals_the_whole_one_bitwise(way: Way, broken: list[Path], count: int) -> None:
    plan = ViewPlan(count, augmix=count > 1, seed=2)
    whole = list(way(TINY, broken, plan))
    assert [entry.index for entry in whole] == list(range(11))
    assert [entry.index for entry in whole if entry.error] == [2, 7]
    for cut in range(1, 11):
        parts = [*way(TINY, broken[:cut], plan), *way(TINY, broken[cut:], plan, cut)]
        assert all(map(same, parts, whole)), cut
    for index, image in enumerate(broken):
        assert same(*way(TINY, [image], plan, index), whole[index]), index


@pytest.mark.parametrize("count", [1, 5])
def test_indices_say_which_images_a_stream_has(
    broken: list[Path], count: int, monkeypatch: pytest.MonkeyPatch, way: Way
) -> None:
    monkeypatch.setattr(streams, "on_device", lambda *_: way is by_device)
    plan = ViewPlan(count, seed=2)
    whole = list(stream(TINY, broken, plan))
    every = [0, 3, 4, 7, 10]
    some = list(stream(TINY, [broken[i] for i in every], plan, indices=every))
    assert [entry.index for entry in some] == every
    assert all(map(same, some, (whole[i] for i in every)))


def test_features_do_not_depend_on_the_number_of_threads(broken: list[Path], threads: Any) -> None:
    plan = ViewPlan(5, seed=2)
    found = []
    for count in (1, 2, 3):
        threads(count)
        found.append(list(stream(TINY, broken, plan)))
    assert all(map(same, found[1], found[0])) and all(map(same, found[2], found[0]))


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads, and with it how many encode."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_threads_use_one_core_each_whatever_torch_is_set_to(threads: Any) -> None:
    for count in (4, 5):
        threads(count)
        pool = workers(count, flush=True)
        assert {pool.submit(torch.get_num_threads).result() for _ in range(8)} == {1}
        assert torch.get_num_threads() == count


# Fixed shapes and positions


@pytest.mark.parametrize(("count", "blocks"), [(1, [1]), (5, [5]), (ROWS, [ROWS]), (19, [ROWS, ROWS, 3])])
def test_threads_encode_blocks_shaped_by_the_number_of_views(
    paths: list[Path], count: int, blocks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, seen = tiny(), []
    whole = encoder.encode_images
    monkeypatch.setattr(encoder, "encode_images", lambda pixels: (seen.append(tuple(pixels.shape)), whole(pixels))[1])
    for images in (paths, paths[:1]):
        seen.clear()
        assert len(list(stream(encoder, images, ViewPlan(count)))) == len(images)
        assert sorted(seen) == sorted((rows, 3, 32, 32) for rows in len(images) * blocks)


@pytest.mark.parametrize(("count", "together"), [(1, 16), (5, 12), (40, 1), (100, 1)])
def test_device_encodes_whole_blocks_and_an_image_has_its_position_in_them(
    broken: list[Path], count: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Tensor] = []
    launch = Compiled._launch
    monkeypatch.setattr(Compiled, "_launch", lambda self, grey: (launched.append(grey.clone()), launch(self, grey))[1])
    plan, size = ViewPlan(count), TINY.preprocess.size
    found = list(by_device(TINY, broken[:6], plan, 9))
    assert {tuple(grey.shape) for grey in launched} == {(together * count, 3, size, size)}
    filled = {
        (number, position)
        for number, grey in enumerate(launched)
        for position, rows in enumerate(grey.view(together, count, -1))
        if rows.any()
    }
    numbers = sorted({entry.index // together for entry in found if entry.error is None})
    expected = {(numbers.index(e.index // together), e.index % together) for e in found if e.error is None}
    assert len(launched) == len(numbers) and filled == expected


def test_group_of_bad_images_is_not_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compiled, "_launch", None)
    assert len(list(by_device(TINY, [tmp_path / f"{n}.jpg" for n in range(20)], ViewPlan(5)))) == 20


# Scheduling


def test_read_ahead_is_bounded(way: Way, paths: list[Path]) -> None:
    taken = []

    def endless() -> Iterator[Path]:
        for number in range(10_000):
            taken.append(number)
            yield paths[number % len(paths)]

    for count, most in ((1, 100), (32, 30), (80, 30)):
        taken.clear()
        source = way(TINY, endless(), ViewPlan(count))
        next(source)
        source.close()
        assert 1 < len(taken) <= most


def test_images_are_read_in_parallel(way: Way, monkeypatch: pytest.MonkeyPatch, threads: Any) -> None:
    threads(2)
    both = threading.Barrier(2)

    def slow(path: Path, admit: object) -> Image.Image:
        both.wait(30)  # for another one read at the same time
        return photo(0)

    monkeypatch.setattr("testtime.images.reading.read_image", slow)
    assert all(entry.error is None for entry in way(TINY, [Path("x")] * 16, ViewPlan(2)))


def test_images_of_a_closed_stream_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    go, read, readers = threading.Event(), [], workers(max(2, min(streams.READERS, os.cpu_count() or 1)))
    needed = streams.AHEAD + 1  # launches ahead of the caller, of one image each

    def slow(path: Path, admit: object) -> Image.Image:
        read.append(path)
        assert int(path.name) < needed or go.wait(30)
        return photo(0)

    monkeypatch.setattr("testtime.images.reading.read_image", slow)
    source = by_device(TINY, [Path(str(number)) for number in range(50)], ViewPlan(64))
    next(source)
    source.close()
    go.set()
    readers.submit(lambda: None).result(30)  # after all tasks still in the queue
    assert needed <= len(read) <= needed + readers._max_workers


def test_views_are_made_on_the_device_of_an_encoder_that_offers_its_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, asked = torch.device("cuda"), []
    monkeypatch.setattr(streams, "works", lambda *given: (asked.append(given), len(asked) < 3)[1])
    members = {name: getattr(TINY, name) for name in ("name", "dim", "scale", "preprocess", "dtype")}
    members |= {name: getattr(TINY, name) for name in ("encode_images", "encode_texts")}
    towered = members | {"image_tower": TINY.image_tower}
    assert streams.on_device(SimpleNamespace(**towered, device=cuda), True)
    assert not streams.on_device(SimpleNamespace(**members, device=cuda), True)

    class Passing:
        """Passes everything on to another encoder; from Python 3.12 on, isinstance does not see what it offers."""

        def __getattr__(self, name: str) -> object:
            return (towered | {"device": cuda})[name]

    assert streams.on_device(Passing(), False)
    assert asked == [(cuda, TINY.preprocess, True), (cuda, TINY.preprocess, False)]
    assert not streams.on_device(Passing(), False)  # Triton does not work any more
    assert not streams.on_device(SimpleNamespace(**towered, device=torch.device("cpu")), True)


class Variations:
    """Records whether two threads ever called it at a time."""

    name = "own"

    def __init__(self) -> None:
        self.inside, self.most_inside = 0, 0

    def __call__(self, image: Image.Image, count: int, seed: int) -> list[Image.Image]:
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        drawn = [photo(seed % 1000 + number) for number in range(count)]
        self.inside -= 1
        return drawn


def test_variations_follow_the_crops_and_are_drawn_one_image_at_a_time(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch, threads: Any
) -> None:
    threads(3)
    monkeypatch.setattr(streams, "_Device", None)  # variations are Pillow images, wherever the encoder is
    monkeypatch.setattr(streams, "on_device", lambda *_: True)
    source = Variations()
    plan = ViewPlan(4, seed=1, variations=source)
    found = list(stream(TINY, paths, plan))
    assert source.most_inside == 1
    for entry in found:
        assert entry.features.shape == (7, TINY.dim)
        assert_close(entry.features[:4], pillow(entry.source, entry.index, plan), "arithmetic")
    alone = next(stream(TINY, paths[4:], plan, indices=[4]))
    assert torch.equal(alone.features, found[4].features)


# Sessions


def test_session_answers_from_the_stream_what_it_answers_step_by_step(
    paths: list[Path], tmp_path: Path, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "on_device", lambda *_: way is by_device)
    task = tt.build_task(TINY, NAMES)
    given = [tmp_path / "first.jpg", *paths[:3], tmp_path / "missing.jpg", *paths[3:]]
    session, other = (tt.Session(task, "dpe", encoder=TINY, views=4, seed=5) for _ in range(2))
    bad: list[tuple[Path, int]] = []
    answers = list(session.run(given, on_error=lambda source, _: bad.append((source, session.position))))
    assert bad == [(given[0], 1), (given[4], 5)]
    assert (session.count, session.position) == (9, 11)
    for source, answer in answers:
        other.position = given.index(source)
        assert torch.equal(answer.logits, other.step(source).logits)
    with pytest.raises(ImageError, match="first.jpg"):
        next(tt.Session(task, "dpe", encoder=TINY).run(given))
    assert len(list(tt.Session(task, "dpe", encoder=TINY).run(torch.randn(3, task.dim)))) == 3


def test_answers_on_a_device_are_those_of_the_threads_up_to_rounding(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = tt.build_task(TINY, NAMES)
    answers, features = [], []
    for device in (False, True):
        monkeypatch.setattr(streams, "on_device", lambda *_, device=device: device)
        seen: list[torch.Tensor] = []
        keep = [lambda image, seen=seen: seen.append(image.views)]
        session = tt.Session(task, "dpe", encoder=TINY, views=4, seed=5, observers=keep)
        answers.append(torch.stack([answer.logits for _, answer in session.run(paths)]))
        features.append(torch.stack(seen))
    assert_close(features[0], features[1], "arithmetic")
    assert_close(answers[0], answers[1], "stream")  # the logit scale multiplies rounding by 100, and it is fed back


# NumPy


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, ">f4"])
def test_arrays_of_floats_are_features_like_tensors(kind) -> None:
    task, views, _ = tt.toy(images=2, views=3)
    for rows in (views[0], views[0, 0]):
        array = rows.numpy().astype(kind)
        array.flags.writeable = False
        native = torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
        assert torch.equal(tt.Session(task).step(array).logits, tt.Session(task).step(native).logits)
        assert torch.equal(tt.Session(task).predict(array).logits, tt.Session(task).predict(native).logits)


def test_arrays_of_bytes_are_pixels(way: Way, paths: list[Path]) -> None:
    images = [read_image(path) for path in paths[:3]]
    arrays = [np.asarray(image) for image in images]
    assert not arrays[0].flags.writeable
    wanted = way(TINY, images, ViewPlan(count=2))
    for made, image, array in zip(way(TINY, arrays, ViewPlan(count=2)), wanted, arrays, strict=True):
        assert made.source is array  # as it was given
        assert torch.equal(made.usable(), image.usable())


@pytest.mark.parametrize(
    "wrong, message",
    [
        ([0.1, 0.2], "got a list: .*features are a tensor or a NumPy array of floats"),
        (None, "got a NoneType"),
        (b"bytes", "got a bytes"),
        (np.zeros(32, np.int64), r"int64 \(32,\)"),
        (np.zeros(32, bool), r"bool \(32,\)"),
        (np.zeros(32, object), r"object \(32,\)"),
        (np.zeros((8, 8, 3), np.float32), r"float32 \(8, 8, 3\): an image is .* pixels \(H, W, 3\) uint8"),
        (torch.zeros(8, 8, 3), r"float32 \(8, 8, 3\): an image is .* pixels \(H, W, 3\) uint8"),
        (np.array(1.0), r"float64 \(\)"),
        (np.zeros((8, 8), np.uint8), r"Pixels must be \(H, W, 3\) uint8; got torch.uint8 \(8, 8\)"),
        (np.zeros((8, 8, 4), np.uint8), r"Pixels must be \(H, W, 3\) uint8"),
    ],
)
def test_what_is_neither_an_image_nor_features_is_refused(wrong, message) -> None:
    session = tt.Session(tt.build_task(TINY, NAMES), encoder=TINY)
    for call in (session.step, session.predict):
        with pytest.raises(InputError, match=message):
            call(wrong)
    errors: list[InputError] = []
    pixels = np.zeros((8, 8, 3), np.uint8)
    answers = list(session.run([pixels, wrong, pixels], on_error=lambda _, error: errors.append(error)))
    assert len(answers) == 2 and len(errors) == 1 and session.position == 3


def test_a_stream_of_features_reports_what_is_none() -> None:
    task, views, _ = tt.toy(images=2)
    errors: list[InputError] = []
    given = [views[0].numpy(), [0.1], "photo.png", views[1]]
    answers = list(tt.Session(task).run(given, on_error=lambda _, error: errors.append(error)))
    assert len(answers) == 2 and answers[0][0] is given[0]
    assert ["got a list" in str(errors[0]), "got a str" in str(errors[1])] == [True, True]

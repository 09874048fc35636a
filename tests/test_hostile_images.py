"""Hostile images: not regular files, sizes that exhaust memory, names that cannot be printed."""

from __future__ import annotations

import io
import os
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fuzz_images
import numpy as np
import pytest
import torch
from PIL import Image
from test_stream import by_device, by_threads

from testtime import load_encoder
from testtime.encoding import stream as streams
from testtime.images import gpu_views
from testtime.images import reading as images
from testtime.images.reading import read_image
from testtime.images.views import clean, views
from testtime.machine.threads import workers
from testtime.types import ImageError, InputError, ViewPlan

pytestmark = pytest.mark.usefixtures("pillow_on_device")
TINY = load_encoder("tiny")


@pytest.fixture(params=[by_threads, by_device])
def way(request: pytest.FixtureRequest) -> Callable[..., Iterator[streams.Encoded]]:
    return request.param


def photo(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Twenty photographs of growing size."""
    found = [tmp_path / f"{number:02}.png" for number in range(20)]
    for number, path in enumerate(found):
        photo(40 + number, 30, number).save(path)
    return found


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """The result of a call that must return in time."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "still waiting"
    return found[0]


def refusal(source: Any) -> str:
    with pytest.raises(ImageError) as caught:
        read_image(source)
    return str(caught.value)


# not regular files


def test_damaged_files_are_images_or_refused() -> None:
    found = fuzz_images.run(150, seed=1)
    assert sum(found.values()) == 150
    assert any(ending.endswith("image") for ending in found) and any(ending.endswith("refused") for ending in found)


def test_pipe_socket_device_and_folder_are_refused_at_once(tmp_path: Path) -> None:
    pipe, plug = tmp_path / "pipe.jpg", tmp_path / "socket.jpg"
    os.mkfifo(pipe)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(plug))
        for path in (pipe, str(pipe), Path("/dev/zero")):
            assert "is a pipe, a socket or a device" in within(10, lambda path=path: refusal(path))
        assert str(plug) in within(10, lambda: refusal(plug))
    assert "is a folder" in refusal(tmp_path)


def test_pipe_among_images_is_an_error_in_its_turn(way: Any, paths: list[Path], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    given = [paths[0], tmp_path / "pipe.jpg", paths[1]]
    found = within(60, lambda: list(way(TINY, given, ViewPlan(2))))
    assert [entry.error is None for entry in found] == [True, False, True]


def test_name_that_is_not_utf8_is_printable(way: Any, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff\n.jpg")
    path.write_bytes(b"no image")
    (entry,) = way(TINY, [path], ViewPlan())
    str(entry.error).encode()
    assert "\n" not in str(entry.error) and "not an image" in str(entry.error)


# too large


@pytest.mark.filterwarnings("error")
def test_image_in_memory_is_cropped_whatever_pillows_limit(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = next(way(TINY, [photo(100, 90)], ViewPlan(9))).features
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1_100)  # a view has 32 x 32
    entry = next(way(TINY, [photo(100, 90)], ViewPlan(9)))
    assert entry.error is None and torch.equal(entry.features, expected)
    assert Image.MAX_IMAGE_PIXELS == 1_100


def test_image_near_the_pixel_limit_is_cropped() -> None:
    class Shape:
        def crop(self, box: tuple[int, int, int, int]) -> str:
            Image._decompression_bomb_check((box[2] - box[0], box[3] - box[1]))
            return "cropped"

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for side in (100, 9_500, 13_400, 14_142):
            assert images.crop_box(Shape(), (0, 0, side, side)) == "cropped"  # type: ignore[arg-type]


def test_one_limit_holds_for_files_pillow_images_and_pixels(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    photo().save(buffer, "PNG")
    monkeypatch.setattr(images, "MAX_PIXELS", 1_000)
    monkeypatch.setattr(gpu_views, "MAX_PIXELS", 1_000)
    pixels = torch.from_numpy(np.array(photo()))
    assert "has more than 1,000 pixels" in refusal(buffer.getvalue())
    for given in (photo(), pixels):
        (entry,) = way(TINY, [given], ViewPlan(2))
        assert isinstance(entry.error, InputError) and "1,000" in str(entry.error)
    for call in (lambda: clean(photo(), TINY.preprocess), lambda: gpu_views.as_pixels(photo())):
        with pytest.raises(ImageError, match="40 x 30 pixels has more than 1,000 pixels"):
            call()


class Counted(streams.MemoryBudget):
    """A memory budget that records its peak and its largest request."""

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self.most = self.largest = 0
        budgets.append(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "taken" and "most" in vars(self):
            self.most = max(self.most, value)
            self.largest = max(self.largest, value - self.taken)
        super().__setattr__(name, value)


budgets: list[Counted] = []


@pytest.mark.parametrize("fits", [0, 1, 3])
def test_images_in_progress_stay_within_the_memory_budget(
    way: Any, paths: list[Path], fits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = list(way(TINY, paths, ViewPlan(5)))
    budgets.clear()
    monkeypatch.setattr(streams, "DECODED", fits * 60 * 30 * images.BYTES_PER_PIXEL)
    monkeypatch.setattr(streams, "PER_THREAD", 0)
    monkeypatch.setattr(streams, "PINNED", 50 * 30 * 3 * (fits - 1))  # some, all or none have their views made at once
    monkeypatch.setattr(streams, "MemoryBudget", Counted)
    found = list(way(TINY, paths, ViewPlan(5)))
    assert [entry.index for entry in found] == list(range(20))
    assert all(torch.equal(one.features, other.features) for one, other in zip(found, expected, strict=True))
    (budget,) = budgets
    assert 0 < budget.most <= budget.total + budget.largest and budget.taken == 0
    if way is by_threads:
        assert budget.most <= max(budget.total, budget.largest)


def test_images_of_ordinary_size_never_wait(way: Any, paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def fits(self: streams.MemoryBudget, size: int) -> bool:
        assert self.taken + size <= self.total
        return True

    monkeypatch.setattr(streams.MemoryBudget, "_fits", fits)
    assert all(entry.error is None for entry in way(TINY, paths, ViewPlan(3)))
    assert streams.PER_THREAD // images.BYTES_PER_PIXEL > 22_000_000


def test_streams_with_full_budgets_do_not_block_each_other(
    way: Any, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "DECODED", 1)
    monkeypatch.setattr(streams, "PER_THREAD", 0)

    def both() -> list[tuple[int, int]]:
        one, other = (way(TINY, paths, ViewPlan(40)) for _ in range(2))
        left = way(TINY, paths, ViewPlan(40))
        next(left)  # never read further, and never closed
        return [(next(one).index, next(other).index) for _ in paths]

    assert within(120, both) == [(index, index) for index in range(20)]
    pool = workers(max(2, min(streams.READERS, os.cpu_count() or 1)))
    assert pool.submit(lambda: True).result(60)


# an error belongs to its image


def test_file_that_pillow_has_not_read_yet_is_refused_in_its_turn(way: Any) -> None:
    buffer = io.BytesIO()
    photo().save(buffer, "JPEG")
    lazy = Image.open(io.BytesIO(buffer.getvalue()[:-400]))
    found = list(way(TINY, [photo(), lazy, photo()], ViewPlan(2)))
    assert [entry.error is None for entry in found] == [True, False, True]
    assert isinstance(found[1].error, ImageError) and "truncated" in str(found[1].error)


def test_image_over_which_memory_runs_out_is_refused_in_its_turn(
    way: Any, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(image: Image.Image) -> Image.Image:
        if image.width == 41:
            raise MemoryError
        return image

    monkeypatch.setattr("testtime.images.views.checked_rgb", full)
    monkeypatch.setattr(gpu_views, "checked_rgb", full)
    found = list(way(TINY, paths[:3], ViewPlan(2)))
    assert [entry.error is None for entry in found] == [True, False, True]
    assert "01.png" in str(found[1].error) and "too large for the memory" in str(found[1].error)


def test_views_of_a_photograph_do_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is scaled down while it is decoded, however large it is."""
    expected = views(photo(300, 200), 6, TINY.preprocess, seed=1, index=2)
    monkeypatch.setattr(images, "SMALL_CROP", 1)
    assert torch.equal(views(photo(300, 200), 6, TINY.preprocess, seed=1, index=2), expected)

"""Images encoded as they arrive: the features of the stream, in shared launches on a device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_stream import TINY, Blind, Member, Variations, by_device, photo
from tolerances import assert_close
from torch import Tensor

from testtime.encoding import live as lives
from testtime.encoding import stream as streams
from testtime.encoding.compiled import Compiled
from testtime.encoding.live import QUIET, LiveEncoder
from testtime.encoding.stream import ROWS, Encoded, stream
from testtime.images.reading import read_image
from testtime.types import FeatureError, ImageError, InputError, ViewPlan

pytestmark = pytest.mark.usefixtures("pillow_on_device")
LONG = 30.0  # seconds after which a test has failed


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but on the CPU: the same code without graphs, and with views by Pillow."""
    monkeypatch.setattr(streams, "on_device", lambda *_: True)


@pytest.fixture
def live() -> Iterator[Callable[..., LiveEncoder]]:
    """Makes encoders that are closed after the test."""
    made: list[LiveEncoder] = []
    yield lambda encoder=TINY, **options: made.append(LiveEncoder(encoder, **options)) or made[-1]
    for encoder in made:
        encoder.close()


@pytest.fixture(params=["cpu", "device"])
def either(request: pytest.FixtureRequest) -> str:
    """Either way of encoding."""
    if request.param == "device":
        request.getfixturevalue("on_device")
    return request.param


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("photos")
    for number in range(12):
        photo(number, 50 + 7 * number).save(folder / f"{number:02}.png")
    return sorted(folder.iterdir())


def pixels(seed: int) -> Tensor:
    return torch.from_numpy(np.array(photo(seed, 40 + 3 * seed)))


def got(futures: list[Future[Encoded]]) -> list[Encoded]:
    return [future.result(LONG) for future in futures]


# On the CPU


@pytest.mark.parametrize("plan", [ViewPlan(1), ViewPlan(5, augmix=True, seed=3), ViewPlan(2 * ROWS + 3, seed=4)])
def test_features_have_the_bits_of_the_stream(live: Any, paths: list[Path], plan: ViewPlan) -> None:
    encoder, task = live(), torch.zeros(2, TINY.dim, dtype=torch.float64)
    image = read_image(paths[0])
    sources = [*paths, str(paths[0]), Member(paths[1]), image, np.asarray(image), pixels(2)]
    for like in (None, task):
        found = got([encoder.submit(source, plan, 7 * n, like) for n, source in enumerate(sources)])
        for number, (entry, source) in enumerate(zip(found, sources, strict=True)):
            (expected,) = stream(TINY, [source], plan, indices=[7 * number], like=like)
            assert entry.index == 7 * number and entry.source is source
            assert entry.features.dtype == expected.features.dtype and torch.equal(entry.features, expected.features)


def test_variations_and_given_features_are_those_of_the_stream(live: Any, on_device: None) -> None:
    plan, rows = ViewPlan(4, seed=1, variations=Variations()), torch.randn(3, TINY.dim)
    encoder = live()
    for source in (photo(0), rows, rows[0].numpy()):
        (expected,) = stream(TINY, [source], plan, indices=[3])
        assert torch.equal(encoder.submit(source, plan, 3).result(LONG).features, expected.features)
    rows[1, 2] = torch.nan
    assert "image 4, view 1, hold NaN" in str(encoder.submit(rows, plan, 4).result(LONG).error)


def test_images_in_progress_are_bounded(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, lock, most = [0, 0], threading.Lock(), []
    views, whole = streams._views, TINY.encode_images

    def counted(*given: Any) -> Tensor:
        found = views(*given)
        with lock:
            made[0] += len(found)
            most.append(made[0] - made[1])
        return found

    class Slow(Blind):
        def encode_images(self, given: Tensor) -> Tensor:
            found = whole(given)
            with lock:
                made[1] += len(given)
            return found

    monkeypatch.setattr(streams, "_views", counted)
    plan, encoder = ViewPlan(40), live(Slow())
    got([encoder.submit(photo(number), plan, number) for number in range(40)])
    assert made == [1600, 1600] and max(most) <= 40 * streams._Threads(TINY).ahead(plan)


# Either way


def test_images_of_many_threads_get_their_own_features(live: Any, either: str, paths: list[Path]) -> None:
    encoder = live()
    plans = [ViewPlan(4, seed=seed) for seed in range(3)]
    jobs = [(path, plan, index) for index, path in enumerate(paths) for plan in plans]
    with ThreadPoolExecutor(6) as callers:
        found = list(callers.map(lambda job: encoder.submit(*job).result(LONG), jobs))
    for entry, (path, plan, index) in zip(found, jobs, strict=True):
        (expected,) = by_device(TINY, [path], plan, index)
        assert (entry.index, entry.source) == (index, path)
        assert_close(entry.features, expected.features, "arithmetic")


def test_unusable_images_have_errors(live: Any, either: str, tmp_path: Path) -> None:
    encoder, plan = live(Blind()), ViewPlan(2)
    given = [pixels(0), tmp_path / "missing.jpg", Image.new("RGB", (40, 40)), None, pixels(1)]
    found = got([encoder.submit(source, plan, 5 + number) for number, source in enumerate(given)])
    assert [entry.features is None for entry in found] == [False, True, True, True, False]
    assert isinstance(found[1].error, ImageError) and "missing.jpg: no such file" in str(found[1].error)
    assert isinstance(found[2].error, FeatureError) and "image 7, view 0, hold NaN" in str(found[2].error)
    assert isinstance(found[3].error, InputError) and "got a NoneType" in str(found[3].error)


def test_unexpected_failure_is_raised_and_the_next_image_encoded(
    live: Any, either: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(path: Path, admit: object) -> Image.Image:
        raise KeyError("a bug")

    monkeypatch.setattr("testtime.images.reading.read_image", bug)
    encoder = live()
    with pytest.raises(KeyError, match="a bug"):
        encoder.submit(Path("x"), ViewPlan(), 0).result(LONG)
    assert encoder.submit(photo(0), ViewPlan(), 0).result(LONG).error is None


def test_slow_image_holds_nothing_up(live: Any, either: str, monkeypatch: pytest.MonkeyPatch) -> None:
    go, torch_threads = threading.Event(), torch.get_num_threads()
    monkeypatch.setattr("testtime.images.reading.read_image", lambda *_: (go.wait(LONG), photo(0))[1])
    torch.set_num_threads(2)
    try:
        encoder = live()
        slow = encoder.submit(Path("x"), ViewPlan(2), 0)
        assert len(got([encoder.submit(pixels(n), ViewPlan(2), n) for n in range(5)])) == 5 and not slow.done()
        go.set()
        assert slow.result(LONG).error is None
    finally:
        go.set()
        torch.set_num_threads(torch_threads)


def test_cancelled_image_is_not_encoded(live: Any, either: str, monkeypatch: pytest.MonkeyPatch) -> None:
    go, plan, counted = threading.Event(), ViewPlan(100), []
    held = streams._views if either == "cpu" else streams.grey_views
    name = "_views" if either == "cpu" else "grey_views"
    monkeypatch.setattr(streams, name, lambda *given: (go.wait(LONG), held(*given))[1])
    encoder = live(on_batch=lambda images, _: counted.append(images))
    futures = [encoder.submit(pixels(0), plan, index) for index in range(60)]
    cancelled = [future for future in futures if future.cancel()]
    assert cancelled
    go.set()
    encoder.close()
    assert sum(counted) == 60 - len(cancelled) == sum(not future.cancelled() for future in futures)


def test_closing_waits_for_what_was_submitted(live: Any, either: str, paths: list[Path]) -> None:
    encoder = live(deadline=0.2)
    futures = [encoder.submit(path, ViewPlan(9), index) for index, path in enumerate(paths)]
    encoder.close()
    encoder.close()
    assert all(future.done() and future.result().error is None for future in futures)
    with pytest.raises(RuntimeError, match="closed"):
        encoder.submit(paths[0], ViewPlan(), 0)


def test_memory_budget_holds_images_back_but_blocks_nothing(
    live: Any, either: str, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "DECODED", 1)
    monkeypatch.setattr(streams, "PER_THREAD", 0)
    encoder = live()
    plans = [ViewPlan(1), ViewPlan(3)]
    found = got([encoder.submit(path, plan, 0) for path in paths for plan in plans])
    assert all(entry.error is None for entry in found)


def test_on_batch_that_fails_is_reported(live: Any, either: str) -> None:
    encoder = live(on_batch=lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        encoder.submit(photo(0), ViewPlan(), 0).result(LONG)


@pytest.mark.parametrize("options", [{"max_batch": 0}, {"deadline": -1.0}, {"deadline": float("nan")}])
def test_impossible_batches_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        LiveEncoder(TINY, **options)  # type: ignore[arg-type]


# On a device


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the launches."""
    shapes: list[tuple[int, ...]] = []
    launch = Compiled._launch
    record = lambda self, grey: (shapes.append(tuple(grey.shape)), launch(self, grey))[1]  # noqa: E731
    monkeypatch.setattr(Compiled, "_launch", record)
    return shapes


def test_images_of_different_seeds_share_launches_of_one_shape(live: Any, on_device: None, launched: list[Any]) -> None:
    batches: list[int] = []
    encoder = live(max_batch=12, deadline=LONG, on_batch=lambda images, seconds: batches.append(images))
    jobs = [(pixels(number), ViewPlan(5, seed=number), 100 * number) for number in range(12)]
    found = got([encoder.submit(*job) for job in jobs])  # the deadline is far off: only a full batch is launched
    assert launched == [(60, 3, 32, 32)] and batches == [12]
    for entry, (source, plan, index) in zip(found, jobs, strict=True):
        (expected,) = by_device(TINY, [source], plan, index)
        assert entry.source is source and entry.index == index
        assert_close(entry.features, expected.features, "arithmetic")


def test_batch_is_launched_at_its_deadline_and_split_into_launches(
    live: Any, on_device: None, launched: list[Any]
) -> None:
    batches: list[tuple[int, float]] = []
    encoder = live(max_batch=100, deadline=0.5, on_batch=lambda *given: batches.append(given))
    got([encoder.submit(pixels(0), ViewPlan(1), number) for number in range(35)])
    assert launched == 3 * [(16, 3, 32, 32)] and [images for images, _ in batches] == [16, 16, 3]
    assert all(0 < seconds < LONG for _, seconds in batches)


def test_batch_waits_while_images_keep_coming_and_no_longer(
    live: Any, on_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = live(deadline=10.0)._lane(ViewPlan(1))
    at = lambda *seconds: [SimpleNamespace(at=100.0 + each) for each in seconds]  # noqa: E731
    assert lane._due(at(0)) == lane._due(at(0, 0)) == 100 + 10 * QUIET  # one alone waits a part of the deadline
    assert lane._due(at(0, 2)) == 102 + 10 * QUIET
    assert lane._due(at(0, 5, 9)) == 110


def test_launches_hold_images_of_one_kind(live: Any, on_device: None) -> None:
    batches: list[int] = []
    encoder = live(max_batch=12, deadline=1.0, on_batch=lambda images, _: batches.append(images))
    double = torch.zeros(2, TINY.dim, dtype=torch.float64)
    kinds = [(ViewPlan(2), None), (ViewPlan(3), None), (ViewPlan(3, augmix=True), None), (ViewPlan(3), double)]
    jobs = [(pixels(n), *kind, n) for n, kind in enumerate(3 * kinds)]
    found = got([encoder.submit(source, plan, index, like) for source, plan, like, index in jobs])
    assert batches == [3, 3, 3, 3]
    for entry, (source, plan, like, index) in zip(found, jobs, strict=True):
        assert entry.features.shape == (plan.count, TINY.dim)
        assert entry.features.dtype == (torch.float32 if like is None else torch.float64)
        (expected,) = by_device(TINY, [source], plan, index)
        assert_close(entry.features.float(), expected.features, "arithmetic")


def test_second_launch_waits_until_it_is_full_or_the_first_is_done(
    live: Any, on_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, finish, batches = threading.Event(), streams._Device.finish, list[int]()
    monkeypatch.setattr(streams._Device, "finish", lambda *given: (go.wait(LONG), finish(*given))[1])
    encoder = live(max_batch=4, deadline=0.0, on_batch=lambda images, _: batches.append(images))
    launches, launch = list[int](), streams._Device.launch
    monkeypatch.setattr(
        streams._Device, "launch", lambda self, group: (launches.append(len(group)), launch(self, group))[1]
    )
    futures = [encoder.submit(pixels(0), ViewPlan(1), 0)]
    wait_until(lambda: launches == [1])
    futures += [encoder.submit(pixels(0), ViewPlan(1), number) for number in (1, 2, 3)]
    threading.Event().wait(0.2)
    assert launches == [1]  # three wait for a fourth
    futures.append(encoder.submit(pixels(0), ViewPlan(1), 4))
    wait_until(lambda: launches == [1, 4])
    futures.append(encoder.submit(pixels(0), ViewPlan(1), 5))
    go.set()
    got(futures)
    assert launches == batches == [1, 4, 1]


def wait_until(happened: Any) -> None:
    for _ in range(1000):
        if happened():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not happen")


def test_several_launches_are_in_flight_while_results_wait(
    live: Any, on_device: None, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    go, finish = threading.Event(), streams._Device.finish
    monkeypatch.setattr(streams._Device, "finish", lambda *given: (go.wait(LONG), finish(*given))[1])
    encoder = live(max_batch=1, deadline=0.0)
    futures = [encoder.submit(pixels(0), ViewPlan(2), number) for number in range(3 * lives.IN_FLIGHT)]
    for _ in range(1000):
        if len(launched) == lives.IN_FLIGHT:
            break
        threading.Event().wait(0.01)
    assert len(launched) == lives.IN_FLIGHT and not any(future.done() for future in futures)
    go.set()
    assert len(got(futures)) == len(launched) == 3 * lives.IN_FLIGHT


def test_failed_launch_fails_its_images_alone(live: Any, on_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, failing = Compiled._launch, [True] * 10

    def flaky(self: Compiled, grey: Tensor) -> Tensor:
        if failing:
            failing.pop()
            raise ValueError("no kernel")
        return launch(self, grey)

    monkeypatch.setattr(Compiled, "_launch", flaky)
    encoder = live(max_batch=2, deadline=LONG)
    futures = [encoder.submit(pixels(0), ViewPlan(2), number) for number in range(24)]
    errors = [future.exception(LONG) for future in futures]  # more launches fail than may be in flight
    assert [str(error) for error in errors if error] == 20 * ["no kernel"] and errors.count(None) == 4


def test_warm_up_compiles_for_a_number_of_views(live: Any, on_device: None, launched: list[Any]) -> None:
    live().warm_up(ViewPlan(3, augmix=True))
    assert launched == [(48, 3, 32, 32)]

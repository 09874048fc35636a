"""One encoding stream: from images to features, ahead of whoever takes them.

    images -> read -> views -> encode -> unit features, in the order of the input

Images are read by threads. On a CPU Pillow makes the views, and each thread encodes blocks of them by itself. On a GPU,
for an encoder that offers its tower (`types.DeviceEncoder`), views are made there, on a CUDA stream of their own.
An image that cannot be used is reported in its turn.

Memory is bounded: a file's header says how large its image will be, and a large one is decoded only once there is room
for it beside those in work (`DECODED`). So a stream takes that much and one image, of `images.MAX_PIXELS` at most.
Images are decoded in full, however large they are: views are cut from all of their pixels.

The features of an image depend on the image, the seed, its index, the encoder and the device alone: every block that is
encoded has a fixed shape, and an image has its place in it by its index. So a stream that is cut, resumed or sharded
gives the same bits.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain, count, groupby
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from testtime.encoding.encoders import needed
from testtime.machine.threads import workers
from testtime.ops import checked_views, refuse_views, unit_views
from testtime.types import DeviceEncoder, Encoder, InputError, StoredImage, ViewPlan

if TYPE_CHECKING:
    from testtime.encoding.compiled import Compiled
    from testtime.images.draw import Drawn

ROWS = 8  # views that a thread of the CPU encodes at a time
LAUNCH = 64  # views that a GPU encodes at a time, or those of one image where it has more
MOST = 16  # images of few views that wait for one another on a GPU
READERS = 4  # threads that read images for a GPU: more would only wait for Python's lock
AHEAD = 2  # launches before the first is asked for
DECODED = 2**30  # bytes that the images of a stream may take while they are decoded and wait, or those of one image
A_THREAD = 2**28  # bytes among them for each thread at least, so that photographs of up to 22 megapixels never wait
LARGE = 2**28  # bytes of an image from which memory is given back to the system once it is done
PINNED = 2**26  # bytes of a picture from which memory that a GPU copies by itself is too dear: it is never given back

Source = Any  # a path or what else holds an image's bytes, a Pillow image, pixels (H, W, 3) uint8; or features

_drawing = threading.Lock()  # a source of variations need not bear several threads


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """One image of a stream: its features, or why there are none."""

    index: int  # its place in the input
    source: Source
    features: Tensor | None  # (V, D) unit rows
    error: InputError | None = None

    def usable(self) -> Tensor:
        """The features, or the error raised."""
        if self.features is None:
            raise self.error or RuntimeError(f"{self.source} was not encoded.")
        return self.features


def stream(
    encoder: Encoder | None,
    images: Iterable[Source],
    plan: ViewPlan,
    *,
    indices: Iterable[int] | None = None,
    like: Tensor | None = None,
) -> Iterator[Encoded]:
    """The features of each image, in order; `indices` are their places in the input, by default from 0 on.

    They have the precision and the device of `like`, or else those that the encoder gives. Features that are given in
    place of images, (D,) or (V, D), only pass through.

    >>> import testtime as tt
    >>> from PIL import Image
    >>> photographs = [Image.new("RGB", (60, 40), colour) for colour in ("red", "blue")]
    >>> for image in stream(tt.load_encoder("tiny"), photographs, ViewPlan(count=4)):
    ...     print(image.index, tuple(image.features.shape))
    0 (4, 32)
    1 (4, 32)
    """
    numbered: Iterator[tuple[int, Source]] = zip(count() if indices is None else indices, images, strict=False)
    head = next(numbered, None)
    if head is None:
        return
    numbered = chain([head], numbered)
    if isinstance(head[1], Tensor) and head[1].dtype != torch.uint8:  # pixels are bytes
        yield from _given(numbered, like)
    elif encoder is None:
        raise InputError("This session has no encoder; give features, or make it with Session(..., encoder=).")
    elif plan.variations is None and on_device(encoder := needed(encoder)):
        yield from _Device(encoder, plan, like).run(numbered)
    else:
        yield from _by_threads(encoder, numbered, plan, like)


def readable(entries: Iterable[Encoded], on_skip: Callable[[str], None] | None) -> Iterator[Encoded]:
    """The images as they come; those that cannot be used go to `on_skip` as one line, or are raised without it."""
    for entry in entries:
        if entry.error is not None:
            if on_skip is None:
                raise entry.error
            on_skip(str(entry.error))
        yield entry


def on_device(encoder: Encoder) -> TypeGuard[DeviceEncoder]:
    """Whether views are made and encoded where the encoder is: on a GPU, if it offers its tower."""
    return isinstance(encoder, DeviceEncoder) and encoder.device.type == "cuda"


def _given(numbered: Iterator[tuple[int, Any]], like: Tensor | None) -> Iterator[Encoded]:
    for index, views in numbered:
        rows = views[None] if views.ndim == 1 else views
        yield _unit(index, views, rows, like)


def _unit(index: int, source: Source, rows: Tensor, like: Tensor | None) -> Encoded:
    """Features made unit rows, or refused."""
    try:
        return Encoded(index, source, unit_views(rows[None], rows if like is None else like, index)[0])
    except InputError as error:
        return Encoded(index, source, None, error)


def _opened(source: Source, admit: Callable[[tuple[int, int]], object]) -> Any:
    """A Pillow image of a source; `admit` hears how large one will be that is yet to be decoded."""
    from PIL import Image

    from testtime.images.reading import read_image

    if isinstance(source, str | StoredImage):
        return read_image(source, admit)
    if isinstance(source, Tensor):
        from testtime.images.gpu_views import as_picture

        return Image.fromarray(as_picture(source).cpu().numpy())
    return source


class Room:
    """Bytes that images in work may take together."""

    def __init__(self, total: int) -> None:
        self.total, self.taken = total, 0
        self._changed = threading.Condition()

    def take(self, size: int, wait: bool = True) -> bool:
        """Have so many bytes once there is room for them, or nobody has any; without `wait`, whether there is room."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: not self.taken or self._fits(size))
            elif not self._fits(size):
                return False
            self.taken += size
            return True

    def force(self, size: int) -> None:
        """Have so many bytes, whether there is room or not."""
        with self._changed:
            self.taken += size

    def give(self, size: int) -> None:
        """Bytes that are free again."""
        if size >= LARGE:
            _trim()
        with self._changed:
            self.taken -= size
            self._changed.notify_all()

    def _fits(self, size: int) -> bool:
        return self.taken + size <= self.total


def _trim() -> None:
    """Have the C library give back memory that nobody uses; GNU's keeps some for each thread."""
    if trim := getattr(ctypes.pythonapi, "malloc_trim", None):
        trim(0)


def _needed(extent: tuple[int, int]) -> int:
    """Bytes that an image of some width and height takes while it is worked on."""
    from testtime.images.reading import PIXEL

    return extent[0] * extent[1] * PIXEL


# On the CPU


def _by_threads(
    encoder: Encoder, numbered: Iterator[tuple[int, Source]], plan: ViewPlan, like: Tensor | None
) -> Iterator[Encoded]:
    threads = torch.get_num_threads()
    pool, waiting = workers(threads, flush=True), deque[tuple[int, Source, Future[list[Future[Tensor]]]]]()
    ahead = 2 + 2 * threads * ROWS // max(plan.total, ROWS)  # images in work: enough for all, few enough for the memory
    room = Room(max(DECODED, threads * A_THREAD))
    try:
        while True:
            while len(waiting) < ahead and (entry := next(numbered, None)) is not None:
                waiting.append((*entry, pool.submit(_prepare, pool, room, encoder, plan, *entry)))
            if not waiting:
                return
            index, source, blocks = waiting.popleft()
            try:
                rows = torch.cat([block.result() for block in blocks.result()])
            except InputError as error:
                yield Encoded(index, source, None, error)
                continue
            yield _unit(index, source, rows, like)
    finally:
        for _, _, blocks in waiting:
            blocks.cancel()


def _prepare(
    pool: ThreadPoolExecutor, room: Room, encoder: Encoder, plan: ViewPlan, index: int, source: Source
) -> list[Future[Tensor]]:
    """Read one image and make its views; blocks of them are encoded by whoever is free."""
    with _large(source), _held(room) as admit:
        pixels = _views(_opened(source, admit), encoder, plan, index)
    return [pool.submit(encoder.encode_images, block) for block in pixels.split(ROWS)]


def _views(image: Any, encoder: Encoder, plan: ViewPlan, index: int) -> Tensor:
    """Pixels of all views (V, 3, H, W) of a Pillow image."""
    from testtime.images.views import views

    pixels = views(image, plan.count, encoder.preprocess, seed=plan.seed, index=index, augmix=plan.augmix)
    if plan.variations is None:
        return pixels
    from testtime.images.diffusion import variation_views

    with _drawing:
        return torch.cat([pixels, variation_views(encoder.preprocess, image, plan, index)])


@contextmanager
def _held(room: Room) -> Iterator[Callable[[tuple[int, int]], object]]:
    """What admits an image to the room; its bytes are free again once the block has ended.

    Whoever waits does so for others that are in their blocks, and these for nobody.
    """
    taken: list[int] = []

    def admit(extent: tuple[int, int]) -> None:
        room.take(_needed(extent))
        taken.append(_needed(extent))

    try:
        yield admit
    finally:
        for size in taken:
            room.give(size)


@contextmanager
def _large(source: Source) -> Iterator[None]:
    """Blame the image where memory runs out over it."""
    from testtime.images.reading import blamed, name_of

    try:
        yield
    except MemoryError:
        with blamed(name_of(source)):
            raise


# On a GPU


class _Read(NamedTuple):
    """One image as threads leave it."""

    number: int  # its index
    pixels: Tensor  # (H, W, 3) uint8
    drawn: Drawn  # what is random about its views
    taken: int  # bytes of the room
    grey: Tensor | None = None  # (V, 3, size, size), its views where they are made already


class _Full(Exception):
    """There is no room for an image yet."""


@dataclass(eq=False)
class _Waiting:
    """One image that is read ahead; its future gives None where it has found no room."""

    index: int
    source: Source
    future: Future[_Read | None]


class _Device:
    """Images read by threads, and views made and encoded on the device ahead of the caller."""

    def __init__(self, encoder: DeviceEncoder, plan: ViewPlan, like: Tensor | None) -> None:
        self.encoder, self.plan, self.like = encoder, plan, like
        self.together = max(1, min(MOST, LAUNCH // plan.count))  # images to a launch
        self.compiled = _compiled(encoder, self.together * plan.count)
        self.side = _side(encoder.device) if encoder.device.type == "cuda" else None
        self.threads = max(2, min(READERS, os.cpu_count() or 1))
        self.pool, self.room = workers(self.threads), Room(max(DECODED, self.threads * A_THREAD))
        self.full = False  # whether an image has found no room

    def run(self, numbered: Iterator[tuple[int, Source]]) -> Iterator[Encoded]:
        groups = (list(group) for _, group in groupby(numbered, lambda entry: entry[0] // self.together))
        reading: deque[list[_Waiting]] = deque()
        launched: deque[tuple[list[Encoded], Tensor | None, torch.cuda.Event | None]] = deque()
        try:
            while True:
                wanted = AHEAD + max(1, 16 // self.together)
                while len(reading) < wanted and (group := next(groups, None)) is not None:
                    reading.append([_Waiting(*entry, self.pool.submit(self._read, *entry)) for entry in group])
                if reading and len(launched) <= AHEAD:
                    launched.append(self._launch(reading.popleft()))
                    if self.full:
                        self.full = False
                        self._again(chain.from_iterable(reading))
                elif launched:
                    yield from self._landed(*launched.popleft())
                else:
                    return
        finally:
            for entry in chain.from_iterable(reading):
                entry.future.cancel()

    def _read(self, index: int, source: Source, now: bool = False) -> _Read | None:
        """An image read; None where there is no room for it yet, unless it is wanted `now`.

        Threads wait for no room: it is whoever takes the features that makes it, and who may take other things first.
        """
        from testtime.images.draw import draw
        from testtime.images.gpu_views import as_picture

        taken = 0

        def admit(extent: tuple[int, int]) -> None:
            nonlocal taken
            if now:
                self.room.force(_needed(extent))
            elif not self.room.take(_needed(extent), wait=False):
                raise _Full
            taken = _needed(extent)

        try:
            with _large(source):
                picture = as_picture(source if isinstance(source, Tensor) else _opened(source, admit))
                if taken > picture.nbytes:  # decoded, it takes less
                    self.room.give(taken - picture.nbytes)
                    taken = picture.nbytes
                extent = picture.shape[1], picture.shape[0]
                plan, size = self.plan, self.encoder.preprocess.size
                drawn = draw(extent, plan.count, size, seed=plan.seed, index=index, augmix=plan.augmix)
                if self.side and not picture.is_cuda and picture.nbytes <= PINNED:
                    picture = picture.pin_memory()
                return _Read(index, picture, drawn, taken)
        except _Full:
            self.full = True
            return None
        except BaseException:
            self.room.give(taken)
            raise

    def _again(self, entries: Iterable[_Waiting]) -> None:
        """Read images that had found no room, now that others have made some."""
        for entry in entries:
            if entry.future.done() and not entry.future.exception() and entry.future.result() is None:
                entry.future = self.pool.submit(self._read, entry.index, entry.source)

    def _launch(self, group: Sequence[_Waiting]) -> tuple[list[Encoded], Tensor | None, torch.cuda.Event | None]:
        """A group whose features are on their way, which of them are usable (n,), and the event of their arrival."""
        if self.side is None:
            entries, reads = self._taken(group)
            if not reads:
                return entries, None, None
            features, good = self._features(reads)
            return _filled(entries, features), good, None
        caller = torch.cuda.current_stream(self.encoder.device)
        self.side.wait_stream(caller)
        with torch.cuda.stream(self.side):
            entries, reads = self._taken(group)
            if not reads:
                return entries, None, None
            features, good = self._features(reads)
            good = good.to("cpu", non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        features.record_stream(caller)  # its memory is not to be used again before the caller is done with it
        return _filled(entries, features), good, event

    def _taken(self, group: Sequence[_Waiting]) -> tuple[list[Encoded], list[_Read]]:
        """The images of a group, those that can be read on the device; the room they took is free."""
        entries, reads = [], []
        for entry in group:
            try:
                read = entry.future.result()
                if read is None:  # those before it are done, so it is its turn
                    read = self.pool.submit(self._read, entry.index, entry.source, True).result()
                    assert read is not None
                entries.append(Encoded(entry.index, entry.source, None))
            except InputError as error:
                entries.append(Encoded(entry.index, entry.source, None, error))
                continue
            read = read._replace(pixels=read.pixels.to(self.encoder.device, non_blocking=True))
            if read.pixels.nbytes > PINNED:  # at once: the pictures of several would fill the device
                read = read._replace(grey=self._grey([read])[0], pixels=read.pixels.new_empty(0))
            reads.append(read)
            self.room.give(read.taken)
        return entries, reads

    def _grey(self, reads: Sequence[_Read]) -> Tensor:
        """Views of some images (n, V, 3, size, size)."""
        from testtime.images.gpu_views import grey_views

        return grey_views([read.pixels for read in reads], [read.drawn for read in reads], self.encoder.preprocess)

    def _features(self, reads: Sequence[_Read]) -> tuple[Tensor, Tensor]:
        """Unit features (n, V, D), and whether they are: (n,)."""
        rest = [read for read in reads if read.grey is None]
        grey = self._grey(rest) if rest else None
        if grey is None or len(rest) < len(reads):
            others = iter(() if grey is None else grey)
            grey = torch.stack([next(others) if read.grey is None else read.grey for read in reads])
        places = [read.number % self.together for read in reads]
        if len(places) < self.together:  # others have no image: theirs are black
            whole = grey.new_zeros(self.together, *grey.shape[1:])
            for place, views in zip(places, grey, strict=True):
                whole[place] = views
            grey = whole
        features = self.compiled.encode(grey.flatten(0, 1)).unflatten(0, (self.together, -1))
        if len(places) < self.together:  # one by one: a list of places would be sent there, and waited for
            features = torch.stack([features[place] for place in places])
        return checked_views(features, features if self.like is None else self.like)

    def _landed(self, entries: list[Encoded], good: Tensor | None, event: torch.cuda.Event | None) -> list[Encoded]:
        """A group once its features are there; what no method can use has become an error."""
        if event is not None:
            event.synchronize()  # the launches behind it keep the GPU busy
        usable = iter([] if good is None else good.tolist())
        return [entry if entry.features is None or next(usable) else _refused(entry) for entry in entries]


def _filled(entries: list[Encoded], features: Tensor) -> list[Encoded]:
    rows = iter(features)
    return [e if e.error else Encoded(e.index, e.source, next(rows)) for e in entries]


def _refused(entry: Encoded) -> Encoded:
    assert entry.features is not None
    return Encoded(entry.index, entry.source, None, refuse_views(entry.features[None], entry.index))


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    """The CUDA stream on which views are made and encoded; the same for all, since each keeps memory of its own."""
    return torch.cuda.Stream(device)


def _compiled(encoder: DeviceEncoder, rows: int) -> Compiled:
    """The encoder captured for so many rows, made once and kept with it."""
    from testtime.encoding.compiled import Compiled

    kept: dict[int, Compiled] = vars(encoder).setdefault("_compiled", {})
    if rows not in kept:
        kept[rows] = Compiled(encoder, rows)
    return kept[rows]

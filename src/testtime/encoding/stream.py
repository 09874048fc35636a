"""One encoding stream: from images to features, ahead of the caller.

    images -> read -> views -> encode -> unit features, in the order of the input

Images are read by threads. On a CPU, Pillow makes the views, and each thread encodes blocks of them by itself. On a
GPU, if Triton works and the encoder offers its tower (`types.DeviceEncoder`), views are made there, on a separate CUDA
stream; otherwise Pillow makes them, and one thread encodes them. An image that cannot be used is reported in its turn.

Memory is bounded: a file's header gives the size of its image, and a large one is decoded only once it fits the memory
budget (`DECODED`) beside the images in progress. So a stream takes that much plus one image, of at most
`reading.MAX_PIXELS`. Images are decoded at full size, however large: views are cropped from all of their pixels.

The features of an image depend on the image, the seed, its index, the encoder and the device alone: every encoded block
has a fixed shape, and an image's index decides its position in it. So a stream that is split, resumed or sharded gives
the same bits.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, count, groupby
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad

from testtime.encoding.budget import Full, MemoryBudget, Share
from testtime.encoding.compiled import Compiled
from testtime.encoding.encoders import needed
from testtime.images import reading
from testtime.images.diffusion import variation_views
from testtime.images.draw import Drawn, draw
from testtime.images.gpu_views import LONGEST, as_pixels, as_tensor, grey_views, works
from testtime.images.views import grey_levels, views
from testtime.machine.devices import step_device
from testtime.machine.threads import workers
from testtime.ops import checked_views, refuse_views, unit_views
from testtime.types import DeviceEncoder, Encoder, FeatureError, InputError, StoredImage, ViewPlan

ROWS = 8  # views per block that a CPU thread encodes
LAUNCH = 64  # views per launch on a GPU, or those of one image if it has more
MAX_IMAGES = 16  # most images per launch on a GPU
READERS = 4  # threads that read images for a GPU: more would only wait for the GIL
AHEAD = 2  # launches ahead of the caller
DECODED = 2**30  # bytes for the decoded images of a stream, or for one image if it takes more
PER_THREAD = 2**28  # bytes of it per thread, at least, so that photographs of up to 22 megapixels never wait
PINNED = 2**26  # bytes of an image up to which it is pinned: pinned memory is never returned

# a path or stored image, a Pillow image, pixels (H, W, 3) uint8; or features
Source: TypeAlias = str | StoredImage | Image.Image | Tensor | np.ndarray
FLOATS = (np.float16, np.float32, np.float64)
ACCEPTED = (
    "an image is a path, a Pillow image or pixels (H, W, 3) uint8; features are a tensor or a NumPy array of floats, "
    "(D,) or (V, D)"
)

_drawing = threading.Lock()  # a source of variations need not be thread-safe


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """One image of a stream: its features, or why there are none."""

    index: int  # its position in the input
    source: Any  # as given
    features: Tensor | None  # (V, D) unit rows
    error: InputError | None = None

    def usable(self) -> Tensor:
        """The features; raises the error if there are none."""
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
    """The features of each image, in order; `indices` are their positions in the input, by default from 0 on.

    They have the dtype and device of `like`, or else those of the encoder's output. Features given instead of images,
    (D,) or (V, D), are only normalised and checked. Pixels and features may be tensors or NumPy arrays.

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
    if _is_features(head[1]):
        for index, source in numbered:
            yield _unit(index, source, partial(as_rows, source), like)
    elif encoder is None:
        _check_image(head[1])
        raise InputError("This session has no encoder; give features, or make it with Session(..., encoder=).")
    elif plan.variations is None and on_device(encoder := needed(encoder), plan.augmix):
        yield from _Device(encoder, plan, like).run(numbered)
    else:
        yield from _on_cpu(encoder, numbered, plan, like)


def on_device(encoder: Encoder, augmix: bool) -> TypeGuard[DeviceEncoder]:
    """Whether views are made and encoded on the encoder's device: a GPU with Triton, if it offers its tower."""
    # not isinstance: from Python 3.12 on it misses what an encoder passes on from another with __getattr__
    offered = hasattr(encoder, "image_tower") and hasattr(encoder, "dtype")
    return offered and encoder.device.type == "cuda" and works(encoder.device, encoder.preprocess, augmix)


def _is_features(source: Any) -> bool:
    """Whether a source is features: numbers other than bytes, which are pixels."""
    return isinstance(source, Tensor | np.ndarray) and source.dtype not in (torch.uint8, np.uint8)


def _check_image(source: Any) -> None:
    """Refuse anything that is no image."""
    if _is_features(source) or not isinstance(source, str | StoredImage | Image.Image | Tensor | np.ndarray):
        what = f"an array of {source.dtype}" if hasattr(source, "dtype") else f"a {type(source).__name__}"
        raise InputError(f"Expected an image, got {what}: {ACCEPTED}.")


def as_rows(source: Any) -> Tensor:
    """Features (D,) or (V, D), a tensor or a NumPy array, as rows (V, D)."""
    if not _is_features(source):
        raise InputError(f"Expected features like those before, got a {type(source).__name__}: {ACCEPTED}.")
    if source.ndim not in (1, 2) or (isinstance(source, np.ndarray) and source.dtype.type not in FLOATS):
        raise FeatureError(f"Expected features, got {source.dtype} {tuple(source.shape)}: {ACCEPTED}.")
    rows = as_tensor(source) if isinstance(source, np.ndarray) else source
    return rows[None] if rows.ndim == 1 else rows


def _unit(index: int, source: Source, rows: Callable[[], Tensor], like: Tensor | None) -> Encoded:
    """The features that `rows` returns, normalised to unit rows; or the error, its own or that they are unusable."""
    try:
        features = rows()
        return Encoded(index, source, unit_views(features[None], features if like is None else like, index)[0])
    except InputError as error:
        return Encoded(index, source, None, error)


def as_image(source: Source, admit: Callable[[tuple[int, int]], object] | None = None) -> Image.Image:
    """A Pillow image of a source; `admit` is called with the size of a file's image before it is decoded."""
    _check_image(source)
    if isinstance(source, str | StoredImage):
        return reading.read_image(source, admit)
    return source if isinstance(source, Image.Image) else Image.fromarray(as_pixels(source).cpu().numpy())


# On the CPU


class _Threads:
    """Threads that make the views of images with Pillow, and encode them in blocks of a fixed shape."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder, self.home, self.count = encoder, step_device(encoder.device), torch.get_num_threads()
        self.pool, self.budget = workers(self.count, flush=True), MemoryBudget(max(DECODED, self.count * PER_THREAD))
        # on a GPU one thread encodes, in larger blocks: torch does not promise that several may use Apple's at once
        self.encoders, self.rows = (self.pool, ROWS) if encoder.device.type == "cpu" else (workers(1), LAUNCH)

    def ahead(self, plan: ViewPlan) -> int:
        """How many images to have in progress: enough for all threads, few enough for memory."""
        return 2 + 2 * self.count * ROWS // max(plan.total, ROWS)

    def start(self, index: int, source: Source, plan: ViewPlan) -> Future[list[Future[Tensor]]]:
        """The blocks of one image's features, once it is read and its views are made."""
        return self.pool.submit(self._prepare, index, source, plan)

    def _prepare(self, index: int, source: Source, plan: ViewPlan) -> list[Future[Tensor]]:
        share = Share(self.budget, wait=True)  # for images in progress, which never wait themselves
        try:
            with reading.image_errors(reading.source_name(source), MemoryError):
                pixels = _views(as_image(source, share.admit), self.encoder, plan, index)
        finally:
            share.keep(0)
        return [self.encoders.submit(self._encode, block) for block in pixels.split(self.rows)]

    def _encode(self, pixels: Tensor) -> Tensor:
        return self.encoder.encode_images(pixels).to(self.home)


def _joined(blocks: Future[list[Future[Tensor]]]) -> Tensor:
    return torch.cat([block.result() for block in blocks.result()])


def _on_cpu(
    encoder: Encoder, numbered: Iterator[tuple[int, Source]], plan: ViewPlan, like: Tensor | None
) -> Iterator[Encoded]:
    threads, waiting = _Threads(encoder), deque[tuple[int, Source, Future[list[Future[Tensor]]]]]()
    try:
        while True:
            while len(waiting) < threads.ahead(plan) and (entry := next(numbered, None)) is not None:
                waiting.append((*entry, threads.start(*entry, plan)))
            if not waiting:
                return
            index, source, blocks = waiting.popleft()
            yield _unit(index, source, partial(_joined, blocks), like)
    finally:
        for _, _, blocks in waiting:
            blocks.cancel()


def _views(image: Image.Image, encoder: Encoder, plan: ViewPlan, index: int) -> Tensor:
    """Pixels of all views (V, 3, H, W) of a Pillow image."""
    pixels = views(image, plan.count, encoder.preprocess, seed=plan.seed, index=index, augmix=plan.augmix)
    if plan.variations is None:
        return pixels
    with _drawing:
        return torch.cat([pixels, variation_views(encoder.preprocess, image, plan, index)])


# On a GPU


class _Read(NamedTuple):
    """One image as read by a thread: its pixels and random parameters, or its views if they are already made."""

    pixels: Tensor  # (H, W, 3) uint8
    drawn: Drawn
    share: Share  # of the memory budget
    grey: Tensor | None = None  # (V, 3, size, size)


@dataclass(eq=False)
class _Waiting:
    """One image that is read ahead, or its error."""

    index: int
    source: Source
    position: int  # in its launch
    future: Future[_Read]  # raises Full if there was no memory for it
    error: InputError | None = None


class _Launched(NamedTuple):
    """Images in flight: the features of a launch, by their position in it, and whether these are usable."""

    images: Sequence[_Waiting]
    features: Tensor  # (n, V, D)
    good: Tensor  # (n,)
    event: torch.cuda.Event | None = None  # recorded after them


class _Device:
    """Images read by threads; views made and encoded on the device, ahead of the caller."""

    def __init__(self, encoder: DeviceEncoder, plan: ViewPlan, like: Tensor | None) -> None:
        self.encoder, self.plan, self.like = encoder, plan, like
        self.together = max(1, min(MAX_IMAGES, LAUNCH // plan.count))  # images per launch
        self.compiled = _compiled_for(encoder, self.together * plan.count)
        self.side = _side_stream(encoder.device) if encoder.device.type == "cuda" else None
        threads = max(2, min(READERS, os.cpu_count() or 1))
        self.pool, self.budget = workers(threads), MemoryBudget(max(DECODED, threads * PER_THREAD))

    def run(self, numbered: Iterator[tuple[int, Source]]) -> Iterator[Encoded]:
        groups = (list(group) for _, group in groupby(numbered, lambda entry: entry[0] // self.together))
        waiting: deque[list[_Waiting]] = deque()
        launched: deque[_Launched] = deque()
        try:
            while True:
                wanted = AHEAD + max(1, 16 // self.together)
                while len(waiting) < wanted and (group := next(groups, None)) is not None:
                    waiting.append([_Waiting(*entry, entry[0] % self.together, self._start(*entry)) for entry in group])
                if waiting and len(launched) <= AHEAD:
                    launched.append(self.launch(waiting.popleft()))
                    for image in chain.from_iterable(waiting):
                        if image.future.done() and isinstance(image.future.exception(), Full):  # memory was freed
                            image.future = self._start(image.index, image.source)
                elif launched:
                    yield from self.finish(launched.popleft())
                else:
                    return
        finally:
            for image in chain.from_iterable(waiting):
                image.future.cancel()

    def _start(self, index: int, source: Source, now: bool = False) -> Future[_Read]:
        """An image that is being read; raises Full if there is no memory for it yet, unless it is needed `now`.

        Threads never wait for memory: only the caller frees it, by taking features, and may do other things first.
        """
        return self.pool.submit(self.read, index, source, self.plan, force=now)

    def read(self, index: int, source: Source, plan: ViewPlan, **take: bool) -> _Read:
        """An image read; `take` are options of `MemoryBudget.take`."""
        share, preprocess = Share(self.budget, **take), self.encoder.preprocess
        try:
            with reading.image_errors(reading.source_name(source), MemoryError):
                _check_image(source)
                pixels = as_pixels(source if isinstance(source, Tensor | np.ndarray) else as_image(source, share.admit))
                share.keep(pixels.nbytes)  # decoded, it takes less
                extent = pixels.shape[1], pixels.shape[0]
                drawn = draw(extent, plan.count, preprocess.size, seed=plan.seed, index=index, augmix=plan.augmix)
                if max(extent) > LONGEST:
                    return _Read(pixels, drawn, share, grey_levels(as_image(pixels), drawn, preprocess))
                if self.side and not pixels.is_cuda and pixels.nbytes <= PINNED:
                    pixels = pixels.pin_memory()
                return _Read(pixels, drawn, share)
        except BaseException:
            share.keep(0)
            raise

    def launch(self, group: Sequence[_Waiting]) -> _Launched:
        """A group launched through the encoder, on a side stream if on a GPU."""
        if self.side is None:
            return _Launched(group, *self._features(self._views(group)))
        caller = torch.cuda.current_stream(self.encoder.device)
        self.side.wait_stream(caller)
        with torch.cuda.stream(self.side):
            features, good = self._features(self._views(group))
            good = good.to("cpu", non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        features.record_stream(caller)  # its memory must not be reused before the caller is done with it
        return _Launched(group, features, good, event)

    def _views(self, group: Sequence[_Waiting]) -> Tensor | None:
        """Views (n, V, 3, size, size) of a group by position in it, black where an image is missing; None if all are.

        Their budget is released.
        """
        reads, made = dict[int, _Read](), dict[int, Tensor]()

        def make() -> Tensor:
            pixels, drawn = [read.pixels for read in reads.values()], [read.drawn for read in reads.values()]
            return grey_views(pixels, drawn, self.encoder.preprocess)

        for image in group:
            try:
                try:
                    read = image.future.result()
                except Full:  # those before it are done, so read it now
                    read = self._start(image.index, image.source, now=True).result()
            except InputError as error:
                image.error = error
                continue
            if read.grey is not None:
                made[image.position] = read.grey.to(self.encoder.device)
            else:
                reads[image.position] = read._replace(pixels=read.pixels.to(self.encoder.device, non_blocking=True))
                if read.pixels.nbytes > PINNED:  # at once: several such images would fill the device
                    made.update(zip(reads, make(), strict=True))
                    reads.clear()
            read.share.keep(0)
        if reads and not made and list(reads) == list(range(len(reads))):
            return make()  # the usual case
        if reads:
            made.update(zip(reads, make(), strict=True))
        if not made:
            return None
        black = torch.zeros_like(next(iter(made.values())))
        return torch.stack([made.get(position, black) for position in range(max(made) + 1)])

    def _features(self, grey: Tensor | None) -> tuple[Tensor, Tensor]:
        """Unit features (n, V, D) of a launch, and whether they are usable: (n,)."""
        if grey is None:
            return torch.empty(0, device=self.encoder.device), torch.empty(0)
        grey = pad(grey, [0] * 8 + [0, self.together - len(grey)])  # black where images are missing at the end
        features = self.compiled.encode(grey.flatten(0, 1)).unflatten(0, (self.together, -1))
        return checked_views(features, features if self.like is None else self.like)

    def finish(self, launched: _Launched) -> Iterator[Encoded]:
        """A group once its features have arrived; unusable features become errors."""
        if launched.event is not None:
            launched.event.synchronize()  # later launches keep the GPU busy
        good = launched.good.tolist()
        for image in launched.images:
            if image.error is None and not good[image.position]:
                image.error = refuse_views(launched.features[image.position, None], image.index)
            features = launched.features[image.position] if image.error is None else None
            yield Encoded(image.index, image.source, features, image.error)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The CUDA stream for making and encoding views; shared, since each stream has its own memory pool."""
    return torch.cuda.Stream(device)


def _compiled_for(encoder: DeviceEncoder, rows: int) -> Compiled:
    """The encoder captured for a number of rows, cached on the encoder."""
    kept: dict[int, Compiled] = vars(encoder).setdefault("_compiled", {})
    if rows not in kept:
        kept[rows] = Compiled(encoder, rows)
    return kept[rows]

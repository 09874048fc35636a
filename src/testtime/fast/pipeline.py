"""From files to answers with every part at work: images are read by threads, views made and encoded ahead on a
stream of their own, and answers fetched while the next image is adapted to.

What one image gives depends on the image, the seed and its index alone, and images are adapted to in order, so
the answers are those of the plain loop. An image that cannot be used is reported in its turn.
"""

from __future__ import annotations

import io
import os
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from testtime.fast.draw import Drawn, draw
from testtime.fast.encoder import FastEncoder
from testtime.fast.graph import Runner
from testtime.fast.views import as_picture, grey_views
from testtime.images import MAX_PIXELS, read_image
from testtime.types import Encoder, ImageError, InputError, StoredImage
from testtime.views import views as make_views

AHEAD = 2  # groups encoded before they are asked for
EXIF_ORIENTATION = 0x0112

Source = Any  # a path or what else holds an image's bytes, a Pillow image, or pixels (H, W, 3) uint8


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """One image of a stream: its features, or why there are none."""

    index: int
    source: Source
    features: Tensor | None  # (V, D) unit rows on the encoder's device
    error: InputError | None


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """One image of a stream: its logits, or why there are none."""

    index: int
    source: Source
    logits: Tensor | None  # (C,) on the CPU
    error: InputError | None


class Prepared(NamedTuple):
    """What a thread has made of one image."""

    source: Source
    number: int  # that its views are drawn with
    pixels: Tensor  # (H, W, 3) uint8, or a JPEG file's bytes (n,), or views (V, 3, size, size) that Pillow has made
    sampled: Drawn | None  # None where there is nothing left to draw


def stream(
    encoder: Encoder,
    images: Iterable[Source],
    *,
    views: int = 1,
    seed: int = 0,
    augmix: bool = False,
    batch: int = 4,
    first: int = 0,
    gaps: bool = True,
    workers: int | None = None,
    decode: Literal["pillow", "torchvision"] = "pillow",
) -> Iterator[Encoded]:
    """The features of each image, in order, `batch` images encoded together; the first has index `first`.

    With `gaps`, an image that cannot be used keeps its index, as in `testtime.encode`; without, the next image
    takes it, as in `Session.run`. Views are those of `testtime.views`, made on the GPU where `encoder` is a
    FastEncoder on one. With `decode="torchvision"` JPEG files are decoded there too, and colours differ from
    Pillow's by a few grey levels.
    """
    if batch < 1:
        raise InputError(f"batch={batch}: at least one image at a time.")
    if decode not in ("pillow", "torchvision"):
        raise InputError(f"decode={decode!r}: must be 'pillow' or 'torchvision'.")
    work = _Work(encoder, views, seed, augmix, decode, None if gaps else first)
    with ThreadPoolExecutor(workers or min(16, os.cpu_count() or 1), "testtime-read") as pool:
        numbered = enumerate(images, start=first)
        reading: deque[list[tuple[int, Source, Future[Prepared]]]] = deque()
        encoded: deque[tuple[list[Encoded], torch.cuda.Event | None]] = deque()
        try:
            while True:
                while len(reading) <= AHEAD and (group := list(islice(numbered, batch))):
                    reading.append([(i, source, pool.submit(work.prepare, i, source)) for i, source in group])
                if reading and len(encoded) <= work.ahead:
                    encoded.append(work.encode(reading.popleft()))
                elif encoded:
                    ready, event = encoded.popleft()
                    if event is not None:
                        event.wait()  # the stream that adapts waits for the one that encodes; nobody else does
                    yield from ready
                else:
                    return
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def classify(runner: Runner, encoder: Encoder, images: Iterable[Source], **options: Any) -> Iterator[Answer]:
    """The answer to each image, in order, adapting on the way; `options` are those of `stream`.

    `runner` holds the state: `runner.load` sets it before, `runner.state` reads it after.
    """
    batch = options.setdefault("batch", 4)
    source = stream(encoder, images, **options)
    waiting: deque[tuple[list[Encoded], Tensor | None, torch.cuda.Event | None]] = deque()
    for group in iter(lambda: list(islice(source, batch)), []):
        waiting.append((group, *_adapt(runner, group)))
        if len(waiting) > 1:  # the answers of the group before have had time to arrive
            yield from _answers(*waiting.popleft())
    for late in waiting:
        yield from _answers(*late)


def _adapt(runner: Runner, group: Sequence[Encoded]) -> tuple[Tensor | None, torch.cuda.Event | None]:
    """Logits (n, C) of the usable images of a group, on their way to the CPU, and the event of their arrival."""
    features = [entry.features for entry in group if entry.features is not None]
    if not features:
        return None, None
    logits = runner.run(torch.stack(features).to(runner.task.text))
    if not logits.is_cuda:
        return logits, None
    host = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=True)
    host.copy_(logits, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event


def _answers(group: Sequence[Encoded], logits: Tensor | None, event: torch.cuda.Event | None) -> Iterator[Answer]:
    if event is not None:
        event.synchronize()
    rows = iter(() if logits is None else logits)
    for entry in group:
        found = None if entry.features is None else next(rows).clone()
        yield Answer(entry.index, entry.source, found, entry.error)


class _Work:
    """What is done to each image and to each group, with the settings of one stream."""

    def __init__(
        self, encoder: Encoder, views: int, seed: int, augmix: bool, decode: str, following: int | None
    ) -> None:
        self.encoder, self.views, self.seed, self.augmix = encoder, views, seed, augmix
        self.following = following  # the index of the next usable image, where there are to be no gaps
        self.device = getattr(encoder, "device", torch.device("cpu"))
        self.matrices = isinstance(encoder, FastEncoder)
        self.decodes = decode == "torchvision" and self.matrices
        self.side = _side(self.device) if self.device.type == "cuda" else None
        self.ahead = AHEAD if self.side is not None else 0  # where nothing runs by itself, nothing is gained

    def prepare(self, index: int, source: Source) -> Prepared:
        """Read one image and draw its views; runs in a thread."""
        looks = self.encoder.preprocess
        drawn = partial(draw, seed=self.seed, index=index, augmix=self.augmix)
        if self.decodes and (found := _plain_jpeg(source)) is not None:
            content, extent = found
            return Prepared(source, index, content, drawn(extent, self.views, looks.size))
        image = read_image(source) if isinstance(source, str | StoredImage) else source
        if not self.matrices:
            if isinstance(image, Tensor):
                image = Image.fromarray(as_picture(image).cpu().numpy())
            pixels = make_views(image, self.views, looks, seed=self.seed, index=index, augmix=self.augmix)
            return Prepared(source, index, pixels, None)
        picture = as_picture(image)
        if self.side is not None and not picture.is_cuda:
            picture = picture.pin_memory()
        extent = picture.shape[1], picture.shape[0]
        return Prepared(source, index, picture, drawn(extent, self.views, looks.size))

    def encode(
        self, group: Sequence[tuple[int, Source, Future[Prepared]]]
    ) -> tuple[list[Encoded], torch.cuda.Event | None]:
        """The features of a group, launched, and the event of their completion."""
        outcomes = [_outcome(future) for _, _, future in group]
        event = None
        if self.side is None:
            features = self._features(outcomes)
        else:
            caller = torch.cuda.current_stream(self.device)
            self.side.wait_stream(caller)
            with torch.cuda.stream(self.side):
                features = self._features(outcomes)
                event = torch.cuda.Event()
                event.record()
            for rows in features.values():
                rows.record_stream(caller)  # its memory is not to be used again before the caller is done with it
        entries = []
        for row, (index, source, _) in enumerate(group):
            outcome = outcomes[row]
            if isinstance(outcome, InputError):
                entries.append(Encoded(index, source, None, outcome))
            else:
                entries.append(Encoded(outcome.number, source, features[row], None))
        return entries, event

    def _features(self, outcomes: list[Prepared | InputError]) -> dict[int, Tensor]:
        """Features (V, D) by row of the group; what turns out to be damaged becomes an error in `outcomes`."""
        pictures = self._pictures(outcomes) if self.matrices else {}
        usable = {row: made for row, made in enumerate(outcomes) if isinstance(made, Prepared)}
        if self.following is not None:
            for row, made in usable.items():
                if made.number != self.following:  # an image before it failed after this one's views were drawn
                    usable[row] = outcomes[row] = self.prepare(self.following, made.source)
                self.following += 1
        if not usable:
            return {}
        if isinstance(self.encoder, FastEncoder):
            grey = grey_views(
                [pictures[row] for row in usable],
                [made.sampled for made in usable.values() if made.sampled is not None],
                self.encoder.preprocess,
            )
            features = self.encoder.encode_grey(grey.flatten(0, 1))
        else:
            features = self.encoder.encode_images(torch.cat([made.pixels for made in usable.values()]))
        return dict(zip(usable, features.unflatten(0, (-1, self.views)), strict=True))

    def _pictures(self, outcomes: list[Prepared | InputError]) -> dict[int, Tensor]:
        """Pixels (H, W, 3) on the device, by row of the group."""
        files = [made for made in outcomes if isinstance(made, Prepared) and made.pixels.ndim == 1]
        decoded = iter(_decode(files, self.device))
        pictures: dict[int, Tensor] = {}
        for row, made in enumerate(outcomes):
            if isinstance(made, InputError):
                continue
            picture = next(decoded) if made.pixels.ndim == 1 else made.pixels
            if isinstance(picture, InputError):
                outcomes[row] = picture
            else:
                pictures[row] = picture.to(self.device, non_blocking=True)
        return pictures


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    """The stream on which views are made and encoded; the same for all, since each keeps memory of its own."""
    return torch.cuda.Stream(device)


def _outcome(future: Future[Prepared]) -> Prepared | InputError:
    try:
        return future.result()
    except InputError as error:
        return error


def _plain_jpeg(source: Source) -> tuple[Tensor, tuple[int, int]] | None:
    """The bytes and the extent of a colour JPEG file that stands upright; None for everything else."""
    if not isinstance(source, str | StoredImage):
        return None
    try:
        content = Path(source).read_bytes() if isinstance(source, str) else source.read_bytes()
        with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
            upright = image.getexif().get(EXIF_ORIENTATION, 1) == 1
            if image.mode != "RGB" or not upright or image.width * image.height > MAX_PIXELS:
                return None
            return torch.frombuffer(bytearray(content), dtype=torch.uint8), image.size
    except Exception:  # whatever it is, reading it the plain way will say so properly
        return None


def _decode(files: list[Prepared], device: torch.device) -> list[Tensor | InputError]:
    """Pixels (H, W, 3) of JPEG files, decoded on the device; one by one and by Pillow where that fails."""
    if not files:
        return []
    from torchvision.io import ImageReadMode, decode_jpeg

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # newer ones point to torchcodec, a further package
            decoded = decode_jpeg([file.pixels for file in files], ImageReadMode.RGB, device=device)
        return [pixels.permute(1, 2, 0) for pixels in decoded]
    except RuntimeError:
        return [_by_pillow(file.source) for file in files]


def _by_pillow(source: Source) -> Tensor | InputError:
    try:
        return as_picture(read_image(source))
    except ImageError as error:
        return error

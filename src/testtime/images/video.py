"""Videos: frames at regular intervals, each an image with a stable name. Read with PyAV, which is an extra.

A video's packets are listed once, without decoding. A frame is decoded from the keyframe before it, always from the
same one, so its pixels depend on nothing that was read earlier. Frames read in order share one pass over their video.
"""

from __future__ import annotations

import atexit
import re
import threading
from array import array
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from testtime.files import opened
from testtime.files.identity import stamp
from testtime.images import formats
from testtime.images.reading import image_errors, source_name
from testtime.types import ImageError, InputError, StoredImage

EVERY = "1s"
MAX_FRAME_PIXELS = 40_000_000  # of a video, where a decoder holds up to 16 other frames; 8K has 35 million
MAX_PACKETS = 24 * 3600 * 60  # a day of 60 frames per second
OPEN_VIDEOS = 4  # kept open to read on: a stream reads the end of one and the start of the next at the same time

# FFmpeg reads far more, also lists of other files; nothing else is opened, whatever a file is called
CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi"
CODECS = "h264,hevc,vp8,vp9,libdav1d,av1,mpeg4,mjpeg,mpeg1video,mpeg2video,h263,prores,dnxhd,theora,ffv1,rawvideo"
LIMITS = {"format_whitelist": CONTAINERS, "codec_whitelist": CODECS, "max_pixels": str(MAX_FRAME_PIXELS)}

INTERVAL = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|f)")
FRAME_NAME = re.compile(r"(.+)@(\d{2,9}):(\d\d):(\d\d)\.(\d{3})", re.DOTALL)


class Every(NamedTuple):
    """The interval between two frames, in milliseconds or in frames."""

    step: int
    frames: bool = False


def parse_every(text: str) -> Every:
    """An interval as written on the command line.

    >>> parse_every("0.5s"), parse_every("10f")
    (Every(step=500, frames=False), Every(step=10, frames=True))
    """
    if match := INTERVAL.fullmatch(text.strip().lower()):
        number, unit = match.groups()
        step = float(number) * (1000 if unit == "s" else 1)
        if step >= 1 and step.is_integer():
            return Every(int(step), unit == "f")
    raise InputError(
        f"--every {text}: write it as 1s, 0.5s or 500ms, in whole milliseconds, or as 10f for every tenth frame."
    )


class VideoFrame(NamedTuple):
    """A frame of a video. It is decoded each time it is read, so any number may be held."""

    file: Path
    milliseconds: int  # since the first frame
    pts: int  # the same in the video's own unit: the timestamp by which it is found
    key: int  # timestamp of the keyframe from which it is decoded
    seek: int  # where to look for that keyframe
    width: int
    height: int

    @property
    def extent(self) -> tuple[int, int]:
        """Width and height, known before anything is decoded."""
        return self.width, self.height

    def read_bytes(self) -> bytes:
        """The frame as a PPM file, in RGB and upright."""
        return _reader(self.file, stamp(self.file)).read(self)

    def __str__(self) -> str:
        return f"{self.file}@{_clock(self.milliseconds)}"


class BadVideo(NamedTuple):
    """A video without any frame to read: an image that gives the reason when it is read."""

    file: Path
    reason: str

    def read_bytes(self) -> bytes:
        raise ImageError(self.reason)

    def __str__(self) -> str:
        return str(self.file)


def expand(path: Path | StoredImage, every: Every) -> list[Path | StoredImage]:
    """The frames of a video; anything else is itself. A video that cannot be read is one bad image."""
    if not formats.is_video(path):
        return [path]
    file = Path(str(path))
    try:
        return list(list_frames(file, every))
    except ImageError as error:
        return [BadVideo(file, str(error))]


def list_frames(file: Path, every: Every) -> list[VideoFrame]:
    """The first frame at or after each multiple of the interval, or every n-th frame. Nothing is decoded.

    Frames within one millisecond count as one, since a name has whole milliseconds.
    """
    found, due = [], 0
    for number, frame in enumerate(_frames(file)):
        if every.frames and number % every.step == 0:
            found.append(frame)
        elif not every.frames and frame.milliseconds >= due:
            found.append(frame)
            due = (frame.milliseconds // every.step + 1) * every.step
    return found


def frame_named(name: str) -> VideoFrame | None:
    """The frame that has this name, such as `clip.mp4@00:00:12.000`; None if it is not the name of a frame."""
    match = FRAME_NAME.fullmatch(name)
    if match is None or not formats.is_video(match[1]):
        return None
    hours, minutes, seconds, rest = map(int, match.groups()[1:])
    wanted = ((hours * 60 + minutes) * 60 + seconds) * 1000 + rest
    file = Path(match[1])
    frame = _by_time(file, stamp(file)).get(wanted)
    if frame is None:
        raise ImageError(f"{source_name(name)}: the video has no such frame.")
    return frame


@lru_cache(maxsize=OPEN_VIDEOS)
def _by_time(file: Path, stamp: str) -> dict[int, VideoFrame]:
    return {frame.milliseconds: frame for frame in _frames(file)}


def _frames(file: Path) -> Iterator[VideoFrame]:
    """All frames of a video in the order of their time, by its packets; the first of each millisecond."""
    shown, keys = array("q"), dict[int, int]()
    with image_errors(source_name(str(file))), _open_video(file) as (container, stream):
        width, height = stream.codec_context.width, stream.codec_context.height
        unit = stream.time_base
        for number, packet in enumerate(_packets(container, stream)):
            if number >= MAX_PACKETS:
                raise ImageError(f"{source_name(str(file))}: has more than {MAX_PACKETS:,} frames; split it first.")
            if packet.is_keyframe:
                keys[packet.pts] = packet.pts if packet.dts is None else min(packet.pts, packet.dts)
            if not packet.is_discard:  # outside what an edit shows: decoded, but not shown
                shown.append(packet.pts)
    starts = sorted(keys)
    times = [pts for pts in sorted(shown) if starts and pts >= starts[0]]  # those before cannot be decoded
    if not times:
        raise ImageError(f"{source_name(str(file))}: is a video without frames.")
    before = -1
    for pts in times:
        milliseconds = (pts - times[0]) * 1000 * unit.numerator // unit.denominator
        if milliseconds > before:
            before = milliseconds
            key = starts[bisect_right(starts, pts) - 1]
            yield VideoFrame(file, milliseconds, pts, key, keys[key], width, height)


@contextmanager
def _open_video(file: Path) -> Iterator[tuple[Any, Any]]:
    """A container and its video stream, ready to demux; closed at the end."""
    try:
        import av
    except ImportError:
        raise ImageError(f"{source_name(str(file))}: is a video, which needs PyAV: {formats.VIDEO_COMMAND}.") from None
    with ExitStack() as stack:
        content = stack.enter_context(opened(file))  # and not a name, in which FFmpeg would look for protocols
        try:
            container = stack.enter_context(av.open(content, "r", options=LIMITS, metadata_errors="replace"))
        except av.FFmpegError as error:
            raise ImageError(
                f"{source_name(str(file))}: is empty, damaged, cut short or no video in a format that is read "
                f"({error.strerror})."
            ) from error
        container.flags |= av.container.Flags.gen_pts.value  # AVI stores none
        stream = container.streams.best("video")
        if stream is None:
            raise ImageError(f"{source_name(str(file))}: is a video without frames.")
        context = stream.codec_context
        if context.name not in CODECS.split(","):
            raise ImageError(f"{source_name(str(file))}: is encoded as {context.name}, which is not read.")
        if context.width * context.height > MAX_FRAME_PIXELS:
            raise ImageError(
                f"{source_name(str(file))}: frames have more than {MAX_FRAME_PIXELS:,} pixels; scale them down first."
            )
        context.options = {"max_pixels": str(MAX_FRAME_PIXELS)}
        context.thread_count = 1  # with more, a damaged frame has other pixels each time
        for other in container.streams:
            if other.index != stream.index:
                other.discard = av.stream.Discard.all
        yield container, stream


def _packets(container: Any, stream: Any) -> Iterator[Any]:
    """The packets of a stream that have a timestamp; a file that breaks off just ends."""
    import av

    packets = container.demux(stream)
    try:
        yield from (packet for packet in packets if packet.pts is not None)
    except (av.FFmpegError, EOFError):
        return


class _Reader:
    """An open video, read by one thread at a time."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.starts = 0  # how often decoding began at a keyframe
        self._changed, self._busy = threading.Condition(), False
        self._waiting: list[int] = []  # timestamps that threads wait for
        self._opened: Any = None  # what closes the container
        self.close()

    def read(self, wanted: VideoFrame) -> bytes:
        """A frame as a PPM file."""
        with self._turn(wanted.pts):
            try:
                with image_errors(source_name(wanted)):
                    return _ppm(self._find(wanted))
            except BaseException:
                self.close()
                raise

    @contextmanager
    def _turn(self, pts: int) -> Iterator[None]:
        """One thread at a time, the earliest frame first: going back means decoding again."""
        with self._changed:
            self._waiting.append(pts)
            try:
                self._changed.wait_for(lambda: not self._busy and pts == min(self._waiting))
            finally:
                self._waiting.remove(pts)
            self._busy = True
        try:
            yield
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def close(self) -> None:
        """Close the file and forget the position in it; the next frame opens it again."""
        self._source: tuple[Any, Any] | None = None  # container and stream
        self._packets: Iterator[Any] = iter(())
        self._ready: deque[Any] = deque()  # decoded frames in the order they are shown, still to be looked at
        self._frame: Any = None  # the last one looked at
        self._key: int | None = None  # the keyframe that decoding began at
        self._asked = 0  # the timestamp asked for last
        if self._opened is not None:
            closing, self._opened = self._opened, None
            closing.__exit__(None, None, None)

    def __del__(self) -> None:
        self.close()

    def _find(self, wanted: VideoFrame) -> Any:
        """The first frame at or after a timestamp that is decoded from the keyframe before it.

        It is the wanted one, unless its packet shows nothing.
        """
        if self._key != wanted.key or wanted.pts < self._asked:
            self._start(wanted)
        self._asked = wanted.pts
        while self._frame is None or self._frame.pts < wanted.pts:
            self._frame = self._next(wanted)
        if self._frame.is_corrupt:
            raise ImageError(f"{source_name(wanted)}: the frame is damaged.")
        return self._frame

    def _start(self, wanted: VideoFrame) -> None:
        """Move to the packet of the keyframe from which a frame is decoded."""
        self.starts += 1
        for seek in (True, False):  # in a damaged file, a seek may end anywhere: then from the beginning
            self.close()  # a decoder that is reused after a damaged frame may give other pixels
            self._opened = _open_video(self.file)
            self._source = container, stream = self._opened.__enter__()
            if seek:
                container.seek(wanted.seek, stream=stream)
            self._packets = _packets(container, stream)
            for packet in self._packets:
                if packet.is_keyframe and packet.pts == wanted.key:
                    self._key = wanted.key
                    self._decode(packet, wanted)
                    return
                if packet.is_keyframe and packet.pts > wanted.key:
                    break
        raise ImageError(f"{source_name(wanted)}: the frame is no longer there; was the video replaced?")

    def _next(self, wanted: VideoFrame) -> Any:
        """The next frame to be shown."""
        while not self._ready:
            packet = next(self._packets, None)
            if packet is not None:
                self._decode(packet, wanted)
            elif not self._drain():
                raise ImageError(f"{source_name(wanted)}: the frame is damaged, or the video ends before it.")
        return self._ready.popleft()

    def _decode(self, packet: Any, wanted: VideoFrame) -> None:
        """Decode one packet; after a damaged one, only what came before it."""
        import av

        context = packet.stream.codec_context
        # a frame that is neither wanted nor needed for others is not decoded
        context.skip_frame = "NONREF" if packet.pts < wanted.pts else "DEFAULT"
        try:
            self._ready.extend(frame for frame in context.decode(packet) if frame.pts is not None)
        except av.FFmpegError:
            self._packets = iter(())

    def _drain(self) -> bool:
        """Take the frames that the decoder still holds; False if there are none."""
        import av

        if self._source is None:
            return False
        try:
            self._ready.extend(f for f in self._source[1].codec_context.decode(None) if f.pts is not None)
        except (av.FFmpegError, EOFError):  # drained already
            pass
        return bool(self._ready)


@lru_cache(maxsize=OPEN_VIDEOS)
def _reader(file: Path, stamp: str) -> _Reader:
    return _Reader(file)


atexit.register(_reader.cache_clear)  # while there is still something to close them with


def _ppm(frame: Any) -> bytes:
    """A decoded frame as a PPM file, rotated as it is to be shown."""
    if frame.width * frame.height > MAX_FRAME_PIXELS:
        raise ImageError(f"The frame has more than {MAX_FRAME_PIXELS:,} pixels.")
    pixels = np.rot90(frame.reformat(format="rgb24", threads=1).to_ndarray(), round(frame.rotation / 90) % 4)
    height, width = pixels.shape[:2]
    return b"P6 %d %d 255\n" % (width, height) + pixels.tobytes()


def _clock(milliseconds: int) -> str:
    seconds, rest = divmod(milliseconds, 1000)
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{rest:03}"


def describe(images: Iterable[object], every: str) -> tuple[str, ...]:
    """A note on how many frames of how many videos are among the images, if any."""
    files = Counter(image.file for image in images if isinstance(image, VideoFrame))
    if not files:
        return ()
    frames, videos = files.total(), len(files)
    step = f"of {parse_every(every).step}" if parse_every(every).frames else f"every {every.strip()}"
    return (f"{frames:,} frame{'s'[: frames > 1]} of {videos:,} video{'s'[: videos > 1]}, one {step}",)


def frames_of(paths: Iterable[Path | StoredImage], every: str = EVERY) -> Iterator[Path | StoredImage]:
    """Images in their order, with the frames of a video in its place."""
    interval = parse_every(every)
    return (image for path in paths for image in expand(path, interval))

"""Damaged videos: each frame is an image or an ImageError of one line, and the same in whatever order frames are read.

python tests/fuzz_videos.py --cases 600 --seed 0
"""

from __future__ import annotations

import hashlib
import random
import tempfile
from collections import Counter
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import fuzz_images
import numpy as np

from testtime.images import video
from testtime.images.reading import read_image
from testtime.types import ImageError

CODECS = {"mp4": "libx264", "mov": "mpeg4", "mkv": "libx264", "avi": "mpeg4", "webm": "libvpx-vp9"}
EVERY = video.Every(5, frames=True)


def write_video(
    path: Path, codec: str = "libx264", times: Any = range(40), rate: int = 25, size: tuple[int, int] = (64, 48),
    gop: int = 12, rotation: int = 0,
) -> Path:  # fmt: skip
    """A video of moving colours; `times` are those of its frames, in units of 1 / rate seconds."""
    import av

    width, height = size
    rows, columns = np.mgrid[:height, :width]
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.gop_size = gop
        if rotation:
            stream.set_display_rotation(rotation)
        for number, time in enumerate(times):
            colours = [columns * 3 + number * 5, rows * 3 + number * 7, rows + columns + number * 40]
            frame = av.VideoFrame.from_ndarray((np.stack(colours, -1) % 256).astype(np.uint8), format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


@cache
def whole(suffix: str) -> bytes:
    """A small video."""
    with tempfile.TemporaryDirectory() as folder:
        return write_video(Path(folder) / f"whole.{suffix}", CODECS[suffix]).read_bytes()


def outcome(frame: video.VideoFrame) -> str:
    """A digest of the frame's pixels, or its error."""
    try:
        image = read_image(frame)
    except ImageError as error:
        assert "\n" not in str(error) and str(error).startswith(str(frame)), str(error)
        return str(error)
    assert image.width * image.height <= video.MAX_FRAME_PIXELS
    return hashlib.sha256(image.tobytes()).hexdigest()


def outcomes(file: Path, dice: random.Random) -> str:
    """The outcome of one file; the same for every order of its frames."""
    try:
        frames = video.list_frames(file, EVERY)
    except ImageError as error:
        assert "\n" not in str(error), str(error)
        return "refused"
    video._reader.cache_clear()
    in_order = [outcome(frame) for frame in frames]
    video._reader.cache_clear()
    order = dice.sample(range(len(frames)), len(frames))
    found = {index: outcome(frames[index]) for index in order}
    assert [found[index] for index in range(len(frames))] == in_order, in_order
    bad = sum(": " in each for each in in_order)
    return "every frame" if not bad else "no frame" if bad == len(frames) else "some frames"


def run(cases: int, seed: int) -> Counter[str]:
    """How many files had which outcome; any other error is raised with its case number and seed."""
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(cases):
            dice = random.Random(f"{seed} {number}")
            suffix = dice.choice(list(CODECS))
            file = Path(folder) / f"{number}.{suffix}"
            data = whole(suffix)
            start = dice.choice((0, 0, len(data) // 8, len(data) // 2))  # mostly the header, or only what follows
            file.write_bytes(data[:start] + fuzz_images.damaged(data[start:], dice))
            try:
                found[f"{suffix} {outcomes(file, dice)}"] += 1
            except Exception as error:
                error.add_note(f"case {number} of seed {seed}: {suffix}")
                raise
            file.unlink()
    return found


if __name__ == "__main__":
    fuzz_images.main(run, __doc__)

"""A process that decodes images for `testtime.serve.decoding`.

It reads image files from its standard input, a socket on which it also answers, and writes their pixels into memory
that it shares with its parent. It ends when its parent does: then the socket is at its end. A file that exploits a
decoder finds a process with no torch, no files, no environment, and little memory and time.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from mmap import mmap
from pathlib import Path

from PIL import Image

from testtime.errors import ImageError
from testtime.images import reading
from testtime.images.thumbnail import thumbnail_jpeg

REQUEST = struct.Struct("<QI")  # bytes of the file, which follows; pixels a side of the thumbnail, 0 for none
ANSWER = struct.Struct("<?III")  # whether there is an image; its width and height; bytes that follow
READY = b"\1"  # sent once, before the first answer
MAX_MESSAGE = 2**24  # bytes that may follow an answer: a thumbnail, or the text of an error

STRIP = 2**20  # bytes of pixels copied at a time: a second copy of a large image would double its memory
FILES = 32  # open at a time: some decoders are libraries that are loaded when first used


def main(arguments: Sequence[str]) -> None:
    """Answer requests until there are no more: descriptor of the shared memory, most pixels, memory, seconds."""
    shared, max_pixels, memory = map(int, arguments[:3])
    seconds = float(arguments[3])
    link, pixels = socket.socket(fileno=0), mmap(shared, 3 * max_pixels)
    os.close(shared)
    reading.MAX_PIXELS = max_pixels
    Image.init()  # loads Pillow's decoders
    restrict(memory)
    link.sendall(READY)
    os.dup2(1, 2)  # from here on, what is printed would be the words of a stranger's file
    requests = link.makefile("rb")
    while len(head := requests.read(REQUEST.size)) == REQUEST.size:
        size, side = REQUEST.unpack(head)
        data = requests.read(size)
        limit_time(seconds + 1)  # the parent's own limit comes first
        link.sendall(answer(data, side, pixels, memory))
        limit_time(0)


def restrict(memory: int) -> None:
    """Refuse this process memory beyond what it has plus `memory` bytes, core dumps, and files to write."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    allowed = pages * resource.getpagesize() + memory
    for limit, value in (
        (resource.RLIMIT_AS, allowed),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, FILES),
    ):
        most = resource.getrlimit(limit)[1]
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (value, value))


def limit_time(seconds: float) -> None:
    """End this process after so many seconds, of any clock and of a processor's; 0 lifts the limit."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    wanted = math.ceil(time.process_time() + seconds) + 1 if seconds else most
    resource.setrlimit(resource.RLIMIT_CPU, (wanted, most))


def answer(data: bytes, side: int, pixels: mmap, memory: int) -> bytes:
    """What to send for one image file, after its pixels are written."""
    try:
        image = reading.read_image(data)
        with reading.image_errors(reading.source_name(data)):
            write(image, pixels)
            small = thumbnail_jpeg(image, side) if side else b""
    except ImageError as error:
        limit = f" (limit: {memory:,} bytes)" if isinstance(error.__cause__, MemoryError) else ""
        text = f"{error}{limit}".encode()[:MAX_MESSAGE]
        return ANSWER.pack(False, 0, 0, len(text)) + text
    return ANSWER.pack(True, *image.size, len(small)) + small


def write(image: Image.Image, pixels: mmap) -> None:
    """Copy the pixels of an RGB image, row by row without gaps."""
    position, rows = 0, max(1, STRIP // (3 * image.width))
    for top in range(0, image.height, rows):
        bottom = min(top + rows, image.height)
        strip = image if rows >= image.height else image.crop((0, top, image.width, bottom))
        data = strip.tobytes()
        pixels[position : position + len(data)] = data
        position += len(data)


if __name__ == "__main__":
    main(sys.argv[1:])

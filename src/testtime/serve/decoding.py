"""Images of strangers, decoded in processes of their own.

A decoder is a large library in C, and a file may be made to crash it, to run for minutes or to fill the memory. Here
that ends one process (`testtime.serve.decode_worker`), which is replaced, and one request, which gets an ImageError.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import NamedTuple

import numpy as np

import testtime
from testtime.errors import ImageError, InputError
from testtime.images.reading import source_name
from testtime.serve.decode_worker import ANSWER, MAX_MESSAGE, READY, REQUEST

COMMAND = (sys.executable, "-P", "-m", "testtime.serve.decode_worker")  # -P: nothing is imported from its folder
START_UP = 60.0  # seconds a process may take to start; it takes about a fifth of one
LARGE = 2**24  # bytes of pixels from which they are copied in a thread, and their shared memory is freed
SETTINGS = {
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    # by default, pages of every photograph would be returned to the system and asked for again: twice the time
    "MALLOC_MMAP_THRESHOLD_": str(2**24),
    "MALLOC_TRIM_THRESHOLD_": str(2**25),
}
INHERITED = ("LD_LIBRARY_PATH", "PYTHONHOME")  # what a Python that is not the system's may need


class Decoded(NamedTuple):
    """An image, decoded."""

    pixels: np.ndarray  # (H, W, 3) uint8, RGB, upright: those of `images.reading.read_image`
    thumbnail: bytes | None  # a JPEG, if asked for


class Decoder:
    """Decodes images in `processes` of their own, for one event loop.

    An image that has more than `max_pixels`, takes more than `seconds`, needs more than `memory` bytes with its file,
    or cannot be read, is an ImageError. `restarts` counts the processes that were killed or died, `waiting` the images
    that wait for a process, and `busy` the processes at work.
    """

    def __init__(
        self, processes: int = 2, *, max_pixels: int = 50_000_000, seconds: float = 10.0, memory: int = 2**30
    ) -> None:
        limits = {"processes": processes, "max_pixels": max_pixels, "seconds": seconds, "memory": memory}
        for name, value in limits.items():
            if not value > 0:
                raise InputError(f"{name}={value}: must be more than 0.")
        self.max_pixels, self.seconds, self.memory = max_pixels, seconds, memory
        self.processes, self.restarts, self.waiting = processes, 0, 0
        self._closed = False
        self._free = deque(self._worker() for _ in range(processes))
        self._slots = asyncio.Semaphore(processes)
        self._tasks: set[asyncio.Task[Decoded]] = set()

    @property
    def busy(self) -> int:
        """Processes at work."""
        return self.processes - len(self._free)

    async def decode(self, data: bytes, thumbnail: int = 0) -> Decoded:
        """The image in a file, and its thumbnail of so many pixels a side; the first frame of several."""
        self.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        if self._closed:
            self._slots.release()  # for the next one that waits
            raise RuntimeError("This decoder is closed.")
        # a request that is cancelled leaves its answer to the task, which takes it and frees the process
        task = asyncio.create_task(self._decode(self._free.pop(), data, thumbnail))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Refuse further images, wait for those being decoded, and end the processes."""
        self._closed = True
        if self._tasks:
            await asyncio.wait(self._tasks)
        while self._free:
            await asyncio.to_thread(self._free.pop().kill)

    def _worker(self) -> _Worker:
        return _Worker(self.max_pixels, self.memory, self.seconds)

    async def _decode(self, worker: _Worker, data: bytes, side: int) -> Decoded:
        """An image decoded by a worker, which is free afterwards, or replaced."""
        name = source_name(data)
        try:
            if worker.has_ended():  # while it was idle, through no fault of this image
                worker = await self._replaced(worker)
            await worker.start()
            async with asyncio.timeout(self.seconds):
                answer = await worker.ask(data, side)
            return await worker.decoded(answer)
        except ImageError:
            raise
        except TimeoutError:
            worker = await self._replaced(worker)
            limit = f"takes more than {self.seconds:g} seconds to decode; scale it down, or save it in another format."
            raise ImageError(f"{name}: {limit}") from None
        except (EOFError, OSError):
            worker, ended = await self._replaced(worker), worker
            limit = f"it is damaged, or needs more than {self.memory:,} bytes of memory."
            raise ImageError(f"{name}: ended the process that decoded it ({ended.cause()}); {limit}") from None
        except BaseException:  # the process did not start, or the event loop ends
            worker = await self._replaced(worker)
            raise
        finally:
            # the last in line is used next: not one that is still starting
            self._free.append(worker) if worker.ready else self._free.appendleft(worker)
            self._slots.release()

    async def _replaced(self, worker: _Worker) -> _Worker:
        await asyncio.to_thread(worker.kill)
        self.restarts += 1
        return self._worker()


class _Answer(NamedTuple):
    """What a worker answers."""

    usable: bool
    width: int
    height: int
    message: bytes  # the thumbnail, or why there is no image


class _Worker:
    """One process, and the memory that it shares with this one; what it answers is not trusted."""

    def __init__(self, max_pixels: int, memory: int, seconds: float) -> None:
        shared = os.memfd_create("testtime-pixels", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.link, theirs = socket.socketpair()
        try:
            os.ftruncate(shared, 3 * max_pixels)
            # if it shrank, reading it would end this process
            fcntl.fcntl(shared, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self.pixels = mmap.mmap(shared, 3 * max_pixels)
            self.process = subprocess.Popen(
                [*COMMAND, *map(str, [shared, max_pixels, memory, seconds])],
                stdin=theirs.fileno(), stdout=subprocess.DEVNULL, pass_fds=(shared,), cwd="/", env=_environment(),
                start_new_session=True,  # Ctrl-C ends the service, which ends its processes when it is done
            )  # fmt: skip
        finally:
            theirs.close()
            os.close(shared)
        self.link.setblocking(False)
        self.ready = False  # for images

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        """End the process, and wait for its end."""
        self.link.close()
        self.process.kill()
        self.process.wait()

    def cause(self) -> str:
        """Why an ended process has ended."""
        code = self.process.returncode
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"

    async def start(self) -> None:
        """Wait until the process is ready for its first image."""
        if self.ready:
            return
        try:
            async with asyncio.timeout(START_UP):
                self.ready = await self._receive(len(READY)) == READY
        except (TimeoutError, EOFError, OSError):
            command = " ".join(COMMAND)
            raise RuntimeError(f"A process that decodes images does not start; see what {command} prints.") from None

    async def ask(self, data: bytes, side: int) -> _Answer:
        """The answer to one image file; its pixels are then in the shared memory."""
        await asyncio.get_running_loop().sock_sendall(self.link, REQUEST.pack(len(data), side) + data)
        usable, width, height, size = ANSWER.unpack(await self._receive(ANSWER.size))
        if size > MAX_MESSAGE or 3 * width * height > len(self.pixels) or usable != (width * height > 0):
            raise OSError(f"not an answer: {width} x {height} pixels, {size} bytes")
        return _Answer(usable, width, height, await self._receive(size))

    async def decoded(self, answer: _Answer) -> Decoded:
        """The image of an answer, copied from the shared memory; an ImageError if there is none."""
        if not answer.usable:
            raise ImageError(" ".join(answer.message.decode(errors="replace").split()))
        count = 3 * answer.width * answer.height
        shared = np.frombuffer(self.pixels, np.uint8, count).reshape(answer.height, answer.width, 3)
        if count < LARGE:
            pixels = shared.copy()
        else:
            pixels = await asyncio.to_thread(shared.copy)
            self.pixels.madvise(mmap.MADV_REMOVE)  # an idle process keeps no large image
        return Decoded(pixels, answer.message or None)

    async def _receive(self, count: int) -> bytes:
        received, loop = bytearray(), asyncio.get_running_loop()
        while len(received) < count:
            part = await loop.sock_recv(self.link, count - len(received))
            if not part:
                raise EOFError
            received += part
        return bytes(received)


def _environment() -> dict[str, str]:
    """The environment of a process: no secrets of this one; libraries with one thread, and one heap that is kept."""
    kept = {name: os.environ[name] for name in INHERITED if name in os.environ}
    package = str(Path(testtime.__file__).parents[1])
    path = os.pathsep.join([package, *filter(os.path.isabs, sys.path)])
    return {**kept, **SETTINGS, "PYTHONPATH": path}

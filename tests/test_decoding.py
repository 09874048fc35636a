"""Images decoded in processes of their own: the pixels of `read_image`, and a file harms no other."""

from __future__ import annotations

import asyncio
import io
import os
import random
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fuzz_images
import numpy as np
import pytest
from PIL import Image

from testtime.images import reading
from testtime.images.reading import read_image
from testtime.images.thumbnail import thumbnail_jpeg
from testtime.serve import decoding
from testtime.serve.decoding import Decoded, Decoder
from testtime.types import ImageError, InputError

# a worker that misbehaves on some files
HOOK = """
import os, sys, time
from testtime.serve import decode_worker as worker

whole = worker.reading.read_image

def read(data):
    word, _, rest = data.partition(b" ")
    if word == b"sleep":
        time.sleep(float(rest))
    if word == b"spin":
        while True:
            pass
    if word == b"abort":
        os.abort()
    if word == b"lie":
        os.write(0, worker.ANSWER.pack(True, 2**31, 2**31, 0))
    return whole(data)

worker.reading.read_image = read
worker.main(sys.argv[1:])
"""


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers sleep, spin, abort or lie where a file says so."""
    monkeypatch.setattr(decoding, "COMMAND", (sys.executable, "-P", "-c", HOOK))


def use(call: Callable[[Decoder], Awaitable[Any]], run: Callable[[Any], Any] = asyncio.run, **options: Any) -> Any:
    """What a function does with a decoder that is closed afterwards."""

    async def main() -> Any:
        decoder = Decoder(**{"processes": 1} | options)
        try:
            return await call(decoder)
        finally:
            await decoder.close()

    return run(main())


def saved(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def photo(width: int = 60, height: int = 44, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def array(data: bytes) -> np.ndarray:
    return np.array(read_image(data))


def png_that_claims(width: int, height: int, rows: int = 1) -> bytes:
    """A grey PNG with a few rows of what its header says."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(width + 1) * rows)) + chunk(b"IEND", b"")


async def refusal(decoder: Decoder, data: bytes) -> str:
    with pytest.raises(ImageError) as caught:
        await decoder.decode(data)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def pid(decoder: Decoder) -> int:
    return decoder._free[-1].process.pid


# Pixels


def loops() -> list[Any]:
    found = [asyncio.run]
    if find_spec("uvloop"):
        import uvloop

        found.append(uvloop.run)
    return found


@pytest.mark.parametrize("run", loops(), ids=lambda run: run.__module__.partition(".")[0])
def test_pixels_are_those_of_read_image(run: Any) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    frames = [photo(50, 30, seed) for seed in range(3)]
    files = [
        saved(photo(500, 375), "JPEG"),
        saved(photo(90, 40), "JPEG", exif=exif),
        saved(photo().convert("RGBA")),
        saved(photo().convert("I").convert("I;16")),
        saved(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        saved(frames[0], "TIFF", save_all=True, append_images=frames[1:]),
        saved(photo(1, 1), "BMP"),
        saved(photo(1, 2000), "WEBP"),
        saved(photo(2003, 1009), "JPEG"),  # several strips
    ]

    async def call(decoder: Decoder) -> list[Decoded]:
        return await asyncio.gather(*(decoder.decode(data) for data in files))

    for found, data in zip(use(call, run, processes=2), files, strict=True):
        assert found.pixels.dtype == np.uint8 and found.pixels.flags.c_contiguous and found.thumbnail is None
        assert np.array_equal(found.pixels, array(data))


def test_real_photographs_are_decoded_alike(data: Path) -> None:
    files = [path.read_bytes() for path in sorted(data.rglob("*.jpg"))[:40]]

    async def call(decoder: Decoder) -> None:
        for file in files:
            assert np.array_equal((await decoder.decode(file)).pixels, array(file))

    use(call)


def test_thumbnail_is_a_small_square_jpeg() -> None:
    file = saved(photo(200, 100), "JPEG")
    found = use(lambda decoder: decoder.decode(file, thumbnail=56))
    assert found.thumbnail == thumbnail_jpeg(read_image(file), 56) and read_image(found.thumbnail).size == (56, 56)


def test_large_image_is_copied_whole_and_its_shared_memory_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "LARGE", 10_000)
    file = saved(photo(300, 200))

    async def call(decoder: Decoder) -> Decoded:
        for _ in range(3):
            found = await decoder.decode(file)
        assert not any(decoder._free[0].pixels[:180_000])
        return found

    assert np.array_equal(use(call).pixels, array(file))


# Files that are damaged, or made to do harm


def test_mutated_files_of_each_format_give_what_read_image_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    Image.init()
    formats = [
        name for name in fuzz_images.FORMATS if name in Image.SAVE or (name == "HEIF" and find_spec("pillow_heif"))
    ]
    files: list[bytes] = []
    for number in range(200):
        dice, format = random.Random(number), formats[number % len(formats)]
        whole = fuzz_images.whole(format, dice.choice(fuzz_images.MODES.get(format, ("RGB",))), dice.randrange(8))
        files.append(fuzz_images.damaged(whole, dice) if whole else b"")
    monkeypatch.setattr(reading, "MAX_PIXELS", fuzz_images.MOST)

    async def call(decoder: Decoder) -> Any:
        found = await asyncio.gather(*(decoder.decode(file) for file in files), return_exceptions=True)
        return found, decoder.restarts, decoder.busy, decoder.waiting

    found, *counts = use(call, processes=2, max_pixels=fuzz_images.MOST)
    assert counts == [0, 0, 0]
    for result, file in zip(found, files, strict=True):
        try:
            expected = array(file)
        except ImageError as error:
            assert isinstance(result, ImageError) and str(result) == str(error)
        else:
            assert isinstance(result, Decoded) and np.array_equal(result.pixels, expected)
    refused = sum(isinstance(result, ImageError) for result in found)
    assert 20 < refused < 180


def test_files_that_are_cut_short_or_empty_are_refused() -> None:
    whole = saved(photo(), "JPEG")

    async def call(decoder: Decoder) -> None:
        assert "image of 0 bytes: is empty, damaged or not an image" in await refusal(decoder, b"")
        for size in (1, 20, 200, len(whole) // 2):
            assert f"image of {size:,} bytes: is " in await refusal(decoder, whole[:size])
        assert decoder.restarts == 0

    use(call)


def test_decompression_bombs_are_refused_by_their_header() -> None:
    gif = (
        b"GIF89a"
        + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0)
        + b"\x2c"
        + struct.pack("<HHHHB", 0, 0, 65535, 65535, 0)
    )
    bombs = [png_that_claims(60_000, 60_000), png_that_claims(7072, 7072), gif + b"\x02\x02\x4c\x01\x00\x3b"]

    async def call(decoder: Decoder) -> None:
        for bomb in bombs:
            began = time.perf_counter()
            assert "has more than 50,000,000 pixels; scale it down first." in await refusal(decoder, bomb)
            assert time.perf_counter() - began < 5
        assert decoder.restarts == 0

    use(call)


def test_image_within_the_limit_of_pixels_but_not_of_memory_is_refused() -> None:
    bomb = png_that_claims(7000, 7000, rows=7000)  # 50 kilobytes, 147 megabytes of pixels
    assert len(bomb) < 100_000

    async def call(decoder: Decoder) -> None:
        assert "too large for the memory. (limit: 67,108,864 bytes)" in await refusal(decoder, bomb)
        assert (await decoder.decode(saved(photo()))).pixels.shape == (44, 60, 3) and decoder.restarts == 0

    use(call, memory=2**26)


def test_image_at_the_limit_of_pixels_fits_the_memory() -> None:
    found = use(lambda decoder: decoder.decode(png_that_claims(7071, 7071, rows=7071)))
    assert found.pixels.shape == (7071, 7071, 3)


def test_memory_stays_flat_over_thousands_of_malformed_images() -> None:
    whole = saved(photo(), "JPEG")
    files = [whole[: 30 + 7 * number] for number in range(20)] + [png_that_claims(60_000, 60_000), b"no image"]

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    async def call(decoder: Decoder) -> list[int]:
        marks = []
        for number in range(3000):
            await refusal(decoder, files[number % len(files)])
            if number % 1000 == 999:
                marks.append(resident())
        assert decoder.restarts == 0
        return marks

    marks = use(call)
    assert marks[2] - marks[0] < 4_000_000


# Processes that hang or end


@pytest.mark.parametrize("file", [b"sleep 60", b"spin "])
def test_image_that_takes_too_long_ends_its_process_which_is_replaced(hooked: None, file: bytes) -> None:
    async def call(decoder: Decoder) -> None:
        await decoder.decode(saved(photo()))
        before, began = pid(decoder), time.perf_counter()
        assert "takes more than 0.5 seconds to decode" in await refusal(decoder, file)
        assert time.perf_counter() - began < 5
        assert (await decoder.decode(saved(photo()))).pixels.shape == (44, 60, 3)
        assert decoder.restarts == 1 and pid(decoder) != before and not Path(f"/proc/{before}").exists()

    use(call, seconds=0.5)


@pytest.mark.parametrize(("file", "cause"), [(b"abort", "SIGABRT"), (b"lie", "SIGKILL")])
def test_image_that_ends_its_process_is_refused(hooked: None, file: bytes, cause: str) -> None:
    async def call(decoder: Decoder) -> None:
        problem = await refusal(decoder, file)
        assert (
            f"ended the process that decoded it ({cause}); it is damaged, or needs more than 1,073,741,824" in problem
        )
        assert (await decoder.decode(saved(photo()))).pixels.shape == (44, 60, 3) and decoder.restarts == 1

    use(call)


def test_process_killed_in_the_middle_or_when_idle_is_replaced(hooked: None) -> None:
    async def call(decoder: Decoder) -> None:
        await decoder.decode(saved(photo()))
        victim = pid(decoder)
        task = asyncio.create_task(refusal(decoder, b"sleep 60"))
        await asyncio.sleep(0.2)
        assert decoder.busy == 1
        os.kill(victim, signal.SIGKILL)
        assert "(SIGKILL)" in await task and decoder.restarts == 1 and decoder.busy == 0
        await decoder.decode(saved(photo()))
        os.kill(pid(decoder), signal.SIGKILL)
        await asyncio.sleep(0.1)
        # no fault of this image
        assert (await decoder.decode(saved(photo()))).pixels.shape == (44, 60, 3) and decoder.restarts == 2

    use(call)


def test_other_processes_go_on_while_one_hangs(hooked: None) -> None:
    async def call(decoder: Decoder) -> None:
        slow = asyncio.create_task(refusal(decoder, b"sleep 60"))
        found = await asyncio.gather(*(decoder.decode(saved(photo())) for _ in range(50)))
        assert len(found) == 50 and not slow.done() and decoder.busy == 1
        used = pid(decoder)
        await slow
        assert pid(decoder) == used  # the other one is still starting

    use(call, processes=2, seconds=3)


def test_cancelled_request_leaves_no_answer_to_the_next(hooked: None) -> None:
    async def call(decoder: Decoder) -> None:
        first = await decoder.decode(saved(photo(10, 20)))
        held = asyncio.create_task(decoder.decode(b"sleep 0.5"))
        waiting = asyncio.create_task(decoder.decode(saved(photo(30, 10))))
        await asyncio.sleep(0.1)
        assert (decoder.busy, decoder.waiting) == (1, 1)
        for task in (held, waiting):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert decoder.waiting == 0
        found = await decoder.decode(saved(photo(40, 50)))
        assert first.pixels.shape == (20, 10, 3) and found.pixels.shape == (50, 40, 3)
        assert decoder.restarts == 0 and decoder.busy == 0  # a request that goes away costs no process

    use(call)


def test_process_that_does_not_start_is_no_fault_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "COMMAND", (sys.executable, "-c", "raise SystemExit(3)"))

    async def call(decoder: Decoder) -> None:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="does not start; see what .* prints"):
                await decoder.decode(saved(photo()))

    use(call)


def test_impossible_limits_are_refused() -> None:
    for limit in ("processes", "max_pixels", "seconds", "memory"):
        with pytest.raises(InputError, match=f"{limit}=0: must be more than 0"):
            Decoder(**{limit: 0})


def test_closing_waits_for_images_in_progress_and_refuses_others(hooked: None) -> None:
    async def call(decoder: Decoder) -> None:
        began = asyncio.create_task(refusal(decoder, b"sleep 0.3"))
        later = asyncio.create_task(decoder.decode(saved(photo())))
        await asyncio.sleep(0.05)
        assert (decoder.busy, decoder.waiting) == (1, 1)
        await decoder.close()
        assert began.done() and "not an image" in await began
        for task in (later, decoder.decode(saved(photo()))):
            with pytest.raises(RuntimeError, match="closed"):
                await task

    use(call)


# What a process may do


def test_process_has_no_torch_no_secrets_and_few_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")

    async def call(decoder: Decoder) -> None:
        await decoder.decode(saved(photo()))
        process = Path(f"/proc/{pid(decoder)}")
        assert "torch" not in (process / "maps").read_text()
        assert b"secret" not in (process / "environ").read_bytes()
        limits = {line[:26].strip(): line[26:47].strip() for line in (process / "limits").read_text().splitlines()}
        assert limits["Max core file size"] == limits["Max file size"] == "0" and limits["Max open files"] == "32"
        size = int((process / "statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        assert 2**29 < int(limits["Max address space"]) < size + 2**29 + 2**24
        kinds = sorted(os.readlink(file).partition(":")[0] for file in (process / "fd").iterdir())
        assert kinds == ["/dev/null", "/dev/null", "/memfd", "socket"]

    use(call, memory=2**29)


def test_processes_end_with_their_parent() -> None:
    code = (
        "import asyncio, os\nfrom testtime.serve.decoding import Decoder\nasync def main():\n"
        "    decoder = Decoder(2)\n    print(*(worker.process.pid for worker in decoder._free), flush=True)\n"
        "    os.kill(os.getpid(), 9)\nasyncio.run(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    pids = done.stdout.split()
    assert done.returncode == -9 and len(pids) == 2
    for _ in range(500):
        if not any(Path(f"/proc/{number}/maps").exists() and alive(number) for number in pids):
            return
        time.sleep(0.02)
    raise AssertionError(f"{pids} are still there")


def alive(number: str) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

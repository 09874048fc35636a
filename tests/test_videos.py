"""Videos: frames are images with stable names, the same in whatever order, thread or run they are read."""

from __future__ import annotations

import json
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

av = pytest.importorskip("av", reason="needs testtime[video]")

import fuzz_videos  # noqa: E402
from fuzz_videos import CODECS, write_video  # noqa: E402
from PIL import Image  # noqa: E402

import testtime as tt  # noqa: E402
from testtime.datasets import open_dataset  # noqa: E402
from testtime.encoding.stream import stream  # noqa: E402
from testtime.files.identity import file_of, identity  # noqa: E402
from testtime.images import video  # noqa: E402
from testtime.images.reading import read_image  # noqa: E402
from testtime.images.video import Every, list_frames, parse_every  # noqa: E402
from testtime.report.thumbnails import make_thumbnails  # noqa: E402
from testtime.types import ImageError, InputError, MissingPart, StoredImage, ViewPlan  # noqa: E402

FRAME = Every(1, frames=True)


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """Four seconds, with a keyframe every half."""
    return write_video(tmp_path / "clip.mp4", times=range(100))


def names(frames: Any) -> list[str]:
    return [str(frame).rpartition("@")[2] for frame in frames]


def pixels(frame: Any) -> bytes:
    return read_image(frame).tobytes()


# which frames


@pytest.mark.parametrize(
    "text, expected",
    [("1s", (1000, False)), ("0.5s", (500, False)), (" 500MS ", (500, False)), ("10f", (10, True))],
)
def test_intervals(text: str, expected: tuple[int, bool]) -> None:
    assert parse_every(text) == expected


@pytest.mark.parametrize(
    "text", ["", "1", "s", "0s", "0f", "1.5f", "-1s", "0.0001s", "1m", "1e3s", "nan", "9" * 99 + "s"]
)
def test_other_intervals_are_refused_with_examples(text: str, tmp_path: Path, cli: Any) -> None:
    with pytest.raises(InputError, match="500ms.*10f"):
        parse_every(text)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    done = cli("run", tmp_path / "a.png", "--classes", "a,b", "--encoder", "tiny", f"--every={text}")
    assert done.code == 2 and "--every" in done.err


def test_frames_have_stable_names_at_regular_times(clip: Path) -> None:
    frames = list_frames(clip, parse_every("1s"))
    assert list(map(str, frames)) == [f"{clip}@00:00:0{second}.000" for second in range(4)]
    assert len(list_frames(clip, FRAME)) == 100 and len(list_frames(clip, parse_every("10f"))) == 10
    half = list_frames(clip, parse_every("0.5s"))
    assert set(frames) < set(half) and len(half) == 8
    assert isinstance(frames[0], StoredImage) and file_of(frames[0]) == clip
    assert len({identity(frame) for frame in half}) == 8


def test_irregular_frames_count_once_and_are_named_by_their_own_time(tmp_path: Path) -> None:
    times = [0, 3, 31, 32, 75, 76, 400, 90_000]  # twenty-fifths of a second; the last is after an hour
    frames = list_frames(write_video(tmp_path / "a.mkv", times=times), parse_every("1s"))
    assert names(frames) == ["00:00:00.000", "00:00:01.240", "00:00:03.000", "00:00:16.000", "01:00:00.000"]


def test_time_starts_at_the_first_frame(tmp_path: Path) -> None:
    assert (
        names(list_frames(write_video(tmp_path / "a.mkv", times=range(50, 100)), parse_every("1s")))[0]
        == "00:00:00.000"
    )


# the pixels of a frame


@pytest.mark.parametrize("suffix", CODECS)
def test_frame_is_the_same_in_every_order_and_as_in_a_plain_pass(tmp_path: Path, suffix: str) -> None:
    file = write_video(tmp_path / f"a.{suffix}", CODECS[suffix], range(60))
    with av.open(str(file)) as container:
        plain = [frame.to_image().tobytes() for frame in container.decode(video=0)]
    frames = list_frames(file, FRAME)
    assert list(map(pixels, frames)) == plain and len(set(plain)) == 60
    for index in random.Random(0).sample(range(60), 60):
        assert pixels(frames[index]) == plain[index], index
    assert list(map(pixels, frames[::7])) == plain[::7]


def test_frames_in_order_are_decoded_in_one_pass(clip: Path) -> None:
    frames = list_frames(clip, Every(3, frames=True))
    reader = video._reader(clip, video.stamp(clip))
    for frame in frames:
        frame.read_bytes()
    assert reader.starts == len({frame.key for frame in frames}) < len(frames) / 3


def test_threads_read_the_same_frames(clip: Path) -> None:
    frames = list_frames(clip, FRAME)
    expected = list(map(pixels, frames))
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(pixels, frames)) == expected
        mixed = random.Random(1).choices(range(100), k=60)
        assert list(pool.map(pixels, [frames[i] for i in mixed])) == [expected[i] for i in mixed]


def test_few_videos_are_open_at_once(tmp_path: Path) -> None:
    for number in range(12):
        write_video(tmp_path / f"{number}.mp4", times=range(2))
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else pytest.skip("no /proc")
    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(pixels, open_dataset(tmp_path).paths))) == 12
    assert len(os.listdir("/proc/self/fd")) <= before + video.OPEN_VIDEOS
    assert video._reader.cache_info().currsize <= video.OPEN_VIDEOS


def test_frames_are_upright(tmp_path: Path) -> None:
    plain = read_image(list_frames(write_video(tmp_path / "a.mp4"), FRAME)[0])
    for degrees, turn in ((90, Image.Transpose.ROTATE_90), (-90, Image.Transpose.ROTATE_270)):
        turned = write_video(tmp_path / f"{degrees}.mp4", rotation=degrees)
        assert read_image(list_frames(turned, FRAME)[0]).tobytes() == plain.transpose(turn).tobytes()


def test_memory_is_asked_for_before_a_frame_is_decoded(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(Exception):
        pass

    def admit(size: tuple[int, int]) -> None:
        asked.append(size)
        raise Full

    asked: list[tuple[int, int]] = []
    frame = list_frames(clip, FRAME)[0]
    with monkeypatch.context() as patch:
        patch.setattr(video._Reader, "read", lambda *_: pytest.fail("decoded"))
        with pytest.raises(Full):
            read_image(frame, admit)
    read_image(frame, asked.append)
    assert asked == [(64, 48), (64, 48)]


def test_name_of_a_frame_reads_it(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = list_frames(clip, parse_every("1s"))[2]
    image = read_image(str(frame))
    assert image.tobytes() == pixels(frame) and image.info["path"] == str(frame)
    (clip.parent / "list.txt").write_text(f"{frame}\n")
    assert pixels(open_dataset(clip.parent / "list.txt").paths[0]) == pixels(frame)
    for name, reason in ((f"{clip}@00:00:02.001", "no such frame"), (f"{clip}x@00:00:02.000", "no such file")):
        with pytest.raises(ImageError, match=reason):
            read_image(name)


# datasets


def test_folder_mixes_images_and_videos(tmp_path: Path) -> None:
    for name, times in (("cat", range(30)), ("dog", range(60))):
        (tmp_path / "pets" / name).mkdir(parents=True)
        write_video(tmp_path / "pets" / name / "b.mp4", times=times)
        Image.new("RGB", (8, 8)).save(tmp_path / "pets" / name / "a.png")
    data = open_dataset(tmp_path / "pets")
    assert data.labels == [0, 0, 0, 1, 1, 1, 1] and data.notes == ("5 frames of 2 videos, one every 1s",)
    assert [Path(str(path)).name for path in data.paths[:3]] == ["a.png", "b.mp4@00:00:00.000", "b.mp4@00:00:01.000"]
    fewer = open_dataset(tmp_path / "pets", every="30f")
    assert fewer.labels == [0, 0, 1, 1, 1] and fewer.notes == ("3 frames of 2 videos, one of 30",)
    (tmp_path / "t.csv").write_text("path,label\npets/dog/b.mp4,dog\npets/cat/a.png,cat\n")
    assert open_dataset(tmp_path / "t.csv").labels == [1, 1, 1, 0]
    assert [image.size for image in tt.folder(tmp_path / "pets" / "cat")] == [(8, 8), (64, 48), (64, 48)]


def test_live_photo_is_left_out_beside_its_image(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "IMG_1.JPG")
    write_video(tmp_path / "IMG_1.MOV", "mpeg4")
    write_video(tmp_path / "IMG_2.MOV", "mpeg4")
    data = open_dataset(tmp_path)
    assert [Path(str(path)).name for path in data.paths] == [
        "IMG_1.JPG",
        "IMG_2.MOV@00:00:00.000",
        "IMG_2.MOV@00:00:01.000",
    ]
    assert data.notes[1] == "left out 1 file: 1 .mov (Live Photos: their images are beside them)"


def test_videos_without_the_extra_are_named(clip: Path, monkeypatch: pytest.MonkeyPatch, cli: Any) -> None:
    (clip.parent / "list.txt").write_text("clip.mp4\n")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(InputError, match=r"left out 1 file: 1 .mp4 \(pip install 'testtime\[video\]'\)"):
        open_dataset(clip.parent)
    with pytest.raises(MissingPart, match=r"pip install 'testtime\[video\]'"):
        open_dataset(clip)
    with pytest.raises(ImageError, match=r"clip.mp4: is a video, which needs PyAV: pip install 'testtime\[video\]'"):
        read_image(open_dataset(clip.parent / "list.txt").paths[0])
    done = cli("run", clip, "--classes", "a,b", "--encoder", "tiny")
    assert done.code == 2 and "testtime[video]" in done.err


ODD = [
    "a b.mp4",
    "ä@00:00:01.000.mp4",
    "-x.mp4",
    "=1.mp4",
    "http:%2F.mp4",
    "pipe:0.mp4",
    "concat:a|b.mp4",
    "[x]{1..2}.mp4",
]


@pytest.mark.parametrize("name", [*ODD, "new\nline.mp4", os.fsdecode(b"caf\xe9.mp4")])
def test_names_with_odd_characters(tmp_path: Path, name: str, cli: Any) -> None:
    file = write_video(tmp_path / "plain.mp4", times=range(30)).rename(tmp_path / name)
    rows, state = tmp_path / "rows.jsonl", tmp_path / "state.safetensors"
    command = ["run", file, "--classes", "a,b", "--encoder", "tiny", "--out", rows, "--save", state]
    assert cli(*command, "--limit", 1).code == 0
    assert cli(*command, "--resume", state).code == 0
    found = [json.loads(line)["image"] for line in rows.read_text().splitlines()]
    assert found == [f"{file}@00:00:0{second}.000" for second in (0, 1)]


# runs


@pytest.fixture
def run(tmp_path: Path, cli: Any) -> Callable[..., tuple[bytes, bytes]]:
    """`testtime run` over two videos and an image, resumed where it has a state: rows and state."""
    (tmp_path / "in").mkdir()
    write_video(tmp_path / "in" / "a.mp4", times=range(100))
    (tmp_path / "in" / "b.mp4").write_bytes(b"no video")
    Image.new("RGB", (30, 20), "red").save(tmp_path / "in" / "c.png")
    write_video(tmp_path / "in" / "d.webm", "libvpx-vp9", range(60))

    def call(name: str, *extra: object) -> tuple[bytes, bytes]:
        rows, state = tmp_path / f"{name}.csv", tmp_path / f"{name}.safetensors"
        common = ["--encoder", "tiny", "--classes", "cat,dog", "--views", 3, "--every", "0.5s"]
        resumed = ["--resume", state] if state.exists() else []
        done = cli("run", tmp_path / "in", *common, "--out", rows, "--save", state, *resumed, *extra)
        assert "13 frames of 2 videos, one every 0.5s" in done.err
        # where only the broken one is left, that is an error, and the state is kept all the same
        assert done.code == 0 or "None of the images could be read" in done.err, done.err
        return rows.read_bytes(), state.read_bytes()

    return call


@pytest.mark.parametrize("extra", [(), ("--shuffle", "--seed", 3)])
def test_run_over_frames_stopped_anywhere_ends_in_the_same_bytes(run: Any, extra: tuple[object, ...]) -> None:
    whole = run("whole", *extra)
    assert len(whole[0].splitlines()) == 1 + 14  # thirteen frames and an image
    for stop in (1, 2, 5, 9, 11, 14):
        run(f"after {stop}", *extra, "--limit", stop)
        video._reader.cache_clear()
        assert run(f"after {stop}", *extra) == whole, stop


def test_encode_and_report_work_with_frames(clip: Path, tmp_path: Path, cli: Any) -> None:
    features = tmp_path / "f.safetensors"
    command = ("encode", clip, "--classes", "cat,dog", "--encoder", "tiny", "--out", features, "--every", "10f")
    assert cli(*command).code == 0
    assert list(tt.Features(features).images or ()) == list(map(str, list_frames(clip, parse_every("10f"))))
    assert cli("report", features, "--out", tmp_path / "page.html").code == 0
    assert "clip.mp4@00:00:00.400" in (page := (tmp_path / "page.html").read_text()) and "data:image/jpeg" in page
    refused = cli("encode", clip, "--classes", "cat,dog", "--encoder", "tiny", "--out", clip)
    assert refused.code == 2 and "would overwrite IMAGES" in refused.err


def test_thumbnails_of_frames_and_of_their_names(clip: Path) -> None:
    frames = dict(enumerate(list_frames(clip, parse_every("1s"))))
    made = make_thumbnails(frames)
    assert len(set(made.values())) == 4 and make_thumbnails({key: str(frame) for key, frame in frames.items()}) == made


def test_stream_gives_the_features_of_the_frames_as_images(clip: Path) -> None:
    encoder, frames = tt.load_encoder("tiny"), list_frames(clip, Every(5, frames=True))
    found = list(stream(encoder, frames, ViewPlan(3)))
    expected = list(stream(encoder, [read_image(frame) for frame in frames], ViewPlan(3)))
    assert all(np.array_equal(one.usable(), other.usable()) for one, other in zip(found, expected, strict=True))


# damaged and hostile


def test_damaged_videos_give_frames_or_errors_in_any_order() -> None:
    found = fuzz_videos.run(120, seed=1)
    assert sum(found.values()) == 120
    assert {ending.partition(" ")[2] for ending in found} >= {"every frame", "refused", "some frames"}


@pytest.mark.parametrize("suffix", CODECS)
def test_video_cut_anywhere_ends_in_frames_or_an_error_soon(tmp_path: Path, suffix: str) -> None:
    data, dice, file = fuzz_videos.whole(suffix), random.Random(0), tmp_path / f"cut.{suffix}"
    start, outcomes = time.monotonic(), set()
    for size in (0, 1, 11, 12, 40, *dice.sample(range(len(data)), 25), len(data)):
        file.write_bytes(data[:size])
        outcomes.add(fuzz_videos.outcomes(file, dice))
    assert {"refused", "every frame"} <= outcomes and time.monotonic() - start < 60


def test_damaged_video_is_one_bad_image_of_its_folder(clip: Path, cli: Any) -> None:
    (clip.parent / "bad.mp4").write_bytes(clip.read_bytes()[:500])
    (clip.parent / "empty.mkv").write_bytes(b"")
    data = open_dataset(clip.parent)
    assert len(data) == 6 and data.notes == ("4 frames of 1 video, one every 1s",)
    common = ["--classes", "a,b", "--encoder", "tiny"]
    done = cli("run", clip.parent, *common)
    assert done.code == 0 and "4 images" in done.err and "2 skipped" in done.err
    assert re.search(r"skipped .*bad\.mp4: is empty, damaged, cut short", done.err)
    assert cli("run", clip.parent, *common, "--strict").code == 2
    alone = cli("run", clip.parent / "bad.mp4", *common)
    assert alone.code == 2 and "None of the images could be read" in alone.err


@pytest.mark.parametrize(
    "content",
    [
        b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:clip.mp4\n#EXT-X-ENDLIST\n",
        b"ffconcat version 1.0\nfile clip.mp4\n",
        b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x40\x1f\0\0\x80\x3e\0\0\2\0\x10\0data\0\0\0\0",
    ],
)
def test_only_listed_formats_are_opened_whatever_the_name(clip: Path, content: bytes) -> None:
    file = clip.parent / "other.mp4"
    file.write_bytes(content)
    with pytest.raises(ImageError, match="no video in a format that is read"):
        list_frames(file, FRAME)


def test_other_codecs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="is encoded as msmpeg4.*, which is not read"):
        list_frames(write_video(tmp_path / "a.avi", "msmpeg4"), FRAME)


def test_pixels_and_frames_are_limited_before_decoding(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = list_frames(clip, FRAME)[0]
    monkeypatch.setattr(video, "MAX_FRAME_PIXELS", 64 * 48 - 1)
    for call in (lambda: list_frames(clip, FRAME), frame.read_bytes):
        with pytest.raises(ImageError, match="frames have more than 3,071 pixels"):
            call()
    monkeypatch.undo()
    monkeypatch.setattr(video, "MAX_PACKETS", 99)
    with pytest.raises(ImageError, match="more than 99 frames; split it"):
        list_frames(clip, FRAME)


def test_replaced_or_removed_video_is_an_error_of_its_frame(clip: Path, tmp_path: Path) -> None:
    last = list_frames(clip, FRAME)[-1]
    other = write_video(tmp_path / "other.mp4", times=range(20))
    other.replace(clip)
    with pytest.raises(ImageError, match="no longer there|ends before it"):
        read_image(last)
    clip.unlink()
    with pytest.raises(ImageError, match="no such file"):
        read_image(last)


def test_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.mp4")
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(video.expand(tmp_path / "pipe.mp4", FRAME)), daemon=True)
    thread.start()
    thread.join(10)
    assert found and "is a pipe" in found[0][0].reason

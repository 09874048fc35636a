"""Several processes at once: evaluations share what they make, and two encodings never write to one place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_data import make_folders

from testtime import Features
from testtime.files import locked

# a command that writes down how many views it has encoded, and stops after so many for as long as a file is there
HELD = """
import os, sys, time
from testtime.cli.app import main
from testtime.encoding.encoders.open_clip import OpenClip

folder, most, whole = sys.argv[1], int(sys.argv[2]), OpenClip.encode_images

def encode_images(self, pixels):
    with open(f"{folder}/log", "a") as file:
        file.write(f"{len(pixels)}\\n")
    while sum(map(int, open(f"{folder}/log"))) > most and os.path.exists(f"{folder}/hold"):
        time.sleep(0.02)
    return whole(self, pixels)

OpenClip.encode_images = encode_images
main(sys.argv[3:])
"""


@pytest.fixture
def pets(tmp_path) -> Path:
    return make_folders(tmp_path / "pets")


@pytest.fixture
def start(tmp_path):
    """Starts a command in a process of its own; those that still run in the end are killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: object, most: int = 1000) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", HELD, tmp_path, most, *arguments]
        process = subprocess.Popen(
            [str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "400"},
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def encoded(folder: Path) -> int:
    log = folder / "log"
    return sum(map(int, log.read_text().split())) if log.exists() else 0


def wait_for(there) -> None:
    deadline = time.monotonic() + 120
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_evaluations_at_once_end_in_the_same_numbers_and_encode_an_image_once(pets, tmp_path, start) -> None:
    words = ["eval", pets, "-e", "tiny", "--methods", "zeroshot,tda", "--seeds", "1,2", "--views", 2, "--shard", 3]
    words += ["--out", tmp_path / "o", "--json"]
    ends = [ended(process) for process in [start(*words) for _ in range(2)]]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert len({out for _, out, _ in ends}) == 1
    assert encoded(tmp_path) == 12 * 2 * 2  # images, views and seeds
    assert json.loads(ends[0][1]) == json.loads((tmp_path / "o" / "results.json").read_text())
    assert not list((tmp_path / "o").rglob(".*"))


def test_an_evaluation_says_whom_it_waits_for_and_takes_over_what_a_killed_one_has_done(pets, tmp_path, start) -> None:
    words = ["eval", pets, "-e", "tiny", "--methods", "zeroshot", "--seeds", "1", "--shard", 3, "--out", tmp_path / "o"]
    (tmp_path / "hold").touch()
    first = start(*words, most=7)
    wait_for(lambda: len(list((tmp_path / "o").glob("stores/*/features-*"))) == 2)
    second = start(*words)
    assert second.stderr is not None
    said = ""
    while "waiting" not in said:
        said = second.stderr.readline()
        assert said
    assert f"is being written by process {first.pid} on {os.uname().nodename}" in said
    first.kill()
    first.communicate()
    code, out, err = ended(second)
    assert code == 0 and "zeroshot" in out, err
    assert encoded(tmp_path) < 2 * 12 - 5  # two shards were done


@pytest.mark.parametrize("shard", [(), ("--shard", 3)])
def test_a_second_encoding_to_one_place_is_refused(pets, tmp_path, start, shard) -> None:
    words = ["encode", pets, "-e", "tiny", "--out", tmp_path / "o", *shard]
    (tmp_path / "hold").touch()
    first = start(*words, most=4)
    wait_for(lambda: encoded(tmp_path) > 4)
    code, _, err = ended(start(*words))
    assert code == 2 and f"{tmp_path / 'o'} is being written by process {first.pid}" in err.replace("\n", "")
    (tmp_path / "hold").unlink()
    assert ended(first)[0] == 0 and len(Features(tmp_path / "o")) == 12 and encoded(tmp_path) == 12


def test_a_killed_encoding_does_not_keep_its_place(pets, tmp_path, start) -> None:
    words = ["encode", pets, "-e", "tiny", "--out", tmp_path / "o", "--shard", 3]
    (tmp_path / "hold").touch()
    first = start(*words, most=4)
    wait_for(lambda: encoded(tmp_path) > 4)
    first.kill()
    first.communicate()
    code, _, err = ended(start(*words))
    assert code == 0 and len(Features(tmp_path / "o")) == 12, err


def test_a_place_that_is_taken_is_refused_before_the_encoder_is_loaded(cli, pets, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("testtime.encoding.encoders.load_encoder", None)
    with locked(tmp_path / "o"):
        outcome = cli("encode", pets, "-e", "tiny", "--out", tmp_path / "o")
        assert outcome.code == 2 and f"is being written by process {os.getpid()}" in outcome.err
        outcome = cli("train-prompts", pets, "-e", "tiny", "--out", tmp_path / "o")
        assert outcome.code == 2 and f"is being written by process {os.getpid()}" in outcome.err

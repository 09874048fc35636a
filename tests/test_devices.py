"""Devices by name, and what runs where on a machine with an Apple GPU."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_mps
import pytest
import torch
from fake_mps import MPS, OnMps
from small_data import make_folders

import testtime as tt
from testtime.encoding.encode import encode_images
from testtime.machine.devices import find_device, step_device
from testtime.types import MissingPart, SettingError, ViewPlan


@pytest.fixture
def mps(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mps.install(monkeypatch)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_folders(tmp_path / "photos", images=4)


def machine(patch: pytest.MonkeyPatch, cuda: int, mps: bool) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
    patch.setattr(torch.cuda, "device_count", lambda: cuda)
    patch.setattr(torch.backends.mps, "is_available", lambda: mps)


@pytest.mark.parametrize(
    "cuda, apple, found, listed",
    [(0, False, "cpu", "cpu"), (0, True, "mps", "cpu, mps"), (2, False, "cuda", "cpu, cuda, cuda:1")],
)
def test_auto_is_the_best_device_and_errors_list_those_usable_here(monkeypatch, cuda, apple, found, listed) -> None:
    machine(monkeypatch, cuda, apple)
    assert find_device("auto") == torch.device(found)
    for name in ("xpu", "meta", "vulkan", "nonsense", "cuda:x", "cuda:256", "cuda:-1", "", "CPU"):
        with pytest.raises(SettingError, match=f"'{name}'.* Usable here: {listed};"):
            find_device(name)
    for name in ("cuda:9", "mps:1", "cpu:5"):
        with pytest.raises(MissingPart, match=f"'{name}'.* Usable here: {listed};"):
            find_device(name)
    for name in listed.split(", "):
        assert find_device(name) == torch.device(name) == find_device(torch.device(name))


def test_a_gpu_of_nvidia_comes_first(monkeypatch) -> None:
    machine(monkeypatch, 1, True)
    assert find_device("auto") == torch.device("cuda")


@pytest.mark.parametrize("device", ["mps", "xpu", "meta", "cuda:9", "nonsense"])
@pytest.mark.parametrize("command", ["run", "encode", "eval", "replay", "train-prompts"])
def test_a_device_that_is_not_here_is_a_mistake_not_a_bug(cli, photos, tmp_path, monkeypatch, command, device) -> None:
    machine(monkeypatch, 0, False)
    place = tmp_path / ("out.csv" if command == "run" else "out.safetensors")
    task, stream, _ = tt.toy()
    features = tt.save_features(tmp_path / "f.safetensors", stream, task.text)
    words = [features] if command == "replay" else [photos, "-e", "tiny"]
    done = cli(command, *words, "--out", place, "--device", device)
    assert done.code == 2 and f"'{device}'" in done.err and "Usable here: cpu; or auto." in done.err
    assert not place.is_file()


def test_operations_that_an_apple_gpu_lacks_run_on_the_cpu_unless_the_user_says_otherwise() -> None:
    probe = "import os, sys, testtime; print(os.environ['PYTORCH_ENABLE_MPS_FALLBACK'], 'torch' in sys.modules)"
    plain = {name: value for name, value in os.environ.items() if name != "PYTORCH_ENABLE_MPS_FALLBACK"}
    for more, shown in (({}, "1 False"), ({"PYTORCH_ENABLE_MPS_FALLBACK": "0"}, "0 False")):
        done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, env=plain | more)
        assert done.stdout.strip() == shown


# With a stand-in for an Apple GPU


def test_the_stand_in_refuses_what_an_apple_gpu_refuses(mps) -> None:
    there = torch.zeros(2, device="mps")
    assert there.device == MPS and (there + 1).device == MPS and there.cpu().device.type == "cpu"
    assert there.to("cpu").device.type == "cpu" and torch.ones(2).to(there).device == MPS
    for wrong in (lambda: there.double(), lambda: there.to(torch.float64), lambda: there.numpy()):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(2)


def test_the_encoder_is_on_the_gpu_and_the_task_on_the_cpu(mps, photos) -> None:
    here, there = tt.load_encoder("tiny"), tt.load_encoder("tiny", "auto")
    assert there.device == MPS and there.encode_texts(["a cat"]).device == MPS
    assert step_device(there.device) == torch.device("cpu")
    task = tt.build_task(there, ["cat", "dog", "fox"])
    assert task.text.device.type == "cpu"
    torch.testing.assert_close(task.text, tt.build_task(here, ["cat", "dog", "fox"]).text)
    OnMps.threads.clear()
    paths = sorted(photos.glob("*/*"))
    features, _ = encode_images(there, paths, ViewPlan(20))
    assert features.device.type == "cpu" and len(OnMps.threads) == 1
    torch.testing.assert_close(features, encode_images(here, paths, ViewPlan(20))[0], rtol=1e-4, atol=1e-5)


def test_a_task_on_an_apple_gpu_is_refused_with_the_way_out(mps, tmp_path) -> None:
    task, stream, _ = tt.toy()
    with pytest.raises(MissingPart, match="task on the CPU"):
        task.to("mps")
    state = tt.Session(task, "dpe").save(tmp_path / "s.safetensors")
    with pytest.raises(MissingPart, match="task on the CPU"):
        tt.Session.load(state, device="mps")


def rows(file: Path) -> list[tuple[str, float]]:
    with open(file) as lines:
        return [(row["label"], float(row["confidence"])) for row in csv.DictReader(lines)]


@pytest.mark.parametrize("method", ["dpe", "tps", "dota", "zero", "tpt"])
def test_a_run_answers_as_on_the_cpu(mps, cli, photos, tmp_path, method) -> None:
    answers = []
    for device in ("cpu", "mps"):
        out = tmp_path / f"{device}.csv"
        done = cli("run", photos, "-e", "tiny", "--method", method, "--views", 3, "--device", device, "--out", out)
        assert done.code == 0, done.err
        answers.append(rows(out))
    assert [label for label, _ in answers[0]] == [label for label, _ in answers[1]]
    assert [value for _, value in answers[0]] == pytest.approx([value for _, value in answers[1]], abs=1e-3)


def test_a_saved_state_resumes_beside_an_apple_gpu(mps, cli, photos, tmp_path) -> None:
    run = ["run", photos, "-e", "tiny", "--device", "mps", "--save", tmp_path / "s.safetensors"]
    assert cli(*run, "--limit", 5, "--out", tmp_path / "a.csv").code == 0
    done = cli(*run, "--resume", tmp_path / "s.safetensors", "--out", tmp_path / "a.csv")
    assert done.code == 0 and len(rows(tmp_path / "a.csv")) == 12


def test_other_commands_run_beside_an_apple_gpu(mps, cli, photos, tmp_path) -> None:
    store, prompt = tmp_path / "f.safetensors", tmp_path / "p.safetensors"
    tiny: list[Any] = ["-e", "tiny", "--device", "mps"]
    assert cli("encode", photos, *tiny, "--out", store).code == 0
    done = cli("replay", store, "--device", "mps", "--json")
    assert done.code == 0 and json.loads(done.out)["n"] == 12 and "methods run on the CPU" in done.err
    assert cli("report", store, "--device", "mps", "--no-map", "--out", tmp_path / "r.html").code == 0
    assert cli("train-prompts", photos, *tiny, "--shots", 1, "--epochs", 2, "--out", prompt).code == 0
    done = cli("run", photos, *tiny, "--prompts", f"coop:{prompt}", "--out", tmp_path / "a.csv")
    assert done.code == 0 and len(rows(tmp_path / "a.csv")) == 12
    for _ in range(2):  # the second time, prototypes come from their file
        done = cli("eval", photos, *tiny, "--methods", "zeroshot,tps", "--seeds", "1", "--out", tmp_path / "runs")
        assert done.code == 0, done.err
        (next((tmp_path / "runs" / "cells").glob("*tps*"))).unlink()

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import testtime as tt
import testtime.datasets
from testtime.cli.app import main

CLASSES = "cat,dog,fox"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Twelve small pictures in folders named after their classes."""
    noise = np.random.default_rng(0)
    for name in CLASSES.split(","):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(4):
            pixels = noise.integers(0, 255, (40, 50, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    task, stream, labels = tt.toy(images=40)
    return tt.save_features(tmp_path / "toy.safetensors", stream, task.text, labels=labels, classnames=task.classnames)


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# replay


def test_replay_prints_one_json_object_with_the_contract_s_keys(cli, store) -> None:
    outcome = cli("replay", store, "--json")
    assert outcome.code == 0
    summary = json.loads(outcome.out)
    assert {"n", "accuracy", "zero_shot_accuracy", "seconds", "method", "settings"} <= summary.keys()
    assert summary["n"] == 40 and summary["method"] == "dpe" and summary["settings"]["alpha"] == 6.0
    assert summary["accuracy"] > summary["zero_shot_accuracy"]


def test_replay_writes_logits_and_predictions(cli, store, tmp_path) -> None:
    assert cli("replay", store, "--out", tmp_path / "o.safetensors", "--dtype", "float64").code == 0
    written = load_file(tmp_path / "o.safetensors")
    assert written["logits"].shape == (40, 8) and written["logits"].dtype == torch.float64
    assert torch.equal(written["logits"].argmax(1), written["pred"])


def test_replay_takes_settings_presets_limit_and_shuffle(cli, store) -> None:
    outcome = cli("replay", store, "--json", "--preset", "paper", "--set", "alpha=2", "--set", "queue=5", "--limit", 7)
    summary = json.loads(outcome.out)
    assert summary["n"] == 7
    assert summary["settings"]["alpha"] == 2.0 and summary["settings"]["queue"] == 5
    assert summary["settings"]["align_both"] is True


def test_shuffle_depends_on_the_seed_alone(cli, store, tmp_path) -> None:
    orders = []
    for seed in (3, 3, 4):
        cli("replay", store, "--shuffle", "--seed", seed, "--force", "--out", tmp_path / "o.safetensors")
        orders.append(load_file(tmp_path / "o.safetensors")["order"])
    assert torch.equal(orders[0], orders[1]) and not torch.equal(orders[0], orders[2])


def test_replay_without_json_shows_a_table(cli, store) -> None:
    outcome = cli("replay", store, "--method", "zeroshot")
    assert outcome.code == 0 and "zero-shot" in outcome.out and "%" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--method", "dpee"], "Did you mean 'dpe'"),
        (["--set", "alhpa=3"], "Did you mean 'alpha'"),
        (["--set", "alpha"], "KEY=VALUE"),
        (["--set", "queue=three"], "whole number"),
        (["--set", "alpha=-1"], "0 or more"),
        (["--preset", "papr"], "Did you mean 'paper'"),
        (["--dtype", "float31"], "Did you mean 'float32'"),
        (["--device", "gpu7"], "gpu7"),
        (["--limit", "0"], "at least one"),
        (["--out", "/proc/nowhere/o.safetensors"], "/proc/nowhere"),
    ],
)
def test_wrong_options_of_replay_exit_with_two_and_say_what_to_do(cli, store, arguments, said) -> None:
    outcome = cli("replay", store, *arguments)
    assert outcome.code == 2 and said in outcome.err


def broken_stores(folder: Path) -> dict[str, Path]:
    task, stream, labels = tt.toy(images=10)
    good = tt.save_features(folder / "good.safetensors", stream, task.text, labels=labels)
    from safetensors.torch import save_file

    def put(name: str, **tensors: torch.Tensor) -> Path:
        save_file(tensors, folder / f"{name}.safetensors")
        return folder / f"{name}.safetensors"

    poisoned = stream.clone()
    poisoned[7, 0, 3] = torch.nan
    halved = folder / "halved.safetensors"
    halved.write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    text = folder / "text.safetensors"
    text.write_text("hello, world; this is not what you think")
    empty = folder / "empty.safetensors"
    empty.touch()
    return {
        "image 7": put("nan", views=poisoned, text=task.text),
        "[N,V,D]": put("flat", views=stream[:, 0].contiguous(), text=task.text),
        "text must be": put("narrow", views=stream, text=task.text[:, :5].contiguous()),
        "labels must be": put("short", views=stream, text=task.text, labels=labels[:3].clone()),
        "no tensor 'text'": put("textless", views=stream),
        "cut short": halved,
        "not a safetensors": text,
        "safetensors": empty,
        "No file": folder / "absent.safetensors",
    }


def test_unusable_feature_files_exit_with_two(cli, tmp_path) -> None:
    for said, path in broken_stores(tmp_path).items():
        outcome = cli("replay", path)
        assert outcome.code == 2 and said in outcome.err, (said, outcome)


def test_recorded_settings_come_from_the_file(cli, tmp_path) -> None:
    task, stream, labels = tt.toy(images=10)
    path = tt.save_features(
        tmp_path / "t.safetensors",
        stream,
        task.text,
        labels=labels,
        metadata={"hp.alpha": "3.5", "hp.dataset": "I"},
    )
    assert json.loads(cli("replay", path, "--recorded", "--json").out)["settings"]["alpha"] == 3.5


def test_the_recorded_method_is_the_file_s_own_unless_another_is_given(cli, tmp_path) -> None:
    task, stream, _ = tt.toy(images=6)
    trace, odd = (
        tt.save_features(tmp_path / f"{name}.safetensors", stream, task.text, metadata={"method": name})
        for name in ("DMN-ZS", "nobody")
    )
    assert json.loads(cli("replay", trace, "--recorded", "--json").out)["method"] == "dmn"
    assert json.loads(cli("replay", trace, "--recorded", "--method", "tda", "--json").out)["method"] == "tda"
    refused = cli("replay", odd, "--recorded")
    assert refused.code == 2 and "an unknown method, 'nobody'; add --method" in refused.err


# run


def test_run_writes_a_row_for_every_image(cli, photos, tmp_path) -> None:
    outcome = cli("run", photos, "--classes", CLASSES, "--encoder", "tiny", "--out", tmp_path / "a.csv")
    assert outcome.code == 0, outcome.err
    written = rows(tmp_path / "a.csv")
    assert len(written) == 12
    assert [row["index"] for row in written] == [str(i) for i in range(12)]
    first = written[0]
    assert first["label"] in CLASSES and first["zero_shot"] in CLASSES and first["learned"] in ("True", "False")
    assert 0 <= float(first["confidence"]) <= 1 and float(first["entropy"]) >= 0
    assert "accuracy on 12 images" in outcome.err


def test_run_writes_json_lines_to_a_pipe(cli, photos) -> None:
    outcome = cli("run", photos, "--classes", CLASSES, "-e", "tiny", "--format", "jsonl", "--limit", 3)
    assert outcome.code == 0
    assert [json.loads(line)["index"] for line in outcome.out.splitlines()] == [0, 1, 2]


def test_run_takes_a_glob_a_list_and_standard_input(cli, photos, tmp_path, monkeypatch) -> None:
    listing = tmp_path / "list.txt"
    listing.write_text("photos/dog/1.png\nphotos/cat/0.png\n")
    assert "dog/1.png" in cli("run", listing, "--classes", CLASSES, "-e", "tiny").out.splitlines()[1]
    assert len(cli("run", f"{photos}/c*/*.png", "--classes", CLASSES, "-e", "tiny").out.splitlines()) == 5
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{photos}/fox/2.png\n"))
    assert "fox/2.png" in cli("run", "-", "--classes", CLASSES, "-e", "tiny").out.splitlines()[1]


def test_a_saved_state_resumes_where_it_stopped(cli, photos, tmp_path) -> None:
    common = ["--classes", CLASSES, "-e", "tiny", "--views", 4]
    cli("run", photos, *common, "--out", tmp_path / "whole.csv")
    cli(
        "run",
        photos,
        *common,
        "--out",
        tmp_path / "parts.csv",
        "--limit",
        5,
        "--save",
        tmp_path / "s.safetensors",
    )
    outcome = cli(
        "run", photos, *common, "--out", tmp_path / "parts.csv", "--resume", tmp_path / "s.safetensors",
        "--save", tmp_path / "s.safetensors",
    )  # fmt: skip
    assert outcome.code == 0 and "after 5 images" in outcome.err
    assert rows(tmp_path / "parts.csv") == rows(tmp_path / "whole.csv")


def test_rows_newer_than_the_state_are_run_again(cli, photos, tmp_path) -> None:
    common = ["--classes", CLASSES, "-e", "tiny"]
    cli("run", photos, *common, "--out", tmp_path / "whole.csv")
    cli(
        "run",
        photos,
        *common,
        "--out",
        tmp_path / "p.csv",
        "--limit",
        5,
        "--save",
        tmp_path / "s.safetensors",
    )
    cli("run", photos, *common, "--out", tmp_path / "later.csv", "--limit", 9)
    cut = (tmp_path / "later.csv").read_text()[:-7]  # a crash in the middle of a row, four images after the save
    (tmp_path / "p.csv").write_text(cut)
    cli("run", photos, *common, "--out", tmp_path / "p.csv", "--resume", tmp_path / "s.safetensors")
    assert rows(tmp_path / "p.csv") == rows(tmp_path / "whole.csv")


def test_resuming_with_other_classes_is_refused(cli, photos, tmp_path) -> None:
    state = tmp_path / "s.safetensors"
    cli("run", photos, "--classes", CLASSES, "-e", "tiny", "--limit", 2, "--save", state)
    outcome = cli("run", photos, "--classes", "cat,dog,owl", "-e", "tiny", "--resume", state)
    assert outcome.code == 2 and "'fox' saved, 'owl' given" in outcome.err


def test_a_saved_state_brings_its_classes_prompts_and_encoder(cli, photos, tmp_path) -> None:
    state, whole, parts = tmp_path / "s.safetensors", tmp_path / "whole.csv", tmp_path / "parts.csv"
    common = ["--classes", "fox,dog,cat,owl", "-e", "tiny:3", "--template", "a {} at dusk.", "--views", 2]
    assert cli("run", photos, *common, "--out", whole).code == 0
    assert cli("run", photos, *common, "--out", parts, "--save", state, "--limit", 5).code == 0
    again = ["run", photos, "--resume", state, "--out", parts]
    for wrong, said in (
        (["--template", "a {}."], "other text prototypes"),
        (["-e", "tiny"], "made with encoder 'tiny:3', not 'tiny'"),
        (["--classes", "fox,dog,cat"], "holds 4 classes, this task has 3"),
    ):
        found = cli(*again, *wrong)
        assert found.code == 2 and said in found.err, found.err
    found = cli(*again)
    assert found.code == 0 and "accuracy on 7 images" in found.err
    assert parts.read_bytes() == whole.read_bytes()


def test_a_method_that_tunes_prompts_resumes_without_its_options(cli, photos, tmp_path) -> None:
    state = tmp_path / "s.safetensors"
    assert cli("run", photos, "-e", "tiny", "-m", "tpt", "--views", 4, "--limit", 2, "--save", state).code == 0
    found = cli("run", photos, "--resume", state, "--limit", 2)
    assert found.code == 0 and "own settings: tpt, 4 views" in found.err, found.err


# outputs that exist


def test_an_output_that_exists_is_refused_with_both_ways_out(cli, photos, tmp_path) -> None:
    rows, state, page = tmp_path / "a.csv", tmp_path / "s.safetensors", tmp_path / "p.html"
    run = ["run", photos, "-e", "tiny"]
    assert cli(*run, "--out", rows, "--save", state, "--report", page).code == 0
    before = {path: path.read_bytes() for path in (rows, state, page)}
    for words, way in (
        (["--out", rows], f"--out {rows} already exists: --force overwrites it, --resume STATE continues it"),
        (["--save", state], f"--save {state} already exists: --force overwrites it, --resume {state} continues"),
        (["--report", page], f"--report {page} already exists: --force overwrites it; or use another name"),
        (["--resume", shutil_copy(state), "--save", state], f"--save {state} already exists"),
    ):
        found = cli(*run, *words)
        assert found.code == 2 and way in found.err, found.err
    assert before == {path: path.read_bytes() for path in before}
    everything = ["--out", rows, "--save", state, "--report", page]
    assert cli(*run, *everything, "--resume", state).code == 0  # the same command again, as an interrupt suggests
    assert cli(*run, *everything, "--force").code == 0
    assert rows.read_bytes() == before[rows] and state.read_bytes() == before[state]


def shutil_copy(path: Path) -> Path:
    other = path.with_name("copy.safetensors")
    other.write_bytes(path.read_bytes())
    return other


def test_an_empty_file_may_be_an_output(cli, photos, tmp_path) -> None:
    (tmp_path / "a.csv").touch()  # as mktemp leaves it
    assert cli("run", photos, "-e", "tiny", "--out", tmp_path / "a.csv").code == 0


def test_no_command_overwrites_a_file_without_force(cli, photos, store, tmp_path) -> None:
    mine = tmp_path / "mine.html"
    for words in (
        ["encode", photos, "-e", "tiny", "--out", mine],
        ["replay", store, "--out", mine],
        ["replay", store, "--report", mine],
        ["report", store, "--no-map", "--out", mine],
        ["train-prompts", photos, "-e", "tiny", "--shots", 1, "--epochs", 1, "--out", mine],
    ):
        mine.write_text("mine")
        found = cli(*words)
        assert found.code == 2 and f"{mine} already exists: --force overwrites it" in found.err, found.err
        assert mine.read_text() == "mine"
        assert cli(*words, "--force").code == 0 and mine.read_bytes() != b"mine"


def spoil(photos: Path) -> dict[str, Path]:
    """Bad and odd images among the good ones."""
    folder = photos / "cat"
    image = Image.open(folder / "0.png")
    image.convert("CMYK").save(folder / "cmyk.jpg")
    image.save(folder / "still.gif")
    image.resize((1, 1)).save(folder / "one.png")
    (folder / "text.jpg").write_text("not an image")
    image.save(folder / "cut.jpg")
    whole = (folder / "cut.jpg").read_bytes()
    (folder / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    header = b"IHDR" + (60000).to_bytes(4) * 2 + b"\x08\x02\x00\x00\x00"
    huge = b"\x89PNG\r\n\x1a\n" + (13).to_bytes(4) + header + zlib.crc32(header).to_bytes(4)
    data = b"IDAT" + zlib.compress(b"\0" * 64)
    huge += (len(data) - 4).to_bytes(4) + data + zlib.crc32(data).to_bytes(4)
    (folder / "huge.png").write_bytes(huge)
    return {name: folder / name for name in ("text.jpg", "cut.jpg", "huge.png")}


def test_bad_images_are_reported_and_skipped(cli, photos, tmp_path) -> None:
    bad = spoil(photos)
    outcome = cli("run", photos, "--classes", CLASSES, "-e", "tiny", "--out", tmp_path / "a.csv")
    assert outcome.code == 0
    assert len(rows(tmp_path / "a.csv")) == 15  # twelve, and the odd but good CMYK, GIF and 1x1
    for path in bad.values():
        assert str(path) in outcome.err
    assert "3 skipped" in outcome.err


def test_strict_stops_at_a_bad_image_and_keeps_what_was_written(cli, photos, tmp_path) -> None:
    spoil(photos)
    outcome = cli(
        "run", photos, "--classes", CLASSES, "-e", "tiny", "--out", tmp_path / "a.csv", "--strict",
        "--save", tmp_path / "s.safetensors",
    )  # fmt: skip
    assert outcome.code == 2 and "cut.jpg" in outcome.err
    done = rows(tmp_path / "a.csv")
    assert [Path(row["image"]).name for row in done] == ["0.png", "1.png", "2.png", "3.png", "cmyk.jpg"]
    assert tt.Session.load(tmp_path / "s.safetensors").count == len(done)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere/", "--classes", CLASSES], "nowhere"),
        (["EMPTY", "--classes", CLASSES], "EMPTY"),
        (["PHOTOS", "--classes", "cat"], "two classes or more"),
        (["PHOTOS", "--classes", "cat,dog,cat"], "cat"),
        (["PHOTOS/cat"], "has no class names. Name the classes with --classes"),
        (["PHOTOS", "--classes", CLASSES, "--classes-file", "f.txt"], "one of the two"),
        (["caltech101"], "--root"),
        (["caltech101", "--root", "PHOTOS"], "Caltech101 is not in"),
        (["caltech11", "--root", "PHOTOS"], "Did you mean 'caltech101'"),
        (["EMPTY/a.csv"], "lists no images"),
        (["EMPTY/a.tar"], "not a plain tar file"),
        (["EMPTY/a.docx", "--classes", CLASSES], "is not a dataset"),
        (["PHOTOS", "--limit", "0"], "at least one"),
        (["PHOTOS", "--classes-file", "none.txt"], "none.txt"),
        (["PHOTOS", "--classes", CLASSES, "--method", "dbe"], "Did you mean 'dpe'"),
        (["PHOTOS", "--classes", CLASSES, "--encoder", "ofline"], "Did you mean 'offline'"),
        (["PHOTOS", "--classes", CLASSES, "-e", "tiny", "--views", "0"], "views"),
        (["PHOTOS", "--classes", CLASSES, "-e", "tiny", "--format", "xml"], "csv, tsv, jsonl"),
        (["PHOTOS", "--classes", CLASSES, "-e", "tiny", "--resume", "none.safetensors"], "none.safetensors"),
        (["PHOTOS", "--classes", CLASSES, "-e", "tiny", "--template", "a photo"], "'a photo' has no {}"),
        (["PHOTOS", "-e", "tiny", "--template", "photo of"], "where the class name goes: 'photo of {}'"),
        (["PHOTOS", "-e", "tiny", "--template", "photo"], "where the class name goes: 'photo {}'"),
        (["PHOTOS", "-e", "tiny", "--template", "a {name}."], "where the class name goes: 'a {}.'"),
        (["PHOTOS", "-e", "tiny", "--out", "EMPTY/a.xlsx"], ".csv, .tsv, .jsonl, .ndjson, .parquet"),
        (["PHOTOS", "-e", "tiny", "--out", "EMPTY/a"], "its ending says its form"),
        (["PHOTOS", "-e", "tiny", "--out", "EMPTY/a.csv", "--format", "csv"], "--format is for standard output"),
        (["PHOTOS", "--classes", CLASSES, "-e", "tiny", "--template", "imagenet8"], "Did you mean 'imagenet80'"),
        (["PHOTOS", "-e", "tiny", "--shuffle", "--seed", str(2**70)], str(2**70)),
        (["PHOTOS", "-e", "tiny", "--save", "PHOTOS"], "it is a folder"),
        (["PHOTOS", "-e", "tiny", "--report", "PHOTOS/cat/0.png/run.html"], "Cannot write"),
        (["", "--classes", CLASSES], "an empty name"),
    ],
)
def test_wrong_input_of_run_exits_with_two(cli, photos, tmp_path, arguments, said) -> None:
    (tmp_path / "EMPTY").mkdir()
    if arguments[0].startswith("EMPTY/"):
        (tmp_path / arguments[0]).touch()
    words = [word.replace("PHOTOS", str(photos)).replace("EMPTY", str(tmp_path / "EMPTY")) for word in arguments]
    outcome = cli("run", *words)
    assert outcome.code == 2 and said in outcome.err, outcome


def test_an_interrupt_loses_nothing_that_was_written(photos, tmp_path) -> None:
    out, state = tmp_path / "a.csv", tmp_path / "s.safetensors"
    pipe = subprocess.Popen(
        [sys.executable, "-m", "testtime.cli.app", "run", "-", "--classes", CLASSES, "-e", "tiny", "--views", "256",
         "--out", str(out), "--save", str(state)],
        stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # a test run in the background of a shell ignores interrupts, and its children with it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert pipe.stdin is not None
    pipe.stdin.write(f"{photos}/cat/0.png\n" * 2000)
    pipe.stdin.close()
    deadline = time.time() + 300
    while time.time() < deadline and (not out.exists() or len(out.read_text().splitlines()) < 3):
        time.sleep(0.1)
    pipe.send_signal(signal.SIGINT)
    assert pipe.stderr is not None
    with pipe.stderr as messages:
        assert "Traceback" not in messages.read()
    assert pipe.wait(60) == 130
    done = rows(out)
    assert len(done) >= 2
    assert tt.Session.load(state).count == len(done)


def test_an_unwritable_path_is_refused_before_the_first_image(cli, photos, store, tmp_path) -> None:
    for place in ("--save", "--report"):
        outcome = cli("run", photos, "-e", "tiny", "--out", tmp_path / "a.csv", place, "/proc/none/x")
        assert outcome.code == 2 and "Cannot write /proc/none/x" in outcome.err
        assert not (tmp_path / "a.csv").exists()
    for words in (["replay", store, "--out"], ["replay", store, "--report"], ["report", store, "--out"]):
        outcome = cli(*words, photos)
        assert outcome.code == 2 and "it is a folder" in outcome.err and "images" not in outcome.err
    outcome = cli("encode", photos, "-e", "tiny", "--out", store, "--shard", 5)
    assert outcome.code == 2 and "it is a file, and a folder is needed" in outcome.err
    assert "of 12 images" not in outcome.err
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]  # what was tried is gone


def test_a_run_in_which_nothing_can_be_read_is_wrong_input(cli, tmp_path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.png").write_text("no picture")
    outcome = cli("run", tmp_path / "bad", "--classes", CLASSES, "-e", "tiny")
    assert outcome.code == 2 and "None of the images could be read; 1 of 1" in outcome.err


def test_options_that_a_saved_session_overrides_are_named(cli, photos, tmp_path) -> None:
    state = tmp_path / "s.safetensors"
    run = ["run", photos, "-e", "tiny", "--method", "tda"]
    assert cli(*run, "--save", state).code == 0
    again = cli(*run, "--resume", state)
    assert "own settings: tda, 1 view, seed 0" in again.err and "ignored in favour" not in again.err
    other = cli("run", photos, "-e", "tiny", "--resume", state, "--method", "dpe", "--set", "alpha=3", "--seed", "4")
    assert "--method, --set, --seed ignored in favour of the saved state" in other.err
    shuffled = cli("run", photos, "-e", "tiny", "--resume", state, "--shuffle", "--seed", "4")
    assert "ignored in favour" not in shuffled.err  # the seed is for the order


def test_a_run_that_was_finished_says_so(cli, photos, tmp_path) -> None:
    run = ["run", photos, "-e", "tiny", "--out", tmp_path / "a.csv", "--save", tmp_path / "s.safetensors"]
    cli(*run)
    again = cli(*run, "--resume", tmp_path / "s.safetensors", "--report", tmp_path / "r.html")
    assert again.code == 0 and "All 12 images are already in" in again.err and len(rows(tmp_path / "a.csv")) == 12


# encode


def test_encoded_features_replay_like_a_run(cli, photos, tmp_path) -> None:
    common = ["--classes", CLASSES, "-e", "tiny", "--views", 3]
    assert cli("encode", photos, *common, "--out", tmp_path / "f.safetensors", "--dtype", "float32").code == 0
    cli("run", photos, *common, "--out", tmp_path / "a.csv")
    cli("replay", tmp_path / "f.safetensors", "--out", tmp_path / "o.safetensors")
    names = [CLASSES.split(",")[i] for i in load_file(tmp_path / "o.safetensors")["pred"].tolist()]
    assert names == [row["label"] for row in rows(tmp_path / "a.csv")]


def test_encode_writes_shards_that_replay_as_one_store(cli, photos, tmp_path) -> None:
    common = ["--classes", CLASSES, "-e", "tiny", "--dtype", "float32"]
    cli("encode", photos, *common, "--out", tmp_path / "one.safetensors")
    for number in range(3):
        for path in list(photos.glob("*/?.png")):
            Image.open(path).rotate(90 * number).save(path.with_name(f"{path.stem}-{number}.png"))
    cli("encode", photos, *common, "--out", tmp_path / "shards", "--shard", 10)
    shards = sorted((tmp_path / "shards").glob("*.safetensors"))
    assert len(shards) == 5
    summary = json.loads(cli("replay", tmp_path / "shards", "--json").out)
    assert summary["n"] == 48 and summary["accuracy"] is not None


def test_encode_refuses_a_folder_of_nothing_but_bad_images(cli, tmp_path) -> None:
    (tmp_path / "a.jpg").write_text("no")
    outcome = cli("encode", tmp_path, "--classes", CLASSES, "-e", "tiny", "--out", tmp_path / "f.safetensors")
    assert outcome.code == 2 and "None of the 1 images" in outcome.err
    assert not (tmp_path / "f.safetensors").exists()


# the rest


@pytest.mark.parametrize("what", ["methods", "encoders", "datasets", "prompts"])
def test_lists_name_what_is_available(cli, what) -> None:
    outcome = cli("list", what)
    expected = {"methods": "dpe", "encoders": "open_clip", "datasets": "FOLDER", "prompts": "imagenet80"}[what]
    assert outcome.code == 0 and expected in outcome.out


def test_an_unknown_list_is_an_error(cli) -> None:
    outcome = cli("list", "metods")
    assert outcome.code == 2 and "Did you mean 'methods'" in outcome.err


def test_a_bench_of_unlabelled_images_is_refused(cli, photos) -> None:
    outcome = cli("bench", "systems", photos / "cat")
    assert outcome.code == 2 and "no labels to score with" in outcome.err


@pytest.mark.parametrize(
    "command", ["run", "encode", "replay", "list", "demo", "version", "data check", "data info"]
)  # fmt: skip
def test_every_command_has_help_with_an_example(cli, command) -> None:
    outcome = cli(*command.split(), "--help")
    assert outcome.code == 0 and f"testtime {command}" in outcome.out.split("Example:")[1]


def test_help_fills_the_line_and_asks_for_no_value_of_a_flag(cli) -> None:
    shown = " ".join(cli("run", "--help").out.split())
    assert "whether the image was learned from. If the images" in shown
    lines = [line for line in cli("run", "--help").out.splitlines() if "--shuffle " in line]
    assert lines and "<bool>" not in lines[0]
    wide = [line for line in cli("run", "--help").out.splitlines() if "Every row holds" in line]
    assert "learned from. If" in wide[0]  # two lines of the source


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "command",
    [
        "",
        *"run encode replay report train-prompts eval bench list demo version data".split(),
        "data check",
        "data info",
    ],
)
def test_help_shows_no_types_of_python(cli, monkeypatch, command, width) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERMINAL_WIDTH", str(width))
    shown = cli(*command.split(), "--help").out
    assert "--help" in shown and not re.search(r"<\w+|INTEGER|\bPATH\b|BOOLEAN|list\[", shown), shown


def test_version_names_the_library_that_numbers_depend_on(cli) -> None:
    assert cli("version").out.startswith(f"testtime {tt.__version__}, torch {torch.__version__}")


def test_debug_shows_the_traceback(capfd, store) -> None:
    with pytest.raises(SystemExit):
        main(["replay", str(store), "--method", "dpee", "--debug"])
    assert "Traceback" in capfd.readouterr().err


def test_a_closed_pipe_is_not_a_failure(store) -> None:
    command = f"{sys.executable} -m testtime.cli.app replay {store} --json | true"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, env=dict(os.environ)
    )
    assert "Traceback" not in done.stderr and done.returncode == 0


def test_a_full_disk_and_an_unreadable_folder_are_one_line_errors(cli, photos, tmp_path, monkeypatch) -> None:
    if os.path.exists("/dev/full"):
        outcome = cli("run", photos, "-e", "tiny", "--out", "/dev/full")
        assert outcome.code == 2 and "Cannot write /dev/full: No space left on device" in outcome.err

    def locked(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(testtime.datasets.tables, "is_saved", locked)
    outcome = cli("run", photos, "-e", "tiny")
    assert outcome.code == 2 and outcome.err == f"error: {photos}: Permission denied.\n"

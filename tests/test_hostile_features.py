"""Damaged feature files are read or refused and never crash; see `fuzz_features.py`."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import fuzz_features
import pytest
import torch
from safetensors.torch import save_file

from testtime import Features, toy
from testtime.files import write_tensors
from testtime.types import FeatureError, InputError

# cases that once crashed: labels of unusual dtypes, incomplete text towers
FOUND = (31, 79, 99, 139, 190, 424, 465, 466, 480, 660, 679)


@pytest.mark.parametrize("numbers", [FOUND, *(range(k, 140, 4) for k in range(4))])
def test_a_file_is_used_or_refused(numbers, tmp_path, capsys) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # settings in a file may overflow
        ends = {fuzz_features.use(fuzz_features.case(number, tmp_path), number) for number in numbers}
    assert ends <= {"used", "refused"} and "refused" in ends


@pytest.fixture
def parts() -> dict[str, torch.Tensor]:
    task, stream, labels = toy(classes=4, dim=8, images=6, views=2)
    return {"views": stream, "text": task.text, "labels": labels}


DEEP, HALF = "[" * 100_000, '["a", "b", "c", "\\ud800"]'


@pytest.mark.parametrize("text", [DEEP, HALF, "[" * 500 + "]" * 500, "[[], [], [], []]", "[null, 1, 2, 3]", "9" * 5000])
def test_class_names_are_printable_text(parts, tmp_path, cli, text) -> None:
    path = write_tensors(tmp_path / "a.safetensors", parts, {"classnames": text})
    with pytest.raises(FeatureError, match="'classnames' is not a JSON list of names"):
        Features(path)
    assert cli("replay", path, "--method", "zeroshot").code == 2


@pytest.mark.parametrize("key", ["images", "positions"])
@pytest.mark.parametrize("text", [DEEP, json.dumps(["\ud800"] * 6), "[1.5, 1, 1, 1, 1, 1]", "[true, 1, 1, 1, 1, 1]"])
def test_metadata_of_each_image_is_a_list_of_its_type(parts, tmp_path, key, text) -> None:
    path = write_tensors(tmp_path / "a.safetensors", parts, {key: text})
    with pytest.raises(FeatureError, match=f"'{key}' is not a JSON list with one"):
        Features(path)


def test_image_names_that_are_not_utf8_are_shown_on_a_page(parts, tmp_path, cli) -> None:
    names = json.dumps([f"{n}\udcff.png" for n in range(6)])  # as the system decodes a name that is not UTF-8
    path = write_tensors(tmp_path / "a.safetensors", parts, {"images": names})
    outcome = cli("replay", path, "--method", "zeroshot", "--report", tmp_path / "page.html")
    assert outcome.code == 0, outcome.err


def test_an_index_of_any_depth_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(DEEP)
    with pytest.raises(FeatureError, match=r"index\.json is damaged"):
        Features(tmp_path)


@pytest.mark.parametrize("kind", [torch.bool, torch.float16, torch.complex64, torch.float8_e4m3fn, torch.uint64])
def test_labels_of_another_dtype_are_refused(parts, tmp_path, kind) -> None:
    save_file(parts | {"labels": torch.ones(6).to(kind)}, tmp_path / "a.safetensors")
    with pytest.raises(FeatureError, match="labels must be whole numbers"):
        Features(tmp_path / "a.safetensors")


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_labels_of_small_integer_dtypes_are_read(parts, tmp_path, kind) -> None:
    save_file(parts | {"labels": parts["labels"].to(kind)}, tmp_path / "a.safetensors")
    assert torch.equal(Features(tmp_path / "a.safetensors").labels, parts["labels"])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0])
def test_text_without_a_direction_is_refused(parts, tmp_path, cli, value) -> None:
    parts["text"][1] = value
    save_file(parts, tmp_path / "a.safetensors")
    with pytest.raises(InputError, match="ext prototype"):
        Features(tmp_path / "a.safetensors").task()
    assert cli("replay", tmp_path / "a.safetensors").code == 2


def test_a_text_tower_that_cannot_be_used_is_refused(parts, tmp_path, cli) -> None:
    tower = {
        "ctx_init": torch.zeros(2, 8),
        "tokens": torch.zeros(4, 7, dtype=torch.int64),
        "clip.token_embedding.weight": torch.zeros(9, 8),
    }
    save_file(parts | tower, tmp_path / "a.safetensors", {"hp.text_heads": "2"})
    with pytest.raises(InputError, match="text tower"):
        Features(tmp_path / "a.safetensors").task(context=True)
    assert cli("replay", tmp_path / "a.safetensors", "--method", "tpt").code == 2
    assert cli("replay", tmp_path / "a.safetensors", "--method", "zeroshot").code == 0

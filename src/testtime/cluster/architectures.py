"""The size of a CLIP image tower from open_clip's configuration: floating point operations, weights, feature size.

Nothing is built or downloaded. Operations are those of the matrix products and convolutions of one forward pass, two
for each multiplication with its addition; normalisation, activations and softmax are left out, as is usual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from testtime.errors import InputError
from testtime.machine.lean_open_clip import open_clip
from testtime.registry import closest, split_precision


class Tower(NamedTuple):
    """The sizes of a model's image tower, and the weights of the whole model."""

    model: str
    size: int  # pixels a side of a view
    dim: int  # D, numbers in a feature
    flops: float  # operations per view
    weights: float  # of both towers
    activations: float  # numbers that a view needs on the GPU at once, about


def tower(model: str) -> Tower:
    """The sizes of an open_clip model, by its name or as `open_clip:MODEL/PRETRAINED`.

    >>> round(tower("ViT-B-16").flops / 1e9, 1)
    35.1
    """
    name = split_precision(model)[0].removeprefix("open_clip:").partition("/")[0]
    config = open_clip.get_model_config(name)
    if config is None:
        like = closest(name, open_clip.list_models()) or "ViT-B-16"
        raise InputError(
            f"--model {model}: not a model of open_clip. Did you mean '{like}'? Other encoders need --here."
        )
    vision, dim = config["vision_cfg"], config["embed_dim"]
    if "timm_model_name" in vision or vision.get("attentional_pool"):
        raise InputError(
            f"--model {model}: only the sizes of CLIP's own ViT and ResNet towers are known. Measure it: --here."
        )
    make = _resnet if isinstance(vision["layers"], Sequence) else _vit
    flops, weights, activations = make(vision, dim)
    return Tower(name, vision["image_size"], dim, flops, weights + _text_weights(config["text_cfg"], dim), activations)


def _vit(vision: Mapping[str, Any], dim: int) -> tuple[float, float, float]:
    width, layers, patch = vision["width"], vision["layers"], vision["patch_size"]
    ratio, patches = vision.get("mlp_ratio", 4.0), (vision["image_size"] // patch) ** 2
    tokens, hidden = patches + 1, int(width * ratio)
    block = 4 * width**2 + 2 * width * hidden  # queries, keys, values, output; the two of the MLP
    embedding = 3 * patch**2 * width
    flops = 2 * layers * (tokens * block + 2 * tokens**2 * width) + 2 * patches * embedding + 2 * width * dim
    weights = layers * block + embedding + tokens * width + width * dim
    # the residual stream, its normalised copy, then queries, keys and values with the output, or the hidden layer
    return flops, weights, tokens * (2 * width + max(4 * width, hidden))


def _resnet(vision: Mapping[str, Any], dim: int) -> tuple[float, float, float]:
    width, size = vision["width"], vision["image_size"]
    flops = weights = 0.0

    def convolve(side: int, kernel: int, before: int, after: int) -> None:
        nonlocal flops, weights
        weights += kernel**2 * before * after
        flops += 2 * side**2 * kernel**2 * before * after

    half = width // 2
    for before, after in ((3, half), (half, half), (half, width)):
        convolve(size // 2, 3, before, after)
    channels, side = width, size // 4
    for stage, blocks in enumerate(vision["layers"]):
        planes = width * 2**stage
        for block in range(blocks):
            below = side // 2 if stage and not block else side  # pooled after the second convolution
            convolve(side, 1, channels, planes)
            convolve(side, 3, planes, planes)
            convolve(below, 1, planes, 4 * planes)
            if not block:
                convolve(below, 1, channels, 4 * planes)
            channels, side = 4 * planes, below
    tokens = side**2 + 1
    weights += channels * (3 * channels + dim)
    flops += 2 * tokens * channels * (3 * channels + dim) + 4 * tokens**2 * channels
    return flops, weights, 3 * width * (size // 2) ** 2


def _text_weights(text: Mapping[str, Any], dim: int) -> float:
    """The weights of CLIP's text tower; 0 for one of Hugging Face, whose size the configuration does not give."""
    if "hf_model_name" in text:
        return 0.0
    width = text["width"]
    return text.get("vocab_size", 49408) * width + text["layers"] * 12 * width**2 + width * dim

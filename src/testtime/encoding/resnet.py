"""CLIP's ResNet for a GPU to run from a graph: every convolution is one call, with its norm, its sum and its ReLU.

A batch norm is a scale and a shift, which become part of the convolution before it; cuDNN adds the residual and cuts
off below zero as it writes the result. Of the attention at the end only the first token's answer is asked for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

WHOLE = (1, 1)  # no dilation


class Convolution(NamedTuple):
    """A convolution that has taken in the norm behind it."""

    weight: Tensor
    bias: Tensor
    stride: tuple[int, int]
    padding: tuple[int, int]

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """ReLU of the convolution of x, plus `add`."""
        if not x.is_cuda:
            y = F.conv2d(x, self.weight, self.bias, self.stride, self.padding)
            return (y if add is None else y + add).relu()
        rest = (self.stride, self.padding, WHOLE, 1)
        if add is None:
            return torch.cudnn_convolution_relu(x, self.weight, self.bias, *rest)
        return torch.cudnn_convolution_add_relu(x, self.weight, add, 1.0, self.bias, *rest)


class Block(NamedTuple):
    """A bottleneck: two convolutions, a mean over `pool` pixels, and one that the input is added to."""

    first: Convolution
    second: Convolution
    pool: int
    third: Convolution
    short: Tensor | None  # (C', C, 1, 1): what the input passes first; its bias is part of the third's


class Tower:
    """Features (B, D) of normalised pixels (B, 3, H, W), by the weights of open_clip's ModifiedResNet."""

    def __init__(self, visual: Any) -> None:
        self.stem = [_folded(getattr(visual, f"conv{n}"), getattr(visual, f"bn{n}")) for n in (1, 2, 3)]
        layers = (visual.layer1, visual.layer2, visual.layer3, visual.layer4)
        self.blocks = [_block(block) for layer in layers for block in layer]
        self.pool, dtype = visual.attnpool, visual.conv1.weight.dtype
        self.places = self.pool.positional_embedding.to(dtype)

    def __call__(self, pixels: Tensor) -> Tensor:
        x = pixels.to(memory_format=torch.channels_last)
        for convolution in self.stem:
            x = convolution(x)
        x = F.avg_pool2d(x, 2)
        for block in self.blocks:
            y = block.second(block.first(x))
            if block.pool > 1:
                y, x = F.avg_pool2d(y, block.pool), F.avg_pool2d(x, block.pool)
            x = block.third(y, add=x if block.short is None else F.conv2d(x, block.short))
        return self._pooled(x)

    def _pooled(self, x: Tensor) -> Tensor:
        """The answer of the mean token to all places and itself."""
        pool = self.pool
        x = x.flatten(2).transpose(1, 2)  # (B, places, C)
        x = torch.cat([x.mean(1, keepdim=True), x], 1) + self.places
        q, k, v = (
            layer(part).unflatten(2, (pool.num_heads, -1)).transpose(1, 2)
            for layer, part in ((pool.q_proj, x[:, :1]), (pool.k_proj, x), (pool.v_proj, x))
        )
        return pool.c_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(1))


def from_open_clip(visual: Any) -> Tower | None:
    """The tower of open_clip's ModifiedResNet; None for any other."""
    return Tower(visual) if type(visual).__name__ == "ModifiedResNet" and visual.attnpool is not None else None


def _block(block: Any) -> Block:
    third, short = _folded(block.conv3, block.bn3), None
    if block.downsample is not None:
        _, convolution, norm = block.downsample
        folded = _folded(convolution, norm)
        third, short = third._replace(bias=third.bias + folded.bias), folded.weight
    return Block(_folded(block.conv1, block.bn1), _folded(block.conv2, block.bn2), block.stride, third, short)


def _folded(convolution: Any, norm: Any) -> Convolution:
    weight, dtype = convolution.weight, convolution.weight.dtype
    gain = norm.weight.float() / (norm.running_var.float() + norm.eps).sqrt()
    shift = norm.bias.float() - norm.running_mean.float() * gain
    weight = (weight.float() * gain[:, None, None, None]).to(dtype).contiguous(memory_format=torch.channels_last)
    return Convolution(weight, shift.to(dtype), convolution.stride, convolution.padding)

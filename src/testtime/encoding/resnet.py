"""CLIP's ResNet for a CUDA graph, and for a CPU: every convolution is one call, fused with its norm.

Batch norms are folded into the convolutions before them; on a GPU, cuDNN adds the residual and applies the ReLU as it
writes the result. In the attention pooling at the end, only the first token's output is computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NO_DILATION = (1, 1)


class Convolution(NamedTuple):
    """A convolution with the norm after it folded in."""

    weight: Tensor
    bias: Tensor
    stride: tuple[int, int]
    padding: tuple[int, int]

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """ReLU of the convolution of x, plus `add`."""
        if not x.is_cuda:
            y = F.conv2d(x, self.weight, self.bias, self.stride, self.padding)
            return (y if add is None else y + add).relu()
        options = (self.stride, self.padding, NO_DILATION, 1)
        if add is None:
            return torch.cudnn_convolution_relu(x, self.weight, self.bias, *options)
        return torch.cudnn_convolution_add_relu(x, self.weight, add, 1.0, self.bias, *options)


class Block(NamedTuple):
    """A bottleneck: two convolutions, average pooling by `pool`, and a third one that adds the input."""

    first: Convolution
    second: Convolution
    pool: int
    third: Convolution
    shortcut: Tensor | None  # (C', C, 1, 1): projection of the input; its bias is part of the third's


class Tower:
    """Features (B, D) of normalised pixels (B, 3, H, W), with the weights of open_clip's ModifiedResNet."""

    def __init__(self, visual: Any) -> None:
        self.stem = [_fold_norm(getattr(visual, f"conv{n}"), getattr(visual, f"bn{n}")) for n in (1, 2, 3)]
        layers = (visual.layer1, visual.layer2, visual.layer3, visual.layer4)
        self.blocks = [_block(block) for layer in layers for block in layer]
        self.pool, dtype = visual.attnpool, visual.conv1.weight.dtype
        self.positions = self.pool.positional_embedding.to(dtype)

    def __call__(self, pixels: Tensor) -> Tensor:
        x = pixels.to(memory_format=torch.channels_last)
        for convolution in self.stem:
            x = convolution(x)
        x = F.avg_pool2d(x, 2)
        for block in self.blocks:
            y = block.second(block.first(x))
            if block.pool > 1:
                y, x = F.avg_pool2d(y, block.pool), F.avg_pool2d(x, block.pool)
            x = block.third(y, add=x if block.shortcut is None else F.conv2d(x, block.shortcut))
        return self._attention_pool(x)

    def _attention_pool(self, x: Tensor) -> Tensor:
        """The attention output of the mean token over all positions and itself."""
        pool = self.pool
        x = x.flatten(2).transpose(1, 2)  # (B, positions, C)
        x = torch.cat([x.mean(1, keepdim=True), x], 1) + self.positions
        q, k, v = (
            layer(part).unflatten(2, (pool.num_heads, -1)).transpose(1, 2)
            for layer, part in ((pool.q_proj, x[:, :1]), (pool.k_proj, x), (pool.v_proj, x))
        )
        return pool.c_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(1))


def from_open_clip(visual: Any) -> Tower | None:
    """The tower of open_clip's ModifiedResNet; None for any other model."""
    return Tower(visual) if type(visual).__name__ == "ModifiedResNet" and visual.attnpool is not None else None


def _block(block: Any) -> Block:
    third, shortcut = _fold_norm(block.conv3, block.bn3), None
    if block.downsample is not None:
        _, convolution, norm = block.downsample
        folded = _fold_norm(convolution, norm)
        third, shortcut = third._replace(bias=third.bias + folded.bias), folded.weight
    return Block(_fold_norm(block.conv1, block.bn1), _fold_norm(block.conv2, block.bn2), block.stride, third, shortcut)


def _fold_norm(convolution: Any, norm: Any) -> Convolution:
    weight, dtype = convolution.weight, convolution.weight.dtype
    gain = norm.weight.float() / (norm.running_var.float() + norm.eps).sqrt()
    shift = norm.bias.float() - norm.running_mean.float() * gain
    weight = (weight.float() * gain[:, None, None, None]).to(dtype).contiguous(memory_format=torch.channels_last)
    return Convolution(weight, shift.to(dtype), convolution.stride, convolution.padding)

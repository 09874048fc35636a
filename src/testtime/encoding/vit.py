"""CLIP's vision transformer as GEMMs and little else, for a CUDA graph.

It computes what the model's own layers compute, in fewer passes over memory, and compiles only two small kernels:

- queries, keys and values are one GEMM; residual sums are fused into the GEMM before them, and their biases
  accumulate in one vector until a norm reads it;
- each norm and each activation is one kernel, in float32 inside;
- the last block needs only the class token, so only its query, projection and MLP are computed.

`from_open_clip` and `from_transformers` define which models are supported; `compiled.verified` compares each with the
model itself before it is used.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(NamedTuple):
    """One residual block of width W; weights are (out, in)."""

    norm1: nn.LayerNorm
    qkv: Tensor  # (3W, W)
    qkv_bias: Tensor
    out: nn.Linear
    norm2: nn.LayerNorm
    up: nn.Linear
    down: nn.Linear


class Weights(NamedTuple):
    """A vision transformer whose feature is its class token's, projected."""

    patch: Tensor  # (W, 3, P, P)
    class_token: Tensor  # (W,)
    positions: Tensor  # (T, W)
    before: nn.LayerNorm
    blocks: tuple[Block, ...]
    after: nn.LayerNorm
    project: Tensor  # (W, D)
    heads: int
    quick: bool  # QuickGELU


class Tower:
    """Features (B, D) of normalised pixels (B, 3, H, W)."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        width = weights.patch.shape[0]
        self.patch = weights.patch.flatten(1).contiguous()  # (W, 3 P P)
        self.kernels = None
        if weights.patch.is_cuda and find_spec("triton") is not None:
            from testtime.encoding import vit_kernels

            self.kernels = vit_kernels
        # sum of the residual stream's biases so far, at each norm
        offset = weights.patch.new_zeros(width)
        self.offsets = [offset]
        for block in weights.blocks:
            self.offsets += [offset := offset + block.out.bias, offset := offset + block.down.bias]

    def __call__(self, pixels: Tensor) -> Tensor:
        weights, count = self.weights, len(pixels)
        x = self._embed(pixels)  # (B, T, W)
        tokens, width = x.shape[1:]
        x = x.flatten(0, 1)
        *blocks, last = weights.blocks
        offsets = iter(self.offsets)
        for block in blocks:
            y = self._qkv(x, next(offsets), block)
            q, k, v = y.view(count, tokens, 3, weights.heads, -1).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, width)
            x.addmm_(y, block.out.weight.T)
            x = self._mlp(x, next(offsets), block)
        y = self._norm(x, next(offsets), last.norm1)
        first = y.view(count, tokens, width)[:, 0]
        q = F.linear(first, last.qkv[:width], last.qkv_bias[:width]).view(count, 1, weights.heads, -1).transpose(1, 2)
        kv = F.linear(y, last.qkv[width:], last.qkv_bias[width:]).view(count, tokens, 2, weights.heads, -1)
        k, v = kv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, width)
        x = torch.addmm(x.view(count, tokens, width)[:, 0], y, last.out.weight.T)  # only the class tokens
        x = self._mlp(x, next(offsets), last)
        return self._norm(x, next(offsets), weights.after) @ weights.project

    def _embed(self, pixels: Tensor) -> Tensor:
        """Tokens (B, T, W) of pixels: patches by one GEMM, with their positions, normalised."""
        weights, side = self.weights, self.weights.patch.shape[-1]
        count, colours, height, width = pixels.shape
        patches = pixels.view(count, colours, height // side, side, width // side, side).permute(0, 2, 4, 1, 3, 5)
        tokens = pixels.new_empty(count, len(weights.positions), len(self.patch))
        tokens[:, 0] = weights.class_token + weights.positions[0]
        products = F.linear(patches.reshape(-1, self.patch.shape[1]), self.patch)
        torch.add(products.view(count, -1, len(self.patch)), weights.positions[1:], out=tokens[:, 1:])
        return self._norm(tokens.flatten(0, 1), self.offsets[0], weights.before).view_as(tokens)

    def _qkv(self, x: Tensor, offset: Tensor, block: Block) -> Tensor:
        return F.linear(self._norm(x, offset, block.norm1), block.qkv, block.qkv_bias)

    def _mlp(self, x: Tensor, offset: Tensor, block: Block) -> Tensor:
        y = F.linear(self._norm(x, offset, block.norm2), block.up.weight, block.up.bias)
        return x.addmm_(self._activate(y), block.down.weight.T)

    def _norm(self, x: Tensor, offset: Tensor, norm: nn.LayerNorm) -> Tensor:
        if self.kernels is None:
            return F.layer_norm(x + offset, x.shape[1:], norm.weight, norm.bias, norm.eps)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self.kernels.normalise(x, offset, norm, out)
        return out

    def _activate(self, x: Tensor) -> Tensor:
        if self.kernels is None:
            return x * torch.sigmoid(1.702 * x) if self.weights.quick else F.gelu(x)
        self.kernels.activate(x, self.weights.quick, x)
        return x


class Float8(Tower):
    """The same for bfloat16 weights, with the three large GEMMs of every block but the last in float8.

    Each row of either factor has its own scale, by its largest value: nothing is calibrated on images.
    """

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self.float8 = {
            id(block): tuple(map(quantise_rows, (block.qkv, block.up.weight, block.down.weight)))
            for block in weights.blocks[:-1]
        }

    def _qkv(self, x: Tensor, offset: Tensor, block: Block) -> Tensor:
        return scaled_gemm(*self._norm8(x, offset, block.norm1), *self.float8[id(block)][0], block.qkv_bias)

    def _mlp(self, x: Tensor, offset: Tensor, block: Block) -> Tensor:
        if id(block) not in self.float8:
            return super()._mlp(x, offset, block)
        _, up, down = self.float8[id(block)]
        y = scaled_gemm(*self._norm8(x, offset, block.norm2), *up, block.up.bias)
        return x.add_(scaled_gemm(*self._activate8(y), *down))

    def _norm8(self, x: Tensor, offset: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
        if self.kernels is None:
            return quantise_rows(self._norm(x, offset, norm))
        out = empty_rows(x)
        self.kernels.normalise(x, offset, norm, *out)
        return out

    def _activate8(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.kernels is None:
            return quantise_rows(self._activate(x))
        out = empty_rows(x)
        self.kernels.activate(x, self.weights.quick, *out)
        return out


def empty_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Output buffers of `quantise_rows` for x (N, W)."""
    return torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(len(x), 1, dtype=torch.float32)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (N, W) quantised to float8, and the scales (N, 1) to multiply them with."""
    scales = x.float().abs().amax(1, keepdim=True).clamp_min(1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (x.float() / scales).to(torch.float8_e4m3fn), scales


def scaled_gemm(x: Tensor, by_row: Tensor, y: Tensor, by_column: Tensor, bias: Tensor | None = None) -> Tensor:
    """x y.T + bias of float8 rows, in bfloat16: the only output dtype with row-wise scales."""
    if x.is_cuda:
        return torch._scaled_mm(x, y.T, by_row, by_column.T, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True)
    out = (x.float() * by_row) @ (y.float() * by_column).T
    return (out if bias is None else out + bias.float()).bfloat16()


def from_open_clip(visual: Any, kind: type[Tower] = Tower) -> Tower | None:
    """The tower of open_clip's vision transformer; None if it has parts that `Tower` does not support."""
    blocks = getattr(getattr(visual, "transformer", None), "resblocks", None)
    plain = (
        type(visual).__name__ == "VisionTransformer"
        and visual.attn_pool is None
        and visual.pool_type == "tok"
        and not getattr(visual, "final_ln_after_pool", False)
        and visual.proj is not None
        and visual.conv1.bias is None
        and isinstance(visual.ln_pre, nn.LayerNorm)
        and visual.positional_embedding.ndim == 2
    )
    if not plain or blocks is None or not all(_is_plain(block) for block in blocks):
        return None
    dtype = visual.conv1.weight.dtype

    def convert(block: Any) -> Block:
        attention, mlp = block.attn, block.mlp
        qkv = attention.in_proj_weight, attention.in_proj_bias
        return Block(block.ln_1, *qkv, attention.out_proj, block.ln_2, mlp.c_fc, mlp.c_proj)

    return kind(
        Weights(
            visual.conv1.weight,
            visual.class_embedding.to(dtype),
            visual.positional_embedding.to(dtype),
            visual.ln_pre,
            tuple(map(convert, blocks)),
            visual.ln_post,
            visual.proj.to(dtype),
            blocks[0].attn.num_heads,
            type(blocks[0].mlp.gelu).__name__ == "QuickGELU",
        )
    )


def _is_plain(block: Any) -> bool:
    """Whether a block of open_clip is attention and a two-layer MLP, and nothing else."""
    return (
        type(block).__name__ == "ResidualAttentionBlock"
        and isinstance(block.attn, nn.MultiheadAttention)
        and isinstance(block.ls_1, nn.Identity)
        and isinstance(block.ls_2, nn.Identity)
        and list(dict(block.mlp.named_children())) == ["c_fc", "gelu", "c_proj"]
        and type(block.mlp.gelu).__name__ in ("GELU", "QuickGELU")
    )


def from_transformers(model: Any, kind: type[Tower] = Tower) -> Tower | None:
    """The tower of CLIP's vision transformer in `transformers`; None for any other model."""
    vision = getattr(model, "vision_model", None)
    if type(model).__name__ != "CLIPModel" or vision is None:
        return None
    activation = model.config.vision_config.hidden_act
    if activation not in ("quick_gelu", "gelu"):
        return None
    embedded = vision.embeddings

    def convert(layer: Any) -> Block:
        attention, mlp = layer.self_attn, layer.mlp
        parts = attention.q_proj, attention.k_proj, attention.v_proj
        qkv, bias = torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts])
        return Block(layer.layer_norm1, qkv, bias, attention.out_proj, layer.layer_norm2, mlp.fc1, mlp.fc2)

    return kind(
        Weights(
            embedded.patch_embedding.weight,
            embedded.class_embedding,
            embedded.position_embedding.weight,
            vision.pre_layrnorm,
            tuple(map(convert, vision.encoder.layers)),
            vision.post_layernorm,
            model.visual_projection.weight.T.contiguous(),
            model.config.vision_config.num_attention_heads,
            activation == "quick_gelu",
        )
    )

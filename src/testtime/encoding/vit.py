"""CLIP's vision transformer as GEMMs and little else, for a CUDA graph and for a CPU.

It computes what the model's own layers compute, in fewer passes over memory, and compiles only two small kernels on a
GPU. On a CPU its GEMMs are oneDNN's (`ops.onednn`).

- queries, keys and values are one GEMM; residual sums are fused into the GEMM before them, and their biases
  accumulate in one vector until a norm reads it;
- each norm and each activation is one kernel, in float32 inside;
- the last block needs only the class token, so only its query, projection and MLP are computed.

`from_open_clip` and `from_transformers` define which models are supported; `compiled.verified` compares each with the
model itself before it is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from testtime import ops

Rows: TypeAlias = tuple[Tensor, Tensor]  # (N, W) in float8, and the scales (N, 1) to multiply them with


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
    """Features (B, D) of normalised pixels (B, 3, H, W).

    With `float8`, for bfloat16 weights, the three large GEMMs of every block but the last are in float8. Each row of
    either factor has its own scale, by its largest value: nothing is calibrated on images.
    """

    def __init__(self, weights: Weights, float8: bool = False) -> None:
        self.weights = weights
        width = weights.patch.shape[0]
        self.patch = weights.patch.flatten(1).contiguous()  # (W, 3 P P)
        self.kernels = None
        if weights.patch.is_cuda and find_spec("triton") is not None:
            from testtime.encoding import vit_kernels

            self.kernels = vit_kernels
        self.onednn = weights.patch.device.type == "cpu" and ops.onednn() is not None
        large = [part for block in weights.blocks[:-1] for part in (block.qkv, block.up.weight, block.down.weight)]
        self.float8 = {id(weight): quantise_rows(weight) for weight in large} if float8 else {}
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
            y = self._norm(x, next(offsets), block.norm1, bool(self.float8))
            y = self._gemm(y, block.qkv, block.qkv_bias)
            q, k, v = y.view(count, tokens, 3, weights.heads, -1).permute(2, 0, 3, 1, 4)
            y = self._attend(q, k, v).transpose(1, 2).reshape(-1, width)
            x = self._mlp(self._add(x, y, block.out.weight), next(offsets), block)
        y = self._norm(x, next(offsets), last.norm1)
        first = y.view(count, tokens, width)[:, 0]
        q = F.linear(first, last.qkv[:width], last.qkv_bias[:width]).view(count, 1, weights.heads, -1).transpose(1, 2)
        kv = self._gemm(y, last.qkv[width:], last.qkv_bias[width:]).view(count, tokens, 2, weights.heads, -1)
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
        products = self._gemm(patches.reshape(-1, self.patch.shape[1]), self.patch)
        torch.add(products.view(count, -1, len(self.patch)), weights.positions[1:], out=tokens[:, 1:])
        return self._norm(tokens.flatten(0, 1), self.offsets[0], weights.before).view_as(tokens)

    def _mlp(self, x: Tensor, offset: Tensor, block: Block) -> Tensor:
        float8 = id(block.up.weight) in self.float8
        y = self._gemm(self._norm(x, offset, block.norm2, float8), block.up.weight, block.up.bias)
        y = self._activate(y, float8)
        return x.add_(self._gemm(y, block.down.weight)) if float8 else self._add(x, y, block.down.weight)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of all heads: (B, heads, T, W / heads) of each."""
        if q.is_cuda or q.dtype == torch.float32:
            return F.scaled_dot_product_attention(q, k, v)
        # on a CPU, torch's kernel for half precision takes twice as long as its parts
        return ((q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)).softmax(-1) @ v

    def _gemm(self, x: Tensor | Rows, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x weight.T + bias, in float8 for rows in float8."""
        if not isinstance(x, Tensor):
            return scaled_gemm(x, self.float8[id(weight)], bias)
        return ops.onednn()(x, weight, bias, "none", [], "") if self.onednn else F.linear(x, weight, bias)

    def _add(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """x + y weight.T, maybe in place."""
        return ops.onednn().binary(y, x, weight, None, "add") if self.onednn else x.addmm_(y, weight.T)

    def _norm(self, x: Tensor, offset: Tensor, norm: nn.LayerNorm, float8: bool = False) -> Any:
        """The norm of x (N, W) plus an offset (W,); with `float8`, as from `quantise_rows`."""
        if self.kernels is None:
            y = F.layer_norm(x + offset, x.shape[1:], norm.weight, norm.bias, norm.eps)
            return quantise_rows(y) if float8 else y
        out = empty_rows(x) if float8 else (torch.empty(x.shape, dtype=x.dtype, device=x.device),)
        self.kernels.normalise(x, offset, norm, *out)
        return out if float8 else out[0]

    def _activate(self, x: Tensor, float8: bool = False) -> Any:
        """The activation of x (N, W), maybe in place; with `float8`, as from `quantise_rows`."""
        if self.kernels is None:
            y = x * torch.sigmoid(1.702 * x) if self.weights.quick else F.gelu(x)
            return quantise_rows(y) if float8 else y
        out = empty_rows(x) if float8 else (x,)
        self.kernels.activate(x, self.weights.quick, *out)
        return out if float8 else x


def empty_rows(x: Tensor) -> Rows:
    """Output buffers of `quantise_rows` for x (N, W)."""
    return torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(len(x), 1, dtype=torch.float32)


def quantise_rows(x: Tensor) -> Rows:
    """Rows (N, W) quantised to float8, and the scales (N, 1) to multiply them with."""
    scales = x.float().abs().amax(1, keepdim=True).clamp_min(1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (x.float() / scales).to(torch.float8_e4m3fn), scales


def scaled_gemm(x: Rows, y: Rows, bias: Tensor | None = None) -> Tensor:
    """x y.T + bias of float8 rows, in bfloat16: the only output dtype with row-wise scales."""
    (left, by_row), (right, by_column) = x, y
    if left.is_cuda:
        options: dict[str, Any] = {"bias": bias, "out_dtype": torch.bfloat16, "use_fast_accum": True}
        return torch._scaled_mm(left, right.T, by_row, by_column.T, **options)
    out = (left.float() * by_row) @ (right.float() * by_column).T
    return (out if bias is None else out + bias.float()).bfloat16()


# The parts of `Weights` and of `Block` by their names in open_clip and in `transformers`
OPEN_CLIP, TRANSFORMERS = range(2)
PARTS = {
    "patch": ("conv1.weight", "embeddings.patch_embedding.weight"),
    "class_token": ("class_embedding", "embeddings.class_embedding"),
    "positions": ("positional_embedding", "embeddings.position_embedding.weight"),
    "before": ("ln_pre", "pre_layrnorm"),
    "blocks": ("transformer.resblocks", "encoder.layers"),
    "after": ("ln_post", "post_layernorm"),
}
BLOCK_PARTS = {
    "norm1": ("ln_1", "layer_norm1"),
    "qkv": ("attn.in_proj_weight", "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight"),
    "qkv_bias": ("attn.in_proj_bias", "self_attn.q_proj.bias self_attn.k_proj.bias self_attn.v_proj.bias"),
    "out": ("attn.out_proj", "self_attn.out_proj"),
    "norm2": ("ln_2", "layer_norm2"),
    "up": ("mlp.c_fc", "mlp.fc1"),
    "down": ("mlp.c_proj", "mlp.fc2"),
}
QUICK = {"GELU": False, "gelu": False, "QuickGELU": True, "quick_gelu": True}  # activations


def from_open_clip(visual: Any, float8: bool = False) -> Tower | None:
    """The tower of open_clip's vision transformer; None if it has parts that `Tower` does not support."""
    if type(visual).__name__ != "VisionTransformer" or visual.pool_type != "tok" or visual.proj is None:
        return None
    block = visual.transformer.resblocks[0]
    activation = type(getattr(block.mlp, "gelu", None)).__name__
    return _extract(float8, OPEN_CLIP, visual, visual.proj, block.attn.num_heads, activation)


def from_transformers(model: Any, float8: bool = False) -> Tower | None:
    """The tower of CLIP's vision transformer in `transformers`; None for any other model."""
    if type(model).__name__ != "CLIPModel":
        return None
    config, project = model.config.vision_config, model.visual_projection.weight.T.contiguous()
    return _extract(float8, TRANSFORMERS, model.vision_model, project, config.num_attention_heads, config.hidden_act)


def _extract(float8: bool, library: int, vision: Any, project: Tensor, heads: int, activation: str) -> Tower | None:
    """The tower of a vision transformer; None if it has parameters besides those of `Weights`, or lacks some."""

    def find(module: Any, parts: dict[str, tuple[str, str]]) -> dict[str, Any]:
        found = {part: attrgetter(*names[library].split())(module) for part, names in parts.items()}
        return {part: torch.cat(value) if isinstance(value, tuple) else value for part, value in found.items()}

    try:
        parts = find(vision, PARTS)
        blocks = tuple(Block(**find(block, BLOCK_PARTS)) for block in parts.pop("blocks"))
    except AttributeError:
        return None
    size = _size([*parts.values(), *chain.from_iterable(blocks), project])
    whole = _size([vision]) + (project.numel() if library == TRANSFORMERS else 0)  # which keeps it elsewhere
    if size != whole or not isinstance(parts["before"], nn.LayerNorm) or activation not in QUICK:
        return None
    dtype = parts["patch"].dtype
    parts |= {name: parts[name].to(dtype) for name in ("class_token", "positions")}
    weights = Weights(**parts, blocks=blocks, project=project.to(dtype), heads=heads, quick=QUICK[activation])
    return Tower(weights, float8)


def _size(parts: Iterable[Any]) -> int:
    """The number of values in tensors and in the parameters of modules."""
    return sum(part.numel() if isinstance(part, Tensor) else _size(part.parameters()) for part in parts)

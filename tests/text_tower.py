"""A reference implementation of a trace's text tower: every token, no chunks, no modules."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from testtime import Task


class TensorContext:
    """The context of a stored run: OpenAI's text transformer from tensors under `clip.*`."""

    def __init__(self, tensors: dict[str, Tensor], heads: int, eps: float) -> None:
        self.weights = {name.removeprefix("clip."): t for name, t in tensors.items() if name.startswith("clip.")}
        self.ids = tensors["tokens"]
        self.start = tensors["ctx_init"]
        self.heads, self.eps = heads, eps

    def __call__(self, tokens: Tensor) -> Tensor:
        if tokens.ndim == 3:
            return torch.stack([self(one) for one in tokens])
        return self.by_class(tokens.expand(len(self.ids), *tokens.shape))

    def by_class(self, tokens: Tensor) -> Tensor:
        def get(name: str) -> Tensor:
            return self.weights[name].to(tokens)

        def norm(x: Tensor, name: str) -> Tensor:
            return layer_norm(x, x.shape[-1:], get(f"{name}.weight"), get(f"{name}.bias"), self.eps)

        def dense(x: Tensor, name: str) -> Tensor:
            return linear(x, get(f"{name}.weight"), get(f"{name}.bias"))

        table = get("token_embedding.weight")
        n = tokens.shape[1]
        x = torch.cat([table[self.ids[:, :1]], tokens, table[self.ids[:, 1 + n :]]], 1) + get("positional_embedding")
        length = x.shape[1]
        ahead = torch.ones(length, length).triu(1).bool()
        layers = sum(name.endswith("ln_1.weight") for name in self.weights)
        for block in (f"transformer.resblocks.{i}" for i in range(layers)):
            mixed = linear(
                norm(x, f"{block}.ln_1"), get(f"{block}.attn.in_proj_weight"), get(f"{block}.attn.in_proj_bias")
            )
            # (C, heads, length, width of a head)
            query, key, value = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in mixed.chunk(3, 2))
            scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(ahead, -torch.inf)
            x = x + dense((scores.softmax(-1) @ value).transpose(1, 2).flatten(2), f"{block}.attn.out_proj")
            inner = dense(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc")
            x = x + dense(inner * (1.702 * inner).sigmoid(), f"{block}.mlp.c_proj")
        ends = norm(x, "ln_final")[torch.arange(len(x)), self.ids.argmax(1)]
        features = ends @ get("text_projection")
        return features / features.norm(dim=1, keepdim=True)


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors and the metadata of a trace."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()


def stored_task(tensors: dict[str, Tensor], metadata: dict[str, str], dtype: torch.dtype) -> tuple[Task, Tensor]:
    """The task of a trace with its text tower, and its stream of views, unit rows."""
    context = TensorContext(tensors, int(metadata["hp.text_heads"]), float(metadata["hp.ln_eps"]))
    with torch.no_grad():
        text = context(context.start.to(dtype))
    names = tuple(metadata["stream.classnames"].split("|"))
    views = tensors["views"].double()
    stream = (views / views.norm(dim=2, keepdim=True)).to(dtype)
    return Task(text, names, float(metadata["logit_scale"]), context=context), stream

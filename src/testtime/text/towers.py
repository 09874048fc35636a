"""Text towers after the token embedding: from a prompt's vectors to a text feature.

A tower maps embedded prompts (R, L, width) and their ids to unnormalised features (R, D). Its weights are the
encoder's own.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from testtime.types import MissingPart

TOKEN_EMBEDDINGS = ("token_embedding", "word_embeddings")  # names of token embeddings in transformers


class OpenClipTower(nn.Module):
    """The text transformer of an open_clip model, after the token embedding; the modules are the model's own."""

    def __init__(self, text: Any, pool: str, eos: int) -> None:
        super().__init__()
        self.transformer = text.transformer
        self.ln_final = text.ln_final
        self.projection = text.text_projection  # (width, D), a linear layer, or none
        self.positions = text.positional_embedding  # (longest, width)
        self.pool, self.eos = pool, eos
        self.last = getattr(text, "cls_emb", None)  # CoCa: a learned token after all others, used for pooling
        mask = getattr(text, "attn_mask", None)
        self.mask: Tensor | None
        self.register_buffer("mask", None if mask is None else mask.detach().clone(), persistent=False)
        self.hides_padding = getattr(text, "use_pad_mask", False) or self.last is not None
        self.padding, self.heads = getattr(text, "pad_id", 0), getattr(text, "heads", 1)
        self.corrected = getattr(text, "correct_cls_mask", False)

    def length_needed(self, ids: Tensor) -> int:
        """How many tokens of the prompts (C, L) can affect the result: with a causal mask, up to the end of text."""
        if self.mask is None or self.last is not None or self.pool not in ("argmax", "eos"):
            return ids.shape[1]
        return int(self._end(ids).max()) + 1

    def forward(self, prompts: Tensor, ids: Tensor) -> Tensor:
        """Features (R, D) of embedded prompts (R, L, width) with ids (R, L)."""
        if self.last is not None:
            prompts = torch.cat([prompts, self.last.expand(len(prompts), 1, -1)], dim=1)
        length = prompts.shape[1]
        mask = None if self.mask is None else self.mask[:length, :length]
        if self.hides_padding:
            hidden_keys = self._padding_mask(ids, prompts)
            mask = hidden_keys if mask is None else mask[None] + hidden_keys
        hidden = self.transformer(prompts + self.positions[:length], attn_mask=mask)
        # the norm is per token, so it can follow the pooling
        features = self.ln_final(self._pooled(hidden, ids))
        if isinstance(self.projection, nn.Linear):
            return self.projection(features)
        return features if self.projection is None else features @ self.projection

    def _padding_mask(self, ids: Tensor, prompts: Tensor) -> Tensor:
        """Attention mask of padding for prompts (R, L, width): (R * heads, L, L) of 0 and -inf."""
        valid = ids != self.padding
        if self.last is not None:
            always = torch.ones_like(valid[:, :1])
            # CoCa's published weights were trained with the mask off by one
            valid = torch.cat([valid, always] if self.corrected else [always, valid], dim=1)
        mask = prompts.new_zeros(valid.shape).masked_fill_(~valid, float("-inf"))
        return mask[:, None].expand(-1, prompts.shape[1], -1).repeat_interleave(self.heads, dim=0)

    def _pooled(self, hidden: Tensor, ids: Tensor) -> Tensor:
        if self.last is not None or self.pool == "last":
            return hidden[:, -1]
        if self.pool == "first":
            return hidden[:, 0]
        return hidden[torch.arange(len(hidden), device=hidden.device), self._end(ids)]

    def _end(self, ids: Tensor) -> Tensor:
        """The index of each text's end token; with "argmax" it has the largest id."""
        return ids.argmax(1) if self.pool == "argmax" else ids.eq(self.eos).int().argmax(1)


class MeanTower(nn.Module):
    """A BERT after the token embedding, averaged over a text's tokens, followed by `zeros` zero columns."""

    def __init__(self, language: nn.Module, padding: int, zeros: int) -> None:
        super().__init__()
        self.language = language
        self.padding, self.zeros = padding, zeros

    def forward(self, prompts: Tensor, ids: Tensor) -> Tensor:
        """Features (R, D) of embedded prompts (R, L, width) with ids (R, L)."""
        mask = ids != self.padding
        hidden = self.language(inputs_embeds=prompts, attention_mask=mask.long()).last_hidden_state
        mean = (hidden * mask[..., None]).sum(1)  # unnormalised: only its direction matters
        return nn.functional.pad(mean, (0, self.zeros))


class PromptEmbedding(nn.Module):
    """Replaces a model's token embedding: returns the prompts set by this thread, whatever the ids."""

    def __init__(self) -> None:
        super().__init__()
        self.local = threading.local()

    def __deepcopy__(self, memo: dict[int, Any]) -> PromptEmbedding:
        return PromptEmbedding()

    def forward(self, ids: Tensor) -> Tensor:
        """The embedded prompts (R, L, width)."""
        return self.local.prompts


class TransformersTower(nn.Module):
    """The text half of a dual encoder of transformers, with only its token embedding replaced.

    So padding, masks, positions, pooling and projection are the model's own, in any version. `inputs` names the
    model's inputs besides the vectors, ids first.
    """

    def __init__(self, model: Any, inputs: Sequence[str], name: str) -> None:
        super().__init__()
        # modules are copied, weights are shared
        memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        self.model = copy.deepcopy(model, memo)
        self.inputs = tuple(inputs)
        del self.model.vision_model
        embeddings = [
            (path, part)
            for path, part in self.model.text_model.named_modules()
            if isinstance(part, nn.Embedding) and path.rpartition(".")[2] in TOKEN_EMBEDDINGS
        ]
        if len(embeddings) != 1:
            raise MissingPart(
                f"The text tower of '{name}' ({type(model.text_model).__name__}) has no recognised token "
                "embedding, which prompt tuning needs. Use a CLIP, SigLIP, ALIGN or BERT model."
            )
        ((path, self.embed),) = embeddings
        self.embedding = PromptEmbedding()
        self.model.text_model.set_submodule(path, self.embedding)

    def forward(self, prompts: Tensor, ids: Tensor) -> Tensor:
        """Features (R, D) of embedded prompts (R, L, width) with inputs (R, kinds, L)."""
        self.embedding.local.prompts = prompts
        try:
            found = self.model.get_text_features(**dict(zip(self.inputs, ids.unbind(1), strict=True)))
        finally:
            del self.embedding.local.prompts
        # a tensor up to version 4, an object from 5
        return found if isinstance(found, Tensor) else found.pooler_output

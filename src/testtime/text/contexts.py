"""Contexts: prompts whose first words are free vectors, through an encoder's own text tower to prototypes.

A prompt is what the tokenizer makes of "a photo of a NAME.", with the vectors of "a photo of a" replaced by tokens
that a method may move (Zhou et al., "Learning to Prompt for Vision-Language Models", IJCV 2022). The tower is
frozen: gradients reach the tokens and nothing else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from testtime.ops import unit
from testtime.text.prompts import check_classes
from testtime.text.towers import MeanTower, OpenClipTower, TransformersTower
from testtime.types import Context, Encoder, InputError, MissingPart

WORDS = "a photo of a"
CHUNK = 128  # prompts that pass the tower at once
Parts = tuple[nn.Module, Tensor, Tensor]  # tower, embedded prompts (C, L, width) and ids (C, ...), all in one place
KEPT = 1  # chunks whose way through the tower is kept for all images: most tasks have no more classes


def build_context(encoder: Encoder, classnames: Sequence[str], words: str = WORDS, chunk: int = CHUNK) -> SoftPrompts:
    """Prompts "`words` NAME." of all classes as a function of the vectors of `words`.

    `chunk` prompts pass the tower at a time; see `SoftPrompts` for what that costs. An encoder without a text
    tower that gradients can pass is a MissingPart.

    >>> from testtime import load_encoder
    >>> context = build_context(load_encoder("tiny"), ["cat", "dog", "grand_piano"])
    >>> context.start.shape, context(context.start).shape
    (torch.Size([4, 64]), torch.Size([3, 32]))
    """
    names = check_classes(classnames, allow_duplicates=True)
    soft_prompts = getattr(encoder, "soft_prompts", None)  # see types.PromptEncoder
    if soft_prompts is None:
        raise MissingPart(
            f"Encoder '{encoder.name}' offers no text tower that gradients can pass, which prompt tuning needs. "
            "Use open_clip:MODEL/PRETRAINED, hf:REPO or offline."
        )
    return soft_prompts(names, " ".join(words.split()), chunk)


class Start:
    """Prototypes at the tokens that every image starts from, and the way back from them to those tokens.

    The tokens are the same for every image, so the tower's forward pass is too: it is computed once, and of the first
    `kept` chunks also its graph is kept, which each image's gradient is then sent back through. Of the other chunks it
    is computed again, once for all images whose gradients are asked for together.
    """

    def __init__(self, tokens: Tensor, chunks: Sequence[Callable[[Tensor], Tensor]], kept: int = KEPT) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            self.tokens = tokens.detach().clone().requires_grad_()  # (n, width)
            self._later = chunks[kept:]
            self._graphs = [chunk(self.tokens) for chunk in chunks[:kept]]
            with torch.no_grad():
                rows = [rows.detach() for rows in self._graphs] + [chunk(self.tokens) for chunk in self._later]
            self.text = torch.cat(rows)  # (C, D)

    def gradients(self, by_text: Tensor) -> Tensor:
        """Gradients by the tokens of losses whose gradients by the prototypes are given: (B, C, D) -> (B, n, width)."""
        total = by_text.new_zeros(len(by_text), *self.tokens.shape)
        first = 0
        with torch.inference_mode(False), torch.enable_grad():
            for rows in chain(self._graphs, (chunk(self.tokens) for chunk in self._later)):
                for image, wanted in enumerate(by_text[:, first : first + len(rows)]):
                    (grad,) = torch.autograd.grad(rows, self.tokens, wanted, retain_graph=True)
                    total[image] += grad
                first += len(rows)
        return total


def at_start(context: Context, like: Tensor) -> Start:
    """What a tuning through `context` begins with: what it keeps itself, or else made for this call."""
    if isinstance(context, SoftPrompts):
        return context.at_start(like)
    return Start(context.start.to(like), [context])


class SoftPrompts:
    """One prompt a class, with n vectors in it that are free; a `Context`.

    `tower` maps embedded prompts (R, L, width) and their token ids (R, ...) to features (R, D) of any length.
    `embedded` (C, L, width) and `ids` (C, ...) are the prompts of the classes; tokens stand in for the positions from
    `first` on. A call computes in the dtype and on the device of its tokens, with a copy of the tower where the
    encoder's own is elsewhere or in another precision; copies are kept.

    Memory: prompts pass the tower `chunk` at a time. Under gradients, where there are several chunks, only tokens
    and results are kept, and each chunk is computed again on the way back. So the peak is the activations of one
    chunk, about 12 * chunk * L * layers * width numbers, whatever C and B are, plus results (B, C, D). For CLIP's
    ViT-B/16 (12 layers, 512 wide) and 128 prompts that is 0.6 GB in float32 at 16 tokens a prompt, 2.9 GB at all 77.
    `at_start` keeps the activations of as many more chunks as `kept` says.
    """

    def __init__(
        self,
        tower: nn.Module,
        embedded: Tensor,
        ids: Tensor,
        start: Tensor,
        first: int,
        chunk: int = CHUNK,
        kept: int = KEPT,
    ) -> None:
        if chunk < 1:
            raise InputError(f"chunk={chunk}: at least one prompt at a time.")
        self.start = start  # (n, width)
        self.chunk = chunk
        self.kept = kept
        self._ids = ids
        self._first = first
        self._own = tower.eval().requires_grad_(False), embedded
        self._made: dict[tuple[torch.device, torch.dtype], Parts] = {}
        self._starts: dict[tuple[torch.device, torch.dtype], Start] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_starts": {}}  # graphs cannot be copied; they are made again

    def starting_from(self, tokens: Tensor) -> SoftPrompts:
        """The same prompts with other tokens (n, width) to start from."""
        self._check(tokens, 2)
        other = copy.copy(self)
        other.start = tokens
        return other

    def at_start(self, like: Tensor) -> Start:
        """What a tuning begins with, on the device and in the dtype of `like`; worked out once and kept."""
        place = like.device, like.dtype
        if place not in self._starts:
            classes = torch.arange(len(self._ids), device=like.device)
            chunks = [partial(_start_rows, self._first, self._at(like), some) for some in classes.split(self.chunk)]
            self._starts[place] = Start(self.start.to(like), chunks, self.kept)
        return self._starts[place]

    def __call__(self, tokens: Tensor) -> Tensor:
        """Unit prototypes of prompts that begin with `tokens`: (n, width) -> (C, D), or (B, n, width) -> (B, C, D)."""
        self._check(tokens, 2 if tokens.ndim == 2 else 3)
        sets = tokens if tokens.ndim == 3 else tokens[None]
        classes = torch.arange(len(self._ids), device=tokens.device)
        which = torch.arange(len(sets), device=tokens.device)
        rows = self._prototypes(sets, which.repeat_interleave(len(classes)), classes.repeat(len(sets)))
        prototypes = rows.unflatten(0, (len(sets), len(classes)))
        return prototypes if tokens.ndim == 3 else prototypes[0]

    def by_class(self, tokens: Tensor) -> Tensor:
        """Unit prototypes where every class has tokens of its own: (C, n, width) -> (C, D)."""
        self._check(tokens, 3)
        if len(tokens) != len(self._ids):
            raise InputError(f"Tokens for {len(tokens)} classes, where there are {len(self._ids)}.")
        classes = torch.arange(len(self._ids), device=tokens.device)
        return self._prototypes(tokens, classes, classes)

    def _check(self, tokens: Tensor, ndim: int) -> None:
        if tokens.ndim != ndim or tokens.shape[-2:] != self.start.shape:
            raise InputError(
                f"Context tokens must be {' x '.join(map(str, self.start.shape))}, as many as there are words in the "
                f"prompt this was built with; got {tuple(tokens.shape)}."
            )

    def _prototypes(self, sets: Tensor, which: Tensor, classes: Tensor) -> Tensor:
        """Unit rows (R, D): row r is the prompt of class `classes[r]` with the tokens `sets[which[r]]`."""
        parts = self._at(sets)
        pairs = list(zip(which.split(self.chunk), classes.split(self.chunk), strict=True))
        # a single chunk is kept whole: computing it again would save nothing
        again = len(pairs) > 1 and torch.is_grad_enabled() and sets.requires_grad
        rows = [
            checkpoint(_rows, self._first, parts, sets, *pair, use_reentrant=False, preserve_rng_state=False)
            if again
            else _rows(self._first, parts, sets, *pair)
            for pair in pairs
        ]
        return torch.cat(rows)

    def _at(self, like: Tensor) -> Parts:
        """Tower, embedded prompts and ids on the device and in the dtype of `like`."""
        place = like.device, like.dtype
        if place not in self._made:
            tower, embedded = self._own
            with torch.inference_mode(False):  # tensors born in inference mode could never carry gradients
                weight = next(tower.parameters())
                if (weight.device, weight.dtype) != place:
                    tower = copy.deepcopy(tower).to(*place).requires_grad_(False)
                self._made[place] = tower, embedded.to(*place), self._ids.to(like.device)
        return self._made[place]


def _rows(first: int, parts: Parts, sets: Tensor, which: Tensor, classes: Tensor) -> Tensor:
    """Unit rows (R, D): row r is the prompt of class `classes[r]` with the tokens `sets[which[r]]` from `first` on."""
    tower, embedded, ids = parts
    fixed = embedded[classes]
    stop = first + sets.shape[1]
    # one set of tokens is repeated, several are picked: the same rows, but the sum on the way back is cheaper
    free = sets.expand(len(which), -1, -1) if len(sets) == 1 else sets[which]
    prompts = torch.cat([fixed[:, :first], free, fixed[:, stop:]], dim=1)
    return unit(tower(prompts, ids[classes]))


def _start_rows(first: int, parts: Parts, classes: Tensor, tokens: Tensor) -> Tensor:
    """Unit rows (R, D) of the prompts of `classes` (R,), all with the same tokens (n, width)."""
    return _rows(first, parts, tokens[None], torch.zeros_like(classes), classes)


# CLIP and its kin


def stored_context(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], chunk: int = CHUNK) -> SoftPrompts:
    """The context of a feature file that carries a text tower of its own, as stored runs of TPT do.

    `tensors` are the tower under `clip.*` (OpenAI's names), `tokens` (C, L), the prompts in its own vocabulary, and
    `ctx_init` (n, width), which stands after the first token; `metadata` says `hp.text_heads`.
    """
    from testtime.machine.lean_open_clip import open_clip

    weights = {name.removeprefix("clip."): t for name, t in tensors.items() if name.startswith("clip.")}
    missing = {"tokens", "ctx_init"} - set(tensors) | {"hp.text_heads"} - set(metadata)
    table = weights.get("token_embedding.weight")
    if missing or table is None:
        what = sorted(missing) or ["clip.token_embedding.weight"]
        raise MissingPart(f"This file carries no whole text tower, which prompt tuning needs; it lacks {what[0]!r}.")
    activation = metadata.get("hp.activation", "quickgelu")
    if activation not in ("quickgelu", "gelu"):
        raise MissingPart(
            f"The stored text tower's activation '{activation}' is unknown; quickgelu and gelu are known."
        )
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        text = open_clip.transformer.TextTransformer(
            context_length=len(weights["positional_embedding"]),
            vocab_size=len(table),
            width=table.shape[1],
            heads=int(metadata["hp.text_heads"]),
            layers=sum(name.endswith(".ln_1.weight") for name in weights),
            output_dim=weights["text_projection"].shape[1],
            act_layer=open_clip.transformer.QuickGELU if activation == "quickgelu" else nn.GELU,
        )
    text.load_state_dict({name: value for name, value in weights.items() if name != "logit_scale"})
    tower = OpenClipTower(text, "argmax", 0)
    ids = tensors["tokens"][:, : tower.needed(tensors["tokens"])]
    return SoftPrompts(tower, table[ids], ids, tensors["ctx_init"], 1, chunk)


def open_clip_prompts(encoder: Any, names: Sequence[str], words: str, chunk: int) -> SoftPrompts:
    model = encoder.model
    if hasattr(model, "token_embedding"):  # CLIP: the text tower's parts are the model's own
        text, pool, eos = model, model.text_pool_type, getattr(model, "text_eos_id", 0)
    elif hasattr(getattr(model, "text", None), "token_embedding"):
        text, pool, eos = model.text, model.text.pool_type, getattr(model.text, "eos_id", 0)
    else:
        text, pool, eos = None, "none", 0
    if text is None or pool not in ("argmax", "eos", "first", "last"):
        raise MissingPart(
            f"The text tower of '{encoder.name}' is not open_clip's own, and prompt tuning cannot get at its tokens. "
            "Use a model such as open_clip:ViT-B-16/openai."
        )
    ids = encoder.tokenizer(_texts(names, words)).to(encoder.device)  # (C + 2, context length)
    span, ids = _span(ids, words), ids[:-2]
    tower = OpenClipTower(text, pool, eos)
    ids = ids[:, : tower.needed(ids)]
    return _soft_prompts(tower, text.token_embedding, ids, ids, span, chunk)


def _texts(names: Sequence[str], words: str) -> list[str]:
    """The prompts of all classes, and for `_span` the words alone and no text."""
    return [*(f"{words} {name}." for name in names), words, ""]


def _span(ids: Tensor, words: str) -> slice:
    """Where the tokens of `words` are in all prompts, from the ids (C + 2, L) of `_texts`."""
    *prompts, alone, empty = ids
    span = slice(_agree(empty, alone), min(_agree(row, alone) for row in prompts))
    if span.stop <= span.start:
        raise InputError(f"The context words {words!r} leave no tokens to tune; give some, as in {WORDS!r}.")
    return span


def _soft_prompts(
    tower: nn.Module, embed: Callable[[Tensor], Tensor], tokens: Tensor, ids: Tensor, span: slice, chunk: int
) -> SoftPrompts:
    """Prompts of `tokens` (C, L) with those in `span` free; `ids` is what the tower is given of them."""
    with torch.inference_mode(False), torch.no_grad():
        embedded = embed(tokens).float()
    return SoftPrompts(tower, embedded, ids, embedded[0, span].clone(), span.start, chunk)


def _agree(one: Tensor, other: Tensor) -> int:
    """How many leading tokens two texts share."""
    return int((one == other).int().cumprod(0).sum())


# the offline encoder


def offline_prompts(encoder: Any, names: Sequence[str], words: str, chunk: int) -> SoftPrompts:
    rows = [text.ids for text in encoder.tokenizer.encode_batch(_texts(names, words))]  # padded to the longest
    ids = torch.tensor(rows, device=encoder.device)
    tower = MeanTower(encoder.language, encoder.tokenizer.padding["pad_id"], encoder.dim - encoder.width)
    embed = encoder.language.get_input_embeddings()
    return _soft_prompts(tower, embed, ids[:-2], ids[:-2], _span(ids, words), chunk)


# transformers


def transformers_prompts(encoder: Any, names: Sequence[str], words: str, chunk: int) -> SoftPrompts:
    inputs = encoder.tokenize(_texts(names, words))
    span = _span(inputs["input_ids"], words)
    inputs = {name: values[:-2] for name, values in inputs.items()}
    if "attention_mask" in inputs:  # what it hides reaches nothing, where all have it at their end
        longest = int(inputs["attention_mask"].sum(1).max())
        inputs = {name: values[:, :longest] for name, values in inputs.items()}
    tower = TransformersTower(encoder.model, tuple(inputs), encoder.name)
    stacked = torch.stack(list(inputs.values()), dim=1)  # (C, kinds of input, L)
    return _soft_prompts(tower, tower.embed, inputs["input_ids"], stacked, span, chunk)

"""Contexts: prompts whose first words are tunable vectors, encoded into prototypes by the encoder's text tower.

A prompt is the tokenized "a photo of a NAME.", with the vectors of "a photo of a" replaced by tokens that a method
may tune (Zhou et al., "Learning to Prompt for Vision-Language Models", IJCV 2022). The tower is frozen: gradients
reach only the tokens.
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

from testtime.machine.devices import step_device
from testtime.ops import unit
from testtime.text.prompts import check_classes
from testtime.text.towers import MeanTower, OpenClipTower, TransformersTower
from testtime.types import Context, Encoder, InputError, MissingPart

WORDS = "a photo of a"
CHUNK = 128  # prompts per pass through the tower
Parts = tuple[nn.Module, Tensor, Tensor]  # tower, embedded prompts (C, L, width) and ids (C, ...), on one device
KEPT = 1  # chunks whose graph through the tower is kept for all images: most tasks have no more classes


def build_context(encoder: Encoder, classnames: Sequence[str], words: str = WORDS, chunk: int = CHUNK) -> SoftPrompts:
    """Prompts "`words` NAME." of all classes as a function of the vectors of `words`.

    `chunk` prompts pass the tower at a time; see `SoftPrompts` for the memory this takes. An encoder without a
    differentiable text tower is a MissingPart.

    >>> from testtime import load_encoder
    >>> context = build_context(load_encoder("tiny"), ["cat", "dog", "grand_piano"])
    >>> context.start.shape, context(context.start).shape
    (torch.Size([4, 64]), torch.Size([3, 32]))
    """
    names = check_classes(classnames, allow_duplicates=True)
    soft_prompts = getattr(encoder, "soft_prompts", None)  # see types.PromptEncoder
    if soft_prompts is None:
        raise MissingPart(
            f"Encoder '{encoder.name}' offers no text tower with gradients, which prompt tuning needs. "
            "Use open_clip:MODEL/PRETRAINED, hf:REPO or offline."
        )
    return soft_prompts(names, " ".join(words.split()), chunk)


class Start:
    """Prototypes at the tokens that every image starts from, and the backward pass to those tokens.

    The tokens are the same for every image, so the tower's forward pass is too: it is computed once. The graph of the
    first `kept` chunks is kept, and each image's gradient is propagated back through it. The other chunks are
    recomputed, once for all images whose gradients are requested together.
    """

    def __init__(self, tokens: Tensor, chunks: Sequence[Callable[[Tensor], Tensor]], kept: int = KEPT) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            self.tokens = tokens.detach().clone().requires_grad_()  # (n, width)
            self._recomputed = chunks[kept:]
            self._graphs = [chunk(self.tokens) for chunk in chunks[:kept]]
            with torch.no_grad():
                rows = [rows.detach() for rows in self._graphs] + [chunk(self.tokens) for chunk in self._recomputed]
            self.text = torch.cat(rows)  # (C, D)

    def gradients(self, by_text: Tensor) -> Tensor:
        """Gradients of losses by the tokens, from their gradients by the prototypes: (B, C, D) -> (B, n, width)."""
        total = by_text.new_zeros(len(by_text), *self.tokens.shape)
        first = 0
        with torch.inference_mode(False), torch.enable_grad():
            for rows in chain(self._graphs, (chunk(self.tokens) for chunk in self._recomputed)):
                for image, wanted in enumerate(by_text[:, first : first + len(rows)]):
                    (grad,) = torch.autograd.grad(rows, self.tokens, wanted, retain_graph=True)
                    total[image] += grad
                first += len(rows)
        return total


def at_start(context: Context, like: Tensor) -> Start:
    """The start of tuning through `context`: its own cached one, or else a new one."""
    if isinstance(context, SoftPrompts):
        return context.at_start(like)
    return Start(context.start.to(like), [context])


class SoftPrompts:
    """One prompt per class, with n tunable vectors in it; a `Context`.

    `tower` maps embedded prompts (R, L, width) and their token ids (R, ...) to unnormalised features (R, D).
    `embedded` (C, L, width) and `ids` (C, ...) are the prompts of the classes; tokens replace the positions from
    `first` on. A call computes in the dtype and on the device of its tokens, with a cached copy of the tower if the
    encoder's own has another device or dtype.

    Memory: prompts pass the tower `chunk` at a time. With gradients and several chunks, only tokens and results are
    kept, and each chunk is recomputed in the backward pass. So the peak is the activations of one chunk, about
    12 * chunk * L * layers * width numbers, whatever C and B are, plus results (B, C, D). For CLIP's
    ViT-B/16 (12 layers, 512 wide) and 128 prompts that is 0.6 GB in float32 at 16 tokens a prompt, 2.9 GB at all 77.
    `at_start` also keeps the activations of `kept` chunks.
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
        self._original = tower.eval().requires_grad_(False), embedded
        self._copies: dict[tuple[torch.device, torch.dtype], Parts] = {}
        self._starts: dict[tuple[torch.device, torch.dtype], Start] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_starts": {}}  # graphs cannot be copied; they are rebuilt

    def starting_from(self, tokens: Tensor) -> SoftPrompts:
        """The same prompts with other tokens (n, width) to start from."""
        self._check(tokens, 2)
        other = copy.copy(self)
        other.start = tokens
        return other

    def at_start(self, like: Tensor) -> Start:
        """The start of tuning, on the device and in the dtype of `like`; computed once and cached."""
        key = like.device, like.dtype
        if key not in self._starts:
            classes = torch.arange(len(self._ids), device=like.device)
            chunks = [partial(_start_rows, self._first, self._parts(like), part) for part in classes.split(self.chunk)]
            self._starts[key] = Start(self.start.to(like), chunks, self.kept)
        return self._starts[key]

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
        """Unit prototypes where every class has its own tokens: (C, n, width) -> (C, D)."""
        self._check(tokens, 3)
        if len(tokens) != len(self._ids):
            raise InputError(f"Tokens for {len(tokens)} classes; expected {len(self._ids)}.")
        classes = torch.arange(len(self._ids), device=tokens.device)
        return self._prototypes(tokens, classes, classes)

    def _check(self, tokens: Tensor, ndim: int) -> None:
        if tokens.ndim != ndim or tokens.shape[-2:] != self.start.shape:
            raise InputError(
                f"Context tokens must be {' x '.join(map(str, self.start.shape))}, the shape of the words in the "
                f"prompt this was built with; got {tuple(tokens.shape)}."
            )

    def _prototypes(self, sets: Tensor, which: Tensor, classes: Tensor) -> Tensor:
        """Unit rows (R, D): row r is the prompt of class `classes[r]` with the tokens `sets[which[r]]`."""
        parts = self._parts(sets)
        pairs = list(zip(which.split(self.chunk), classes.split(self.chunk), strict=True))
        # a single chunk is not checkpointed: recomputing it would save nothing
        recompute = len(pairs) > 1 and torch.is_grad_enabled() and sets.requires_grad
        rows = [
            checkpoint(_rows, self._first, parts, sets, *pair, use_reentrant=False, preserve_rng_state=False)
            if recompute
            else _rows(self._first, parts, sets, *pair)
            for pair in pairs
        ]
        return torch.cat(rows)

    def _parts(self, like: Tensor) -> Parts:
        """Tower, embedded prompts and ids on the device and in the dtype of `like`."""
        key = like.device, like.dtype
        if key not in self._copies:
            tower, embedded = self._original
            with torch.inference_mode(False):  # tensors created in inference mode can never carry gradients
                weight = next(tower.parameters())
                if (weight.device, weight.dtype) != key:
                    tower = copy.deepcopy(tower).to(*key).requires_grad_(False)
                self._copies[key] = tower, embedded.to(*key), self._ids.to(like.device)
        return self._copies[key]


def _rows(first: int, parts: Parts, sets: Tensor, which: Tensor, classes: Tensor) -> Tensor:
    """Unit rows (R, D): row r is the prompt of class `classes[r]` with the tokens `sets[which[r]]` from `first` on."""
    tower, embedded, ids = parts
    fixed = embedded[classes]
    stop = first + sets.shape[1]
    # one set of tokens is expanded, several are indexed: the same rows, but the backward sum is cheaper
    free = sets.expand(len(which), -1, -1) if len(sets) == 1 else sets[which]
    prompts = torch.cat([fixed[:, :first], free, fixed[:, stop:]], dim=1)
    return unit(tower(prompts, ids[classes]))


def _start_rows(first: int, parts: Parts, classes: Tensor, tokens: Tensor) -> Tensor:
    """Unit rows (R, D) of the prompts of `classes` (R,), all with the same tokens (n, width)."""
    return _rows(first, parts, tokens[None], torch.zeros_like(classes), classes)


# open_clip


def stored_context(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], chunk: int = CHUNK) -> SoftPrompts:
    """The context of a feature file with its own text tower, as stored runs of TPT have.

    `tensors` are the tower under `clip.*` (OpenAI's names), `tokens` (C, L), the prompts in its own vocabulary, and
    `ctx_init` (n, width), which follows the first token; `metadata` has `hp.text_heads`.
    """
    from testtime.machine.lean_open_clip import open_clip

    weights = {name.removeprefix("clip."): t for name, t in tensors.items() if name.startswith("clip.")}
    missing = {"tokens", "ctx_init"} - set(tensors) | {"hp.text_heads"} - set(metadata)
    table = weights.get("token_embedding.weight")
    if missing or table is None:
        what = sorted(missing) or ["clip.token_embedding.weight"]
        raise MissingPart(f"This file has no complete text tower, which prompt tuning needs; it lacks {what[0]!r}.")
    activation = metadata.get("hp.activation", "quickgelu")
    if activation not in ("quickgelu", "gelu"):
        raise MissingPart(f"The stored text tower's activation '{activation}' is unknown; use quickgelu or gelu.")
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
    ids = tensors["tokens"][:, : tower.length_needed(tensors["tokens"])]
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
            f"The text tower of '{encoder.name}' is not open_clip's own, and prompt tuning cannot access its tokens. "
            "Use a model such as open_clip:ViT-B-16/openai."
        )
    ids = encoder.tokenizer(_texts(names, words)).to(encoder.device)  # (C + 2, context length)
    span, ids = _span(ids, words), ids[:-2]
    tower = OpenClipTower(text, pool, eos)
    ids = ids[:, : tower.length_needed(ids)]
    return _soft_prompts(tower, text.token_embedding, ids, ids, span, chunk)


def _texts(names: Sequence[str], words: str) -> list[str]:
    """The prompts of all classes, then for `_span` the words alone and an empty text."""
    return [*(f"{words} {name}." for name in names), words, ""]


def _span(ids: Tensor, words: str) -> slice:
    """The span of the tokens of `words` in all prompts, from the ids (C + 2, L) of `_texts`."""
    *prompts, alone, empty = ids
    span = slice(_shared_prefix(empty, alone), min(_shared_prefix(row, alone) for row in prompts))
    if span.stop <= span.start:
        raise InputError(f"The context words {words!r} leave no tokens to tune; give some, as in {WORDS!r}.")
    return span


def _soft_prompts(
    tower: nn.Module, embed: Callable[[Tensor], Tensor], tokens: Tensor, ids: Tensor, span: slice, chunk: int
) -> SoftPrompts:
    """Prompts of `tokens` (C, L) with those in `span` tunable; `ids` are the tower's inputs."""
    with torch.inference_mode(False), torch.no_grad():
        embedded = embed(tokens).float()
    start = embedded[0, span].clone().to(step_device(embedded.device))  # tokens are tuned there
    return SoftPrompts(tower, embedded, ids, start, span.start, chunk)


def _shared_prefix(one: Tensor, other: Tensor) -> int:
    """The number of leading tokens that two texts share."""
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
    if "attention_mask" in inputs:  # masked tokens at the end of all prompts have no effect
        longest = int(inputs["attention_mask"].sum(1).max())
        inputs = {name: values[:, :longest] for name, values in inputs.items()}
    tower = TransformersTower(encoder.model, tuple(inputs), encoder.name)
    stacked = torch.stack(list(inputs.values()), dim=1)  # (C, kinds of input, L)
    return _soft_prompts(tower, tower.embed, inputs["input_ids"], stacked, span, chunk)

"""CoOp: learned prompts (Zhou et al., "Learning to Prompt for Vision-Language Models", IJCV 2022).

The words before a class name become learnable vectors, trained on a few labelled images per class through the frozen
text tower; images are encoded once. A learned prompt is a small file: `--prompts coop:FILE` uses it in any method.

Departures from the released code:
- Each image has a pool of encoded views, and every epoch draws one of them; the released code makes a new crop. So the
  image encoder runs once, not once per epoch.
- Tokens are float32 throughout; the released code's prototypes are half precision.
- Prototypes are unit rows everywhere. DPE's released CoOp path keeps CLIP's unnormalised length, which makes its text
  residual relatively smaller; ours does not.
"""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from testtime import files
from testtime.files.torchscript import DAMAGED, check_names
from testtime.ops import unit_views
from testtime.registry import kinds, require, split_precision
from testtime.types import Context, Encoder, FeatureError, InputError, MissingPart, Task

FORMAT = "testtime.prompt"
VERSION = "1"
DEVIATION = 0.02  # standard deviation of random tokens, about that of CLIP's own
LAYOUT = "a torch file whose 'state_dict' holds 'ctx', or a file written by 'testtime train-prompts'"
# published files also hold the optimiser, its schedule and a score, which are ignored
IGNORED = ("torch.optim.", "numpy.", "dassl.")

# purposes of random numbers: no two share a stream
START, ORDER, VIEW, SHOTS = range(4)


@dataclass(frozen=True)
class CoOpSettings:
    """How a prompt is learned; defaults are those released for 16 shots (`*_ep50`). The class name comes last.

    >>> [round(CoOpSettings().rate(epoch), 6) for epoch in (0, 1, 26, 49)]
    [1e-05, 0.002, 0.001, 8e-06]
    """

    name: ClassVar[str] = "coop"

    shots: int = 16  # images per class
    epochs: int = 50
    lr: float = 0.002
    momentum: float = 0.9
    weight_decay: float = 5e-4
    warmup_epochs: int = 1
    warmup_lr: float = 1e-5  # constant during warm-up, so that the first steps do no damage
    batch: int = 32
    n_ctx: int = 4  # tokens before the class name
    class_specific: bool = False  # every class has its own tokens
    init: str = "random"  # or initial words, of n_ctx tokens
    seed: int = 1

    def __post_init__(self) -> None:
        for name, kind in kinds(type(self)).items():
            value = getattr(self, name)
            if kind is int:
                require(isinstance(value, int) and not isinstance(value, bool), name, value, "must be a whole number")
            elif kind is float:
                number = isinstance(value, int | float) and not isinstance(value, bool)
                require(number and math.isfinite(value) and value >= 0, name, value, "must be a number, 0 or more")
        for name in ("shots", "epochs", "batch", "n_ctx"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "must be 1 or more")
        require(self.warmup_epochs >= 0, "warmup_epochs", self.warmup_epochs, "must be 0 or more")
        require(0 <= self.seed < 2**64, "seed", self.seed, "must be from 0 to 2**64 - 1")
        require(self.momentum < 1, "momentum", self.momentum, "must be below 1")
        require(bool(self.init.strip()), "init", self.init, "must be 'random' or words")

    def rate(self, epoch: int) -> float:
        """The learning rate of an epoch, counted from 0: constant, then a cosine.

        As in Dassl, the cosine starts after the warm-up but is as long as the whole training, so it ends early.
        """
        if epoch < self.warmup_epochs:
            return self.warmup_lr
        return self.lr * (1 + math.cos(math.pi * (epoch - self.warmup_epochs) / self.epochs)) / 2


class Prompt(NamedTuple):
    """Learned tokens and their metadata; a published file has none."""

    tokens: Tensor  # (n, width), or (C, n, width) where every class has its own
    classnames: tuple[str, ...] | None = None
    encoder: str = ""
    settings: Mapping[str, object] | None = None
    epoch: int | None = None  # epochs trained so far

    @property
    def class_specific(self) -> bool:
        """Whether every class has its own tokens."""
        return self.tokens.ndim == 3


class Progress(NamedTuple):
    """One epoch of training, averaged over its batches."""

    epoch: int  # epochs done
    loss: float  # mean cross-entropy in nats
    accuracy: float  # a fraction


class _State(NamedTuple):
    tokens: Tensor
    momentum: Tensor  # as tokens
    epoch: int


def few_shot(labels: Tensor | Sequence[int], shots: int, seed: int) -> Tensor:
    """Indices of `shots` images of every class, sorted; all of a class that has fewer.

    A class's draw depends on the seed, the class and its own images, not on other classes.

    >>> few_shot([0, 0, 0, 1, 1, 1], shots=2, seed=1).tolist()
    [1, 2, 3, 5]
    """
    require(shots >= 1, "shots", shots, "must be 1 or more")
    labels = torch.as_tensor(labels)
    chosen = []
    for label in labels.unique().tolist():
        indices = (labels == label).nonzero().squeeze(1)
        order = np.argsort(_random(seed, SHOTS, label, len(indices)), kind="stable")
        chosen.append(indices[torch.from_numpy(order[:shots])])
    return torch.cat(chosen).sort().values if chosen else labels.new_zeros(0, dtype=torch.int64)


def train(
    task: Task,
    features: Tensor,
    labels: Tensor | Sequence[int],
    settings: CoOpSettings | None = None,
    *,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Tensor:
    """Learned tokens (n, width), or (C, n, width) if class-specific, for a task with a `context`.

    `features` are those of the training images, (N, D), or (N, V, D) for V views of each. The random draws of an epoch
    depend on (seed, epoch) alone. With `checkpoint`, the prompt is written there after every epoch, atomically; with
    `resume` too, training resumes from that file if it exists, and ends with the weights of an uninterrupted run, bit
    for bit on the same machine.
    """
    settings = settings or CoOpSettings()
    context = _context(task)
    views = unit_views(features[:, None] if features.ndim == 2 else features, task.text)
    labels = _labels(labels, len(views), task.classes).to(views.device)
    metadata = _metadata(task.classnames, task.encoder, settings) | {"labels": _digest(labels)}
    centre = views.mean(dim=(0, 1))  # identifies the set of images, though encoding may differ in the last bits
    state = _start(context, task.classes, settings)
    if resume and checkpoint is not None and Path(checkpoint).exists():
        state = _load_state(Path(checkpoint), task, settings, state, metadata["labels"], centre)
    while state.epoch < settings.epochs:
        state, loss, accuracy = _epoch(context, state, views, labels, task.scale, settings)
        if not math.isfinite(loss):
            raise InputError(f"The loss is {loss} after epoch {state.epoch}: lr={settings.lr} is too high. Lower it.")
        if checkpoint is not None:
            _write(checkpoint, state, metadata, centre)
        if progress:
            progress(Progress(state.epoch, loss, accuracy))
    return state.tokens


def prototypes(context: Context, tokens: Tensor) -> Tensor:
    """Unit prototypes (C, D) of tokens (n, width), or (C, n, width) where every class has its own."""
    return context.by_class(tokens) if tokens.ndim == 3 else context(tokens)


def _start(context: Context, classes: int, settings: CoOpSettings) -> _State:
    """The tokens before the first epoch."""
    words = context.start
    shape: tuple[int, ...] = (settings.n_ctx, words.shape[-1])
    if settings.init != "random":
        if words.shape != shape:
            raise InputError(
                f"'{settings.init}' makes {words.shape[0]} tokens, n_ctx is {settings.n_ctx}; give the same number."
            )
        tokens = words.detach().float().cpu()
        tokens = tokens.expand(classes, *shape) if settings.class_specific else tokens
    else:
        shape = (classes, *shape) if settings.class_specific else shape
        count = math.prod(shape)
        uniform = _random(settings.seed, START, 0, 2 * count)
        # the Box-Muller transform, since numpy may change its own normal distribution
        normal = np.sqrt(-2 * np.log1p(-uniform[:count])) * np.cos(2 * np.pi * uniform[count:])
        tokens = torch.from_numpy(DEVIATION * normal).float().reshape(shape)
    tokens = tokens.contiguous().clone().to(words.device)
    return _State(tokens, torch.zeros_like(tokens), 0)


def _epoch(
    context: Context, state: _State, views: Tensor, labels: Tensor, scale: float, settings: CoOpSettings
) -> tuple[_State, float, float]:
    """The state after one more epoch, with its mean loss and accuracy."""
    tokens, momentum, epoch = state
    count = len(labels)
    order = torch.from_numpy(np.argsort(_random(settings.seed, ORDER, epoch, count), kind="stable"))
    view = torch.from_numpy((_random(settings.seed, VIEW, epoch, count) * views.shape[1]).astype(np.int64))
    images = views[torch.arange(count), view]  # (N, D)
    rate = settings.rate(epoch)
    # an incomplete last batch is dropped, as in Dassl, unless it is the only one
    batches = [batch for batch in order.split(settings.batch) if len(batch) == min(settings.batch, count)]
    losses, right = [], 0
    for batch in batches:
        with torch.inference_mode(False), torch.enable_grad():
            leaf = tokens.clone().requires_grad_()
            logits = scale * (images[batch] @ prototypes(context, leaf).to(images).T)
            loss = F.cross_entropy(logits, labels[batch])
            (grad,) = torch.autograd.grad(loss, leaf)
        # SGD with weight decay in the gradient
        momentum = settings.momentum * momentum + (grad + settings.weight_decay * tokens)
        tokens = tokens - rate * momentum
        losses.append(float(loss.detach()))
        right += int((logits.detach().argmax(1) == labels[batch]).sum())
    count_trained = sum(map(len, batches))
    return _State(tokens, momentum, epoch + 1), math.fsum(losses) / len(losses), right / count_trained


def _random(seed: int, purpose: int, which: int, count: int) -> np.ndarray:
    """`count` uniform numbers in [0, 1) that depend on the seed, their purpose and its counter `which`."""
    # only `random` is drawn: its stream has never changed in numpy
    key = np.array([seed, purpose], dtype=np.uint64)
    counter = np.array([0, 0, 0, which], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter)).random(count)


def _context(task: Task) -> Context:
    if task.context is None:
        raise MissingPart(
            f"Encoder '{task.encoder}' has no differentiable text tower, which CoOp needs to learn prompt tokens."
        )
    return task.context


def _labels(labels: Tensor | Sequence[int], images: int, classes: int) -> Tensor:
    labels = torch.as_tensor(labels)
    if labels.shape != (images,) or labels.is_floating_point():
        raise FeatureError(f"Labels must be {images} whole numbers, one for each image; got {tuple(labels.shape)}.")
    if not ((labels >= 0) & (labels < classes)).all():
        raise FeatureError(f"Labels must be from 0 to {classes - 1}; got {int(labels.min())} to {int(labels.max())}.")
    return labels.long()


def _digest(labels: Tensor) -> str:
    return hashlib.sha256(json.dumps(labels.tolist()).encode()).hexdigest()[:16]


# Training images


def pick_images(
    labels: Sequence[int | None], classnames: Sequence[str], settings: CoOpSettings
) -> tuple[list[int], list[int]]:
    """Indices and labels of the images to train on, `shots` per class; images without a label are left out."""
    indices = [i for i, label in enumerate(labels) if label is not None]
    known = [label for label in labels if label is not None]
    if empty := sorted(set(range(len(classnames))) - set(known)):
        more = f" and {len(empty) - 3} more" if len(empty) > 3 else ""
        raise InputError(
            f"No training images of {', '.join(repr(classnames[i]) for i in empty[:3])}{more}; "
            "put images in folders named after their class, or give a split."
        )
    chosen = few_shot(known, settings.shots, settings.seed).tolist()
    return [indices[i] for i in chosen], [known[i] for i in chosen]


# Files


def save_prompt(
    path: str | Path,
    tokens: Tensor,
    *,
    classnames: Sequence[str],
    encoder: str,
    settings: CoOpSettings | None = None,
) -> Path:
    """Write a learned prompt, atomically."""
    settings = settings or CoOpSettings(n_ctx=tokens.shape[-2], class_specific=tokens.ndim == 3)
    metadata = _metadata(classnames, encoder, settings) | {"epoch": str(settings.epochs)}
    return files.write_tensors(path, {"ctx": _check_tokens(tokens, path)}, metadata)


def load_prompt(path: str | Path) -> Prompt:
    """A learned prompt: a file of ours, or one in the layout published by CoOp's authors.

    Theirs is a torch file whose `state_dict` holds `ctx`, (4, width) or (C, 4, width), maybe with the prefix
    "prompt_learner.". No code in a file is run.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{path} is a folder; a prompt is {LAYOUT}.")
    if not path.is_file():
        raise MissingPart(f"No prompt file {path}. 'testtime train-prompts' makes one.")
    if path.suffix == ".safetensors" or _is_safetensors(path):
        return _read_safetensors(path)
    return Prompt(_find_tokens(_read_torch(path), path))


def _metadata(classnames: Sequence[str], encoder: str, settings: CoOpSettings) -> dict[str, str]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "classnames": json.dumps(list(classnames)),
        "encoder": encoder,
        "settings": json.dumps(asdict(settings)),
        "n_ctx": str(settings.n_ctx),
        "class_specific": json.dumps(settings.class_specific),
    }


def _write(path: str | Path, state: _State, metadata: Mapping[str, str], centre: Tensor) -> Path:
    tensors = {"ctx": state.tokens, "momentum": state.momentum, "centre": centre}
    return files.write_tensors(path, tensors, dict(metadata) | {"epoch": str(state.epoch)})


def _read_safetensors(path: Path) -> Prompt:
    file = files.open_tensors(path)
    metadata = dict(file.metadata() or {})
    tensors = {name: file.get_tensor(name) for name in file.keys() if name.rpartition(".")[2] == "ctx"}
    tokens = _find_tokens(tensors, path)
    if metadata.get("format") is None:
        return Prompt(tokens)  # the published tensors in another container
    if metadata["format"] != FORMAT:
        raise InputError(f"{path} holds '{metadata['format']}', not a prompt; a prompt is {LAYOUT}.")
    if metadata.get("version") != VERSION:
        raise InputError(f"{path} has format version {metadata.get('version')}, this program reads {VERSION}.")
    try:
        names = tuple(map(str, files.parse_json(metadata["classnames"], path, kind=list)))
        settings = files.parse_json(metadata["settings"], path, kind=dict)
        return Prompt(tokens, names, metadata["encoder"], settings, int(metadata["epoch"]))
    except (KeyError, TypeError, ValueError) as problem:
        raise InputError(f"{path} is damaged: its metadata cannot be read ({problem}). Train it again.") from None


def check_checkpoint(path: str | Path, classnames: Sequence[str], encoder: str, settings: CoOpSettings) -> Prompt:
    """The prompt in a training checkpoint; refused if its classes, encoder or settings differ from these."""
    prompt = load_prompt(path)
    if prompt.settings is None or not {"momentum", "centre"} <= set(files.open_tensors(path).keys()):
        raise InputError(f"{path} is not a training checkpoint; give another --out, or leave out --resume.")
    for key, value in asdict(settings).items():
        if prompt.settings.get(key) != value:
            was = prompt.settings.get(key)
            raise InputError(f"{path} was trained with {key}={was}, not {value}; a resumed run keeps its settings.")
    _check_same(path, {"classnames": prompt.classnames == tuple(classnames), "encoder": prompt.encoder == encoder})
    return prompt


def _load_state(path: Path, task: Task, settings: CoOpSettings, fresh: _State, labels: str, centre: Tensor) -> _State:
    """The state in a checkpoint; refused if it is from another training run."""
    prompt = check_checkpoint(path, task.classnames, task.encoder, settings)
    file = files.open_tensors(path)
    before, momentum = file.get_tensor("centre").to(centre), file.get_tensor("momentum")
    same_images = before.shape == centre.shape and bool((before - centre).norm() < 1e-3 * centre.norm())
    _check_same(path, {"labels": file.metadata().get("labels") == labels, "images": same_images})
    if not prompt.tokens.shape == momentum.shape == fresh.tokens.shape:
        raise InputError(f"{path}: tokens are {tuple(prompt.tokens.shape)}, not {tuple(fresh.tokens.shape)}.")
    device = fresh.tokens.device
    return _State(prompt.tokens.to(device), momentum.to(device), prompt.epoch or 0)


def _check_same(path: str | Path, equal: Mapping[str, bool]) -> None:
    for what, is_equal in equal.items():
        if not is_equal:
            raise InputError(f"{path} was trained with other {what}; resume it with the same, or give another --out.")


class _Ignored:
    """Placeholder for classes in a file that a prompt does not need; drops its arguments."""

    def __new__(cls, *given: object, **more: object) -> _Ignored:
        return super().__new__(cls)

    def __init__(self, *given: object, **more: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


def _plain_dict(*given: object) -> dict[object, object]:
    return {}


def _read_torch(path: Path) -> Mapping[object, object]:
    """The named tensors of a torch file. Only tensors and plain containers are created from it."""
    damaged = f"'{path}' is not a prompt; a prompt is {LAYOUT}."
    try:
        check_names(path)
        named = torch.serialization.get_unsafe_globals_in_checkpoint(path) if zipfile.is_zipfile(path) else []
        ignored = [(_Ignored, name) for name in named if name.startswith(IGNORED)]
        # the last two: containers of an optimiser's state
        with torch.serialization.safe_globals([*ignored, dict, (_plain_dict, "collections.defaultdict")]):
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise InputError(f"{damaged} It may hold more than tensors; code in a file is never run.") from None
    except (OSError, *DAMAGED):
        raise InputError(damaged) from None
    if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]
    if not isinstance(found, Mapping):
        raise InputError(f"{damaged} It holds a {type(found).__name__}.")
    return found


def _find_tokens(tensors: Mapping[object, object], path: Path) -> Tensor:
    """The tensor named "ctx", with any prefix."""
    ours = (value for name, value in tensors.items() if str(name).rpartition(".")[2] == "ctx")
    found = [value for value in ours if isinstance(value, Tensor)]
    if len(found) != 1:
        held = ", ".join(sorted(map(str, tensors))[:4]) or "nothing"
        raise InputError(f"{path} has no learned tokens 'ctx' ({held}); a prompt is {LAYOUT}.")
    return _check_tokens(found[0].detach().float().contiguous(), path)


def _check_tokens(tokens: Tensor, path: str | Path) -> Tensor:
    if tokens.ndim not in (2, 3) or 0 in tokens.shape:
        raise InputError(f"{path}: tokens must be (n, width) or (C, n, width); got {tuple(tokens.shape)}.")
    if not torch.isfinite(tokens).all():
        raise InputError(f"{path}: tokens hold NaN or infinity. Train the prompt again.")
    return tokens


def _is_safetensors(path: Path) -> bool:
    try:
        with safe_open(path, framework="pt"):
            return True
    except Exception:  # the next reader reports what is wrong with it
        return False


# Using a prompt file


def blank_words(count: int) -> str:
    """Placeholder words of `count` tokens, to be replaced by learned ones."""
    return " ".join(["X"] * count)


def apply_prompt(encoder: Encoder, classnames: Sequence[str], path: str | Path) -> tuple[Tensor, Context | None]:
    """Prototypes (C, D) of classes with a learned prompt, and the context that starts from it.

    A class-specific prompt has no single start, so it has no context: it classifies, but cannot be tuned further.
    """
    from testtime.text.contexts import build_context  # loads the encoders' libraries

    prompt = load_prompt(path)
    if prompt.encoder and split_precision(prompt.encoder)[0] != split_precision(encoder.name)[0]:
        raise InputError(f"{path} was learned with encoder '{prompt.encoder}', not '{encoder.name}'; use that one.")
    tokens = _tokens_for(prompt, classnames, path)
    context = build_context(encoder, classnames, words=blank_words(tokens.shape[-2]))
    width = context.start.shape[-1]
    if tokens.shape[-1] != width:
        raise InputError(
            f"{path} has tokens of width {tokens.shape[-1]}, the text tower of '{encoder.name}' of {width}; "
            "a prompt only fits the encoder it was learned with."
        )
    tokens = tokens.to(context.start.device)
    with torch.no_grad():
        text = prototypes(context, tokens)
    return text.detach(), None if prompt.class_specific else context.starting_from(tokens)


def _tokens_for(prompt: Prompt, classnames: Sequence[str], path: str | Path) -> Tensor:
    """The tokens for these classes: all, or if every class has its own, those of the same name."""
    if not prompt.class_specific:
        return prompt.tokens
    if prompt.classnames is None:
        if len(prompt.tokens) != len(classnames):
            raise InputError(
                f"{path} has tokens for each of {len(prompt.tokens)} classes, this task has {len(classnames)}; "
                "class-specific prompts only fit the classes they were learned for."
            )
        return prompt.tokens
    indices = {name: i for i, name in enumerate(prompt.classnames)}
    if missing := [name for name in classnames if name not in indices]:
        raise InputError(
            f"{path} has tokens for each of {len(indices)} classes, and '{missing[0]}' is not among them; "
            "class-specific prompts only fit the classes they were learned for."
        )
    return prompt.tokens[[indices[name] for name in classnames]]

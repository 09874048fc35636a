"""CLIP, SigLIP, CoCa and the rest of open_clip, by tag or from a checkpoint file.

A name is `open_clip:MODEL/PRETRAINED`, as in `open_clip:ViT-B-16/openai`. PRETRAINED is one of open_clip's
tags, or a checkpoint file: `open_clip:ViT-B-16/weights/mine.pt`, `open_clip:ViT-B-16//data/mine.safetensors`
(an absolute path). Files are open_clip's (a state dict, plain or under "state_dict") or OpenAI's as published
(a TorchScript archive or its state dict); their tensors have the same names. No code in a file is run: neither
that of a pickle nor the programs of an archive.

OpenAI trained with QuickGELU. Its tags imply it, and so does a file in its published layout, or an
`open_clip_config.json` beside the file that sets it. Any other file uses the activation of MODEL;
`ViT-B-16-quickgelu` has QuickGELU.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import constants, try_to_load_from_cache
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from testtime.encoding import resnet, vit
from testtime.encoding.encoders import hub
from testtime.encoding.encoders.base import TwoTowers
from testtime.files import parse_json, read_bytes, torchscript
from testtime.machine.lean_open_clip import open_clip, with_transformers
from testtime.registry import unknown
from testtime.text import contexts
from testtime.types import Context, InputError, MissingPart, Preprocess, UnknownName

PRECISIONS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
PREPROCESS_KEYS = ("mean", "std", "interpolation", "resize_mode")  # preprocessing settings of a tag
OPENAI_NUMBERS = ("input_resolution", "context_length", "vocab_size")  # stored beside the weights in OpenAI's files
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "spiece.model", "vocab.txt")


class OpenClip(TwoTowers):
    """An open_clip model as an encoder: the frozen `model`, its `tokenizer` and its preprocessing.

    >>> from testtime import load_encoder
    >>> encoder = load_encoder("tiny")
    >>> encoder.name, encoder.dim, encoder.preprocess.size
    ('tiny', 32, 32)
    """

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: Callable[[list[str]], Tensor],
        preprocess: Preprocess,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(name, preprocess, device, dtype)
        self.model = model.to(device).eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.scale = float(self.model.logit_scale.float().exp())
        self.dim = self.encode_texts([""]).shape[1]

    def image_features(self, pixels: Tensor) -> Tensor:
        return self.model.encode_image(pixels)

    def text_features(self, texts: Sequence[str]) -> Tensor:
        return self.model.encode_text(self.tokenizer(list(texts)).to(self.device))

    def fast_tower(self, float8: bool) -> Callable[[Tensor], Tensor] | None:
        return vit.from_open_clip(self.model.visual, float8) or resnet.from_open_clip(self.model.visual)

    def soft_prompts(self, classnames: Sequence[str], words: str, chunk: int) -> Context:
        """Prompts whose first words are tunable; see `types.PromptEncoder`."""
        return contexts.open_clip_prompts(self, classnames, words, chunk)


def load(spec: str, device: torch.device, dtype: torch.dtype) -> OpenClip:
    """The encoder of "MODEL/PRETRAINED"."""
    architecture, weights = split(spec)
    tag = open_clip.pretrained.get_pretrained_cfg(architecture, weights)
    path = fetch(architecture, weights, tag) if tag else find(architecture, weights)
    checkpoint = read(path)
    beside = _config_beside(path)
    if tag:
        settings, quick = tag, tag.get("quick_gelu", False)
    else:
        settings = _default_preprocess(architecture) | beside["preprocess_cfg"]
        quick = checkpoint.openai or bool(beside["model_cfg"].get("quick_gelu"))
    tokenizer = _tokenizer(architecture, path)
    model = build(architecture, PRECISIONS[dtype], quick)
    fill(model, checkpoint, architecture)
    preprocess = make_preprocess(settings | {"size": model.visual.image_size})
    return OpenClip(f"open_clip:{spec}", model, tokenizer, preprocess, device, dtype)


def split(spec: str) -> tuple[str, str]:
    """MODEL and PRETRAINED of "MODEL/PRETRAINED"; an error names the missing or unknown one.

    >>> split("ViT-B-16/weights/mine.pt")
    ('ViT-B-16', 'weights/mine.pt')
    """
    architecture, _, weights = spec.partition("/")
    models = open_clip.list_models()
    if architecture not in models:
        first, *rest = spec.split("/")
        dashed = "-".join([first, *rest[:1]])  # OpenAI writes ViT-B/16
        if dashed in models:
            suggested, weights = [dashed], "/".join(rest[1:])
        else:
            suggested = get_close_matches(architecture, models, n=1, cutoff=0.4) or ["ViT-B-16"]
        hint = f"open_clip:{suggested[0]}/{weights or _tags(suggested[0])[0]}"
        raise UnknownName(
            f"Unknown open_clip model in '{spec}'. Did you mean '{hint}'? "
            f"`open_clip.list_models()` lists all {len(models)}."
        )
    if not weights:
        raise InputError(
            f"'open_clip:{spec}' names no weights. Write open_clip:{architecture}/TAG or "
            f"open_clip:{architecture}/PATH. Tags: {', '.join(_tags(architecture))}."
        )
    return architecture, weights


def make_preprocess(settings: Mapping[str, Any]) -> Preprocess:
    """Our preprocessing from open_clip's settings (size, mean, std, interpolation, resize_mode)."""
    size = settings["size"]
    height, width = (size, size) if isinstance(size, int) else size
    if height != width:
        raise InputError(f"Only square images are supported; this model takes {height} x {width}.")
    try:
        mean, std = (tuple(map(float, settings[name])) for name in ("mean", "std"))
        return Preprocess(height, height, settings["resize_mode"], settings["interpolation"], mean, std)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        given = {name: settings[name] for name in PREPROCESS_KEYS}
        raise InputError(f"Preprocessing settings must be names and lists of 3 numbers; got {given}.") from None


# Finding the weights


def find(architecture: str, weights: str) -> Path:
    """The checkpoint file at a path, or an error that says how to write the path."""
    path = Path(weights).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise InputError(f"'{weights}' is a folder; give the weights file in it.")
    if (absolute := Path("/") / weights).is_file():
        raise MissingPart(
            f"No file '{weights}' in {Path.cwd()}. An absolute path needs two slashes: "
            f"open_clip:{architecture}/{absolute}"
        )
    if "/" in weights or "\\" in weights or path.suffix.lower() in SUFFIXES:
        raise MissingPart(f"No checkpoint file '{weights}' (looked for {path.absolute()}).")
    tags = unknown(f"weights of {architecture}", weights, _tags(architecture))
    raise UnknownName(f"{tags} A path to a checkpoint file works too.")


def fetch(architecture: str, weights: str, tag: Mapping[str, str]) -> Path:
    """The file of a pretrained tag: from a cache, else from its hub, else MissingPart with advice."""
    repository, _, file = tag.get("hf_hub", "").rpartition("/")
    files = [file] if file else [open_clip.constants.HF_SAFE_WEIGHTS_NAME, open_clip.constants.HF_WEIGHTS_NAME]
    address = tag.get("url", "")
    caches = [try_to_load_from_cache(repository, file) for file in files] if repository else []
    caches += [Path("~/.cache/clip", address.rpartition("/")[2]).expanduser()] if address else []
    for cached in caches:
        if isinstance(cached, str | Path) and Path(cached).is_file():
            return Path(cached)

    sources = [f"{constants.ENDPOINT}/{repository} ({files[0]})"] if repository else []
    sources += [address] if address else []
    # a plain file does not record its activation; the name of the model can
    quick = f"{architecture}-quickgelu"
    model = quick if tag.get("quick_gelu") and quick in open_clip.list_models() else architecture
    return hub.fetch(
        constants.ENDPOINT if repository else address,
        lambda: Path(open_clip.pretrained.download_pretrained(dict(tag))),
        f"Weights '{weights}' of {architecture} are not on this machine",
        f"Download {' or '.join(sources)}, and write open_clip:{model}/PATH.",
    )


def _hub_folder(repository: str, files: Sequence[str], purpose: str) -> str:
    """What to load a repository by in `transformers`: its cached folder, or its name if the hub answers."""
    for file in files:
        if isinstance(cached := try_to_load_from_cache(repository, file), str):
            return str(Path(cached).parent)
    advice = f"Download {constants.ENDPOINT}/{repository} to the cache (`hf download {repository}`)"
    advice += ", or put tokenizer.json beside the checkpoint." if files == TOKENIZER_FILES else "."
    return hub.fetch(constants.ENDPOINT, lambda: repository, f"{purpose} is not on this machine", advice)


def _tokenizer(architecture: str, path: Path) -> Callable[[list[str]], Tensor]:
    text = open_clip.get_model_config(architecture)["text_cfg"]
    repository = text.get("hf_tokenizer_name")
    if not repository:
        return open_clip.get_tokenizer(architecture)  # its vocabulary comes with open_clip
    if any((path.parent / file).is_file() for file in TOKENIZER_FILES):
        folder = str(path.parent)
    else:
        folder = _hub_folder(repository, TOKENIZER_FILES, f"The tokenizer of {architecture}")
    return open_clip.tokenizer.HFTokenizer(
        folder,
        context_length=text.get("context_length", 77),
        tokenizer_mode=text.get("tokenizer_mode"),
        **text.get("tokenizer_kwargs", {}),
    )


def _tags(architecture: str) -> list[str]:
    return open_clip.pretrained.list_pretrained_tags_by_model(architecture) or ["PATH"]


def _default_preprocess(architecture: str) -> dict[str, Any]:
    """The preprocessing of most tags of a model (SigLIP squashes, CLIP crops); without tags, CLIP's."""
    known = [
        open_clip.pretrained.get_pretrained_cfg(architecture, tag)
        for tag in open_clip.pretrained.list_pretrained_tags_by_model(architecture)
    ]
    known = known or [open_clip.pretrained.get_pretrained_cfg("ViT-B-16", "openai")]
    [(most, _)] = Counter(tuple((key, entry[key]) for key in PREPROCESS_KEYS) for entry in known).most_common(1)
    return dict(most)


def _config_beside(path: Path) -> dict[str, dict[str, Any]]:
    """`open_clip_config.json` in the checkpoint's folder, as on the hub; empty if there is none."""
    file, parts = path.parent / "open_clip_config.json", ("preprocess_cfg", "model_cfg")
    if not file.is_file():
        return {part: {} for part in parts}
    try:
        config = parse_json(read_bytes(file), f"'{file}'", kind=dict)
    except OSError as problem:
        raise InputError(f"Cannot read '{file}': {problem.strerror or problem}.") from None
    if odd := [part for part in parts if not isinstance(config.get(part, {}), dict)]:
        raise InputError(f"'{file}' is damaged: {odd[0]} is a {type(config[odd[0]]).__name__}; expected a dict.")
    return {part: config.get(part, {}) for part in parts}


# Reading the weights


class Checkpoint(NamedTuple):
    """The tensors of a file, and whether they are in OpenAI's published layout."""

    path: Path
    tensors: dict[str, Tensor]
    openai: bool


def read(path: Path) -> Checkpoint:
    """The tensors in a checkpoint file, on the CPU. No code in the file is run."""
    scripted = False
    try:
        if path.suffix.lower() == ".safetensors":
            found: Any = load_file(path)
        elif scripted := torchscript.is_torchscript(path):
            found = torchscript.read_tensors(path)
        else:
            torchscript.check_names(path)
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise InputError(
            f"'{path}' is not a checkpoint, or it holds more than tensors, and code in a file is never run. "
            "Save its state_dict alone, best as .safetensors."
        ) from None
    except (SafetensorError, OSError, *torchscript.DAMAGED) as problem:
        raise InputError(f"'{path}' cannot be read as a checkpoint: {hub.first_line(problem)}") from None

    wrapped = isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping)
    state = found["state_dict"] if wrapped else found
    if not isinstance(state, Mapping):
        raise InputError(f"'{path}' holds a {type(state).__name__}, not named tensors.")
    tensors = {
        name.removeprefix("module."): value
        for name, value in state.items()
        if isinstance(name, str) and isinstance(value, Tensor) and name not in OPENAI_NUMBERS
    }
    if not tensors:
        raise InputError(f"'{path}' holds no tensors.")
    if odd := [name for name, value in tensors.items() if not _is_dense(value)]:
        raise InputError(f"'{path}' holds {odd[0]} as a sparse, quantised or meta tensor; save it as .safetensors.")
    numbered = any(name in state for name in OPENAI_NUMBERS)
    return Checkpoint(path, tensors, scripted or numbered or (not wrapped and _has_openai_precision(tensors)))


def build(architecture: str, precision: str = "fp32", quick_gelu: bool = False) -> Any:
    """A model without trained weights. The global random state is left alone."""
    config = open_clip.get_model_config(architecture)
    config["quick_gelu"] = config.get("quick_gelu", False) or quick_gelu
    vision, text = config["vision_cfg"], config["text_cfg"]
    if timm := "timm_model_name" in vision:
        vision["timm_model_pretrained"] = False
    if hugging := "hf_model_name" in text:
        with_transformers()
        text["hf_model_pretrained"] = False
        text["hf_model_name"] = _hub_folder(
            text["hf_model_name"], ["config.json"], f"The text tower's configuration of {architecture}"
        )
    kind = open_clip.CLIP
    if config.pop("custom_text", False) or hugging:
        kind = open_clip.CoCa if "multimodal_cfg" in config else open_clip.CustomTextCLIP
    with torch.random.fork_rng(devices=[]):
        model = kind(**config, cast_dtype=open_clip.get_cast_dtype(precision))
    return lower(model, precision, foreign=timm or hugging)


def lower(model: Any, precision: str, foreign: bool = False) -> Any:
    """The model in open_clip's fp32, fp16 or bf16, where normalisation stays in float32."""
    if precision == "fp32":
        return model
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    if not foreign:
        open_clip.convert_weights_to_lp(model, dtype=dtype)
        return model
    # that conversion handles only open_clip's own layers: towers of timm and transformers are converted whole
    model.to(dtype)
    for part in model.modules():
        if isinstance(part, open_clip.transformer.LayerNormFp32):
            part.float()
    model.logit_scale.data = model.logit_scale.data.float()  # bfloat16 would turn a scale of 100 into 98.8
    return model


def fill(model: Any, checkpoint: Checkpoint, architecture: str) -> None:
    """Load a checkpoint's tensors into the model; an error names the first ones that do not fit."""
    state = open_clip.convert.convert_state_dict(model, dict(checkpoint.tensors))
    if "positional_embedding" in state and not hasattr(model, "positional_embedding"):
        state = open_clip.model.convert_to_custom_text_state_dict(state)
    state.pop("text.transformer.embeddings.position_ids", None)  # a constant that older files carry
    wanted = model.state_dict()
    for name in ("logit_scale", "logit_bias"):
        if name in state and name in wanted and state[name].numel() == 1:
            state[name] = state[name].reshape(wanted[name].shape)

    shared = [name for name in wanted if name in state]
    problems = {
        "wrong shape": [
            f"{name} is {tuple(state[name].shape)}, not {tuple(wanted[name].shape)}"
            for name in shared
            if state[name].shape != wanted[name].shape
        ],
        "missing": [name for name in wanted if name not in state],
        "not in the model": [name for name in state if name not in wanted],
    }
    messages = [
        f"{what}: {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        for what, names in problems.items()
        if names
    ]
    if messages:
        raise InputError(f"'{checkpoint.path}' does not fit {architecture}. {'; '.join(messages).capitalize()}.")
    model.load_state_dict(state)


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is dense, on the CPU and not quantised; some files have sparse or meta tensors."""
    return tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized


def _has_openai_precision(tensors: Mapping[str, Tensor]) -> bool:
    """Whether weights are float16 and norms float32, as OpenAI published them."""
    kinds = [tensors[name].dtype for name in ("visual.conv1.weight", "ln_final.weight") if name in tensors]
    return kinds == [torch.float16, torch.float32]

"""CLIP, SigLIP, ALIGN and LiT-style dual encoders through `transformers`, from the hub or from a folder.

A name is `hf:REPO_OR_PATH`, as in `hf:kakaobrain/align-base` or `hf:models/align`. A folder is what
`save_pretrained` wrote for the model, its image processor and its tokenizer; it is read with no network.
Only tensors are read; no code from a repository is ever run.

Two departures from `transformers`, both in preprocessing. Images are resized by Pillow, and a centre crop with an
odd margin is rounded as torchvision does, as in the models' training code; `transformers` resizes tensors and rounds
down, so its pixels may differ by a grey level and its crop by one pixel. SigLIP2's NaFlex models take images of any
shape; here they get a square with their usual number of patches, the image squashed into it.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isqrt
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
from safetensors import SafetensorError
from torch import Tensor

from testtime.encoding import vit
from testtime.encoding.encoders import hub
from testtime.encoding.encoders.base import TwoTowers, package
from testtime.files import parse_json
from testtime.text import contexts
from testtime.types import Context, InputError, MissingPart, Preprocess

LONGEST_TEXT = 512  # tokens, where neither tokenizer nor model sets a limit
ALIGN_TOKENS = 64  # ALIGN was trained with 64; its text tower would take 512
REPOSITORY = re.compile(r"\w[\w.-]*(/[\w.-]+)?")  # "owner/name", or a bare name
# a folder needs one file of each row; versions of transformers write different ones
PARTS = {
    "weights": ("model*.safetensors", "pytorch_model*.bin"),
    "an image processor": ("preprocessor_config.json", "processor_config.json"),
    "a tokenizer": ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "*.spm", "tokenizer.model"),
}
# processors that only resize, crop, rescale and normalise
PROCESSORS = ("Bit", "CLIP", "DeiT", "EfficientNet", "Siglip", "ViT")
FILTERS: dict[int, Literal["bicubic", "bilinear"]] = {2: "bilinear", 3: "bicubic"}  # Pillow's codes
OFFSET_POSITIONS = ("camembert", "roberta", "xlm-roberta")  # position ids start after the padding id


class Family(NamedTuple):
    """How to load and call a kind of model."""

    model: str  # class in transformers
    padding: Literal["max_length", "longest"]
    inputs: tuple[str, ...]  # outputs of the tokenizer that the text tower was trained with
    scale: Callable[[Any], Tensor]


def _exp_scale(model: Any) -> Tensor:
    return model.logit_scale.float().exp()


# by a configuration's model_type; SigLIP pools its last token, padding or not, so it gets no mask
FAMILIES = {
    "align": Family(
        "AlignModel",
        "max_length",
        ("input_ids", "attention_mask", "token_type_ids"),
        lambda model: 1 / model.temperature.float(),
    ),
    "clip": Family("CLIPModel", "max_length", ("input_ids", "attention_mask"), _exp_scale),
    "siglip": Family("SiglipModel", "max_length", ("input_ids",), _exp_scale),
    "siglip2": Family("Siglip2Model", "max_length", ("input_ids",), _exp_scale),
    "vision-text-dual-encoder": Family(
        "VisionTextDualEncoderModel", "longest", ("input_ids", "attention_mask", "token_type_ids"), _exp_scale
    ),
}


class DualEncoder(TwoTowers):
    """A dual encoder of transformers: the frozen `model`, its `tokenizer` and its preprocessing.

    `bias` is added by SigLIP to every logit, and 0 for other models. It shifts all classes alike, so it changes no
    softmax and no method; only SigLIP's own sigmoid needs it.
    """

    def __init__(
        self, name: str, model: Any, tokenizer: Any, preprocess: Preprocess, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(name, preprocess, device, dtype)
        kind = model.config.model_type
        model = model.eval().requires_grad_(False)
        self.family = FAMILIES[kind]
        # read before conversion: bfloat16 would turn a scale of 100 into 98.8
        self.scale = float(self.family.scale(model))
        self.bias = float(model.logit_bias) if hasattr(model, "logit_bias") else 0.0
        self.model = model.to(device, dtype)
        self.tokenizer = tokenizer
        self.tokens = _max_tokens(kind, model.config.text_config, tokenizer)
        self.patch: int | None = model.config.vision_config.patch_size if kind == "siglip2" else None
        self.dim = self.encode_texts([""]).shape[1]

    def image_features(self, pixels: Tensor) -> Tensor:
        images = {"pixel_values": pixels} if self.patch is None else _patches(pixels, self.patch)
        return _pooled(self.model.get_image_features(**images))

    def text_features(self, texts: Sequence[str]) -> Tensor:
        return _pooled(self.model.get_text_features(**self.tokenize(texts)))

    def fast_tower(self, float8: bool) -> vit.Tower | None:
        return vit.from_transformers(self.model, float8)

    def soft_prompts(self, classnames: Sequence[str], words: str, chunk: int) -> Context:
        """Prompts whose first words are tunable; see `types.PromptEncoder`."""
        return contexts.transformers_prompts(self, classnames, words, chunk)

    def tokenize(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Inputs of the text tower: `input_ids` (n, length) and, if it was trained with them, masks."""
        # SigLIP2 was trained on lower case; a plain Gemma tokenizer does not lower it
        lower = type(self.tokenizer).__name__.startswith("Gemma")
        found = self.tokenizer(
            [text.lower() for text in texts] if lower else list(texts),
            padding=self.family.padding,
            padding_side="right",  # as in training; Gemma's tokenizer pads left by default
            truncation=True,
            max_length=self.tokens,
            return_tensors="pt",
        )
        return {name: found[name].to(self.device) for name in self.family.inputs if name in found}


def load(spec: str, device: torch.device, dtype: torch.dtype) -> DualEncoder:
    """The encoder of "REPO_OR_PATH"."""
    transformers = package("hf", "transformers")
    folder = find(spec)
    config = _config(folder)
    if missing := _missing_parts(folder):
        wanted = "; ".join(f"{part} ({' or '.join(PARTS[part][:2])})" for part in missing)
        raise InputError(f"'{folder}' lacks {wanted}. Save it there with save_pretrained.")
    with _quiet(transformers), torch.random.fork_rng(devices=[]):
        processor = _read(transformers.AutoImageProcessor, folder, "image processor")
        tokenizer = _read(transformers.AutoTokenizer, folder, "tokenizer")
        preprocess = make_preprocess(processor.to_dict())
        model = _model(transformers, folder, config)
    if tokenizer.pad_token is None:
        raise InputError(f"The tokenizer in '{folder}' has no padding token; add pad_token to tokenizer_config.json.")
    side = getattr(model.config.vision_config, "image_size", None)
    if config["model_type"] in ("clip", "siglip") and side != preprocess.size:
        raise InputError(
            f"The model in '{folder}' takes {side} pixels a side; its image processor makes {preprocess.size}."
        )
    return DualEncoder(f"hf:{spec}", model, tokenizer, preprocess, device, dtype)


# Preprocessing of images


def make_preprocess(settings: Mapping[str, Any]) -> Preprocess:
    """Our preprocessing from the `to_dict` of a transformers image processor; an error if it cannot be expressed.

    Rescaling, an offset (ALIGN's) and normalising combine into one affine map: a mean and a standard deviation.
    """
    kind = re.sub("(ImageProcessor|FeatureExtractor)(Fast|Pil)?$", "", settings.get("image_processor_type") or "")
    processor = f"The image processor '{settings.get('image_processor_type')}'"
    if kind not in (*PROCESSORS, "Siglip2"):
        raise InputError(f"{processor} is not supported. Supported: those of {', '.join((*PROCESSORS, 'Siglip2'))}.")
    if not settings.get("do_resize", True):
        raise InputError(f"{processor} does not resize (do_resize is false), but views must have one size.")
    if settings.get("do_pad"):
        raise InputError(f"{processor} pads images (do_pad), which is not supported.")
    if settings.get("resample") not in FILTERS:
        raise InputError(f"{processor} resamples by {settings.get('resample')}. Supported: 2 (bilinear), 3 (bicubic).")

    mode: Literal["shortest", "squash"] = "squash"
    if kind == "Siglip2":
        size = resize = isqrt(settings["max_num_patches"]) * settings["patch_size"]
    else:
        measures = {name: value for name, value in (settings.get("size") or {}).items() if value is not None}
        cropped = bool(settings.get("do_center_crop"))
        if measures.keys() == {"shortest_edge"} and cropped:
            mode, resize = "shortest", measures["shortest_edge"]
        elif measures.keys() == {"height", "width"}:
            resize = _square(measures, processor)
        else:
            raise InputError(
                f"{processor} resizes to {measures}{'' if cropped else ' and does not crop'}, which is not always a "
                "square. Supported: height and width, or shortest_edge with do_center_crop."
            )
        size = _square(settings["crop_size"], processor) if cropped else resize

    # value = slope * pixel + start, for a pixel from 0 to 1
    slope = 255 * (settings["rescale_factor"] if settings.get("do_rescale") else 1.0)
    start = -1.0 if settings.get("do_rescale") and settings.get("rescale_offset") else 0.0
    means, deviations = settings["image_mean"], settings["image_std"]
    maps = [(slope, start)] * 3
    if settings.get("do_normalize"):
        maps = [(a / s, (b - m) / s) for (a, b), m, s in zip(maps, means, deviations, strict=True)]
    if kind == "EfficientNet" and settings.get("include_top"):  # divides by std once more
        maps = [(a / s, b / s) for (a, b), s in zip(maps, deviations, strict=True)]
    # rounded, so that 0.5 survives a factor of 1/255 and back
    red, green, blue = ((round(-b / a, 12) + 0.0, round(1 / a, 12)) for a, b in maps)
    mean, deviation = zip(red, green, blue, strict=True)
    return Preprocess(size, resize, mode, FILTERS[settings["resample"]], mean, deviation)


def _square(measures: Mapping[str, int], processor: str) -> int:
    height, width = measures.get("height"), measures.get("width")
    if height is None or height != width:
        raise InputError(f"{processor} makes images of {height} x {width}; only squares are supported.")
    return height


def _patches(pixels: Tensor, side: int) -> dict[str, Tensor]:
    """Images in NaFlex's layout, patch by patch, each (row, column, channel): (B, 3, H, W) -> (B, n, side²·3)."""
    count, _, height, width = pixels.shape
    if height % side or width % side:
        raise InputError(f"Images must be whole patches of {side} pixels; got {height} x {width}.")
    grid = (height // side, width // side)
    patches = pixels.unflatten(3, (grid[1], side)).unflatten(2, (grid[0], side))  # (B, 3, rows, side, columns, side)
    patches = patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
    return {
        "pixel_values": patches,
        "pixel_attention_mask": torch.ones(patches.shape[:2], dtype=torch.int32, device=pixels.device),
        "spatial_shapes": torch.tensor([grid] * count, device=pixels.device),
    }


# Texts


def _max_tokens(kind: str, text: Any, tokenizer: Any) -> int:
    """The maximum number of tokens of a text; longer texts are truncated."""
    positions = getattr(text, "max_position_embeddings", LONGEST_TEXT)
    if kind == "align":
        return min(ALIGN_TOKENS, positions)
    if kind != "vision-text-dual-encoder":
        return positions
    if text.model_type in OFFSET_POSITIONS:
        positions -= text.pad_token_id + 1
    return min(positions, tokenizer.model_max_length, LONGEST_TEXT)


def _pooled(output: Any) -> Tensor:
    """Features from an output of transformers: a tensor up to version 4, an object with `pooler_output` from 5."""
    return output if isinstance(output, Tensor) else output.pooler_output


# Finding a model


def find(spec: str) -> Path:
    """The folder of a path or of a hub repository, or an error that says how to get it."""
    if not spec:
        raise InputError("'hf' names no model. Write hf:OWNER/NAME or hf:FOLDER, as in hf:kakaobrain/align-base.")
    path = Path(spec).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise InputError(f"'{spec}' is a file; give the folder that holds config.json and the weights.")
    if not REPOSITORY.fullmatch(spec):
        raise MissingPart(f"No folder '{spec}' (looked for {path.absolute()}).")
    return fetch(spec)


def fetch(repository: str) -> Path:
    """The folder of a hub repository: from the cache, else from the hub, else MissingPart with advice."""
    cached = try_to_load_from_cache(repository, "config.json")
    if isinstance(cached, str) and not _missing_parts(Path(cached).parent):
        return Path(cached).parent
    return hub.fetch(
        constants.ENDPOINT,
        lambda: _download(repository),
        f"Model '{repository}' is neither a folder nor in the hub's cache",
        f"Download {constants.ENDPOINT}/{repository} (`hf download {repository}`), or write hf:FOLDER for a copy.",
    )


def _download(repository: str) -> Path:
    """The repository's folder in the cache, with its weights in one format only."""
    text_files = ["*.json", "*.txt", "*.model", "*.spm"]
    safe, pickled = PARTS["weights"]
    folder = Path(snapshot_download(repository, allow_patterns=[*text_files, safe]))
    if not any(folder.glob(safe)):
        snapshot_download(repository, allow_patterns=[pickled])
    return folder


def _missing_parts(folder: Path) -> list[str]:
    return [part for part, files in PARTS.items() if not any(any(folder.glob(file)) for file in files)]


# Loading a model


def _config(folder: Path) -> dict[str, Any]:
    """config.json of a dual encoder; an error names what the folder holds instead."""
    file = folder / "config.json"
    if not file.is_file():
        ours = (folder / "open_clip_config.json").is_file()
        hint = "It is open_clip's: write open_clip:MODEL/FILE." if ours else "Save a model there with save_pretrained."
        raise InputError(f"'{folder}' has no config.json. {hint}")
    config = parse_json(file.read_bytes(), f"'{file}'")
    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise InputError(
            f"'{folder}' holds a model of type {kind!r}, which is not a supported dual encoder. "
            f"Supported: {', '.join(FAMILIES)}."
        )
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    attention = [part.get(key) for part in parts for key in ("attn_implementation", "_attn_implementation")]
    if code := [name for name in attention if "/" in str(name)]:  # transformers would download and run it
        raise InputError(f"'{file}' asks for code from the hub for its attention ({code[0]}); remove that line.")
    return config


def _read(factory: Any, folder: Path, what: str) -> Any:
    """What one of transformers' Auto classes loads from the folder alone, without running its code."""
    try:
        return factory.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except ImportError as problem:
        package = re.search(r"sentencepiece|protobuf|tiktoken", str(problem), re.IGNORECASE)
        name = package[0].lower() if package else "sentencepiece"
        raise MissingPart(f"The {what} in '{folder}' needs the package {name}: pip install {name}") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as problem:
        raise InputError(f"The {what} in '{folder}' cannot be read: {hub.first_line(problem)}") from None


def _model(transformers: ModuleType, folder: Path, config: Mapping[str, Any]) -> Any:
    """The model with every weight from the folder: transformers would initialise missing ones at random."""
    name = FAMILIES[config["model_type"]].model
    if not hasattr(transformers, name):
        raise MissingPart(
            f"transformers {transformers.__version__} has no {name}. Upgrade it: pip install -U transformers"
        )
    try:
        model, report = getattr(transformers, name).from_pretrained(
            str(folder), local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except pickle.UnpicklingError:
        raise InputError(
            f"The weights in '{folder}' hold more than tensors, and code in a file is never run. "
            "Save them as model.safetensors."
        ) from None
    except (SafetensorError, OSError, RuntimeError, ValueError, TypeError, KeyError, EOFError) as problem:
        raise InputError(f"The model in '{folder}' cannot be read: {hub.first_line(problem)}") from None
    wrong = [f"{key} is {tuple(found)}, not {tuple(wanted)}" for key, found, wanted in report["mismatched_keys"]]
    for what, names in (("Wrong shape", wrong), ("Missing", report["missing_keys"])):
        if names := sorted(names):
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise InputError(f"The weights in '{folder}' do not match {name}. {what}: {', '.join(names[:3])}{more}.")
    return model


@contextmanager
def _quiet(transformers: ModuleType) -> Iterator[None]:
    """Disable progress bars and reports on standard error: problems are raised."""
    logging = transformers.utils.logging
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()

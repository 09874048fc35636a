"""What encoders share: input checks, batching of texts, and unit rows that can take part in autograd."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import normalize

from testtime.display import line
from testtime.encoding.compiled import ALIKE, COARSE, SAME, verified
from testtime.types import InputError, MissingPart, Preprocess

TEXT_BATCH = 256  # sentences per batch

_making = threading.Lock()


class TwoTowers(ABC):
    """Unit features of images and texts, from two towers whose features need not be unit length."""

    dim: int
    scale: float
    float8 = False  # whether the image tower's large GEMMs are in float8
    _tower: Callable[[Tensor], Tensor] | None = None  # on a CPU

    def __init__(self, name: str, preprocess: Preprocess, device: torch.device, dtype: torch.dtype) -> None:
        self.name, self.preprocess, self.device, self.dtype = name, preprocess, device, dtype

    def __repr__(self) -> str:
        precision = "float8" if self.float8 else str(self.dtype).removeprefix("torch.")
        return f"{type(self).__name__}({line(self.name, 60)}, dim {self.dim}, {self.device}, {precision})"

    @abstractmethod
    def image_features(self, pixels: Tensor) -> Tensor:
        """Features (B, D) of normalised pixels (B, 3, H, W) in the encoder's precision, on its device."""

    @abstractmethod
    def text_features(self, texts: Sequence[str]) -> Tensor:
        """Features (n, D) of at most TEXT_BATCH sentences."""

    def fast_tower(self, float8: bool) -> Callable[[Tensor], Tensor] | None:
        """Our fast implementation of the image tower, maybe with GEMMs in float8; None if there is none."""
        return None

    def image_tower(self) -> Callable[[Tensor], Tensor]:
        """From normalised pixels to features, as fast as we can; see `types.DeviceEncoder`."""
        single = self.device.type == "cpu" and self.dtype == torch.float32
        least = COARSE if self.float8 else SAME if single else ALIKE
        return verified(self.fast_tower(self.float8), self.image_features, self, least)

    def _on_cpu(self) -> Callable[[Tensor], Tensor]:
        """The image tower; made once, whatever the number of threads."""
        with _making:
            if self._tower is None:
                self._tower = self.image_tower()
            return self._tower

    def encode_images(self, pixels: Tensor) -> Tensor:
        """Unit features of preprocessed images: (B, 3, H, W) -> (B, D) float32, on the encoder's device."""
        check_pixels(pixels)
        if len(pixels) == 0:
            return torch.zeros(0, self.dim, device=self.device)
        tower = self._on_cpu() if self.device.type == "cpu" else self.image_features
        with torch.inference_mode():
            features = normalize(tower(pixels.to(self.device, self.dtype)).float(), dim=-1)
        return features.clone()  # out of inference mode, so that methods can use it in autograd

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Unit features of sentences: n texts -> (n, D) float32, on the encoder's device."""
        check_texts(texts)
        if len(texts) == 0:
            return torch.zeros(0, self.dim, device=self.device)
        with torch.inference_mode():
            starts = range(0, len(texts), TEXT_BATCH)
            rows = torch.cat([self.text_features(texts[i : i + TEXT_BATCH]) for i in starts])
            features = normalize(rows.float(), dim=-1)
        return features.clone()


def package(encoder: str, name: str) -> ModuleType:
    """A package that an encoder needs; if missing, the error says how to install it."""
    try:
        return import_module(name)
    except ImportError:
        raise MissingPart(
            f"Encoder '{encoder}' needs the package {name}. Install it with: pip install 'testtime[{encoder}]'"
        ) from None


def check_pixels(pixels: Tensor) -> None:
    """Refuse anything but a batch of preprocessed images (B, 3, H, W)."""
    if pixels.ndim != 4 or pixels.shape[1] != 3:
        raise InputError(f"Images must be (B, 3, H, W); got {tuple(pixels.shape)}.")


def check_texts(texts: Sequence[str]) -> None:
    """Refuse a string instead of a list: it would be read letter by letter."""
    if isinstance(texts, str):
        raise InputError(f"Expected a list of texts; got one string. Write [{texts!r}].")

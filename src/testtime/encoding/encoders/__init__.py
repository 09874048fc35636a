"""Encoders by name: from images and texts to unit features. Each is imported on first use."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from testtime.display import line
from testtime.machine.devices import find_device
from testtime.registry import ENCODERS, split_precision, unknown
from testtime.types import Encoder, InputError, MissingPart, SettingError

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8": torch.float8_e4m3fn,
}


def load_encoder(name: str, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> Encoder:
    """The encoder of that name on `device`, computing in `dtype`: by default float32, and on a GPU float16.

    The name may say it too, as in `offline@bfloat16`. Whatever the precision inside, features are returned as float32
    unit rows. bfloat16 is faster on processors with instructions for it. float8 is for CLIP's vision transformers on a
    GPU: bfloat16, with the image tower's large GEMMs in float8; faster, and less precise.

    >>> encoder = load_encoder("tiny@bfloat16")
    >>> encoder.encode_texts(["a photo of a cat.", "a photo of a dog."]).shape
    torch.Size([2, 32])
    """
    prefix, rest = _split(name)
    precision = split_precision(name)[1]
    if dtype not in (None, *DTYPES.values()):
        raise SettingError(f"Encoders compute in {', '.join(DTYPES)}; got {dtype}.")
    if precision and dtype not in (None, DTYPES[precision]):
        raise SettingError(f"'{name}' says {precision}, and dtype is {dtype}; give one of the two.")
    where = find_device(device)
    default = torch.float16 if where.type == "cuda" else torch.float32
    dtype = DTYPES[precision] if precision else dtype or default
    make, float8 = ENCODERS.find(prefix), dtype == DTYPES["float8"]
    encoder = make(rest, where, torch.bfloat16 if float8 else dtype)
    if precision:
        _rename(encoder, name)
    elif dtype != default:
        _rename(encoder, f"{encoder.name}@{next(key for key, value in DTYPES.items() if value == dtype)}")
    if float8:
        if hasattr(encoder, "float8"):
            encoder.float8 = True
        tower = getattr(encoder, "image_tower", lambda: None)()
        if where.type != "cuda" or not getattr(tower, "float8", False):
            raise SettingError(f"float8 is for CLIP's vision transformers on a GPU, not for '{name}' on {where}.")
    return encoder


def _rename(encoder: Encoder, name: str) -> None:
    """Give an encoder a name that says its precision: features of another are not mixed with its."""
    try:
        encoder.name = name  # type: ignore[misc]
    except AttributeError:
        raise SettingError(
            f"The encoder '{encoder.name}' has a fixed name, and so no other precision; leave out the one in '{name}'."
        ) from None


class Deferred:
    """An encoder by its name, loaded lazily on first use of anything but its name and device.

    `announce` is a context manager entered while it is loaded. If it is `optional`, failure to load is a MissingPart,
    tried only once: whatever needs it is left out.

    >>> encoder = Deferred("tiny")
    >>> encoder.name, encoder.is_loaded, encoder.dim, encoder.is_loaded
    ('tiny', False, 32, True)
    """

    def __init__(
        self,
        name: str,
        device: str | torch.device = "cpu",
        announce: Callable[[], AbstractContextManager[object]] = nullcontext,
        optional: bool = False,
    ) -> None:
        _split(name)
        self.name, self.device, self._announce = name, find_device(device), announce
        self._loaded: Encoder | None = None
        self._optional, self._problem = optional, ""

    @property
    def is_loaded(self) -> bool:
        """Whether it has been loaded."""
        return self._loaded is not None

    @property
    def loaded(self) -> Encoder:
        """The encoder itself."""
        if self._problem:
            raise MissingPart(self._problem)
        if self._loaded is None:
            try:
                with self._announce():
                    self._loaded = load_encoder(self.name, self.device)
            except InputError as error:
                if not self._optional:
                    raise
                self._problem = str(error)
                raise MissingPart(self._problem) from None
        return self._loaded

    def __repr__(self) -> str:
        size = "not loaded" if self._loaded is None else f"dim {self._loaded.dim}"
        return f"Deferred({line(self.name, 60)}, {size}, {self.device})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # notebooks and copies look for such names, and must not load it
            raise AttributeError(f"'Deferred' has no attribute '{name}'")
        return getattr(self.loaded, name)


def needed(encoder: Encoder) -> Encoder:
    """The encoder itself, loaded if it was deferred."""
    return encoder.loaded if isinstance(encoder, Deferred) else encoder


def _split(name: str) -> tuple[str, str]:
    """The checked prefix of a name, and the part after the colon, without its precision."""
    prefix, _, rest = split_precision(name)[0].partition(":")
    if ENCODERS.known(prefix) is None:
        if "/" in prefix:  # a common mistake: the model without its family
            raise unknown("encoder", name, ENCODERS.names(), meant=f"open_clip:{name}")
        raise unknown("encoder", prefix, ENCODERS.names())
    return prefix, rest

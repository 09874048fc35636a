"""An encoder's image tower captured as one CUDA graph for a fixed batch size.

The tower, with pixel normalisation before it and feature normalisation after it, is captured for a fixed number of
rows; smaller batches are padded with black images. Only a few small kernels are compiled, which Triton caches on disk,
so a run of ten images starts as fast as one of a million. On out of memory, the number of rows is halved.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from testtime.machine.capture import capture, reason, warn_once
from testtime.types import DeviceEncoder

ALIKE = 0.999  # minimum cosine of the features of two implementations in half precision
COARSE = 0.98  # the same with 8-bit products
SAME = 1 - 1e-5  # in single precision on a CPU, where both round alike

Tower = Callable[[Tensor], Tensor]  # from normalised pixels (B, 3, H, W) to features (B, D)


def verified(ours: Tower | None, plain: Tower, encoder: DeviceEncoder, least: float = ALIKE) -> Tower:
    """Our implementation of an encoder's tower if there is one and it agrees with the `plain` tower, else that one."""
    if ours is None:
        return plain
    size = encoder.preprocess.size
    noise = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0)).to(encoder.device, encoder.dtype)
    with torch.inference_mode():
        try:
            alike = cosine_similarity(ours(noise).float(), plain(noise).float()).min()
        except (RuntimeError, TypeError):  # an operation that the library lacks, or a model of another kind
            return plain
    return ours if alike > least else plain


class Compiled:
    """Unit features of `rows` views at a time; `graphs` defaults to whether the encoder is on a GPU.

    A tower that cannot be captured runs without a graph, with one warning. Threads that share it take turns.

    >>> import torch
    >>> from testtime import load_encoder
    >>> encoder = Compiled(load_encoder("tiny"), rows=4)
    >>> encoder.encode(torch.full((6, 3, 32, 32), 128.0)).shape
    torch.Size([6, 32])
    """

    def __init__(self, encoder: DeviceEncoder, rows: int, graphs: bool | None = None) -> None:
        self.encoder, self.rows = encoder, rows
        self._graphs = encoder.device.type == "cuda" if graphs is None else graphs
        with torch.inference_mode(False), torch.no_grad():
            self._tower = encoder.image_tower()
            channels = encoder.preprocess.mean, encoder.preprocess.std
            mean, std = (torch.tensor(values, device=encoder.device)[:, None, None] for values in channels)
            self._gain, self._shift = 1 / (255 * std), -mean / std
        self._run: Tower | None = None
        self._lock = threading.Lock()

    def encode(self, grey: Tensor) -> Tensor:
        """Unit features of grey levels from 0 to 255, not yet normalised: (B, 3, H, W) -> (B, D) float32."""
        parts = []
        with self._lock, torch.inference_mode(False), torch.no_grad():
            start = 0
            while start < len(grey):
                try:
                    parts.append(self._launch(grey[start : start + self.rows]))
                    start += self.rows
                    continue
                except torch.OutOfMemoryError:
                    if self.rows == 1:
                        raise
                # outside `except`, whose traceback keeps the memory alive
                self._run, before, self.rows = None, self.rows, self.rows // 2
                warn_once(f"Out of memory at {before} views at a time; continuing with {self.rows}.")
                torch.cuda.empty_cache()  # does nothing without a GPU
            if len(parts) == 1:
                return parts[0]
            return torch.cat(parts) if parts else torch.zeros(0, self.encoder.dim, device=self.encoder.device)

    def _launch(self, grey: Tensor) -> Tensor:
        """Unit features (n, D) of at most `rows` views."""
        if self._run is None:
            self._run = self._prepare(grey.shape[1:])
        return self._run(grey)

    def _prepare(self, shape: torch.Size) -> Tower:
        """From at most `rows` views of this shape to their unit features, through static buffers and maybe a graph."""
        device, dtype = self.encoder.device, self.encoder.dtype
        # integer grey levels are exact in half precision; bfloat16 has 8 bits, and mixed levels need more
        levels = torch.float32 if dtype == torch.float32 else torch.float16
        pixels = torch.zeros(self.rows, *shape, dtype=levels, device=device)
        features = torch.zeros(self.rows, self.encoder.dim, device=device)

        def compute() -> None:
            normal = torch.addcmul(self._shift, pixels, self._gain).to(dtype)
            features.copy_(normalize(self._tower(normal).float(), dim=-1))

        launch: Callable[[], object] = compute
        if self._graphs:
            try:
                launch = capture(compute).replay
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # errors of libraries during capture have no common base class
                warn_once(
                    f"Encoder '{self.encoder.name}' cannot be captured; running without a graph ({reason(error)})."
                )
                self._graphs = False

        def run(grey: Tensor) -> Tensor:
            pixels[: len(grey)].copy_(grey, non_blocking=True)
            pixels[len(grey) :].zero_()
            launch()
            return features[: len(grey)].clone()

        return run

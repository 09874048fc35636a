"""An encoder's image tower for one number of rows, launched as one graph.

The tower, with the normalisation of pixels in front of it and that of features behind it, is captured for a fixed
number of rows; fewer are filled up with black ones. Nothing is compiled but a few small kernels, which Triton keeps on
disk: a run of ten images starts as soon as one of a million. Where memory runs out, the rows are halved.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from testtime.machine.capture import capture, reason, warn_once
from testtime.types import DeviceEncoder

ALIKE = 0.999  # cosine of features, in half precision, of two ways to compute them
COARSE = 0.98  # and of products in 8 bits

Tower = Callable[[Tensor], Tensor]  # from normalised pixels (B, 3, H, W) to features (B, D)


def faithful(ours: Tower | None, plain: Tower, encoder: DeviceEncoder, least: float = ALIKE) -> Tower:
    """Our form of an encoder's tower if there is one and it gives what the `plain` tower gives, else that one."""
    if ours is None:
        return plain
    size = encoder.preprocess.size
    noise = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0)).to(encoder.device, encoder.dtype)
    with torch.inference_mode():
        try:
            alike = cosine_similarity(ours(noise).float(), plain(noise).float()).min()
        except (RuntimeError, TypeError):  # a library without the operation, or a model of another make
            return plain
    return ours if alike > least else plain


class Block(NamedTuple):
    """Fixed places for one number of rows, and what turns the first into the second."""

    pixels: Tensor  # (rows, 3, size, size), grey levels from 0 to 255
    features: Tensor  # (rows, D) float32 unit rows
    launch: Callable[[], object]


class Compiled:
    """Unit features of `rows` views at a time; `graphs` defaults to whether the encoder is on a GPU.

    What cannot be captured runs without, and a warning says so once. Threads that share it take turns.

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
            both = encoder.preprocess.mean, encoder.preprocess.std
            mean, std = (torch.tensor(three, device=encoder.device)[:, None, None] for three in both)
            self._gain, self._shift = 1 / (255 * std), -mean / std
        self._block: Block | None = None
        self._turn = threading.Lock()

    def encode(self, grey: Tensor) -> Tensor:
        """Unit features of grey levels from 0 to 255, not yet normalised: (B, 3, H, W) -> (B, D) float32."""
        parts = []
        with self._turn, torch.inference_mode(False), torch.no_grad():
            start = 0
            while start < len(grey):
                try:
                    parts.append(self._launch(grey[start : start + self.rows]))
                    start += self.rows
                    continue
                except torch.OutOfMemoryError:
                    if self.rows == 1:
                        raise
                # outside `except`, where the traceback holds the memory
                self._block, before, self.rows = None, self.rows, self.rows // 2
                warn_once(f"Memory ran out at {before} views at a time; going on with {self.rows}.")
                torch.cuda.empty_cache()  # nothing where there is no GPU
            return torch.cat(parts) if parts else torch.zeros(0, self.encoder.dim, device=self.encoder.device)

    def _launch(self, grey: Tensor) -> Tensor:
        """Unit features (n, D) of at most `rows` views."""
        count = len(grey)
        if self._block is None:
            self._block = self._made(grey)
        block = self._block
        block.pixels[:count].copy_(grey, non_blocking=True)
        block.pixels[count:].zero_()
        block.launch()
        return block.features[:count].clone()

    def _made(self, grey: Tensor) -> Block:
        device, dtype = self.encoder.device, self.encoder.dtype
        # whole grey levels are exact in half precision; bfloat16 keeps 8 bits, and mixed ones need more
        levels = torch.float32 if dtype == torch.float32 else torch.float16
        pixels = torch.zeros(self.rows, *grey.shape[1:], dtype=levels, device=device)
        features = torch.zeros(self.rows, self.encoder.dim, device=device)

        def run() -> None:
            normal = torch.addcmul(self._shift, pixels, self._gain).to(dtype)
            features.copy_(normalize(self._tower(normal).float(), dim=-1))

        launch: Callable[[], object] = run
        if self._graphs:
            try:
                launch = capture(run).replay
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # what a library does while it is captured has no common root
                warn_once(f"Encoder '{self.encoder.name}' cannot be captured, and runs without ({reason(error)}).")
                self._graphs = False
        return Block(pixels, features, launch)

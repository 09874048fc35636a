"""An encoder compiled for a few batch sizes, each launched as one graph.

The image tower of an open_clip encoder, with the normalisation of pixels in front of it and that of features
behind it, is compiled for fixed numbers of rows; any number of images is encoded in such blocks, the last one
filled up. Memory that runs out halves the largest block. On the CPU nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from testtime.encoders.inputs import check_pixels, check_texts
from testtime.fast.capture import capture, compiled, reason, warn_once

BLOCKS = (256, 64, 8, 1)  # rows at a time: above 64, a GPU is busy; below, one image should not wait for many
TEXTS = 2048  # sentences at a time
ROW = 32 * 2**20  # bytes that a view of 224 x 224 may need in half precision, on the safe side


class Block(NamedTuple):
    """Fixed places for one number of rows, and what turns the first three into the last."""

    pixels: Tensor  # (rows, 3, size, size)
    gain: Tensor  # (3, 1, 1)
    shift: Tensor  # (3, 1, 1)
    features: Tensor  # (rows, D)
    launch: Callable[[], object]


class FastEncoder:
    """An encoder like the one given, which must have an open_clip `model`; its weights are shared.

    Load that one with dtype=torch.float16 on a GPU. `compile` and `graphs` default to whether it is on one. What
    cannot be compiled or captured runs without, and a warning says so once. One thread at a time.

    >>> import torch
    >>> from testtime import load_encoder
    >>> encoder = FastEncoder(load_encoder("tiny"))
    >>> encoder.encode_grey(torch.full((2, 3, 32, 32), 128.0)).shape
    torch.Size([2, 32])
    """

    def __init__(
        self, encoder: Any, *, rows: int | None = None, compile: bool | None = None, graphs: bool | None = None
    ) -> None:
        self.encoder = encoder
        self.name, self.dim, self.scale = encoder.name, encoder.dim, encoder.scale
        self.preprocess, self.device, self.dtype = encoder.preprocess, encoder.device, encoder.dtype
        self.model, self.tokenizer = encoder.model, encoder.tokenizer
        on_gpu = self.device.type == "cuda"
        self._compile = on_gpu if compile is None else compile
        self._graphs = on_gpu if graphs is None else graphs
        self._most = rows or self._affordable()
        self._texts = TEXTS
        self._blocks: dict[int, Block] = {}
        self._tower: Callable[..., Tensor] = compiled(_tower) if self._compile else _tower
        self._format = torch.contiguous_format
        if on_gpu and sum(isinstance(part, nn.Conv2d) for part in self.model.visual.modules()) > 1:
            self._format = torch.channels_last  # what convolutions on tensor cores want
            self.model.visual.to(memory_format=self._format)
        looks = self.preprocess
        mean, std = (torch.tensor(x, device=self.device)[:, None, None] for x in (looks.mean, looks.std))
        self._from_grey = 1 / (255 * std), -mean / std
        self._from_normal = torch.ones_like(mean), torch.zeros_like(mean)

    def encode_images(self, pixels: Tensor) -> Tensor:
        """Unit features of preprocessed images: (B, 3, H, W) -> (B, D) float32, on the encoder's device."""
        return self._encode(pixels, *self._from_normal)

    def encode_grey(self, grey: Tensor) -> Tensor:
        """Unit features of grey levels from 0 to 255, not yet normalised: (B, 3, H, W) -> (B, D) float32."""
        return self._encode(grey, *self._from_grey)

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Unit features of sentences: n texts -> (n, D) float32, on the encoder's device."""
        check_texts(texts)
        if len(texts) == 0:
            return torch.zeros(0, self.dim, device=self.device)

        def encode(start: int, stop: int, most: int) -> Tensor:
            tokens = self.tokenizer(list(texts[start:stop])).to(self.device, non_blocking=True)
            return self.model.encode_text(tokens).float()

        with torch.inference_mode():
            rows, self._texts = halving(encode, len(texts), self._texts)
            features = normalize(rows, dim=-1)
        return features.clone()

    def _encode(self, pixels: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        check_pixels(pixels)
        if len(pixels) == 0:
            return torch.zeros(0, self.dim, device=self.device)
        before = self._most
        with torch.inference_mode(False), torch.no_grad():

            def encode(start: int, stop: int, most: int) -> Tensor:
                return self._launch(pixels[start:stop], gain, shift, most)

            features, self._most = halving(encode, len(pixels), self._most, _rows)
        if self._most < before:
            warn_once(f"Memory ran out at {before} images at a time; going on with {self._most}.")
        return features

    def _launch(self, pixels: Tensor, gain: Tensor, shift: Tensor, most: int) -> Tensor:
        """Unit features (n, D) of one block's worth of pixels, n at most `most`."""
        if not (self._compile or self._graphs):
            return _tower(self.model, pixels.to(self.device), gain, shift, self.dtype)
        count = len(pixels)
        rows = min(size for size in (*BLOCKS, most) if count <= size <= most)
        self._blocks = {size: block for size, block in self._blocks.items() if size <= most}  # the rest was too much
        block = self._block(rows, pixels.shape[2:], gain, shift)
        block.pixels[:count].copy_(pixels, non_blocking=True)
        block.gain.copy_(gain)
        block.shift.copy_(shift)
        block.launch()
        return block.features[:count].clone()

    def _block(self, rows: int, sides: Sequence[int], gain: Tensor, shift: Tensor) -> Block:
        if rows not in self._blocks:
            # whole grey levels are exact in half precision; bfloat16 keeps 8 bits, and mixed ones need more
            dtype = torch.float32 if self.dtype == torch.float32 else torch.float16
            pixels = torch.zeros(rows, 3, *sides, dtype=dtype, device=self.device).to(memory_format=self._format)
            features = torch.zeros(rows, self.dim, device=self.device)
            block = Block(pixels, gain.clone(), shift.clone(), features, lambda: None)
            self._blocks[rows] = block._replace(launch=self._launcher(block))
        return self._blocks[rows]

    def _launcher(self, block: Block) -> Callable[[], object]:
        def run() -> None:
            block.features.copy_(self._tower(self.model, block.pixels, block.gain, block.shift, self.dtype))

        if self._compile:
            try:
                run()
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a compiler fails in its own ways, and they have no common root
                warn_once(f"Encoder '{self.name}' cannot be compiled, and runs slower ({reason(error)}).")
                self._tower, self._compile = _tower, False
        if self._graphs:
            try:
                return capture(run).replay
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                warn_once(f"Encoder '{self.name}' cannot be captured, and runs without ({reason(error)}).")
                self._graphs = False
        return run

    def _affordable(self) -> int:
        """Rows that fit into half of the memory that is free: a power of two, at most the largest block."""
        if self.device.type != "cuda":
            return BLOCKS[1]
        row = ROW * (self.preprocess.size / 224) ** 2 * self.dtype.itemsize / 2
        fit = torch.cuda.mem_get_info(self.device)[0] / 2 / row
        return max(1, min(BLOCKS[0], 2 ** int(max(fit, 1)).bit_length() // 2))


def _rows(rest: int, most: int) -> int:
    """How many of the `rest` rows to encode next: full blocks first, then what is left."""
    return next((size for size in (most, *BLOCKS) if 64 <= size <= min(rest, most)), min(rest, most))


def halving(
    work: Callable[[int, int, int], Tensor],
    count: int,
    most: int,
    rows: Callable[[int, int], int] = min,
) -> tuple[Tensor, int]:
    """What `work(start, stop, most)` makes of `count` things, together, and how many at a time are too few to fail.

    Starts with `most` at a time, or what `rows(rest, most)` says. Where memory runs out, that is halved, and
    the work goes on; a single thing that does not fit raises the error.
    """
    parts: list[Tensor] = []
    start = 0
    while start < count:
        stop = start + rows(count - start, most)
        try:
            parts.append(work(start, stop, most))
            start = stop
            continue
        except torch.OutOfMemoryError:
            if most == 1:
                raise
        most = max(1, min(most, stop - start) // 2)  # outside `except`, where the traceback holds the memory
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return torch.cat(parts), most


def _tower(model: Any, pixels: Tensor, gain: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
    """Unit features (n, D) float32 of pixels (n, 3, H, W), brought to the model's range first."""
    return normalize(model.encode_image((pixels * gain + shift).to(dtype)).float(), dim=-1)

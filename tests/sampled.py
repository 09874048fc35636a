"""Random parameters of views, readable: the draw of `testtime.images.draw` one view at a time."""

from __future__ import annotations

from typing import NamedTuple

from testtime.images.draw import NAMES, NOTHING, Drawn


class CropParameters(NamedTuple):
    """A box of the image in pixels, and whether it is mirrored after it is resized."""

    top: int
    left: int
    height: int
    width: int
    flip: bool


class Operation(NamedTuple):
    """One step of an AugMix chain: one of `NAMES` and its amount."""

    name: str
    amount: float  # bits, degrees, a threshold, a slope or pixels, by name; signed where that means something


class AugMixParameters(NamedTuple):
    """The view becomes `keep * view + (1 - keep) * sum(weight * chain(view))`."""

    chains: tuple[tuple[Operation, ...], ...]  # each of 1 to 3 operations
    weights: tuple[float, ...]  # one per chain, summing to 1
    keep: float


class ViewParameters(NamedTuple):
    """All random parameters of one view."""

    crop: CropParameters
    augmix: AugMixParameters | None


def entries(drawn: Drawn) -> list[ViewParameters]:
    """The same draw, one entry for each view."""
    crops = [CropParameters(top, left, h, w, flip > 0) for top, left, h, w, flip in drawn.crops.tolist()]
    if drawn.mixes is None:
        return [ViewParameters(crop, None) for crop in crops]
    found = []
    mixes = drawn.mixes
    parts = (mixes.operations, mixes.amounts, mixes.weights, mixes.keep)
    for crop, operations, amounts, weights, keep in zip(crops, *(part.tolist() for part in parts), strict=True):
        chains = tuple(
            tuple(Operation(NAMES[code], amount) for code, amount in zip(*chain, strict=True) if code != NOTHING)
            for chain in zip(operations, amounts, strict=True)
        )
        found.append(ViewParameters(crop, AugMixParameters(chains, tuple(weights), keep)))
    return found

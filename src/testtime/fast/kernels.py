"""The loops of fast twins, compiled by numba: arrays in, arrays filled. S runs, C classes, D features, M slots.

Memory is touched once, and rows are worked off one after the other, so the numbers of a run do not depend on the
runs beside it. The first call in a new environment compiles for some seconds; the result is kept on disk.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Array = NDArray[Any]

# sums may be taken in any order, for vector instructions; NaN and infinity keep their meaning
compiled = njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "arcp", "nsz"}, error_model="numpy")


@compiled
def average(
    views: Array, logits: Array, chances: Array, chosen: Array, feature: Array, logit: Array, entropy: Array
) -> None:
    """Mean feature (S, D) and logit (S, C) of each run's chosen views (S, k), and the entropy (S,) of their votes.

    `views` are (V, D), `logits` and their softmax `chances` (S, V, C).
    """
    runs, keep = chosen.shape
    classes, dim = logits.shape[2], views.shape[1]
    tiny = np.finfo(logits.dtype).tiny
    for s in range(runs):
        feature[s] = 0
        for k in range(keep):
            row = views[chosen[s, k]]
            for d in range(dim):
                feature[s, d] += row[d] / keep
        total = 0.0
        for c in range(classes):
            mean, vote = logits.dtype.type(0), logits.dtype.type(0)
            for k in range(keep):
                mean += logits[s, chosen[s, k], c]
                vote += chances[s, chosen[s, k], c]
            logit[s, c] = mean / keep
            vote /= keep
            total -= vote * math.log(max(vote, tiny))
        entropy[s] = total


@compiled
def push(
    label: Array,
    feature: Array,
    price: Array,
    keys: Array,
    cost: Array,
    visual: Array,
    at: Array,
    length: Array,
    seen: Array,
    taken: Array,
) -> None:
    """Offer each run's feature (S, D) of cost `price` (S,) to the queue of class `label` (S,); `taken` says where.

    As `bank.push`: it takes the place of the worst if it is strictly better, behind its equals. The class's visual
    prototype, its direction and its length follow.
    """
    runs, slots, dim = len(label), cost.shape[2], feature.shape[1]
    for s in range(runs):
        c = label[s]
        taken[s] = price[s] < cost[s, c, slots - 1]
        if not taken[s]:
            continue
        place = slots - 1
        while place > 0 and price[s] < cost[s, c, place - 1]:
            cost[s, c, place] = cost[s, c, place - 1]
            keys[s, c, place] = keys[s, c, place - 1]
            place -= 1
        cost[s, c, place] = price[s]
        keys[s, c, place] = feature[s]
        filled = 0
        for m in range(slots):
            filled += cost[s, c, m] < np.inf
        for d in range(dim):
            total = keys.dtype.type(0)
            for m in range(filled):
                total += keys[s, c, m, d]
            visual[s, c, d] = total / filled
        seen[s, c] = 1
        aim(visual[s], at[s], length[s], c)


@compiled
def aim(vectors: Array, at: Array, length: Array, c: int) -> None:
    """Direction and length of row c of `vectors` (C, D); a zero row keeps its direction and has length 1."""
    row, out, square = vectors[c], at[c], vectors.dtype.type(0)
    for d in range(len(row)):
        square += row[d] * row[d]
    norm = math.sqrt(square) if square > 0 else vectors.dtype.type(1)
    over = vectors.dtype.type(1 / norm)
    for d in range(len(row)):
        out[d] = row[d] * over
    length[c] = norm


@compiled
def aim_all(vectors: Array, at: Array, length: Array) -> None:
    """`aim` for every row of every run: (S, C, D)."""
    for s in range(vectors.shape[0]):
        for c in range(vectors.shape[1]):
            aim(vectors[s], at[s], length[s], c)


@compiled
def slopes(
    logit: Array,
    near: Array,
    height: Array,
    beta: Array,
    steepness: Array,
    scale: float,
    by_text: Array,
    by_visual: Array,
) -> None:
    """Slope of the softmax's entropy by each text and visual prototype: the factors (S, C) of the image's feature.

    Logits are `logit` plus the affinity at cosines `near` (S, C); `height` (S, C) is alpha where a class is seen.
    """
    runs, classes = logit.shape
    chance = np.empty(classes, logit.dtype)
    for s in range(runs):
        top = -np.inf
        for c in range(classes):
            by_visual[s, c] = height[s, c] * math.exp(beta[s] * (near[s, c] - 1))
            chance[c] = logit[s, c] + by_visual[s, c]
            top = max(top, chance[c])
        total = 0.0
        for c in range(classes):
            total += math.exp(chance[c] - top)
        rest, mean = top + math.log(total), 0.0  # mean: of log p, so less the entropy
        for c in range(classes):
            chance[c] -= rest
            mean += math.exp(chance[c]) * chance[c]
        for c in range(classes):
            slope = math.exp(chance[c]) * (mean - chance[c]) * steepness[s]
            by_text[s, c] = scale * slope
            by_visual[s, c] *= beta[s] * slope


@compiled
def nudge(
    start: Array,
    direction: Array,
    pull: Array,
    pulled: Array,
    weight: Array,
    feature: Array,
    soft: Array,
    lengths: Array,
    lr: Array,
    probe: Array,
    moved: Array,
    length: Array,
    dot: Array,
) -> None:
    """Prototypes `moved` (S, C, D) after one step of AdamW from zero residuals on `start`, of these `lengths` (S, C).

    The slope is `pull` (S, C, D), in runs that are `pulled` (S,), plus `weight` (S, C) times `feature` (S, D), less
    what lies along `direction`, which turns nothing. The residual is -lr slope / (|slope| + soft * lengths): AdamW's
    eps in the slope's own units. `length` and `dot` (S, C) become the lengths of the result and its products with
    `probe` (D,). A `moved` of one row is scratch.
    """
    runs, classes, dim = start.shape
    keep = moved.shape[1] == classes
    for s in range(runs):
        rate, f = lr[s], feature[s]
        for c in range(classes):
            at, begin, out = direction[s, c], start[s, c], moved[s, c if keep else 0]
            w, along = weight[s, c], start.dtype.type(0)
            if pulled[s]:
                for d in range(dim):
                    out[d] = pull[s, c, d] + w * f[d]
                    along += out[d] * at[d]
            else:
                for d in range(dim):
                    out[d] = w * f[d]
                    along += out[d] * at[d]
            eps, square, product = soft[s] * lengths[s, c], start.dtype.type(0), start.dtype.type(0)
            for d in range(dim):
                slope = out[d] - along * at[d]
                out[d] = begin[d] - rate * slope / (abs(slope) + eps)
                square += out[d] * out[d]
                product += out[d] * probe[d]
            length[s, c] = math.sqrt(square)
            dot[s, c] = product


@compiled
def answer(
    text: Array,
    text_length: Array,
    visual: Array,
    visual_length: Array,
    height: Array,
    beta: Array,
    scale: float,
    logits: Array,
    entropy: Array,
) -> None:
    """Logits (S, C) and the entropy (S,) of their softmax, from products with prototypes and their lengths (S, C)."""
    runs, classes = logits.shape
    for s in range(runs):
        top = -np.inf
        for c in range(classes):
            value = scale * (text[s, c] / text_length[s, c])
            if height[s, c] > 0:
                value += height[s, c] * math.exp(beta[s] * (visual[s, c] / visual_length[s, c] - 1))
            logits[s, c] = value
            top = max(top, value)
        total, weighted = 0.0, 0.0
        for c in range(classes):
            chance = math.exp(logits[s, c] - top)
            total += chance
            weighted += chance * (logits[s, c] - top)
        entropy[s] = math.log(total) - weighted / total


@compiled
def evolve(text: Array, at: Array, length: Array, moved: Array, moved_length: Array, share: float) -> None:
    """Move `text` (C, D) a `share` of the way towards `moved` at length one; aim `at` and `length` (C,) along it."""
    classes, dim = text.shape
    amount = text.dtype.type(share)
    for c in range(classes):
        row, towards, over = text[c], moved[c], text.dtype.type(1 / moved_length[c])
        for d in range(dim):
            row[d] += amount * (towards[d] * over - row[d])
        aim(text, at, length, c)

"""One step of DPE as compiled loops: arrays in, arrays filled. C classes, D features, V views, M slots.

C' is C, rounded up to whole lines of the cache: products are quicker where each row begins with one.

Memory is touched as seldom as can be: prototypes are kept at their own length, directions are made where they are
needed, and a nudged prototype is used for all that it is good for while it is in the cache. A thread has the same rows
in every loop and product, and finds them there. Each row is worked off by one thread in one order, so the numbers of a
loop do not depend on how many threads there are.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import prange, types
from numba.extending import overload

from testtime.ops import NOTHING
from testtime.steppers.cpu import loops
from testtime.steppers.cpu.gemm import N, T, own_threads, product
from testtime.steppers.cpu.lanes import row_loop
from testtime.steppers.cpu.loops import (
    Array,
    compiled,
    dot_at,
    exp,
    length_at,
    length_of,
    log,
    row_at,
    softmax_entropy,
    spread,
)


class Text(NamedTuple):
    """The text prototypes, and what nudges them."""

    vectors: Array  # (C, D), at their own length
    length: Array  # (C,), 1 for a zero row
    pull: Array  # (C, D), of the alignment, over the length; (0, D) without alignment
    weight: Array  # (C,), of the image's feature
    cosine: Array  # (C,), with the image's feature
    evolved: Array  # (C, D), what follows if they learn from the image; (0, D) where they never do so
    evolved_length: Array  # (C,)


class Visual(NamedTuple):
    """The visual prototypes, and what nudges them: as for `Text`."""

    vectors: Array
    length: Array
    pull: Array
    weight: Array
    cosine: Array
    columns: Array  # (D, C'), the prototypes as columns; (0, 0) without alignment
    height: Array  # (C,), alpha where a class is seen
    seen: Array  # (C,) bool


class Run(NamedTuple):
    """The state of a run, and what follows from it."""

    text: Text
    visual: Visual
    keys: Array  # (C, M, D)
    cost: Array  # (C, M)
    updates: Array  # (1,), images that the text prototypes have learned from
    stale: Array  # (1,) bool, whether a prototype has changed since the pull of the alignment was computed


class Scratch(NamedTuple):
    """Scratch buffers."""

    logits: Array  # (V, C)
    entropy: Array  # (V,)
    top: Array  # (V,), the largest logit of a view
    total: Array  # (V,), and the sum of exponentials under it
    logit: Array  # (C,)
    chance: Array  # (C,)
    factor: Array  # (C,)
    answer: Array  # (C,), the logits of the probe
    moved_length: Array  # (C,), of nudged prototypes
    moved_cosine: Array  # (C,), and their cosine with the probe
    feature: Array  # (D,)
    probe: Array  # (D,), what is predicted
    moved: Array  # (C, D), nudged text prototypes; (0, D) where views are not chosen again
    similarity: Array  # (C, C') of text and visual prototypes, or (0, 0) without alignment
    share: Array  # (1,), of the way towards the nudged ones that text prototypes go
    soft: Array  # (1,), eps of AdamW in the units of the slopes
    text_pull: Array  # (C, D), for looks that need another pull than the run's; (0, D) until there is a look
    visual_pull: Array


class Settings(NamedTuple):
    """Numbers of the run's precision, as in `fast.Numbers`, and switches."""

    scale: Any
    alpha: Any
    beta: Any
    entropy_weight: Any
    align_weight: Any
    eps: Any
    lr_text: Any
    lr_visual: Any
    per_nat: Any
    sharpness: Any
    threshold: Any
    share: Any
    prompt_count: Any
    keeps_below: bool
    evolves: bool
    renormalises: bool
    keep: int  # views
    threads: int | None  # None: there is but one
    peeking: bool  # the state is left as it was


LOWEST = -1e30  # stands for minus infinity

# what can be done for some views, or for some classes, without the others
LOGITS, SPIKES, NEAR, SIMILARITY, REPEL, PULL, AGAIN, ANSWER = range(8)


def rows(phase: int, total: int, views: Array, run: Run, scratch: Scratch, settings: Settings) -> None:
    """One phase for `total` rows, by as many threads as there are."""
    raise NotImplementedError("for compiled loops")


@overload(rows)
def _rows(phase: Any, total: Any, views: Any, run: Any, scratch: Any, settings: Any) -> Any:
    def alone(phase: Any, total: Any, views: Any, run: Any, scratch: Any, settings: Any) -> None:
        _some(phase, 0, total, views, run.text, run.visual, scratch, settings)

    def together(phase: Any, total: Any, views: Any, run: Any, scratch: Any, settings: Any) -> None:
        _spread(phase, total, views, run.text, run.visual, scratch, settings)

    # by type: what is never spread is compiled without the threads, in half the time
    return alone if settings[Settings._fields.index("threads")] == types.none else together


@spread
def _spread(
    phase: int, total: int, views: Array, text: Text, visual: Visual, scratch: Scratch, settings: Settings
) -> None:
    threads = settings.threads
    for piece in prange(threads):  # what it is given may be a tuple of arrays, but not of tuples
        start, stop = total * piece // threads, total * (piece + 1) // threads
        before = own_threads(1)
        _some(phase, start, stop, views, text, visual, scratch, settings)
        own_threads(before)


@compiled
def _some(
    phase: int, start: int, stop: int, views: Array, text: Text, visual: Visual, scratch: Scratch, settings: Settings
) -> None:
    pairs = scratch.similarity
    if phase == LOGITS:
        product(N, T, views, text.vectors[start:stop], scratch.logits[:, start:stop])
    elif phase == SPIKES:
        _view_entropies(start, stop, scratch)
    elif phase == NEAR:
        _near(start, stop, visual, scratch)
    elif phase == SIMILARITY:
        product(
            N, N, text.vectors[start:stop], visual.columns[:, : len(text.length)], pairs[start:stop, : len(text.length)]
        )
    elif phase == REPEL:
        _repel(start, stop, visual, scratch, settings)
    elif phase == PULL:
        product(N, N, pairs[start:stop, : len(text.length)], visual.vectors, text.pull[start:stop])
        product(T, N, pairs[:, start:stop], text.vectors, visual.pull[start:stop])
    elif phase == AGAIN:
        _again(start, stop, text, scratch, settings)
        product(N, T, views, scratch.moved[start:stop], scratch.logits[:, start:stop])
    else:  # visual prototypes were read last, and text prototypes are read next: so each are found in the cache
        _by_visual(start, stop, visual, scratch, settings)
        _by_text(start, stop, text, scratch, settings)


@compiled
def _view_entropies(start: int, stop: int, scratch: Scratch) -> None:
    """Logits and their entropy for views whose products with prototypes are in `logits`, but for `factor`."""
    factor, tops, totals, entropies, chance = (
        scratch.factor,
        scratch.top,
        scratch.total,
        scratch.entropy,
        np.empty_like(scratch.factor),
    )
    for v in range(start, stop):
        row = scratch.logits[v]
        for c in range(len(row)):
            row[c] *= factor[c]
        tops[v], totals[v], entropy = softmax_entropy(row, chance)
        entropies[v] = 0 if entropy < NOTHING else entropy


@compiled
def _near(start: int, stop: int, visual: Visual, scratch: Scratch) -> None:
    """Cosines of visual prototypes with the image's feature."""
    vectors, length, cosine, feature = visual.vectors, visual.length, visual.cosine, row_at(scratch.feature, 0)
    for c in range(start, stop):
        cosine[c] = dot_at(row_at(vectors, c), feature, vectors.shape[1], length[c]) / length[c]


@compiled
def _repel(start: int, stop: int, visual: Visual, scratch: Scratch, settings: Settings) -> None:
    """Turn products of text with visual prototypes into how much each pair repels, over both lengths.

    That is the softmax of the cosines over the temperature, down some columns and over the seen classes, less the
    identity. `factor` is one over the text prototypes' lengths.
    """
    pairs, over, length = scratch.similarity, scratch.factor, visual.length[start:stop]
    seen = visual.seen
    known, width, one, zero = seen[start:stop], stop - start, over.dtype.type(1), over.dtype.type(0)
    top, steep, own, others = np.empty((4, width), over.dtype)
    top[:], others[:] = LOWEST, 0
    for i in range(width):
        steep[i] = settings.sharpness / length[i] if known[i] else zero
    # along the rows, each loop so small that it becomes vector instructions
    for j in range(len(pairs)):
        if seen[j]:
            row = pairs[j, start:stop]
            for i in range(width):
                row[i] *= steep[i] * over[j]
            for i in range(width):
                top[i] = max(top[i], row[i])
    for i in range(width):
        if known[i]:
            own[i], pairs[start + i, start + i] = exp(pairs[start + i, start + i] - top[i]), LOWEST
    for j in range(len(pairs)):
        if seen[j]:
            row = pairs[j, start:stop]
            for i in range(width):
                row[i] = exp(row[i] - top[i])
            for i in range(width):
                others[i] += row[i]
    for i in range(width):
        if known[i]:
            # one's own chance less 1, to the last digit even where it is nearly 1
            pairs[start + i, start + i] = -others[i]
            steep[i] = one / ((own[i] + others[i]) * length[i])
    for j in range(len(pairs)):
        row, share = pairs[j, start:stop], over[j] if seen[j] else zero
        for i in range(width):
            row[i] *= steep[i] * share


@row_loop(sums=2)
def _nudged(rows: Any, numbers: Any, sums: Any) -> Any:
    """A prototype after one step of AdamW from a zero residual; its square, and its product with the probe.

    The slope is the pull, where there is one, plus the weighted feature, less what lies along the prototype, which
    turns nothing. `eps` is AdamW's in the slope's own units, times the prototype's length.
    """
    (start, pull, feature, probe, _), (length, weight, along, eps, rate) = rows, numbers
    slope = length.fma(pull, weight * feature) - along * start
    moved = start - rate * slope / (abs(slope) + eps)
    return moved, (moved.fma(moved, sums[0]), moved.fma(probe, sums[1]))


@row_loop(sums=1)
def _moved(rows: Any, numbers: Any, sums: Any) -> Any:
    """A prototype some way towards the direction of a nudged one; its square."""
    (start, nudged, _), (share, over) = rows, numbers
    moved = start + share * (nudged * over - start)
    return moved, (moved.fma(moved, sums[0]),)


@compiled
def _nudge(
    start: int,
    stop: int,
    side: Text | Visual,
    wanted: Array,
    scratch: Scratch,
    rate: Any,
    out: Array,
    evolved: Array,
    evolved_length: Array,
) -> None:
    """Nudge those prototypes whose `wanted` (C,) is above 0: their `moved_length` and `moved_cosine`.

    They are left in `out` (C, D), or each in the one row of it. `evolved` (C, D), where there is any, and their lengths
    are what follows if the image is learned from. That is known once all logits are. But a nudged prototype is quicker
    to use twice than to make twice.
    """
    vectors, pull, length, weight, cosine = side.vectors, side.pull, side.length, side.weight, side.cosine
    feature, probe, moved_length, moved_cosine = (
        scratch.feature,
        scratch.probe,
        scratch.moved_length,
        scratch.moved_cosine,
    )
    soft, share, dim, real = scratch.soft[0], scratch.share[0], vectors.shape[1], vectors.dtype.type
    for c in range(start, stop):
        if not wanted[c] > 0:
            continue
        at, to, pull_at = row_at(vectors, c), row_at(out, c % len(out)), row_at(feature, 0)
        along, pulled = weight[c] * cosine[c], real(0)  # without a pull, the feature, times 0
        if len(pull):
            pull_at, pulled = row_at(pull, c), length[c]
            along += dot_at(at, pull_at, dim, pulled)
        numbers = pulled, weight[c], along / length[c], soft * length[c], rate
        square, near = _nudged((at, pull_at, row_at(feature, 0), row_at(probe, 0), to), dim, numbers)
        moved_length[c] = max(math.sqrt(square), 1e-12)  # a zero row stays zero
        over = real(1) / moved_length[c]
        moved_cosine[c] = near * over
        if len(evolved):
            (square,) = _moved((at, to, row_at(evolved, c)), dim, (share, over))
            evolved_length[c] = length_of(square)


@compiled
def _again(start: int, stop: int, text: Text, scratch: Scratch, settings: Settings) -> None:
    """Nudged text prototypes, and their lengths."""
    _nudge(
        start,
        stop,
        text,
        text.length,
        scratch,
        settings.lr_text,
        scratch.moved,
        scratch.moved[:0],
        scratch.moved_length,
    )


@compiled
def _by_visual(start: int, stop: int, visual: Visual, scratch: Scratch, settings: Settings) -> None:
    """What nudged visual prototypes give to the logits of the probe."""
    answer, near, height, beta = scratch.answer, scratch.moved_cosine, visual.height, settings.beta
    out, one = np.empty((1, len(scratch.probe)), near.dtype), near.dtype.type(1)
    _nudge(start, stop, visual, height, scratch, settings.lr_visual, out, out[:0], near)
    for c in range(start, stop):
        answer[c] = height[c] * exp(beta * (near[c] - one)) if height[c] > 0 else 0


@compiled
def _by_text(start: int, stop: int, text: Text, scratch: Scratch, settings: Settings) -> None:
    """What nudged text prototypes add to the logits of the probe; and what follows if the image is learned from."""
    answer, near, scale, one = scratch.answer, scratch.moved_cosine, settings.scale, scratch.answer.dtype.type(1)
    out, evolved, evolved_length = np.empty((1, len(scratch.probe)), near.dtype), text.evolved, text.evolved_length
    _nudge(start, stop, text, text.length, scratch, settings.lr_text, out, evolved, evolved_length)
    for c in range(start, stop):
        answer[c] += scale * near[c]
    if settings.renormalises and len(evolved):
        for c in range(start, stop):
            over = one / evolved_length[c]
            for d in range(evolved.shape[1]):
                evolved[c, d] *= over
            evolved_length[c] = length_at(evolved, c)


@compiled
def confident(views: Array, length: Array, run: Run, scratch: Scratch, settings: Settings, feature: Array) -> Any:
    """Average the views (V, D) of lowest entropy into `feature` (D,) and `scratch.logit`; the entropy of their votes.

    Their products with prototypes of these lengths (C,) are in `scratch.logits`.
    """
    logit, votes, entropies = scratch.logit, scratch.chance, scratch.entropy
    for c in range(len(length)):
        scratch.factor[c] = settings.scale / length[c]
    rows(SPIKES, len(views), views, run, scratch, settings)
    part = logit.dtype.type(1 / settings.keep)
    feature[:], logit[:], votes[:] = 0, 0, 0
    for _ in range(settings.keep):
        best = 0
        for v in range(len(views)):  # a tie goes to the lower index
            if entropies[v] < entropies[best]:
                best = v
        entropies[best] = np.inf
        row, view, top, vote = scratch.logits[best], views[best], scratch.top[best], part / scratch.total[best]
        for c in range(len(row)):
            logit[c] += row[c] * part
            votes[c] += exp(row[c] - top) * vote
        for d in range(len(view)):
            feature[d] += view[d] * part
    for c in range(len(votes)):
        scratch.factor[c] = log(votes[c])
    # what the whole misses of 1 by rounding would be as large as a small entropy
    whole, weighted = loops.weighed(votes, scratch.factor, part - part)
    return math.log(whole) - weighted / whole


@compiled
def set_visual(label: int, mean: Array, run: Run) -> None:
    """Give a class the visual prototype `mean` (D,)."""
    visual = run.visual
    visual.vectors[label] = mean
    for d in range(len(visual.columns)):
        visual.columns[d, label] = mean[d]
    visual.length[label] = length_at(visual.vectors, label)


@compiled
def enqueue(label: int, price: Any, run: Run, feature: Array, alpha: Any) -> bool:
    """Offer a feature (D,) of cost `price` to the queue of class `label`; whether it was taken in.

    The class's visual prototype follows.
    """
    if not loops.push(run.keys, run.cost, label, feature, price):
        return False
    row, count, mean = run.keys[label], loops.filled(run.cost[label]), np.empty_like(feature)
    for d in range(len(feature)):
        total = feature.dtype.type(0)
        for m in range(count):
            total += row[m, d]
        mean[d] = total / count
    set_visual(label, mean, run)
    run.visual.seen[label], run.visual.height[label], run.stale[0] = True, alpha, True
    return True


@compiled
def slopes(views: Array, run: Run, scratch: Scratch, settings: Settings) -> None:
    """Slope of the loss at the image's feature by each prototype: `weight` and `cosine` of both sides.

    It is that of the softmax's entropy, in units in which the alignment, where there is one, has weight 1.
    """
    text, visual, log_p, real = run.text, run.visual, scratch.chance, scratch.chance.dtype.type
    gain = real(settings.align_weight / max(1, visual.seen.sum())) if settings.align_weight > 0 else real(1)
    steepness, scratch.soft[0] = settings.entropy_weight / gain, settings.eps / gain
    rows(NEAR, len(log_p), views, run, scratch, settings)
    for c in range(len(log_p)):
        text.cosine[c] = scratch.logit[c] / settings.scale
        visual.weight[c] = visual.height[c] * exp(settings.beta * (visual.cosine[c] - real(1)))
        log_p[c] = scratch.logit[c] + visual.weight[c]
    top, whole, entropy = softmax_entropy(log_p, scratch.factor)
    rest = top + math.log(whole)
    for c in range(len(log_p)):
        log = log_p[c] - rest
        slope = exp(log) * (-entropy - log) * steepness
        if abs(slope) < NOTHING:
            slope = 0.0
        text.weight[c] = settings.scale * slope
        visual.weight[c] *= settings.beta * slope


@compiled
def align(views: Array, run: Run, scratch: Scratch, settings: Settings) -> None:
    """Compute the pull of the alignment anew: three products of C x C x D."""
    classes, one = len(scratch.factor), scratch.factor.dtype.type(1)
    rows(SIMILARITY, classes, views, run, scratch, settings)
    for c in range(classes):
        scratch.factor[c] = one / run.text.length[c]
    rows(REPEL, classes, views, run, scratch, settings)
    rows(PULL, classes, views, run, scratch, settings)
    run.stale[0] = False


@compiled
def evolved(text: Text) -> Text:
    """The text prototypes evolved. They change places with those before, whose memory is used next."""
    return Text(text.evolved, text.evolved_length, text.pull, text.weight, text.cosine, text.vectors, text.length)


@compiled
def beside(run: Run, scratch: Scratch) -> Run:
    """The run with other memory for the pull of its alignment."""
    t, v = run.text, run.visual
    text = Text(t.vectors, t.length, scratch.text_pull, t.weight, t.cosine, t.evolved, t.evolved_length)
    visual = Visual(v.vectors, v.length, scratch.visual_pull, v.weight, v.cosine, v.columns, v.height, v.seen)
    return Run(text, visual, run.keys, run.cost, run.updates, run.stale)


@compiled
def step(views: Array, run: Run, scratch: Scratch, settings: Settings) -> tuple[bool, bool]:
    """Find `scratch.answer` for an image's views (V, D); whether a queue took it, and whether the text evolves."""
    # which queue the image belongs to, and how confidently
    classes = len(scratch.logit)
    rows(LOGITS, classes, views, run, scratch, settings)
    entropy = confident(views, run.text.length, run, scratch, settings, scratch.feature)
    label, visual, here = 0, run.visual, run
    for c in range(classes):
        if scratch.logit[c] > scratch.logit[label]:
            label = c

    # evolve the visual prototypes; a look puts back what it changes
    keys, cost, mean = run.keys[label].copy(), run.cost[label].copy(), visual.vectors[label].copy()
    height, seen, stale = visual.height[label], visual.seen[label], run.stale[0]
    taken = enqueue(label, cost.dtype.type(entropy * settings.per_nat), run, scratch.feature, settings.alpha)
    if taken and settings.peeking:
        here = beside(run, scratch)

    # prototype residual learning
    slopes(views, here, scratch, settings)
    if here.stale[0] and settings.align_weight > 0:
        align(views, here, scratch, settings)
    scratch.probe[:] = views[0]
    if len(scratch.moved):  # views are chosen again
        rows(AGAIN, classes, views, here, scratch, settings)
        confident(views, scratch.moved_length, here, scratch, settings, scratch.probe)

    # the logits of the probe; where they are sure enough, the text prototypes evolve
    scratch.share[0] = settings.share
    if settings.share < 0:
        scratch.share[0] = 1 / (run.updates[0] + settings.prompt_count + 1)
    rows(ANSWER, classes, views, here, scratch, settings)
    entropy = softmax_entropy(scratch.answer, scratch.factor)[2]
    evolves = settings.evolves and (entropy * settings.per_nat < settings.threshold) == settings.keeps_below
    if settings.peeking and taken:
        run.keys[label], run.cost[label], run.stale[0] = keys, cost, stale
        visual.height[label], visual.seen[label] = height, seen
        set_visual(label, mean, run)
    return taken and not settings.peeking, evolves and not settings.peeking


@compiled
def scan(stream: Array, run: Run, scratch: Scratch, settings: Settings, logits: Array, learned: Array) -> None:
    """Steps over N images (N, V, D), with the logits (N, C) and whether each was `learned` from (N,).

    After an odd number of evolutions the text prototypes lie in `run.text.evolved`.
    """
    for n in range(len(stream)):
        taken, evolves = step(stream[n], run, scratch, settings)
        if evolves:
            run.updates[0] += 1
            run.stale[0] = True
            run = Run(evolved(run.text), run.visual, run.keys, run.cost, run.updates, run.stale)
        logits[n], learned[n] = scratch.answer, taken or evolves

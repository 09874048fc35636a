"""One step of DPE as compiled loops that fill arrays. C classes, D features, V views, M slots.

C' is C rounded up to whole cache lines: products are faster where every row is aligned to one.

Memory traffic is kept low: prototypes are stored unnormalised, directions are computed where they are needed, and a
nudged prototype is used for everything while it is in the cache. A thread has the same rows in every loop and product,
and finds them in its cache. Each row is processed by one thread in a fixed order, so the results of a loop do not
depend on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import prange, types
from numba.extending import overload

from testtime.ops import NEGLIGIBLE
from testtime.steppers.cpu import loops
from testtime.steppers.cpu.gemm import N, T, matmul, set_threads
from testtime.steppers.cpu.lanes import Emitted, Lanes, row_loop
from testtime.steppers.cpu.loops import (
    Array,
    Real,
    compiled,
    dot_at,
    exp,
    length_at,
    length_of,
    log,
    parallel,
    row_at,
    softmax_entropy,
)


class Text(NamedTuple):
    """The text prototypes and their gradients."""

    vectors: Array  # (C, D), not normalised
    length: Array  # (C,), 1 for a zero row
    pull: Array  # (C, D), of the alignment, divided by the length; (0, D) without alignment
    weight: Array  # (C,), of the image's feature
    cosine: Array  # (C,), with the image's feature
    evolved: Array  # (C, D), their next values if they learn from the image; (0, D) if they never do
    evolved_length: Array  # (C,)


class Visual(NamedTuple):
    """The visual prototypes and their gradients, as in `Text`."""

    vectors: Array
    length: Array
    pull: Array
    weight: Array
    cosine: Array
    columns: Array  # (D, C'), the prototypes as columns; (0, 0) without alignment
    height: Array  # (C,), alpha if the class has been seen, else 0
    seen: Array  # (C,) bool


class Run(NamedTuple):
    """The state of a run, and values derived from it."""

    text: Text
    visual: Visual
    keys: Array  # (C, M, D)
    cost: Array  # (C, M)
    updates: Array  # (1,), images that the text prototypes have learned from
    stale: Array  # (1,) bool, whether a prototype has changed since the alignment pull was computed


class Scratch(NamedTuple):
    """Scratch buffers."""

    logits: Array  # (V, C)
    entropy: Array  # (V,)
    top: Array  # (V,), the largest logit of a view
    total: Array  # (V,), the sum of exp(logit - top)
    logit: Array  # (C,)
    prob: Array  # (C,)
    factor: Array  # (C,)
    answer: Array  # (C,), the logits of the probe
    moved_length: Array  # (C,), of nudged prototypes
    moved_cosine: Array  # (C,), and their cosine with the probe
    feature: Array  # (D,)
    probe: Array  # (D,), the feature to classify
    moved: Array  # (C, D), nudged text prototypes; (0, D) unless views are reselected
    similarity: Array  # (C, C') of text and visual prototypes, or (0, 0) without alignment
    share: Array  # (1,), fraction by which text prototypes move to the nudged ones
    scaled_eps: Array  # (1,), AdamW's eps in the units of the slopes
    text_pull: Array  # (C, D), for peeks that need a different pull; (0, D) before the first peek
    visual_pull: Array


class Settings(NamedTuple):
    """Numbers in the run's precision, as in `fast.Numbers`, and switches."""

    scale: Real
    alpha: Real
    beta: Real
    entropy_weight: Real
    align_weight: Real
    eps: Real
    lr_text: Real
    lr_visual: Real
    per_nat: Real
    sharpness: Real
    threshold: float
    share: Real
    prompt_count: Real
    keeps_below: bool
    evolves: bool
    renormalises: bool
    keep: int  # number of confident views
    threads: int | None  # None: single-threaded
    peeking: bool  # the state does not change


LOWEST = -1e30  # stands for minus infinity

# phases of a step, each of which can be computed for a range of views or classes independently of the others
LOGITS, ENTROPIES, COSINES, SIMILARITY, LOGIT_GRADIENT, PULL, RESELECT, PREDICT = range(8)


def run_phase(phase: int, total: int, views: Array, run: Run, scratch: Scratch, settings: Settings) -> None:
    """Run one phase for `total` rows, on all threads of the settings."""
    raise NotImplementedError("for compiled loops")


@overload(run_phase)
def _run_phase(
    phase: Any, total: Any, views: Any, run: Any, scratch: Any, settings: Any
) -> Callable[..., None]:  # numba wants the same annotations for the types here and the values below
    def single_threaded(phase: Any, total: Any, views: Any, run: Any, scratch: Any, settings: Any) -> None:
        _phase_rows(phase, 0, total, views, run.text, run.visual, scratch, settings)

    def multithreaded(phase: Any, total: Any, views: Any, run: Any, scratch: Any, settings: Any) -> None:
        _parallel_phase(phase, total, views, run.text, run.visual, scratch, settings)

    # by type: single-threaded code is compiled without the parallel version, in half the time
    return single_threaded if settings[Settings._fields.index("threads")] == types.none else multithreaded


@parallel
def _parallel_phase(
    phase: int, total: int, views: Array, text: Text, visual: Visual, scratch: Scratch, settings: Settings
) -> None:
    threads = settings.threads
    for part in prange(threads):  # its arguments may be tuples of arrays, but not of tuples
        start, stop = total * part // threads, total * (part + 1) // threads
        before = set_threads(1)
        _phase_rows(phase, start, stop, views, text, visual, scratch, settings)
        set_threads(before)


@compiled
def _phase_rows(
    phase: int, start: int, stop: int, views: Array, text: Text, visual: Visual, scratch: Scratch, settings: Settings
) -> None:
    pairs = scratch.similarity
    if phase == LOGITS:
        matmul(N, T, views, text.vectors[start:stop], scratch.logits[:, start:stop])
    elif phase == ENTROPIES:
        _view_entropies(start, stop, scratch)
    elif phase == COSINES:
        _visual_cosines(start, stop, visual, scratch)
    elif phase == SIMILARITY:
        matmul(
            N, N, text.vectors[start:stop], visual.columns[:, : len(text.length)], pairs[start:stop, : len(text.length)]
        )
    elif phase == LOGIT_GRADIENT:
        _logit_gradient(start, stop, visual, scratch, settings)
    elif phase == PULL:
        matmul(N, N, pairs[start:stop, : len(text.length)], visual.vectors, text.pull[start:stop])
        matmul(T, N, pairs[:, start:stop], text.vectors, visual.pull[start:stop])
    elif phase == RESELECT:
        _nudge_text(start, stop, text, scratch, settings)
        matmul(N, T, views, scratch.moved[start:stop], scratch.logits[:, start:stop])
    else:  # visual prototypes were read last, and text prototypes are read next: both are found in the cache
        _visual_logits(start, stop, visual, scratch, settings)
        _add_text_logits(start, stop, text, scratch, settings)


@compiled
def _view_entropies(start: int, stop: int, scratch: Scratch) -> None:
    """Scale the products of views with prototypes in `logits` by `factor`, and compute the entropies."""
    factor, tops, totals, entropies, prob = (
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
        tops[v], totals[v], entropy = softmax_entropy(row, prob)
        entropies[v] = 0 if entropy < NEGLIGIBLE else entropy


@compiled
def _visual_cosines(start: int, stop: int, visual: Visual, scratch: Scratch) -> None:
    """Cosines of visual prototypes with the image's feature."""
    vectors, length, cosine, feature = visual.vectors, visual.length, visual.cosine, row_at(scratch.feature, 0)
    for c in range(start, stop):
        cosine[c] = dot_at(row_at(vectors, c), feature, vectors.shape[1], length[c]) / length[c]


@compiled
def _logit_gradient(start: int, stop: int, visual: Visual, scratch: Scratch, settings: Settings) -> None:
    """Turn products of text and visual prototypes into gradients of the alignment by its logits, over both lengths.

    That is the softmax of cosines / temperature, along columns `start` to `stop` and over the seen classes, minus the
    identity. `factor` is 1 / the text prototypes' lengths.
    """
    pairs, inverse, length = scratch.similarity, scratch.factor, visual.length[start:stop]
    seen = visual.seen
    known, width, one, zero = seen[start:stop], stop - start, inverse.dtype.type(1), inverse.dtype.type(0)
    top, steep, own, others = np.empty((4, width), inverse.dtype)
    top[:], others[:] = LOWEST, 0
    for i in range(width):
        steep[i] = settings.sharpness / length[i] if known[i] else zero
    # row by row, in loops simple enough to be vectorised
    for j in range(len(pairs)):
        if seen[j]:
            row = pairs[j, start:stop]
            for i in range(width):
                row[i] *= steep[i] * inverse[j]
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
            # the class's own probability minus 1, exact to the last digit even where it is nearly 1
            pairs[start + i, start + i] = -others[i]
            steep[i] = one / ((own[i] + others[i]) * length[i])
    for j in range(len(pairs)):
        row, share = pairs[j, start:stop], inverse[j] if seen[j] else zero
        for i in range(width):
            row[i] *= steep[i] * share


@row_loop(sums=2)
def _nudged(rows: Sequence[Lanes], numbers: Sequence[Lanes], sums: Sequence[Lanes]) -> Emitted:
    """A prototype after one step of AdamW from a zero residual; its squared length and its dot product with the probe.

    The slope is the pull, if any, plus the weighted feature, minus its component along the prototype, which cannot
    turn it. `eps` is AdamW's in the units of the slope, times the prototype's length.
    """
    (start, pull, feature, probe, _), (length, weight, along, eps, rate) = rows, numbers
    slope = length.fma(pull, weight * feature) - along * start
    moved = start - rate * slope / (abs(slope) + eps)
    return moved, (moved.fma(moved, sums[0]), moved.fma(probe, sums[1]))


@row_loop(sums=1)
def _moved(rows: Sequence[Lanes], numbers: Sequence[Lanes], sums: Sequence[Lanes]) -> Emitted:
    """A prototype moved by `share` towards the direction of a nudged one; its squared length."""
    (start, nudged, _), (share, inverse) = rows, numbers
    moved = start + share * (nudged * inverse - start)
    return moved, (moved.fma(moved, sums[0]),)


@compiled
def _nudge(
    start: int,
    stop: int,
    side: Text | Visual,
    wanted: Array,
    scratch: Scratch,
    rate: Real,
    out: Array,
    evolved: Array,
    evolved_length: Array,
) -> None:
    """Nudge the prototypes whose `wanted` (C,) is above 0, and fill their `moved_length` and `moved_cosine`.

    They are written to `out` (C, D), or one after another to its only row. `evolved` (C, D), unless empty, and its
    lengths are the next values if the image is learned from. Whether it is depends on all logits, but using a nudged
    prototype twice is faster than computing it twice.
    """
    vectors, pull, length, weight, cosine = side.vectors, side.pull, side.length, side.weight, side.cosine
    feature, probe, moved_length, moved_cosine = (
        scratch.feature,
        scratch.probe,
        scratch.moved_length,
        scratch.moved_cosine,
    )
    scaled_eps, share, dim, real = scratch.scaled_eps[0], scratch.share[0], vectors.shape[1], vectors.dtype.type
    for c in range(start, stop):
        if not wanted[c] > 0:
            continue
        at, to, pull_at = row_at(vectors, c), row_at(out, c % len(out)), row_at(feature, 0)
        along, pulled = weight[c] * cosine[c], real(0)  # without a pull: the feature times 0
        if len(pull):
            pull_at, pulled = row_at(pull, c), length[c]
            along += dot_at(at, pull_at, dim, pulled)
        numbers = pulled, weight[c], along / length[c], scaled_eps * length[c], rate
        square, near = _nudged((at, pull_at, row_at(feature, 0), row_at(probe, 0), to), dim, numbers)
        moved_length[c] = max(math.sqrt(square), 1e-12)  # a zero row stays zero
        inverse = real(1) / moved_length[c]
        moved_cosine[c] = near * inverse
        if len(evolved):
            (square,) = _moved((at, to, row_at(evolved, c)), dim, (share, inverse))
            evolved_length[c] = length_of(square)


@compiled
def _nudge_text(start: int, stop: int, text: Text, scratch: Scratch, settings: Settings) -> None:
    """Nudged text prototypes and their lengths, to reselect views."""
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
def _visual_logits(start: int, stop: int, visual: Visual, scratch: Scratch, settings: Settings) -> None:
    """Set the logits of the probe to the contribution of the nudged visual prototypes."""
    answer, near, height, beta = scratch.answer, scratch.moved_cosine, visual.height, settings.beta
    out, one = np.empty((1, len(scratch.probe)), near.dtype), near.dtype.type(1)
    _nudge(start, stop, visual, height, scratch, settings.lr_visual, out, out[:0], near)
    for c in range(start, stop):
        answer[c] = height[c] * exp(beta * (near[c] - one)) if height[c] > 0 else 0


@compiled
def _add_text_logits(start: int, stop: int, text: Text, scratch: Scratch, settings: Settings) -> None:
    """Add the contribution of the nudged text prototypes to the logits of the probe, and compute their next values."""
    answer, near, scale, one = scratch.answer, scratch.moved_cosine, settings.scale, scratch.answer.dtype.type(1)
    out, evolved, evolved_length = np.empty((1, len(scratch.probe)), near.dtype), text.evolved, text.evolved_length
    _nudge(start, stop, text, text.length, scratch, settings.lr_text, out, evolved, evolved_length)
    for c in range(start, stop):
        answer[c] += scale * near[c]
    if settings.renormalises and len(evolved):
        for c in range(start, stop):
            inverse = one / evolved_length[c]
            for d in range(evolved.shape[1]):
                evolved[c, d] *= inverse
            evolved_length[c] = length_at(evolved, c)


@compiled
def confident(views: Array, length: Array, run: Run, scratch: Scratch, settings: Settings, feature: Array) -> float:
    """Average the views (V, D) of lowest entropy into `feature` (D,) and `scratch.logit`; their marginal entropy.

    `scratch.logits` holds their products with prototypes of these lengths (C,).
    """
    logit, votes, entropies = scratch.logit, scratch.prob, scratch.entropy
    for c in range(len(length)):
        scratch.factor[c] = settings.scale / length[c]
    run_phase(ENTROPIES, len(views), views, run, scratch, settings)
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
    # normalised: the rounding error of the total could be as large as a small entropy
    total, weighted = loops.weighted_sums(votes, scratch.factor, part - part)
    return math.log(total) - weighted / total


@compiled
def set_visual(label: int, mean: Array, run: Run) -> None:
    """Set the visual prototype of a class to `mean` (D,)."""
    visual = run.visual
    visual.vectors[label] = mean
    for d in range(len(visual.columns)):
        visual.columns[d, label] = mean[d]
    visual.length[label] = length_at(visual.vectors, label)


@compiled
def enqueue(label: int, price: Real, run: Run, feature: Array, alpha: Real) -> bool:
    """Offer a feature (D,) of cost `price` to the queue of class `label`; whether it was accepted.

    The class's visual prototype is updated.
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
    """Gradient of the entropy loss by each prototype, as multiples of the image's feature: `weight` and `cosine`.

    Both sides are filled, in units in which the alignment, if any, has weight 1.
    """
    text, visual, log_p, real = run.text, run.visual, scratch.prob, scratch.prob.dtype.type
    gain = real(settings.align_weight / max(1, visual.seen.sum())) if settings.align_weight > 0 else real(1)
    steepness, scratch.scaled_eps[0] = settings.entropy_weight / gain, settings.eps / gain
    run_phase(COSINES, len(log_p), views, run, scratch, settings)
    for c in range(len(log_p)):
        text.cosine[c] = scratch.logit[c] / settings.scale
        visual.weight[c] = visual.height[c] * exp(settings.beta * (visual.cosine[c] - real(1)))
        log_p[c] = scratch.logit[c] + visual.weight[c]
    top, total, entropy = softmax_entropy(log_p, scratch.factor)
    log_sum_exp = top + math.log(total)
    for c in range(len(log_p)):
        log = log_p[c] - log_sum_exp
        slope = exp(log) * (-entropy - log) * steepness
        if abs(slope) < NEGLIGIBLE:
            slope = 0.0
        text.weight[c] = settings.scale * slope
        visual.weight[c] *= settings.beta * slope


@compiled
def align(views: Array, run: Run, scratch: Scratch, settings: Settings) -> None:
    """Recompute the pull of the alignment: three products of C x C x D."""
    classes, one = len(scratch.factor), scratch.factor.dtype.type(1)
    run_phase(SIMILARITY, classes, views, run, scratch, settings)
    for c in range(classes):
        scratch.factor[c] = one / run.text.length[c]
    run_phase(LOGIT_GRADIENT, classes, views, run, scratch, settings)
    run_phase(PULL, classes, views, run, scratch, settings)
    run.stale[0] = False


@compiled
def swap_evolved(text: Text) -> Text:
    """The evolved text prototypes. They swap buffers with the previous ones, which are overwritten next."""
    return Text(text.evolved, text.evolved_length, text.pull, text.weight, text.cosine, text.vectors, text.length)


@compiled
def with_scratch_pull(run: Run, scratch: Scratch) -> Run:
    """The run with scratch buffers for its alignment pull."""
    t, v = run.text, run.visual
    text = Text(t.vectors, t.length, scratch.text_pull, t.weight, t.cosine, t.evolved, t.evolved_length)
    visual = Visual(v.vectors, v.length, scratch.visual_pull, v.weight, v.cosine, v.columns, v.height, v.seen)
    return Run(text, visual, run.keys, run.cost, run.updates, run.stale)


@compiled
def step(views: Array, run: Run, scratch: Scratch, settings: Settings) -> tuple[bool, bool]:
    """Fill `scratch.answer` for an image's views (V, D); whether a queue accepted it, and whether the text evolves."""
    # which queue the image belongs to, and how confidently
    classes = len(scratch.logit)
    run_phase(LOGITS, classes, views, run, scratch, settings)
    entropy = confident(views, run.text.length, run, scratch, settings, scratch.feature)
    label, visual, current = 0, run.visual, run
    for c in range(classes):
        if scratch.logit[c] > scratch.logit[label]:
            label = c

    # evolve the visual prototypes; a peek restores what it changes
    keys, cost, mean = run.keys[label].copy(), run.cost[label].copy(), visual.vectors[label].copy()
    height, seen, stale = visual.height[label], visual.seen[label], run.stale[0]
    taken = enqueue(label, cost.dtype.type(entropy * settings.per_nat), run, scratch.feature, settings.alpha)
    if taken and settings.peeking:
        current = with_scratch_pull(run, scratch)

    # prototype residual learning
    slopes(views, current, scratch, settings)
    if current.stale[0] and settings.align_weight > 0:
        align(views, current, scratch, settings)
    scratch.probe[:] = views[0]
    if len(scratch.moved):  # views are reselected
        run_phase(RESELECT, classes, views, current, scratch, settings)
        confident(views, scratch.moved_length, current, scratch, settings, scratch.probe)

    # the logits of the probe; if they are confident enough, the text prototypes evolve
    scratch.share[0] = settings.share
    if settings.share < 0:
        scratch.share[0] = 1 / (run.updates[0] + settings.prompt_count + 1)
    run_phase(PREDICT, classes, views, current, scratch, settings)
    entropy = softmax_entropy(scratch.answer, scratch.factor)[2]
    evolves = settings.evolves and (entropy * settings.per_nat < settings.threshold) == settings.keeps_below
    if settings.peeking and taken:
        run.keys[label], run.cost[label], run.stale[0] = keys, cost, stale
        visual.height[label], visual.seen[label] = height, seen
        set_visual(label, mean, run)
    return taken and not settings.peeking, evolves and not settings.peeking


@compiled
def scan(stream: Array, run: Run, scratch: Scratch, settings: Settings, logits: Array, learned: Array) -> None:
    """Step through N images (N, V, D), filling `logits` (N, C) and `learned` (N,): whether each was learned from.

    After an odd number of evolutions the text prototypes are in `run.text.evolved`.
    """
    for n in range(len(stream)):
        taken, evolves = step(stream[n], run, scratch, settings)
        if evolves:
            run.updates[0] += 1
            run.stale[0] = True
            run = Run(swap_evolved(run.text), run.visual, run.keys, run.cost, run.updates, run.stale)
        logits[n], learned[n] = scratch.answer, taken or evolves

"""One step of DPE as compiled loops that fill arrays. C classes, D features, V views, M slots.

C' is C rounded up to whole cache lines, so that no vector of a row is incomplete. Logits beyond C are LOWEST.

Memory traffic is kept low: prototypes are stored unnormalised, directions are computed where they are needed, and a
nudged prototype is used for everything while it is in the cache. Each row is processed by one thread in a fixed order,
so results do not depend on the number of threads.
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
from testtime.steppers.cpu.gemm import combine_rows, dot_rows
from testtime.steppers.cpu.lanes import LOWEST, Emitted, Lanes, exp, log, row_loop
from testtime.steppers.cpu.loops import Array, Real, compiled, dot_at, length_at, length_of, parallel, row_at
from testtime.steppers.fast import Numbers


class Side(NamedTuple):
    """The text prototypes or the visual ones, and their gradients."""

    vectors: Array  # (C, D), not normalised
    length: Array  # (C,), 1 for a zero row
    pull: Array  # (C, D), of the alignment, divided by the length; (0, D) without alignment
    along: Array  # (C,), its dot product with the prototype
    weight: Array  # (C,), of the image's feature
    cosine: Array  # (C,), with the image's feature
    height: Array  # (C,), of a class's contribution to the logits, 0 if there is none
    evolved: Array  # (C, D), their next values if they learn from the image; (0, D) if they never do
    evolved_length: Array  # (C,)


class Run(NamedTuple):
    """The state of a run, and values derived from it."""

    text: Side  # its height is the logit scale
    visual: Side  # its height is alpha, or 0 until a class is seen
    seen: Array  # (C,) bool
    keys: Array  # (C, M, D)
    cost: Array  # (C, M)
    updates: Array  # (1,), images that the text prototypes have learned from
    stale: Array  # (1,) bool, whether a prototype has changed since the alignment pull was computed


class Scratch(NamedTuple):
    """Scratch buffers."""

    logits: Array  # (V, C')
    entropy: Array  # (V,)
    top: Array  # (V,), the largest logit of a view
    total: Array  # (V,), the sum of exp(logit - top)
    logit: Array  # (C,)
    prob: Array  # (C',)
    factor: Array  # (C',), of products to obtain logits; 0 beyond C
    shift: Array  # (C',), to add to them; LOWEST beyond C
    answer: Array  # (C,), the logits of the probe
    moved_length: Array  # (C,), of nudged prototypes
    moved_cosine: Array  # (C,), and their cosine with the probe
    feature: Array  # (D,)
    probe: Array  # (D,), the feature to classify
    moved: Array  # (C, D), nudged text prototypes; (0, D) unless views are reselected
    similarity: Array  # (C, C'), products of visual and text prototypes; (0, C') without alignment
    gradient: Array  # (C, C'), of the alignment by the logits, over both lengths; (0, C') without alignment
    share: Array  # (1,), fraction by which text prototypes move to the nudged ones
    scaled_eps: Array  # (1,), AdamW's eps in the units of the slopes
    pull: Array  # (2, C, D), for peeks that need a different pull; (2, 0, D) before the first peek
    along: Array  # (2, C), and its dot products with the prototypes


class Settings(NamedTuple):
    """The settings of a run, and how its images are processed."""

    numbers: Numbers  # in the run's precision
    keep: int  # number of confident views
    threads: int | None  # None: single-threaded
    peeking: bool  # the state does not change


ROWS_AT_ONCE = 32  # of C x C matrices, which stay in the cache

# phases of a step, each of which can be computed for a range of views or classes independently of the others
LOGITS, ENTROPIES, COSINES, SIMILARITY, PULL, RESELECT, PREDICT = range(7)


def run_phase(phase: int, total: int, views: Array, run: Run, scratch: Scratch, settings: Settings) -> None:
    """Run one phase for `total` rows, on all threads of the settings."""
    raise NotImplementedError("for compiled loops")


@overload(run_phase)
def _run_phase(
    phase: Any, total: Any, views: Any, run: Any, scratch: Any, settings: Any
) -> Callable[..., None]:  # numba wants the same annotations for the types here and the values below
    def single_threaded(phase: Any, total: Any, views: Any, run: Any, scratch: Any, settings: Any) -> None:
        _phase_rows(phase, 0, total, views, run.text, run.visual, scratch, settings.numbers)

    def multithreaded(phase: Any, total: Any, views: Any, run: Any, scratch: Any, settings: Any) -> None:
        _parallel_phase(phase, total, settings.threads, views, run.text, run.visual, scratch, settings.numbers)

    # by type: single-threaded code is compiled without the parallel version, in half the time
    return single_threaded if settings[Settings._fields.index("threads")] == types.none else multithreaded


@parallel
def _parallel_phase(
    phase: int, total: int, threads: int, views: Array, text: Side, visual: Side, scratch: Scratch, numbers: Numbers
) -> None:
    for part in prange(threads):  # its arguments may be tuples of arrays, but not of tuples
        start, stop = total * part // threads, total * (part + 1) // threads
        _phase_rows(phase, start, stop, views, text, visual, scratch, numbers)


@compiled
def _phase_rows(
    phase: int, start: int, stop: int, views: Array, text: Side, visual: Side, scratch: Scratch, numbers: Numbers
) -> None:
    if phase == LOGITS:  # by classes: a thread reads the prototypes that it has written, from its own cache
        dot_rows(views, text.vectors[start:stop], scratch.logits[:, start:stop])
    elif phase == ENTROPIES:
        _view_entropies(start, stop, scratch)
    elif phase == COSINES:
        _visual_cosines(start, stop, visual, scratch)
    elif phase == SIMILARITY:
        for first in range(start, stop, ROWS_AT_ONCE):
            last = min(first + ROWS_AT_ONCE, stop)
            dot_rows(visual.vectors[first:last], text.vectors, scratch.similarity[first:last])
            _logit_gradient(first, last, visual, scratch, numbers.sharpness)
    elif phase == PULL:
        _pull(start, stop, text, visual, scratch)
    elif phase == RESELECT:
        _nudge(start, stop, text, scratch, numbers.lr_text, scratch.moved)
    else:
        _predict(start, stop, text, visual, scratch, numbers)


@compiled
def _view_entropies(start: int, stop: int, scratch: Scratch) -> None:
    """Turn the products of views with prototypes in `logits` into logits, and compute the entropies."""
    logits, tops, totals, entropies = scratch.logits, scratch.top, scratch.total, scratch.entropy
    factor, shift, width = row_at(scratch.factor, 0), row_at(scratch.shift, 0), len(scratch.factor)
    weighted, prob, one = np.empty(stop), np.empty_like(scratch.factor), logits.dtype.type(1)
    # loop by loop, not view by view: a view would wait for its own sums
    for v in range(start, stop):
        row = row_at(logits, v)
        (tops[v],) = loops.scaled((row, factor, shift, row), width, (one,))
    for v in range(start, stop):
        totals[v], weighted[v] = loops.softmax_sums((row_at(logits, v), row_at(prob, 0)), width, (tops[v],))
    for v in range(start, stop):
        entropy = log(totals[v]) - weighted[v] / totals[v]
        entropies[v] = 0 if entropy < NEGLIGIBLE else entropy


@compiled
def _visual_cosines(start: int, stop: int, visual: Side, scratch: Scratch) -> None:
    """Cosines of visual prototypes with the image's feature."""
    vectors, length, cosine, feature = visual.vectors, visual.length, visual.cosine, row_at(scratch.feature, 0)
    for c in range(start, stop):
        cosine[c] = dot_at((row_at(vectors, c), feature), vectors.shape[1], (length[c],))[0] / length[c]


@row_loop(sums=1)
def _weighted(rows: Sequence[Lanes], numbers: Sequence[Lanes], sums: Sequence[Lanes]) -> Emitted:
    """The last row times another and a number; its dot product with the first."""
    (other, by, row), (factor,) = rows, numbers
    row = row * (by * factor)
    return row, (row.fma(other, sums[0]),)


@compiled
def _logit_gradient(start: int, stop: int, visual: Side, scratch: Scratch, sharpness: Real) -> None:
    """Fill rows `start` to `stop` of `gradient`, and `along` of the visual prototypes.

    That is the softmax of cosines / temperature along a row, over the seen classes, minus the identity. `factor` is
    1 / the text prototypes' lengths, and `shift` LOWEST for unseen classes.
    """
    pairs, gradient, shift, inverse = scratch.similarity, scratch.gradient, scratch.shift, row_at(scratch.factor, 0)
    length, along, width, top = visual.length, visual.along, len(shift), np.empty_like(visual.length)
    one, zero = length.dtype.type(1), length.dtype.type(0)
    for i in range(start, stop):
        steep = sharpness / length[i] if shift[i] == 0 else zero
        (top[i],) = loops.scaled((row_at(pairs, i), inverse, row_at(shift, 0), row_at(gradient, i)), width, (steep,))
    for i in range(start, stop):
        along[i], gradient[i, i] = exp(gradient[i, i] - top[i]), LOWEST
    for i in range(start, stop):
        others, _ = loops.softmax_sums((row_at(gradient, i),), width, (top[i],))
        gradient[i, i] = -others  # own probability minus 1, exact to the last digit even where it is nearly 1
        along[i] = one / ((along[i] + others) * length[i]) if shift[i] == 0 else zero
    for i in range(start, stop):
        (along[i],) = _weighted((row_at(pairs, i), inverse, row_at(gradient, i)), width, (along[i],))


@row_loop(sums=0)
def _add_product(rows: Sequence[Lanes], numbers: Sequence[Lanes], sums: Sequence[Lanes]) -> Emitted:
    """Add the product of two rows to a third."""
    return rows[0].fma(rows[1], rows[2]), ()


@compiled
def _pull(start: int, stop: int, text: Side, visual: Side, scratch: Scratch) -> None:
    """The pull on prototypes of both sides, and `along` of the text prototypes."""
    gradient, pairs, along, like = scratch.gradient, scratch.similarity, text.along, text.along.dtype.type(0)
    combine_rows(gradient.T[start:stop], visual.vectors, text.pull[start:stop])
    combine_rows(gradient[start:stop], text.vectors, visual.pull[start:stop])
    along[start:stop], offset = 0, start * along.itemsize
    for i in range(len(pairs)):
        rows = row_at(pairs, i) + offset, row_at(gradient, i) + offset, row_at(along, 0) + offset
        _add_product(rows, stop - start, (like,))


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
def _nudge(start: int, stop: int, side: Side, scratch: Scratch, rate: Real, out: Array) -> None:
    """Nudge the prototypes of some height, and fill their `moved_length`, `moved_cosine` and `evolved`.

    They are written to `out` (C, D), or one after another to its only row. Whether the evolved ones are used depends on
    all logits, but using a nudged prototype twice is faster than computing it twice.
    """
    vectors, length, pull, along, weight, cosine, height, evolved, evolved_length = side
    feature, probe = row_at(scratch.feature, 0), row_at(scratch.probe, 0)
    moved_length, moved_cosine = scratch.moved_length, scratch.moved_cosine
    scaled_eps, share, dim, real = scratch.scaled_eps[0], scratch.share[0], vectors.shape[1], vectors.dtype.type
    for c in range(start, stop):
        if not height[c] > 0:
            continue
        at, to, pull_at = row_at(vectors, c), row_at(out, c % len(out)), feature
        total, pulled = weight[c] * cosine[c], real(0)  # without a pull: the feature times 0
        if len(pull):
            pull_at, pulled = row_at(pull, c), length[c]
            total += along[c]
        numbers = pulled, weight[c], total / length[c], scaled_eps * length[c], rate
        square, near = _nudged((at, pull_at, feature, probe, to), dim, numbers)
        moved_length[c] = max(math.sqrt(square), 1e-12)  # a zero row stays zero
        inverse = real(1) / moved_length[c]
        moved_cosine[c] = near * inverse
        if len(evolved):
            (square,) = _moved((at, to, row_at(evolved, c)), dim, (share, inverse))
            evolved_length[c] = length_of(square)


@compiled
def _predict(start: int, stop: int, text: Side, visual: Side, scratch: Scratch, numbers: Numbers) -> None:
    """Logits of the probe from nudged prototypes, and the next values of the text prototypes."""
    answer, near, evolved, one = scratch.answer, scratch.moved_cosine, text.evolved, scratch.answer.dtype.type(1)
    out = np.empty((1, len(scratch.probe)), near.dtype)
    # visual prototypes were read last, and text prototypes are read next: both are found in the cache
    _nudge(start, stop, visual, scratch, numbers.lr_visual, out)
    for c in range(start, stop):
        answer[c] = visual.height[c] * exp(numbers.beta * (near[c] - one)) if visual.height[c] > 0 else 0
    _nudge(start, stop, text, scratch, numbers.lr_text, out)
    for c in range(start, stop):
        answer[c] += text.height[c] * near[c]
    if numbers.renormalises and len(evolved):
        for c in range(start, stop):
            inverse = one / text.evolved_length[c]
            for d in range(evolved.shape[1]):
                evolved[c, d] *= inverse
            text.evolved_length[c] = length_at(evolved, c)


@row_loop(sums=0)
def _add(rows: Sequence[Lanes], numbers: Sequence[Lanes], sums: Sequence[Lanes]) -> Emitted:
    """Add a multiple of a row to another."""
    return rows[0].fma(numbers[0], rows[1]), ()


@row_loop(sums=0)
def _add_exp(rows: Sequence[Lanes], numbers: Sequence[Lanes], sums: Sequence[Lanes]) -> Emitted:
    """Add a multiple of exp(a row - top) to another."""
    (row, total), (top, factor) = rows, numbers
    return (row - top).exp().fma(factor, total), ()


@row_loop(sums=2, double=True)
def _vote_sums(rows: Sequence[Lanes], numbers: Sequence[Lanes], sums: Sequence[Lanes]) -> Emitted:
    """The sum of probabilities, and of probabilities times their logarithms."""
    prob = rows[0]
    return None, (sums[0] + prob.double(), sums[1] + (prob * prob.log()).double())


@compiled
def confident(views: Array, run: Run, scratch: Scratch, settings: Settings, feature: Array) -> float:
    """Average the views (V, D) of lowest entropy into `feature` (D,) and `scratch.logit`; their marginal entropy."""
    logit, votes, entropies, text = scratch.logit, scratch.prob, scratch.entropy, run.text
    for c in range(len(logit)):
        scratch.factor[c], scratch.shift[c] = text.height[c] / text.length[c], 0
    run_phase(LOGITS, len(logit), views, run, scratch, settings)
    run_phase(ENTROPIES, len(views), views, run, scratch, settings)
    part = logit.dtype.type(1 / settings.keep)
    feature[:], logit[:], votes[:] = 0, 0, 0
    for _ in range(settings.keep):
        best = 0
        for v in range(len(views)):  # a tie goes to the lower index
            if entropies[v] < entropies[best]:
                best = v
        entropies[best] = np.inf
        row = row_at(scratch.logits, best)
        _add((row, row_at(logit, 0)), len(logit), (part,))
        _add((row_at(views, best), row_at(feature, 0)), len(feature), (part,))
        _add_exp((row, row_at(votes, 0)), len(votes), (scratch.top[best], part / scratch.total[best]))
    # normalised: the rounding error of the total could be as large as a small entropy
    total, weighted = _vote_sums((row_at(votes, 0),), len(votes), (part,))
    return math.log(total) - weighted / total


@compiled
def set_visual(label: int, mean: Array, visual: Side) -> None:
    """Set the visual prototype of a class to `mean` (D,)."""
    visual.vectors[label] = mean
    visual.length[label] = length_at(visual.vectors, label)


@compiled
def enqueue(label: int, price: Real, run: Run, feature: Array, alpha: Real) -> bool:
    """Offer a feature (D,) of cost `price` to the queue of class `label`; whether it was accepted.

    The class's visual prototype is updated.
    """
    if loops.push(run.keys, run.cost, label, feature, price) < 0:
        return False
    count = loops.filled(run.cost[label])
    set_visual(label, run.keys[label, :count].sum(0) / feature.dtype.type(count), run.visual)
    run.seen[label], run.visual.height[label], run.stale[0] = True, alpha, True
    return True


@compiled
def slopes(views: Array, run: Run, scratch: Scratch, settings: Settings) -> None:
    """Gradient of the entropy loss by each prototype, as multiples of the image's feature: `weight` and `cosine`.

    Both sides are filled, in units in which the alignment, if any, has weight 1.
    """
    text, visual, numbers, log_p = run.text, run.visual, settings.numbers, scratch.answer
    real = log_p.dtype.type
    gain = real(numbers.align_weight / max(1, run.seen.sum())) if numbers.align_weight > 0 else real(1)
    steepness, scratch.scaled_eps[0] = numbers.entropy_weight / gain, numbers.eps / gain
    run_phase(COSINES, len(log_p), views, run, scratch, settings)
    for c in range(len(log_p)):
        text.cosine[c] = scratch.logit[c] / text.height[c]
        visual.weight[c] = visual.height[c] * exp(numbers.beta * (visual.cosine[c] - real(1)))
        log_p[c] = scratch.logit[c] + visual.weight[c]
    top, total, entropy = loops.softmax_entropy(log_p, scratch.factor)
    log_sum_exp = top + math.log(total)
    for c in range(len(log_p)):
        log = log_p[c] - log_sum_exp
        slope = exp(log) * (-entropy - log) * steepness
        if abs(slope) < NEGLIGIBLE:
            slope = 0.0
        text.weight[c] = text.height[c] * slope
        visual.weight[c] *= numbers.beta * slope


@compiled
def align(views: Array, run: Run, scratch: Scratch, settings: Settings) -> None:
    """Recompute the pull of the alignment: three products of C x C x D."""
    classes, one = len(run.seen), scratch.factor.dtype.type(1)
    for c in range(classes):
        scratch.factor[c], scratch.shift[c] = one / run.text.length[c], 0 if run.seen[c] else LOWEST
    run_phase(SIMILARITY, classes, views, run, scratch, settings)
    run_phase(PULL, classes, views, run, scratch, settings)
    run.stale[0] = False


@compiled
def _with_text(run: Run, vectors: Array, length: Array) -> Run:
    """The run with other text prototypes; the present ones are the evolved ones of the result, to be overwritten."""
    present, present_length, pull, along, weight, cosine, height, _, _ = run.text
    text = Side(vectors, length, pull, along, weight, cosine, height, present, present_length)
    return Run(text, run.visual, run.seen, run.keys, run.cost, run.updates, run.stale)


@compiled
def _with_pull(side: Side, pull: Array, along: Array) -> Side:
    """One side with other buffers for its alignment pull."""
    vectors, length, _, _, weight, cosine, height, evolved, evolved_length = side
    return Side(vectors, length, pull, along, weight, cosine, height, evolved, evolved_length)


@compiled
def step(views: Array, run: Run, scratch: Scratch, settings: Settings) -> tuple[bool, bool]:
    """Fill `scratch.answer` for an image's views (V, D); whether a queue accepted it, and whether the text evolves."""
    # which queue the image belongs to, and how confidently
    classes, numbers = len(scratch.logit), settings.numbers
    entropy = confident(views, run, scratch, settings, scratch.feature)
    label, visual, current = 0, run.visual, run
    for c in range(classes):
        if scratch.logit[c] > scratch.logit[label]:
            label = c

    # evolve the visual prototypes; a peek restores what it changes
    keys, cost, mean = run.keys[label].copy(), run.cost[label].copy(), visual.vectors[label].copy()
    height, seen, stale = visual.height[label], run.seen[label], run.stale[0]
    taken = enqueue(label, cost.dtype.type(entropy * numbers.per_nat), run, scratch.feature, numbers.alpha)
    if taken and settings.peeking:
        text = _with_pull(run.text, scratch.pull[0], scratch.along[0])
        visual = _with_pull(run.visual, scratch.pull[1], scratch.along[1])
        current = Run(text, visual, run.seen, run.keys, run.cost, run.updates, run.stale)

    # prototype residual learning
    slopes(views, current, scratch, settings)
    if current.stale[0] and numbers.align_weight > 0:
        align(views, current, scratch, settings)
    scratch.probe[:] = views[0]
    if len(scratch.moved):  # views are reselected
        run_phase(RESELECT, classes, views, current, scratch, settings)
        moved = _with_text(current, scratch.moved, scratch.moved_length)
        confident(views, moved, scratch, settings, scratch.probe)

    # the logits of the probe; if they are confident enough, the text prototypes evolve
    scratch.share[0] = numbers.share
    if numbers.share < 0:
        scratch.share[0] = 1 / (run.updates[0] + numbers.prompt_count + 1)
    run_phase(PREDICT, classes, views, current, scratch, settings)
    entropy = loops.softmax_entropy(scratch.answer, scratch.factor)[2]
    confident_enough = (entropy * numbers.per_nat < numbers.threshold) == (numbers.keeps_below > 0)
    evolves = numbers.evolves > 0 and confident_enough and not settings.peeking
    if settings.peeking and taken:
        run.keys[label], run.cost[label], run.stale[0] = keys, cost, stale
        visual.height[label], run.seen[label] = height, seen
        set_visual(label, mean, visual)
    return taken and not settings.peeking, evolves


@compiled
def scan(stream: Array, run: Run, scratch: Scratch, settings: Settings, logits: Array, learned: Array) -> None:
    """Step through N images (N, V, D), filling `logits` (N, C) and `learned` (N,): whether each was learned from.

    Text prototypes that evolve swap buffers with the evolved ones: after an odd number of times the text prototypes
    are in `run.text.evolved`.
    """
    for n in range(len(stream)):
        taken, evolves = step(stream[n], run, scratch, settings)
        if evolves:
            run.updates[0] += 1
            run.stale[0] = True
            run = _with_text(run, run.text.evolved, run.text.evolved_length)
        logits[n], learned[n] = scratch.answer, taken or evolves

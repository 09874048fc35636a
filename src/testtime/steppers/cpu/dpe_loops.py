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
from testtime.steppers.cpu.gemm import across, product, product_of_transposed
from testtime.steppers.cpu.loops import (
    Array,
    compiled,
    dot_at,
    dot_rows,
    exp,
    filled,
    length_at,
    length_of,
    log,
    push,
    row_at,
    row_loop,
    spike,
    spread,
    weighed,
)


class Side(NamedTuple):
    """One set of prototypes, and what nudges it."""

    vectors: Array  # (C, D), at their own length
    length: Array  # (C,), 1 for a zero row
    pull: Array  # (C, D), of the alignment, over the length; (0, D) without alignment
    weight: Array  # (C,), of the image's feature
    cosine: Array  # (C,), with the image's feature
    evolved: Array  # (C, D), what follows if it learns from the image; (0, D) where it never does so
    evolved_length: Array  # (C,)


class Run(NamedTuple):
    """The state of a run, and what follows from it."""

    text: Side
    visual: Side
    columns: Array  # (D, C'), the visual prototypes as columns; (0, 0) without alignment
    keys: Array  # (C, M, D)
    cost: Array  # (C, M)
    height: Array  # (C,), alpha where a class is seen
    seen: Array  # (C,) bool
    updates: Array  # (1,), images that the text prototypes have learned from
    stale: Array  # (1,) bool, whether a prototype has changed since the pull of the alignment was computed


class Room(NamedTuple):
    """Room to work in."""

    logits: Array  # (V, C)
    entropy: Array  # (V,)
    top: Array  # (V,), the largest logit of a view
    total: Array  # (V,), and the sum of exponentials under it
    logit: Array  # (C,)
    chance: Array  # (C,)
    factor: Array  # (C,)
    feature: Array  # (D,)
    probe: Array  # (D,), what is predicted
    length: Array  # (C,), of `moved`
    similarity: Array  # (C, C') of text and visual prototypes, or (0, 0) without alignment
    moved: Array  # (C, D), nudged text prototypes; (0, D) where views are not chosen again
    share: Array  # (1,), of the way towards the nudged ones that text prototypes go


class Kept(NamedTuple):
    """What a look without learning changes and puts back, and where it puts what it computes anew."""

    label: Array  # (1,), whose row follows
    keys: Array  # (M, D)
    cost: Array  # (M,)
    visual: Array  # (D,)
    numbers: Array  # (2,), its length and height
    flags: Array  # (2,) bool, whether it was seen, and whether the pull was stale
    text_pull: Array  # (C, D), or (0, D) until there is a look
    visual_pull: Array  # (C, D), or (0, D)


class Settings(NamedTuple):
    """Numbers of the run's precision, and switches."""

    scale: Any
    alpha: Any
    beta: Any
    entropy_weight: Any
    align_weight: Any  # over the temperature
    sharpness: Any  # one over the temperature
    eps: Any  # of AdamW
    lr_text: Any
    lr_visual: Any
    per_nat: Any  # what turns an entropy in nats into the unit of the queues and the threshold
    threshold: Any
    share: Any  # of the way that the text prototypes evolve; below 0: one over the number of images
    keep: int  # views
    prompt_count: int
    threads: int | None  # None: there is but one
    keeps_below: bool
    evolves: bool
    renormalise: bool
    looks: bool  # the state is left as it was


LOWEST = -1e30  # stands for minus infinity

# what can be done for some rows without the others
SPIKES, NEAR, REPEL, AGAIN, BY_VISUAL, BY_TEXT = range(6)


def rows(phase: int, total: int, run: Run, room: Room, settings: Settings, number: Any, row: Array) -> None:
    """One phase for `total` rows, by as many threads as there are. `number` and `row` are what it needs besides."""
    raise NotImplementedError("for compiled loops")


@overload(rows)
def _rows(phase: Any, total: Any, run: Any, room: Any, settings: Any, number: Any, row: Any) -> Any:
    def alone(phase: Any, total: Any, run: Any, room: Any, settings: Any, number: Any, row: Any) -> None:
        _some(phase, 0, total, run.text, run.visual, run.height, run.seen, room, settings, number, row)

    def together(phase: Any, total: Any, run: Any, room: Any, settings: Any, number: Any, row: Any) -> None:
        _spread(phase, total, run.text, run.visual, run.height, run.seen, room, settings, number, row)

    # by type: what is never spread is compiled without the threads, in half the time
    return alone if settings[Settings._fields.index("threads")] == types.none else together


@spread
def _spread(
    phase: int,
    total: int,
    text: Side,
    visual: Side,
    height: Array,
    seen: Array,
    room: Room,
    settings: Settings,
    number: Any,
    row: Array,
) -> None:
    threads = settings.threads
    for piece in prange(threads):  # what it is given may be a tuple of arrays, but not of tuples
        start, stop = total * piece // threads, total * (piece + 1) // threads
        _some(phase, start, stop, text, visual, height, seen, room, settings, number, row)


@compiled
def _some(
    phase: int,
    start: int,
    stop: int,
    text: Side,
    visual: Side,
    height: Array,
    seen: Array,
    room: Room,
    settings: Settings,
    number: Any,
    row: Array,
) -> None:
    if phase == SPIKES:
        _spikes(start, stop, room)
    elif phase == NEAR:
        _near(start, stop, visual, room)
    elif phase == REPEL:
        _repel(start, stop, visual, seen, room, settings)
    elif phase == AGAIN:
        _again(start, stop, text, room, settings, number)
    elif phase == BY_VISUAL:
        _by_visual(start, stop, visual, height, room, settings, number, row)
    else:
        _by_text(start, stop, text, room, settings, number, row)


@compiled
def _spikes(start: int, stop: int, room: Room) -> None:
    """Logits and their entropy for views whose products with prototypes are in `logits`, but for `factor`."""
    factor, tops, totals, entropies, chance = (
        room.factor,
        room.top,
        room.total,
        room.entropy,
        np.empty_like(room.factor),
    )
    for v in range(start, stop):
        row = room.logits[v]
        for c in range(len(row)):
            row[c] *= factor[c]
        tops[v], totals[v], entropy = spike(row, chance)
        entropies[v] = 0 if entropy < NOTHING else entropy


@compiled
def _near(start: int, stop: int, visual: Side, room: Room) -> None:
    """Cosines of visual prototypes with the image's feature."""
    vectors, feature = visual.vectors, room.feature.reshape(1, -1)
    for c in range(start, stop):
        visual.cosine[c] = dot_rows(vectors, c, feature, 0) / visual.length[c]


@compiled
def _repel(start: int, stop: int, visual: Side, seen: Array, room: Room, settings: Settings) -> None:
    """Turn products of text with visual prototypes into how much each pair repels, over both lengths.

    That is the softmax of the cosines over the temperature, down some columns and over the seen classes, less the
    identity. `factor` is one over the text prototypes' lengths.
    """
    pairs, over, length = room.similarity, room.factor, visual.length[start:stop]
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
    vectors, pull, feature, probe, out = rows
    length, weight, along, eps, rate = numbers
    start = vectors.load()
    slope = length.fma(pull.load(), weight * feature.load()) - along * start
    moved = start - rate * slope / (abs(slope) + eps)
    out.store(moved)
    return moved.fma(moved, sums[0]), moved.fma(probe.load(), sums[1])


@compiled
def _places(side: Side, room: Room, out: Array) -> tuple[int, ...]:
    """What `_nudge` reads and writes: addresses, the bytes of a row of prototypes, and those of one of their pull."""
    gap = side.vectors.strides[0]
    if len(side.pull):
        pull, pull_gap = row_at(side.pull, 0), gap
    else:
        pull, pull_gap = row_at(room.feature, 0), 0
    return row_at(side.vectors, 0), pull, row_at(room.feature, 0), row_at(room.probe, 0), row_at(out, 0), gap, pull_gap


@compiled
def _nudge(
    c: int, places: tuple[int, ...], out: Array, length: Any, weight: Any, cosine: Any, soft: Any, rate: Any
) -> tuple[Any, Any]:
    """`out` (D,): prototype c nudged; one over its length, and its cosine with the probe.

    Where it lies is given by address: arrays in a tuple are each counted in and out of use, which costs as much.
    """
    vectors, pull, feature, probe, goal, gap, pull_gap = places
    along, pulled, real = weight * cosine, out.dtype.type(0), out.dtype.type
    vectors, pull = vectors + c * gap, pull + c * pull_gap
    if pull_gap:
        along, pulled = along + dot_at(vectors, pull, len(out), length), length
    rows, numbers = (vectors, pull, feature, probe, goal), (pulled, weight, along / length, soft * length, rate)
    square, product = _nudged(rows, len(out), numbers)
    over = real(1 / max(math.sqrt(square), 1e-12))  # a zero row stays zero
    return over, product * over


@compiled
def _again(start: int, stop: int, text: Side, room: Room, settings: Settings, soft: Any) -> None:
    """Nudged text prototypes, and their lengths."""
    out, length, weight, cosine = np.empty_like(room.probe), text.length, text.weight, text.cosine
    places, rate = _places(text, room, out), settings.lr_text
    for c in range(start, stop):
        over, _ = _nudge(c, places, out, length[c], weight[c], cosine[c], soft, rate)
        room.length[c] = 1 / over
        room.moved[c] = out


@compiled
def _by_visual(
    start: int, stop: int, visual: Side, height: Array, room: Room, settings: Settings, soft: Any, logits: Array
) -> None:
    """What nudged visual prototypes give to the logits (C,) of the probe."""
    out, length, weight, near = np.empty_like(room.probe), visual.length, visual.weight, visual.cosine
    places, rate, beta, one = _places(visual, room, out), settings.lr_visual, settings.beta, out.dtype.type(1)
    for c in range(start, stop):
        logits[c] = 0
        if height[c] > 0:
            _, cosine = _nudge(c, places, out, length[c], weight[c], near[c], soft, rate)
            logits[c] = height[c] * exp(beta * (cosine - one))


@row_loop(sums=1)
def _moved(rows: Any, numbers: Any, sums: Any) -> Any:
    """A prototype some way towards the nudged one, which is a factor too short; its square."""
    (vectors, nudged, out), (share, over) = rows, numbers
    start = vectors.load()
    moved = start + share * (nudged.load() * over - start)
    out.store(moved)
    return (moved.fma(moved, sums[0]),)


@compiled
def _by_text(start: int, stop: int, text: Side, room: Room, settings: Settings, soft: Any, logits: Array) -> None:
    """What nudged text prototypes add to the logits (C,) of the probe; and what follows if the image is learned from.

    That is known once all logits are. But a nudged prototype is quicker to use twice than to make twice.
    """
    out, length, weight, near = np.empty_like(room.probe), text.length, text.weight, text.cosine
    places, rate, scale, one = _places(text, room, out), settings.lr_text, settings.scale, out.dtype.type(1)
    vectors, evolved, evolved_length, share = text.vectors, text.evolved, text.evolved_length, room.share[0]
    for c in range(start, stop):
        over, cosine = _nudge(c, places, out, length[c], weight[c], near[c], soft, rate)
        logits[c] += scale * cosine
        if len(evolved):
            rows = row_at(vectors, c), row_at(out, 0), row_at(evolved, c)
            evolved_length[c] = length_of(_moved(rows, len(out), (share, over))[0])
            if settings.renormalise:
                over = one / evolved_length[c]
                for d in range(len(out)):
                    evolved[c, d] *= over
                evolved_length[c] = length_at(evolved, c)


@compiled
def measure(side: Side) -> None:
    """Fill in the lengths of a set of prototypes."""
    for c in range(len(side.vectors)):
        side.length[c] = length_at(side.vectors, c)


@compiled
def confident(views: Array, length: Array, run: Run, room: Room, settings: Settings, feature: Array) -> Any:
    """Average the views (V, D) of lowest entropy into `feature` (D,) and `room.logit`; the entropy of their votes.

    Their products with prototypes of these lengths (C,) are in `room.logits`.
    """
    logit, votes, entropies = room.logit, room.chance, room.entropy
    for c in range(len(length)):
        room.factor[c] = settings.scale / length[c]
    rows(SPIKES, len(views), run, room, settings, settings.scale, logit)
    part = logit.dtype.type(1 / settings.keep)
    feature[:], logit[:], votes[:] = 0, 0, 0
    for _ in range(settings.keep):
        best = 0
        for v in range(len(views)):  # a tie goes to the lower index
            if entropies[v] < entropies[best]:
                best = v
        entropies[best] = np.inf
        row, view, top, vote = room.logits[best], views[best], room.top[best], part / room.total[best]
        for c in range(len(row)):
            logit[c] += row[c] * part
            votes[c] += exp(row[c] - top) * vote
        for d in range(len(view)):
            feature[d] += view[d] * part
    for c in range(len(votes)):
        room.factor[c] = log(votes[c])
    # what the whole misses of 1 by rounding would be as large as a small entropy
    whole, weighted = weighed(votes, room.factor, part - part)
    return math.log(whole) - weighted / whole


@compiled
def enqueue(label: int, price: Any, run: Run, feature: Array) -> bool:
    """Offer a feature (D,) of cost `price` to the queue of class `label`; whether it was taken in.

    The class's visual prototype and its length follow.
    """
    if not push(run.keys, run.cost, label, feature, price):
        return False
    row, count = run.keys[label], filled(run.cost[label])
    mean = run.visual.vectors[label]
    for d in range(len(feature)):
        total = feature.dtype.type(0)
        for m in range(count):
            total += row[m, d]
        mean[d] = total / count
    for d in range(len(run.columns)):
        run.columns[d, label] = mean[d]
    run.visual.length[label] = length_at(run.visual.vectors, label)
    return True


@compiled
def keep(label: int, run: Run, kept: Kept) -> None:
    """Note what `enqueue` may change."""
    kept.label[0] = label
    kept.keys[:], kept.cost[:], kept.visual[:] = run.keys[label], run.cost[label], run.visual.vectors[label]
    kept.numbers[0], kept.numbers[1] = run.visual.length[label], run.height[label]
    kept.flags[0], kept.flags[1] = run.seen[label], run.stale[0]


@compiled
def put_back(run: Run, kept: Kept) -> None:
    """The run as it was when `keep` noted it."""
    label = kept.label[0]
    run.keys[label], run.cost[label], run.visual.vectors[label] = kept.keys, kept.cost, kept.visual
    for d in range(len(run.columns)):
        run.columns[d, label] = kept.visual[d]
    run.visual.length[label], run.height[label] = kept.numbers[0], kept.numbers[1]
    run.seen[label], run.stale[0] = kept.flags[0], kept.flags[1]


@compiled
def beside(run: Run, kept: Kept) -> Run:
    """The run with other memory for the pull of its alignment."""
    text, visual = run.text, run.visual
    text = Side(text.vectors, text.length, kept.text_pull, text.weight, text.cosine, text.evolved, text.evolved_length)
    visual = Side(
        visual.vectors,
        visual.length,
        kept.visual_pull,
        visual.weight,
        visual.cosine,
        visual.evolved,
        visual.evolved_length,
    )
    return Run(text, visual, run.columns, run.keys, run.cost, run.height, run.seen, run.updates, run.stale)


@compiled
def slopes(run: Run, room: Room, settings: Settings, steepness: Any) -> None:
    """Slope of the softmax's entropy at the image's feature by each prototype: `weight` and `cosine` of both sides."""
    text, visual, log_p, one = run.text, run.visual, room.chance, room.chance.dtype.type(1)
    rows(NEAR, len(log_p), run, room, settings, steepness, log_p)
    for c in range(len(log_p)):
        text.cosine[c] = room.logit[c] / settings.scale
        visual.weight[c] = run.height[c] * exp(settings.beta * (visual.cosine[c] - one))
        log_p[c] = room.logit[c] + visual.weight[c]
    top, whole, entropy = spike(log_p, room.factor)
    rest = top + math.log(whole)
    for c in range(len(log_p)):
        log = log_p[c] - rest
        slope = exp(log) * (-entropy - log) * steepness
        if abs(slope) < NOTHING:
            slope = 0.0
        text.weight[c] = settings.scale * slope
        visual.weight[c] *= settings.beta * slope


@compiled
def meet(views: Array, run: Run, room: Room, kept: Kept, settings: Settings) -> tuple[bool, Any]:
    """Take in one image's views (V, D), whose products with the text prototypes are in `room.logits`.

    Whether a queue took the image, and AdamW's eps in the units of the slopes, which are left at the sides.
    """
    # which queue the image belongs to, and how confidently
    entropy = confident(views, run.text.length, run, room, settings, room.feature)
    label, real = 0, room.logit.dtype.type
    for c in range(len(room.logit)):
        if room.logit[c] > room.logit[label]:
            label = c

    # evolve the visual prototypes
    if settings.looks:
        keep(label, run, kept)
    taken = enqueue(label, real(entropy * settings.per_nat), run, room.feature)
    if taken:
        run.seen[label], run.height[label], run.stale[0] = True, settings.alpha, True

    gain = real(1)
    if settings.align_weight > 0:
        gain = real(settings.align_weight / max(1, run.seen.sum()))
    slopes(run, room, settings, settings.entropy_weight / gain)
    room.probe[:] = views[0]
    return taken, settings.eps / gain


@compiled
def align(run: Run, room: Room, settings: Settings) -> None:
    """Compute the pull of the alignment anew: three products of C x C x D."""
    text, visual, classes = run.text, run.visual, len(room.factor)
    similarity = room.similarity[:, :classes]
    product(text.vectors, run.columns[:, :classes], similarity, settings.threads)
    for c in range(classes):
        room.factor[c] = similarity.dtype.type(1) / text.length[c]
    rows(REPEL, classes, run, room, settings, settings.sharpness, room.factor)
    product(similarity, visual.vectors, text.pull, settings.threads)
    product_of_transposed(similarity, text.vectors, visual.pull, settings.threads)
    run.stale[0] = False


@compiled
def settle(soft: Any, run: Run, room: Room, settings: Settings, logits: Array) -> bool:
    """Fill the logits (C,) of the probe; whether they are so sure that the text prototypes evolve."""
    room.share[0] = settings.share
    if settings.share < 0:
        room.share[0] = 1 / (run.updates[0] + settings.prompt_count + 1)
    # visual prototypes were read last, and text prototypes are read next: so each are found in the cache
    rows(BY_VISUAL, len(logits), run, room, settings, soft, logits)
    rows(BY_TEXT, len(logits), run, room, settings, soft, logits)
    entropy = spike(logits, room.factor)[2]
    return settings.evolves and (entropy * settings.per_nat < settings.threshold) == settings.keeps_below


@compiled
def evolved(side: Side) -> Side:
    """The side with its prototypes evolved. They change places with those before, whose memory is used next."""
    return Side(side.evolved, side.evolved_length, side.pull, side.weight, side.cosine, side.vectors, side.length)


@compiled
def step(views: Array, run: Run, room: Room, kept: Kept, settings: Settings, logits: Array) -> tuple[bool, bool]:
    """Fill `logits` (C,) for one image's views (V, D); whether a queue took it, and whether text prototypes evolve."""
    across(views, run.text.vectors, room.logits, settings.threads)
    taken, soft = meet(views, run, room, kept, settings)
    here = beside(run, kept) if settings.looks and taken else run
    if here.stale[0] and settings.align_weight > 0:
        align(here, room, settings)
    if len(room.moved):  # views are chosen again
        rows(AGAIN, len(room.moved), here, room, settings, soft, room.factor)
        across(views, room.moved, room.logits, settings.threads)
        confident(views, room.length, here, room, settings, room.probe)
    evolves = settle(soft, here, room, settings, logits)
    if settings.looks:
        if taken:
            put_back(run, kept)
        return False, False
    return taken, evolves


@compiled
def scan(stream: Array, run: Run, room: Room, kept: Kept, settings: Settings, logits: Array, learned: Array) -> None:
    """Steps over N images (N, V, D), with the logits (N, C) and whether each was `learned` from (N,).

    After an odd number of evolutions the text prototypes lie in `run.text.evolved`.
    """
    for n in range(len(stream)):
        taken, evolves = step(stream[n], run, room, kept, settings, logits[n])
        if evolves:
            run.updates[0] += 1
            run.stale[0] = True
            text = evolved(run.text)
            run = Run(text, run.visual, run.columns, run.keys, run.cost, run.height, run.seen, run.updates, run.stale)
        learned[n] = taken or evolves

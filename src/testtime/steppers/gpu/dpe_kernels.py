"""Triton kernels of `testtime.steppers.gpu.dpe`: a step of DPE without its alignment, in five launches.

S runs, C classes, D features, V views, M slots. A launch is for all runs, and its last axis is the run of a program: in
64 bits, since buffers of many runs have more elements than 32 bits can index. A program first finds its run's slices;
shapes below refer to these. A softmax over classes is split over programs, so each stores a summary of its own classes
and the next kernel merges them: the highest value, the sum of exp(value - highest), and the sum of
(value - highest) exp(value - highest), which give the log-sum-exp and the entropy. They are in float64: if one class
has nearly all the probability, an entropy and its slope are differences of numbers that nearly cancel. Large products
use half-precision parts as in `halves`: three products of two parts each, summed in float32. Buffers of parts are
padded with zeros to whole tiles, so that products need no masks.

No program reads what another one of the same launch writes. Runs are the slowest axis of a grid; every other kernel
processes them backwards, and so finds in the cache what the previous kernel touched last.
"""

# Triton reads the annotations of kernels itself, and knows only its own
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from testtime.steppers.fast import Numbers

LOWEST: tl.constexpr = tl.constexpr(-1e30)  # stands for minus infinity, but gives no NaN when multiplied by zero
HALF_SCALE: tl.constexpr = tl.constexpr(1024.0)  # keeps small parts in the normal range of half precision
SLOTS_AT_ONCE: tl.constexpr = tl.constexpr(8)  # chosen views read at a time
SUMMARIES_AT_ONCE: tl.constexpr = tl.constexpr(64)

# a run's row of the table (S, NUMBERS): the settings in which runs side by side may differ, in the order of `Numbers`
NUMBERS: tl.constexpr = tl.constexpr(len(Numbers._fields))
ALPHA, BETA, ENTROPY_WEIGHT, ALIGN_WEIGHT, EPS, LR_TEXT, LR_VISUAL, PER_NAT = map(tl.constexpr, range(8))
SHARPNESS, THRESHOLD, SHARE, PROMPT_COUNT, KEEPS_BELOW, EVOLVES, RENORMALISES = map(tl.constexpr, range(8, 15))


# Shared by the kernels


@triton.jit
def number(numbers, run, INDEX: tl.constexpr):
    """One of the settings of a run."""
    return tl.load(numbers + run * NUMBERS + INDEX)


@triton.jit
def halves(x):
    """Two half-precision parts whose sum is HALF_SCALE times x, for |x| <= 1, up to 2**-22 of it."""
    x *= HALF_SCALE
    large = x.to(tl.float16)
    return large, (x - large.to(tl.float32)).to(tl.float16)


@triton.jit
def product(a_large, a_small, b_large, b_small, total):
    """`total` plus HALF_SCALE squared times a product of matrices; that of the small parts is below rounding error."""
    total = tl.dot(a_large, b_small, total)
    total = tl.dot(a_small, b_large, total)
    return tl.dot(a_large, b_large, total)


@triton.jit
def _directions(rows):
    """Lengths (R,) and directions of rows (R, D); a zero row has length 1."""
    # in float64, so that the order of summation, which the compiler chooses per kernel, has no effect
    wide = rows.to(tl.float64)
    length = tl.sqrt(tl.sum(wide * wide, 1)).to(tl.float32)
    length = tl.where(length > 0, length, 1.0)
    return length, rows / length[:, None]


@triton.jit
def _summary(values, real, axis: tl.constexpr):
    """The summary of a softmax along `axis` over the values that are `real`, not padding."""
    values = tl.where(real, values, LOWEST)
    below = tl.where(real, values - tl.max(values, axis, keep_dims=True), 0.0)
    prob = tl.where(real, tl.exp(below), 0.0).to(tl.float64)
    return tl.max(values, axis), tl.sum(prob, axis), tl.sum(below.to(tl.float64) * prob, axis)


@triton.jit
def _merged(top, total, weighted, axis: tl.constexpr):
    """Summaries merged along `axis`; an empty one is (LOWEST, 0, 0)."""
    below = top - tl.max(top, axis, keep_dims=True)
    share = tl.exp(below.to(tl.float32))
    return tl.max(top, axis), tl.sum(total * share, axis), tl.sum((weighted + below * total) * share, axis)


@triton.jit
def _load_merged(summaries, blocks, BLOCKS: tl.constexpr):
    """The summary of all classes, merged from the summaries (3, blocks) of each block."""
    block = tl.arange(0, BLOCKS)
    real = block < blocks
    top = tl.load(summaries + block, mask=real, other=LOWEST)
    total = tl.load(summaries + blocks + block, mask=real, other=0.0)
    weighted = tl.load(summaries + 2 * blocks + block, mask=real, other=0.0)
    return _merged(top, total, weighted, 0)


@triton.jit
def _store_summary(summaries, blocks, values, real):
    """Store this program's summary in its column of (3, blocks)."""
    top, total, weighted = _summary(values, real, 0)
    pointers = summaries + tl.program_id(0)
    tl.store(pointers, top)
    tl.store(pointers + blocks, total)
    tl.store(pointers + 2 * blocks, weighted)


@triton.jit
def store_parts(parts, tall, wide, rows, column, directions, mask):
    """Write directions (R, D) to the rows of their half-precision parts (2, tall, wide)."""
    large, small = halves(directions)
    pointers = parts + rows[:, None] * wide + column[None, :]
    tl.store(pointers, large, mask=mask)
    tl.store(pointers + tall * wide, small, mask=mask)


@triton.jit
def normalise(vectors, lengths, parts, classes, dim, tall, wide, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Lengths (C,) of vectors (C, D), and their directions in parts: what a step caches beside the state."""
    run = tl.program_id(1).to(tl.int64)
    vectors, lengths, parts = vectors + run * classes * dim, lengths + run * classes, parts + run * 2 * tall * wide
    rows, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)
    real = rows < classes
    mask = real[:, None] & (column < dim)[None, :]
    tile = tl.load(vectors + rows[:, None] * dim + column[None, :], mask=mask, other=0.0)
    length, directions = _directions(tile)
    tl.store(lengths + rows, length, mask=real)
    store_parts(parts, tall, wide, rows, column, directions, mask)


# 1. which queue the image belongs to, and how confidently


@triton.jit
def view_logits(
    views, text_parts, view_logits, view_summaries, scale, count, classes, dim, tall, wide,
    VIEWS: tl.constexpr, CLASSES: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Logits (views, tall) of some views for some classes, and the summary (3, blocks, views) of each view."""
    block, blocks, padded = tl.program_id(0), tl.num_programs(0), tl.num_programs(1) * VIEWS
    run = tl.program_id(2).to(tl.int64)
    text_parts += run * 2 * tall * wide
    logits, summaries = view_logits + run * padded * tall, view_summaries + run * 3 * blocks * padded
    rows = tl.program_id(1) * VIEWS + tl.arange(0, VIEWS)
    columns = block * CLASSES + tl.arange(0, CLASSES)
    depth = tl.arange(0, DEPTH)
    total = tl.zeros([VIEWS, CLASSES], dtype=tl.float32)
    for start in range(0, dim, DEPTH):
        inside = (rows < count)[:, None] & (start + depth < dim)[None, :]
        view = tl.load(views + rows[:, None] * dim + (start + depth)[None, :], mask=inside, other=0.0)
        large, small = halves(view)
        pointers = text_parts + columns[None, :] * wide + (start + depth)[:, None]
        total = product(large, small, tl.load(pointers), tl.load(pointers + tall * wide), total)
    total *= scale / (HALF_SCALE * HALF_SCALE)
    tl.store(logits + rows[:, None] * tall + columns[None, :], total)
    top, sums, weighted = _summary(total, (columns < classes)[None, :], 1)
    pointers = summaries + block * padded + rows
    tl.store(pointers, top)
    tl.store(pointers + blocks * padded, sums)
    tl.store(pointers + 2 * blocks * padded, weighted)


@triton.jit(do_not_specialize=["count", "keep"])
def choose(
    views, view_logits, view_summaries, feature, logit, votes, labels, learned, view_blocks, count, keep,
    classes, dim, tall, VIEWS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """A part of the mean feature (D,) and the mean logit (C,) of the `keep` views of lowest entropy.

    For its classes a program stores the vote's entropy and the highest mean logit in `votes` (2, parts), and that
    class in `labels` (parts,). Resets `learned`. Every program selects the views itself, which is faster than waiting
    for one that does.
    """
    part, parts = tl.program_id(0), tl.num_programs(0)
    run = tl.program_id(1).to(tl.int64)
    logits, summaries = view_logits + run * VIEWS * tall, view_summaries + run * 3 * view_blocks * VIEWS
    feature, logit = feature + run * dim, logit + run * classes
    votes, labels = votes + run * 2 * parts, labels + run * parts
    view = tl.arange(0, VIEWS)
    top = tl.full([VIEWS], LOWEST, dtype=tl.float64)
    total, weighted = tl.zeros([VIEWS], dtype=tl.float64), tl.zeros([VIEWS], dtype=tl.float64)
    for start in range(0, view_blocks, SUMMARIES_AT_ONCE):
        block = start + tl.arange(0, SUMMARIES_AT_ONCE)
        pointers = summaries + block[:, None] * VIEWS + view[None, :]
        real = (block < view_blocks)[:, None]
        more_top = tl.load(pointers, mask=real, other=LOWEST)
        more_total = tl.load(pointers + view_blocks * VIEWS, mask=real, other=0.0)
        more_weighted = tl.load(pointers + 2 * view_blocks * VIEWS, mask=real, other=0.0)
        more_top, more_total, more_weighted = _merged(more_top, more_total, more_weighted, 0)
        highest = tl.maximum(top, more_top)
        share = tl.exp((top - highest).to(tl.float32))
        more_share = tl.exp((more_top - highest).to(tl.float32))
        weighted = (weighted + (top - highest) * total) * share
        weighted += (more_weighted + (more_top - highest) * more_total) * more_share
        total = total * share + more_total * more_share
        top = highest
    log_sum_exp = top + tl.log(total)
    entropy = tl.where(view < count, tl.log(total) - weighted / total, float("inf"))
    lower = entropy[:, None] < entropy[None, :]
    earlier = (entropy[:, None] == entropy[None, :]) & (view[:, None] < view[None, :])
    rank = tl.sum((lower | earlier).to(tl.int32), 0)

    index = part * PART + tl.arange(0, PART)
    is_class, is_feature = index < classes, index < dim
    mean, vote = tl.zeros([PART], dtype=tl.float32), tl.zeros([PART], dtype=tl.float64)
    image = tl.zeros([PART], dtype=tl.float32)
    for first in range(0, keep, SLOTS_AT_ONCE):
        slot = first + tl.arange(0, SLOTS_AT_ONCE)
        here = (rank[None, :] == slot[:, None]) & (view < count)[None, :]
        row = tl.min(tl.where(here, view[None, :], count - 1), 1)
        base = tl.sum(tl.where(here, log_sum_exp[None, :], 0.0), 1)
        real = (slot < keep)[:, None]
        mask = real & is_class[None, :]
        value = tl.load(logits + row[:, None] * tall + index[None, :], mask=mask, other=0.0)
        mean += tl.sum(value, 0)
        vote += tl.sum(tl.where(mask, tl.exp(value.to(tl.float64) - base[:, None]), 0.0), 0)
        value = tl.load(views + row[:, None] * dim + index[None, :], mask=real & is_feature[None, :], other=0.0)
        image += tl.sum(value, 0)
    mean, vote, image = mean / keep, vote / keep, image / keep
    tl.store(logit + index, mean, mask=is_class)
    tl.store(feature + index, image, mask=is_feature)
    best = tl.max(tl.where(is_class, mean, LOWEST), 0)
    tl.store(votes + part, -tl.sum(vote * tl.log(tl.where(vote > 0, vote, 1.0)), 0))
    tl.store(votes + parts + part, best)
    tl.store(labels + part, tl.min(tl.where(is_class & (mean == best), index, classes - 1), 0))
    if part == 0:
        tl.store(learned + run, 0)


# 2. evolve the visual prototypes


@triton.jit
def push(
    feature, logit, votes, labels, keys, cost, visual, visual_lengths, visual_parts, boosts, summaries, seen, stale,
    learned, numbers, parts, classes, dim, tall, wide,
    SLOTS: tl.constexpr, SLOTS_ROUND: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """The affinity (C,) of the mean feature to some visual prototypes, after offering it to its class's queue.

    As in `bank.push`, it replaces the worst if it is strictly better, and is inserted after its equals. The class's
    visual prototype and the number of classes `seen` are updated. Stores summaries of the softmax of logit + affinity.
    """
    blocks = tl.num_programs(0)
    run = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)  # backwards
    feature, logit, boosts = feature + run * dim, logit + run * classes, boosts + run * classes
    votes, labels = votes + run * 2 * parts, labels + run * parts
    keys, cost = keys + run * classes * SLOTS * dim, cost + run * classes * SLOTS
    visual, lengths = visual + run * classes * dim, visual_lengths + run * classes
    visual_parts, summaries = visual_parts + run * 2 * tall * wide, summaries + run * 3 * blocks
    seen, stale = seen + run, stale + run
    alpha, beta = number(numbers, run, ALPHA), number(numbers, run, BETA)

    # the label and its cost, from the programs of `choose`
    part = tl.arange(0, PARTS)
    best = tl.load(votes + parts + part, mask=part < parts, other=LOWEST)
    label = tl.load(labels + part, mask=part < parts, other=0)
    label = tl.min(tl.where(best == tl.max(best, 0), label, classes - 1), 0)
    price = tl.sum(tl.load(votes + part, mask=part < parts, other=0.0), 0) * number(numbers, run, PER_NAT)

    first = tl.program_id(0) * ROWS
    rows, column = first + tl.arange(0, ROWS), tl.arange(0, DIM)
    real, inside = rows < classes, column < dim
    mask = real[:, None] & inside[None, :]
    tile = tl.load(visual + rows[:, None] * dim + column[None, :], mask=mask, other=0.0)
    known = tl.load(cost + rows * SLOTS, mask=real, other=float("inf")) < float("inf")
    image = tl.load(feature + column, mask=inside, other=0.0)

    owns_label = (label >= first) & (label < first + ROWS)
    queue = cost + label * SLOTS
    taken = price < tl.load(queue + SLOTS - 1, mask=owns_label, other=LOWEST)
    if taken:
        slot = tl.arange(0, SLOTS_ROUND)
        before = tl.load(queue + slot, mask=slot < SLOTS, other=float("inf"))
        position = tl.sum(((slot < SLOTS) & (before <= price)).to(tl.int32), 0)
        source = tl.where(slot < position, slot, slot - 1)
        stays = (slot < SLOTS) & (slot != position)
        costs = tl.load(queue + source, mask=stays, other=float("inf"))
        costs = tl.where(slot == position, price, costs)
        held = keys + (label * SLOTS + source)[:, None] * dim + column[None, :]
        held = tl.load(held, mask=stays[:, None] & inside[None, :], other=0.0)
        held = tl.where((slot == position)[:, None], image[None, :], held)
        filled = tl.sum((costs < float("inf")).to(tl.int32), 0)
        mean = tl.sum(held, 0) / filled
        is_first = tl.sum((before < float("inf")).to(tl.int32), 0) == 0
        tl.debug_barrier()  # read everything before anything is overwritten
        tl.store(queue + slot, costs, mask=slot < SLOTS)
        target = keys + (label * SLOTS + slot)[:, None] * dim + column[None, :]
        tl.store(target, held, mask=(slot < SLOTS)[:, None] & inside[None, :])
        tl.store(visual + label * dim + column, mean, mask=inside)
        tl.store(seen, tl.load(seen) + is_first.to(tl.int32))
        tl.store(stale, 1)
        tl.store(learned + run, 1)
        known = known | (rows == label)
        tile = tl.where((rows == label)[:, None], mean[None, :], tile)
    length, directions = _directions(tile)
    if taken:
        tl.store(lengths + rows, length, mask=rows == label)
        store_parts(visual_parts, tall, wide, rows, column, directions, (rows == label)[:, None] & mask)

    near = tl.sum(directions * image[None, :], 1)
    boost = tl.where(known, alpha * tl.exp(beta * (near - 1)), 0.0)
    tl.store(boosts + rows, boost, mask=real)
    value = tl.load(logit + rows, mask=real, other=0.0) + boost
    _store_summary(summaries, blocks, value, real)


# 3. prototype residual learning, down the slope of the entropy and the pull of `fused_alignment`


@triton.jit
def _nudged(start, length, pulls, side, rows, column, pulled, tall, wide, weight, image, scaled_eps, rate,
            SPLIT: tl.constexpr):  # fmt: skip
    """Rows (R, D) after one step of AdamW from zero residuals on `start`: as in `testtime.steppers.cpu.dpe_loops`."""
    slope = weight[:, None] * image[None, :]
    for part in tl.static_range(SPLIT):
        pointers = pulls + ((side * SPLIT + part) * tall + rows[:, None]) * wide + column[None, :]
        slope += tl.load(pointers, mask=pulled, other=0.0)
    directions = start / length[:, None]
    slope -= tl.sum(slope * directions, 1)[:, None] * directions
    return start - rate * slope / (tl.abs(slope) + (scaled_eps * length)[:, None])


# not all pointers into a chunk's logits are aligned: one kernel for all, so that they round alike
@triton.jit(do_not_specialize_on_alignment=["logits"])
def answer(
    views, text, text_lengths, visual, visual_lengths, cost, feature, logit, boosts, summaries, pulls, moved,
    moved_lengths, logits, answers, updates, updates_before, seen, stale,
    numbers, scale, classes, dim, tall, wide,
    SLOTS: tl.constexpr, SPLIT: tl.constexpr, LEARNS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Logits (C,) of the clean view for some classes, after nudging both sets of prototypes.

    Stores the nudged text prototypes (C, D) and their lengths (C,), and summaries of the softmax of the answer.
    """
    blocks, run = tl.num_programs(0), tl.program_id(1).to(tl.int64)
    text, text_lengths = text + run * classes * dim, text_lengths + run * classes
    visual, visual_lengths = visual + run * classes * dim, visual_lengths + run * classes
    cost, feature = cost + run * classes * SLOTS, feature + run * dim
    logit, boosts, logits = logit + run * classes, boosts + run * classes, logits + run * classes
    summaries, answers = summaries + run * 3 * blocks, answers + run * 3 * blocks
    pulls += run * 2 * SPLIT * tall * wide
    moved, moved_lengths = moved + run * classes * dim, moved_lengths + run * classes
    alpha, beta = number(numbers, run, ALPHA), number(numbers, run, BETA)

    rows, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)
    real, inside = rows < classes, column < dim
    mask = real[:, None] & inside[None, :]
    offsets = rows[:, None] * dim + column[None, :]
    text_rows = tl.load(text + offsets, mask=mask, other=0.0)
    visual_rows = tl.load(visual + offsets, mask=mask, other=0.0)
    text_length = tl.load(text_lengths + rows, mask=real, other=1.0)
    visual_length = tl.load(visual_lengths + rows, mask=real, other=1.0)
    known = tl.load(cost + rows * SLOTS, mask=real, other=float("inf")) < float("inf")
    clean = tl.load(views + column, mask=inside, other=0.0)
    if LEARNS:
        # gradient of the softmax's entropy by each logit, then by each prototype: a multiple of the mean feature
        boost = tl.load(boosts + rows, mask=real, other=0.0)
        value = tl.where(real, tl.load(logit + rows, mask=real, other=0.0) + boost, LOWEST)
        top, total, weighted = _load_merged(summaries, blocks, BLOCKS)
        log_p = value.to(tl.float64) - top - tl.log(total)
        align_weight = number(numbers, run, ALIGN_WEIGHT)
        # without alignment no pull is read
        pulled = (rows < tl.where(align_weight > 0, classes, 0))[:, None] & inside[None, :]
        gain = tl.where(align_weight > 0, align_weight / tl.maximum(tl.load(seen + run), 1), 1.0)
        steep = (weighted / total - tl.log(total) - log_p).to(tl.float32)
        slope = tl.exp(log_p.to(tl.float32)) * steep * (number(numbers, run, ENTROPY_WEIGHT) / gain)
        scaled_eps = number(numbers, run, EPS) / gain
        image = tl.load(feature + column, mask=inside, other=0.0)
        text_rows = _nudged(
            text_rows, text_length, pulls, 0, rows, column, pulled, tall, wide,
            scale * slope, image, scaled_eps, number(numbers, run, LR_TEXT), SPLIT,
        )  # fmt: skip
        visual_rows = _nudged(
            visual_rows, visual_length, pulls, 1, rows, column, pulled, tall, wide,
            beta * boost * slope, image, scaled_eps, number(numbers, run, LR_VISUAL), SPLIT,
        )  # fmt: skip
        text_length = tl.maximum(tl.sqrt(tl.sum(text_rows * text_rows, 1)), 1e-12)
        visual_length = tl.maximum(tl.sqrt(tl.sum(visual_rows * visual_rows, 1)), 1e-12)

    # 4. prototype-based inference with both sets
    near = tl.sum(visual_rows * clean[None, :], 1) / visual_length
    value = scale * (tl.sum(text_rows * clean[None, :], 1) / text_length)
    value += tl.where(known, alpha * tl.exp(beta * (near - 1)), 0.0)
    tl.store(logits + rows, value, mask=real)
    evolving = (rows < tl.where(number(numbers, run, EVOLVES) > 0, classes, 0))[:, None] & inside[None, :]
    tl.store(moved + offsets, text_rows, mask=evolving)
    tl.store(moved_lengths + rows, text_length, mask=real)
    _store_summary(answers, blocks, value, real)
    if tl.program_id(0) == 0:
        tl.store(stale + run, 0)
        tl.store(updates_before + run, tl.load(updates + run))


# 5. evolve the text prototypes with images that are confident enough


@triton.jit
def evolve(
    text, text_lengths, text_parts, moved, moved_lengths, answers, updates, updates_before, stale, learned,
    numbers, classes, dim, tall, wide,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Move some text prototypes towards the nudged ones, if the answer's entropy passes the threshold."""
    blocks = tl.num_programs(0)
    run = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)  # backwards
    top, total, weighted = _load_merged(answers + run * 3 * blocks, blocks, BLOCKS)
    entropy = (tl.log(total) - weighted / total) * number(numbers, run, PER_NAT)
    below = (entropy < number(numbers, run, THRESHOLD)).to(tl.float32)
    if (below != number(numbers, run, KEEPS_BELOW)) | (number(numbers, run, EVOLVES) == 0):
        return
    text, moved = text + run * classes * dim, moved + run * classes * dim
    text_parts += run * 2 * tall * wide
    lengths, moved_lengths = text_lengths + run * classes, moved_lengths + run * classes
    before = tl.load(updates_before + run)
    share, prompt_count = number(numbers, run, SHARE), number(numbers, run, PROMPT_COUNT).to(tl.int64)
    share = tl.where(share < 0, 1.0 / (before + prompt_count + 1).to(tl.float32), share)
    rows, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)
    real = rows < classes
    mask = real[:, None] & (column < dim)[None, :]
    offsets = rows[:, None] * dim + column[None, :]
    tile = tl.load(text + offsets, mask=mask, other=0.0)
    towards = tl.load(moved + offsets, mask=mask, other=0.0)
    towards /= tl.load(moved_lengths + rows, mask=real, other=1.0)[:, None]
    tile += share * (towards - tile)
    if number(numbers, run, RENORMALISES) > 0:
        _, tile = _directions(tile)
    length, directions = _directions(tile)
    tl.debug_barrier()  # read everything before anything is overwritten
    tl.store(text + offsets, tile, mask=mask)
    tl.store(lengths + rows, length, mask=real)
    store_parts(text_parts, tall, wide, rows, column, directions, mask)
    if tl.program_id(0) == 0:
        tl.store(updates + run, before + 1)
        tl.store(stale + run, 1)
        tl.store(learned + run, 1)

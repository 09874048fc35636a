"""Scenarios: streams of the same images in which adapting online may hurt, as pure functions of images and a seed.

>>> from testtime.synthetic import toy
>>> task, views, labels = toy()
>>> stream = make_stream("sorted", Images(task, views, labels), seed=1)
>>> len(stream.rows), int((stream.labels.diff() != 0).sum())  # 8 classes: 7 changes
(160, 7)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor

from testtime.ops import unit
from testtime.types import Task

RECIPE = 1  # of the streams below; another number if a stream of the same kind and seed becomes another
FOREIGN = -1  # the label of an image of none of the classes
COPIES = 1000  # of the duplicated image
SURE = 0.999  # what the frozen classifier gives a crafted feature for the wrong class: queues keep what is sure
LEVELS = (0.9, 0.99, 0.999, 0.999999)  # likewise, of those that an attacker chooses from
LEAST = 5  # images of a class that is attacked, of which the frozen classifier gets half right
CANDIDATES = 64  # crafted features that an attacker chooses from
NOISE = 1.0  # length of the noise at the end of a stream that decays; a feature has length 1


class Images(NamedTuple):
    """Encoded images of a task's classes."""

    task: Task
    views: Tensor  # (N, V, D) unit rows
    labels: Tensor  # (N,)
    domains: Tensor | None = None  # (N,) number of the domain that each is from
    foreign: Tensor | None = None  # (M, V, D) unit rows: images of none of the classes, from the same encoder


class Stream(NamedTuple):
    """Images in an order. `views[rows]` are its views (n, V, D)."""

    views: Tensor  # (M, V, D) unit rows: the images', then foreign and crafted ones
    rows: Tensor  # (n,)
    labels: Tensor  # (n,) numbers of its task's classes; FOREIGN: none of them
    scored: Tensor  # (n,) bool: not those that were crafted, nor copies
    classes: Tensor  # (K,) which classes its task has, all unless some are held out
    attacked: int = -1  # the class whose images an attacker wants to be mistaken,
    target: int = -1  # and the nearest class that they are to be mistaken for
    turns: Tensor | None = None  # (n,) bool: where an attacker who sees the state chooses what comes
    candidates: Tensor = torch.empty(0, dtype=torch.int64)  # (k,) rows of `views` that it chooses from, and
    recipes: int = 0  # in how many ways they are crafted, one after another: so far apart are two of the same


def make_stream(kind: str, images: Images, seed: int) -> Stream | str:
    """The stream of a kind (`KINDS`), which depends on the images, the kind and the seed; or why there is none."""
    if len(images.labels.unique()) < 2:
        return "needs images of two or more classes"
    seeded = int.from_bytes(hashlib.sha256(f"{kind} {seed}".encode()).digest()[:8], "big")
    return KINDS[kind](images, Generator().manual_seed(seeded))


def shuffled(images: Images, generator: Generator) -> Stream:
    """All images in a random order."""
    return _plain(images, _shuffle(torch.arange(len(images.labels)), generator))


def by_class(images: Images, generator: Generator) -> Stream:
    """One class after another, in a random order; shuffled within a class."""
    return _plain(images, torch.cat(_shuffled_classes(images, generator)))


def dirichlet(images: Images, generator: Generator, *, concentration: float) -> Stream:
    """Correlated in time: as many slots as classes, each class spread over them by a Dirichlet distribution.

    The lower the concentration, the fewer slots a class is in. Every image comes once; within a slot, classes follow
    one another in a random order. After Gong et al., "NOTE: Robust Continual Test-time Adaptation Against Temporal
    Correlation", NeurIPS 2022.
    """
    groups = _shuffled_classes(images, generator)
    shares = _dirichlet(concentration, len(groups), len(groups), generator)  # (class, slot)
    slots: list[list[Tensor]] = [[] for _ in groups]
    for rows, share in zip(groups, shares, strict=True):
        ends = (share.cumsum(0)[:-1] * len(rows)).round().long().tolist()
        for slot, part in zip(slots, rows.tensor_split(ends), strict=True):
            slot.append(part)
    orders = [torch.randperm(len(groups), generator=generator).tolist() for _ in slots]
    return _plain(images, torch.cat([slot[each] for slot, order in zip(slots, orders, strict=True) for each in order]))


def few_classes(images: Images, generator: Generator, *, count: int | None = None, share: float = 0.0) -> Stream | str:
    """Only images of some classes, so many or that share of them, shuffled; the task keeps all its classes."""
    groups = _shuffled_classes(images, generator)
    if count is None and (few := round(share * len(groups))) <= 4:
        return f"{share:.0%} of {len(groups)} classes are {few}, and up to 4 are other streams"
    count = count or few
    if count >= len(groups):
        return f"{count} of {len(groups)} classes are all"
    return _plain(images, _shuffle(torch.cat(groups[:count]), generator))


def long_tail(images: Images, generator: Generator, *, imbalance: float) -> Stream:
    """Classes in a random order, each less frequent than the one before, the last by `imbalance` than the first.

    The profile is exponential and begins at the largest class; no class has more images than there are.
    """
    groups = _shuffled_classes(images, generator)
    largest, last = max(map(len, groups)), len(groups) - 1
    wanted = [max(1, round(largest * imbalance ** -(rank / last))) for rank in range(len(groups))]
    kept = [rows[:count] for rows, count in zip(groups, wanted, strict=True)]
    return _plain(images, _shuffle(torch.cat(kept), generator))


def domains(images: Images, generator: Generator, *, mixed: bool) -> Stream | str:
    """Images of several domains: one domain after another in a random order, or all mixed."""
    if images.domains is None:
        return "needs several domains: give a folder of them"
    groups = [_shuffle((images.domains == each).nonzero()[:, 0], generator) for each in images.domains.unique()]
    order = torch.cat([groups[each] for each in torch.randperm(len(groups), generator=generator)])
    return _plain(images, _shuffle(order, generator) if mixed else order)


def open_set(images: Images, generator: Generator, *, share: float) -> Stream | str:
    """Shuffled, and a share of the images belongs to no class of the task.

    Foreign images are those given, or else those of classes that are held out: about that share of the classes.
    """
    task, views = images.task, images.views
    if images.foreign is None:
        held = max(1, round(share * task.classes))
        if task.classes - held < 2:
            return f"without {share:.0%} of {task.classes} classes, fewer than two are left"
        order = torch.randperm(task.classes, generator=generator)
        classes = order[held:].sort().values
        inside = torch.isin(images.labels, classes)
        known, foreign = inside.nonzero()[:, 0], (~inside).nonzero()[:, 0]
    else:
        classes, known = torch.arange(task.classes), torch.arange(len(views))
        foreign = len(views) + torch.arange(len(images.foreign))
        views = torch.cat([views, images.foreign.to(views)])
    wanted = round(share / (1 - share) * len(known))
    if wanted > len(foreign):
        known = _shuffle(known, generator)[: round((1 - share) / share * len(foreign))]
    foreign = _shuffle(foreign, generator)[:wanted]
    if not len(known) or not len(foreign):
        return f"too few images for {share:.0%} of them to be foreign"
    rows = _shuffle(torch.cat([known, foreign]), generator)
    labels = torch.full((len(views),), FOREIGN)
    labels[known] = torch.searchsorted(classes, images.labels[known])
    return Stream(views, rows, labels[rows], torch.ones(len(rows), dtype=torch.bool), classes)


def duplicates(images: Images, generator: Generator) -> Stream:
    """Shuffled, and in the middle one image comes a thousand times, of which the first is scored."""
    order, middle = _shuffle(torch.arange(len(images.labels)), generator), len(images.labels) // 2
    stream = _plain(images, torch.cat([order[:middle], order[middle].repeat(COPIES), order[middle + 1 :]]))
    stream.scored[middle + 1 : middle + COPIES] = False
    return stream


def burst(images: Images, generator: Generator) -> Stream:
    """Shuffled, but for one class whose images come in one run in the middle: one of the largest tenth of them."""
    groups = sorted(_shuffled_classes(images, generator), key=len, reverse=True)
    run = groups[int(torch.randint(max(1, len(groups) // 10), (), generator=generator))]
    order = _shuffle(torch.arange(len(images.labels)), generator)
    others = order[~torch.isin(order, run)]
    middle = len(others) // 2
    return _plain(images, torch.cat([others[:middle], run, others[middle:]]))


def short(images: Images, generator: Generator, *, count: int) -> Stream | str:
    """So many images, drawn at random."""
    if count >= len(images.labels):
        return f"{count} of {len(images.labels)} images are all"
    return _plain(images, _shuffle(torch.arange(len(images.labels)), generator)[:count])


def noise(images: Images, generator: Generator) -> Stream:
    """Shuffled, with Gaussian noise on the features whose length grows from 0 to `NOISE` along the stream."""
    order, views = _shuffle(torch.arange(len(images.labels)), generator), images.views
    strength = torch.linspace(0, NOISE, len(order), dtype=views.dtype)[:, None, None] / math.sqrt(views.shape[2])
    drawn = torch.randn(views.shape, generator=generator, dtype=views.dtype)
    plain = _plain(images, order)
    return plain._replace(views=unit(views[order] + strength * drawn), rows=torch.arange(len(order)))


def poisoned(images: Images, generator: Generator, *, share: float, chosen: bool = False) -> Stream | str:
    """Shuffled, and a share of the stream is crafted by an attacker so that one class is mistaken for another.

    Crafted views are mixtures of two images of the attacked class, each moved along the sphere towards the prototype of
    another class until the frozen classifier is `SURE` that it is of it. That class is the nearest one by its text.
    An attacker who sees the state has some for each of the nearest four, at several `LEVELS`, to be `chosen` from.
    """
    task, views = images.task, images.views
    right = task.zero_shot(views[:, 0]).argmax(-1) == images.labels
    counts = images.labels.bincount(minlength=task.classes)
    fit = (counts >= LEAST) & (2 * images.labels[right].bincount(minlength=task.classes) >= counts)
    if not fit.any():
        return f"needs a class of {LEAST} images or more of which the frozen classifier gets half right"
    attacked = int(_shuffle(fit.nonzero()[:, 0], generator)[0])
    near = (task.text @ task.text[attacked]).argsort(descending=True, stable=True)
    near, levels = near[near != attacked][: 4 if chosen else 1], views.new_tensor(LEVELS if chosen else [SURE])
    own = views[images.labels == attacked]
    turns = max(1, round(share / (1 - share) * len(views)))
    count = CANDIDATES if chosen else turns
    first, second = torch.randint(len(own), (2, count), generator=generator)
    weight = 0.5 * torch.rand(count, 1, 1, generator=generator, dtype=views.dtype)
    mixtures = unit((1 - weight) * own[first] + weight * own[second])
    number = torch.arange(count)
    crafted = moved(mixtures, task, near[number % len(near)], levels[number // len(near) % len(levels)])
    numbers = len(views) + number
    order = _shuffle(torch.cat([torch.arange(len(views)), numbers[torch.arange(turns) % count]]), generator)
    added = order >= len(views)
    labels = torch.cat([images.labels, torch.full((count,), attacked)])
    classes, pair = torch.arange(task.classes), (attacked, int(near[0]))
    stream = Stream(torch.cat([views, crafted]), order, labels[order], ~added, classes, *pair)
    recipes = len(near) * len(levels)
    return stream._replace(turns=added, candidates=numbers, recipes=recipes) if chosen else stream


def moved(views: Tensor, task: Task, targets: Tensor, sure: Tensor) -> Tensor:
    """Views (n, V, D) moved along great circles to the prototypes of `targets` (n,), as far as it takes.

    That is where the frozen classifier is as `sure` (n,) of the target, or else the prototype itself.
    """
    ends, which = task.text[targets].to(views)[:, None], targets[:, None, None].expand(*views.shape[:2], 1)
    angles = (views * ends).sum(-1, keepdim=True).clamp(-1, 1).acos().clamp_min(1e-6)

    def at(share: Tensor) -> Tensor:
        return unit(((1 - share) * angles).sin() * views + (share * angles).sin() * ends)

    low, high = torch.zeros_like(angles), torch.ones_like(angles)
    for _ in range(24):  # bisection
        middle = (low + high) / 2
        confidence = task.zero_shot(at(middle)).softmax(-1).gather(-1, which)
        short = confidence < sure[:, None, None]
        low, high = torch.where(short, middle, low), torch.where(short, high, middle)
    return at(high)


Maker = Callable[[Images, Generator], Stream | str]

KINDS: dict[str, Maker] = {
    "shuffled": shuffled,
    "sorted": by_class,
    "Dirichlet 0.1": partial(dirichlet, concentration=0.1),
    "Dirichlet 0.01": partial(dirichlet, concentration=0.01),
    "Dirichlet 0.001": partial(dirichlet, concentration=0.001),
    "1 class": partial(few_classes, count=1),
    "2 classes": partial(few_classes, count=2),
    "4 classes": partial(few_classes, count=4),
    "10% of classes": partial(few_classes, share=0.1),
    "long tail 10": partial(long_tail, imbalance=10),
    "long tail 50": partial(long_tail, imbalance=50),
    "long tail 100": partial(long_tail, imbalance=100),
    "burst": burst,
    "duplicates": duplicates,
    "10 images": partial(short, count=10),
    "50 images": partial(short, count=50),
    "200 images": partial(short, count=200),
    "growing noise": noise,
    "open set 10%": partial(open_set, share=0.1),
    "open set 30%": partial(open_set, share=0.3),
    "open set 50%": partial(open_set, share=0.5),
    "poisoned 1%": partial(poisoned, share=0.01),
    "poisoned 5%": partial(poisoned, share=0.05),
    "poisoned 10%": partial(poisoned, share=0.1),
    "attacker 5%": partial(poisoned, share=0.05, chosen=True),
    "domains in sequence": partial(domains, mixed=False),
    "domains mixed": partial(domains, mixed=True),
}


def _plain(images: Images, rows: Tensor) -> Stream:
    """These images, all of them scored."""
    scored = torch.ones(len(rows), dtype=torch.bool)
    return Stream(images.views, rows, images.labels[rows], scored, torch.arange(images.task.classes))


def _shuffle(rows: Tensor, generator: Generator) -> Tensor:
    return rows[torch.randperm(len(rows), generator=generator)]


def _shuffled_classes(images: Images, generator: Generator) -> list[Tensor]:
    """The images of each class that has any, shuffled, the classes in a random order."""
    present = _shuffle(images.labels.unique(), generator)
    return [_shuffle((images.labels == label).nonzero()[:, 0], generator) for label in present]


def _dirichlet(concentration: float, rows: int, parts: int, generator: Generator) -> Tensor:
    """Rows (rows, parts) of a symmetric Dirichlet distribution; in logarithms, since small ones would underflow."""
    drawn = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
    # a gamma variate of shape a is one of shape a + 1, times a uniform one to the power of 1 / a
    gamma = torch.from_numpy(drawn.standard_gamma(1 + concentration, (rows, parts)))
    uniform = torch.from_numpy(drawn.uniform(size=(rows, parts)))
    return (gamma.log() + uniform.log() / concentration).softmax(-1)

"""The encoder: preprocessing that does not fit, features that say nothing, labels in another order than the classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from testtime.doctor.finding import Finding, fine
from testtime.registry import split_precision
from testtime.types import Encoder, Preprocess, Task

FEWEST = 20  # images from which features are judged: below, every statistic here is noise
FEWEST_CLASSES = 5  # likewise for the towers: the texts of two classes vary along one direction, which may be any
# Features of random weights vary along few directions: on photographs, their effective rank (the participation ratio of
# the spectrum) is 1 (RN50) to 4 (ViT-B/32, the tiny encoder). Trained ones have 9 (40 sketches) to 80 (Caltech101).
RANK = 6.0
ALIKE = (
    0.95  # mean cosine of two images. Trained: 0.39 (Caltech101) to 0.83 (sketches of one class); RN50, random: 0.999
)
# how many standard deviations above chance the towers must agree (see `agreement`). Trained, from five classes on: 14
# (sketches) to 240 (Caltech101); random, or a text tower of another model: at most 2
AGREE = 4.0
ROTATIONS = 24
UNIFORM = 0.97  # mean entropy, as a share of ln C, from which answers are near uniform; trained: 0.13 to 0.21
INITIAL_SCALES = (1 / 0.07, 10.0)  # logit scales before training: CLIP's, SigLIP's
MATCHED = 0.2  # gain in accuracy by another order of the labels from which that order is believed
SWAPPED = 0.75  # share of each of two classes that is taken for the other from which they look swapped
SWAP_IMAGES = 5  # images of each that this needs
ONE_HIGH = "are shifted by one: each is one too high, as if counted from 1"
ONE_LOW = "are shifted by one: each is one too low, as if the class names had an extra first line"
KNOWN = {  # mean and deviation by the family that was trained with them
    "CLIP": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "ImageNet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "SigLIP": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}
# a unit range of pixels is 2 (SigLIP) to 4.5 (ImageNet) wide after normalising, and holds 0
WIDTHS = (1.0, 9.0)


# Preprocessing


def expected_normalisation(encoder: Encoder) -> dict[str, tuple[Any, Any]]:
    """The means and deviations that the encoder's family was trained with, by name; empty if it is not known."""
    kind, _, spec = split_precision(encoder.name)[0].partition(":")
    if kind in ("tiny", "open_clip"):
        from testtime.machine.lean_open_clip import open_clip

        model = spec.partition("/")[0]
        tags = open_clip.pretrained.list_pretrained_tags_by_model(model) if kind == "open_clip" else []
        settings = [open_clip.pretrained.get_pretrained_cfg(model, tag) for tag in tags]
        found = {f"{model}/{tag}": (tuple(s["mean"]), tuple(s["std"])) for tag, s in zip(tags, settings, strict=True)}
        return found or {"CLIP": KNOWN["CLIP"]}
    if kind == "hf":
        family = getattr(getattr(getattr(encoder, "model", None), "config", None), "model_type", "")
        return {"clip": {"CLIP": KNOWN["CLIP"]}, "siglip": {"SigLIP": KNOWN["SigLIP"]}}.get(family, {})
    return {}


def check_preprocess(encoder: Encoder, pixels: np.ndarray | None) -> list[Finding]:
    """The encoder's mean and deviation against its family's, and what they make of `pixels` (n, 3), 0..255."""
    made: Preprocess = encoder.preprocess
    low, high = ([(end - m) / s for m, s in zip(made.mean, made.std, strict=True)] for end in (0.0, 1.0))
    fix = "Set image mean and std in open_clip_config.json or preprocessor_config.json beside the weights"
    widths = [b - a for a, b in zip(low, high, strict=True)]
    if min(widths) < WIDTHS[0] or max(widths) > WIDTHS[1] or max(low) > 0.5 or min(high) < -0.5:
        seen = f"Pixels are normalised with mean {_numbers(made.mean)} and deviation {_numbers(made.std)}"
        if pixels is not None:
            unit = (pixels / 255 - made.mean) / made.std
            seen += f"; the images then have mean {_numbers(unit.mean(0))} and deviation {_numbers(unit.std(0))}"
        hint = " These are for pixels of 0 to 255; pixels here are 0 to 1: divide by 255." if max(made.mean) > 1 else ""
        return [
            Finding(
                "preprocess",
                "problem",
                f"{seen}.",
                "A model sees noise unless pixels are scaled as in its training.",
                f"{fix}.{hint}",
            )
        ]
    expected = expected_normalisation(encoder)
    if expected and not any(_close(made.mean, m) and _close(made.std, s) for m, s in expected.values()):
        name, (mean, std) = next(iter(expected.items()))
        like = next((n for n, (m, s) in KNOWN.items() if _close(made.mean, m) and _close(made.std, s)), None)
        return [
            Finding(
                "preprocess",
                "warning",
                f"Pixels are normalised with mean {_numbers(made.mean)} and deviation {_numbers(made.std)}"
                + (f", which are {like}'s" if like else "")
                + f"; {name} was trained with {_numbers(mean)} and {_numbers(std)}.",
                "Colours and contrast differ from training, which costs some accuracy.",
                f"{fix}, unless these weights were trained that way.",
            )
        ]
    return []


def check_size(encoder: Encoder) -> list[Finding]:
    """Whether the model takes images of the size that its preprocessing makes."""
    side = encoder.preprocess.size
    try:
        rows = encoder.encode_images(torch.zeros(1, 3, side, side))
        usable = bool(torch.isfinite(rows).all())
        why = "" if usable else "its features hold NaN or infinity"
    except Exception as problem:  # whatever a model raises on the wrong size
        usable, why = False, (str(problem).strip() or type(problem).__name__).splitlines()[0]
    if usable:
        return []
    return [
        Finding(
            "size",
            "problem",
            f"The model does not take the {side} x {side} pixels that its preprocessing makes: {why}.",
            "No image can be encoded.",
            "Set the image size beside the weights to that of the model, or use the model that the weights are of.",
        )
    ]


def _close(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(abs(x - y) < 0.01 for x, y in zip(a, b, strict=True))


def _numbers(values: Sequence[float]) -> str:
    return "(" + ", ".join(f"{value:.3g}" for value in values) + ")"


# Features


def effective_rank(features: Tensor) -> float:
    """The participation ratio of the spectrum of centred rows (N, D): how many directions they vary along."""
    variances = torch.linalg.svdvals((features - features.mean(0)).double()).square()
    return float(variances.sum().square() / variances.square().sum().clamp_min(1e-300))


def agreement(features: Tensor, text: Tensor, seed: int = 0) -> float:
    """How far images (N, D) and texts (C, D) vary along the same directions, in standard deviations above chance.

    Chance is the same texts after a random rotation. The statistic does not depend on which text is which class.
    """
    shared = text.abs().amax(0) > 0  # images may have a part of their own, as those of the encoder `offline` do
    images, texts = (rows[:, shared].double() for rows in (features, text))
    images, texts = images - images.mean(0), texts - texts.mean(0)
    # a rotated basis of the texts is all that chance needs, and is smaller than a rotation
    basis, weights = torch.linalg.qr(texts.T)  # (D, r), (r, C)
    draw = torch.Generator().manual_seed(seed)
    turned = (torch.linalg.qr(torch.randn(basis.shape, generator=draw, dtype=basis.dtype)).Q for _ in range(ROTATIONS))
    chance = torch.stack([(images @ turn @ weights).square().sum() for turn in turned])
    return float(((images @ texts.T).square().sum() - chance.mean()) / chance.std().clamp_min(1e-300))


def check_features(task: Task, features: Tensor, labels: Sequence[int | None], trained: bool = True) -> list[Finding]:
    """Random or wrong weights, towers that disagree, and labels in another order, from features (N, D) of the sample.

    `trained` is False if the encoder's logit scale is that of an untrained model.
    """
    found = [] if trained else [_untrained(task)]
    if len(features) < FEWEST:
        return found
    features, text = features.float().cpu(), task.text.float().cpu()
    logits = task.scale * features @ text.T
    answers = logits.argmax(1)
    known = torch.tensor([-1 if label is None else label for label in labels])
    truth, given = known[known >= 0], answers[known >= 0]
    right = float((truth == given).float().mean()) if len(truth) >= FEWEST else None
    chance = 1 / task.classes
    above = right is not None and right > chance + 4 * math.sqrt(chance * (1 - chance) / len(truth))

    cosine = _mean_cosine(features)
    rank = effective_rank(features)
    agree = agreement(features, text)
    share = float(answers.bincount().max() / len(answers))
    top = task.classnames[int(answers.bincount().argmax())]
    score = "" if right is None else f" Accuracy is {right:.1%}; guessing gets {chance:.1%}."
    flat = rank < RANK or cosine > ALIKE
    if flat and agree < AGREE and not above:
        found.append(_random(cosine, rank, share, top, score))
    elif agree < AGREE and not above and task.classes >= FEWEST_CLASSES:
        found.append(_disagree(agree, share, top, score, right is not None))
    elif right is not None:
        found += check_order(task, truth, given) or check_swaps(task, truth, given)
    probabilities = logits.softmax(1)
    entropy = float(-(probabilities * probabilities.clamp_min(1e-30).log()).sum(1).mean() / math.log(task.classes))
    if not found and entropy > UNIFORM:
        found.append(_uniform(entropy, task))
    if found:
        return found
    neighbours = _neighbours(features, known)
    if right is not None and not above and neighbours is not None:
        return [_hard(right, chance, neighbours, share, top)]
    words = f"towers agree, {agree:.0f} deviations above chance; features vary along {rank:.0f} directions"
    return [
        fine("model", words + ("" if right is None else f"; zero-shot accuracy {right:.1%} on {len(truth):,} images"))
    ]


def _untrained(task: Task) -> Finding:
    return Finding(
        "untrained",
        "problem",
        f"The logit scale of {task.encoder or 'the model'} is {task.scale:.4g}: its value before training.",
        "The weights were probably never trained, or are not those of the model.",
        "Load the published weights: open_clip:ViT-B-16/openai, or the file of the checkpoint itself.",
    )


def _random(cosine: float, rank: float, share: float, top: str, score: str) -> Finding:
    return Finding(
        "checkpoint",
        "problem",
        f"The features hardly tell images apart: the mean cosine of two is {cosine:.2f}, they vary along {rank:.1f} "
        f"directions, and {share:.0%} of the answers are '{top}'.{score}",
        "So do random weights: the checkpoint is untrained, does not fit its architecture, or gets wrong pixels.",
        "Use the published weights of exactly this model; for OpenAI's, a model with -quickgelu.",
    )


def _disagree(agree: float, share: float, top: str, score: str, labelled: bool) -> Finding:
    return Finding(
        "towers",
        "problem" if labelled else "warning",
        "Images and texts do not vary along the same directions (agreement "
        f"{agree:.1f} deviations above chance, {AGREE:.0f} are needed); {share:.0%} of the answers are '{top}'.{score}",
        "The towers are not of one training run, or the images show none of these classes.",
        "Load both towers from one checkpoint, with its own tokenizer; check that --classes fit the images.",
    )


def _uniform(entropy: float, task: Task) -> Finding:
    return Finding(
        "uniform",
        "warning",
        f"Answers are near uniform, at {entropy:.1%} of the largest entropy; the logit scale is {task.scale:.4g}.",
        "Methods that select by confidence or entropy cannot tell good answers from bad ones.",
        "Check the logit scale in the checkpoint or the feature file: CLIP's is 100.",
    )


def _hard(right: float, chance: float, neighbours: float, share: float, top: str) -> Finding:
    return Finding(
        "hard",
        "note",
        f"Zero-shot accuracy is {right:.1%}, where guessing gets {chance:.1%}; {share:.0%} of the answers are '{top}'. "
        f"The weights work: {neighbours:.0%} of the images have a nearest neighbour of their own class.",
        "This encoder cannot name these images, and adaptation starts from its answers.",
        "Try --template 'a sketch of a {}.' or what the images are, and a larger encoder: open_clip:ViT-B-16/openai",
    )


def _mean_cosine(features: Tensor) -> float:
    count = len(features)
    return float((features.sum(0).square().sum() - count) / (count * (count - 1)))


def _neighbours(features: Tensor, known: Tensor) -> float | None:
    """The share of labelled images whose nearest neighbour has their label."""
    rows, labels = features[known >= 0], known[known >= 0]
    if len(rows) < FEWEST:
        return None
    cosines = rows @ rows.T
    cosines.fill_diagonal_(-2.0)
    return float((labels[cosines.argmax(1)] == labels).float().mean())


# Labels in another order


def check_order(task: Task, truth: Tensor, given: Tensor) -> list[Finding]:
    """Whether the answers fit the labels far better in another order: shifted, alphabetical, as text, or any."""
    names, count = list(task.classnames), task.classes
    if len(truth.unique()) < min(
        3, count
    ):  # images of one class that are all taken for another say nothing of an order
        return []
    straight = _share(given, truth)
    orders = {  # the class that a label stands for, by label
        ONE_HIGH: [(label - 1) % count for label in range(count)],
        ONE_LOW: [(label + 1) % count for label in range(count)],
        "follow the alphabetical order of the class names": sorted(range(count), key=lambda c: names[c].casefold()),
        "follow the order 0, 1, 10, 11, 2: numbers sorted as text": sorted(range(count), key=str),
        "are in reverse order": list(range(count))[::-1],
    }
    scores = {words: _share(given, torch.tensor(order)[truth]) for words, order in orders.items()}
    words, score = max(scores.items(), key=lambda item: item[1])
    shuffled, order = _any_order(truth, given, count)
    if max(score, shuffled) < straight + MATCHED or straight > max(score, shuffled) / 2:
        return []
    if score >= 0.8 * shuffled:
        order = orders[words]
    else:
        words, score = "are in another order than the class names", shuffled
    examples = [(label, order[label]) for label in sorted(set(truth.tolist())) if order[label] != label][1:3]
    listed = "; ".join(f"images labelled '{names[a]}' look like '{names[b]}'" for a, b in examples)
    return [
        Finding(
            "labels-shifted" if words in (ONE_HIGH, ONE_LOW) else "labels-order",
            "problem",
            f"The labels {words}{f' ({listed})' if listed else ''}. "
            f"Accuracy is {straight:.1%} as labelled, {score:.1%} in that order.",
            "Scores against these labels are wrong; the answers are not affected.",
            {ONE_HIGH: "Subtract 1 from every label.", ONE_LOW: "Add 1 to every label, or remove the extra line."}.get(
                words, "Number the labels in the order of the class names, or write names as labels."
            ),
        )
    ]


def _share(given: Tensor, wanted: Tensor) -> float:
    return float((given == wanted).float().mean())


def _any_order(truth: Tensor, given: Tensor, count: int) -> tuple[float, list[int]]:
    """The accuracy of the best one-to-one order, found on one half of the images and scored on the other; the order."""
    turn: dict[int, int] = {}
    half = []
    for label in truth.tolist():
        half.append(turn.get(label, 0) % 2)
        turn[label] = turn.get(label, 0) + 1
    side = torch.tensor(half)
    right = total = 0
    for first in (0, 1):
        fit, test = side == first, side != first
        order = torch.tensor(_pairs(truth[fit], given[fit], count))
        right += int((order[truth[test]] == given[test]).sum())
        total += int(test.sum())
    return right / total, _pairs(truth, given, count, fill=True)


def _pairs(truth: Tensor, given: Tensor, count: int, fill: bool = False) -> list[int]:
    """The class that each label is most often taken for, each class once, the most frequent pairs first.

    Labels that are left are -1, or with `fill` themselves.
    """
    pairs, times = torch.stack([truth, given]).unique(dim=1, return_counts=True)
    order = [-1] * count
    taken: set[int] = set()
    for index in times.argsort(descending=True, stable=True).tolist():
        label, answer = pairs[:, index].tolist()
        if order[label] < 0 and answer not in taken:
            order[label] = answer
            taken.add(answer)
    return [label if fill and answer < 0 else answer for label, answer in enumerate(order)]


def check_swaps(task: Task, truth: Tensor, given: Tensor) -> list[Finding]:
    """Two classes, each of which is mostly taken for the other."""
    names = task.classnames
    mostly = {}
    for label in truth.unique().tolist():
        answers = given[truth == label].bincount(minlength=task.classes)
        if len(given[truth == label]) >= SWAP_IMAGES and answers.max() >= SWAPPED * answers.sum():
            mostly[label] = int(answers.argmax())
    swaps = [(a, b) for a, b in mostly.items() if a < b and mostly.get(b) == a]
    if not swaps or 2 * len(swaps) > task.classes / 2:  # more is another order of all labels
        return []
    a, b = swaps[0]
    return [
        Finding(
            "labels-swapped",
            "warning",
            f"'{names[a]}' and '{names[b]}' look swapped: most images of each are taken for the other.",
            "Two swapped names or folders cost the accuracy of both classes.",
            "Look at some images of each, and exchange the two names or folders.",
        )
    ]

"""The sampled images: which are drawn, and what their sizes, colours and copies look like."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from testtime.doctor.finding import Finding, fine

TINY = 32  # pixels of the shortest side: CIFAR's size, which CLIP's 224 blows up seven times
HUGE = 24_000_000  # pixels: a full-frame camera's; decoding one takes longer than encoding it on a GPU
THUMBNAIL = 16  # pixels a side
# mean difference in grey levels of two thumbnails up to which images count as copies; JPEG at quality 75 moves it by
# 0.25, and the closest two of PACS's sketches, white paper with thin lines, are 2.4 apart
SAME = 1.0
COPIES = 0.05  # share of the sample that are copies of another from which it is worth a word
GREY = 6  # largest difference of two channels, in grey levels, that still looks grey after JPEG
# shares of grey images between which a set is mixed. Caltech101 has 7%, PACS's photographs 1%; all grey is a domain
MIXED = (0.2, 0.9)
SCARCE = 50  # times that one class is more frequent than another from which it is noted; Caltech101's test split has 40


class Look(NamedTuple):
    """What one image looks like."""

    name: str
    size: tuple[int, int]
    grey: bool
    thumbnail: np.ndarray  # (THUMBNAIL, THUMBNAIL, 3), 0..255


def look(name: str, image: Image.Image) -> Look:
    """The looks of an RGB image."""
    small = image.resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX)
    pixels = np.asarray(small, dtype=np.float32)
    # colours may cancel out in a thumbnail, so greyness is judged on single pixels
    points = np.asarray(image.resize((64, 64), Image.Resampling.NEAREST), dtype=np.int16)
    return Look(name, image.size, bool(np.ptp(points, axis=2).max() <= GREY), pixels)


def spread(labels: Sequence[int | None], limit: int, seed: int) -> list[int]:
    """At most `limit` indices, sorted: as many of each class as possible, drawn with `seed`.

    >>> spread([0] * 90 + [1] * 10, 6, 0)
    [7, 8, 29, 92, 93, 94]
    """
    groups: dict[int | None, list[int]] = {}
    for index, label in enumerate(labels):
        groups.setdefault(label, []).append(index)
    draw = random.Random(seed)
    for group in groups.values():
        draw.shuffle(group)
    rounds = (
        group[turn] for turn in range(max(map(len, groups.values()))) for group in groups.values() if turn < len(group)
    )
    return sorted(index for _, index in zip(range(limit), rounds, strict=False))


def check_looks(looks: Sequence[Look], unreadable: Sequence[str], side: int | None) -> list[Finding]:
    """Unreadable, tiny, huge, grey and repeated images; `side` is what the encoder sees."""
    total = len(looks) + len(unreadable)
    found = []
    if unreadable:
        found.append(
            Finding(
                "unreadable",
                "problem",
                f"{len(unreadable):,} of {total:,} images cannot be read: {'; '.join(unreadable[:3]).rstrip('.')}.",
                "They are skipped: they get no answer and teach nothing.",
                "Copy or download them again, or remove them.",
            )
        )
    if not looks:
        return found
    found += _check_sizes(looks, side)
    grey = [each for each in looks if each.grey]
    if MIXED[0] <= len(grey) / len(looks) <= MIXED[1]:
        found.append(
            Finding(
                "grey",
                "warning",
                f"{len(grey):,} of {len(looks):,} images are grey, {grey[0].name} first; the others have colour.",
                "Grey and colour are two domains, and features of one say less about the other.",
                "Run them as two streams, or add --template 'a black and white photo of a {}.'",
            )
        )
    found += _check_copies(looks)
    if not found:
        sides = [min(each.size) for each in looks]
        found.append(
            fine("images", f"{len(looks):,} images readable, shortest sides {min(sides)} to {max(sides)} pixels")
        )
    return found


def _check_sizes(looks: Sequence[Look], side: int | None) -> list[Finding]:
    found = []
    tiny = [each for each in looks if min(each.size) < TINY]
    if tiny:
        width, height = tiny[0].size
        found.append(
            Finding(
                "tiny",
                "problem" if 2 * len(tiny) > len(looks) else "warning",
                f"{len(tiny):,} of {len(looks):,} images are smaller than {TINY} pixels: {tiny[0].name} is "
                f"{width} x {height}.",
                f"Scaled up to the model's {side or 224} pixels they are a blur; thumbnails are a common cause.",
                "Use the original images; for data this small, expect much lower accuracy.",
            )
        )
    huge = [each for each in looks if each.size[0] * each.size[1] > HUGE]
    if huge:
        width, height = huge[0].size
        found.append(
            Finding(
                "huge",
                "warning",
                f"{len(huge):,} of {len(looks):,} images are larger than {HUGE // 10**6} megapixels: "
                f"{huge[0].name} is {width:,} x {height:,}.",
                "Decoding takes most of the time; the model sees a small square of it.",
                "Scale them down once: mogrify -resize '1024x1024>' FILES",
            )
        )
    return found


def _check_copies(looks: Sequence[Look]) -> list[Finding]:
    pixels = np.stack([each.thumbnail.reshape(-1) for each in looks])
    copies, first = [], None
    for index in range(1, len(pixels)):
        near = np.abs(pixels[:index] - pixels[index]).mean(axis=1)
        if (closest := int(near.argmin()), float(near.min()))[1] <= SAME:
            copies.append(index)
            first = first or (looks[index].name, looks[closest].name)
    if first is None or len(copies) < max(2, COPIES * len(looks)):
        return []
    return [
        Finding(
            "copies",
            "warning",
            f"{len(copies):,} of {len(looks):,} images are copies of another: {first[0]} of {first[1]}.",
            "A method learns from each copy again, and scores count it again.",
            "Keep one of each; frames of a video: keep every tenth.",
        )
    ]


def check_labels_known(labels: Sequence[int | None], names: Sequence[str]) -> list[Finding]:
    """One class alone, scarce classes, labels that are known for only a part, and a stream sorted by class."""
    known = [label for label in labels if label is not None]
    if not known:
        return []
    found, counts = [], Counter(known)
    if len(known) < len(labels):
        found.append(
            Finding(
                "part-labelled",
                "note",
                f"The class of {len(known):,} of {len(labels):,} images is known.",
                "Accuracy is over these alone.",
                "Nothing to do if that is meant; else put the others in folders named after classes.",
            )
        )
    if len(counts) == 1 and len(known) >= 2:
        return [
            *found,
            Finding(
                "one-class",
                "warning",
                f"All {len(known):,} labelled images are of one class, '{names[known[0]]}'.",
                "Accuracy says nothing about the other classes, and a method with memory drifts towards this one.",
                "Give the folder above, which holds all class folders.",
            ),
        ]
    (most, many), (least, few) = counts.most_common()[0], counts.most_common()[-1]
    if many >= SCARCE * few:
        found.append(
            Finding(
                "imbalance",
                "note",
                f"'{names[most]}' has {many:,} images, '{names[least]}' {few:,}.",
                "Accuracy is mostly that of the frequent classes.",
                "Look at the accuracy per class in the report (--report).",
            )
        )
    changes = sum(a != b for a, b in zip(known, known[1:], strict=False))
    if len(counts) > 1 and changes < 2 * len(counts) and len(known) >= 4 * len(counts):
        found.append(
            Finding(
                "sorted",
                "note",
                f"The stream is sorted by class: {changes + 1:,} runs of one class in {len(known):,} images.",
                "A method with memory then sees one class at a time.",
                "Add --shuffle to 'run' and 'replay'.",
            )
        )
    return found

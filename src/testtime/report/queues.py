"""The contents of a method's queues: the image that each feature came from, and its position on a map."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from testtime.bank import Bank
from testtime.ops import unit
from testtime.report.data import Queued, QueueMap, Snapshot
from testtime.types import MissingPart

PLACED = 1200  # at most so many features on a map: t-SNE's time and the size of the page grow with them
FEWEST = 5  # at least so many features for a map


@dataclass(frozen=True)
class Moment:
    """The bank of a method after a number of images."""

    images: int
    bank: Bank
    places: Tensor | None = None  # (C, K), the index of each feature's image, if a `Tracer` recorded it


class Tracer:
    """Tracks a bank through a stream: `places` (C, K) is the index of the image that each feature came from.

    -1 marks an empty slot, and features from before the first image.
    """

    def __init__(self, bank: Bank) -> None:
        self.places = torch.full(bank.cost.shape, -1)
        self._cost = bank.cost.cpu()

    def follow(self, bank: Bank, image: int) -> None:
        """Record where an image was stored, given the bank after it."""
        # rows are sorted, and a new entry comes after equal ones: it is where the costs first differ
        changed = (self._cost != bank.cost.cpu()).nonzero()
        if len(changed):
            row, slot = changed[0].tolist()
            self.places[row, slot + 1 :] = self.places[row, slot:-1].clone()
            self.places[row, slot] = image
        self._cost = bank.cost.cpu()


def bank_of(state: object) -> Bank | None:
    """The first bank of a state: DPE's queues, TDA's positive cache; None if it has none."""
    parts = state if isinstance(state, tuple) else ()
    return next((part for part in parts if isinstance(part, Bank) and part.cost.shape[1]), None)


def sources(keys: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """For each key (E, D), the image (N, D) it came from, (E,), and whether the two are equal, (E,) bool.

    A key that is not the feature of one image, such as a mean of several views, is matched to the nearest by cosine.
    """
    images = torch.cat([(unit(part) @ features.T).argmax(1) for part in keys.split(256)])
    return images, (features[images] == keys).all(1)


def queue_map(
    method: str,
    moments: Sequence[Moment],
    features: Tensor | None,
    answers: Sequence[int],
    place: bool = True,
    seed: int = 0,
) -> QueueMap:
    """The queues at each moment, given the images' `features` (N, D) and `answers`, the predicted classes.

    Traced moments need no features. With `place`, features get positions on one seeded t-SNE map of all moments.
    """
    kept, left_out = _shown_classes(moments, answers)
    found: dict[bytes, Tensor] = {}  # each feature once, even if it stays for several moments
    held: list[list[tuple[int, int, bytes]]] = []  # class, image, feature
    exact = total = older = 0
    for moment in moments:
        labels, slots = moment.bank.cost.cpu().isfinite().nonzero(as_tuple=True)
        chosen = torch.isin(labels, torch.tensor(kept, dtype=torch.long))
        if moment.places is not None:
            traced = moment.places[labels, slots] >= 0
            older = int((chosen & ~traced).sum())  # at the last moment
            chosen &= traced
        labels, slots = labels[chosen], slots[chosen]
        keys = moment.bank.keys.cpu()[labels, slots]
        if moment.places is not None:
            images = moment.places[labels, slots]
        elif features is None:
            raise ValueError("Moments that were not traced need the features of their images.")
        else:
            images, same = sources(keys, features[: moment.images])
            exact += int(same.sum())
        total += len(keys)
        identities = [key.numpy().tobytes() for key in keys]
        found |= dict(zip(identities, keys, strict=True))
        held.append(list(zip(labels.tolist(), images.tolist(), identities, strict=True)))
    positions: dict[bytes, tuple[float, float]] = {}
    if place and len(found) >= FEWEST:
        positions = dict(zip(found, tsne(torch.stack(list(found.values())), seed), strict=True))
    snapshots = [
        Snapshot(moment.images, [Queued(label, image, *positions.get(key, ())) for label, image, key in entries])
        for moment, entries in zip(moments, held, strict=True)
    ]
    if features is None:
        text = "Each feature is shown with the image it came from."
    elif exact == total:
        text = "Each feature equals that of exactly one image, which is shown with it."
    else:
        text = (
            "A feature is the mean of an image's confident views. The image shown with it is the one whose feature is "
            f"nearest by cosine; {exact:,} of {total:,} are equal."
        )
    if left_out:
        text += f" Only the {len(kept):,} most frequently predicted classes are shown; {left_out:,} more are omitted."
    if older:
        text += f" {older:,} features from before this run are omitted."
    return QueueMap(method, snapshots, text + (f" The t-SNE map has seed {seed}." if positions else ""))


def need_tsne() -> Any:
    """scikit-learn's t-SNE, or an error that says how to install it."""
    try:
        from sklearn.manifold import TSNE
    except ImportError:
        raise MissingPart(
            "The map of the queues needs scikit-learn: pip install 'testtime[report]', or omit the map with --no-map."
        ) from None
    return TSNE


def tsne(features: Tensor, seed: int) -> list[tuple[float, float]]:
    """2D positions that keep neighbours by cosine together: (E, D) -> E pairs."""
    perplexity = min(30.0, (len(features) - 1) / 3)
    fitted = need_tsne()(perplexity=perplexity, metric="cosine", init="pca", random_state=seed, n_jobs=1)
    positions = fitted.fit_transform(features.double().numpy())
    return [(round(float(x), 3), round(float(y), 3)) for x, y in positions]


def _shown_classes(moments: Sequence[Moment], answers: Sequence[int]) -> tuple[list[int], int]:
    """The classes to show, most frequently predicted first up to `PLACED` features, and the number of the others."""
    sizes: Counter[int] = Counter()
    for moment in moments:
        sizes.update(moment.bank.cost.cpu().isfinite().nonzero()[:, 0].tolist())
    frequency = Counter(answers)
    kept: list[int] = []
    budget = PLACED
    for label in sorted(sizes, key=lambda c: (-frequency[c], c)):
        budget -= sizes[label]
        if budget < 0:
            break
        kept.append(label)
    return kept, len(sizes) - len(kept)

"""What a method's queues hold: which image each feature came from, and where it lies on a map."""

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

PLACED = 1200  # most features on a map: t-SNE's time and the page grow with them
FEWEST = 5  # features that make a map


@dataclass(frozen=True)
class Moment:
    """The bank of a method after so many images."""

    images: int
    bank: Bank
    places: Tensor | None = None  # (C, K), the image that each feature came from, where a `Tracer` has followed it


class Tracer:
    """Follows a bank through a stream: `places` (C, K) is the image that each of its features came from.

    -1 marks an empty slot, and what was there before the first image.
    """

    def __init__(self, bank: Bank) -> None:
        self.places = torch.full(bank.cost.shape, -1)
        self._cost = bank.cost.cpu()

    def follow(self, bank: Bank, image: int) -> None:
        """Note where an image went, `bank` being what it left."""
        # rows are sorted, and a newcomer stands behind its equals: it is where the costs first differ
        changed = (self._cost != bank.cost.cpu()).nonzero()
        if len(changed):
            row, slot = changed[0].tolist()
            self.places[row, slot + 1 :] = self.places[row, slot:-1].clone()
            self.places[row, slot] = image
        self._cost = bank.cost.cpu()


def bank_of(state: object) -> Bank | None:
    """The first bank of a state: DPE's queues, TDA's positive cache; None where it has none."""
    parts = state if isinstance(state, tuple) else ()
    return next((part for part in parts if isinstance(part, Bank) and part.cost.shape[1]), None)


def sources(keys: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """For each key (E, D), the image (N, D) it came from, (E,), and whether the two are equal, (E,) bool.

    A key that is no image's own feature, such as a mean of several views, goes to the nearest by cosine.
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
    """The queues at each moment, `features` (N, D) being the images' own and `answers` the classes given to them.

    Moments that were traced need no features. With `place`, features get places on one t-SNE map of all moments,
    which is seeded.
    """
    kept, left_out = _shown_classes(moments, answers)
    found: dict[bytes, Tensor] = {}  # each feature once, however many moments it stays
    held: list[list[tuple[int, int, bytes]]] = []  # class, image, feature
    exact = total = older = 0
    for moment in moments:
        labels, slots = moment.bank.cost.cpu().isfinite().nonzero(as_tuple=True)
        chosen = torch.isin(labels, torch.tensor(kept, dtype=torch.long))
        if moment.places is not None:
            traced = moment.places[labels, slots] >= 0
            older = int((chosen & ~traced).sum())  # of the last moment
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
        marks = [key.numpy().tobytes() for key in keys]
        found |= dict(zip(marks, keys, strict=True))
        held.append(list(zip(labels.tolist(), images.tolist(), marks, strict=True)))
    places: dict[bytes, tuple[float, float]] = {}
    if place and len(found) >= FEWEST:
        places = dict(zip(found, tsne(torch.stack(list(found.values())), seed), strict=True))
    snapshots = [
        Snapshot(moment.images, [Queued(label, image, *places.get(mark, ())) for label, image, mark in entries])
        for moment, entries in zip(moments, held, strict=True)
    ]
    if features is None:
        text = "Each feature is shown with the image that brought it."
    elif exact == total:
        text = "Each feature is that of one image, found by equality."
    else:
        text = (
            "A feature is the mean of an image's confident views; the image shown with it is the one whose own feature "
            f"is nearest by cosine ({exact:,} of {total:,} are equal to it)."
        )
    if left_out:
        text += f" Shown are the {len(kept):,} classes most often answered; {left_out:,} more are left out."
    if older:
        text += f" {older:,} features from before this run are left out."
    return QueueMap(method, snapshots, text + (f" The map's t-SNE has seed {seed}." if places else ""))


def need_tsne() -> Any:
    """scikit-learn's t-SNE, or how to come by it."""
    try:
        from sklearn.manifold import TSNE
    except ImportError:
        raise MissingPart(
            "The map of the queues needs scikit-learn: pip install 'testtime[report]', or leave it out with --no-map."
        ) from None
    return TSNE


def tsne(features: Tensor, seed: int) -> list[tuple[float, float]]:
    """Places on a plane where neighbours by cosine stay neighbours: (E, D) -> E pairs."""
    perplexity = min(30.0, (len(features) - 1) / 3)
    fitted = need_tsne()(perplexity=perplexity, metric="cosine", init="pca", random_state=seed, n_jobs=1)
    places = fitted.fit_transform(features.double().numpy())
    return [(round(float(x), 3), round(float(y), 3)) for x, y in places]


def _shown_classes(moments: Sequence[Moment], answers: Sequence[int]) -> tuple[list[int], int]:
    """The classes whose queues are shown, most often answered first as long as there is room, and how many are not."""
    sizes: Counter[int] = Counter()
    for moment in moments:
        sizes.update(moment.bank.cost.cpu().isfinite().nonzero()[:, 0].tolist())
    frequency = Counter(answers)
    kept: list[int] = []
    room = PLACED
    for label in sorted(sizes, key=lambda c: (-frequency[c], c)):
        room -= sizes[label]
        if room < 0:
            break
        kept.append(label)
    return kept, len(sizes) - len(kept)

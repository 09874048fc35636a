"""What the page shows of a stream: the memory of each class, and a plane of prototypes and images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from testtime.ops import unit
from testtime.report.queues import bank_of, sources
from testtime.serve.store import Event, unpacked
from testtime.session.session import Session

IMAGES = 2000  # latest images that the features in a memory are looked for among
PLACED = 200  # latest images on the plane
CLASSES = 100  # most classes shown; the first ones


def queues(session: Session, images: Sequence[Event]) -> dict[str, Any]:
    """The images in the memory of each class, by their ids, with their entropies in nats; newest `images` first."""
    bank, names = bank_of(session.state), session.task.classnames[:CLASSES]
    if bank is None:
        return {"classes": [{"label": name, "slots": []} for name in names]}
    keys, costs = bank.keys[:CLASSES].cpu(), bank.cost[:CLASSES].cpu()
    filled = costs.isfinite()
    ids: list[int | None] = [None] * int(filled.sum())
    if images and ids:
        features = _features(images)
        found, _ = sources(keys[filled], features)
        near = (unit(keys[filled]) * features[found]).sum(1) > 0.999  # else the image is too old to be known
        ids = [
            images[place].number if sure else None for place, sure in zip(found.tolist(), near.tolist(), strict=True)
        ]
    rest = iter(ids)
    return {
        "classes": [
            {
                "label": name,
                "slots": [{"image": next(rest), "entropy": round(float(cost), 4)} for cost in row[row.isfinite()]],
            }
            for name, row in zip(names, costs, strict=True)
        ]
    }


def plane(session: Session, images: Sequence[Event]) -> dict[str, Any]:
    """Where prototypes and recent images lie, on the two axes along which the text prototypes vary most."""
    task, state = session.task, session.state
    frozen = task.text.cpu().double()
    centre = frozen.mean(0)
    _, _, axes = torch.linalg.svd(frozen - centre, full_matrices=False)
    axes = axes[:2].T  # (D, 2)

    def placed(rows: Tensor) -> list[list[float]]:
        spots = (rows.cpu().double() - centre) @ axes
        if spots.shape[1] < 2:  # two classes vary along one axis
            spots = torch.nn.functional.pad(spots, (0, 2 - spots.shape[1]))
        return [[round(x, 5), round(y, 5)] for x, y in spots.tolist()]

    now = unit(getattr(state, "text", task.text))[:CLASSES]
    bank = bank_of(state)
    visual: list[list[float] | None] = [None] * len(now)
    if bank is not None:
        keys, filled = bank.keys[:CLASSES].cpu(), bank.cost[:CLASSES].cpu().isfinite()
        means = unit((keys * filled[..., None]).sum(1) / filled.sum(1, keepdim=True).clamp_min(1))
        spots = placed(means)
        visual = [spot if seen else None for spot, seen in zip(spots, filled.any(1).tolist(), strict=True)]
    shown = images[:PLACED]
    return {
        "classes": [
            {"label": name, "prompt": start, "text": spot, "visual": other}
            for name, start, spot, other in zip(
                task.classnames, placed(frozen[:CLASSES]), placed(now), visual, strict=False
            )
        ],
        "images": [
            {"id": image.number, "label": image.label, "x": x, "y": y, "learned": image.learned}
            for image, (x, y) in zip(shown, placed(_features(shown)) if shown else [], strict=True)
        ],
    }


def _features(images: Sequence[Event]) -> Tensor:
    """The first views of images, (N, D)."""
    return torch.stack([unpacked(image.views or b"")[0] for image in images])

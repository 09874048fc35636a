"""What DPE's queues hold early and late in the stream, and how clustered it is (the paper's t-SNE figure)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from testtime.cells import CHUNK, Cell, Text
from testtime.datasets import Dataset
from testtime.engine import Session
from testtime.evaluate import Plan, described, recipe_of
from testtime.files import write_atomic
from testtime.ops import unit
from testtime.streams import shuffled
from testtime.types import InputError, Method, MissingPart, Task

QUEUE = 6  # features per class in the figure
SHARES = (1500 / 30300, 15000 / 30300)  # of the stream: the figure's two moments on Food101
COLOURED = 25  # classes that the figure shows in colour


class Held(NamedTuple):
    """The queues at one moment."""

    images: int  # seen so far
    features: Tensor  # (n, D) unit rows
    classes: Tensor  # (n,) whose queue each is in
    places: Tensor  # (n,) its image's place in the stream


def run_queues(plan: Plan, dataset: Dataset, moments: Sequence[int] | None = None) -> dict[str, Any]:
    """The queues' features at each moment with their places on a map, kept in a file once made.

    Moments are numbers of images; the shares of the stream that the paper's figure has, if left out.
    """
    entry = recipe_of(dataset)
    lab = plan.lab(dataset)
    method = plan.method("dpe", entry, {"queue": QUEUE})
    text = Text(plan.templates_of(entry), plan.descriptions_of(dataset))
    cell = Cell(method, text, plan.views_of("dpe", entry), plan.seeds[0])
    count = len(lab.indices)
    chosen = sorted({max(1, round(share * count)) for share in SHARES}) if moments is None else sorted(set(moments))
    if not chosen or chosen[0] < 1 or chosen[-1] > count:
        raise InputError(f"Moments {chosen}: give numbers of images from 1 to {count}.")
    path = lab.path(cell).with_name(f"queues-{'-'.join(map(str, chosen))}-{lab.path(cell).name}")
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    store = lab.store(cell.views, cell.seed)
    order = shuffled(len(store), cell.seed)
    task = lab.task(text)
    stream = (chunk.to(task.text.device) for chunk in store.chunks(order.tolist(), size=CHUNK))
    held = watch_queues(task, method, stream, chosen)
    assert store.labels is not None  # a dataset has labels
    labels = store.labels[order]
    result = {
        "bench": "tsne",
        "title": "What the queues hold",
        "facts": lab.facts(cell) | {"text": described(text.facts())},
        "moments": [_scored(moment, labels) for moment in held],
        "maps": _placed(held, cell.seed),
        "coloured": torch.randperm(task.classes, generator=torch.Generator().manual_seed(cell.seed))[
            :COLOURED
        ].tolist(),
    }
    write_atomic(path, json.dumps(result) + "\n")
    return result


def watch_queues(task: Task, method: Method, stream: Iterable[Tensor], moments: Sequence[int]) -> list[Held]:
    """The queues of DPE after each number of images; every entry is traced to its image."""
    session = Session(task, method)
    places = torch.full(session.state.queue.cost.shape, -1)
    wanted, found = set(moments), []
    for chunk in stream:
        for views in chunk:
            before = session.state.queue.cost
            session.scan(views[None])
            _trace(places, before, session.state.queue.cost, session.count - 1)
            if session.count in wanted:
                classes, slots = (places >= 0).nonzero(as_tuple=True)
                features = unit(session.state.queue.keys[classes, slots]).cpu()
                found.append(Held(session.count, features, classes, places[classes, slots]))
            if len(found) == len(wanted):
                return found
    return found


def _trace(places: Tensor, before: Tensor, after: Tensor, image: int) -> None:
    """Note in `places` (C, M) where an image went: rows are sorted, so it stands where the costs first differ."""
    changed = (before != after).nonzero()
    if len(changed):
        row, slot = changed[0].tolist()
        places[row, slot + 1 :] = places[row, slot:-1].clone()
        places[row, slot] = image


def _scored(held: Held, labels: Tensor) -> dict[str, Any]:
    """How clustered the queues are: cosine to the own class's mean and to the nearest other, and purity.

    Classes with one feature say nothing on clustering and are left out of both cosines.
    """
    classes = held.classes.unique()
    means = unit(torch.stack([held.features[held.classes == c].mean(0) for c in classes]))
    cosine = held.features @ means.T  # (n, classes)
    own = held.classes[:, None] == classes
    several = (own.sum(0) > 1)[own.int().argmax(1)]
    other = cosine.masked_fill(own, -1).max(1).values
    return {
        "images": held.images,
        "features": len(held.features),
        "classes": len(classes),
        "cosine_own": float(cosine[own][several].mean()) if several.any() else None,
        "cosine_other": float(other[several].mean()) if several.any() and len(classes) > 1 else None,
        "purity": float((labels[held.places] == held.classes).double().mean()),
    }


def _placed(held: Sequence[Held], seed: int) -> list[list[dict[str, Any]]]:
    """Each moment's entries with their place on one map of all moments (t-SNE)."""
    try:
        from sklearn.manifold import TSNE
    except ImportError:
        raise MissingPart("A map of features needs scikit-learn: pip install 'testtime[report]'") from None
    features = torch.cat([moment.features for moment in held])
    near = min(30.0, (len(features) - 1) / 3)
    flat = TSNE(perplexity=near, init="pca", random_state=seed, metric="cosine").fit_transform(features.numpy())
    parts = torch.from_numpy(flat).split([len(moment.features) for moment in held])
    return [
        [
            {"class": int(label), "image": int(place), "x": round(float(x), 4), "y": round(float(y), 4)}
            for label, place, (x, y) in zip(moment.classes, moment.places, part, strict=True)
        ]
        for moment, part in zip(held, parts, strict=True)
    ]


def queues_markdown(result: dict[str, Any]) -> str:
    """The moments as a page."""
    facts = result["facts"]
    lines = [
        f"# {result['title']}",
        "",
        f"{facts['dataset']}, {facts['encoder']}, {facts['views']} views, seed {facts['seed']}, queue of {QUEUE}. "
        f"Text: {facts['text']}.",
        "",
        "| images | features | classes | cosine to own mean | to nearest other mean | of the true class |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for moment in result["moments"]:
        own, other = (
            "" if moment[key] is None else f"{moment[key]:.4f}" for key in ("cosine_own", "cosine_other")
        )  # fmt: skip
        lines.append(
            f"| {moment['images']} | {moment['features']} | {moment['classes']} | {own} | {other} | "
            f"{100 * moment['purity']:.2f}% |"
        )
    return "\n".join(lines) + "\n"

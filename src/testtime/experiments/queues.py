"""What DPE's queues hold early and late in the stream, and how clustered it is (the paper's t-SNE figure)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from testtime.experiments.catalogue import EXPERIMENTS
from testtime.experiments.cells import stream_views
from testtime.experiments.jobs import Where
from testtime.experiments.lab import Record
from testtime.experiments.plan import Columns, Work, recipe_of
from testtime.experiments.tables import Sheet, described
from testtime.files import parse_json, write_atomic
from testtime.ops import unit
from testtime.report.data import Queued, QueueMap, Snapshot, Table, TablesReport
from testtime.report.formatting import count
from testtime.report.queues import FEWEST, PLACED, Tracer, tsne
from testtime.report.thumbnails import make_thumbnails
from testtime.session.order import shuffled
from testtime.session.session import Session
from testtime.types import InputError, Method, Task

SHARES = (1500 / 30300, 15000 / 30300)  # of the stream: the figure's two moments on Food101
COLOURED = 25  # classes that the figure shows in colour
HEAD = ("images", "features", "classes", "cosine to own mean", "to nearest other mean", "of the true class")


class Held(NamedTuple):
    """The queues at one moment."""

    images: int  # seen so far
    features: Tensor  # (n, D) unit rows
    classes: Tensor  # (n,) whose queue each is in
    positions: Tensor  # (n,) of its image in the stream


def run(work: Work) -> Record:
    """The queues' features at each moment with their coordinates on a map, cached in a file.

    Moments are numbers of images; by default the shares of the stream in the paper's figure. There is one plan, one
    dataset and one row.
    """
    ((plan,), (dataset,), (row,)) = work.plans.values(), work.columns.values(), work.rows
    if isinstance(plan, str) or isinstance(dataset, str):
        raise InputError(plan if isinstance(plan, str) else str(dataset))
    lab, made = plan.lab(dataset), plan.cells(row, dataset, recipe_of(dataset))
    if isinstance(made, str):
        raise InputError(made)
    cell, images = made[0], len(lab.indices)
    chosen = (
        sorted({max(1, round(share * images)) for share in SHARES})
        if work.moments is None
        else sorted(set(work.moments))
    )
    if not chosen or chosen[0] < 1 or chosen[-1] > images:
        raise InputError(f"Moments {chosen}: give numbers of images from 1 to {images}.")
    path = lab.path(cell).with_name(f"map-{'-'.join(map(str, chosen))}-{lab.path(cell).name}")
    if path.exists():
        return parse_json(path.read_bytes(), f"{path} (remove it to compute it again)", kind=dict)
    store = lab.store(cell.views, cell.seed)
    order = shuffled(len(store), cell.seed)
    task = lab.task(cell.text)
    stream = stream_views(store, order, Where(task.text.device, lab.report), f"{dataset.name}, {cell.method.name}")
    held = watch_queues(task, cell.method, stream, chosen)
    labels, rows = lab.labels_of(store)[order], lab.rows(store)
    coloured = torch.randperm(task.classes, generator=torch.Generator().manual_seed(cell.seed))[:COLOURED]
    result = {
        "bench": work.name,
        "title": work.experiment.title,
        "facts": lab.conditions(cell) | {"text": described(cell.text.conditions())},
        "moments": [_scored(moment, labels) for moment in held],
        "maps": _mapped(held, [rows[i] for i in order.tolist()], cell.seed),
        "coloured": coloured.tolist(),
    }
    write_atomic(path, json.dumps(result) + "\n")
    return result


def watch_queues(task: Task, method: Method, stream: Iterable[Tensor], moments: Sequence[int]) -> list[Held]:
    """The queues of DPE after each number of images; every entry is traced to its image."""
    session = Session(task, method)
    tracer = Tracer(session.state.queue)
    positions = tracer.places
    wanted, found = set(moments), []
    for chunk in stream:
        for views in chunk:
            session.scan(views[None])
            tracer.follow(session.state.queue, session.count - 1)
            if session.count in wanted:
                classes, slots = (positions >= 0).nonzero(as_tuple=True)
                features = unit(session.state.queue.keys[classes, slots]).cpu()
                found.append(Held(session.count, features, classes, positions[classes, slots]))
            if len(found) == len(wanted):
                return found
    return found


def _scored(held: Held, labels: Tensor) -> Record:
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
        "purity": float((labels[held.positions] == held.classes).double().mean()),
    }


def _mapped(held: Sequence[Held], rows: Sequence[int], seed: int) -> list[list[Record]]:
    """Each moment's entries with their coordinates on one map of all moments (t-SNE); `rows` are in stream order."""
    # an image's feature once, however many moments it stays
    found = {i: key for moment in held for i, key in zip(moment.positions.tolist(), moment.features, strict=True)}
    if len(found) < FEWEST:
        raise InputError(
            f"{count(len(found), 'feature')} on a map: too few; look at the queues later: --after 100,1000."
        )
    flat = dict(zip(found, tsne(torch.stack(list(found.values())), seed), strict=True))
    return [
        [
            {"class": label, "image": image, "row": rows[image], "x": flat[image][0], "y": flat[image][1]}
            for label, image in zip(moment.classes.tolist(), moment.positions.tolist(), strict=True)
        ]
        for moment in held
    ]


def sheets(result: Record) -> list[Sheet]:
    """The moments as one table."""
    conditions = result["facts"]
    return [Sheet(f"{_subtitle(conditions)}. Text: {conditions['text']}.", list(HEAD), _lines(result))]


def remarks(result: Record) -> list[str]:
    """There is no text below the table."""
    return []


def _lines(result: Record) -> list[list[str]]:
    """The moments as rows of text, under `HEAD`."""
    shown = []
    for moment in result["moments"]:
        cosines = ("" if moment[key] is None else f"{moment[key]:.4f}" for key in ("cosine_own", "cosine_other"))
        counts = (f"{moment[key]}" for key in ("images", "features", "classes"))
        shown.append([*counts, *cosines, f"{100 * moment['purity']:.2f}%"])
    return shown


def _subtitle(conditions: Record) -> str:
    views, queue = f"{conditions['views']} view{'s' * (conditions['views'] > 1)}", conditions["settings"]["queue"]
    return f"{conditions['dataset']}, {conditions['encoder']}, {views}, seed {conditions['seed']}, queue of {queue}"


def section(result: Record, columns: Columns) -> tuple[TablesReport, dict[str, str]]:
    """The moments for the page: their maps side by side, with the images that the queues hold; and the text used."""
    (dataset,) = columns.values()
    if isinstance(dataset, str):
        raise InputError(dataset)
    conditions, text = result["facts"], ""
    maps, coloured = result["maps"], set(result["coloured"])
    if sum(map(len, maps)) > PLACED:
        maps = [[entry for entry in entries if entry["class"] in coloured] for entries in maps]
        text = f"Shown {'is' if len(coloured) == 1 else 'are'} {count(len(coloured), 'class')}, chosen by the seed. "
    # the queues' last contents first, where there are more images than thumbnails
    rows = list(dict.fromkeys(entry["row"] for entries in reversed(maps) for entry in entries))
    number = {row: image for image, row in enumerate(rows)}
    snapshots = [
        Snapshot(moment["images"], [Queued(e["class"], number[e["row"]], e["x"], e["y"]) for e in entries])
        for moment, entries in zip(result["moments"], maps, strict=True)
    ]
    labels = dataset.labels or ()
    made = TablesReport(
        EXPERIMENTS[result["bench"]].heading,
        _subtitle(conditions),
        [
            Table(
                "How clustered they are",
                ["After", *(name.capitalize() for name in HEAD[1:])],
                [[f"{images} images", *more] for images, *more in _lines(result)],
            )
        ],
        {},
        queues=QueueMap("DPE", snapshots, f"{text}The map's t-SNE has seed {conditions['seed']}."),
        classnames=list(dataset.classnames),
        labels=[labels[row] for row in rows],
        names=[str(dataset.paths[row]) for row in rows],
        thumbnails=make_thumbnails({image: dataset.paths[row] for row, image in number.items()}),
        text="Each class keeps the features of its most confident images. The cosines show how close a feature is to "
        "the mean of its own class's queue, and to the nearest of the others.",
    )
    return made, {"Text": conditions["text"]}

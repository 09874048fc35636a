"""All checks in one pass: the machine first, then a sample of the images through the encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testtime.doctor.finding import Finding, fine
from testtime.doctor.machine import check_machine

if TYPE_CHECKING:
    from testtime.datasets import Dataset
    from testtime.doctor.images import Look
    from testtime.types import Encoder, Task

LIMIT = 200  # images that are looked at
FEATURES = ".safetensors"
Watch = Callable[[str], AbstractContextManager[object]]


def doctor(
    images: str | Path | None = None,
    classes: Sequence[str] | None = None,
    *,
    root: Path | None = None,
    encoder: str | Encoder = "offline",
    templates: Sequence[str] | None = None,
    device: str = "auto",
    limit: int = LIMIT,
    seed: int = 0,
    machine: bool = True,
    watch: Watch = lambda what: nullcontext(),
) -> list[Finding]:
    """The findings on the machine and, with `images`, on a sample of them, their classes and the encoder.

    `images` is what `testtime run` takes, or a feature file. At most `limit` images are drawn with `seed`, as many of
    each class as possible. `machine=False` leaves the machine out; `watch` is entered with a few words while something
    takes time.

    >>> [finding.id for finding in doctor() if finding.severity == "problem"]
    []
    """
    found = check_machine(device) if machine else []
    if images is None or any(finding.id == "torch" for finding in found):
        return found
    if limit < 1:
        from testtime.errors import InputError

        raise InputError(f"--limit {limit}: at least one image is needed.")
    if Path(images).suffix == FEATURES or (Path(images) / "index.json").is_file():
        return found + _judge_features(Path(images), limit, seed)
    return found + _judge_images(str(images), root, classes, encoder, templates, device, limit, seed, watch)


def _judge_features(file: Path, limit: int, seed: int) -> list[Finding]:
    """A file of stored features: its labels, names and model."""
    import torch

    from testtime.doctor import classes, images, model
    from testtime.encoding.store import Features

    store = Features(file)
    task = store.task()
    labels: list[int | None] = [None] * len(store) if store.labels is None else store.labels.tolist()
    order = images.spread(labels, limit, seed)
    rows = torch.cat([chunk[:, 0] for chunk in store.chunks(order)])
    names = task.classnames
    return [
        _sample(len(order), len(store), labels, seed),
        *images.check_labels_known(labels, names),
        *(classes.check_names(names, "") + classes.check_synonyms(names, task.text)),
        *model.check_features(task, rows, [labels[i] for i in order], _is_trained(task)),
    ]


def _judge_images(
    what: str,
    root: Path | None,
    given: Sequence[str] | None,
    encoder: str | Encoder,
    templates: Sequence[str] | None,
    device: str,
    limit: int,
    seed: int,
    watch: Watch,
) -> list[Finding]:
    from testtime.datasets import find_dataset, labels_among
    from testtime.doctor import classes, images
    from testtime.encoding.encoders import load_encoder
    from testtime.errors import InputError, MissingPart, UnknownName
    from testtime.text.prompts import check_classes

    data = find_dataset(what, root, labelled=False)
    if given is None and not data.classnames:
        names: tuple[str, ...] = ()
    else:
        names = check_classes(given or data.classnames, allow_duplicates=given is None)
    labels = labels_among(data, names) if names else [None] * len(data)
    partners = _partners(data, given, names, labels)
    found = [*_notes(data, given), *partners]
    wrong, templates = classes.check_templates(templates)
    found += [*wrong, *classes.check_names(names, " ".join(templates or ()))]
    told = any(finding.severity != "note" for finding in partners)  # why some labels are not known
    found += [one for one in images.check_labels_known(labels, names) if not (told and one.id == "part-labelled")]

    loaded: Encoder | None = None
    try:
        if isinstance(encoder, str):
            with watch(f"loading the encoder {encoder}"):
                loaded = load_encoder(encoder, device)
        else:
            loaded = encoder
    except UnknownName:
        raise
    except InputError as problem:
        missing = isinstance(problem, MissingPart)
        found.append(
            Finding(
                "encoder",
                "problem",
                str(problem).replace("\n", " "),
                "The encoder cannot be loaded, so only files and names were judged.",
                "Install or download what is missing." if missing else "Name the model that the weights are of.",
            )
        )
    order = images.spread(labels, limit, seed)
    with watch(f"looking at {len(order):,} images"):
        found += _look(data, labels, order, names, loaded, templates, seed)
    return [_sample(len(order), len(data), labels, seed), *found]


def _sample(taken: int, total: int, labels: Sequence[int | None], seed: int) -> Finding:
    if taken == total:
        return fine("sample", f"all {total:,} images were looked at")
    count = len(set(labels) - {None})
    over = f" over {count:,} classes" if count else ""
    return fine("sample", f"{taken:,} of {total:,} images, drawn{over} with seed {seed} (--limit, --seed)")


def _notes(data: Dataset, given: Sequence[str] | None) -> list[Finding]:
    """What the reader of the dataset has noted."""
    from testtime.datasets.dataset import UNNAMED

    lines = [line for line in data.notes if not line.startswith(UNNAMED) or given is None]
    return [_note(line) for line in lines]


def _note(line: str) -> Finding:
    seen = f"{line[0].upper()}{line[1:]}."
    if line.startswith("left out"):
        return Finding("left-out", "warning", seen, "They get no answer.", "Install or convert what matters.")
    why, fix = "The stream is not quite what its name says.", "Complete or correct the dataset if that is not meant."
    meant = line.startswith("the images are from") or (" frame" in line and " video" in line)
    return Finding("dataset", "note" if meant else "warning", seen, why, fix)


def _partners(
    data: Dataset, given: Sequence[str] | None, names: Sequence[str], labels: Sequence[int | None]
) -> list[Finding]:
    """Folders and classes without a partner, where classes are given and folders name others."""
    from testtime.datasets.matching import unmatched
    from testtime.doctor.classes import check_folders

    numbered = list(data.classnames) == [str(number) for number in range(len(data.classnames))]
    labelled = (data.labels is not None and data.classnames) or any(label is not None for label in labels)
    if given is None or numbered or not labelled:
        return []
    return check_folders(unmatched(data, names, labels), names)


def _look(
    data: Dataset,
    labels: Sequence[int | None],
    order: Sequence[int],
    names: Sequence[str],
    encoder: Encoder | None,
    templates: Sequence[str] | None,
    seed: int,
) -> list[Finding]:
    """The sample read once, looked at and encoded, and what that shows."""
    import numpy as np
    import torch

    from testtime.doctor import classes, images, model
    from testtime.encoding.stream import stream
    from testtime.errors import InputError
    from testtime.images.reading import read_image
    from testtime.text.prompts import build_task
    from testtime.types import ViewPlan

    looks: list[Look] = []
    unreadable: list[str] = []
    kept: list[int] = []

    def opened() -> Iterator[Any]:
        for index in order:
            try:
                image = read_image(data.paths[index])
            except InputError as problem:
                unreadable.append(str(problem))
                continue
            kept.append(index)
            looks.append(images.look(str(data.paths[index]), image))
            yield image

    sizes = [] if encoder is None else model.check_size(encoder)
    features: dict[int, torch.Tensor] = {}
    if encoder is None or sizes or not names:
        for _ in opened():
            pass
    else:
        for entry in stream(encoder, opened(), ViewPlan(seed=seed)):
            if entry.features is None:
                unreadable.append(str(entry.error))
            else:
                features[kept[entry.index]] = entry.features[0].cpu()
    side = None if encoder is None else encoder.preprocess.size
    found = images.check_looks(looks, unreadable, side)
    if encoder is None:
        return found
    pixels = np.concatenate([each.thumbnail.reshape(-1, 3) for each in looks]) if looks else None
    found += [*sizes, *model.check_preprocess(encoder, pixels)]
    if not names:
        return [*found, _no_classes()]
    task = build_task(encoder, names, templates, allow_duplicates=True)
    blind = classes.check_template_features(encoder, task.classnames, templates)
    found += blind or classes.check_synonyms(task.classnames, task.text)
    if features:
        rows = torch.stack(list(features.values()))
        found += model.check_features(task, rows, [labels[index] for index in features], _is_trained(task))
    return found


def _no_classes() -> Finding:
    return Finding(
        "no-classes",
        "note",
        "No classes are given, and the images are in no class folders.",
        "Names, prompts and the model were not judged.",
        "Add --classes cat,dog,fox or --classes-file FILE.",
    )


def _is_trained(task: Task) -> bool:
    """Whether the logit scale of a CLIP has left its value before training."""
    from testtime.doctor.model import INITIAL_SCALES

    clip = task.encoder.startswith(("open_clip:", "hf:"))
    return not (clip and any(abs(task.scale / start - 1) < 1e-3 for start in INITIAL_SCALES))

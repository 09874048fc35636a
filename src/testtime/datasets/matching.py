"""What to say before a run about images and classes that did not find each other by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from testtime.datasets.dataset import Dataset
from testtime.images.reading import class_numbers
from testtime.registry import closest, folded_name

MOST = 5  # names in a line


def unmatched(data: Dataset, classnames: Sequence[str], labels: Sequence[int | None]) -> list[str]:
    """Lines on which folders (or labels) and which classes found no partner, with the nearest names; often none.

    `labels` are those that `labels_among` found. Images in one folder, without labels, are nothing to remark on.

    >>> data = Dataset("pets", [Path("dogs/1.jpg"), Path("cat/2.jpg")], [1, 0], ["cat", "dogs"])
    >>> for line in unmatched(data, ["cat", "dog"], [None, 0]):
    ...     print(line)
    1 of 2 folders is named after no class, so its 1 image is not scored: dogs (1 image, nearest class: dog)
    1 of 2 classes has no images: dog (nearest folder: dogs)
    """
    groups, word = _groups(data, classnames, labels)
    without = Counter(group for group, label in zip(groups, labels, strict=True) if label is None)
    sizes = Counter(groups)
    lonely = [group for group in sizes if without[group] == sizes[group]]
    lines = []
    if len(lonely) == len(sizes):  # nothing is scored: one line, since a folder of albums is no mistake
        if len(sizes) > 1 or data.labels is not None:
            named = f"no {word} is named after a class" if word == "folder" else "no label is the name of a class"
            lines = [f"{named}, so nothing is scored; {word}s: {_listed(lonely, sizes, word, classnames)}"]
        return lines
    if lonely:
        images = sum(sizes[group] for group in lonely)
        one = len(lonely) == 1
        named = f"{'is' if one else 'are'} {'named after' if word == 'folder' else 'the name of'} no class"
        scored = f"{'its' if one else 'their'} {_images(images)} {'is' if images == 1 else 'are'} not scored"
        lines.append(
            f"{len(lonely):,} of {len(sizes):,} {word}s {named}, so {scored}: "
            f"{_listed(lonely, sizes, word, classnames)}"
        )
    found = set(labels)
    if missing := [name for number, name in enumerate(classnames) if number not in found]:
        near = {name: closest(folded_name(name), map(folded_name, lonely)) for name in missing[:MOST]}
        shown = [name + (f" (nearest {word}: {near[name]})" if near[name] else "") for name in missing[:MOST]]
        verb = "has" if len(missing) == 1 else "have"
        lines.append(
            f"{len(missing):,} of {len(classnames):,} classes {verb} no images: {_joined(shown, len(missing))}"
        )
    return lines


def _groups(data: Dataset, classnames: Sequence[str], labels: Sequence[int | None]) -> tuple[list[str], str]:
    """The name that each image was matched by, as in `labels_among`, and what such a name is: a folder or a label."""
    numbers = class_numbers(classnames)
    by_label = any(folded_name(name) in numbers for name in data.classnames) or set(labels) == {None}
    if data.labels is None or not by_label:
        return [Path(str(path)).parent.name for path in data.paths], "folder"
    names = [data.classnames[label] for label in data.labels]
    examples = dict(zip(names, data.paths, strict=True))
    inside = all(folded_name(name) in map(folded_name, Path(str(path)).parts) for name, path in examples.items())
    return names, "folder" if inside else "label"


def _images(count: int) -> str:
    return f"{count:,} image" + "s" * (count != 1)


def _listed(groups: Sequence[str], sizes: Mapping[str, int], word: str, classnames: Sequence[str]) -> str:
    folded = list(map(folded_name, classnames))
    shown = []
    for group in groups[:MOST]:
        near = closest(folded_name(group), folded)
        shown.append(f"{group} ({_images(sizes[group])}{f', nearest class: {near}' if near else ''})")
    return _joined(shown, len(groups))


def _joined(shown: Sequence[str], count: int) -> str:
    return ", ".join(shown) + (f" and {count - len(shown):,} more" if count > len(shown) else "")

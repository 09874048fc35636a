"""What to say before a run about images and classes that did not find each other by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from testtime.datasets.dataset import Dataset
from testtime.images.reading import class_numbers
from testtime.registry import closest, folded_name

MOST = 5  # names in a line


class Unmatched(NamedTuple):
    """What found no partner by name."""

    word: str  # what images were matched by: their folder or their label
    sizes: Counter[str]  # the images of each folder or label
    groups: list[str]  # folders or labels of which no image has a class
    classes: list[str]  # classes without images

    @property
    def alone(self) -> bool:
        """Whether no folder or label at all is the name of a class."""
        return len(self.groups) == len(self.sizes)


def unmatched(data: Dataset, classnames: Sequence[str], labels: Sequence[int | None]) -> Unmatched:
    """Folders (or labels) and classes without a partner; `labels` are those that `labels_among` found."""
    groups, word = _groups(data, classnames, labels)
    without, sizes, found = Counter(groups), Counter(groups), set(labels)
    without.subtract(group for group, label in zip(groups, labels, strict=True) if label is not None)
    lonely = [group for group in sizes if without[group] == sizes[group]]
    return Unmatched(word, sizes, lonely, [name for number, name in enumerate(classnames) if number not in found])


def describe(data: Dataset, classnames: Sequence[str], labels: Sequence[int | None]) -> list[str]:
    """Lines on what found no partner, with the nearest names; often none.

    Images in one folder, without labels, are nothing to remark on.

    >>> data = Dataset("pets", [Path("dogs/1.jpg"), Path("cat/2.jpg")], [1, 0], ["cat", "dogs"])
    >>> for line in describe(data, ["cat", "dog"], [None, 0]):
    ...     print(line)
    1 of 2 folders is named after no class, so its 1 image is not scored: dogs (1 image, nearest class: dog)
    1 of 2 classes has no images: dog (nearest folder: dogs)
    """
    word, sizes, lonely, missing = found = unmatched(data, classnames, labels)
    if found.alone:  # nothing is scored: one line, since a folder of albums is no mistake
        if len(sizes) == 1 and data.labels is None:
            return []
        named = f"no {word} is named after a class" if word == "folder" else "no label is the name of a class"
        return [f"{named}, so nothing is scored; {word}s: {_listed(lonely, sizes, classnames)}"]
    lines = []
    if lonely:
        images = sum(sizes[group] for group in lonely)
        one = len(lonely) == 1
        named = f"{'is' if one else 'are'} {'named after' if word == 'folder' else 'the name of'} no class"
        scored = f"{'its' if one else 'their'} {_images(images)} {'is' if images == 1 else 'are'} not scored"
        lines.append(
            f"{len(lonely):,} of {len(sizes):,} {word}s {named}, so {scored}: {_listed(lonely, sizes, classnames)}"
        )
    if missing:
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


def _listed(groups: Sequence[str], sizes: Mapping[str, int], classnames: Sequence[str]) -> str:
    folded = list(map(folded_name, classnames))
    shown = []
    for group in groups[:MOST]:
        near = closest(folded_name(group), folded)
        shown.append(f"{group} ({_images(sizes[group])}{f', nearest class: {near}' if near else ''})")
    return _joined(shown, len(groups))


def _joined(shown: Sequence[str], count: int) -> str:
    return ", ".join(shown) + (f" and {count - len(shown):,} more" if count > len(shown) else "")

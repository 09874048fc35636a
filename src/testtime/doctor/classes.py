"""Class names and prompts: names without a folder, names alike or empty of meaning, prompts that ignore the class."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import combinations

from torch import Tensor

from testtime.datasets.matching import Unmatched
from testtime.doctor.finding import Finding, fine, some
from testtime.registry import folded_name
from testtime.text.templates import PROMPTS
from testtime.types import Encoder

# distance of two names' texts (1 - cosine), as a share of the mean distance, below which they count as synonyms. With
# MiniLM the closest two of Caltech101's hundred classes, 'cougar body' and 'cougar face', have 0.13; 'car' and
# 'automobile' 0.09, 'tv' and 'television' 0.03
SYNONYMS = 0.11
FEWEST_NAMES = 5  # classes from which there is a mean distance to compare with
# share of the distance between texts under "a photo of a {}." that a template must keep; with MiniLM our own templates
# keep 0.62 and more, and a class that is cut off at the last token keeps 0
KEPT = 0.1
CLOSE = 0.75  # similarity (difflib) of two names from which one is taken for a misspelling of the other
EMPTY = re.compile(r"(class|label|category|cat|id|folder|group|type|c|k)?[ _-]*\d+|n\d{8}", re.IGNORECASE)
PLACEHOLDER = re.compile(r"%s|\{[^{}]+\}|\[[^\[\]]+\]|<[^<>]+>|\bCLASS(NAME)?\b")
DEFAULT = "a photo of a {}."


def check_folders(found: Unmatched, classes: Sequence[str]) -> list[Finding]:
    """Folders and classes without a partner."""
    folders, lost, without = found.sizes, found.groups, found.classes
    by_name = {folded_name(name): name for name in without}
    close = {name: get_close_matches(folded_name(name), by_name, n=1, cutoff=CLOSE) for name in lost}
    nearest = {name: by_name[names[0]] for name, names in close.items() if names}
    if not lost:
        if not without:
            return [fine("folders", f"each of {len(classes):,} classes has its folder")]
        return [
            Finding(
                "folders",
                "note",
                f"{len(without):,} of {len(classes):,} classes have no folder: {some(without)}.",
                "They can only be wrong answers.",
                "Nothing to do if that is meant; else remove them from the classes.",
            )
        ]
    pairs = ", ".join(f"'{folder}' (class '{name}'?)" for folder, name in list(nearest.items())[:3])
    others = [name for name in lost if name not in nearest]
    listed = "; ".join(filter(None, [pairs, some(others)]))
    rest = [name for name in without if name not in nearest.values()]
    if found.alone:
        seen = f"None of {len(folders):,} folders is named after a class: {listed}."
    else:
        seen = (
            f"{len(lost):,} of {len(folders):,} folders {'match' if len(lost) > 1 else 'matches'} no class: {listed}."
        )
    return [
        Finding(
            "folders",
            "problem" if nearest or found.alone else "warning",
            seen + (f" Classes without a folder: {some(rest)}." if rest else ""),
            "Their images get an answer, but cannot be scored.",
            "Write classes and folders alike, or leave out --classes: the folders then name them.",
        )
    ]


def check_names(names: Sequence[str], template: str) -> list[Finding]:
    """Names that mean nothing, and names that differ only in writing."""
    found = []
    empty = [name for name in names if EMPTY.fullmatch(name.strip())]
    if empty and not re.search(r"number|digit|numeral", template):
        ids = all(re.fullmatch(r"n\d{8}", name) for name in empty)
        found.append(
            Finding(
                "empty-names",
                "problem" if 2 * len(empty) > len(names) else "warning",
                f"{len(empty):,} of {len(names):,} class names say nothing: {some(empty)}.",
                "The text tower can only match what a name means; "
                + ("WordNet ids mean nothing to it." if ids else "a number means nothing to it."),
                "Write the real names: --classes-file FILE, one per line in the order of the labels.",
            )
        )
    pairs = [(a, b) for a, b in combinations(names, 2) if _written_alike(a, b)]
    if pairs:
        found.append(_alike("names-alike", pairs, "differ only in case, spaces or a plural"))
    return found


def _written_alike(a: str, b: str) -> bool:
    return _stem(a) == _stem(b)


def _stem(name: str) -> str:
    """A name without case, spaces, hyphens and plural endings."""
    words = folded_name(name.replace("-", " ")).split()
    return "".join(_singular(word) for word in words)


def _singular(word: str) -> str:
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 4 and word.endswith(("ches", "shes", "sses", "xes", "zes")):
        return word[:-2]
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def check_synonyms(names: Sequence[str], text: Tensor) -> list[Finding]:
    """Names whose texts (C, D), unit rows, the encoder can hardly tell apart."""
    count = len(names)
    if count < FEWEST_NAMES:
        return []
    distances = 1 - text @ text.T
    mean = distances.sum() / (count * (count - 1))  # the diagonal is 0
    close = (distances < SYNONYMS * mean).triu(1).nonzero().tolist()
    pairs = [(names[i], names[j]) for i, j in close if not _written_alike(names[i], names[j])]
    if not pairs:
        return []
    return [_alike("synonyms", pairs, "mean nearly the same to the text tower")]


def _alike(id: str, pairs: Sequence[tuple[str, str]], how: str) -> Finding:
    listed = "; ".join(f"'{a}' and '{b}'" for a, b in pairs[:3])
    more = f"; and {len(pairs) - 3:,} more" if len(pairs) > 3 else ""
    return Finding(
        id,
        "warning",
        f"Class names that {how}: {listed}{more}.",
        "Their prototypes nearly coincide, so answers between them are a coin toss.",
        "Merge the classes, or say what tells them apart: 'crane bird', 'construction crane'.",
    )


# Prompts


def check_templates(templates: Sequence[str] | None) -> tuple[list[Finding], list[str] | None]:
    """What is wrong with templates as they are written, and those that can be used; None for the default."""
    if templates is None:
        return [], None
    found, usable = [], []
    for template in templates:
        holes = template.count("{}")
        if holes == 0 and " " not in template and not PLACEHOLDER.search(template):
            PROMPTS.find(template)  # the name of a set, or an error that lists them
        elif holes == 0:
            written = PLACEHOLDER.search(template)
            fixed = template.replace(written[0], "{}") if written else f"{template.rstrip(' .')} {{}}."
            found.append(
                Finding(
                    "template",
                    "problem",
                    f"The template '{template}' has no {{}} for the class"
                    + (f"; '{written[0]}' is not replaced." if written else "."),
                    "All classes would share one text, and 'run' refuses it.",
                    f"--template '{fixed}'",
                )
            )
            continue
        elif holes > 1:
            found.append(
                Finding(
                    "template",
                    "warning",
                    f"The template '{template}' has {holes} times {{}}; each becomes the class.",
                    "CLIP was trained on captions that name a thing once.",
                    f"Keep the first: --template '{template.partition('{}')[0]}{{}}.'",
                )
            )
        usable.append(template)
    return found, usable or None


def check_template_features(encoder: Encoder, names: Sequence[str], templates: Sequence[str] | None) -> list[Finding]:
    """Templates under which the texts of the classes are much closer than under "a photo of a {}."."""
    patterns = [template for template in templates or () if "{}" in template and template != DEFAULT][:8]
    if not patterns or len(names) < 2:
        return []
    names = list(names)[:50]
    rows = encoder.encode_texts([pattern.replace("{}", name) for pattern in (DEFAULT, *patterns) for name in names])
    spread = [_spread(rows_of) for rows_of in rows.double().split(len(names))]
    return [
        Finding(
            "template-blind",
            "problem" if kept < KEPT / 10 else "warning",
            f"Under the template '{pattern[:50] + '...' * (len(pattern) > 50)}' the texts of the classes keep "
            f"{kept:.1%} of the distance that they have under '{DEFAULT}'.",
            "The rest of the sentence hides the class, or cuts it off: CLIP reads 77 tokens.",
            "Shorten it, and name the class early: --template 'a photo of a {}, a type of pet.'",
        )
        for pattern, kept in zip(patterns, (s / max(spread[0], 1e-12) for s in spread[1:]), strict=True)
        if kept < KEPT
    ]


def _spread(rows: Tensor) -> float:
    """The mean squared distance of unit rows from their mean."""
    return float((rows - rows.mean(0)).square().sum(1).mean())

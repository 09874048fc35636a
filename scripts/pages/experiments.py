"""The page on experiments: which there are, and the published numbers that they are laid beside."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from pages import NOTICE, table
from testtime.bench import SYSTEMS

SYSTEMS_WORDS = """
## Every system over one dataset

<!-- parsed only: takes minutes on real photographs -->

```sh
testtime bench systems caltech-101/ --encoder offline --out runs/systems
```

The folder holds labelled images: class folders, a `split_zhou_*.json`, or anything else that [has labels](images.md).
Features are encoded once and every system runs over them; the table gives accuracy, the gain over the first row,
milliseconds per image, and the memory of the run at its peak and of the state. Each finished cell is a file in `--out`,
so a run that was stopped goes on where it was.
"""

RECIPES_WORDS = """
## Methods, datasets, seeds

<!-- parsed only: takes minutes on real photographs -->

```sh
testtime eval caltech-101/ --encoder offline --methods zeroshot,tda,dpe --seeds 1,2,3 --out runs/caltech
testtime eval dtd eurosat --root ~/datasets --methods zeroshot,dpe,dpe:paper --track per-dataset
```

`testtime eval` gives the mean over seeds, and the spread, of every method on every dataset. Views are encoded once and
kept in `--out`, and so is each finished cell. `results.json` and `results.md` hold no times: the same command gives the
same bytes, however often it was interrupted.

Two switches say what is being reproduced:

- `--track one-setting` (the default) gives a method the same settings on every dataset. `--track per-dataset` takes
  those that its authors chose for each one; they are in `testtime/recipes`.
- `--protocol released` (the default) takes views, templates and DPE from the released code, `--protocol paper` from the
  paper.

A dataset of yours has no recipe: it gets one view unless `--views` says otherwise, and only one track.

## The paper's tables and figures

<!-- parsed only: takes minutes to days, by the dataset -->

```sh
testtime bench list
testtime bench components caltech-101/ --encoder offline --out runs/caltech
testtime bench ood ~/datasets --dry-run
testtime bench ood ~/datasets --out runs/ood
```

An experiment is a table of rows; each row is a method with some settings and some text. Measured numbers are printed
with the published ones beside them where the paper has them, and a row that cannot run says why. `--dry-run` says what
is still to do and what it will cost.
"""


def page() -> str:
    """The page, in Markdown."""
    lines = ["# Experiments", "", NOTICE, SYSTEMS_WORDS]
    rows = [[s.name, f"`{s.method}`", "learned (`--prompts`)" if s.coop else f"`{s.templates}`"] for s in SYSTEMS]
    lines += [table(["system", "method", "prompts"], rows), ""]
    if find_spec("testtime.recipes") is not None:
        lines += _recipes()
    return "\n".join(lines).rstrip() + "\n"


def _recipes() -> list[str]:
    """The declarative experiments, and the tables of the paper."""
    from testtime import recipes
    from testtime.bench import EXPERIMENTS

    rows = [
        [f"`{name}`", entry.title, f"[{entry.table}](#{_anchor(entry.table)})" if entry.table else "", entry.note]
        for name, entry in EXPERIMENTS.items()
    ]
    lines = [RECIPES_WORDS, table(["name", "what it shows", "published in", ""], rows), ""]
    lines += [
        "## Published numbers",
        "",
        "Accuracy in percent as the paper of DPE prints it, by the label of each table in its source. Nothing here was "
        "measured by testtime; the commands above print what is, beside these.",
    ]
    for label, published in recipes.published().items():
        lines += ["", f"### {label} {{ #{_anchor(label)} }}", *_published(published, recipes.recipes())]
    return lines


def _published(published: Any, recipes: Any) -> list[str]:
    """One table of the paper for each backbone in it."""
    titles = [recipes[column].title if column in recipes else column for column in published.columns]
    lines = []
    if published.paragraph:
        lines += ["", f'From the paragraph "{published.paragraph}": points gained over the first row.']
    for backbone, methods in published.rows.items():
        rows = []
        for name, values in methods.items():
            spread = published.spread.get(backbone, {}).get(name)
            cells = [f"{value:.2f}" for value in values]
            if spread:
                cells = [f"{cell} ± {width:.2f}" for cell, width in zip(cells, spread, strict=True)]
            rows.append([name, *cells, *([published.time.get(name, "")] if published.time else [])])
        head = [backbone, *titles, *(["testing time"] if published.time else [])]
        lines += ["", table(head, rows)]
    return lines


def _anchor(label: str) -> str:
    return "published-" + "".join(letter if letter.isalnum() else "-" for letter in label)

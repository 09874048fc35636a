"""The tables of the page on experiments: the experiments, their settings, and the published numbers."""

from __future__ import annotations

import re

from pages import table
from testtime.experiments import recipes
from testtime.experiments.catalogue import EXPERIMENTS, SYSTEMS, TEXTS
from testtime.experiments.recipes import Published

# settings of a recipe by method, and their column headings
SETTINGS = {
    "dpe": {"alpha": "alpha", "beta": "beta", "lr_text": "lr", "align_weight": "lambda"},
    "tda": {"pos_alpha": "alpha", "pos_beta": "beta"},
}


def experiments() -> str:
    """Every experiment: what it shows, and where its published numbers are."""
    rows = []
    for name, entry in EXPERIMENTS.items():
        where = f"[{entry.place}](#{_anchor(entry.place)})" if entry.table else entry.place
        rows.append([f"`{name}`", entry.title, where, " ".join([f"{len(entry.rows)} rows.", entry.note]).strip()])
    return table(["name", "what it shows", "in the paper", ""], rows) + "\n"


def systems() -> str:
    """Every system that `bench systems` runs."""
    rows = [[row.label, f"`{row.method}`", TEXTS[row.text]] for row in SYSTEMS if not row.invalid]
    return table(["system", "method", "prompts"], rows) + "\n"


def settings() -> str:
    """Each benchmark's settings and views."""
    head = [f"{method} {short}" for method, named in SETTINGS.items() for short in named.values()]
    rows = []
    for name, recipe in recipes.recipes().items():
        chosen = [f"{recipe.settings[method][key]:g}" for method, named in SETTINGS.items() for key in named]
        views = [f"{made.count}{', AugMix' * made.augmix}" for made in recipe.views.values()]
        rows.append([f"`{name}`", *chosen, *views])
    return table(["dataset", *head, *(f"views, {name}" for name in recipes.PROTOCOLS)], rows) + "\n"


def published() -> str:
    """Every table of the paper."""
    shown = {entry.table: entry for entry in EXPERIMENTS.values()}
    parts = [
        f"### {shown[key].heading} {{ #{_anchor(shown[key].place)} }}\n\n{_table(found)}\n"
        for key, found in recipes.published().items()
    ]
    return "\n".join(parts)


def _table(published: Published) -> str:
    """One table of the paper, for each of its backbones."""
    known = recipes.recipes()
    titles = [known[column].title if column in known else column for column in published.columns]
    parts = []
    if published.paragraph:
        parts.append(f'From the paragraph "{published.paragraph}": points gained over the first row.')
    for backbone, methods in published.rows.items():
        rows = []
        for name, values in methods.items():
            spread = published.spread.get(backbone, {}).get(name)
            cells = [f"{value:.2f}" for value in values]
            if spread:
                cells = [f"{cell} ± {width:.2f}" for cell, width in zip(cells, spread, strict=True)]
            rows.append([name, *cells, *([published.time.get(name, "")] if published.time else [])])
        parts.append(table([backbone, *titles, *(["testing time"] if published.time else [])], rows))
    return "\n\n".join(parts)


def _anchor(place: str) -> str:
    return "published-" + "-".join(re.findall(r"\w+", place)).lower()

"""Recipes: each benchmark's settings and views as data, and the published numbers to compare with.

One TOML file for each dataset, `methods.toml` for what applies to all of them, `published.toml` for the paper's tables.
A dataset's size and prompts are in `testtime.datasets`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from testtime.datasets.benchmarks import Benchmark, benchmark, folded
from testtime.registry import method_class, read_setting, split_precision, unknown
from testtime.types import InputError, ViewPlan

TRACKS = ("one-setting", "per-dataset")
PROTOCOLS = ("released", "paper")  # as the released code does it, or as the paper prints it
GROUPS = ("imagenet", "variants", "cross")
MEANS = ("average", "ood-average")  # columns of tables that are not datasets

# encoders for which the paper has published numbers
BACKBONES = {
    "open_clip:RN50/openai": "RN50",
    "open_clip:RN50-quickgelu/openai": "RN50",
    "open_clip:ViT-B-16/openai": "ViT-B/16",
    "open_clip:ViT-B-16-quickgelu/openai": "ViT-B/16",
    "open_clip:ViT-L-14/laion2b_s32b_b82k": "OpenCLIP ViT-L/14",
}


class Recipe(NamedTuple):
    """Each method's settings for one benchmark."""

    name: str
    title: str  # as written in the paper
    group: str
    views: Mapping[str, ViewPlan]  # by protocol
    settings: Mapping[str, Mapping[str, Any]]  # per dataset, by method

    @property
    def benchmark(self) -> Benchmark:
        """The benchmark's size, folders and source."""
        return benchmark(self.name)

    @property
    def aliases(self) -> frozenset[str]:
        """All its names, normalised."""
        return frozenset(folded(name) for name in (self.name, self.title, *self.benchmark.folders))


class Published(NamedTuple):
    """One table of the paper, accuracy in percent."""

    table: str  # its key
    columns: tuple[str, ...]
    rows: Mapping[str, Mapping[str, tuple[float, ...]]]  # by backbone, by row
    spread: Mapping[str, Mapping[str, tuple[float, ...]]]
    time: Mapping[str, str]  # testing time, by row
    paragraph: str  # where the numbers are, if not in a table
    gain: bool  # whether the numbers are points above the first row

    def backbone(self, encoder: str) -> str:
        """The backbone to compare an encoder with: its own, or the table's first."""
        here = backbone_of(encoder)
        return here if here in self.rows else next(iter(self.rows))

    def value(self, backbone: str, row: str, column: str) -> float | None:
        """The number of a cell, None if the paper has none."""
        found = self.rows.get(backbone, {}).get(row)
        return None if found is None or column not in self.columns else found[self.columns.index(column)]


def backbone_of(encoder: str) -> str:
    """The paper's name of an encoder's backbone, whatever its precision; empty if it has none."""
    return BACKBONES.get(split_precision(encoder)[0], "")


def recipe(name: str) -> Recipe:
    """The recipe of a benchmark by its short name."""
    if name not in recipes():
        raise unknown("dataset", name, recipes())
    return recipes()[name]


def find_recipe(name: str, classes: int | None = None) -> Recipe | None:
    """The recipe of the benchmark with this name (for example a folder's); None for your own dataset.

    With `classes`, a folder that only shares the name of a benchmark does not match.
    """
    found = next((entry for entry in recipes().values() if folded(name) in entry.aliases), None)
    return found if found is None or classes in (None, found.benchmark.classes) else None


@cache
def recipes() -> Mapping[str, Recipe]:
    """All recipes by short name."""
    folder = files(__name__)
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".toml"))
    return {
        name.removesuffix(".toml"): read_recipe(name.removesuffix(".toml"), folder.joinpath(name).read_text("utf-8"))
        for name in names
        if name not in ("methods.toml", "published.toml")
    }


@cache
def published() -> Mapping[str, Published]:
    """The paper's tables by label."""
    tables = tomllib.loads(files(__name__).joinpath("published.toml").read_text("utf-8"))
    return {label: _published(label, table) for label, table in tables.items()}


def track_settings(method: str, track: str, found: Recipe | None) -> dict[str, Any]:
    """What a track sets for a method: the one setting of all datasets, or the dataset's own."""
    if track not in TRACKS:
        raise unknown("track", track, TRACKS)
    if track == "one-setting":
        return dict(_methods()["one-setting"].get(method, {}))
    if found is None:
        raise InputError(
            "Track 'per-dataset' needs a benchmark with a recipe, and this dataset has none; use --track one-setting."
        )
    return dict(found.settings.get(method, {}))


def views_of(method: str, found: Recipe | None, protocol: str = "released") -> ViewPlan:
    """The views a method gets on a dataset; your own dataset has one view."""
    if protocol not in PROTOCOLS:
        raise unknown("protocol", protocol, PROTOCOLS)
    if found is None:
        return ViewPlan()
    own = _methods()["views"].get(method, {}) if protocol == "released" else {}
    for name in (found.name, found.group):  # a group may have the name of its only dataset
        if name in own:
            return ViewPlan(**own[name])
    return found.views[protocol]


def seeds_of(protocol: str) -> tuple[int, ...]:
    """The seeds of a protocol's runs."""
    if protocol not in PROTOCOLS:
        raise unknown("protocol", protocol, PROTOCOLS)
    return tuple(_methods()["seeds"][protocol])


def read_recipe(name: str, text: str) -> Recipe:
    """A recipe from TOML, checked: errors name a setting that its method lacks, or a missing field."""
    try:
        entry = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise InputError(f"Recipe '{name}' is not TOML: {problem}") from None
    wanted = {"title", "group", "views", "per-dataset"}
    if different := wanted ^ entry.keys():
        what = "lacks" if different & wanted else "has an unknown entry"
        raise InputError(f"Recipe '{name}' {what} '{sorted(different & wanted or different)[0]}'.")
    if entry["group"] not in GROUPS:
        raise unknown(f"group in recipe '{name}'", entry["group"], GROUPS)
    for protocol in PROTOCOLS:
        if protocol not in entry["views"]:
            raise InputError(f"Recipe '{name}' lacks views for '{protocol}'.")
    return Recipe(
        name,
        entry["title"],
        entry["group"],
        {protocol: ViewPlan(**entry["views"][protocol]) for protocol in PROTOCOLS},
        {method: _settings(method, chosen) for method, chosen in entry["per-dataset"].items()},
    )


@cache
def _methods() -> dict[str, Any]:
    entry = tomllib.loads(files(__name__).joinpath("methods.toml").read_text("utf-8"))
    entry["one-setting"] = {method: _settings(method, chosen) for method, chosen in entry["one-setting"].items()}
    return entry


def _settings(method: str, chosen: Mapping[str, object]) -> dict[str, Any]:
    """Settings with the method's types; an unknown method or setting is an error."""
    cls = method_class(method)
    return {key: read_setting(cls, key, value) for key, value in chosen.items()}


def _published(label: str, table: Mapping[str, Any]) -> Published:
    columns = tuple(table["columns"])
    rows, spread = table["rows"], table.get("spread", {})
    for column in columns:
        if column not in (*recipes(), *MEANS):
            raise unknown(f"column of {label}", column, [*recipes(), *MEANS])
    for part in (rows, spread):
        for methods in part.values():
            if wrong := [row for row, values in methods.items() if len(values) != len(columns)]:
                raise InputError(f"{label}: row '{wrong[0]}' does not have {len(columns)} numbers.")
    return Published(
        label, columns, rows, spread, table.get("time", {}), table.get("paragraph", ""), table.get("gain", False)
    )

from __future__ import annotations

import re
from pathlib import Path

import pytest

from testtime import registry
from testtime.datasets import templates
from testtime.experiments import recipes
from testtime.experiments.catalogue import EXPERIMENTS
from testtime.experiments.recipes import find_recipe, published, read_recipe, recipe
from testtime.types import InputError, UnknownName, ViewPlan

PAPER = Path(__file__).parents[2] / "shared" / "paper" / "dpe.tex"


@pytest.fixture(scope="module")
def paper() -> str:
    if not PAPER.exists():
        pytest.skip(f"no file {PAPER}")
    return PAPER.read_text()


def block(paper: str, label: str) -> str:
    """The LaTeX of the innermost table or figure with a label."""
    at = paper.index(f"\\label{{{label}}}")
    openings = [m for m in re.finditer(r"\\begin\{(wraptable|table\*?|figure|minipage)\}", paper[:at])]
    for opening in reversed(openings):
        end = paper.find(f"\\end{{{opening[1]}}}", opening.end())
        if end > at:
            return paper[opening.start() : end]
    raise AssertionError(f"no table around {label}")


def numbers(latex: str) -> list[str]:
    return re.findall(r"(?<![\d.])\d+\.\d\d(?!\d)", re.sub(r"\\textbf\{([^}]*)\}|[{}]", r"\1", latex))


def consecutive(wanted: list[str], found: list[str]) -> bool:
    return any(found[i : i + len(wanted)] == wanted for i in range(len(found)))


def test_every_published_number_is_in_its_table(paper) -> None:
    checked = 0
    for label, table in published().items():
        if table.paragraph:
            start = paper.index(f"\\textbf{{{table.paragraph}}}")
            latex = paper[start : paper.index("\n\n", start)]
        else:
            latex = block(paper, label)
        found = numbers(latex)
        for part in (table.rows, table.spread):
            for methods in part.values():
                for row, values in methods.items():
                    assert consecutive([f"{value:.2f}" for value in values], found), (label, row)
                    checked += len(values)
        for row, time in table.time.items():
            assert re.search(rf"{row}.*&\s*{re.escape(time)}\s*&", latex), (label, row)
    assert checked > 300


def test_tables_and_figures_have_the_numbers_of_the_paper(paper) -> None:
    """Numbered in the order of their captions; the appendix starts again, with its section's letter."""
    places, start = {}, paper.index("\\appendix")
    for part, letter in ((paper[:start], ""), (paper[start : paper.index("\\section{Further Discussions")], "A")):
        counts = {"Table": 0, "Figure": 0}
        for caption in re.finditer(r"\\caption\{", part):
            before = part[: caption.start()]
            kinds = re.findall(r"\\begin\{(?:wrap)?(table|figure)\*?\}|@captype\{(table)\}", before)
            kind = "".join(kinds[-1]).capitalize()
            counts[kind] += 1
            label = re.search(r"\\label\{((?:tab|table|fig):[^}]*)\}", part[caption.start() :])
            places[label[1]] = f"{kind} {letter}{counts[kind]}"
    for experiment in EXPERIMENTS.values():
        if experiment.table:
            label, _, side = experiment.table.partition(" ")
            assert experiment.place == places[label] + f", {side}" * bool(side)
    assert {EXPERIMENTS[name].place.partition(",")[0] for name in ("tau-queue", "lambda")} == {places["fig:ablation"]}
    assert EXPERIMENTS["tsne"].place == places["fig:tsne"]


def test_rows_of_tables_are_beside_their_names(paper) -> None:
    names = {"CLIP": "CLIP", "DPE": r"(?:DPE \(Ours\)|Ours)"}
    for label in ("tab:ood-main", "tab:fine-grained", "tab:ood-openclip"):
        latex = re.sub(r"\s*\n\s*(?=&)", " ", block(paper, label))
        lines = [line for line in latex.splitlines() if "&" in line]
        for methods in published()[label].rows.values():
            for row, values in methods.items():
                wanted = [f"{value:.2f}" for value in values]
                mine = [line for line in lines if re.search(names.get(row, re.escape(row)), line)]
                assert any(numbers(line) == wanted for line in mine), (label, row)


def test_sizes_and_printed_templates_are_those_of_the_paper(paper) -> None:
    sizes, prompts = block(paper, "tab:dataset"), block(paper, "tab:prompt").replace("\\{\\texttt{CLASS}\\}", "{}")
    for entry in recipes.recipes().values():
        line = next(line for line in sizes.splitlines() if line.startswith(f"{entry.title}~"))
        cells = [cell.strip() for cell in line.split("&")]
        assert (cells[1], cells[4]) == (f"{entry.benchmark.classes:,}", f"{entry.benchmark.images:,}"), entry.name
        printed = templates(entry.name, "paper")
        for template in printed:
            assert f"``{template}''" in prompts, (entry.name, template)
        if entry.group == "cross":
            mine = next(line for line in prompts.splitlines() if line.startswith(f"{entry.title}~"))
            assert all(f"``{template}''" in mine for template in printed)


def test_there_is_a_recipe_for_each_of_the_fifteen_benchmarks() -> None:
    groups = [entry.group for entry in recipes.recipes().values()]
    assert (groups.count("imagenet"), groups.count("variants"), groups.count("cross")) == (1, 4, 10)
    assert recipe("imagenet-r").settings["dpe"]["align_weight"] == 0
    assert recipe("imagenet-a").settings["dpe"]["multi_view_prediction"] is True
    for entry in recipes.recipes().values():
        assert entry.settings["dpe"]["beta"] == entry.settings["tda"]["pos_beta"]  # as in both released codes
        for method in ("dpe", "tda"):
            registry.make_method(method, None, entry.settings[method])


def test_a_folder_is_recognised_by_its_name_and_classes() -> None:
    assert find_recipe("caltech-101") is recipe("caltech101") is find_recipe("Caltech101", 100)
    assert find_recipe("caltech-101", 7) is None and find_recipe("holiday photos") is None


def test_tracks_set_one_value_for_all_or_the_datasets_own() -> None:
    caltech = recipe("caltech101")
    assert recipes.track_settings("dpe", "one-setting", caltech)["alpha"] == 6
    assert recipes.track_settings("dpe", "per-dataset", caltech)["alpha"] == 15
    assert recipes.track_settings("mta", "per-dataset", caltech) == {}
    assert recipes.track_settings("dota", "per-dataset", caltech) == {"eta": 0.3, "rho": 0.02, "epsilon": 0.002}
    assert recipes.track_settings("onzeta", "per-dataset", caltech) == {"stream_length": 2465}
    with pytest.raises(InputError, match="one-setting"):
        recipes.track_settings("dpe", "per-dataset", None)
    with pytest.raises(UnknownName, match="Did you mean 'per-dataset'"):
        recipes.track_settings("dpe", "per-datasets", None)


def test_views_follow_the_protocol_and_the_method() -> None:
    assert recipes.views_of("dpe", recipe("imagenet")) == ViewPlan(64, True)
    assert recipes.views_of("dpe", recipe("dtd")) == ViewPlan(1, False)
    assert recipes.views_of("dpe", recipe("dtd"), "paper") == ViewPlan(64, False)
    assert recipes.views_of("tda", recipe("imagenet")) == ViewPlan(1, False)
    assert recipes.views_of("tpt", recipe("imagenet-a")) == ViewPlan(64, False)
    assert recipes.views_of("tpt", recipe("dtd")) == ViewPlan(64, True)
    assert recipes.views_of("dpe", None) == ViewPlan(1, False)
    assert recipes.views_of("dlae", recipe("imagenet-r")) == ViewPlan(64, True)  # unlike the other variants
    assert recipes.views_of("dlae", recipe("imagenet-a")) == ViewPlan(64, False)
    assert recipes.views_of("dlae", recipe("eurosat")) == ViewPlan(1, False)
    assert recipes.views_of("dota", recipe("imagenet-v2")) == ViewPlan(64, True)
    assert recipes.seeds_of("released") == (1,) and len(recipes.seeds_of("paper")) == 3
    for call in (lambda: recipes.views_of("dpe", None, "papers"), lambda: recipes.seeds_of("papers")):
        with pytest.raises(UnknownName, match="Did you mean 'paper'"):
            call()


def test_unknown_names_are_errors_that_help() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'caltech101'"):
        recipe("caltech10")


GOOD = """
title = "X"
group = "cross"
[views]
released = { count = 1, augmix = false }
paper = { count = 64, augmix = false }
[per-dataset.dpe]
alpha = 3.0
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("alpha", "alhpa", "Did you mean 'alpha'"),
        ("alpha = 3.0", 'alpha = "many"', "expected a finite number"),
        ("per-dataset.dpe", "per-dataset.dpee", "Did you mean 'dpe'"),
        ('"cross"', '"corss"', "Did you mean 'cross'"),
        ('title = "X"', "", "lacks 'title'"),
        ('title = "X"', 'title = "X"\nimage = 3', "unknown entry 'image'"),
        ("paper = { count = 64, augmix = false }", "", "lacks views for 'paper'"),
        ('title = "X"', "title =", "not TOML"),
    ],
)
def test_a_recipe_that_is_wrong_says_where(old, new, message) -> None:
    assert read_recipe("x", GOOD).settings["dpe"] == {"alpha": 3.0}
    with pytest.raises(InputError, match=message):
        read_recipe("x", GOOD.replace(old, new))


def test_a_published_table_with_a_wrong_column_or_length_is_refused() -> None:
    with pytest.raises(UnknownName, match="column of t"):
        recipes._published("t", {"columns": ["imagenets"], "rows": {}})
    with pytest.raises(InputError, match="row 'DPE' does not have 1 numbers"):
        recipes._published("t", {"columns": ["imagenet"], "rows": {"RN50": {"DPE": [1.0, 2.0]}}})


def test_a_number_that_the_paper_lacks_is_none() -> None:
    table = published()["tab:fine-grained"]
    assert table.value("RN50", "DPE", "caltech101") == 90.83
    assert table.value("RN50", "DMN-ZS", "caltech101") is None and table.value("RN50", "DPE", "imagenet") is None


def test_an_encoder_of_another_precision_has_the_same_backbone() -> None:
    name = "open_clip:ViT-B-16/openai"
    assert recipes.backbone_of(f"{name}@bfloat16") == recipes.backbone_of(name) == recipes.BACKBONES[name]
    assert recipes.backbone_of("offline@bfloat16") == ""

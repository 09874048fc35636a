from __future__ import annotations

import pytest
from trees import TREES

from testtime.datasets.benchmarks import BENCHMARKS, benchmark, templates
from testtime.types import UnknownName

# the paper's table of datasets: classes, test images
SIZES = {
    "imagenet": (1000, 50000), "imagenet-v2": (1000, 10000), "imagenet-a": (200, 7500), "imagenet-r": (200, 30000),
    "imagenet-sketch": (1000, 50889), "caltech101": (100, 2465), "dtd": (47, 1692), "eurosat": (10, 8100),
    "fgvc-aircraft": (100, 3333), "flowers102": (102, 2463), "food101": (101, 30300), "oxford-pets": (37, 3669),
    "stanford-cars": (196, 8041), "sun397": (397, 19850), "ucf101": (101, 3783),
}  # fmt: skip


def test_the_fifteen_have_the_sizes_of_the_paper() -> None:
    assert {row.name: (row.classes, row.images) for row in BENCHMARKS} == SIZES


@pytest.mark.parametrize("row", BENCHMARKS, ids=lambda row: row.name)
def test_every_row_has_its_folders_and_its_source(row) -> None:
    tree = TREES[row.name]
    assert (row.coop, row.tpt, row.split) == (tree.coop, tree.tpt, tree.split)
    assert row.source.startswith("https://") and row.archive and row.terms


def test_names_are_found_in_any_spelling() -> None:
    assert benchmark("OxfordPets") is benchmark("oxford_pets") is benchmark("oxford-pets")
    with pytest.raises(UnknownName, match="Did you mean 'imagenet-a'"):
        benchmark("imagnet-a")


def test_released_and_printed_prompts_differ_where_the_code_and_the_paper_do() -> None:
    differ = {row.name for row in BENCHMARKS if templates(row.name, "released") != templates(row.name, "paper")}
    assert differ == {"imagenet-r", "imagenet-sketch", "caltech101", "sun397", "stanford-cars"}
    assert len(templates("imagenet-r")) == len(set(templates("imagenet-r"))) == 80
    assert len(templates("imagenet-r", "paper")) == len(templates("caltech101")) == 7
    assert templates("dtd", "paper") == ("{} texture.",)
    assert templates("eurosat") == ("a centered satellite photo of {}.",)
    assert len(templates("stanford-cars")) == 2 and templates("ucf101") == ("a photo of a person doing {}.",)


def test_every_prompt_has_a_slot_for_the_class() -> None:
    for row in BENCHMARKS:
        for track in ("released", "paper"):
            assert all(text.count("{}") == 1 for text in templates(row.name, track))


def test_an_unknown_track_is_named() -> None:
    with pytest.raises(UnknownName, match="'printed'"):
        templates("dtd", "printed")  # type: ignore[arg-type]

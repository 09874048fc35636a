from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import command
from small_data import make_folders, make_textures

import testtime as tt
from testtime import load_encoder
from testtime.datasets import open_dataset
from testtime.encoding.encoders.tiny import tiny
from testtime.experiments import cells, recipes
from testtime.experiments.catalogue import EXPERIMENTS, TEXTS
from testtime.experiments.cost import cost_lines, estimate, paper_columns
from testtime.experiments.plan import Plan
from testtime.experiments.queues import watch_queues
from testtime.experiments.run import find_columns, find_experiment, page, run_experiment, selected
from testtime.experiments.scores import SAME
from testtime.experiments.tables import markdown, remarks, report_parts, sheets
from testtime.methods.dpe import DPE
from testtime.types import InputError

SYSTEMS = ["zero-shot", "ensemble", "DPE"]
LATEX = re.compile(r"\b(tab|table|fig):[a-zA-Z]")
ONE = [name for name, experiment in EXPERIMENTS.items() if not experiment.datasets and experiment.measure == "scores"]


@pytest.fixture(scope="module")
def encoder():
    return load_encoder("tiny")


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    return make_folders(tmp_path / "pets", images=3)


@pytest.fixture
def plan(tmp_path, encoder) -> Plan:
    return Plan(tmp_path / "runs", encoder, report=lambda line: None)


# what is run


def test_every_row_is_a_method_with_settings_that_it_has_and_a_published_row() -> None:
    for name, experiment in EXPERIMENTS.items():
        labels = [row.label for row in experiment.rows]
        assert len(set(labels)) == len(labels)
        table = recipes.published().get(experiment.table)
        assert table is not None or not experiment.table
        for row in experiment.rows:
            tt.registry.make_method(row.method, None, dict(row.settings))
            assert row.text in TEXTS and len(row.at) in (0, len(experiment.axes))
            if table is not None and not row.invalid and not table.gain:
                for rows in table.rows.values():
                    assert (row.published or row.label) in rows, (name, row.label)
        for dataset in experiment.datasets:
            assert table is not None and dataset in table.columns


def test_every_published_table_belongs_to_an_experiment() -> None:
    assert {experiment.table for experiment in EXPERIMENTS.values() if experiment.table} == set(recipes.published())


@pytest.mark.parametrize("name", ["components", "losses", "learnable", "update-rules"])
def test_ablations_switch_off_what_their_rows_say(name) -> None:
    """Rows that name all parts are plain DPE, and every other row changes a setting."""
    plain = DPE()
    whole = {"components": "VPE + TPE + PRL", "losses": "both", "learnable": "both", "update-rules": "cumulative"}
    for row in find_experiment(name).rows:
        if not row.invalid:
            assert (tt.registry.make_method("dpe", None, dict(row.settings)) == plain) == (row.label == whole[name])


# running


@pytest.mark.parametrize("name", ONE)
def test_each_experiment_runs_on_your_own_folder(name, folders, plan) -> None:
    dataset = open_dataset(folders)
    result = run_experiment(name, {"tiny": plan}, {"pets": dataset})
    ran = [row for row in result["rows"] if "accuracy" in row]
    assert len(result["rows"]) == len(EXPERIMENTS[name].rows) and len(ran) >= 4
    assert all(row["images"] == 9 for row in ran)
    for row in result["rows"]:
        assert row["published"] is None or row["published_for"] == "imagenet, RN50"
        assert not row["comparable"]
    shown = markdown(EXPERIMENTS[name].heading, sheets(result), remarks(result))
    assert shown.startswith(f"# {EXPERIMENTS[name].heading}") and "Text on pets" in shown
    for text in (shown, page(result, {"pets": dataset})):
        assert not LATEX.search(text)
    assert json.loads(json.dumps(result)) == result


def test_experiments_share_features_and_cells(folders, plan, monkeypatch) -> None:
    columns = {"pets": open_dataset(folders)}
    first = run_experiment("losses", {"tiny": plan}, columns)
    cells = plan.folder / "cells"
    count = len(list(cells.iterdir()))
    monkeypatch.setattr(type(plan.encoder), "encode_images", None)
    again = run_experiment("losses", {"tiny": plan}, columns)
    assert again == first and len(list(cells.iterdir())) == count
    run_experiment("steps", {"tiny": plan}, columns)
    assert len(list(cells.iterdir())) == count + 4  # one step is plain DPE, which is there
    assert len(list((plan.folder / "stores").iterdir())) == 1


def test_only_the_requested_rows_run(folders, plan) -> None:
    result = run_experiment("steps", {"tiny": plan}, {"pets": open_dataset(folders)}, ["2"])
    assert [row["row"] for row in result["rows"]] == ["2"]
    with pytest.raises(InputError, match="Unknown row '9'"):
        run_experiment("steps", {"tiny": plan}, {"pets": open_dataset(folders)}, ["9"])


def test_descriptions_fill_the_rows_that_need_them(folders, plan, tmp_path) -> None:
    file = tmp_path / "d.json"
    file.write_text(json.dumps({name: [f"the {name} has a tail", "fur"] for name in ("cat", "dog", "fox")}))
    columns = {"pets": open_dataset(folders)}
    without = run_experiment("text-only", {"tiny": plan}, columns)["rows"]
    assert sum("not run" in row for row in without) == 3
    described = replace(plan, descriptions=file)
    rows = run_experiment("text-only", {"tiny": described}, columns)["rows"]
    assert all("accuracy" in row for row in rows)
    assert rows[2]["text"]["templates"] == [] and rows[2]["text"]["descriptions"]


# published beside measured


def test_published_numbers_match_only_the_same_dataset_backbone_and_images(tmp_path, plan, monkeypatch) -> None:
    make_folders(tmp_path / "sets" / "oxford_pets", [f"pet {n}" for n in range(37)], images=1)
    dataset = open_dataset(tmp_path / "sets" / "oxford_pets")
    keep = ["CLIP", "DPE"]
    rows = run_experiment("cross", {"tiny": plan}, {"oxford-pets": dataset}, keep)["rows"]
    assert [row["published_for"] for row in rows] == ["oxford-pets, RN50"] * 2  # another backbone
    assert [row["published"] for row in rows] == [83.57, 85.97] and not any(row["comparable"] for row in rows)
    monkeypatch.setitem(recipes.BACKBONES, "tiny", "ViT-B/16")
    rows = run_experiment("cross", {"tiny": plan}, {"oxford-pets": dataset}, keep)["rows"]
    assert [row["published"] for row in rows] == [88.25, 91.14]
    assert [row["published_for"] for row in rows] == ["oxford-pets, ViT-B/16"] * 2  # 37 images, and not 3,669
    assert not any(row["comparable"] for row in rows)
    small = recipes.recipe("oxford-pets").benchmark._replace(images=37)
    monkeypatch.setattr("testtime.experiments.recipes.benchmark", lambda name: small)
    result = run_experiment("cross", {"tiny": plan}, {"oxford-pets": dataset}, keep)
    assert [(row["published_for"], row["comparable"]) for row in result["rows"]] == [(SAME, True)] * 2
    (sheet,) = sheets(result)  # beside the measured ones, and nothing apart
    assert sheet.header[-1] == "published" and [float(row[-1]) for row in sheet.rows] == [
        row["published"] for row in result["rows"]
    ]
    assert sheet.rows[0][0] == "CLIP" and "Published: Table 2 of the paper, accuracy in percent." in remarks(result)


def test_published_numbers_that_are_not_comparable_stand_apart(folders, plan, capsys) -> None:
    columns = {"pets": open_dataset(folders)}
    for name, head in (("efficiency", ["row", "ImageNet", "time"]), ("learnable", ["row", "ImageNet, gain"])):
        result = run_experiment(name, {"tiny": plan}, columns)
        measured, apart = sheets(result)
        assert not any("published" in cell for cell in measured.header) and not measured.apart and apart.apart
        assert apart.title == "Published, CLIP RN50, ImageNet (50,000 images): not comparable with this run"
        assert apart.header == head and not any("Published:" in line for line in remarks(result))
        text = markdown("T", [measured, apart], remarks(result))
        assert text.index(measured.rows[-1][0]) < text.index(f"## {apart.title}") < text.index(apart.rows[-1][1])
        shown = page(result, columns)
        assert f"<summary>{apart.title}</summary>" in shown
        assert shown.index(apart.rows[-1][1]) > shown.index("<summary>Published")
    assert [
        row["lines"].keys() for row in report_parts(run_experiment("steps", {"tiny": plan}, columns))["series"]
    ] == [{"measured"}]


def test_a_row_named_after_clip_says_what_ran_in_its_place(folders, plan, monkeypatch) -> None:
    result = run_experiment("efficiency", {"tiny": plan}, {"pets": open_dataset(folders)}, ["CLIP"])
    measured, apart = sheets(result)
    assert measured.rows[0][0] == "zero-shot (tiny)" and apart.rows[0][:2] == ["CLIP", "59.81"]
    assert result["rows"][0]["row"] == "CLIP"  # under which --row finds it
    monkeypatch.setitem(recipes.BACKBONES, "tiny", "RN50")
    assert sheets(result)[0].rows[0][0] == "CLIP"


def test_no_table_or_list_names_a_latex_label(folders, plan, capsys) -> None:
    assert command("bench", "list") == 0
    listed = capsys.readouterr().out
    assert "Table A5" in listed and "Figure 4, left" in listed and not LATEX.search(listed)
    for experiment in EXPERIMENTS.values():
        assert not LATEX.search(experiment.heading) and (experiment.place or not experiment.table)


def test_a_table_of_benchmarks_says_what_is_missing(tmp_path, plan) -> None:
    columns = find_columns(find_experiment("cross"), make_textures(tmp_path / "sets"))
    assert len(columns) == 10 and isinstance(columns["eurosat"], str)
    result = run_experiment("cross", {"tiny": plan, "other": "no weights"}, columns, ["CLIP", "DPE", "DiffTPT"])
    ran = [(row["encoder"], row["column"]) for row in result["rows"] if "accuracy" in row]
    assert ran == [("tiny", "dtd")] * 2
    first, second, apart = sheets(result)  # what is not comparable is the same for both encoders
    assert first.header == ["method", *columns, "average"]
    assert float(first.rows[0][4]) >= 0 and first.rows[0][-1] == second.rows[0][4] == "-"
    assert apart.title.startswith("Published, CLIP RN50, the test sets of 10 benchmarks: not comparable")
    assert apart.rows[0][0] == "CLIP" and apart.rows[0][4] == "40.37" and apart.rows[0][-1] == "55.82"
    below = "\n".join(remarks(result))
    assert "EuroSAT is not in" in below and "no weights" in below and "diffusion" in below


def test_the_mean_of_all_datasets_is_shown(tmp_path, plan) -> None:
    make_folders(tmp_path / "own", images=2)
    columns = {name: open_dataset(tmp_path / "own") for name in EXPERIMENTS["ood"].datasets}
    result = run_experiment("ood", {"tiny": plan}, columns, ["CLIP"])
    measured, apart = sheets(result)
    assert measured.rows[0][-2:] == [f"{100 * result['rows'][0]['accuracy']:.2f}"] * 2
    assert apart.rows[0][-2:] == ["44.18", "40.69"]
    missing = run_experiment(
        "ood", {"open_clip:RN50/openai": "no weights"}, dict.fromkeys(columns, "missing"), ["CLIP"]
    )
    (sheet,) = sheets(missing)  # the paper's own backbone and datasets
    assert sheet.title == "open_clip:RN50/openai; measured (published)"
    assert sheet.rows[0][:2] == ["CLIP", "- (58.16)"] and sheet.rows[0][-2:] == ["- (44.18)", "- (40.69)"]


# figures


def test_two_axes_make_a_grid_and_one_makes_a_line_for_each_setting(folders, plan) -> None:
    columns = {"pets": open_dataset(folders)}
    grid = report_parts(run_experiment("tau-queue", {"tiny": plan}, columns))["grids"][0]
    assert grid.keys() == {"title", "x", "xs", "y", "ys", "values"}
    assert grid["xs"] == [1, 2, 3, 4, 5, 6, 7] and grid["ys"][0] == 0.0
    assert len(grid["values"]) == 6 and all(len(row) == 7 and None not in row for row in grid["values"])
    series = report_parts(run_experiment("alpha-beta", {"tiny": plan}, columns))["series"]
    assert [part["x"] for part in series] == ["alpha", "beta"] and series[0]["xs"] == [2.5, 4.0, 5.0, 6.0, 7.5, 10.0]
    assert list(series[0]["lines"]) == ["measured"]  # the paper's are of ImageNet
    assert report_parts(run_experiment("losses", {"tiny": plan}, columns)) == {"grids": [], "series": []}


def test_queues_are_traced_to_the_images_that_fill_them() -> None:
    task, stream, _ = tt.toy()
    views = stream[:, :1]
    for held in watch_queues(task, DPE(queue=2), views.split(16), [5, 60, 160]):
        assert torch.allclose(held.features, tt.ops.unit(views[held.positions, 0]), atol=1e-6)
        assert int(held.positions.max()) < held.images and len(held.positions.unique()) == len(held.positions)


def test_the_map_of_queues_has_coordinates_for_every_feature(tmp_path, plan, monkeypatch) -> None:
    dataset = open_dataset(make_folders(tmp_path / "more", images=6))
    result = run_experiment("tsne", {"tiny": plan}, {"more": dataset}, None, [6, 18])
    assert [moment["images"] for moment in result["moments"]] == [6, 18]
    for moment, places in zip(result["moments"], result["maps"], strict=True):
        assert len(places) == moment["features"] and 0 <= moment["purity"] <= 1
    early, late = ({entry["image"]: (entry["x"], entry["y"]) for entry in places} for places in result["maps"])
    stayed = early.keys() & late.keys()
    assert stayed and all(early[image] == late[image] for image in stayed)
    monkeypatch.setattr("testtime.experiments.queues.watch_queues", None)
    assert run_experiment("tsne", {"tiny": plan}, {"more": dataset}, None, [6, 18]) == result
    with pytest.raises(InputError, match="from 1 to 18"):
        run_experiment("tsne", {"tiny": plan}, {"more": dataset}, None, [19])


def test_the_page_of_queues_shows_each_moment_with_its_images(tmp_path, plan) -> None:
    folder = make_folders(tmp_path / "more", images=6)
    (folder / "cat" / "2.png").write_bytes(b"no image")  # the store is one image shorter than the dataset
    dataset = open_dataset(folder)
    result = run_experiment("tsne", {"tiny": plan}, {"more": dataset}, None, [6, 17])
    for moment, entries in zip(result["moments"], result["maps"], strict=True):
        right = [dataset.labels[entry["row"]] == entry["class"] for entry in entries]
        assert sum(right) / len(right) == pytest.approx(moment["purity"])
    shown = page(result, {"more": dataset}, "testtime bench tsne more")
    assert shown.count("data-map>") == 2 and "After 6 images" in shown and "After 17 images" in shown
    assert shown.count('class="point') == sum(map(len, result["maps"]))
    assert "data:image/jpeg;base64," in shown and "testtime bench tsne more" in shown and "in a wrong queue" in shown


def test_a_page_of_many_features_shows_the_classes_that_the_seed_chose(tmp_path, plan, monkeypatch) -> None:
    dataset = open_dataset(make_folders(tmp_path / "more", images=6))
    result = run_experiment("tsne", {"tiny": plan}, {"more": dataset}, None, [6, 18])
    result["maps"][1][0]["class"] = result["maps"][1][1]["class"] = 2
    result["coloured"] = [2]
    monkeypatch.setattr("testtime.experiments.queues.PLACED", 10)
    found = page(result, {"more": dataset})
    shown = [entry for entries in result["maps"] for entry in entries if entry["class"] == 2]
    assert 2 <= len(shown) == found.count('class="point') < sum(map(len, result["maps"]))
    assert "Shown is 1 class, chosen by the seed" in found


def test_too_few_features_make_no_map(tmp_path, plan) -> None:
    dataset = open_dataset(make_folders(tmp_path / "more", images=6))
    with pytest.raises(InputError, match="1 feature on a map.*--after"):
        run_experiment("tsne", {"tiny": plan}, {"more": dataset}, None, [1])


# cost


def test_a_dry_run_counts_what_is_still_to_do(folders, plan) -> None:
    experiment, columns = find_experiment("losses"), {"pets": open_dataset(folders)}
    before = estimate(experiment, {"tiny": plan}, columns)[0]
    assert (before.images, before.passes, before.cells) == (9, 9, 4)
    assert before.gigabytes == pytest.approx(9 * 32 * 2 / 1e9) and before.encoding_hours and before.running_hours
    assert not plan.folder.exists()
    run_experiment("losses", {"tiny": plan}, columns, ["both"])
    after = estimate(experiment, {"tiny": plan}, columns)[0]
    assert (after.passes, after.cells, after.encoding_hours) == (0, 3, 0)


def test_a_dry_run_knows_the_size_of_missing_benchmarks(plan) -> None:
    experiment = find_experiment("openclip-l14")
    costs = estimate(experiment, {"tiny": plan, "large": "no weights"}, paper_columns(experiment))
    imagenet = costs[0]
    # 64 views for CLIP and DPE, one more store of one view for TDA
    assert (imagenet.images, imagenet.passes, imagenet.cells) == (50000, 50000 * 65, 3)
    assert imagenet.why == "dataset missing" and imagenet.encoding_hours
    assert costs[5].why == "no weights" and costs[5].gigabytes is None and costs[5].passes == imagenet.passes
    lines = cost_lines(costs)
    assert lines[-1][0] == "all" and lines[-1][4] == "?" and len(lines) == 12
    with_tower = estimate(find_experiment("efficiency"), {"tiny": plan}, {"dtd": "not given"})[0]
    assert with_tower.running_hours


# the command


def test_the_command_prints_writes_and_explains(folders, tmp_path, capsys) -> None:
    assert command("bench", "list") == 0
    assert "tau-queue" in capsys.readouterr().out
    common = ("--encoder", "tiny", "--out", tmp_path / "o")
    assert command("bench", "losses", folders, *common) == 0
    shown = capsys.readouterr()
    assert "alignment" in shown.out and "63.41" not in shown.out and "losses.md" in shown.err
    assert "not comparable with this run, so listed only in losses.md" in " ".join(shown.err.split())
    assert "| both |" in (tmp_path / "o" / "losses.md").read_text()
    assert command("bench", "losses", folders, *common, "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "o" / "losses.json").read_text())
    assert command("bench", "losses", folders, *common, "--dry-run") == 0
    assert "hours" in capsys.readouterr().out
    for other in ("systems", "tsne"):
        assert command("bench", other, folders, *common, "--dry-run", "--json") == 0
        assert json.loads(capsys.readouterr().out)[0]["cells"] == {"systems": 16, "tsne": 1}[other]  # DPE is there
    assert command("bench", "ood", "--encoder", "tiny", "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["images"] == 50000
    assert command("bench", "tsne", folders, *common, "--after", "4,9") == 0
    assert "│ 9 " in capsys.readouterr().out
    assert "After 9 images" in (tmp_path / "o" / "tsne.html").read_text()
    assert command("bench", "tsne", folders, *common, "--after", "4,9", "--json") == 0
    assert json.loads(capsys.readouterr().out)["moments"][1]["images"] == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["losses"], "give its folder"),
        (["tsne"], "give its folder"),
        (["systems"], "give its folder"),
        (["ood"], "None of the 5 datasets"),
        (["sistems"], "Did you mean 'systems'"),
        (["ood", "SETS"], "None of the 5 datasets"),
        (["losses", "SETS/pets", "--seeds", "a"], "--seeds a"),
        (["losses", "SETS/pets", "--limit", "-1"], "--limit -1"),
        (["systems", "SETS/pets", "--views", "0"], "--views 0"),
        (["systems", "SETS/pets", "--row", "dpee"], "Did you mean 'dpe'"),
        (["losses", "SETS/pets", "--after", "3"], "--after"),
    ],
)
def test_what_cannot_run_is_exit_code_two(arguments, message, tmp_path, capsys) -> None:
    make_folders(tmp_path / "sets" / "pets", images=1)
    given = [argument.replace("SETS", str(tmp_path / "sets")) for argument in arguments]
    assert command("bench", *given, "--encoder", "tiny", "--out", tmp_path / "o") == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_encoders_that_cannot_be_loaded_leave_a_reason_in_every_row(tmp_path, capsys, monkeypatch) -> None:
    def absent(name: str, device: object = None) -> None:
        raise InputError(f"no weights of {name}")

    monkeypatch.setattr("testtime.encoding.encoders.load_encoder", absent)
    make_textures(tmp_path)
    assert command("bench", "cross", tmp_path, "--out", tmp_path / "o") == 2
    shown = capsys.readouterr()
    assert "40.37" in shown.out and "no weights of open_clip:RN50/openai" in shown.err
    assert command("bench", "losses", tmp_path / "dtd", "--out", tmp_path / "o") == 2


def test_rows_with_learned_prompts_ask_for_them(folders, plan) -> None:
    result = run_experiment("coop", {"tiny": plan}, {"imagenet": open_dataset(folders)})
    assert all("--prompts FILE" in row["not run"] or "diffusion" in row["not run"] for row in result["rows"])
    assert result["rows"][-1]["published"] == 64.86 and result["rows"][-1]["published_spread"] == 0.18


# every system


@pytest.fixture
def systems(plan, folders):
    """The table of systems, of the rows asked for."""
    columns = {"pets": open_dataset(folders)}

    def run(keep: list[str] | None, plan: Plan = plan) -> list[dict]:
        return run_experiment("systems", {"tiny": plan}, columns, keep)["rows"]

    return run


def test_every_system_gets_a_row_with_accuracy_time_and_memory(systems) -> None:
    rows = systems(SYSTEMS)
    assert [row["row"] for row in rows] == SYSTEMS
    for row in rows:
        assert 0 <= row["accuracy"] <= 1 and row["milliseconds"] > 0 and row["images"] == 9
        assert row["loading_seconds"] >= 0 and row["peak_megabytes"] >= 0
    assert rows[2]["state_megabytes"] > rows[0]["state_megabytes"] == 0


def test_systems_have_the_same_prompts_in_every_table() -> None:
    whole = {row.published or row.label: row for row in EXPERIMENTS["systems"].rows}
    for name in ("ood", "cross", "coop", "openclip-l14"):
        for row in EXPERIMENTS[name].rows:
            assert (row.method, row.text) == whole[row.label][1:2] + (whole[row.label].text,)


def test_an_oracle_is_a_separate_row_that_runs_only_on_request(systems) -> None:
    honest, oracle = systems(["DMN-ZS", "DMN-ZS (oracle)"])
    assert "oracle" not in honest
    assert oracle["method"] == "dmn (oracle: fusion weight chosen with test labels)" and oracle["oracle"] is True
    assert oracle["settings"]["fusion_memory"] == oracle["weight"]["1"]
    assert oracle["accuracy"] == max(oracle["accuracy_by_weight"]["1"].values())
    assert oracle["accuracy_by_weight"]["1"]["1"] == honest["accuracy"]
    unasked = next(row for row in selected(EXPERIMENTS["systems"], None) if row.oracle)
    assert "test labels" in unasked.invalid and "--row 'DMN-ZS (oracle)'" in unasked.invalid


def test_finished_cells_and_shards_are_not_run_again(systems, plan, monkeypatch) -> None:
    first = systems(SYSTEMS[:2])

    def broken(*arguments: object, **settings: object) -> None:
        raise AssertionError("done again")

    monkeypatch.setattr(type(plan.encoder), "encode_images", broken)
    ran: list[str] = []
    real = cells._measured
    monkeypatch.setattr(cells, "_measured", lambda *a: (ran.append(a[1].method.name), real(*a))[1])
    again = systems(SYSTEMS)
    assert again[:2] == first and ran == ["dpe"]


def test_an_interrupted_bench_ends_with_the_same_rows(systems, plan, tmp_path, monkeypatch) -> None:
    real = cells._measured

    def interrupted(task: object, scorer: cells.Scorer, *rest: object) -> object:
        if scorer.method.name == "dpe":
            raise KeyboardInterrupt
        return real(task, scorer, *rest)

    monkeypatch.setattr(cells, "_measured", interrupted)
    with pytest.raises(KeyboardInterrupt):
        systems(SYSTEMS)
    monkeypatch.setattr(cells, "_measured", real)
    resumed = systems(SYSTEMS)
    whole = systems(SYSTEMS, replace(plan, folder=tmp_path / "whole"))
    assert [row["accuracy"] for row in resumed] == [row["accuracy"] for row in whole]


def test_a_system_that_cannot_run_says_what_it_needs_and_is_tried_again(systems, plan) -> None:
    (row,) = systems(["CoOp"])
    assert "--prompts" in row["not run"]
    assert not (plan.folder / "cells").exists()


def test_a_limit_encodes_so_many_images_and_no_more(systems, plan, folders, monkeypatch) -> None:
    encoded: list[int] = []
    kind = type(plan.encoder)
    real = kind.encode_images
    monkeypatch.setattr(kind, "encode_images", lambda e, pixels: (encoded.append(len(pixels)), real(e, pixels))[1])
    few = replace(plan, limit=4)
    rows = systems(SYSTEMS, few)
    assert sum(encoded) == 4 and {row["images"] for row in rows} == {4}
    run_experiment("losses", {"tiny": few}, {"pets": open_dataset(folders)})
    assert sum(encoded) == 4  # the same images


def test_another_bench_in_the_same_folder_has_its_own_cells(systems, plan) -> None:
    first = systems(["DPE"])
    other = systems(["DPE"], replace(plan, seeds=(2,)))
    assert first[0]["accuracies"].keys() == {"1"} and other[0]["accuracies"].keys() == {"2"}
    assert len(list((plan.folder / "cells").iterdir())) == 2 and systems(["DPE"]) == first


def test_the_command_prints_a_table_of_systems_and_json(folders, tmp_path, capsys) -> None:
    arguments = ["bench", "systems", folders, "--encoder", "tiny", "--out", tmp_path / "b"]
    asked = [part for name in (*SYSTEMS, "CoOp") for part in ("--row", name)]
    for extra in ([], ["--json"]):
        assert command(*arguments, *asked, *extra) == 0
        text, notes = capsys.readouterr()
        if extra:
            assert [row["row"] for row in json.loads(text)["rows"]] == ["zero-shot", "ensemble", "CoOp", "DPE"]
        else:
            assert "DPE" in text and "peak MB" in text and "not run" in text
            assert "'a photo of a {}.' (zero-shot, DPE)." in notes and "7 templates (ensemble)." in notes
    assert "peak MB" in (tmp_path / "b" / "systems.md").read_text() and (tmp_path / "b" / "systems.html").exists()


def test_rows_are_found_by_name_ignoring_case_and_spaces() -> None:
    experiment = EXPERIMENTS["systems"]
    assert [row.label for row in selected(experiment, ["dpe+coop", "Zero-Shot"])] == ["zero-shot", "DPE + CoOp"]
    assert len(selected(experiment, None)) == len(experiment.rows)
    with pytest.raises(InputError, match="Did you mean 'tda'"):
        selected(experiment, ["tdaa"])


# finished experiments


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "PETS", "--methods", "zeroshot,dpe,tda", "--seeds", "1,2", "-e", "tiny"],
        ["eval", "PETS", "--methods", "tpt", "--views", "2", "--seeds", "1", "-e", "tiny"],
        ["bench", "losses", "PETS", "--seeds", "1", "-e", "tiny"],
        ["bench", "tsne", "PETS", "--after", "4,9", "-e", "tiny"],
        ["bench", "systems", "PETS", "--views", "2", "--seeds", "1", "-e", "tiny"],
        ["bench", "cross", "SETS", "--seeds", "1", "--row", "DPE"],  # with encoders of its own, which may be missing
    ],
)
def test_a_finished_experiment_loads_no_encoder(words, tmp_path, capsys, monkeypatch) -> None:
    make_folders(tmp_path / "pets")
    make_textures(tmp_path / "sets")
    given = [word.replace("PETS", str(tmp_path / "pets")).replace("SETS", str(tmp_path / "sets")) for word in words]
    loads: list[str] = []

    def load(name: str, device: object = None) -> object:
        loads.append(name)
        return tiny()

    monkeypatch.setattr("testtime.encoding.encoders.load_encoder", load)
    assert command(*given, "--out", tmp_path / "o") == 0
    assert loads and len(loads) == len(set(loads))
    results = {path.name: path.read_bytes() for path in (tmp_path / "o").glob("*.*")}
    loads.clear()
    assert command(*given, "--out", tmp_path / "o") == 0
    assert loads == []
    assert {path.name: path.read_bytes() for path in (tmp_path / "o").glob("*.*")} == results

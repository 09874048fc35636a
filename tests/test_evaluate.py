from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import command
from small_data import make_folders, make_textures

from testtime import load_encoder
from testtime.datasets import Dataset, find_dataset, open_dataset
from testtime.experiments.plan import Plan
from testtime.experiments.recipes import recipe
from testtime.experiments.scores import evaluate, summary
from testtime.experiments.tables import described, evaluation_markdown
from testtime.types import InputError, UnknownName, ViewPlan


@pytest.fixture
def pets(tmp_path) -> Path:
    return make_folders(tmp_path / "pets")


@pytest.fixture
def plan(tmp_path) -> Plan:
    return Plan(tmp_path / "out", load_encoder("tiny"), seeds=(1, 2, 3), report=lambda line: None)


def test_killed_at_twenty_points_it_ends_in_the_same_bytes(tmp_path) -> None:
    data = make_folders(tmp_path / "pets", images=5)
    script = Path(__file__).parent / "kill_eval.py"
    done = subprocess.run(
        [sys.executable, script, data, tmp_path / "work", "20"],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "killed 20 times" in done.stdout


def test_rows_have_mean_and_spread_over_seeds(plan, pets) -> None:
    result = evaluate(plan, [open_dataset(pets)], ["zeroshot", "dpe", "dpe:paper"])
    assert [(row["dataset"], row["method"]) for row in result["rows"]] == [
        ("pets", "zeroshot"), ("pets", "dpe"), ("pets", "dpe:paper"),
    ]  # fmt: skip
    for row in result["rows"]:
        values = list(row["accuracies"].values())
        assert len(values) == 3 and row["accuracy"] == pytest.approx(sum(values) / 3)
    assert result["rows"][0]["spread"] == 0  # the frozen classifier does not mind the order
    assert result["rows"][2]["settings"]["align_both"] and result["rows"][2]["settings"]["alpha"] == 6
    page = evaluation_markdown(result)
    assert "| pets | dpe |" in page and "Text on pets: 'a photo of a {}.'." in page


def test_the_spread_is_the_sample_deviation() -> None:
    rest = {"macro_f1": 0.0, "calibration_error": 0.0, "images": 1, "skipped": 0, "classes": 2, "views": 1}
    rest |= {"augmix": False, "settings": {}, "text": {}}
    row = summary([{"accuracy": value} | rest for value in (0.1, 0.2, 0.3)], (1, 2, 3))
    assert row["accuracy"] == pytest.approx(0.2) and row["spread"] == pytest.approx(0.1)
    assert summary([{"accuracy": 0.5} | rest], (1,))["spread"] is None
    assert summary([{"accuracy": 0.5} | rest, {"not run": "no"}], (1, 2)) == {"not run": "no"}


def test_recipes_set_settings_views_and_templates(plan, tmp_path) -> None:
    caltech = recipe("caltech101")
    assert plan.method("dpe", caltech).alpha == 6
    tuned = Plan(tmp_path, plan.encoder, track="per-dataset")
    assert tuned.method("dpe", caltech).alpha == 15 and tuned.method("tda", caltech).pos_alpha == 5
    assert tuned.method("dpe", caltech, {"alpha": 1.0}).alpha == 1
    paper = Plan(tmp_path, plan.encoder, protocol="paper")
    assert paper.method("dpe", caltech).align_both and paper.views_of("dpe", caltech) == ViewPlan(64, False)
    assert len(plan.templates_of(caltech)) == 7 and len(paper.templates_of(caltech)) == 1
    given = Plan(tmp_path, plan.encoder, views=ViewPlan(2), templates=("a {}",))
    assert given.views_of("tpt", caltech) == ViewPlan(2) and given.templates_of(caltech) == ("a {}",)


def test_descriptions_are_found_by_the_datasets_name(plan, tmp_path) -> None:
    folder = tmp_path / "prompts"
    folder.mkdir()
    (folder / "CuPL_prompts_caltech101.json").write_text("{}")
    make_folders(tmp_path / "caltech-101")
    data = open_dataset(tmp_path / "caltech-101")
    with_folder = Plan(tmp_path, plan.encoder, descriptions=folder)
    assert with_folder.descriptions_of(data) == folder / "CuPL_prompts_caltech101.json"
    assert with_folder.descriptions_of(Dataset("pets", data.paths, data.labels, data.classnames)) is None
    single = Plan(tmp_path, plan.encoder, descriptions=folder / "x.json")
    assert single.descriptions_of(data) == folder / "x.json"


def test_benchmarks_are_found_by_name_under_a_root(tmp_path) -> None:
    make_textures(tmp_path / "sets")
    assert len(find_dataset("dtd", tmp_path / "sets")) == 47
    assert find_dataset(str(tmp_path / "sets" / "dtd")).name == "dtd"
    with pytest.raises(InputError, match="EuroSAT is not in"):
        find_dataset("eurosat", tmp_path / "sets")
    with pytest.raises(InputError, match="is a benchmark: give --root"):
        find_dataset("eurosat")
    (tmp_path / "loose").mkdir()
    (tmp_path / "sets" / "dtd" / "images" / "texture 0" / "0.png").rename(tmp_path / "loose" / "a.png")
    with pytest.raises(InputError, match="no labels"):
        find_dataset(str(tmp_path / "loose"))


def test_wrong_plans_are_errors(plan, pets, tmp_path) -> None:
    with pytest.raises(UnknownName, match="Did you mean 'one-setting'"):
        Plan(tmp_path, plan.encoder, track="one-settings")
    with pytest.raises(UnknownName, match="Did you mean 'paper'"):
        Plan(tmp_path, plan.encoder, protocol="papers")
    with pytest.raises(InputError, match="each once"):
        Plan(tmp_path, plan.encoder, seeds=(1, 1))
    with pytest.raises(InputError, match="Nothing to evaluate"):
        evaluate(plan, [open_dataset(pets)], [])
    with pytest.raises(UnknownName, match="Did you mean 'dpe'"):
        evaluate(plan, [open_dataset(pets)], ["dpee"])


def test_text_is_described_in_words() -> None:
    assert described({"learned": "abc", "templates": [], "descriptions": None}) == "learned prompt abc"
    both = {"learned": None, "templates": ["a {}", "b {}"], "descriptions": "abc"}
    assert described(both) == "2 templates and descriptions abc"
    assert described(both | {"templates": []}) == "descriptions abc"


def test_the_command_writes_tables_and_resumes(pets, tmp_path, capsys) -> None:
    arguments = ["eval", pets, "--encoder", "tiny", "--methods", "zeroshot, difftpt", "--out", tmp_path / "o"]
    assert command(*arguments) == 0
    assert "zeroshot" in capsys.readouterr().out
    before = (tmp_path / "o" / "results.json").read_bytes()
    assert command(*arguments, "--json") == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["images"] == 12
    assert (tmp_path / "o" / "results.json").read_bytes() == before
    assert "| pets | zeroshot |" in (tmp_path / "o" / "results.md").read_text()


def test_the_command_loads_no_encoder_where_nothing_is_left_to_do(pets, tmp_path, capsys, monkeypatch) -> None:
    arguments = ["eval", pets, "--encoder", "tiny", "--methods", "zeroshot,dpe", "--seeds", "1,2", "--views", 2]
    arguments += ["--out", tmp_path / "o", "--json"]
    assert command(*arguments) == 0
    first = capsys.readouterr().out

    def asked(name: str, *_: object) -> None:
        raise InputError(f"asked for {name}")

    monkeypatch.setattr("testtime.encoding.encoders.load_encoder", asked)
    assert command(*arguments) == 0
    assert capsys.readouterr().out == first
    assert command(*arguments, "--seeds", "3") == 2 and "asked for tiny" in capsys.readouterr().err
    assert command(*arguments, "--encoder", "tiny:4") == 2 and "asked for tiny:4" in capsys.readouterr().err


def test_existing_features_are_enough_for_another_method(pets, tmp_path, capsys, monkeypatch) -> None:
    arguments = ["eval", pets, "--encoder", "tiny", "--views", 2, "--seeds", "1", "--out", tmp_path / "o", "--json"]
    assert command(*arguments, "--methods", "tda") == 0
    monkeypatch.setattr("testtime.encoding.encoders.load_encoder", None)
    assert command(*arguments, "--methods", "tda,dpe") == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--seeds", "1,x"], "--seeds 1,x"),
        (["--seeds", "99999999999999999999999"], "Seed 99999999999999999999999"),
        (["--shard", "0"], "--shard 0"),
        (["--prompts", "none.safetensors"], "none.safetensors"),
        (["--prompts", "coop:none.safetensors"], "Cannot read none.safetensors"),
        (["--out", "/proc/none"], "Cannot write /proc/none"),
        (["--track", "per-dataset"], "one-setting"),
        (["--augmix"], "--views N"),
        (["--views", "0"], "--views 0"),
        (["--protocol", "papers"], "Did you mean 'paper'"),
    ],
)
def test_wrong_options_are_exit_code_two(pets, tmp_path, capsys, extra, message) -> None:
    assert command("eval", pets, "--encoder", "tiny", "--out", tmp_path / "o", *extra) == 2
    assert message in capsys.readouterr().err

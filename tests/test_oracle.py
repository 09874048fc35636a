from __future__ import annotations

import json

import pytest
import torch
from conftest import SHARED
from safetensors import safe_open
from tolerances import assert_close

from testtime import InputError, registry, save_features, toy
from testtime.encoding.store import Features
from testtime.experiments import oracle
from testtime.methods.base import advance
from testtime.methods.dmn import DMN
from testtime.methods.mcp import MCP
from testtime.methods.tda import TDA
from testtime.session import replay as replays

TOLD = "dmn (oracle: fusion weight chosen with test labels)"


@pytest.fixture
def path(tmp_path):
    task, stream, labels = toy(images=60, views=3)
    return save_features(tmp_path / "toy.safetensors", stream, task.text, labels=labels, classnames=task.classnames)


def test_the_grid_is_the_released_one():
    assert len(oracle.WEIGHTS) == 13 and oracle.WEIGHTS[0] == 0.001 and oracle.WEIGHTS[-1] == 1000
    for small, large in zip(oracle.WEIGHTS, oracle.WEIGHTS[2:], strict=False):
        assert large == pytest.approx(10 * small)


def test_one_pass_gives_what_a_run_with_each_weight_gives(path):
    store = Features(path)
    options = dict(dtype="float64", shuffle=True, seed=3, limit=50)
    found = oracle.replay(store, DMN(memory_size=4, fusion_text=0.5), **options)
    said = found.summary()
    runs = {
        f"{weight:g}": replays.replay(store, DMN(memory_size=4, fusion_text=0.5, fusion_memory=weight), **options)
        for weight in oracle.WEIGHTS
    }
    assert said["accuracy_by_weight"] == {weight: run.summary()["accuracy"] for weight, run in runs.items()}
    assert said["accuracy"] == max(said["accuracy_by_weight"].values())
    chosen = runs[f"{said['weight']:g}"]
    assert_close(found.logits, chosen.logits, "stream")
    assert torch.equal(found.predictions, chosen.predictions)
    assert said["settings"] == chosen.summary()["settings"]
    assert said["zero_shot_accuracy"] == chosen.summary()["zero_shot_accuracy"]


def test_the_best_weight_wins_and_ties_go_to_the_smallest():
    text = torch.tensor([[0.6, 0.4]] * 4)
    memory = torch.tensor(
        [[0.4, 0.6]] * 2 + [[0.0, 1.0]] * 2
    )  # the first two need a weight above 1, the others above 0.2
    logits, said = oracle.DMNOracle().chosen(torch.cat([text, memory], 1), torch.tensor([0, 0, 1, 1]))
    assert said["weight"] == 0.3 and said["accuracy_by_weight"]["0.3"] == said["accuracy_by_weight"]["1"] == 1
    assert said["accuracy_by_weight"]["0.1"] == said["accuracy_by_weight"]["3"] == 0.5
    assert torch.equal(logits, text + 0.3 * memory)


@pytest.mark.parametrize("parts", [oracle.DMNOracle(), oracle.MCPOracle()], ids=["dmn", "mcp"])
def test_step_and_scan_of_the_parts_agree(parts):
    task, stream, _ = toy(images=20, views=3)
    number = 1 + len(parts.searched)
    scores, _ = parts.scan(task, parts.init(task), stream)
    state, placed = parts.init(task), parts.init(task)
    for views, expected in zip(stream, scores, strict=True):
        score, state = parts.step(task, state, views)
        assert torch.equal(score, expected) and len(score) == number * task.classes
        score, placed, _ = advance(parts, task, placed, views)  # as steppers do
        assert torch.equal(score, expected)
    assert_close(scores.sum(1), torch.full((20,), float(number)), "stream")  # distributions


def test_every_output_says_that_it_is_an_oracle(cli, path, tmp_path):
    out = tmp_path / "out.safetensors"
    done = cli("replay", path, "--method", "dmn", "--oracle", "--json", "--out", out)
    said = json.loads(done.out)
    assert said["method"] == TOLD and said["oracle"] is True
    assert said["weight"] in oracle.WEIGHTS and len(said["accuracy_by_weight"]) == 13
    with safe_open(out, "pt") as file:
        facts = file.metadata()
        assert file.get_tensor("logits").shape == (60, 8)
    assert facts["method"] == TOLD and facts["oracle"] == "true" and float(facts["weight"]) == said["weight"]
    assert json.loads(facts["accuracy_by_weight"]) == said["accuracy_by_weight"]
    assert TOLD in cli("replay", path, "--method", "dmn", "--oracle").out


def test_the_plain_method_is_no_oracle(cli, path, tmp_path):
    out = tmp_path / "out.safetensors"
    said = json.loads(cli("replay", path, "--method", "dmn", "--json", "--out", out).out)
    assert said["method"] == "dmn" and not {"oracle", "weight", "accuracy_by_weight"} & set(said)
    with safe_open(out, "pt") as file:
        assert set(file.metadata()) == {"method", "settings"}
    assert "oracle" not in "".join(registry.METHODS.ours)


def test_only_dmn_and_mcp_have_one_and_only_with_labels(cli, path, tmp_path):
    refused = cli("replay", path, "--method", "tda", "--oracle")
    assert refused.code == 2 and "Only the methods 'dmn' and 'mcp' have an oracle, not 'tda'" in refused.err
    with pytest.raises(InputError, match="not 'dmn .oracle"):
        oracle.oracle_of(oracle.DMNOracle())  # an oracle of an oracle
    with pytest.raises(InputError, match="not 'tda'"):
        oracle.oracle_of(TDA())
    task, stream, _ = toy(images=5)
    bare = save_features(tmp_path / "bare.safetensors", stream, task.text)
    refused = cli("replay", bare, "--method", "dmn", "--oracle")
    assert refused.code == 2 and "has no labels, which an oracle needs" in refused.err


def test_mcp_s_search_is_a_run_with_each_pair_of_weights(path, monkeypatch):
    monkeypatch.setattr(oracle, "WEIGHTS", (0.1, 1.0, 30.0))
    store, small = Features(path), dict(entropy_capacity=2, align_capacity=2)
    found = oracle.replay(store, MCP(**small), dtype="float64")
    said = found.summary()
    runs = {
        f"{memory:g}, {prototype:g}": replays.replay(
            store, MCP(fusion_memory=memory, fusion_prototype=prototype, **small), dtype="float64"
        )
        for memory in oracle.WEIGHTS
        for prototype in oracle.WEIGHTS
    }
    assert said["accuracy_by_weight"] == {pair: run.summary()["accuracy"] for pair, run in runs.items()}
    assert said["accuracy"] == max(said["accuracy_by_weight"].values())
    chosen = runs[", ".join(f"{weight:g}" for weight in said["weight"])]
    assert_close(found.logits, chosen.logits, "stream")
    assert said["settings"] == chosen.summary()["settings"]


def test_mcp_s_search_says_that_it_is_an_oracle(cli, path):
    said = json.loads(cli("replay", path, "--method", "mcp", "--oracle", "--json").out)
    assert said["method"] == "mcp (oracle: fusion weights chosen with test labels)" and said["oracle"] is True
    assert len(said["accuracy_by_weight"]) == 169 and len(said["weight"]) == 2


@pytest.mark.parametrize("trace", sorted((SHARED / "golden-later").glob("mcp_*")), ids=lambda trace: trace.stem)
def test_mcp_s_search_finds_what_the_released_script_found(trace):
    store = Features(trace)
    method = registry.make_method("mcp", None, replays.recorded_settings(store, "mcp"))
    said = oracle.replay(store, method, dtype="float64").summary()
    facts = {
        name: float(store.metadata[f"stream.searched_{name}"]) for name in ("accuracy", *oracle.MCPOracle.searched)
    }
    assert 100 * said["accuracy"] == pytest.approx(facts.pop("accuracy"))
    assert said["weight"] == list(facts.values())

"""Stored runs of the authors' released code, replayed through every stepper and through the command line."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import SHARED
from safetensors import safe_open
from safetensors.torch import load_file
from tolerances import TOLERANCES, assert_close

from testtime import Features, Session, registry
from testtime.bank import Bank
from testtime.cli.app import main
from testtime.methods.base import batch_of, kinds, leaves
from testtime.ops import unit_views
from testtime.steppers import open_stepper
from testtime.steppers.gpu import graph
from testtime.types import Task

Expected = dict[str, torch.Tensor]

STEPPERS: dict[str, Callable[..., Any]] = {
    "chosen": open_stepper,
    "reference": partial(open_stepper, reference=True),
    "graph": graph.Stepper,  # as on a GPU, without capturing
}


class Replayed(NamedTuple):
    """A run after its last image."""

    task: Task
    method: Any
    state: Any


def check_queue(bank: Bank, expected: Expected, prefix: str) -> None:
    """A bank against a stored queue, whose empty slots hold feature 0 and entropy -1."""
    filled = bank.cost.isfinite()
    assert filled.sum(1).tolist() == expected[f"{prefix}_count"].tolist()
    assert_close(bank.keys, expected[f"{prefix}_features"], "golden", f"{prefix} features")
    entropy = torch.where(filled, bank.cost, torch.full_like(bank.cost, -1))
    assert_close(entropy, expected[f"{prefix}_entropy"], "golden", f"{prefix} entropy")


def check_dpe(run: Replayed, stream: torch.Tensor, expected: Expected) -> None:
    state = run.state
    assert_close(state.text, expected["text"], "golden", "text")
    assert state.updates.item() == expected["text_updates"].item()
    check_queue(state.queue, expected, "queue")


def check_tda(run: Replayed, stream: torch.Tensor, expected: Expected) -> None:
    check_queue(run.state.positive, expected, "pos")
    check_queue(run.state.negative, expected, "neg")
    assert_close(run.state.negative_prob, expected["neg_prob"], "golden", "neg_prob")


def check_dmn(run: Replayed, stream: torch.Tensor, expected: Expected) -> None:
    filled = run.state.entropy.isfinite()
    assert filled.sum(1).tolist() == expected["memory_count"].tolist()
    entropy = torch.where(filled, run.state.entropy, torch.zeros_like(run.state.entropy))
    assert_close(entropy, expected["memory_entropy"], "golden", "memory entropy")
    if "memory_features" in expected:
        assert_close(run.state.features, expected["memory_features"], "golden", "memory features")


def check_dota(run: Replayed, stream: torch.Tensor, expected: Expected) -> None:
    for name, found in (("mean", run.state.mean), ("counts", run.state.counts)):
        assert_close(found.to(stream), expected[name], "golden", name)
    assert_close(run.state.covariance.mean(0), expected["covariance"], "golden", "covariance")


def check_onzeta(run: Replayed, stream: torch.Tensor, expected: Expected) -> None:
    assert_close(run.state.image, expected["image"], "golden", "image proxies")
    assert_close(run.state.dual, expected["dual"], "golden", "dual variables")
    assert run.state.images.item() == len(stream)


def check_oga(run: Replayed, stream: torch.Tensor, expected: Expected) -> None:
    held = run.state.entropy.isfinite()
    assert held.sum(1).tolist() == expected["count"].tolist()
    entropy = run.state.entropy.masked_fill(~held, math.log(run.task.classes))
    assert_close(entropy, expected["memory_entropy"], "golden", "memory entropy")
    assert_close(run.state.mean, expected["mean"], "golden", "mean")
    assert_close(run.method.precision(run.state).to(stream), expected["precision"], "golden", "precision")


def check_dlae(run: Replayed, stream: torch.Tensor, expected: Expected) -> None:
    check_dpe(run, stream, expected)
    filled = run.state.queue.cost.isfinite()
    assert torch.equal(run.state.time[filled], expected["queue_time"].to(run.state.time)[filled])
    assert_close(run.state.predicted, expected["predicted"], "golden", "predicted")
    assert_close(run.state.confidence, expected["confidence"], "golden", "confidence")


def check_mcp(run: Replayed, stream: torch.Tensor, expected: Expected) -> None:
    state = run.state
    assert_close(state.prototypes, expected["prototypes"], "golden", "prototypes")
    for name, bank in (("entropy", state.entropy), ("align", state.align), ("neg", state.negative)):
        filled = bank.cost.isfinite()
        assert filled.sum(1).tolist() == expected[f"{name}_count"].tolist()
        assert_close(bank.cost.masked_fill(~filled, -1), expected[f"{name}_cost"], "golden", name)


def check_tps(run: Replayed, stream: torch.Tensor, expected: Expected) -> None:
    for name, views in (("shift_first", stream[0]), ("shift_last", stream[-1])):
        assert_close(run.method.shift(run.task, views), expected[name], "golden", name)
    check_nothing(run, stream, {})


def check_nothing(run: Replayed, stream: torch.Tensor, expected: Expected) -> None:
    assert leaves(run.state) == []


class Traced(NamedTuple):
    name: str  # in the registry
    check_state: Callable[[Replayed, torch.Tensor, Expected], None]  # run and stream after the last image
    state: frozenset[str] = frozenset()  # names of `state.*` that `check_state` looks at
    optional: frozenset[str] = frozenset()  # those that some traces leave out
    remarks: frozenset[str] = frozenset()  # hp.* that describe the run and are no settings
    renamed: dict[str, str] = {}  # hp.* -> setting, where the two differ


OFFICIAL = frozenset({"config_is_official"})  # whether the settings are those of the release

PROTOTYPES = frozenset({"text", "text_updates", "queue_features", "queue_entropy", "queue_count"})

# `method` in a trace's metadata -> how it is replayed
METHODS = {
    "DLAE": Traced(
        "dlae",
        check_dlae,
        PROTOTYPES | {"queue_time", "predicted", "confidence"},
        remarks=frozenset({"config", "dataset", "lr_image", *OFFICIAL}),  # the released code never reads lr_image
    ),
    "DPE": Traced("dpe", check_dpe, PROTOTYPES, remarks=frozenset({"config", "dataset", *OFFICIAL})),
    "DMN-ZS": Traced(
        "dmn",
        check_dmn,
        frozenset({"memory_entropy", "memory_count"}),
        optional=frozenset({"memory_features"}),
        remarks=frozenset({"n_shot", "position"}),
    ),
    "DOTA": Traced(
        "dota", check_dota, frozenset({"mean", "counts", "covariance"}), remarks=frozenset({"config", *OFFICIAL})
    ),
    "MCP": Traced(
        "mcp",
        check_mcp,
        frozenset({f"{cache}_{part}" for cache in ("entropy", "align", "neg") for part in ("cost", "count")})
        | {"prototypes"},
        remarks=frozenset({"config", "dataset", *OFFICIAL}),
    ),
    "MTA": Traced("mta", check_nothing),
    "OGA": Traced("oga", check_oga, frozenset({"count", "memory_entropy", "mean", "precision"}), remarks=OFFICIAL),
    "OnZeta": Traced("onzeta", check_onzeta, frozenset({"image", "dual"}), remarks=OFFICIAL),
    "TDA": Traced(
        "tda",
        check_tda,
        frozenset({f"{cache}_{part}" for cache in ("pos", "neg") for part in ("features", "entropy", "count")})
        | {"neg_prob"},
        remarks=frozenset({"dataset"}),
    ),
    "TPS": Traced("tps", check_tps, frozenset({"shift_first", "shift_last"}), remarks=frozenset({"reset", "shift"})),
    "ZERO": Traced("zero", check_nothing, remarks=frozenset({"kept_views"})),
}

# not replayed here: they need the text tower that their traces carry, which the tests of prompt tuning build
ELSEWHERE = {"TPT", "C-TPT"}


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


FOLDERS = (SHARED / "golden", SHARED / "golden-later")
STORED = [path for folder in FOLDERS for path in sorted(folder.glob("*.safetensors"))]
TRACES = [path for path in STORED if metadata(path)["method"] in METHODS]
every_trace = pytest.mark.parametrize("trace", TRACES, ids=lambda path: path.stem)


def settings_in(facts: dict[str, str]) -> dict[str, str]:
    """The settings of a trace, as text; whatever is neither a setting nor a known remark is an error."""
    traced = METHODS[facts["method"]]
    stored = {key.removeprefix("hp."): value for key, value in facts.items() if key.startswith("hp.")}
    if "stream_length" in kinds(registry.method_class(traced.name)):
        stored.setdefault("stream_length", facts["n"])
    stored = {traced.renamed.get(key, key): value for key, value in stored.items() if key not in traced.remarks}
    unknown = set(stored) - set(kinds(registry.method_class(traced.name)))
    assert not unknown, f"hp.* that are no settings of {traced.name}: {sorted(unknown)}"
    return stored


@every_trace
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("opened", STEPPERS.values(), ids=STEPPERS.keys())
def test_replay_gives_the_stored_logits_predictions_and_state(trace, dtype, opened):
    store = Features(trace)
    traced, task = METHODS[store.metadata["method"]], store.task(dtype)
    method = registry.make_method(traced.name, None, settings_in(store.metadata))
    if opened is graph.Stepper and batch_of(method) > 1:
        pytest.skip("a graph captures steps; what reads a batch first runs in the plain loop")
    stepper = opened(task, [method], [method.init(task)])
    stream = unit_views(torch.cat(list(store.chunks(dtype=dtype, size=64))), task.text)
    with torch.inference_mode():
        logits = torch.cat([stepper.scan(chunk)[0] for chunk in stream.split(64)])

    with safe_open(trace, "pt") as file:
        assert_close(logits, file.get_tensor("expected_logits"), "golden", "logits")
        assert torch.equal(logits.argmax(1), file.get_tensor("expected_pred"))
        state = {n.removeprefix("state."): file.get_tensor(n) for n in file.keys() if n.startswith("state.")}
    assert set(state) - traced.optional == traced.state
    traced.check_state(Replayed(task, method, stepper.snapshot()[0]), stream, state)

    accuracy = 100 * (logits.argmax(1) == store.labels).double().mean().item()
    assert accuracy == pytest.approx(float(store.metadata["accuracy"]), abs=1e-4)


@every_trace
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "by name"])
def test_the_command_line_gives_the_stored_logits_and_predictions(trace, recorded, tmp_path):
    facts = metadata(trace)
    named = [part for key, value in settings_in(facts).items() for part in ("--set", f"{key}={value}")]
    output = tmp_path / "out.safetensors"
    with pytest.raises(SystemExit) as done:
        main(
            [
                *("replay", str(trace)),
                *(["--recorded"] if recorded else ["--method", METHODS[facts["method"]].name, *named]),
            ]
            + [*("--dtype", "float64", "--out", str(output), "--json")]
        )
    assert not done.value.code
    found, expected = load_file(output), load_file(trace)
    assert_close(found["logits"], expected["expected_logits"], "golden", "logits")
    assert torch.equal(found["pred"], expected["expected_pred"])


@pytest.mark.parametrize(
    "trace", [path for path in TRACES if metadata(path)["method"] == "DMN-ZS"], ids=lambda p: p.stem
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_the_parts_of_dmn_are_the_stored_ones(trace, dtype):
    """The sum could hide a part that is wrong."""
    store, expected = Features(trace), load_file(trace)
    task, method = store.task(dtype), registry.make_method("dmn", None, settings_in(store.metadata))
    state: Any = method.init(task)
    parts: dict[str, list[torch.Tensor]] = {"vote_prob": [], "text_prob": [], "memory_prob": []}
    for views in unit_views(store.read(0, len(store), dtype), task.text):
        state = method.remember(task, state, views)
        found = method.vote(task, views), *method.parts(task, state, views)
        for name, part in zip(parts, found, strict=True):
            parts[name].append(part)
    for name, rows in parts.items():
        assert_close(torch.stack(rows), expected[f"expected.{name}"], "golden", name)


@pytest.mark.parametrize("method", ["OGA", "OnZeta"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_the_likelihoods_and_corrected_labels_are_the_stored_ones(method, dtype):
    """The posterior could hide a constant that is wrong."""
    for trace in (path for path in TRACES if metadata(path)["method"] == method):
        store, expected = Features(trace), load_file(trace)
        task, made = store.task(dtype), registry.make_method(method.lower(), None, settings_in(store.metadata))
        stream, state, rows = unit_views(store.read(0, len(store), dtype), task.text), made.init(task), []
        for part in stream.split(batch_of(made)):
            before, (_, state) = state, made.scan(task, state, part)
            for views in part[:, 0]:
                if method == "OGA":
                    rows.append(made.log_likelihood(state, views).to(dtype))
                else:
                    rows.append((task.zero_shot(views) + before.dual).softmax(0))
        name = "gauss_log_prob" if method == "OGA" else "text_label"
        found, stored = torch.stack(rows), expected[f"expected.{name}"]
        if method == "OGA":  # sizes of hundreds, stored as float32
            assert ((found - stored) / stored).abs().max() < TOLERANCES["golden"][dtype]["atol"]
        else:
            assert_close(found, stored, "golden", name)


@pytest.mark.parametrize("trace", [path for path in TRACES if metadata(path)["method"] == "MCP"], ids=lambda p: p.stem)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_the_parts_of_mcp_are_the_stored_ones(trace, dtype):
    store, expected, rows = Features(trace), load_file(trace), []
    task, method = store.task(dtype), registry.make_method("mcp", None, settings_in(store.metadata))
    state: Any = method.init(task)
    for views in unit_views(store.read(0, len(store), dtype), task.text):
        parts, state = method.parts(task, state, views)
        rows.append(parts)
    for name, part in zip(("text_prob", "memory_prob", "prototype_prob"), torch.stack(rows, 1), strict=True):
        assert_close(part, expected[f"expected.{name}"], "golden", name)


def test_each_trace_is_replayed_here_or_known_to_be_elsewhere(golden):
    assert {metadata(path)["method"] for path in STORED} == set(METHODS) | ELSEWHERE


@every_trace
def test_the_trace_is_no_zero_shot_run(trace):
    """What is learned shows in the answers, so a method that learned nothing could not pass."""
    store = Features(trace)
    frozen = Session(store.task(torch.float64), "zeroshot").scan(store.read(0, len(store), torch.float64))
    with safe_open(trace, "pt") as file:
        expected = file.get_tensor("expected_logits")
        if (expected.sum(1) - 1).abs().max() < 1e-4:
            frozen = frozen.softmax(1)  # scores that are probabilities
        assert (frozen - expected).abs().max() > 0.1
        assert (frozen.argmax(1) != file.get_tensor("expected_pred")).any()

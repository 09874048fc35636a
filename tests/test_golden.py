"""Stored runs of the authors' released code, replayed through Session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import SHARED
from safetensors import safe_open
from tolerances import assert_close

from testtime import Features, Session, registry
from testtime.bank import Bank
from testtime.methods.base import kinds

Expected = dict[str, torch.Tensor]


def check_queue(bank: Bank, expected: Expected, prefix: str) -> None:
    """A bank against a stored queue, whose empty slots hold feature 0 and entropy -1."""
    filled = bank.cost.isfinite()
    assert filled.sum(1).tolist() == expected[f"{prefix}_count"].tolist()
    assert_close(bank.keys, expected[f"{prefix}_features"], "golden", f"{prefix} features")
    entropy = torch.where(filled, bank.cost, torch.full_like(bank.cost, -1))
    assert_close(entropy, expected[f"{prefix}_entropy"], "golden", f"{prefix} entropy")


def check_dpe(state: Any, expected: Expected) -> None:
    assert_close(state.text, expected["text"], "golden", "text")
    assert state.updates.item() == expected["text_updates"].item()
    check_queue(state.queue, expected, "queue")


class Traced(NamedTuple):
    name: str  # in the registry
    check_state: Callable[[Any, Expected], None]
    state: frozenset[str]  # names of `state.*` that `check_state` looks at
    remarks: frozenset[str] = frozenset()  # hp.* that describe the run and are no settings
    renamed: dict[str, str] = {}  # hp.* -> setting, where the two differ


# `method` in a trace's metadata -> how it is replayed
METHODS = {
    "DPE": Traced(
        "dpe",
        check_dpe,
        frozenset({"text", "text_updates", "queue_features", "queue_entropy", "queue_count"}),
        remarks=frozenset({"config", "config_is_official", "dataset"}),
    ),
}


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


TRACES = [path for path in sorted((SHARED / "golden").glob("*.safetensors")) if metadata(path)["method"] in METHODS]
every_trace = pytest.mark.parametrize("trace", TRACES, ids=lambda path: path.stem)


def settings_in(facts: dict[str, str]) -> dict[str, str]:
    """The settings of a trace, as text; whatever is neither a setting nor a known remark is an error."""
    traced = METHODS[facts["method"]]
    stored = {key.removeprefix("hp."): value for key, value in facts.items() if key.startswith("hp.")}
    stored = {traced.renamed.get(key, key): value for key, value in stored.items() if key not in traced.remarks}
    unknown = set(stored) - set(kinds(registry.method_class(traced.name)))
    assert not unknown, f"hp.* that are no settings of {traced.name}: {sorted(unknown)}"
    return stored


@every_trace
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_replay_gives_the_stored_logits_predictions_and_state(trace, dtype):
    store = Features(trace)
    traced = METHODS[store.metadata["method"]]
    session = Session(store.task(dtype), traced.name, **settings_in(store.metadata))
    logits = torch.cat([session.scan(chunk) for chunk in store.chunks(dtype=dtype, size=64)])

    with safe_open(trace, "pt") as file:
        assert_close(logits, file.get_tensor("expected_logits"), "golden", "logits")
        assert torch.equal(logits.argmax(1), file.get_tensor("expected_pred"))
        state = {n.removeprefix("state."): file.get_tensor(n) for n in file.keys() if n.startswith("state.")}
    assert set(state) == traced.state
    traced.check_state(session.state, state)

    accuracy = 100 * (logits.argmax(1) == store.labels).double().mean().item()
    assert accuracy == pytest.approx(float(store.metadata["accuracy"]), abs=1e-4)


def test_each_method_in_the_table_has_a_trace(golden):
    found = {metadata(path)["method"] for path in golden.glob("*.safetensors")}
    assert set(METHODS) <= found


@every_trace
def test_the_trace_is_no_zero_shot_run(trace):
    """What is learned shows in the logits, so a method that learned nothing could not pass."""
    store = Features(trace)
    frozen = Session(store.task(torch.float64), "zeroshot").scan(store.read(0, len(store), torch.float64))
    with safe_open(trace, "pt") as file:
        assert (frozen - file.get_tensor("expected_logits")).abs().max() > 0.5

"""Metrics and logs: what is counted, that labels have a bound, that a line of the log cannot be forged."""

from __future__ import annotations

import json
import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from testtime.serve.logs import _Lines
from testtime.serve.telemetry import REASONS, STAGES, Telemetry


def answer(**changes: object) -> dict[str, object]:
    usual = {
        "label": "cat", "zero_shot": "cat", "entropy": 0.5, "learned": True, "reason": "", "drift": False,
        "disagreement": 0.25, "milliseconds": dict.fromkeys(STAGES, 2.0),
    }  # fmt: skip
    return usual | changes


def samples(telemetry: Telemetry) -> dict[str, float]:
    """Every sample by its name and labels, as Prometheus would read them."""
    families = text_string_to_metric_families(telemetry.text().decode())
    return {
        f"{sample.name}{dict(sorted(sample.labels.items())) or ''}": sample.value
        for family in families
        for sample in family.samples
    }


def test_an_answer_is_counted_with_its_stages() -> None:
    telemetry = Telemetry()
    telemetry.answered("pets", answer())
    telemetry.answered("pets", answer(label="dog", learned=False, reason="guard: foreign", drift=True))
    found = samples(telemetry)
    assert found["testtime_answers_total{'stream': 'pets'}"] == 2
    assert found["testtime_learned_total{'stream': 'pets'}"] == 1
    assert found["testtime_not_learned_total{'reason': 'guard: foreign', 'stream': 'pets'}"] == 1
    assert found["testtime_disagreements_total{'stream': 'pets'}"] == 1
    assert found["testtime_drift_alarms_total{'stream': 'pets'}"] == 1
    assert found["testtime_disagreement_ratio{'stream': 'pets'}"] == 0.25
    assert found["testtime_entropy_nats_sum{'stream': 'pets'}"] == 1.0
    for stage in STAGES:
        assert found[f"testtime_stage_seconds_sum{{'stage': '{stage}'}}"] == pytest.approx(0.004)


def test_the_rest_is_counted() -> None:
    telemetry = Telemetry()
    telemetry.batch(8, 0.1)
    telemetry.waiting(3)
    telemetry.restarted()
    telemetry.event("pets", "rollback")
    telemetry.refused("no token")
    telemetry.request("/v1/streams/{name}", "GET", 200, 0.01)
    telemetry.watch(lambda: True, lambda: False)
    found = samples(telemetry)
    assert found["testtime_batch_images_sum"] == 8 and found["testtime_batch_seconds_sum"] == 0.1
    assert found["testtime_waiting_images"] == 3 and found["testtime_decoder_restarts_total"] == 1
    assert found["testtime_events_total{'kind': 'rollback', 'stream': 'pets'}"] == 1
    assert found["testtime_refused_requests_total{'reason': 'no token'}"] == 1
    labels = {"method": "GET", "route": "/v1/streams/{name}", "status": "200"}
    assert found[f"testtime_requests_total{labels}"] == 1
    assert found["testtime_ready"] == 1 and found["testtime_read_only"] == 0


def test_a_deleted_stream_takes_its_series_with_it() -> None:
    telemetry = Telemetry()
    before = len(samples(telemetry))
    for number in range(50):
        name = f"stream-{number}"
        telemetry.event(name, "create")
        telemetry.answered(name, answer(learned=False, reason="guard: foreign", drift=True, label="dog"))
        telemetry.event(name, "delete")
    assert not [key for key in samples(telemetry) if "stream-" in key]
    assert len(samples(telemetry)) == before


def test_reasons_and_methods_have_a_bound() -> None:
    telemetry = Telemetry()
    for number in range(200):
        telemetry.answered("pets", answer(learned=False, reason=f"reason {number}"))
        telemetry.answered("pets", answer(learned=False, reason=f"storage: /path/{number}"))
        telemetry.request("other", f"METHOD{number}", 405, 0.0)
    found = samples(telemetry)
    assert len([key for key in found if key.startswith("testtime_not_learned_total")]) <= REASONS + 1
    assert not [key for key in found if "/path" in key]
    assert len([key for key in found if key.startswith("testtime_requests_total")]) == 1


@pytest.mark.parametrize("style", ["text", "json"])
def test_what_a_client_sends_cannot_forge_a_line(style) -> None:
    record = logging.LogRecord("testtime.serve.requests", logging.INFO, "", 0, "request", (), None)
    record.fields = {"path": "/a\n2026 info forged=1 \x1b[31m", "status": 200, "token": None}
    line = _Lines(style).format(record)
    assert len(line.splitlines()) == 1 and "\x1b" not in line and "\\n" in line
    if style == "json":
        assert json.loads(line)["path"] == record.fields["path"] and json.loads(line)["event"] == "request"


def test_a_failure_is_logged_with_its_traceback() -> None:
    try:
        raise RuntimeError("what went wrong")
    except RuntimeError as problem:
        error = (type(problem), problem, problem.__traceback__)
    record = logging.LogRecord("testtime.serve", logging.ERROR, "", 0, "failed", (), error)
    assert "what went wrong" in json.loads(_Lines("json").format(record))["traceback"]
    assert "what went wrong" in _Lines("text").format(record)

"""The growth program measures every axis in small, and finds that a stream's length costs nothing but its images."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def growth(benchmark: Callable[[str], Any]) -> Any:
    return benchmark("growth")


def test_every_axis_is_measured_in_small(growth: Any, tmp_path: Path) -> None:
    out, svg = tmp_path / "growth.json", tmp_path / "growth.svg"
    assert growth.main(["--quick", "--json", str(out), "--svg", str(svg)]) == 0
    report = json.loads(out.read_text())
    assert set(report["axes"]) == set(growth.AXES)
    for axis, rows in report["axes"].items():
        assert [(row["method"], row[axis]) for row in rows] == [
            (name, value) for name in ("dpe", "tda") for value in growth.QUICK[axis]
        ]
        assert all(row["ms"] > 0 and row["steps"] >= 2 and row["state_bytes"] > 0 for row in rows)
    drawn = svg.read_text()
    assert drawn.startswith("<svg") and all(f"by {axis}" in drawn for axis in (*growth.AXES, "images"))


@pytest.mark.parametrize("name", ["dpe", "tda"])
def test_the_state_takes_as_much_after_a_long_stream_as_before_it(growth: Any, name: str) -> None:
    rows = growth.lengths(name, 2000, "cpu")
    assert [row["images"] for row in rows] == list(range(200, 2001, 200))
    task = growth.tt.toy(classes=10, dim=64, images=1, views=1)[0]
    assert {row["state_bytes"] for row in rows} == {growth.state_bytes(growth.tt.make_method(name).init(task))}


@pytest.mark.parametrize("name", ["dpe", "tda"])
def test_a_full_state_gives_way_to_every_image(growth: Any, name: str) -> None:
    task, stream, _ = growth.tt.toy(classes=10, dim=16, images=6, views=4)
    method = growth.method_of(name, 3)
    session = growth.tt.Session(task, method)
    session.state = state = growth.full(name, method, task)
    assert [leaf.shape for leaf in growth.leaves(state)] == [leaf.shape for leaf in growth.leaves(method.init(task))]
    assert growth.planned_bytes(name, growth.Size(10, 16, 4, 3)) == pytest.approx(growth.state_bytes(state), rel=0.2)
    assert all(session.step(views).learned for views in stream)


def test_a_state_too_large_is_left_out_and_said_so(growth: Any) -> None:
    row = growth.measure("tda", growth.Size(20_000, 512, 64, 3), "cpu", 1.0)
    assert row["left out"] == "a state of 5.0 GB" and "ms" not in row


def test_a_stream_too_short_to_compare_its_parts_is_refused(growth: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        growth.main(["--images", "9"])
    assert "at least 10" in capsys.readouterr().err

from __future__ import annotations

import json

import pytest
import torch

from testtime.cli.app import main
from testtime.cli.demo import demo_stream, largest


def test_the_packaged_stream_is_the_test_split() -> None:
    task, views, labels = demo_stream()
    assert views.shape == (2465, 1, 1664) and task.classes == 100
    assert torch.allclose(views.norm(dim=-1), torch.ones(()))
    assert labels.bincount(minlength=100).min() > 0
    assert not torch.equal(labels, labels.sort().values)  # shuffled


def test_the_largest_classes_keep_their_names_and_labels() -> None:
    task, views, labels = demo_stream()
    part, part_views, part_labels = largest(task, views, labels, 20)
    assert part.classes == 20 and len(part_views) == 1177
    kept = {part.classnames[i] for i in part_labels.tolist()}
    assert kept == set(part.classnames) <= set(task.classnames)
    counts = {name: int((labels == i).sum()) for i, name in enumerate(task.classnames)}
    assert min(counts[name] for name in kept) >= max(counts[n] for n in counts if n not in kept)


def test_the_demo_prints_gains_and_writes_a_page(tmp_path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    from testtime.cli import demo

    task, views, labels = demo_stream()
    monkeypatch.setattr(demo, "demo_stream", lambda: largest(task, views, labels, 20))
    threads = torch.get_num_threads()
    main_result = None
    try:
        main(["demo", "--out", str(tmp_path), "--json"])
    except SystemExit as stop:
        main_result = stop.code
    finally:
        torch.set_num_threads(threads)
    assert not main_result
    summary = json.loads(capsys.readouterr().out)
    small = summary["results"]["The twenty most frequent classes"]
    assert small["n"] == 1177
    assert small["dpe"]["accuracy"] > small["tda"]["accuracy"] > small["zeroshot"]["accuracy"]
    page = (tmp_path / "report.html").read_text()
    assert page.startswith("<!doctype html>") and "Caltech101" in page and "dpe" in page
    assert (tmp_path / "accuracy.svg").read_text().startswith("<svg")

"""Replaying a store: memory that does not grow with it, and orders and limits that read what they name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import testtime as tt
from testtime.encoding.store import Features, save_features, write_index
from testtime.session.replay import replay
from testtime.types import FeatureError

SHARDS, IMAGES, VIEWS, DIM, CLASSES = 6, 100, 256, 1024, 5  # 105 MB in float32 a shard, 630 MB in all

# how much the peak rises over what is resident once one chunk has gone through every part that is loaded late
PROGRAM = """
import sys
from testtime.encoding.store import Features
from testtime.machine.memory import Peak
from testtime.session.replay import replay

replay(Features(sys.argv[1]), "dpe", limit=64, keep_logits=False)
with Peak() as peak:
    run = replay(Features(sys.argv[1]), "dpe", keep_logits=False)
print(len(run.predictions), peak.megabytes)
"""


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A folder of shards, 630 MB in all."""
    noise = torch.Generator().manual_seed(0)
    text = tt.ops.unit(torch.randn(CLASSES, DIM, generator=noise))
    scatter = 0.3 * torch.randn(IMAGES, VIEWS, DIM, generator=noise)
    for shard in range(SHARDS):
        labels = torch.randint(CLASSES, (IMAGES,), generator=noise)
        views = scatter.roll(shard, 2).add_(text[labels][:, None])
        save_features(tmp_path / f"{shard}.safetensors", views, text, labels=labels)
    write_index(tmp_path, [f"{shard}.safetensors" for shard in range(SHARDS)])
    return tmp_path


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, its memory is what is measured")
def test_a_store_larger_than_the_memory_it_may_take_is_replayed(large: Path) -> None:
    assert sum(os.path.getsize(file) for file in large.iterdir()) > 600e6
    command = [sys.executable, "-c", PROGRAM, str(large)]
    images, megabytes = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert int(images) == SHARDS * IMAGES
    assert float(megabytes) < 250  # of which the compiled loops take most


@pytest.fixture
def store(tmp_path: Path) -> Features:
    task, stream, labels = tt.toy(images=40)
    return Features(save_features(tmp_path / "toy.safetensors", stream, task.text, labels=labels))


def test_logits_that_are_not_kept_change_nothing_else(store: Features) -> None:
    kept, lost = (replay(store, "dpe", keep_logits=keep) for keep in (True, False))
    assert kept.logits.shape == (40, 8) and lost.logits.shape == (0, 8)
    assert torch.equal(kept.predictions, kept.logits.argmax(1)) and torch.equal(lost.predictions, kept.predictions)
    untimed = {"seconds": 0, "loading_seconds": 0}
    assert lost.summary() | untimed == kept.summary() | untimed


def test_a_limited_run_is_the_start_of_a_full_one(store: Features) -> None:
    for options in ({}, {"shuffle": True, "seed": 3}):
        whole, part = replay(store, "dpe", **options), replay(store, "dpe", limit=7, **options)
        assert torch.equal(part.logits, whole.logits[:7]) and torch.equal(part.labels, whole.labels[:7])
        assert torch.equal(part.order, whole.order[:7])


def test_neighbours_are_read_together(store: Features, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    read = Features.read
    monkeypatch.setattr(Features, "read", lambda self, *place: reads.append(place[:2]) or read(self, *place))
    every = torch.cat(list(store.chunks()))
    assert torch.equal(torch.cat(list(store.chunks(range(5, 12)))), every[5:12])
    assert torch.equal(torch.cat(list(store.chunks([3, 1, 2]))), every[[3, 1, 2]])
    assert reads == [(0, 40), (5, 12), (3, 4), (1, 2), (2, 3)]


def test_a_store_that_changes_while_it_is_read_is_refused(store: Features) -> None:
    task, stream, _ = tt.toy(images=30)
    save_features(store.path, stream, task.text)
    with pytest.raises(FeatureError, match="has changed since"):
        store.read(0, 1)
    store.path.unlink()
    with pytest.raises(FeatureError, match="Cannot read"):
        store.read(0, 1)


def test_a_file_that_is_cut_short_while_it_is_read_is_refused(store: Features, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("testtime.files._identity", lambda descriptor: store._rows[0]._identity)
    os.truncate(store.path, os.path.getsize(store.path) - 8)
    with pytest.raises(FeatureError, match="cut short"):
        store.read(0, 40)

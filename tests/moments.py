"""Sessions at every moment of a stream, and their histories."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch

import testtime as tt
from testtime import Session
from testtime.session.history import History

START = datetime(2026, 1, 1, tzinfo=UTC)


class Clock:
    """A second passes with every look at it."""

    def __init__(self) -> None:
        self.time = START

    def __call__(self) -> datetime:
        self.time += timedelta(seconds=1)
        return self.time


def saved(session: Session) -> bytes:
    """All that a session holds."""
    with tempfile.TemporaryDirectory() as folder:
        return session.save(Path(folder) / "s").read_bytes()


def feed(session: Session, views: torch.Tensor) -> None:
    """One image; one of NaN is skipped, like a file that cannot be read."""
    list(session.run([views], on_error=lambda *_: None))


def spoilt(stream: Sequence[torch.Tensor] | torch.Tensor, bad: set[int]) -> list[torch.Tensor]:
    """A stream in which some images cannot be used."""
    return [torch.full_like(views, torch.nan) if n in bad else views for n, views in enumerate(stream)]


def moments(session: Session, stream: list[torch.Tensor]) -> list[bytes]:
    """What the session holds before each image, and after the last."""
    found = [saved(session)]
    for views in stream:
        feed(session, views)
        found.append(saved(session))
    return found


def begun(task: tt.Task, stream: torch.Tensor, folder: Path, **options: Any) -> History:
    """The history of a session that has seen a stream."""
    history = History(Session(task, "dpe"), folder, **({"clock": Clock(), "every": 5} | options))
    for views in stream:
        history.session.step(views)
    return history


def names_in(folder: Path, kind: str) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(kind))

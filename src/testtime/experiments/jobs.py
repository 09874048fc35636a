"""Jobs: independent parts of an experiment, and where they are run: here, one after another, or by another executor.

A job can be sent to another process: it is a function of a module with its arguments, and names feature stores by their
place. Its result is plain data, which the process that made the job writes.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from testtime.encoding.store import Features
from testtime.files.identity import digest
from testtime.types import InputError, MissingPart

REPORT_INTERVAL = 20  # seconds between two progress reports of a run


class Where(NamedTuple):
    """Where a job runs."""

    device: torch.device
    report: Callable[[str], None]


class Job(NamedTuple):
    """An independent part of an experiment: `function(where, shared, *own)`."""

    key: Any  # the caller's own, returned with the result; it stays here
    what: str  # the job in a few words
    function: Callable[..., Any]
    shared: Any  # the same object for several jobs: it is sent once
    own: tuple[Any, ...]
    where: Where  # in this process; elsewhere, a device of the same kind
    threads: int = 1  # of torch, where they could change the last bit of a result


# Results as they are finished, each with its job's key; MissingPart is a result. Jobs are taken when they can start.
Executor = Callable[[Iterable[Job]], Iterator[tuple[Any, Any]]]


def in_order(jobs: Iterable[Job]) -> Iterator[tuple[Any, Any]]:
    """Every job in this process, one after another."""
    for job in jobs:
        try:
            result = job.function(job.where, job.shared, *job.own)
        except MissingPart as reason:
            result = reason
        yield job.key, result


def occasional(report: Callable[[str], None]) -> Callable[[str], None]:
    """`report`, but silent for a while after each line."""
    reported = time.perf_counter()

    def line(text: str) -> None:
        nonlocal reported
        if time.perf_counter() - reported > REPORT_INTERVAL:
            reported = time.perf_counter()
            report(text)

    return line


@dataclass(frozen=True)
class Place:
    """Where a feature store is, so that another process can open it and tell that it is the same."""

    path: Path  # absolute
    content: str  # a digest of what it holds

    @classmethod
    def of(cls, store: Features) -> Place:
        """The place of an open store."""
        place = cls(Path(os.path.abspath(store.path)), _content(store))
        place.__dict__["store"] = store
        return place

    @cached_property
    def store(self) -> Features:
        """The store; in a process to which its place was sent, it is opened."""
        try:
            store = Features(self.path)
        except InputError as problem:
            raise InputError(
                f"{platform.node()} cannot use {self.path}: {problem} Features must be in a folder that every machine "
                "sees under the same name."
            ) from None
        if _content(store) != self.content:
            raise InputError(
                f"{platform.node()} has another {self.path}. Features must be in a folder that every machine sees "
                "under the same name."
            )
        return store

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "content": self.content}


def _content(store: Features) -> str:
    """A digest of a store's shards: names, sizes, and what their headers say; times may differ between machines."""
    shards = [f"{file.name} {os.stat(file).st_size}" for file in store.files]
    return digest([*shards, json.dumps(store.metadata, sort_keys=True), store.text.numpy(force=True).tobytes()])

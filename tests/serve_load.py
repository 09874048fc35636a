"""Clients that keep a service busy while something dies, and the check that nothing was lost and nothing done twice."""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

import testtime as tt
from testtime.serve.client import Client

CLASSES = ["cat", "dog", "fox", "owl"]


def photograph(number: int) -> bytes:
    data = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((48, 40), Image.Resampling.BICUBIC).save(data, "PNG")
    return data.getvalue()


class Load:
    """Clients that send different images, each to one of the streams, until `images` are answered and the block ends.

    `acknowledged` has the stream, the number and the event of every image that was answered. With `keys`, an image that
    is sent again because its connection broke is the same image to the service.
    """

    def __init__(self, url: str, streams: list[str], clients: int, images: int, keys: bool = True) -> None:
        self.acknowledged: list[tuple[str, int, int]] = []
        self._url, self._streams, self._images, self._keys = url, streams, images, keys
        self._numbers, self._lock, self._ending = iter(range(10**9)), threading.Lock(), threading.Event()
        self._problems: list[BaseException] = []
        self._threads = [threading.Thread(target=self._send) for _ in range(clients)]

    def _send(self) -> None:
        try:
            with Client(self._url, attempts=10_000, timeout=60) as client:
                while not self._problems:
                    with self._lock:
                        if self._ending.is_set() and len(self.acknowledged) >= self._images:
                            return
                        number = next(self._numbers)
                    stream = self._streams[number % len(self._streams)]
                    answer = self._sent(client, stream, number)
                    with self._lock:
                        self.acknowledged.append((stream, number, answer["id"]))
        except BaseException as problem:
            self._problems.append(problem)

    def _sent(self, client: Client, stream: str, number: int) -> dict[str, Any]:
        if self._keys:
            return client.classify(stream, photograph(number), name=str(number), key=f"key {number}")
        url, headers = f"{self._url}/v1/streams/{stream}/images", {"X-Image-Name": str(number)}
        answer = httpx.post(
            url, content=photograph(number), headers=headers | {"Content-Type": "image/png"}, timeout=90
        )
        answer.raise_for_status()
        assert answer.json()["answers"][0]["repeated"] is False
        return answer.json()["answers"][0]

    def wait(self, images: int) -> None:
        """Wait until so many images are answered."""
        while len(self.acknowledged) < images:
            assert not self._problems, self._problems
            time.sleep(0.01)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(timeout=120)
        if problem is None:
            assert not self._problems, self._problems
            assert len(self.acknowledged) >= self._images


def logs_and_states(client: Client, streams: list[str]) -> tuple[dict[str, list[Any]], dict[str, bytes]]:
    """The logs of streams, and what they have learned."""
    return {name: log_of(client, name) for name in streams}, {name: client.export(name) for name in streams}


def check_nothing_lost_or_twice(
    acknowledged: list[tuple[str, int, int]], logs: dict[str, list[Any]], states: dict[str, bytes], folder: Path
) -> None:
    """What was acknowledged is in the logs, once, where it was said to be; states equal an offline replay."""
    known = {(name, int(row["image"])): row["id"] for name, rows in logs.items() for row in rows}
    assert sum(map(len, logs.values())) == len(known)  # none twice
    assert all(known[stream, number] == event for stream, number, event in acknowledged)  # none lost, none moved
    encoder = tt.load_encoder("tiny")
    for name, rows in logs.items():
        session = tt.Session(tt.build_task(encoder, CLASSES), "dpe", encoder=encoder, guard=True)
        for row in rows:
            session.position = row["index"]
            answer = session.step(Image.open(io.BytesIO(photograph(int(row["image"])))).convert("RGB"))
            assert (answer.label, answer.learned) == (row["label"], row["learned"])
        (folder / name).write_bytes(states[name])
        assert equal(load_file(folder / name), load_file(session.save(folder / f"{name}.offline")))


def log_of(client: Client, stream: str) -> list[Any]:
    """All images of a stream's log, oldest first."""
    rows: list[Any] = []
    while found := client.images(stream, before=rows[-1]["id"] if rows else None, limit=200):
        rows += found
    return rows[::-1]


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)

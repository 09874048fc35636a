"""The real server, killed again and again under load: no acknowledged image is lost, none is learned twice."""

from __future__ import annotations

import io
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")

import testtime as tt  # noqa: E402
from testtime.serve.client import Client, ServiceError  # noqa: E402

IMAGES, STREAMS, CLIENTS, KILLS = 2000, 4, 16, 20
CLASSES = ["cat", "dog", "fox", "owl"]


def photograph(number: int) -> bytes:
    data = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((48, 40), Image.Resampling.BICUBIC).save(data, "PNG")
    return data.getvalue()


class Server:
    """A server process on a port of its own, over one folder."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder, self.log, self.starts = folder, folder.parent / "server.log", 0
        self.start()

    def start(self) -> None:
        options = [
            "--encoder",
            "tiny",
            "--port",
            str(self.port),
            "--folder",
            str(self.folder),
            "--snapshot-every",
            "50",
            "--processes",
            str(2 * (self.starts % 2)),  # every second time, HTTP is spoken by processes of its own
        ]
        self.starts += 1
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "testtime", "serve", *options], stdout=log, stderr=log, env=os.environ
            )

    def wait(self) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                with Client(self.url, attempts=1, timeout=5) as client:
                    client.info()
                return
            except (ConnectionError, ServiceError):
                time.sleep(0.1)
        raise AssertionError(f"not ready: {self.log.read_text()[-3000:]}")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(timeout=60)


def test_kill_nine_loses_no_acknowledged_image_and_learns_none_twice(tmp_path: Path) -> None:
    server, chance = Server(tmp_path / "service"), random.Random(0)
    server.wait()
    with Client(server.url) as client:
        for number in range(STREAMS):
            client.create(f"s{number}", CLASSES)
    acknowledged: list[tuple[str, int, int]] = []  # stream, image, id
    numbers, lock, killed = iter(range(10**9)), threading.Lock(), threading.Event()
    problems: list[BaseException] = []

    def send() -> None:
        try:
            with Client(server.url, attempts=10_000, timeout=30) as client:
                while not problems:
                    with lock:
                        if killed.is_set() and len(acknowledged) >= IMAGES:
                            return
                        number = next(numbers)
                    stream = f"s{number % STREAMS}"
                    answer = client.classify(stream, photograph(number), name=str(number), key=f"key {number}")
                    with lock:
                        acknowledged.append((stream, number, answer["id"]))
        except BaseException as problem:
            problems.append(problem)

    clients = [threading.Thread(target=send) for _ in range(CLIENTS)]
    for thread in clients:
        thread.start()
    try:
        for _ in range(KILLS):
            time.sleep(chance.uniform(0.05, 1.5))
            server.kill()
            server.start()
            server.wait()
    finally:
        killed.set()
        for thread in clients:
            thread.join(timeout=300)
    assert not problems, problems
    assert len(acknowledged) >= IMAGES
    encoder = tt.load_encoder("tiny")
    with Client(server.url) as client:
        logs = {name: log_of(client, name) for name in (f"s{number}" for number in range(STREAMS))}
        states = {name: client.export(name) for name in logs}
    assert server.stop() == 0, server.log.read_text()[-3000:]
    known = {(name, int(row["image"])): row["id"] for name, rows in logs.items() for row in rows}
    assert sum(map(len, logs.values())) == len(known)  # none twice
    assert all(known[stream, number] == event for stream, number, event in acknowledged)  # none lost, none moved
    for name, rows in logs.items():
        session = tt.Session(tt.build_task(encoder, CLASSES), "dpe", encoder=encoder, guard=True)
        for row in rows:
            session.position = row["index"]
            answer = session.step(Image.open(io.BytesIO(photograph(int(row["image"])))).convert("RGB"))
            assert (answer.label, answer.learned) == (row["label"], row["learned"])
        (tmp_path / name).write_bytes(states[name])
        assert equal(load_file(tmp_path / name), load_file(session.save(tmp_path / f"{name}.offline")))


def log_of(client: Client, stream: str) -> list[Any]:
    """All images of a stream's log, oldest first."""
    rows: list[Any] = []
    while found := client.images(stream, before=rows[-1]["id"] if rows else None, limit=200):
        rows += found
    return rows[::-1]


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)

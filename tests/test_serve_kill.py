"""The real server, killed again and again under load: no acknowledged image is lost, none is learned twice."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")

from serve_load import CLASSES, Load, check_nothing_lost_or_twice, logs_and_states  # noqa: E402

from testtime.serve.client import Client, ServiceError  # noqa: E402

IMAGES, STREAMS, CLIENTS, KILLS = 2000, 4, 16, 20


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
    streams = [f"s{number}" for number in range(STREAMS)]
    with Client(server.url) as client:
        for name in streams:
            client.create(name, CLASSES)
    with Load(server.url, streams, CLIENTS, IMAGES) as load:
        for _ in range(KILLS):
            time.sleep(chance.uniform(0.05, 1.5))
            server.kill()
            server.start()
            server.wait()
    with Client(server.url) as client:
        logs, states = logs_and_states(client, streams)
    assert server.stop() == 0, server.log.read_text()[-3000:]
    check_nothing_lost_or_twice(load.acknowledged, logs, states, tmp_path)

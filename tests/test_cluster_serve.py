"""The service on Ray: each stream in an actor, which may die, or its machine, and nothing acknowledged is lost.

TESTTIME_KILLS=20 pytest tests/test_cluster_serve.py kills actors twenty times; by default it is three times.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")

import httpx  # noqa: E402
from serve_load import CLASSES, Load, check_nothing_lost_or_twice, logs_and_states, photograph  # noqa: E402

import testtime as tt  # noqa: E402
from testtime.cluster.directory import check_layout, folder_of, streams_in  # noqa: E402
from testtime.serve.client import Client, ServiceError  # noqa: E402
from testtime.serve.types import Limits, Settings  # noqa: E402

KILLS = int(os.environ.get("TESTTIME_KILLS", "3"))
MEMORY = 100 * 2**20


class Served(NamedTuple):
    """A service on a cluster of this machine."""

    cluster: Any
    nodes: list[Any]  # those that may die
    folder: Path
    url: str

    def actor(self, stream: str) -> Any:
        from testtime.cluster.front import NAMESPACE, prefix

        return ray.get_actor(prefix(self.folder) + stream, NAMESPACE)

    def place(self, stream: str) -> tuple[str, int]:
        """The node and the process of a stream, once it is loaded there."""
        deadline = time.monotonic() + 90
        while True:
            try:
                return ray.get(self.actor(stream).ping.remote(), timeout=30)
            except (ray.exceptions.RayError, ValueError):
                assert time.monotonic() < deadline
                time.sleep(0.1)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    from ray.cluster_utils import Cluster

    from testtime.cluster.connect import connected
    from testtime.cluster.serving import Plan, serving

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("service")
    settings = Settings(limits=Limits(streams=5), decoders=1, snapshot_every=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(tt.__file__).parents[1]))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": MEMORY})
        try:
            nodes = [cluster.add_node(num_cpus=1, object_store_memory=MEMORY) for _ in range(2)]
            with connected(f"ray:{cluster.address}"), serving(Plan(folder, "tiny", "cpu", settings, port=port)):
                yield Served(cluster, nodes, folder, f"http://127.0.0.1:{port}")
        finally:
            cluster.shutdown()


def test_answers_equal_an_offline_session_and_every_call_reaches_its_stream(served: Served, tmp_path: Path) -> None:
    with Client(served.url) as client:
        client.create("pets", CLASSES)
        with Load(served.url, ["pets"], clients=1, images=25) as load:
            pass
        logs, states = logs_and_states(client, ["pets"])
        check_nothing_lost_or_twice(load.acknowledged, logs, states, tmp_path)
        assert client.info()["streams"] == 1 and [each["name"] for each in client.streams()] == ["pets"]
        snapshot = client.snapshot("pets", "before")
        last = client.classify("pets", photograph(1000), learn=True)
        assert client.label("pets", last["id"], "cat")["label"] == "cat"
        assert client.rollback("pets", snapshot=snapshot["id"])["images"] == 25
        forked = client.fork("pets", "twin")
        assert forked["position"] == client.stream("pets")["position"]
        answers = [client.classify(name, photograph(2000), name="same") for name in ("pets", "twin")]
        assert answers[0]["probabilities"] == answers[1]["probabilities"]
        assert {each["name"] for each in client.streams()} == {"pets", "twin"}
        client.delete("twin")
        assert list(streams_in(served.folder)) == ["pets"]
        with pytest.raises(ServiceError, match="no stream 'twin'"):
            client.stream("twin")
    text = httpx.get(f"{served.url}/metrics").text
    assert 'testtime_answers_total{process="stream pets",stream="pets"}' in text
    assert text.count("# TYPE testtime_answers_total") == 1
    with pytest.raises(ValueError):
        served.actor("twin")  # its process has ended


def test_events_of_a_stream_arrive_as_they_happen(served: Served) -> None:
    with Client(served.url) as client, httpx.stream("GET", f"{served.url}/v1/streams/pets/events", timeout=30) as lines:
        found = lines.iter_lines()
        assert next(found) == ": connected"
        client.classify("pets", photograph(3000), name="seen")
        assert any("seen" in line for line in found if line.startswith("data:"))


def test_images_over_a_websocket_are_answered_in_order(served: Served) -> None:
    from websockets.sync.client import connect

    with connect(f"{served.url.replace('http', 'ws')}/v1/streams/pets/live?learn=false") as live:
        for number in range(3):
            live.send(photograph(number))
            assert json.loads(live.recv(30))["reason"] == "predict only"


def test_an_actor_that_lost_its_folder_leaves_and_the_next_one_answers(served: Served) -> None:
    from testtime.serve.store import Store

    _, process = served.place("pets")
    with Client(served.url) as client:
        before = client.stream("pets")["images"]
        Store(folder_of(served.folder, "pets"), take_over=True).close()  # as an actor on another machine would
        assert client.classify("pets", photograph(5000), name="5000")["id"] is not None
        assert client.stream("pets")["images"] == before + 1
    assert served.place("pets")[1] != process


def test_mistakes_are_told_and_leave_nothing_behind(served: Served) -> None:
    with Client(served.url) as client:
        with pytest.raises(ServiceError, match="dpee") as problem:
            client.create("wrong", CLASSES, method="dpee")
        assert problem.value.status == 422
        with pytest.raises(ServiceError, match="already") as problem:
            client.create("pets", CLASSES)
        assert problem.value.status == 409
        with pytest.raises(ServiceError, match="no stream 'none'") as problem:
            client.classify("none", photograph(0))
        assert problem.value.status == 404
    assert list(streams_in(served.folder)) == ["pets"]
    with pytest.raises(ValueError):
        served.actor("wrong")


def test_an_encoder_that_dies_costs_time_alone(served: Served) -> None:
    with Client(served.url) as client:
        (replica,) = (
            each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if "#encoders#" in each["name"]
        )
        ray.kill(ray.get_actor(replica, "serve"))
        before = client.stream("pets")["images"]
        client.classify("pets", photograph(4000), name="4000")
        assert client.stream("pets")["images"] == before + 1


def test_actors_killed_under_load_lose_nothing_and_learn_nothing_twice(served: Served, tmp_path: Path) -> None:
    streams, chance = ["a", "b"], random.Random(0)
    with Client(served.url) as client:
        for name in streams:
            client.create(name, CLASSES)
    with Load(served.url, streams, clients=6, images=100, keys=False) as load:  # the service gives them keys of its own
        for kill in range(KILLS):
            _, process = served.place(streams[kill % 2])
            time.sleep(chance.uniform(0.05, 1.5))
            os.kill(process, signal.SIGKILL)
        for name in streams:
            served.place(name)
    with Client(served.url) as client:
        check_nothing_lost_or_twice(load.acknowledged, *logs_and_states(client, streams), tmp_path)
        for name in streams:
            client.delete(name)


def test_a_stream_whose_machine_dies_moves_to_another(served: Served, tmp_path: Path) -> None:
    with Client(served.url, attempts=100) as client:
        for name in ("m0", "m1", "m2", "m3"):
            client.create(name, CLASSES)
            home, _ = served.place(name)
            dying = [node for node in served.nodes if node.node_id == home]
            if dying:
                break
        with Load(served.url, [name], clients=3, images=50) as load:
            load.wait(10)
            served.cluster.remove_node(dying[0], allow_graceful=False)
        assert served.place(name)[0] != home
        check_nothing_lost_or_twice(load.acknowledged, *logs_and_states(client, [name]), tmp_path)


def test_a_folder_of_the_other_kind_of_service_is_refused(tmp_path: Path) -> None:
    (tmp_path / "streams").mkdir()
    with pytest.raises(tt.InputError, match="on Ray"):
        check_layout(tmp_path, on_ray=False)
    (tmp_path / "testtime.sqlite").touch()
    with pytest.raises(tt.InputError, match="on one machine"):
        check_layout(tmp_path, on_ray=True)


def test_the_command_starts_what_its_options_say(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from testtime.cluster import connect, serving

    plans: list[serving.Plan] = []

    @contextmanager
    def noted(plan: serving.Plan, stays: bool) -> Iterator[None]:
        assert not stays  # Ray on this machine ends with the command
        plans.append(plan)
        yield

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(connect, "connected", lambda on: nullcontext())
    monkeypatch.setattr(serving, "serving", noted)
    monkeypatch.setattr(serving, "wait_for_signal", lambda: None)
    options = ("--port", 0, "--folder", tmp_path / "new", "--processes", 3, "--decoders", 5, "--encoders", 2)
    outcome = cli("serve", "--on", "ray", "--encoder", "tiny", *options)
    assert outcome.code == 0, outcome.err
    (plan,) = plans
    assert (plan.fronts, plan.settings.decoders, plan.min_encoders, plan.max_encoders) == (3, 5, 2, 4)
    assert f"http://127.0.0.1:{plan.port}/" in outcome.err and plan.port != 0
    assert plan.folder == (tmp_path / "new").resolve()


def test_options_of_ray_need_it(cli: Any, tmp_path: Path) -> None:
    outcome = cli("serve", "--encoders", "2", "--folder", tmp_path)
    assert outcome.code == 2 and "--on ray" in outcome.err
    outcome = cli("serve", "--on", "ray", "--encoders", "3", "--max-encoders", "2", "--folder", tmp_path)
    assert outcome.code == 2 and "the second not smaller" in outcome.err

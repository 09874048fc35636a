"""Encoding on Ray: the bytes of the local command, whatever the number of workers, and whichever of them die.

With TESTTIME_TESTS_ALL_IMAGES=1, on all 2,465 images of Caltech101's test part instead of some.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from small_data import make_folders

import testtime as tt
from testtime import errors
from testtime.cluster import connect
from testtime.cluster.encode import Place, RayStream, placed
from testtime.cluster.pool import Pool
from testtime.datasets import open_dataset
from testtime.encoding import encode as encoding
from testtime.errors import ImageError, InputError, MissingPart
from testtime.types import ViewPlan

ray = pytest.importorskip("ray")
IMAGES = None if os.environ.get("TESTTIME_TESTS_ALL_IMAGES") else 160
PLAN = ViewPlan(2, seed=5)
SHARD = 50
# Ray leaves sockets of its own open, which are found whenever memory is next collected
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def cluster():
    """Four machines of one CPU each."""
    from ray.cluster_utils import Cluster

    machine = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=machine | {"include_dashboard": False})
    for _ in range(3):
        cluster.add_node(**machine)
    ray.init(cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    gc.collect()


@pytest.fixture(scope="module")
def encoder():
    return tt.load_encoder("tiny")


@pytest.fixture(scope="module")
def task(encoder):
    return tt.build_task(encoder, ["face", "leopard"], templates=["a photo of a {}."])


@pytest.fixture(scope="module")
def paths(data) -> list[Path]:
    return list(open_dataset(data / "caltech-101").paths)[:: 1 if IMAGES is None else 10][:IMAGES]


@pytest.fixture(scope="module")
def local(encoder, task, paths, tmp_path_factory) -> dict[str, bytes]:
    """The files that the local command writes."""
    folder = tmp_path_factory.mktemp("local")
    encoding.encode(encoder, task, paths, folder, PLAN, shard=SHARD)
    return contents(folder)


@pytest.fixture
def actors(monkeypatch) -> list:
    """The actors that pools have started."""
    found: list = []
    make = Pool._start

    def start(self: Pool) -> None:
        make(self)
        found.append(list(self.starting.values())[-1])

    monkeypatch.setattr(Pool, "_start", start)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def on_ray(workers: int, tasks: bool | None = None) -> RayStream:
    return RayStream(workers=workers, dtype=torch.float16, tasks=tasks)


either = pytest.mark.parametrize("tasks", [False, True], ids=["workers read", "tasks read"])


@either
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_shards_are_the_bytes_of_the_local_command(
    cluster, encoder, task, paths, local, tmp_path, workers, tasks
) -> None:
    counts: list[int] = []
    streamed = on_ray(workers, tasks)
    found = encoding.encode(
        encoder, task, paths, tmp_path, PLAN, shard=SHARD, streamed=streamed, progress=counts.append
    )
    assert found == len(paths) and counts == list(range(1, len(paths) + 1))
    assert contents(tmp_path) == local


@either
def test_killed_workers_are_replaced(cluster, encoder, task, paths, local, tmp_path, actors, tasks) -> None:
    killed: list[int] = []

    def kill(done: int) -> None:
        if not killed:
            killed.extend(ray.get([actor.__ray_call__.remote(lambda self: os.getpid()) for actor in actors]))
            for process in killed:
                os.kill(process, signal.SIGKILL)

    encoding.encode(encoder, task, paths, tmp_path, PLAN, shard=SHARD, streamed=on_ray(2, tasks), progress=kill)
    assert len(killed) == 2 and len(actors) == 4
    assert contents(tmp_path) == local


@either
def test_a_lost_machine_without_room_for_another_worker_only_slows(
    cluster, encoder, task, paths, local, tmp_path, actors, tasks
) -> None:
    lost: list[str] = []

    def lose(done: int) -> None:
        if done == 20:
            where = [
                actor.__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id()) for actor in actors
            ]
            ready = ray.get(ray.wait(where, num_returns=2)[0])
            node = next(node for node in cluster.worker_nodes if node.node_id in ready)
            lost.append(node.node_id)
            cluster.remove_node(node, allow_graceful=False)

    encoding.encode(encoder, task, paths, tmp_path, PLAN, shard=SHARD, streamed=on_ray(4, tasks), progress=lose)
    cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
    assert lost
    assert contents(tmp_path) == local


def test_finished_shards_are_kept(cluster, encoder, task, paths, local, tmp_path) -> None:
    encoding.encode(encoder, task, paths, tmp_path, PLAN, shard=SHARD, streamed=on_ray(2))
    first, second, *_ = sorted(tmp_path.glob("features-*"))
    second.unlink()
    before, asked = first.stat().st_mtime_ns, []

    def streamed(encoder, images, plan, *, indices):
        asked.extend(indices)
        return on_ray(1)(encoder, images, plan, indices=indices)

    encoding.encode(encoder, task, paths, tmp_path, PLAN, shard=SHARD, resume=True, streamed=streamed)
    assert asked == list(range(SHARD, 2 * SHARD)) and first.stat().st_mtime_ns == before
    assert contents(tmp_path) == local


@either
def test_images_that_cannot_be_read_are_reported_as_by_the_local_command(
    cluster, encoder, task, tmp_path, tasks
) -> None:
    paths = sorted(make_folders(tmp_path / "images").rglob("*.png"))
    paths[2].write_text("no image")
    paths[7].unlink()
    skipped: dict[str, list[str]] = {"local": [], "ray": []}
    for name, streamed in {"local": encoding.stream, "ray": on_ray(1, tasks)}.items():
        encoding.encode(
            encoder, task, paths, tmp_path / name, PLAN, shard=5, on_skip=skipped[name].append, streamed=streamed
        )
    assert skipped["ray"] == skipped["local"] and len(skipped["ray"]) == 2
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
    with pytest.raises(ImageError, match=paths[2].name):
        encoding.encode(encoder, task, paths, tmp_path / "strict", PLAN, shard=5, streamed=on_ray(1))


@either
def test_archives_tables_and_urls_are_read(cluster, encoder, task, tmp_path, tasks) -> None:
    images = make_folders(tmp_path / "images")
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        for path in sorted(images.rglob("*.png")):
            tar.add(path, f"{path.parent.name}-{path.name}")
    stored = [{"bytes": path.read_bytes(), "path": None} for path in sorted(images.rglob("*.png"))]
    pyarrow.parquet.write_table(pyarrow.table({"image": stored}), tmp_path / "rows.parquet", row_group_size=5)
    for source in (tmp_path / "shard.tar", tmp_path / "rows.parquet", images.as_uri()):
        paths = open_dataset(source).paths
        made = {}
        for name, streamed in {"local": encoding.stream, "ray": on_ray(1, tasks)}.items():
            out = tmp_path / f"{Path(str(source)).name}-{name}"
            assert encoding.encode(encoder, task, paths, out, PLAN, shard=5, streamed=streamed) == 12
            made[name] = contents(out)
        assert made["ray"] == made["local"], source


def test_an_encoder_that_workers_cannot_load_is_an_error_that_names_it(cluster, encoder, paths) -> None:
    class Elsewhere:
        name = "hf:/nowhere/at/all"

    with pytest.raises(errors.TesttimeError, match="/nowhere/at/all"):
        next(iter(on_ray(1)(Elsewhere(), paths[:3], PLAN, indices=range(3))))


class Deadly:
    """An actor that a piece of work ends."""

    def start(self) -> None:
        pass

    def work(self, piece: int) -> int:
        if piece == 2:
            os._exit(1)
        return piece


def test_work_that_ends_every_worker_is_an_error_after_some_tries(cluster) -> None:
    pool = Pool(ray.remote(Deadly).options(num_cpus=0, max_restarts=0).remote, 2)
    try:
        with pytest.raises(errors.TesttimeError, match="again and again"):
            list(pool.map(iter(range(6))))
    finally:
        pool.close()


def test_workers_share_the_cpus_and_gpus_of_the_machines() -> None:
    assert placed("auto", None, [{"CPU": 2.0}, {"CPU": 8.0}]) == Place(2, "cpu", 4, 0)
    assert placed("auto", 5, [{"CPU": 2.0}, {"CPU": 8.0}]) == Place(5, "cpu", 2, 0)
    assert placed("cpu", None, [{"CPU": 4.0, "GPU": 8.0}]) == Place(1, "cpu", 4, 0)
    assert placed("cuda", 2, [{"CPU": 4.0, "GPU": 8.0}]) == Place(2, "cuda", 1, 1)
    for device, workers, message in [
        ("auto", 3, "has 2 CPUs"),
        ("auto", 0, "1 or more"),
        ("cuda", None, "no machine"),
        ("cuda:1", None, "auto, cpu, cuda"),
    ]:
        with pytest.raises(InputError, match=message):
            placed(device, workers, [{"CPU": 2.0}])


@pytest.mark.parametrize("on", ["", "dask", "ray:", "rays:auto"])
def test_what_is_no_address_is_refused(on) -> None:
    with pytest.raises(InputError, match="ray:ADDRESS"):
        connect.address_of(on)


def test_the_address_is_that_given_or_of_the_environment_or_this_machine(monkeypatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert connect.address_of("ray") == "local" and connect.address_of("ray:ray://host:1") == "ray://host:1"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert connect.address_of("ray") == "10.0.0.1:6379" and connect.address_of("ray:auto") == "auto"


def test_a_machine_with_another_version_is_refused_and_both_are_named(cluster, monkeypatch) -> None:
    with connect.connected("ray"):
        pass
    assert ray.is_initialized()
    monkeypatch.setattr(tt, "__version__", "0.0.1")
    with pytest.raises(InputError, match=r"has testtime \d.*this is testtime 0\.0\.1"), connect.connected("ray"):
        pass


def test_without_ray_the_error_says_how_to_install_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPart, match=r'pip install "testtime\[ray\]"'), connect.connected("ray"):
        pass


def test_the_command_runs_without_ray_until_it_is_asked_for() -> None:
    modules = "testtime.cli.encode, testtime.encoding.encode, testtime.datasets"
    probe = f"import sys, {modules}; print('ray' in sys.modules, 'pyarrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]

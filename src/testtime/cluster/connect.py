"""Connecting to Ray: a cluster by its address, or Ray started on this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import testtime
from testtime.errors import InputError, MissingPart, TesttimeError

ACCEPTED = "ray (the cluster of RAY_ADDRESS, or this machine) or ray:ADDRESS, such as ray:auto or ray:10.0.0.1:6379"
TIMEOUT = 120  # seconds for a worker to start and answer on every machine


@contextmanager
def connected(on: str) -> Iterator[None]:
    """Ray, connected as `on` says: "ray" or "ray:ADDRESS".

    "ray" is the cluster of RAY_ADDRESS if that is set, or else Ray started on this machine and shut down at the end.
    If this process is connected already, that connection is used and stays. Every machine of the cluster must have the
    version of testtime that runs here.
    """
    address = address_of(on)
    ray = import_ray()
    if ray.is_initialized():
        _check_versions(ray)
        yield
        return
    try:
        ray.init(**_settings(address))
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as problem:
        reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        raise InputError(
            f"No Ray cluster at '{address}': {reason} Start one there with 'ray start --head', or use --on ray."
        ) from None
    try:
        _check_versions(ray)
        yield
    finally:
        ray.shutdown()


def address_of(on: str) -> str:
    """The address that `on` names; "local" starts Ray on this machine."""
    kind, colon, address = on.partition(":")
    if kind != "ray" or (colon and not address):
        raise InputError(f"--on {on}: write {ACCEPTED}.")
    # not None, with which Ray would also look for any cluster that happens to run on this machine
    return address or os.environ.get("RAY_ADDRESS") or "local"


def import_ray() -> Any:
    """The package ray, without its usage statistics; if it is missing, the error says how to install it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # the coming default; the present one hides GPUs from workers that reserve none, and warns
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise MissingPart('--on ray needs the package ray. Install it with: pip install "testtime[ray]"') from None
    return ray


def _settings(address: str) -> dict[str, Any]:
    """The arguments of ray.init."""
    settings: dict[str, Any] = {
        "address": address,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
    }
    if address == "local":
        # of the package that runs here, which need not be the one installed
        package = str(Path(testtime.__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        settings |= {"include_dashboard": False, "runtime_env": {"env_vars": {"PYTHONPATH": path}}}
    return settings


def _check_versions(ray: Any) -> None:
    """Refuse a cluster with a machine whose testtime is another version, or that has none."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def version() -> str:  # defined here, so that it is sent by its code: by its name, it would import testtime
        try:
            import testtime
        except ImportError:
            return ""
        return testtime.__version__

    task, nodes = ray.remote(num_cpus=0)(version), [node for node in ray.nodes() if node["Alive"]]
    asked = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=True)).remote()
        for node in nodes
    ]
    try:
        found = ray.get(asked, timeout=TIMEOUT)
    except ray.exceptions.GetTimeoutError:
        raise TesttimeError(f"The Ray cluster did not start a worker on every machine in {TIMEOUT} seconds.") from None
    for node, other in zip(nodes, found, strict=True):
        if other != testtime.__version__:
            has = f"testtime {other}" if other else "no testtime"
            raise InputError(
                f"The machine {node['NodeManagerAddress']} of the Ray cluster has {has}, but this is testtime "
                f"{testtime.__version__}; install that version there."
            )

"""The service on Ray Serve: processes that speak HTTP, encoders as many as there is work for, an actor for each stream.

clients -> Ray Serve's proxies -> fronts (HTTP, tokens, decoders) -> the actor of the stream -> encoders
                                                                      |
                                                               log, in a folder that all machines see
"""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from testtime.cluster.directory import FOLDER, check_layout
from testtime.cluster.encoders import EncoderReplica
from testtime.cluster.front import NAMESPACE, Streams, identity, prefix
from testtime.errors import InputError
from testtime.files import make_folder
from testtime.serve.server import CONNECTIONS, GRACE
from testtime.serve.types import Settings

ENCODERS, FRONTS = "encoders", "fronts"
FRONT_CPUS = 0.5
UPSCALE, DOWNSCALE = 5.0, 60.0  # seconds of more, or less, work before encoders are started or ended
HEALTH = 2.0  # seconds after which a dead encoder is noticed and replaced
WAITING = 4  # images for each encoder on a CPU, on average, before another one is started


@dataclass(frozen=True)
class Plan:
    """What is served, and how."""

    folder: Path  # that all machines see
    encoder: str
    device: str  # auto, cpu or cuda
    settings: Settings
    host: str = "127.0.0.1"
    port: int = 8000
    certificate: str | None = None  # TLS: files that all machines have
    key: str | None = None
    log_format: str = "text"
    fronts: int = 1
    min_encoders: int = 1
    max_encoders: int = 1


@contextmanager
def serving(plan: Plan, stays: bool = True) -> Iterator[None]:
    """The service, on the Ray that this process is connected to; at the end, what was accepted is answered.

    `stays` says that Ray runs on after it: then Ray Serve is shut down too, unless it runs something else.
    """
    check_layout(plan.folder, on_ray=True)
    make_folder(plan.folder / FOLDER)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    name = application_name(plan.folder)
    if name in serve.status().applications:  # its command was killed, and it went on; its settings may be others
        serve.delete(name)
    _end_actors(plan.folder)
    serve.start(
        proxy_location="EveryNode",
        http_options={
            "host": plan.host, "port": plan.port,
            "ssl_certfile": plan.certificate, "ssl_keyfile": plan.key,
        },
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )  # fmt: skip
    try:
        try:
            serve.run(application(plan), name=name, route_prefix="/")
        except (RayServeException, RuntimeError) as problem:
            raise InputError(f"Ray Serve could not start the service: {_reason(name, problem)}") from None
        yield
    finally:
        with contextlib.suppress(RayError):
            serve.delete(name)
        _end_actors(plan.folder)
        if stays and not serve.status().applications:
            serve.shutdown()


def _reason(name: str, problem: Exception) -> str:
    """Why an application did not start: the last line of what a replica reported, or of the problem itself."""
    application = serve.status().applications.get(name)
    reports = [each.message for each in application.deployments.values()] if application else []
    lines = [line.strip() for text in (str(problem), *reports) for line in text.splitlines()]
    return re.sub(r"^[\w.]+: ", "", lines[-1])  # without the name of the exception


def application_name(folder: Path) -> str:
    """The name that Ray Serve knows a service by: that of its folder."""
    return f"testtime-{identity(folder)}"


def application(plan: Plan) -> Any:
    """What Ray Serve runs."""
    device, resources = _resources(plan.device)
    settings = plan.settings
    target = settings.max_batch if device.startswith("cuda") else WAITING
    encoders = serve.deployment(
        EncoderReplica,
        name=ENCODERS,
        ray_actor_options=resources,
        max_ongoing_requests=4 * settings.max_batch,
        health_check_period_s=HEALTH,
        autoscaling_config={
            "min_replicas": plan.min_encoders, "max_replicas": plan.max_encoders, "initial_replicas": plan.min_encoders,
            "target_ongoing_requests": target, "upscale_delay_s": UPSCALE, "downscale_delay_s": DOWNSCALE,
        },
    )  # fmt: skip

    def front() -> FastAPI:
        from testtime.serve import logs
        from testtime.serve.app import make_app
        from testtime.serve.auth import Gate

        logs.set_up(plan.log_format)
        streams: Any = Streams(plan.folder, settings, application_name(plan.folder), ENCODERS)
        return make_app(streams, Gate(plan.folder, plan.host), settings.limits, secure=plan.certificate is not None)

    fronts = serve.deployment(
        serve.ingress(front)(),
        name=FRONTS,
        num_replicas=plan.fronts,
        max_ongoing_requests=CONNECTIONS,
        ray_actor_options={"num_cpus": FRONT_CPUS},
        graceful_shutdown_timeout_s=GRACE,
    )
    return fronts.bind(encoders.bind(plan.encoder, device, settings.max_batch, settings.deadline))


def wait_for_signal() -> None:
    """Wait for SIGTERM or SIGINT."""
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        stop.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _resources(device: str) -> tuple[str, dict[str, float]]:
    """The device of every encoder, and what one reserves."""
    gpus = ray.cluster_resources().get("GPU", 0)
    if device.startswith("cuda") and not gpus:
        raise InputError(f"--device {device}: the Ray cluster has no GPU. Use --device cpu.")
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    return device, {"num_gpus": 1} if device.startswith("cuda") else {"num_cpus": 1}


def _end_actors(folder: Path) -> None:
    """End the actors of a service's streams, after what they have accepted is answered."""
    start = prefix(folder)
    actors = []
    for each in ray.util.list_named_actors(all_namespaces=True):
        if each["namespace"] == NAMESPACE and each["name"].startswith(start):
            with contextlib.suppress(ValueError):  # it has ended meanwhile
                actors.append(ray.get_actor(each["name"], NAMESPACE))
    ends = [actor.end.remote() for actor in actors if hasattr(actor, "end")]
    deadline = time.monotonic() + GRACE
    for end in ends:
        with contextlib.suppress(RayError):  # one that does not answer is killed too: its log is complete
            ray.get(end, timeout=max(0.1, deadline - time.monotonic()))
    for actor in actors:
        ray.kill(actor)

"""What the service counts and measures, for Prometheus. Nothing here knows of HTTP but the names of its counters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from testtime.errors import MissingPart

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
except ImportError:
    raise MissingPart("The service needs prometheus-client: pip install 'testtime[serve]'.") from None

STAGES = ("decode", "encode", "adapt", "store", "total")
SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
IMAGES = (1, 2, 4, 8, 16, 32, 64)
NATS = (0.01, 0.03, 0.1, 0.3, 1, 2, 3, 5, 8)
REASONS = 30  # most reasons told apart; later ones count as "other"
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS")

changes = logging.getLogger("testtime.serve.changes")


class Telemetry:
    """The metrics of one service, in a registry of its own.

    Label values are bounded: streams are as many as the service holds, routes are templates, reasons are cut at
    `REASONS`. A deleted stream takes its series with it.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # memory, CPU time and open files
        self._reasons: set[str] = set()
        self._children: dict[str, dict[tuple[Any, tuple[str, ...]], Any]] = {}  # of each stream, by metric and labels
        stages = self._histogram("testtime_stage_seconds", "Seconds of an image by stage.", ["stage"], SECONDS)
        self._stages = {stage: stages.labels(stage) for stage in STAGES}
        self._batch_images = self._histogram("testtime_batch_images", "Images encoded together.", [], IMAGES)
        self._batch_seconds = self._histogram("testtime_batch_seconds", "Seconds to encode a batch.", [], SECONDS)
        self._waiting = self._gauge("testtime_waiting_images", "Images accepted and not answered yet.", [])
        self._answers = self._counter("testtime_answers", "Images answered.", ["stream"])
        self._learned = self._counter("testtime_learned", "Images learned from.", ["stream"])
        self._unlearned = self._counter("testtime_not_learned", "Images not learned from.", ["stream", "reason"])
        self._differing = self._counter("testtime_disagreements", "Answers unlike zero-shot.", ["stream"])
        self._disagreement = self._gauge("testtime_disagreement_ratio", "Recent share of these.", ["stream"])
        self._entropy = self._histogram("testtime_entropy_nats", "Entropy of answers in nats.", ["stream"], NATS)
        self._drifts = self._counter("testtime_drift_alarms", "Alarms of a change in the stream.", ["stream"])
        self._events = self._counter("testtime_events", "Changes of streams by kind.", ["stream", "kind"])
        self._restarts = self._counter("testtime_decoder_restarts", "Decoders that died or were stopped.", [])
        self._read_only = self._gauge("testtime_read_only", "1 while nothing can be written.", [])
        self._ready = self._gauge("testtime_ready", "1 while images are accepted.", [])
        labels = ["route", "method", "status"]
        self._requests = self._counter("testtime_requests", "Requests by route and status.", labels)
        self._request_seconds = self._histogram("testtime_request_seconds", "Seconds by route.", ["route"], SECONDS)
        self._refusals = self._counter("testtime_refused_requests", "Requests without permission.", ["reason"])

    def _counter(self, name: str, help: str, labels: list[str]) -> Counter:
        return Counter(name, help, labels, registry=self.registry)

    def _gauge(self, name: str, help: str, labels: list[str]) -> Gauge:
        return Gauge(name, help, labels, registry=self.registry)

    def _histogram(self, name: str, help: str, labels: list[str], buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help, labels, registry=self.registry, buckets=buckets)

    def watch(self, ready: Callable[[], bool], read_only: Callable[[], bool]) -> None:
        """Ask these whenever the metrics are read."""
        self._ready.set_function(lambda: float(ready()))
        self._read_only.set_function(lambda: float(read_only()))

    def answered(self, stream: str, answer: Mapping[str, Any]) -> None:
        """Count an answer of a stream."""
        self._of(self._answers, stream).inc()
        self._of(self._entropy, stream).observe(answer["entropy"])
        if answer["learned"]:
            self._of(self._learned, stream).inc()
        else:
            self._of(self._unlearned, stream, self._reason(answer["reason"])).inc()
        if answer["label"] != answer["zero_shot"]:
            self._of(self._differing, stream).inc()
        if answer["disagreement"] is not None:
            self._of(self._disagreement, stream).set(answer["disagreement"])
        if answer["drift"]:
            self._of(self._drifts, stream).inc()
        for stage, milliseconds in answer["milliseconds"].items():
            if stage in self._stages:
                self._stages[stage].observe(milliseconds / 1000)

    def _of(self, metric: Any, stream: str, *more: str) -> Any:
        """The series of a stream, and of further labels, of a metric."""
        children = self._children.setdefault(stream, {})
        key = metric, more
        if key not in children:
            children[key] = metric.labels(stream, *more)
        return children[key]

    def _reason(self, reason: str) -> str:
        # what follows "guard:" is one of a few words; after other colons anything may stand, a path say
        short = reason if reason.startswith("guard:") else reason.partition(":")[0]
        short = short[:60] or "none given"
        if short not in self._reasons and len(self._reasons) >= REASONS:
            return "other"
        self._reasons.add(short)
        return short

    def batch(self, images: int, seconds: float) -> None:
        """Count a batch of the encoder."""
        self._batch_images.observe(images)
        self._batch_seconds.observe(seconds)

    def waiting(self, count: int) -> None:
        """Set how many images are accepted and not answered yet."""
        self._waiting.set(count)

    def restarted(self, count: int = 1) -> None:
        """Count decoders that had to be replaced."""
        self._restarts.inc(count)

    def event(self, stream: str, kind: str) -> None:
        """Count and log a change of a stream: create, delete, snapshot, rollback, ..."""
        changes.info("change", extra={"fields": {"stream": stream, "kind": kind}})
        if kind == "delete":
            return self._forget(stream)
        self._of(self._events, stream, kind).inc()

    def _forget(self, stream: str) -> None:
        """Drop a stream's series."""
        for metric, more in self._children.pop(stream, {}):
            metric.remove(stream, *more)

    def request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a request; the route is a template such as /v1/streams/{name}."""
        self._requests.labels(route, method if method in METHODS else "other", status).inc()
        self._request_seconds.labels(route).observe(seconds)

    def refused(self, reason: str) -> None:
        """Count a request that was not permitted: no token, scope, rate or origin."""
        self._refusals.labels(reason).inc()

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)

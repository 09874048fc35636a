"""What the service answers, as types for the clients: the same fields as in `schemas`, without pydantic."""

from __future__ import annotations

from typing import Any, TypedDict


class Probability(TypedDict):
    label: str
    probability: float


class Answer(TypedDict):
    """The answer to an image; the fields are explained at /docs."""

    id: int | None
    index: int
    image: str
    label: str
    confidence: float
    calibrated_confidence: float
    entropy: float
    zero_shot: str
    zero_shot_confidence: float
    probabilities: list[Probability]
    learned: bool
    reason: str
    guard: str | None
    drift: bool
    disagreement: float | None
    repeated: bool
    milliseconds: dict[str, float]


class ImageFailure(TypedDict):
    """Why one image of several was not answered."""

    error: str
    status: int
    image: str


class StreamInfo(TypedDict):
    """A stream, as it is now."""

    name: str
    classes: list[str]
    method: str
    settings: dict[str, Any]
    guard: bool
    views: int
    augmix: bool
    seed: int
    thumbnails: bool
    templates: list[str] | str | None
    encoder: str
    images: int
    position: int
    events: int
    learned: int
    refused: dict[str, int]
    changed: int
    disagreement: float | None
    mean_entropy: float | None
    alarms: list[int]
    feedback: dict[str, int]
    snapshots: int
    waiting: int
    read_only: str
    created: str


class SnapshotInfo(TypedDict):
    """A state of a stream to go back to."""

    id: int
    title: str
    images: int
    event: int
    time: str
    automatic: bool


class LabelResult(TypedDict):
    """What a label was worth."""

    image: int
    label: str
    used: bool
    right: bool
    zero_shot_right: bool


class AuditRow(TypedDict):
    """One event of a stream."""

    id: int
    kind: str
    live: bool
    time: str
    image: str | None
    sha256: str | None
    index: int | None
    label: str | None
    zero_shot: str | None
    confidence: float | None
    entropy: float | None
    learned: bool | None
    reason: str | None
    guard: str | None
    thumbnail: bool
    detail: dict[str, Any] | None

"""The requests and responses of the service as pydantic models: bounds on what comes in, documents of what goes out.

Responses are documented by these and not validated with them; `tests/test_serve_schema.py` compares the two.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from testtime.serve.types import Limits, StreamSpec

LIMITS = Limits()
STREAM_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
MOST = 2**53 - 1  # the largest whole number that every reader of JSON keeps exact

Id = Annotated[int, Field(ge=0, le=MOST, strict=True)]
ClassName = Annotated[str, Field(min_length=1, max_length=LIMITS.name, examples=["cat"])]
StreamName = Annotated[str, Field(pattern=STREAM_NAME, examples=["pets"])]
Setting = bool | int | float | str | None
SettingValues = Annotated[dict[Annotated[str, Field(max_length=100)], Setting], Field(max_length=100)]


class Body(BaseModel):
    """A request's body: unknown fields are refused, since a misspelt one would be ignored."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class NewStream(Body):
    """What a stream is made of."""

    name: StreamName
    classes: Annotated[list[ClassName], Field(min_length=1, max_length=LIMITS.classes, examples=[["cat", "dog"]])]
    templates: (
        Annotated[str, Field(max_length=LIMITS.name)]
        | Annotated[
            list[Annotated[str, Field(max_length=LIMITS.name)]], Field(min_length=1, max_length=LIMITS.templates)
        ]
        | None
    ) = Field(None, examples=[["a photo of a {}."]], description="Prompts with {} for the class, or a named set.")
    method: Annotated[str, Field(max_length=100)] = "dpe"
    preset: Annotated[str, Field(max_length=100)] | None = None
    settings: SettingValues = Field(default_factory=dict, description="Settings of the method.")
    guard: bool = Field(True, description="Whether bad images are kept from teaching; see docs/guard.md.")
    guard_settings: SettingValues = Field(default_factory=dict)
    views: int = Field(1, ge=1, le=LIMITS.views)
    augmix: bool = False
    seed: int = Field(0, ge=0, le=2**31 - 1)
    thumbnails: bool = Field(False, description="Whether small copies of the images may be kept.")

    def spec(self) -> StreamSpec:
        """The same, as the service takes it."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        templates = tuple(self.templates) if isinstance(self.templates, list) else self.templates
        return StreamSpec(**values | {"classes": tuple(self.classes), "templates": templates})


class NewLabel(Body):
    """The right label of an image that was answered."""

    image: Id = Field(examples=[12])
    label: ClassName


class NewSnapshot(Body):
    """A snapshot to be taken."""

    title: Annotated[str, Field(max_length=LIMITS.name)] = ""


class Rollback(Body):
    """Where to go back to: a snapshot, or right before an image. One of the two."""

    snapshot: Id | None = Field(None, examples=[3])
    before: Id | None = Field(None, examples=[None])

    @model_validator(mode="after")
    def _one_of_two(self) -> Rollback:
        if (self.snapshot is None) == (self.before is None):
            raise ValueError("give one of 'snapshot' and 'before'")
        return self


class Fork(Body):
    """A new stream that starts where this one is, or at one of its snapshots."""

    name: StreamName
    snapshot: Id | None = None


class ClassChange(Body):
    """Classes to add and to remove."""

    add: Annotated[list[ClassName], Field(max_length=LIMITS.classes)] = Field([], examples=[["fox"]])
    remove: Annotated[list[ClassName], Field(max_length=LIMITS.classes)] = Field([], examples=[[]])


class Image(BaseModel):
    """An image in a JSON body."""

    data: str = Field(description="The file, in base64.", examples=["iVBORw0KGgo="])
    name: str = Field("", max_length=LIMITS.name)
    key: str | None = Field(None, max_length=LIMITS.name, description="Idempotency key.")


class Images(BaseModel):
    """Images as JSON."""

    images: list[Image] = Field(min_length=1, max_length=LIMITS.batch)


class Failure(BaseModel):
    """Why a request was not served."""

    error: str = Field(description="One or two sentences: what is wrong, and the way out.")
    status: int


class ImageFailure(Failure):
    """Why one image of a request was not answered."""

    image: str


class Probability(BaseModel):
    label: str
    probability: float = Field(ge=0, le=1)


class Milliseconds(BaseModel):
    """Where the time of an image went."""

    decode: float
    encode: float
    adapt: float
    store: float
    total: float


class Answer(BaseModel):
    """The answer to an image."""

    id: int | None = Field(description="Number of the event in the stream; null if the stream did not take the image.")
    index: int = Field(description="Position of the image in the stream's input.")
    image: str = Field(description="Name of the image, as it was sent.")
    label: str
    confidence: float
    calibrated_confidence: float
    entropy: float = Field(description="In nats.")
    zero_shot: str = Field(description="Answer of the frozen classifier.")
    zero_shot_confidence: float
    probabilities: list[Probability] = Field(description="The most probable classes, best first.")
    learned: bool
    reason: str = Field(description="Why the stream did not learn from the image; empty if it did.")
    guard: str | None = Field(description="What the guard says of the image, if anything.")
    drift: bool = Field(description="Whether this image raised the alarm that the stream has changed.")
    disagreement: float | None = Field(description="Recent share of answers that differ from zero-shot.")
    repeated: bool = Field(description="Whether this repeats the answer to an idempotency key that was known.")
    milliseconds: Milliseconds


class Answers(BaseModel):
    """An answer, or an error, for each image, in their order."""

    answers: list[Answer | ImageFailure]


class Feedback(BaseModel):
    labels: int
    right: int
    zero_shot_right: int


class StreamInfo(BaseModel):
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
    images: int = Field(description="Images that were answered and still count.")
    position: int
    events: int = Field(description="Number of the last event.")
    learned: int
    refused: dict[str, int] = Field(description="Images that taught nothing, by reason.")
    changed: int = Field(description="Answers that differ from zero-shot.")
    disagreement: float | None
    mean_entropy: float | None
    alarms: list[int]
    feedback: Feedback
    snapshots: int
    waiting: int
    read_only: str
    created: str


class Streams(BaseModel):
    streams: list[StreamInfo]


class LabelResult(BaseModel):
    """What a label was worth."""

    image: int
    label: str
    used: bool = Field(description="Whether the guard learned from it.")
    right: bool
    zero_shot_right: bool


class SnapshotInfo(BaseModel):
    id: int
    title: str
    images: int
    event: int
    time: str
    automatic: bool


class Snapshots(BaseModel):
    snapshots: list[SnapshotInfo]


class AuditRow(BaseModel):
    """One event of a stream."""

    id: int
    kind: Literal["image", "label", "classes", "rollback", "reset", "unlearn", "import"]
    live: bool = Field(description="Whether it is still part of what was learned.")
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


class AuditRows(BaseModel):
    images: list[AuditRow]


class Slot(BaseModel):
    image: int | None
    entropy: float


class Queue(BaseModel):
    label: str
    slots: list[Slot]


class Queues(BaseModel):
    """What each class remembers."""

    classes: list[Queue]


class ClassPoint(BaseModel):
    """A class on the map: where its prompts are, where its text prototype and its visual one are now."""

    label: str
    prompt: list[float]
    text: list[float]
    visual: list[float] | None


class ImagePoint(BaseModel):
    id: int
    label: str
    x: float
    y: float
    learned: bool


class Map(BaseModel):
    """Prototypes and recent images in two dimensions."""

    classes: list[ClassPoint]
    images: list[ImagePoint]

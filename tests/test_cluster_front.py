"""Calls of the service on Ray whose actor dies, without a cluster: what is made again, and what is not."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
pytest.importorskip("ray", reason="the extra 'ray' is not installed")

import numpy as np  # noqa: E402
from ray.exceptions import RayActorError, RayTaskError  # noqa: E402
from serve_load import CLASSES, photograph  # noqa: E402

import testtime as tt  # noqa: E402
from testtime.cluster import front  # noqa: E402
from testtime.cluster.adapter import MOVED  # noqa: E402
from testtime.cluster.directory import has_stream, streams_in  # noqa: E402
from testtime.images.gpu_views import as_tensor  # noqa: E402
from testtime.serve.auth import Refusal  # noqa: E402
from testtime.serve.remote import Call, Remote, perform  # noqa: E402
from testtime.serve.service import Service  # noqa: E402
from testtime.serve.types import ServiceError, Settings, StreamSpec, Upload  # noqa: E402

SETTINGS = Settings(decoders=1)


class Actor:
    """Does what it is asked. The next `losing` calls are done, and then it dies with their answers; or it has moved."""

    def __init__(self, service: Service) -> None:
        self.service, self.losing, self.moved, self.calls = service, 0, 0, list[str]()
        self.perform = SimpleNamespace(remote=self._perform)
        self.ping = SimpleNamespace(remote=lambda: asyncio.sleep(0))

    async def _perform(self, header: dict[str, Any], blob: np.ndarray) -> Any:
        if self.moved:
            self.moved -= 1
            return MOVED
        self.calls.append(header["call"])
        found = await perform(self.service, Call.of(header, as_tensor(blob)))
        if self.losing:
            self.losing -= 1
            raise RayActorError
        return found


class Streams(front.Streams):
    """The streams of one service, in the same process."""

    def __init__(self, folder: Path, actor: Actor) -> None:
        super().__init__(folder, SETTINGS, "", "")
        self.the_actor = actor

    async def _found(self, name: str, make: bool) -> Any:
        return self.the_actor

    async def _names(self) -> list[str]:
        return ["pets"]


def calling(folder: Path, work: Callable[[Streams, Actor], Awaitable[None]]) -> None:
    async def main() -> None:
        service = Service(tt.load_encoder("tiny"), folder, SETTINGS)
        await service.start()
        streams = Streams(folder, actor := Actor(service))
        await Remote.start(streams)
        try:
            await service.create(StreamSpec("pets", tuple(CLASSES)))
            await work(streams, actor)
        finally:
            await streams.close()
            await service.close()

    asyncio.run(main())


@pytest.mark.parametrize("key", [None, "of the client"])
def test_an_image_whose_answer_was_lost_is_answered_and_learned_once(tmp_path: Path, key: str | None) -> None:
    async def work(streams: Streams, actor: Actor) -> None:
        await streams.answer("pets", [Upload(photograph(0), "0")])
        actor.losing, actor.calls = 2, []
        keys = [None if key is None else f"{key} {n}" for n in (1, 2)]
        answers = await streams.answer("pets", [Upload(photograph(n), str(n), keys[n - 1]) for n in (1, 2)])
        assert actor.calls == ["answer"] * 3
        assert [answer["id"] for answer in answers] == [2, 3]
        assert [answer["repeated"] for answer in answers] == [key is not None] * 2
        rows = await streams.images("pets")
        assert [row["image"] for row in rows] == ["2", "1", "0"]

    calling(tmp_path, work)


def test_a_change_whose_answer_was_lost_is_not_made_again(tmp_path: Path) -> None:
    async def work(streams: Streams, actor: Actor) -> None:
        await streams.answer("pets", [Upload(photograph(0), "0")])
        for change in (lambda: streams.label("pets", 1, "cat"), lambda: streams.reset("pets")):
            actor.losing, actor.calls = 1, []
            with pytest.raises(ServiceError, match="look whether it was done") as problem:
                await change()
            assert problem.value.status == 502 and len(actor.calls) == 1

    calling(tmp_path, work)


def test_a_call_of_which_nothing_was_done_is_made_again_where_the_stream_is(tmp_path: Path) -> None:
    async def work(streams: Streams, actor: Actor) -> None:
        actor.moved = 2
        assert (await streams.snapshot("pets", "kept"))["title"] == "kept"
        assert len(await streams.snapshots("pets")) == 2

    calling(tmp_path, work)


def test_a_stream_that_nobody_finds_is_told_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "PATIENCE", 0.3)

    async def work(streams: Streams, actor: Actor) -> None:
        actor.moved = 1000
        with pytest.raises(ServiceError, match="being moved") as problem:
            await streams.stream("pets")
        assert problem.value.status == 503
        actor.moved = 0

    calling(tmp_path, work)


def test_a_stream_that_cannot_be_loaded_is_named_and_keeps_no_other_call_from_its_answer(tmp_path: Path) -> None:
    async def work(streams: Streams, actor: Actor) -> None:
        damaged = RayTaskError("perform", "Traceback", tt.StateError("the database is damaged"))
        actor.perform = SimpleNamespace(remote=lambda *_: _raise(damaged))
        info = await streams.info()
        assert info["streams"] == 0 and "the database is damaged" in info["broken"]["pets"]
        assert await streams.streams() == []
        with pytest.raises(ServiceError, match="cannot be loaded: the database is damaged"):
            await streams.stream("pets")

    calling(tmp_path, work)


async def _raise(problem: Exception) -> None:
    raise problem


def test_an_error_keeps_its_status_on_the_way_to_another_process() -> None:
    sent = pickle.loads(pickle.dumps(Refusal(429, "rate", "Too many requests.", 2.0)))
    assert (type(sent), sent.status, str(sent), sent.retry_after) == (ServiceError, 429, "Too many requests.", 2.0)


def test_the_directory_lists_streams_and_no_deleted_ones(tmp_path: Path) -> None:
    async def main() -> None:
        for name in ("pets", "zoo"):
            service = Service(tt.load_encoder("tiny"), tmp_path / "streams" / name, SETTINGS, take_over=True)
            async with contextlib.AsyncExitStack() as stack:
                await service.start()
                stack.push_async_callback(service.close)
                await service.create(StreamSpec(name, tuple(CLASSES)))
                if name == "zoo":
                    assert list(streams_in(tmp_path)) == ["pets", "zoo"]
                    await service.delete(name)

    asyncio.run(main())
    assert streams_in(tmp_path)["pets"]["classes"] == CLASSES
    assert list(streams_in(tmp_path)) == ["pets"]
    assert has_stream(tmp_path, "pets") and not has_stream(tmp_path, "zoo") and not has_stream(tmp_path, "none")

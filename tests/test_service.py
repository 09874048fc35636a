"""The service's core: the same answers as an offline session, a log that a stream is rebuilt from, exact going back."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")

import testtime as tt  # noqa: E402
from testtime.methods.base import leaves  # noqa: E402
from testtime.serve import pipeline  # noqa: E402
from testtime.serve.service import Service  # noqa: E402
from testtime.serve.store import Store  # noqa: E402
from testtime.serve.types import Limits, ServiceError, Settings, StreamSpec, Upload  # noqa: E402

CLASSES = ("cat", "dog", "fox", "owl")
T = TypeVar("T")


@pytest.fixture(scope="module")
def encoder() -> Any:
    return tt.load_encoder("tiny")


def photograph(number: int) -> bytes:
    random = np.random.default_rng(number)
    small = Image.fromarray(random.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    data = io.BytesIO()
    small.resize((80, 60), Image.Resampling.BICUBIC).save(data, "PNG")
    return data.getvalue()


def serving(encoder: Any, folder: Path, work: Callable[[Service], Awaitable[T]], settings: Settings | None = None) -> T:
    """Run work with a service over a folder, and close it."""

    async def main() -> T:
        service = Service(encoder, folder, settings)
        await service.start()
        try:
            return await work(service)
        finally:
            await service.close()

    return asyncio.run(main())


def uploads(numbers: range | list[int], keys: bool = False) -> list[Upload]:
    return [Upload(photograph(n), f"{n}.png", f"key {n}" if keys else None) for n in numbers]


def offline(encoder: Any, numbers: range | list[int], **settings: Any) -> tuple[tt.Session, list[Any]]:
    task = tt.build_task(encoder, CLASSES)
    session = tt.Session(task, "dpe", encoder=encoder, guard=True, **settings)
    return session, [session.step(Image.open(io.BytesIO(photograph(n))).convert("RGB")) for n in numbers]


def parts(session: tt.Session) -> list[torch.Tensor]:
    return [*leaves(session.state), *leaves(session.guard_memory), session.calibration.sums]


def same(one: tt.Session, other: tt.Session) -> bool:
    return all(torch.equal(a, b) for a, b in zip(parts(one), parts(other), strict=True))


def session_of(service: Service, name: str) -> tt.Session:
    return service.find(name).learning.session


@pytest.mark.parametrize("views", [1, 3])
def test_answers_and_state_equal_those_of_an_offline_session(encoder: Any, tmp_path: Path, views: int) -> None:
    async def work(service: Service) -> None:
        await service.create(StreamSpec("pets", CLASSES, views=views))
        answers = await service.answer("pets", uploads(range(5)))
        for number in range(5, 12):
            answers += await service.answer("pets", uploads([number]))
        session, expected = offline(encoder, range(12), views=views)
        assert [answer["label"] for answer in answers] == [each.label for each in expected]
        assert [answer["confidence"] for answer in answers] == [round(each.confidence, 6) for each in expected]
        assert [answer["learned"] for answer in answers] == [each.learned for each in expected]
        assert [answer["id"] for answer in answers] == list(range(1, 13))
        assert same(session_of(service, "pets"), session)

    serving(encoder, tmp_path, work)


def test_a_restart_goes_on_bit_for_bit(encoder: Any, tmp_path: Path) -> None:
    settings = Settings(snapshot_every=4)

    async def first(service: Service) -> None:
        await service.create(StreamSpec("pets", CLASSES))
        await service.answer("pets", uploads(range(10)))

    async def second(service: Service) -> None:
        assert (await service.stream("pets"))["images"] == 10
        await service.answer("pets", uploads(range(10, 15)))
        assert same(session_of(service, "pets"), offline(encoder, range(15))[0])

    serving(encoder, tmp_path, first, settings)
    serving(encoder, tmp_path, second, settings)


def test_concurrent_requests_are_learned_in_the_order_of_the_log(encoder: Any, tmp_path: Path) -> None:
    async def work(service: Service) -> None:
        await service.create(StreamSpec("pets", CLASSES))
        await asyncio.gather(*(service.answer("pets", uploads([number])) for number in range(20)))
        order = [int(row["image"].split(".")[0]) for row in reversed(await service.images("pets"))]
        assert sorted(order) == list(range(20))
        assert same(session_of(service, "pets"), offline(encoder, order)[0])

    serving(encoder, tmp_path, work)


def test_a_repeated_key_gets_the_first_answer_and_is_learned_once(encoder: Any, tmp_path: Path) -> None:
    async def work(service: Service) -> None:
        await service.create(StreamSpec("pets", CLASSES))
        at_once = await asyncio.gather(*(service.answer("pets", uploads([1], keys=True)) for _ in range(5)))
        (later,) = await service.answer("pets", uploads([1], keys=True))
        answers = [later, *(answer for (answer,) in at_once)]
        assert {answer["id"] for answer in answers} == {1}
        assert sorted(answer["repeated"] for answer in answers) == [False, *[True] * 5]
        assert (await service.stream("pets"))["images"] == 1

    serving(encoder, tmp_path, work)
    serving(encoder, tmp_path, lambda service: _still_known(service))


async def _still_known(service: Service) -> None:
    (answer,) = await service.answer("pets", uploads([1], keys=True))
    assert answer["repeated"] and (await service.stream("pets"))["images"] == 1


def test_a_request_that_is_given_up_is_still_learned_once(encoder: Any, tmp_path: Path) -> None:
    async def work(service: Service) -> None:
        await service.create(StreamSpec("pets", CLASSES))
        for delay in (0, 0.001, 0.005, 0.02, 0.05):
            request = asyncio.create_task(service.answer("pets", uploads([7], keys=True)))
            await asyncio.sleep(delay)
            request.cancel()
        (answer,) = await service.answer("pets", uploads([7], keys=True))
        assert "error" not in answer
        assert (await service.stream("pets"))["images"] == 1

    serving(encoder, tmp_path, work)


def test_rollback_forgets_and_goes_on_as_if_later_images_had_not_come(encoder: Any, tmp_path: Path) -> None:
    async def work(service: Service) -> None:
        await service.create(StreamSpec("pets", CLASSES))
        await service.answer("pets", uploads(range(4)))
        snapshot = await service.snapshot("pets", "four")
        await service.answer("pets", uploads(range(4, 9)))
        info = await service.rollback("pets", snapshot=snapshot["id"])
        assert info["images"] == 4 and info["position"] == 4
        await service.answer("pets", uploads(range(20, 23)))
        assert same(session_of(service, "pets"), offline(encoder, [0, 1, 2, 3, 20, 21, 22])[0])
        await service.rollback("pets", before=3)  # the image of this id goes too
        assert same(session_of(service, "pets"), offline(encoder, [0, 1])[0])
        await service.reset("pets")
        await service.answer("pets", uploads([5]))
        assert same(session_of(service, "pets"), offline(encoder, [5])[0])
        with pytest.raises(ServiceError, match="rolled back"):
            await service.rollback("pets", before=2)

    serving(encoder, tmp_path, work)


def test_unlearning_equals_a_stream_without_the_image_and_erases_it(encoder: Any, tmp_path: Path) -> None:
    settings = Settings(snapshot_every=3)

    async def work(service: Service) -> None:
        await service.create(StreamSpec("pets", CLASSES, thumbnails=True))
        await service.answer("pets", uploads(range(8), keys=True))
        later = await service.snapshot("pets", "later")
        await service.label("pets", 3, "cat")
        await service.unlearn("pets", 3)
        row = await service.image("pets", 3)
        assert not row["live"] and row["sha256"] is None and row["image"] is None and not row["thumbnail"]
        expected = replayed(service, [row for row in reversed(await service.images("pets")) if row["live"]])
        assert same(session_of(service, "pets"), expected)
        assert (await service.stream("pets"))["images"] == 7
        (again,) = await service.answer("pets", uploads([2], keys=True))
        assert again["status"] == 410  # the key is known, its answer is gone
        await service.rollback("pets", snapshot=later["id"])
        assert same(session_of(service, "pets"), expected)  # the snapshot has forgotten it too

    def replayed(service: Service, rows: list[dict[str, Any]]) -> tt.Session:
        session = tt.Session(tt.build_task(encoder, CLASSES), "dpe", encoder=encoder, guard=True)
        for row in rows:
            if row["kind"] == "image":
                number = int(row["image"].split(".")[0])
                session.position = row["index"]
                session.step(Image.open(io.BytesIO(photograph(number))).convert("RGB"))
        return session

    serving(encoder, tmp_path, work, settings)
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir() if "sqlite" in path.name)
    assert b"3.png" in content and b"2.png" not in content  # its image was number 2


def test_classes_come_and_go_without_loss_of_the_others(encoder: Any, tmp_path: Path) -> None:
    async def work(service: Service) -> None:
        await service.create(StreamSpec("pets", CLASSES))
        await service.answer("pets", uploads(range(6)))
        before = session_of(service, "pets").state.queue.keys
        info = await service.change_classes("pets", add=["yak"], remove=["dog"])
        assert info["classes"] == ["cat", "fox", "owl", "yak"]
        after = session_of(service, "pets").state.queue.keys
        assert torch.equal(after[:3], before[[0, 2, 3]]) and not after[3].any()
        await service.answer("pets", uploads(range(6, 10)))
        await service.unlearn("pets", 2)  # across the change
        return session_of(service, "pets")

    one = serving(encoder, tmp_path, work)

    async def again(service: Service) -> None:
        assert (await service.stream("pets"))["classes"] == ["cat", "fox", "owl", "yak"]
        assert same(session_of(service, "pets"), one)

    serving(encoder, tmp_path, again)


def test_a_fork_and_an_import_start_where_the_stream_is_and_learn_on_their_own(encoder: Any, tmp_path: Path) -> None:
    async def work(service: Service) -> None:
        await service.create(StreamSpec("pets", CLASSES))
        await service.answer("pets", uploads(range(3)))
        await service.fork("pets", "zoo")
        await service.import_state("farm", await service.export("pets"))
        for name in ("zoo", "farm"):
            await service.answer(name, uploads(range(3, 6)))
            assert same(session_of(service, name), offline(encoder, range(6))[0])
        assert same(session_of(service, "pets"), offline(encoder, range(3))[0])
        with pytest.raises(ServiceError) as taken:
            await service.fork("pets", "zoo")
        assert taken.value.status == 409
        with pytest.raises(ServiceError) as damaged:
            await service.import_state("other", b"no state")
        assert damaged.value.status == 422 and str(tmp_path) not in str(damaged.value)

    serving(encoder, tmp_path, work)


def test_a_prediction_leaves_no_trace(encoder: Any, tmp_path: Path) -> None:
    async def work(service: Service) -> None:
        await service.create(StreamSpec("pets", CLASSES))
        await service.answer("pets", uploads(range(3)))
        (answer,) = await service.answer("pets", uploads([9]), learn=False)
        assert answer["id"] is None and not answer["learned"] and answer["reason"] == "predict only"
        assert same(session_of(service, "pets"), offline(encoder, range(3))[0])
        assert (await service.stream("pets"))["position"] == 3

    serving(encoder, tmp_path, work)


def test_bad_images_have_errors_of_their_own_and_take_no_place(encoder: Any, tmp_path: Path) -> None:
    async def work(service: Service) -> None:
        await service.create(StreamSpec("pets", CLASSES))
        good = uploads(range(2))
        answers = await service.answer("pets", [good[0], Upload(b"no image", "x", "k"), Upload(b"", "y"), good[1]])
        assert [answer.get("status") for answer in answers] == [None, 422, 422, None]
        assert [answer["index"] for answer in answers if "error" not in answer] == [0, 1]
        (retried,) = await service.answer("pets", [Upload(photograph(3), "x", "k")])
        assert not retried["repeated"]  # nothing came of the first image with this key

    serving(encoder, tmp_path, work)


def test_a_full_disk_means_predictions_without_learning_until_there_is_room(
    encoder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "PROBE", 0.0)

    async def work(service: Service) -> None:
        await service.create(StreamSpec("pets", CLASSES))
        await service.answer("pets", uploads(range(3)))
        base = service._store._base
        (pages,) = base.execute("PRAGMA page_count").fetchone()
        base.execute(f"PRAGMA max_page_count = {pages}")
        full: list[dict[str, Any]] = []
        for number in range(3, 30):  # free pages take a few more
            full += await service.answer("pets", uploads([number]))
        refused = [answer for answer in full if answer["id"] is None]
        assert refused and all(answer["reason"].startswith("storage: ") for answer in refused)
        assert not any(answer["learned"] for answer in refused) and service.read_only
        with pytest.raises(ServiceError) as problem:
            await service.change_classes("pets", add=["yak"])
        assert problem.value.status == 507
        kept = [int(row["image"].split(".")[0]) for row in reversed(await service.images("pets"))]
        base.execute("PRAGMA max_page_count = 1000000")
        (answer,) = await service.answer("pets", uploads([40]))
        assert answer["id"] is not None and not service.read_only
        session = tt.Session(tt.build_task(encoder, CLASSES), "dpe", encoder=encoder, guard=True)
        for number, row in zip([*kept, 40], reversed(await service.images("pets")), strict=True):
            session.position = row["index"]
            session.step(Image.open(io.BytesIO(photograph(number))).convert("RGB"))
        assert same(session_of(service, "pets"), session)

    serving(encoder, tmp_path, work)


def test_only_so_many_images_wait(encoder: Any, tmp_path: Path) -> None:
    async def work(service: Service) -> None:
        await service.create(StreamSpec("pets", CLASSES))
        requests = [service.answer("pets", uploads([number])) for number in range(12)]
        found = await asyncio.gather(*requests, return_exceptions=True)
        refused = [each for each in found if isinstance(each, ServiceError)]
        assert len(refused) == 8 and {(each.status, each.retry_after) for each in refused} == {(429, 1.0)}
        assert (await service.stream("pets"))["images"] == 4

    serving(encoder, tmp_path, work, Settings(limits=Limits(waiting=4)))


def test_images_go_on_while_a_snapshot_is_written(
    encoder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, write = threading.Event(), Store.write_state

    async def work(service: Service) -> None:
        await service.create(StreamSpec("pets", CLASSES))
        monkeypatch.setattr(Store, "write_state", lambda *given: (go.wait(60), write(*given))[1])
        for number in range(9):
            await service.answer("pets", uploads([number]))
        assert len(await service.snapshots("pets")) == 1  # it waits, and no image does
        change = asyncio.create_task(service.rollback("pets", before=8))
        await asyncio.sleep(0.1)
        assert not change.done()
        go.set()
        assert (await change)["images"] == 7
        monkeypatch.undo()
        numbers = [snapshot["event"] for snapshot in await service.snapshots("pets")]
        assert numbers == [0, 4, 10]  # the start, the one after four images, and the rollback
        assert same(session_of(service, "pets"), offline(encoder, range(7))[0])

    serving(encoder, tmp_path, work, Settings(snapshot_every=4))


def test_old_features_and_rows_go_and_the_stream_stays(encoder: Any, tmp_path: Path) -> None:
    settings = Settings(snapshot_every=4, keep_images=8, keep_log=16)

    async def work(service: Service) -> None:
        await service.create(StreamSpec("pets", CLASSES))
        for number in range(40):
            await service.answer("pets", uploads([number]))
            service.find("pets").learning.wait_until_saved()
        rows = await service.images("pets", limit=100)
        assert 16 <= len(rows) <= 24
        assert len(await service.snapshots("pets")) <= 4
        assert len(list((tmp_path / "states").iterdir())) == len(await service.snapshots("pets"))
        with pytest.raises(ServiceError, match="too old"):
            await service.unlearn("pets", rows[-1]["id"])
        await service.unlearn("pets", 36)

    serving(encoder, tmp_path, work, settings)

    async def again(service: Service) -> None:
        await service.answer("pets", uploads([50]))

    serving(encoder, tmp_path, again, settings)


def test_late_labels_reach_the_guard_and_the_count(encoder: Any, tmp_path: Path) -> None:
    async def work(service: Service) -> None:
        await service.create(StreamSpec("pets", CLASSES))
        answers = await service.answer("pets", uploads(range(12)))
        for answer in answers:
            found = await service.label("pets", answer["id"], answer["label"])
            assert found["right"] and found["zero_shot_right"] == (answer["zero_shot"] == answer["label"])
        assert (await service.stream("pets"))["feedback"]["right"] == 12
        with pytest.raises(ServiceError, match="none of the stream's classes"):
            await service.label("pets", 1, "yak")

    serving(encoder, tmp_path, work)

    async def again(service: Service) -> None:
        assert (await service.stream("pets"))["feedback"]["labels"] == 12

    serving(encoder, tmp_path, again)


def test_a_folder_belongs_to_one_service(encoder: Any, tmp_path: Path) -> None:
    async def work(service: Service) -> None:
        with pytest.raises(tt.InputError, match="being written by process"):
            await Service(encoder, tmp_path).start()

    serving(encoder, tmp_path, work)


def test_a_stream_whose_state_is_damaged_does_not_keep_the_others_from_starting(encoder: Any, tmp_path: Path) -> None:
    async def work(service: Service) -> None:
        for name in ("pets", "zoo"):
            await service.create(StreamSpec(name, CLASSES))

    async def again(service: Service) -> None:
        assert [stream["name"] for stream in await service.streams()] == ["zoo"]
        assert "pets" in (await service.info())["broken"]
        with pytest.raises(ServiceError, match="already"):
            await service.create(StreamSpec("pets", CLASSES))

    serving(encoder, tmp_path, work)
    import sqlite3

    base = sqlite3.connect(tmp_path / "testtime.sqlite")
    ((file,),) = base.execute(
        "SELECT file FROM snapshots JOIN streams ON streams.id = stream WHERE name = 'pets'"
    ).fetchall()
    base.close()
    (tmp_path / "states" / file).write_bytes(b"damaged")
    serving(encoder, tmp_path, again)


def test_the_page_sees_queues_a_plane_and_events(encoder: Any, tmp_path: Path) -> None:
    async def work(service: Service) -> None:
        await service.create(StreamSpec("pets", CLASSES))
        async with service.subscribe("pets") as events:
            await service.answer("pets", uploads(range(6)))
            seen = [await events.get() for _ in range(6)]
        assert [event["answer"]["id"] for event in seen] == list(range(1, 7))
        slots = [slot for each in (await service.queues("pets"))["classes"] for slot in each["slots"]]
        assert slots and {slot["image"] for slot in slots} <= set(range(1, 7))
        plane = await service.map("pets")
        assert len(plane["classes"]) == 4 and len(plane["images"]) == 6
        json.dumps([plane, await service.info(), await service.streams()])

    serving(encoder, tmp_path, work)


def test_the_tour_feeds_a_stream_of_its_own(encoder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from testtime.serve import tour

    monkeypatch.setattr(tour, "PACE", 0.0)
    monkeypatch.setattr(tour, "IMAGES", 40)

    async def work(service: Service) -> None:
        await service.create(StreamSpec("tour-of-mine", CLASSES))
        first = await service.tour()
        second = await service.tour()
        assert {stream["name"] for stream in await service.streams()} == {second["name"], "tour-of-mine"}
        assert first["name"] != second["name"]
        async with service.subscribe(second["name"]) as events:
            while (event := await events.get())["type"] != "tour" or event["images"] < 40:
                pass
        assert 0.5 < event["accuracy"] <= 1 and (await service.stream(second["name"]))["images"] == 40
        with pytest.raises(ServiceError, match="is of encoder"):
            await service.answer(second["name"], uploads([1]))

    serving(encoder, tmp_path, work)

from __future__ import annotations

import json
import sys

import pytest
from trees import png

from testtime.datasets import open_dataset
from testtime.datasets import tables as reader
from testtime.images.reading import read_image
from testtime.types import ImageError, InputError, MissingPart

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pq = pytest.importorskip("pyarrow.parquet")

COLOURS = {"red": (255, 0, 0), "blue": (0, 0, 255), "lime": (0, 255, 0)}


def rows(labels) -> dict:
    images = [{"bytes": png(colour), "path": f"{colour}.png"} for colour in COLOURS]
    return {"image": images, "label": labels}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The `datasets` library, which writes what we read."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    return pytest.importorskip("datasets", reason="the library datasets is not installed")


def made(hub, names=("grand_piano", "cat"), labels=(1, 0, 1)):
    features = hub.Features({"image": hub.Image(), "label": hub.ClassLabel(names=list(names))})
    return hub.Dataset.from_dict(rows(list(labels)), features=features)


def pixels(data) -> list[tuple[int, ...]]:
    return [read_image(path).getpixel((0, 0)) for path in data.paths]


def test_a_saved_dataset_is_read_with_its_names(hub, tmp_path) -> None:
    made(hub).save_to_disk(str(tmp_path / "saved"), num_shards=2)
    data = open_dataset(tmp_path / "saved")
    assert data.labels == [1, 0, 1] and data.classnames == ["grand piano", "cat"] and data.notes == ()
    assert pixels(data) == list(COLOURS.values())
    assert len({str(path) for path in data.paths}) == 3 and str(data.paths[0]).endswith(".arrow/0-0")


def test_a_saved_dataset_of_several_parts_gives_the_one_asked_for(hub, tmp_path) -> None:
    parts = hub.DatasetDict({"train": made(hub), "validation": made(hub, labels=(0, 0, 0))})
    parts.save_to_disk(str(tmp_path / "saved"))
    assert open_dataset(tmp_path / "saved", part="val").labels == [0, 0, 0]
    with pytest.raises(InputError, match="no part 'test'; it has train, validation"):
        open_dataset(tmp_path / "saved")


def test_parquet_of_the_library_is_read_with_its_names(hub, tmp_path) -> None:
    made(hub).to_parquet(str(tmp_path / "p.parquet"))
    data = open_dataset(tmp_path / "p.parquet")
    assert data.labels == [1, 0, 1] and data.classnames == ["grand piano", "cat"]
    assert pixels(data) == list(COLOURS.values())


def test_parquet_parts_are_recognised_by_their_names(tmp_path) -> None:
    (tmp_path / "data").mkdir()
    table = pa.table(rows(["cat", "dog", "cat"]))
    pq.write_table(table, tmp_path / "data" / "test-00000-of-00001.parquet", row_group_size=2)
    pq.write_table(table.slice(0, 1), tmp_path / "data" / "train-00000-of-00001.parquet")
    data = open_dataset(tmp_path)
    assert data.labels == [0, 1, 0] and data.classnames == ["cat", "dog"] and pixels(data) == list(COLOURS.values())
    assert [(path.group, path.row) for path in data.paths] == [(0, 0), (0, 1), (1, 0)]
    assert len(open_dataset(tmp_path, part="train")) == 1
    with pytest.raises(InputError, match="no part 'val'; it has test, train"):
        open_dataset(tmp_path, part="val")


def test_parquet_of_any_other_name_is_read_whole(tmp_path) -> None:
    pq.write_table(pa.table({"img": [png("blue")]}), tmp_path / "mine.parquet")
    data = open_dataset(tmp_path)
    assert data.labels is None and pixels(data) == [COLOURS["blue"]]


def test_an_image_kept_as_a_path_is_read_from_beside_the_table(tmp_path) -> None:
    (tmp_path / "red.png").write_bytes(png("red"))
    pq.write_table(pa.table({"image": [{"bytes": None, "path": "red.png"}]}), tmp_path / "a.parquet")
    assert pixels(open_dataset(tmp_path / "a.parquet")) == [COLOURS["red"]]
    empty = pa.table({"image": pa.array([None], pa.struct({"bytes": pa.binary(), "path": pa.string()}))})
    pq.write_table(empty, tmp_path / "b.parquet")
    with pytest.raises(ImageError, match="holds no image"):
        read_image(open_dataset(tmp_path / "b.parquet").paths[0])


def test_hidden_labels_are_missing_labels(hub, tmp_path) -> None:
    made(hub, labels=(-1, -1, -1)).to_parquet(str(tmp_path / "p.parquet"))
    data = open_dataset(tmp_path / "p.parquet")
    assert data.labels is None and data.classnames == ["grand piano", "cat"]


def test_damaged_tables_are_named(tmp_path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(InputError, match=r"Cannot read .*a\.parquet"):
        open_dataset(tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(InputError, match="no column of images; it has text"):
        open_dataset(tmp_path / "b.parquet")
    pq.write_table(pa.table({"image": pa.array([], pa.binary())}), tmp_path / "c.parquet")
    with pytest.raises(InputError, match="holds no rows"):
        open_dataset(tmp_path / "c.parquet")


def test_damaged_folders_are_named(tmp_path) -> None:
    state = tmp_path / "state.json"
    for text, message in (
        ("{", "not JSON"),
        ("{}", "lists no data files"),
        (json.dumps({"_indices_files": ["x"]}), "flatten_indices"),
        (json.dumps({"_data_files": [{"filename": "gone.arrow"}]}), r"Cannot read .*gone\.arrow"),
    ):
        state.write_text(text)
        with pytest.raises(InputError, match=message):
            open_dataset(tmp_path)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["test"]}')
    with pytest.raises(InputError, match=r"Cannot read .*test/state\.json"):
        open_dataset(tmp_path)


def test_without_pyarrow_the_message_says_what_to_install(tmp_path, monkeypatch) -> None:
    pq.write_table(pa.table({"image": [png()]}), tmp_path / "a.parquet")
    reader._open.cache_clear()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPart, match=r"pip install 'testtime\[datasets\]'"):
        open_dataset(tmp_path / "a.parquet")

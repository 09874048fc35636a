"""The feature store: written once, read lazily, refused if damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_data import make_folders
from tolerances import assert_close

from testtime import Features, save_features, toy
from testtime.encoding.store import write_index
from testtime.files import open_tensors, write_tensors
from testtime.ops import unit_views
from testtime.types import FeatureError

N, V, C, D = 10, 3, 4, 8


@pytest.fixture
def parts() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    task, stream, labels = toy(classes=C, dim=D, images=N, views=V)
    return stream, task.text, labels


@pytest.fixture
def file(parts, tmp_path):
    """Writes a file from the tensors of `parts`, some of them replaced or, with None, left out."""

    def write(metadata=None, name="a.safetensors", **replaced):
        tensors = dict(zip(("views", "text", "labels"), parts, strict=True)) | replaced
        tensors = {key: value.contiguous() for key, value in tensors.items() if value is not None}
        save_file(tensors, tmp_path / name, metadata)
        return tmp_path / name

    return write


# --- tensor files ---


TENSORS = {"b": torch.arange(5.0), "a": torch.arange(6).view(2, 3), "c": torch.randn(3, 4, 2).half()}
METADATA = {"seed": "3", "encoder": "tiny", "classnames": '["Katze", "Gänse", "狐"]', "note": ""}


def test_the_same_tensors_and_metadata_give_the_same_bytes_in_any_order(tmp_path):
    first = write_tensors(tmp_path / "a", TENSORS, METADATA).read_bytes()
    for turn in range(1, 4):
        metadata = dict(list(METADATA.items())[turn:] + list(METADATA.items())[:turn])
        tensors = dict(list(TENSORS.items())[turn % 3 :] + list(TENSORS.items())[: turn % 3])
        assert write_tensors(tmp_path / "b", tensors, metadata).read_bytes() == first
    assert write_tensors(tmp_path / "b", TENSORS, METADATA | {"seed": "4"}).read_bytes() != first


@pytest.mark.parametrize("length", [*range(70), 1000])
def test_tensor_data_starts_at_a_multiple_of_64_bytes(tmp_path, length):
    path = write_tensors(tmp_path / "a", TENSORS, METADATA | {"note": length * "x"})
    header = int.from_bytes(path.read_bytes()[:8], "little")
    assert (8 + header) % 64 == 0
    stored = load_file(path)
    assert stored.keys() == TENSORS.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in TENSORS.items())
    assert open_tensors(path).metadata() == METADATA | {"note": length * "x"}


def test_slices_and_transposes_are_written_by_value(tmp_path):
    whole = torch.arange(24.0).view(4, 6)
    given = {"turned": whole.T, "part": whole[1:3, ::2], "same": whole[1:3, ::2]}
    stored = load_file(write_tensors(tmp_path / "a", given, {}))
    assert all(torch.equal(stored[name], tensor) for name, tensor in given.items())


# --- round trips ---


def test_written_features_are_read_back(parts, tmp_path):
    views, text, labels = parts
    path = save_features(
        tmp_path / "a.safetensors",
        views,
        text,
        labels=labels,
        classnames=["ant", "bee", "cat", 'd"é'],
        scale=14.2857,
        metadata={"encoder": "tiny", "dataset": "zoo", "seed": "3"},
    )
    store = Features(path)
    assert len(store) == N and (store.views, store.dim) == (V, D)
    assert store.classnames == ("ant", "bee", "cat", 'd"é')
    assert store.scale == 14.2857
    assert torch.equal(store.text, text) and torch.equal(store.labels, labels)
    assert {
        "encoder": "tiny",
        "dataset": "zoo",
        "seed": "3",
        "version": "1",
    }.items() <= store.metadata.items()
    assert_close(store.read(0, N), views, "arithmetic")
    task = store.task()
    assert (task.scale, task.encoder, task.classnames) == (14.2857, "tiny", store.classnames)
    assert_close(task.text, text, "arithmetic")


def test_half_precision_is_read_as_unit_rows_of_the_requested_precision(parts, tmp_path):
    views, text, _ = parts
    store = Features(save_features(tmp_path / "a.safetensors", views.half(), text.half()))
    for dtype in (torch.float32, torch.float64):
        read = store.read(0, N, dtype)
        assert read.dtype == store.task(dtype).text.dtype == dtype
        assert_close(read.norm(dim=-1), torch.ones(N, V), "arithmetic")
        assert_close(store.task(dtype).text.norm(dim=-1), torch.ones(C), "arithmetic")
        torch.testing.assert_close(read.float(), views, atol=2e-3, rtol=0.0)


def test_rows_are_normalised_after_the_cast_to_double(parts, file):
    store = Features(file(views=3 * parts[0]))
    read = store.read(0, N, torch.float64)
    assert (read.norm(dim=-1) - 1).abs().max() < 1e-15


def test_everything_but_views_and_text_has_a_default(parts, file):
    store = Features(file(labels=None))
    assert store.classnames == ("0", "1", "2", "3")
    assert store.scale == 100.0
    assert store.labels is None
    assert store.metadata == {}
    assert store.task().encoder == ""


def test_older_traces_call_the_scale_logit_scale(file):
    assert Features(file({"logit_scale": "30"})).scale == 30.0
    assert Features(file({"logit_scale": "30", "scale": "40"})).scale == 40.0


def test_labels_of_another_integer_type_become_int64(parts, file):
    assert Features(file(labels=parts[2].int())).labels.dtype == torch.int64


# --- shards ---


@pytest.fixture
def shards(parts, tmp_path):
    """A folder of three shards, named so that their order is not alphabetical."""
    views, text, labels = parts
    folder = tmp_path / "store"
    names = ["z.safetensors", "a.safetensors", "m.safetensors"]
    for name, (start, stop) in zip(names, ((0, 4), (4, 5), (5, N)), strict=True):
        save_features(folder / name, views[start:stop], text, labels=labels[start:stop], scale=50.0)
    write_index(folder, names)
    return folder


def test_a_folder_of_shards_is_one_stream_in_the_order_of_its_index(parts, shards):
    store = Features(shards)
    assert len(store) == N and store.scale == 50.0
    assert torch.equal(store.labels, parts[2])
    for start in range(N):
        for stop in range(start + 1, N + 1):
            assert_close(store.read(start, stop), parts[0][start:stop], "arithmetic", f"{start} to {stop}")


def test_an_index_says_what_it_is(shards):
    index = json.loads((shards / "index.json").read_text())
    assert index["format"] == "testtime.features" and index["version"] == "1"


@pytest.mark.parametrize("size", [1, 3, 4, N, 99, 0])
def test_chunks_are_the_stream_in_pieces(parts, shards, size):
    chunks = list(Features(shards).chunks(size=size, dtype=torch.float64))
    assert all(chunk.dtype == torch.float64 and len(chunk) <= (size or N) for chunk in chunks)
    assert len(chunks) == (-(-N // size) if size else 1)
    assert_close(torch.cat(chunks).float(), parts[0], "arithmetic")


@pytest.mark.parametrize("size", [1, 3, 0])
def test_chunks_follow_an_order(parts, shards, size):
    order = [9, 0, 4, 4, 7]
    chunks = list(Features(shards).chunks(order, size=size))
    assert len(chunks) == (-(-len(order) // size) if size else 1)
    assert_close(torch.cat(chunks), parts[0][order], "arithmetic")


def test_default_chunks_stay_small(tmp_path):
    text = torch.eye(2, 4096)
    views = torch.ones(5, 512, 4096, dtype=torch.float16)
    sizes = [len(c) for c in Features(save_features(tmp_path / "a.safetensors", views, text)).chunks()]
    assert sizes == [2, 2, 1]  # 2**22 values at a time


def test_shards_of_different_shape_are_refused(parts, shards):
    save_features(shards / "a.safetensors", parts[0][4:5, :2], parts[1], labels=parts[2][4:5])
    with pytest.raises(FeatureError, match="shards differ"):
        Features(shards)


def test_labels_in_some_shards_only_are_refused(parts, shards):
    save_features(shards / "m.safetensors", parts[0][5:], parts[1])
    with pytest.raises(FeatureError, match="labels"):
        Features(shards)


def test_shards_of_different_text_are_refused(parts, shards):
    save_features(shards / "m.safetensors", parts[0][5:], -parts[1], labels=parts[2][5:])
    with pytest.raises(FeatureError, match="text"):
        Features(shards)


def test_a_missing_shard_is_named(shards):
    (shards / "a.safetensors").unlink()
    with pytest.raises(FeatureError, match=r"a\.safetensors"):
        Features(shards)


def test_a_folder_without_an_index_is_refused(shards):
    (shards / "index.json").unlink()
    with pytest.raises(FeatureError, match=r"without index\.json"):
        Features(shards)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"shards": 3}', '{"shards": [3]}', '{"shards": []}'])
def test_a_malformed_index_is_refused(shards, content):
    (shards / "index.json").write_text(content)
    with pytest.raises(FeatureError, match=r"index\.json"):
        Features(shards)


# --- unusable files ---


@pytest.mark.parametrize(
    ("value", "what"),
    [(torch.nan, "hold NaN or infinity"), (-torch.inf, "hold NaN or infinity"), (0.0, "are all zero")],
)
def test_bad_features_are_found_when_read_and_named_by_position(parts, file, value, what):
    views = parts[0].clone()
    views[7, 2] = value
    store = Features(file(views=views))
    assert_close(store.read(0, 7), views[:7], "arithmetic")  # what comes before is fine
    for start in (0, 5, 7):
        with pytest.raises(FeatureError, match=f"image 7, view 2, {what}"):
            store.read(start, N)
    with pytest.raises(FeatureError, match="image 7, view 2"):
        list(store.chunks([1, 7]))


@pytest.mark.parametrize("value", [torch.nan, 0.0])
def test_bad_features_are_not_written(parts, tmp_path, value):
    views = parts[0].clone()
    views[1, 0] = value
    with pytest.raises(FeatureError, match="image 1, view 0"):
        save_features(tmp_path / "a.safetensors", views, parts[1])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "wrong",
    [dict(labels=torch.zeros(3).long()), dict(classnames=["ant"]), dict(scale=-1.0)],
    ids=lambda w: list(w)[0],
)
def test_unreadable_files_are_not_written(parts, tmp_path, wrong):
    with pytest.raises(FeatureError):
        save_features(tmp_path / "a.safetensors", parts[0], parts[1], **wrong)


@pytest.mark.parametrize("shape", [(N, D), (N, V, D, 1), (N, 0, D), (0, V, D), (N, V, 0)])
def test_views_of_another_shape_are_refused(file, shape):
    with pytest.raises(FeatureError, match=r"views must be \[N,V,D\].*"):
        Features(file(views=torch.ones(shape)))


@pytest.mark.parametrize("text", [torch.ones(C, D + 1), torch.ones(D), torch.ones(C, D).long()])
def test_text_that_does_not_fit_the_views_is_refused(file, text):
    with pytest.raises(FeatureError, match=f"text must be .C, {D}."):
        Features(file(text=text))


def test_integer_views_are_refused(file):
    with pytest.raises(FeatureError, match="floating point"):
        Features(file(views=torch.ones(N, V, D, dtype=torch.int64))).read(0, 1)


@pytest.mark.parametrize("name", ["views", "text"])
def test_a_missing_tensor_is_named(file, name):
    with pytest.raises(FeatureError, match=f"no tensor '{name}'"):
        Features(file(**{name: None}))


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.99])
def test_a_file_cut_short_is_refused(file, part):
    path = file()
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * part)])
    with pytest.raises(FeatureError, match=r"a\.safetensors.*cut short"):
        Features(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FeatureError, match=r"No file .*nothing\.safetensors"):
        Features(tmp_path / "nothing.safetensors")


@pytest.mark.parametrize("names", ["ant, bee", '"ant"', '{"a": 1}', "["])
def test_class_names_that_are_not_a_list_are_refused(file, names):
    with pytest.raises(FeatureError, match="'classnames' is not a JSON list"):
        Features(file({"classnames": names}))


def test_too_few_class_names_are_refused(file):
    with pytest.raises(FeatureError, match="2 class names for 4 text prototypes"):
        Features(file({"classnames": '["ant", "bee"]'}))


@pytest.mark.parametrize("scale", ["", "large", "nan", "inf", "0", "-100"])
def test_a_scale_that_is_not_positive_is_refused(file, scale):
    with pytest.raises(FeatureError, match="'scale' must be a positive number"):
        Features(file({"scale": scale}))


@pytest.mark.parametrize("label", [-1, C])
def test_a_label_out_of_range_is_refused(parts, file, label):
    labels = parts[2].clone()
    labels[3] = label
    with pytest.raises(FeatureError, match="labels must be whole numbers from 0 to 3"):
        Features(file(labels=labels))


@pytest.mark.parametrize("labels", [torch.zeros(N + 1).long(), torch.zeros(N, 1).long()])
def test_labels_of_another_shape_are_refused(file, labels):
    with pytest.raises(FeatureError, match=rf"labels must be \({N},\)"):
        Features(file(labels=labels))


def test_floating_point_labels_are_refused(file):
    with pytest.raises(FeatureError, match="whole numbers"):
        Features(file(labels=torch.zeros(N)))


def test_unit_views_counts_from_the_position_in_the_stream():
    views = torch.ones(3, 2, D)
    views[1, 1] = 0
    with pytest.raises(FeatureError, match="image 101, view 1"):
        unit_views(views, torch.ones(2, D), first=100)
    assert torch.allclose(unit_views(views[:1], torch.ones(2, D)).norm(dim=-1), torch.ones(1, 2))


def test_a_store_may_name_its_images(tmp_path) -> None:
    task, stream, _ = toy(images=4)
    for number, names in enumerate((["a.jpg", "b.jpg"], ["c.jpg", "d.jpg"])):
        part = stream[2 * number : 2 * number + 2]
        save_features(tmp_path / f"{number}.safetensors", part, task.text, metadata={"images": json.dumps(names)})
    write_index(tmp_path, ["0.safetensors", "1.safetensors"])
    assert Features(tmp_path).images == ("a.jpg", "b.jpg", "c.jpg", "d.jpg")
    save_features(tmp_path / "1.safetensors", stream[2:], task.text)
    assert Features(tmp_path).images is None


@pytest.mark.parametrize("stored", ["[", "{}", '["a.jpg"]'])
def test_images_that_do_not_fit_the_views_are_refused(tmp_path, stored) -> None:
    task, stream, _ = toy(images=4)
    path = save_features(tmp_path / "a.safetensors", stream, task.text, metadata={"images": stored})
    with pytest.raises(FeatureError, match="'images' is not a JSON list with one path for each image"):
        Features(path)


def test_commands_write_the_same_bytes_in_every_process(tmp_path) -> None:
    """Features, a saved session and a learned prompt, written by processes that hash strings differently."""
    photos = make_folders(tmp_path / "photos", images=2)
    commands = (
        ["encode", photos, "--views", 2, "--out", "f.safetensors"],
        ["encode", photos, "--shard", 4, "--out", "shards"],
        ["run", photos, "--out", "rows.csv", "--save", "s.safetensors"],
        ["train-prompts", photos, "--shots", 1, "--epochs", 2, "--out", "p.safetensors"],
    )
    script = "import json, sys\nfrom testtime.cli.app import app\n" + (
        "for words in json.loads(sys.argv[1]): app(words, standalone_mode=False)"
    )
    words = json.dumps([[*map(str, command), "--encoder", "tiny"] for command in commands])
    written = []
    for seed in ("1", "2", "3"):
        home = tmp_path / seed
        home.mkdir()
        environment = os.environ | {"PYTHONHASHSEED": seed}
        subprocess.run(
            [sys.executable, "-c", script, words], cwd=home, env=environment, check=True, capture_output=True
        )
        files = sorted(path for path in home.rglob("*") if path.is_file())
        written.append({str(path.relative_to(home)): path.read_bytes() for path in files})
    assert len(written[0]) == 8 and written[0] == written[1] == written[2]
    for name in ("f.safetensors", "s.safetensors", "p.safetensors"):
        assert load_file(tmp_path / "1" / name)

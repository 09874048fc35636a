"""Everything that a result depends on is part of its identity: no stale result is scored or kept."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from small_data import make_folders

import testtime as tt
from testtime import Features, build_task, load_encoder, toy
from testtime.datasets import Dataset, open_dataset
from testtime.datasets.shards import TarImage
from testtime.datasets.tables import TableImage
from testtime.encoding import encode as encoding
from testtime.encoding.store import save_features
from testtime.experiments.cells import run_cells
from testtime.experiments.lab import Cell, Lab
from testtime.experiments.plan import Plan
from testtime.experiments.run import run_experiment
from testtime.files import write_tensors
from testtime.files.identity import identity, weights
from testtime.files.outputs import distinct
from testtime.methods.tda import TDA
from testtime.methods.zeroshot import ZeroShot
from testtime.types import FeatureError, InputError, ViewPlan

CLASSES = "cat,dog,fox"


@pytest.fixture
def passes(monkeypatch) -> list[int]:
    """How many views each pass of the tiny encoder took."""
    seen: list[int] = []
    kind = type(load_encoder("tiny"))
    whole = kind.encode_images
    monkeypatch.setattr(kind, "encode_images", lambda self, pixels: seen.append(len(pixels)) or whole(self, pixels))
    return seen


@pytest.fixture
def pets(tmp_path) -> Path:
    return make_folders(tmp_path / "pets")


@pytest.fixture
def table(pets) -> Path:
    """A CSV of the pets, all of them labelled as they are."""
    return write_table(pets.parent / "pets.csv", [path.parent.name for path in sorted(pets.rglob("*.png"))])


def write_table(file: Path, labels: list[str]) -> Path:
    paths = sorted((file.parent / "pets").rglob("*.png"))
    lines = [f"{path.relative_to(file.parent)},{label}" for path, label in zip(paths, labels, strict=True)]
    file.write_text("\n".join(["path,label", *lines]) + "\n")
    return file


def replaced(path: Path, seed: int = 1) -> None:
    """Another image under the same name."""
    pixels = np.random.default_rng(seed).integers(0, 255, (36, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def score(cli: Callable[..., Any], data: Path, out: Path, *more: object) -> dict[str, Any]:
    outcome = cli("eval", data, "-e", "tiny", "--methods", "zeroshot", "--seeds", "1", "--out", out, "--json", *more)
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)["rows"][0]


# identities


def test_an_image_is_identified_by_its_files_size_and_time_and_its_position_there(tmp_path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(b"12345")
    others = [tmp_path / "gone", TarImage(file, "x", 0, 2), TarImage(file, "x", 2, 2), TarImage(file, "y", 0, 2)]
    others += [TableImage(file, "image", 0, 0), TableImage(file, "image", 0, 1), TableImage(file, "image", 1, 0)]
    before = [identity(file), *map(identity, others)]
    assert len(set(before)) == len(before) and identity(str(file)) == before[0]
    os.utime(file, ns=(0, 7))
    again = [identity(file), *map(identity, others)]
    assert again[1] == before[1] and not {*again[2:], again[0]} & set(before)

    class CustomImage:
        def __init__(self, content: bytes) -> None:
            self.content = content

        def read_bytes(self) -> bytes:
            if not self.content:
                raise OSError
            return self.content

    assert identity(CustomImage(b"a")) == identity(CustomImage(b"a")) != identity(CustomImage(b"b"))
    assert identity(CustomImage(b"")) == "unreadable"


def test_an_encoder_is_identified_by_its_weight_files(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

    (tmp_path / "mine.pt").write_bytes(b"1")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.safetensors").write_bytes(b"1")
    names = ["open_clip:ViT-B-16/mine.pt", f"open_clip:ViT-B-16/{tmp_path}/mine.pt", "hf:folder"]
    before = [weights(Named(name)) for name in names]
    assert before[0] == before[1] != before[2] and all(before)
    (tmp_path / "mine.pt").write_bytes(b"12")
    (tmp_path / "folder" / "model.safetensors").write_bytes(b"12")
    after = [weights(Named(name)) for name in names]
    assert not set(after) & set(before)
    (tmp_path / "open_clip_config.json").write_text("{}")  # read with the weights
    assert weights(Named(names[0])) != after[0]
    assert not any(weights(Named(name)) for name in ("tiny", "offline", "open_clip:ViT-B-16/openai", "hf:a/b"))


# eval


def test_corrected_labels_are_scored_again_and_nothing_is_encoded(cli, table, tmp_path, passes) -> None:
    score(cli, table, tmp_path / "o")
    lab = Lab(tmp_path / "o", load_encoder("tiny"), open_dataset(table))
    views = torch.cat(list(lab.store(ViewPlan(), 1).chunks()))
    answers = lab.task(Cell(ZeroShot()).text).zero_shot(views[:, 0]).argmax(1).tolist()
    passes.clear()
    for truth in ([0, 1, 2] * 4, [2] * 6 + [1] * 5 + [0], [0] + [1] * 10 + [2]):
        write_table(table, [("cat", "dog", "fox")[label] for label in truth])
        right = sum(label == answer for label, answer in zip(truth, answers, strict=True))
        assert score(cli, table, tmp_path / "o")["accuracy"] == right / 12
    assert passes == []


def test_a_corrected_label_that_changes_the_classes_encodes_nothing(cli, table, tmp_path, passes) -> None:
    score(cli, table, tmp_path / "o", "--views", 2)
    passes.clear()
    write_table(table, ["cat"] * 6 + ["owl"] * 6)
    row = score(cli, table, tmp_path / "o", "--views", 2)
    assert row["classes"] == 2 and passes == []
    assert row["accuracy"] == score(cli, table, tmp_path / "fresh", "--views", 2)["accuracy"]


def test_only_the_shard_of_a_replaced_image_is_encoded_again(cli, pets, tmp_path, passes) -> None:
    score(cli, pets, tmp_path / "o", "--shard", 3)
    passes.clear()
    replaced(pets / "dog" / "1.png")
    again = score(cli, pets, tmp_path / "o", "--shard", 3)
    assert sum(passes) == 3
    assert again == score(cli, pets, tmp_path / "fresh", "--shard", 3)
    old, new = (next(iter((tmp_path / name / "stores").iterdir())) for name in ("o", "fresh"))
    assert torch.equal(Features(old).stored(0, 12), Features(new).stored(0, 12))


def test_replaced_weights_are_used(cli, pets, tmp_path, monkeypatch, passes) -> None:
    """An encoder named by a file is identified by the file's content, not its name."""
    file = tmp_path / "mine.pt"
    monkeypatch.setattr("testtime.encoding.encoders.open_clip.load", lambda spec, *rest: named(spec, file, *rest))
    name = ["-e", f"open_clip:ViT-B-16/{file}"]
    found = []
    for seed in ("0", "3"):
        file.write_text(seed * (1 + int(seed)))
        score(cli, pets, tmp_path / "o", *name)
        folder = max((tmp_path / "o" / "stores").iterdir(), key=os.path.getmtime)
        found.append(Features(folder).stored(0, 12))
        assert sum(passes) == 12 * len(found)
    score(cli, pets, tmp_path / "o", *name)
    assert not torch.equal(*found) and sum(passes) == 24
    assert len(list((tmp_path / "o" / "text").iterdir())) == 2  # the prototypes are the new weights' too


def named(spec: str, file: Path, *rest: Any) -> Any:
    from testtime.encoding.encoders.tiny import tiny

    encoder = tiny(int(file.read_text()[0]), *rest)
    encoder.name = f"open_clip:{spec}"
    return encoder


def test_an_image_that_is_listed_twice_has_two_labels(cli, pets, tmp_path) -> None:
    image = "pets/cat/0.png"
    table = tmp_path / "twice.csv"
    table.write_text(f"path,label\n{image},cat\n{image},dog\n{image},fox\n{image},cat\n")
    lab = Lab(tmp_path / "o", load_encoder("tiny"), open_dataset(table))
    assert lab.labels_of(lab.store(ViewPlan(), 1)).tolist() == [0, 1, 2, 0]
    assert run_cells(lab, [Cell(ZeroShot())])[0]["right"] in (1, 2)
    assert score(cli, table, tmp_path / "o")["accuracy"] in (0.25, 0.5)


def test_labels_stay_with_their_images_if_one_cannot_be_read(pets, tmp_path) -> None:
    (pets / "cat" / "2.png").write_bytes(b"no image")
    lab = Lab(tmp_path / "o", load_encoder("tiny"), open_dataset(pets), shard=5, report=lambda line: None)
    store = lab.store(ViewPlan(), 1)
    assert lab.labels_of(store).tolist() == [0] * 3 + [1] * 4 + [2] * 4
    assert lab.rows(store) == [row for row in range(12) if row != 2]
    limited = Lab(tmp_path / "o", load_encoder("tiny"), open_dataset(pets), limit=7, report=lambda line: None)
    truth = [limited.labels[row] for row in limited.indices if row != 2]
    assert limited.labels_of(limited.store(ViewPlan(), 1)).tolist() == truth


def test_two_datasets_of_one_name_have_their_own_stores(tmp_path) -> None:
    for folder in ("a", "b"):
        make_folders(tmp_path / folder / "pets", images=2 if folder == "a" else 3)
    labs = [Lab(tmp_path / "o", load_encoder("tiny"), open_dataset(tmp_path / folder / "pets")) for folder in "ab"]
    assert [len(lab.store(ViewPlan(), 1)) for lab in labs] == [6, 9]
    assert labs[0].store_path(ViewPlan(), 1) != labs[1].store_path(ViewPlan(), 1)


def test_a_new_recipe_version_encodes_everything_again(cli, pets, tmp_path, monkeypatch, passes) -> None:
    score(cli, pets, tmp_path / "o")
    for module in ("encoding.encode", "experiments.lab"):
        monkeypatch.setattr(f"testtime.{module}.RECIPE", 2)
    score(cli, pets, tmp_path / "o")
    assert sum(passes) == 24


def test_a_rewritten_archive_is_read_again(tmp_path, passes) -> None:
    pets = make_folders(tmp_path / "pets")

    def pack(seed: int) -> Dataset:
        replaced(pets / "cat" / "0.png", seed)
        with tarfile.open(tmp_path / "pets.tar", "w") as archive:
            for label, name in enumerate(("cat", "dog", "fox")):
                archive.add(pets / name / "0.png", f"{name}.png")
                (tmp_path / "label").write_text(str(label))
                archive.add(tmp_path / "label", f"{name}.cls")
        return open_dataset(tmp_path / "pets.tar")

    stores = []
    for seed in (1, 2):
        lab = Lab(tmp_path / "o", load_encoder("tiny"), pack(seed), report=lambda line: None)
        stores.append(lab.store(ViewPlan(), 1).read(0, 3))
        assert sum(passes) == 3 * seed
    assert not torch.equal(*stores)


def test_a_long_name_is_accepted(cli, tmp_path) -> None:
    pets = make_folders(tmp_path / ("p" * 200), images=1)
    assert score(cli, pets, tmp_path / "o")["images"] == 3


def test_systems_run_again_on_what_has_changed(pets, tmp_path, passes) -> None:
    def run() -> list[str]:
        lines: list[str] = []
        plan = Plan(tmp_path / "o", load_encoder("tiny"), report=lines.append)
        run_experiment("systems", {"tiny": plan}, {"pets": open_dataset(pets)}, ["zero-shot"])
        return lines

    assert "pets: 1 of 1 cells to run" in run()
    assert not run() and sum(passes) == 12
    replaced(pets / "fox" / "0.png")
    assert "pets: 1 of 1 cells to run" in run() and sum(passes) == 24


# encode


@pytest.fixture
def options(pets) -> list[object]:
    return ["-e", "tiny", "--views", 2, "--shard", 4]


def test_shards_get_corrected_labels_and_are_not_encoded_again(cli, table, tmp_path, options, passes) -> None:
    out = tmp_path / "store"
    assert cli("encode", table, *options, "--out", out).code == 0
    views = Features(out).stored(0, 12)
    passes.clear()
    write_table(table, ["fox"] * 4 + ["cat"] * 4 + ["dog"] * 4)
    assert cli("encode", table, *options, "--out", out).code == 0
    store = Features(out)
    assert store.labels.tolist() == [2] * 4 + [0] * 4 + [1] * 4
    assert passes == [] and torch.equal(store.stored(0, 12), views)
    # removed labels are removed from the store
    table.write_text("".join(line.split(",")[0] + "\n" for line in table.read_text().splitlines()))
    assert cli("encode", table, "--classes", CLASSES, *options, "--out", out).code == 0
    assert passes == []


def test_a_replaced_image_is_encoded_again_in_its_shard(cli, pets, tmp_path, options, passes) -> None:
    out = tmp_path / "store"
    assert cli("encode", pets, *options, "--out", out).code == 0
    passes.clear()
    replaced(pets / "dog" / "1.png")
    outcome = cli("encode", pets, *options, "--out", out)
    assert outcome.code == 0 and "holds images that have changed" in outcome.err and sum(passes) == 8
    assert cli("encode", pets, *options, "--out", tmp_path / "fresh").code == 0
    assert torch.equal(Features(out).stored(0, 12), Features(tmp_path / "fresh").stored(0, 12))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (["--dtype", "float32"], "dtype"),
        (["-e", "tiny:4"], "encoder"),
        (["--seed", 3], "seed"),
        (["--augmix"], "augmix"),
        (["--views", 3], "views"),
        (["--classes", "cat,dog,owl"], "classes or prompts"),
        (["--template", "the {}."], "classes or prompts"),
    ],
)
def test_other_settings_are_refused_with_the_way_out(cli, pets, tmp_path, options, change, expected) -> None:
    out = tmp_path / "store"
    assert cli("encode", pets, *options, "--out", out).code == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    outcome = cli("encode", pets, *options, *change, "--out", out)
    assert outcome.code == 2 and f"({expected}); remove it, or write elsewhere" in outcome.err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize("lost", ["content", "weights", "dtype", "recipe", "positions"])
def test_shards_without_provenance_are_not_trusted(cli, pets, tmp_path, options, passes, lost) -> None:
    out = tmp_path / "store"
    assert cli("encode", pets, *options, "--out", out).code == 0
    shard = min(out.glob("features-*"))
    with safe_open(shard, "pt") as file:
        metadata = {key: value for key, value in file.metadata().items() if key != lost}
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    tensors["views"] = tensors["views"].flip(0)
    write_tensors(shard, tensors, metadata)
    passes.clear()
    outcome = cli("encode", pets, *options, "--out", out)
    assert outcome.code == 0 and "encoded again" in outcome.err and sum(passes) == 8
    assert cli("encode", pets, *options, "--out", tmp_path / "fresh").code == 0
    assert torch.equal(Features(out).stored(0, 4), Features(tmp_path / "fresh").stored(0, 4))


def test_replaced_variations_are_encoded_again(tmp_path, passes) -> None:
    from testtime.images.diffusion import FolderVariations

    pets = make_folders(tmp_path / "pets", images=1)
    paths = sorted(pets.rglob("*.png"))
    for path in paths:
        folder = tmp_path / "drawn" / path.parent.name / path.stem
        folder.mkdir(parents=True)
        shutil.copy(path, folder / "1.png")
    encoder = load_encoder("tiny")
    task = build_task(encoder, ["cat", "dog"], templates=["a {}."])
    plan = ViewPlan(2, variations=FolderVariations(tmp_path / "drawn"))

    def encode() -> int:
        passes.clear()
        encoding.encode(encoder, task, paths, tmp_path / "store", plan, shard=1, resume=True)
        return sum(passes)

    assert encode() == 9 and encode() == 0
    replaced(folder / "1.png")
    assert encode() == 3


@pytest.mark.parametrize("shard", [(), ("--shard", 2)])
def test_names_that_are_not_utf8_are_encoded_and_found_again(cli, tmp_path, passes, shard) -> None:
    pets = make_folders(tmp_path / os.fsdecode(b"pets\xff"), images=1)
    for _ in range(2):
        outcome = cli("encode", pets, "-e", "tiny", "--force", "--out", tmp_path / "o", *shard)
        assert outcome.code == 0, outcome.err
    assert sum(passes) == (3 if shard else 6)
    assert Features(tmp_path / "o").images == tuple(str(path) for path in sorted(pets.rglob("*.png")))


def test_a_single_file_is_always_encoded_again(cli, table, tmp_path, passes) -> None:
    out = tmp_path / "store.safetensors"
    for _ in range(2):
        passes.clear()
        assert cli("encode", table, "-e", "tiny", "--out", out, "--force").code == 0
        assert sum(passes) == 12
    store = Features(out)
    assert store.positions == tuple(range(12)) and store.metadata["recipe"] == "1"


# versions


@pytest.mark.parametrize("version", ["2", "0", "", "one"])
def test_a_file_of_another_version_is_refused(cli, tmp_path, version) -> None:
    views, text = torch.ones(3, 1, 4), torch.eye(2, 4)
    path = save_features(tmp_path / "a.safetensors", views, text, metadata={"version": version})
    with pytest.raises(FeatureError, match=f"format version '{version}', this program reads 1"):
        Features(path)
    outcome = cli("replay", path)
    assert outcome.code == 2 and "Use the version of testtime that wrote it" in outcome.err
    save_file({"views": views, "text": text}, path)  # made elsewhere: no version
    assert len(Features(path)) == 3


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"version": "2"}, "format version '2'"),
        ({"version": 1}, "format version '1'"),
        ({"format": "other"}, "is not the index"),
        ({"shards": ["\ud800"]}, "is not the index"),
        ({"shards": ["a\0b"]}, "is not the index"),
        ({"shards": "a.safetensors"}, "is not the index"),
    ],
)
def test_an_index_of_another_version_or_of_something_else_is_refused(tmp_path, change, expected) -> None:
    save_features(tmp_path / "a.safetensors", torch.ones(3, 1, 4), torch.eye(2, 4))
    index = {"shards": ["a.safetensors"]}
    (tmp_path / "index.json").write_text(json.dumps(index))
    assert len(Features(tmp_path)) == 3
    (tmp_path / "index.json").write_text(json.dumps(index | change))
    with pytest.raises(FeatureError, match=expected):
        Features(tmp_path)


def test_a_shard_of_another_version_is_refused_at_any_position(tmp_path) -> None:
    for number, version in enumerate(("1", "2")):
        metadata = {"version": version}
        save_features(tmp_path / f"{number}.safetensors", torch.ones(3, 1, 4), torch.eye(2, 4), metadata=metadata)
    (tmp_path / "index.json").write_text(json.dumps({"shards": ["0.safetensors", "1.safetensors"]}))
    with pytest.raises(FeatureError, match=r"1\.safetensors has format version '2'"):
        Features(tmp_path)


# scores that are not finite


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("extra", [["--json"], ["--out", "OUT"], ["--reference"], ["--shuffle"]])
def test_scores_that_are_not_finite_are_refused(cli, tmp_path, extra) -> None:
    task, stream, labels = toy(images=40)
    path = save_features(tmp_path / "a.safetensors", stream, task.text, labels=labels)
    words = [word.replace("OUT", str(tmp_path / "o.safetensors")) for word in extra]
    outcome = cli("replay", path, "--set", "beta=1e308", *words)
    assert outcome.code == 2 and "NaN or infinity" in outcome.err and outcome.out == ""
    assert not (tmp_path / "o.safetensors").exists()


def test_a_scale_that_overflows_is_refused(cli, tmp_path) -> None:
    task, stream, _ = toy(images=40)
    path = save_features(tmp_path / "a.safetensors", stream, task.text, scale=1e300)
    assert cli("replay", path, "--method", "zeroshot").code == 2


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_cell_of_scores_that_are_not_finite_is_not_written(pets, tmp_path, monkeypatch, value) -> None:
    lab = Lab(tmp_path / "o", load_encoder("tiny"), open_dataset(pets))
    logits = torch.zeros(12, 3)
    logits[5, 1] = value
    monkeypatch.setattr("testtime.experiments.cells.sweep", lambda task, methods, stream: [logits for _ in methods])
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    image = lab.dataset.paths[int(order[5])]
    with pytest.raises(InputError, match=f"Method 'tda' gives NaN or infinity for {image} with .*pos_alpha="):
        run_cells(lab, [Cell(TDA())])
    assert not lab.path(Cell(TDA())).exists()


# outputs and inputs


def test_outputs_differ_from_inputs_and_from_each_other(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_text("a")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "sub").mkdir()
    distinct({"--out": Path("b"), "--report": None, "--save": Path("c")}, {"IMAGES": Path("a"), "--none": None})
    distinct({"--out": Path("/dev/null"), "--report": Path("/dev/null")}, {"IMAGES": Path("/dev/null")})
    for spelled in ("a", "./a", "sub/../a", "link", str(tmp_path / "a")):
        with pytest.raises(InputError, match="--out would overwrite IMAGES"):
            distinct({"--out": Path(spelled)}, {"IMAGES": Path("a")})
        with pytest.raises(InputError, match="--out would overwrite --many"):
            distinct({"--out": Path("a")}, {"--many": [None, Path("sub"), Path(spelled)]})
    with pytest.raises(InputError, match="--out and --save are the same file"):
        distinct({"--out": Path("new"), "--save": Path("sub/../new")}, {})


@pytest.mark.parametrize("target", ["pets.csv", "pets/cat/0.png", "names.txt", "d.json", "pets"])
def test_encode_does_not_overwrite_its_inputs(cli, table, tmp_path, target) -> None:
    (tmp_path / "names.txt").write_text("cat\ndog\nfox\n")
    (tmp_path / "d.json").write_text(json.dumps({name: ["a"] for name in ("cat", "dog", "fox")}))
    source = tmp_path / "pets" if target == "pets" else table
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    more = ["--shard", 4] if target == "pets" else []
    outcome = cli(
        "encode", source, "-e", "tiny", "--classes-file", tmp_path / "names.txt",
        "--descriptions", tmp_path / "d.json", "--out", tmp_path / target, *more,
    )  # fmt: skip
    assert outcome.code == 2 and "--out would overwrite" in outcome.err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_report_does_not_overwrite_its_features(cli, tmp_path) -> None:
    task, stream, labels = tt.toy(images=6)
    file = tt.save_features(tmp_path / "toy.safetensors", stream, task.text, labels=labels)
    before = file.read_bytes()
    outcome = cli("report", file, "--out", file)
    assert outcome.code == 2 and "--out would overwrite FEATURES" in outcome.err and file.read_bytes() == before


def test_encode_does_not_overwrite_its_weights(cli, pets, tmp_path) -> None:
    (tmp_path / "mine.pt").write_bytes(b"weights")
    outcome = cli("encode", pets, "-e", f"open_clip:ViT-B-16/{tmp_path}/mine.pt", "--out", tmp_path / "mine.pt")
    assert outcome.code == 2 and "--out would overwrite --encoder" in outcome.err


@pytest.mark.parametrize("option", ["--out", "--report"])
def test_replay_does_not_overwrite_its_inputs(cli, pets, tmp_path, option) -> None:
    assert cli("encode", pets, "-e", "tiny", "--out", tmp_path / "store", "--shard", 4).code == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "store").iterdir()}
    for name in before:
        outcome = cli("replay", tmp_path / "store", option, tmp_path / "store" / name)
        assert outcome.code == 2 and f"{option} would overwrite FEATURES" in outcome.err
    shard = tmp_path / "store" / min(name for name in before if name.startswith("features"))
    outcome = cli("replay", shard, option, shard)
    assert outcome.code == 2 and f"{option} would overwrite FEATURES" in outcome.err
    both = cli("replay", shard, "--out", tmp_path / "x", "--report", tmp_path / "x")
    assert both.code == 2 and "--out and --report are the same file" in both.err
    assert {path.name: path.read_bytes() for path in (tmp_path / "store").iterdir()} == before


def test_eval_does_not_overwrite_its_inputs(cli, pets, tmp_path) -> None:
    described = tmp_path / "o" / "results.json"
    described.parent.mkdir()
    described.write_text(json.dumps({name: ["a"] for name in ("cat", "dog", "fox")}))
    outcome = cli("eval", pets, "-e", "tiny", "--out", tmp_path / "o", "--descriptions", described)
    assert outcome.code == 2 and "results.json in --out would overwrite --descriptions" in outcome.err
    outcome = cli("eval", pets, "-e", "tiny", "--out", pets)
    assert outcome.code == 2 and "--out would overwrite IMAGES" in outcome.err
    assert {path.name for path in pets.iterdir()} == {"cat", "dog", "fox"}

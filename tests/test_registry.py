"""Four kinds of entries by name, and settings from text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from trees import write_image

from testtime import load_encoder, registry
from testtime.checks import check_encoder
from testtime.datasets import DATASETS, Dataset, benchmark, open_dataset
from testtime.encoding.encoders import ENCODERS, Deferred
from testtime.methods.base import Base
from testtime.methods.dpe import DPE
from testtime.methods.zeroshot import ZeroShot
from testtime.registry import METHODS
from testtime.text.prompts import find_templates
from testtime.text.templates import PROMPTS
from testtime.types import Encoder, InputError, MissingPart, SettingError, UnknownName


@dataclass(frozen=True)
class Mine(Base):
    """A method of another package."""

    name: ClassVar[str] = "mine"
    summary: ClassVar[str] = "Somebody else's"
    strength: float = 0.5


def load_mine(rest: str, device: torch.device, dtype: torch.dtype) -> Encoder:
    """The tiny encoder under another name.

    And more on it.
    """
    encoder = load_encoder(f"tiny:{rest}", device, dtype)
    encoder.name = f"mine:{rest}"
    return encoder


def open_mine(root: Path, part: str) -> Dataset:
    """Two pictures."""
    if not (root / part).is_dir():
        raise InputError(f"No folder {part} in {root}.")
    return Dataset("mine", sorted((root / part).iterdir()), None, ["cat", "dog"])


TEMPLATES = ["my {}.", "the {}."]


def make_templates() -> list[str]:
    """Templates that are made on first use."""
    return TEMPLATES


KINDS = {
    "methods": (METHODS, "Mine"),
    "encoders": (ENCODERS, "load_mine"),
    "datasets": (DATASETS, "open_mine"),
    "prompts": (PROMPTS, "TEMPLATES"),
}


@pytest.fixture
def plugged(monkeypatch):
    """A plug-in is installed that offers `mine` of each kind and two sets of prompts, and one that claims ours."""
    points = [EntryPoint("mine", f"{__name__}:{target}", f"testtime.{group}") for group, (_, target) in KINDS.items()]
    points += [EntryPoint(next(iter(kind.ours)), "no.such:module", kind.group) for kind, _ in KINDS.values()]
    points += [
        EntryPoint("dpe", f"{__name__}:Mine", "testtime.methods"),
        EntryPoint("made", f"{__name__}:make_templates", "testtime.prompts"),
        EntryPoint("wrong", f"{__name__}:KINDS", "testtime.prompts"),
    ]

    def installed(*, group: str):
        return [point for point in points if point.group == group]

    monkeypatch.setattr(registry, "entry_points", installed)


# --- names ---


@pytest.mark.parametrize("name", list(registry.METHODS.ours))
def test_every_name_in_the_table_leads_to_a_method_of_that_name(name):
    cls = registry.method_class(name)
    assert cls.name == name
    assert cls.summary and "\n" not in cls.summary
    assert registry.make_method(name) == cls()


def test_method_names_are_sorted():
    names = registry.method_names()
    assert names == sorted(names)
    assert {"dpe", "zeroshot"} <= set(names)


@pytest.mark.parametrize(("typed", "meant"), [("dpee", "dpe"), ("DPE", "dpe"), ("zero-shot", "zeroshot")])
def test_a_near_miss_is_told_what_was_meant(typed, meant):
    with pytest.raises(UnknownName) as caught:
        registry.make_method(typed)
    message = str(caught.value)
    assert message.startswith(f"Unknown method '{typed}'. Did you mean '{meant}'? Available: ")
    assert all(name in message for name in registry.method_names())


def test_a_far_miss_is_told_what_there_is_without_a_guess():
    with pytest.raises(UnknownName) as caught:
        registry.make_method("xylophone")
    assert "Did you mean" not in str(caught.value)
    assert ", ".join(registry.method_names()) in str(caught.value)


def test_a_wrong_name_is_wrong_input():
    assert issubclass(UnknownName, InputError) and UnknownName.exit_code == 2
    assert issubclass(SettingError, InputError) and SettingError.exit_code == 2


# --- plug-ins ---


def test_a_plug_in_is_found_by_its_name(plugged):
    assert "mine" in registry.method_names()
    method = registry.make_method("mine", settings={"strength": "0.25"})
    assert method == Mine(0.25)


def test_a_plug_in_does_not_replace_a_method_of_ours(plugged):
    assert registry.method_class("dpe") is DPE
    assert registry.method_names().count("dpe") == 1


@pytest.mark.parametrize(("kind", "target"), KINDS.values(), ids=KINDS)
def test_every_kind_finds_plug_ins_and_keeps_its_own_names(plugged, kind, target):
    assert kind.find("mine") is globals()[target]
    assert set(kind.names()) >= {*kind.ours, "mine"} and len(kind.names()) == len(set(kind.names()))
    kind.find(next(iter(kind.ours)))  # and not the module that is none
    with pytest.raises(UnknownName, match=f"Unknown {kind.word} 'mne'. Did you mean 'mine'. Available: .*mine"):
        kind.find("mne")


@pytest.mark.parametrize(("kind", "target"), KINDS.values(), ids=KINDS)
def test_every_kind_names_a_plug_in_that_cannot_be_imported(monkeypatch, kind, target):
    point = EntryPoint("bad", "no_such_module:thing", kind.group)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == kind.group else [])
    said = f"{kind.word.capitalize()} 'bad' is a plug-in that cannot be imported, no_such_module:thing"
    with pytest.raises(MissingPart, match=said):
        kind.find("bad")
    heard = []
    rows = kind.listing(heard.append)
    assert len(rows) == len(kind.ours) and len(heard) == 1 and heard[0].startswith(said)


@pytest.mark.parametrize(
    ("group", "line"),
    [
        ("methods", "Somebody else's"),
        ("encoders", "The tiny encoder under another name."),
        ("datasets", "Two pictures."),
        ("prompts", "2 templates, 'my {}.' to 'the {}.'"),
    ],
)
def test_listings_have_a_line_on_each_plug_in(plugged, cli, monkeypatch, group, line):
    monkeypatch.setenv("COLUMNS", "200")
    _, out, _ = cli("list", group)
    assert [row.split(maxsplit=1)[1].strip() for row in out.splitlines() if row.startswith("mine")] == [line]


def test_an_encoder_of_a_plug_in_is_loaded_with_what_follows_its_name(plugged):
    encoder = load_encoder("mine:3")
    assert encoder.name == "mine:3" and Deferred("mine:3").dim == encoder.dim
    check_encoder(encoder)
    with pytest.raises(SettingError, match="float8 is for CLIP's vision transformers on a GPU, not for 'mine:3'"):
        load_encoder("mine:3", dtype=torch.float8_e4m3fn)


def test_a_dataset_of_a_plug_in_is_opened_by_name_in_any_spelling(plugged, tmp_path):
    write_image(tmp_path / "test" / "1.png")
    data = open_dataset("Mine", root=tmp_path)
    assert data.paths == [tmp_path / "test" / "1.png"]
    with pytest.raises(InputError, match="No folder train"):
        open_dataset("mine", root=tmp_path, part="train")
    with pytest.raises(InputError, match=r"is a benchmark: give --root FOLDER"):
        open_dataset("mine")
    with pytest.raises(UnknownName, match="'mine' comes from a plug-in"):
        benchmark("mine")


def test_data_check_finds_the_datasets_of_plug_ins(plugged, cli, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    write_image(tmp_path / "test" / "1.png")
    code, out, _ = cli("data", "check", tmp_path, "--json")
    found = json.loads(out)["datasets"][-1]
    assert code == 0 and len(json.loads(out)["datasets"]) == 16
    assert (found["name"], found["state"], found["images"], found["expected_images"]) == ("mine", "found", 1, None)
    _, out, _ = cli("data", "check", tmp_path)
    assert "mine" in out and "Missing: 15 of 16" in out
    code, out, err = cli("data", "check", write_image(tmp_path / "empty" / "x" / "1.png").parent)
    assert code == 2 and "No folder test in" in " ".join(out.split()) and "None of the 16" in err


def test_prompt_sets_of_plug_ins_are_templates(plugged):
    assert find_templates("mine") == find_templates("made") == ("my {}.", "the {}.")
    assert find_templates(["single", "made"]) == ("a photo of a {}.", "my {}.", "the {}.")
    with pytest.raises(InputError, match="Template 'methods' has no {}"):
        find_templates("wrong")


def test_a_method_of_no_plug_in_is_unknown():
    with pytest.raises(UnknownName):
        registry.make_method("mine")


def test_a_plug_in_is_named_among_what_is_available(plugged):
    with pytest.raises(UnknownName, match="Did you mean 'mine'"):
        registry.make_method("mime")


# --- settings ---


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("alpha", "4", 4.0),
        ("alpha", "1e-3", 1e-3),
        ("alpha", 4, 4.0),
        ("queue", "5", 5),
        ("queue", 5.0, 5),
        ("multi_view_prediction", "True", True),
        ("multi_view_prediction", "yes", True),
        ("multi_view_prediction", "1", True),
        ("multi_view_prediction", "no", False),
        ("multi_view_prediction", "FALSE", False),
        ("multi_view_prediction", True, True),
        ("text_update", "exponential", "exponential"),
        ("adamw_betas", "0.8,0.9", (0.8, 0.9)),
        ("adamw_betas", [0.8, 0.9], (0.8, 0.9)),
    ],
)
def test_settings_are_read_from_text(key, text, value):
    found = getattr(registry.make_method("dpe", settings={key: text}), key)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("alpha", "six", "a finite number"),
        ("alpha", "nan", "a finite number"),
        ("alpha", "inf", "a finite number"),
        ("alpha", True, "a finite number"),
        ("alpha", None, "a finite number"),
        ("queue", "2.5", "a whole number"),
        ("queue", 2.5, "a whole number"),
        ("queue", False, "a whole number"),
        ("multi_view_prediction", "maybe", "true or false"),
        ("text_update", "often", "none or full or exponential or cumulative"),
        ("adamw_betas", "0.9", "2 comma-separated numbers"),
        ("adamw_betas", "0.9,x", "2 comma-separated numbers"),
        ("adamw_betas", "0.9,0.99,0.999", "2 comma-separated numbers"),
    ],
)
def test_a_setting_of_the_wrong_kind_says_which_is_wanted(key, value, wanted):
    with pytest.raises(SettingError) as caught:
        registry.make_method("dpe", settings={key: value})
    assert str(caught.value) == f"Setting {key}={value!r}: expected {wanted}."


def test_a_setting_out_of_range_is_refused_by_the_method():
    with pytest.raises(SettingError, match=r"alpha=-1\.0"):
        registry.make_method("dpe", settings={"alpha": "-1"})


def test_an_unknown_setting_is_told_what_was_meant():
    with pytest.raises(UnknownName) as caught:
        registry.make_method("dpe", settings={"alhpa": "1"})
    assert str(caught.value).startswith("Unknown setting of dpe 'alhpa'. Did you mean 'alpha'?")
    with pytest.raises(UnknownName, match="Unknown setting of zeroshot 'alpha'"):
        registry.make_method("zeroshot", settings={"alpha": "1"})


# --- presets ---


def test_presets_are_those_of_the_class():
    assert registry.make_method("dpe", "paper") == DPE.paper()
    assert registry.make_method("dpe", "released") == DPE.released() == registry.make_method("dpe")


def test_settings_go_over_the_preset():
    method = registry.make_method("dpe", "paper", {"align_both": "false", "steps": "2"})
    assert method == DPE.paper(align_both=False, steps=2)


def test_an_unknown_preset_is_told_what_there_is():
    with pytest.raises(UnknownName) as caught:
        registry.make_method("dpe", "papr")
    assert str(caught.value) == "Unknown preset of dpe 'papr'. Did you mean 'paper'? Available: paper, released."


def test_a_method_without_presets_says_so():
    with pytest.raises(UnknownName, match="'zeroshot' has no presets; leave out 'paper'"):
        registry.make_method("zeroshot", "paper")


# --- settings as data ---


@pytest.mark.parametrize(
    "method", [DPE(), DPE.paper(), DPE(adamw_betas=(0.5, 0.6), queue=0, lr_text=1e-5), ZeroShot()], ids=repr
)
def test_settings_survive_json(method):
    settings = registry.settings_of(method)
    assert json.loads(json.dumps(settings)) == settings  # plain data: no tuple, no tensor
    assert registry.make_method(method.name, None, json.loads(json.dumps(settings))) == method


def test_settings_survive_as_text():
    method = DPE.paper(lr_text=1.2345678901234567e-5)
    typed = {
        key: ",".join(map(str, value)) if isinstance(value, list) else str(value)
        for key, value in registry.settings_of(method).items()
    }
    assert registry.make_method("dpe", None, typed) == method


def test_settings_come_in_the_order_they_are_written():
    assert list(registry.settings_of(DPE()))[:3] == ["alpha", "beta", "queue"]

"""Methods by name, and settings from the text a person typed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import ClassVar

import pytest

from testtime import registry
from testtime.methods.base import Base
from testtime.methods.dpe import DPE
from testtime.methods.zeroshot import ZeroShot
from testtime.types import InputError, SettingError, UnknownName


@dataclass(frozen=True)
class Mine(Base):
    """A method of another package."""

    name: ClassVar[str] = "mine"
    summary: ClassVar[str] = "Somebody else's"
    strength: float = 0.5


@pytest.fixture
def plugged(monkeypatch):
    """A plug-in is installed that offers `mine`, and another that claims the name `dpe`."""
    points = [
        EntryPoint(name="mine", value=f"{__name__}:Mine", group="testtime.methods"),
        EntryPoint(name="dpe", value=f"{__name__}:Mine", group="testtime.methods"),
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
        ("adamw_betas", "0.9", "2 numbers with commas between"),
        ("adamw_betas", "0.9,x", "2 numbers with commas between"),
        ("adamw_betas", "0.9,0.99,0.999", "2 numbers with commas between"),
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

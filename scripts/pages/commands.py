"""The command line reference: every command with its help, its options and its example."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from pages import NOTICE, table
from testtime.cli.app import app


def walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every subcommand under its full name, in the order of the help."""
    for key, subcommand in getattr(command, "commands", {}).items():
        full = f"{name} {key}"
        if hasattr(subcommand, "commands"):
            yield from walk(subcommand, full)
        else:
            yield full, subcommand


def plain(text: str) -> str:
    """Help text without terminal markup."""
    return re.sub(r"\[/?(?:bold|dim|red|green)?\]", "", text)


def usage(name: str, command: Any) -> str:
    """The usage line of a command."""
    words = [name]
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            word = parameter.metavar or parameter.name.upper().strip("_")
            words.append(word if parameter.required else f"[{word}]")
    required = [p for p in command.params if p.param_type_name == "option" and p.required]
    words += [f"{option.opts[0]} {option.metavar or option.name.upper()}" for option in required]
    return " ".join([*words, "[OPTIONS]"] if len(required) < len(options(command)) else words)


def options(command: Any) -> list[Any]:
    """The options of a command, without --help."""
    return [p for p in command.params if p.param_type_name == "option" and p.name != "help"]


def default(option: Any) -> str:
    """The default of an option, in words."""
    if option.required:
        return "required"
    if isinstance(option.show_default, str):
        return option.show_default
    value = option.default
    if getattr(option, "is_flag", False):
        return "on" if value else "off"
    return "" if value is None else f"`{value}`"


def section(name: str, command: Any) -> list[str]:
    """The section of one command."""
    lines = ["", f"## {name}", "", plain(command.help or "").strip(), "", "```text", usage(name, command), "```"]
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    if arguments:
        named = [[f"`{p.metavar or p.name.upper().strip('_')}`", p.help or ""] for p in arguments]
        lines += ["", table(["argument", ""], named)]
    if options(command):
        rows = []
        for option in options(command):
            value = "" if getattr(option, "is_flag", False) or not option.metavar else f" {option.metavar}"
            names = ", ".join(f"`{each}`" for each in [*option.opts, *option.secondary_opts])
            rows.append([names + (f" `{value.strip()}`" if value else ""), default(option), option.help or ""])
        lines += ["", table(["option", "default", ""], rows)]
    if command.epilog:
        example = command.epilog.removeprefix("Example:").strip()
        lines += ["", "<!-- parsed only: the example of the help page -->", "", "```sh", example, "```"]
    return lines


def page() -> str:
    """The page, in Markdown."""
    root = typer.main.get_command(app)
    lines = ["# Command line", "", NOTICE, "", *plain(root.help or "").splitlines(), "", plain(root.epilog or "")]
    for name, command in walk(root, "testtime"):
        lines += section(name, command)
    return "\n".join(lines) + "\n"

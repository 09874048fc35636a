"""The command line: parse, call, print. Each command is in the module of its name; this is what they share."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from testtime.cli import (
    about,
    data,
    doctor,
    encode,
    experiments,
    history,
    leaderboard,
    plan,
    replay,
    report,
    run,
    serve,
)
from testtime.cli import train_prompts as prompts
from testtime.cli.options import flag, name_metavars
from testtime.cli.terminal import err
from testtime.errors import InputError, Interrupted, TesttimeError
from testtime.machine.interrupts import on_interrupt

STOPPED = "Interrupted. No partial file was left; run the command again."


def _plain(params: list[Any]) -> list[Any]:
    """Parameters whose help names no types, such as <bool>; options of ours are named by `name_metavars`."""
    for param in params:
        if param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: ""
        elif param.metavar is None and getattr(param, "is_flag", False):  # --help and typer's own
            param.metavar = ""
    return params


class Command(TyperCommand):
    """A command with plain help."""

    def get_params(self, ctx: Any) -> Any:
        return _plain(super().get_params(ctx))


class Group(TyperGroup):
    """A group of commands with plain help."""

    def get_params(self, ctx: Any) -> Any:
        return _plain(super().get_params(ctx))


class MakeByDefault(Group):
    """A group whose command 'make' need not be written: any word that is no other command is an argument of it."""

    default = "make"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [self.default, *args]
        return super().parse_args(ctx, args)


class Commands(Group):
    """The commands, with two cases that typer handles differently: an interrupt, and a closed output pipe."""

    def invoke(self, ctx: Any) -> Any:
        with on_interrupt(lambda: STOPPED), closed_pipe_allowed():
            return super().invoke(ctx)

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with closed_pipe_allowed():  # this prints the help
            return super().make_context(*arguments, **options)


@contextmanager
def closed_pipe_allowed() -> Iterator[None]:
    """Exit with code 0 if the output pipe is closed, as by `| head`."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(0)
    except SystemExit as stop:  # rich may have noticed first
        sys.exit(0 if isinstance(stop.__context__, BrokenPipeError) else stop.code)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Zero-shot image classifiers that get better while they are in use.\n\n"
    "[bold]testtime demo[/] shows it in a minute; [bold]testtime run PHOTOS --classes cat,dog[/] runs it on yours.",
    epilog="Exit codes: 0 success, 1 run-time failure, 2 wrong input or options, 130 interrupted. "
    "--debug shows tracebacks.",
)


def _version(context: typer.Context, asked: bool) -> None:
    if asked and not context.resilient_parsing:  # resilient: a shell asks for completions
        about.version()
        raise typer.Exit


@app.callback()
def _common(
    debug: Annotated[bool, flag("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, flag("--version", "-V", help="Print the version.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """Options of every command; `main` has already read --debug, wherever it was given."""


def _readable(commands: typer.Typer) -> typer.Typer:
    """The commands with plain help, and the lines of each paragraph joined, for a terminal of any width."""
    for command in commands.registered_commands:
        command.cls = Command
        if command.callback is not None:
            name_metavars(command.callback)
        paragraphs = (inspect.getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    return commands


for commands in (run, encode, replay, report, serve, prompts, experiments, plan, doctor, about):
    app.add_typer(_readable(commands.app))  # no name: its commands are at the top level
app.add_typer(_readable(data.app), name="data", cls=Group)
app.add_typer(_readable(history.app), name="history", cls=Group)
app.add_typer(_readable(leaderboard.app), name="leaderboard", cls=MakeByDefault)
app.add_typer(_readable(serve.tokens), name="token", cls=Group)


def main(argv: list[str] | None = None) -> None:
    """The `testtime` command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments or bool(os.environ.get("TESTTIME_DEBUG"))
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        app(arguments, prog_name="testtime")
    except Interrupted as stop:
        err.print(escape(str(stop)), soft_wrap=True, highlight=False)
        sys.exit(stop.exit_code)
    except TesttimeError as error:
        if debug:
            traceback.print_exc()
        err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:  # before or after a command
        err.print(STOPPED)
        sys.exit(Interrupted.exit_code)
    except Exception as error:
        if debug:
            traceback.print_exc()
        if isinstance(error, OSError) and error.strerror:  # an unreadable folder, a full disk
            where = f"{error.filename}: " if error.filename else ""
            err.print(f"[bold red]error:[/] {escape(where + error.strerror)}.", soft_wrap=True, highlight=False)
            sys.exit(InputError.exit_code)
        err.print(
            f"[bold red]failed:[/] {escape(f'{type(error).__name__}: {error}')}\n"
            "This is a bug in testtime or in a library that it uses; --debug shows where.",
            soft_wrap=True,
            highlight=False,
        )
        sys.exit(1)


if __name__ == "__main__":
    main()

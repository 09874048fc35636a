"""The command line: parse, call, print. The commands are in `commands/`; here is what they share."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer
from rich.markup import escape

from testtime.commands import about, data, experiments, images, prompts, replay, report
from testtime.terminal import err
from testtime.types import TesttimeError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Zero-shot image classifiers that get better while they are in use.\n\n"
    "[bold]testtime demo[/] shows it in a minute; [bold]testtime run PHOTOS --classes cat,dog[/] does it with yours.",
    epilog="Exit codes: 0 done, 1 failed while working, 2 wrong input or options. --debug shows tracebacks.",
)


@app.callback()
def _common(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Options of every command; `main` has already seen --debug wherever it stood."""


for commands in (images, replay, report, prompts, experiments, about):
    app.add_typer(commands.app)  # no name: its commands stand beside the others
app.add_typer(data.app, name="data")


def main(argv: list[str] | None = None) -> None:
    """The `testtime` command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments or bool(os.environ.get("TESTTIME_DEBUG"))
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        app(arguments, prog_name="testtime")
    except TesttimeError as error:
        if debug:
            traceback.print_exc()
        err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        err.print("Interrupted; what was written is complete up to here.")
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(0)
    except Exception as error:
        if debug:
            traceback.print_exc()
        err.print(
            f"[bold red]failed:[/] {escape(f'{type(error).__name__}: {error}')}\n"
            "This is a fault in testtime or in a library under it; --debug shows where.",
            soft_wrap=True,
            highlight=False,
        )
        sys.exit(1)


if __name__ == "__main__":
    main()

"""Terminal output: progress, percentages, rows as they arrive."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.status import Status

from testtime.errors import UNENCODABLE, InputError

# control characters, and bidirectional marks, which change the order of the text shown
_ESCAPES = {
    code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    for code in (*range(32), *range(127, 160), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    if chr(code) not in "\t\n"
}


def shown(text: str) -> str:
    """Untrusted text made safe for a terminal: control characters are escaped.

    >>> shown("cat\\x1b[2J.jpg")
    'cat\\\\x1b[2J.jpg'
    """
    return text.translate(_ESCAPES).encode("utf-8", UNENCODABLE).decode()


class Terminal(Console):
    """A console that escapes control characters in text."""

    def render_str(self, text: str, **options: Any) -> Any:
        return super().render_str(shown(text), **options)


out = Terminal()
err = Terminal(stderr=True)


class Watch:
    """Rows in a terminal: the answer beside the zero-shot one, highlighted where they differ."""

    def __init__(self, classnames: tuple[str, ...]) -> None:
        self.width = min(24, max(map(len, classnames)))
        out.print(f"[dim]{'':>6}  {'label':<{self.width + 7}}  {'zero-shot':<{self.width + 7}}  learned  image[/]")

    def write(self, values: dict[str, Any]) -> None:
        """Print one row."""
        label, frozen = (f"{values[key][: self.width]:<{self.width}}" for key in ("label", "zero_shot"))
        mark = "bold green" if values["label"] != values["zero_shot"] else "bold"
        out.print(
            f"[dim]{values['index']:>6}[/]  [{mark}]{escape(label)}[/] {values['confidence']:>6.1%}  "
            f"{escape(frozen)} {values['zero_shot_confidence']:>6.1%}  {'yes' if values['learned'] else '':<7}  "
            f"[dim]{escape(values['image'])}[/]",
            highlight=False,
            no_wrap=True,
            overflow="ellipsis",
        )


def note(line: str) -> None:
    """Print a line on standard error, without markup."""
    err.print(escape(line), highlight=False, soft_wrap=True)


@contextmanager
def opened(path: Path | None, append: bool) -> Iterator[Any]:
    if path is None:
        yield sys.stdout
        return
    from testtime.files import make_folder  # imports safetensors

    try:
        make_folder(path.parent)
        file = open(path, "a" if append else "w", encoding="utf-8", errors=UNENCODABLE, newline="")
    except OSError as error:
        raise InputError(f"Cannot write {path}: {error.strerror or error}.") from None
    try:
        with file:
            yield file
    except OSError as error:
        if error.filename is not None or isinstance(error, BrokenPipeError):
            raise
        raise InputError(f"Cannot write {path}: {error.strerror or error}.") from None


def waiting(what: str) -> Status:
    """A spinner with a message, while something runs that has no progress to count."""
    return err.status(f"[dim]{escape(what)} ...[/]")


@contextmanager
def progress(unit: str, total: int, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal; in a pipe, an occasional plain line."""
    if quiet:
        yield lambda done: None
        return
    if err.is_terminal:
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
        with Progress(*columns, console=err, transient=True) as bar:
            job = bar.add_task("", total=total)
            yield lambda done: bar.update(job, completed=done)
        return
    reported = 0

    def line(done: int) -> None:
        nonlocal reported
        if 10 * done // total > 10 * reported // total:
            reported = done
            err.print(f"{done} of {total} {unit}", highlight=False)

    yield line


def counted(count: int, one: str, many: str | None = None) -> str:
    """A count with its noun: 1 image, 2 images."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def percent(fraction: float | None) -> str:
    return "no labels" if fraction is None else f"{100 * fraction:.2f}%"

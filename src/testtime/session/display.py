"""How sessions and their answers are shown in a notebook, and progress bars for notebooks and terminals."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from testtime.bank import Bank
from testtime.display import facts, in_notebook, line, safe
from testtime.methods.base import differ
from testtime.session.initial_state import initial_state
from testtime.types import ImageError

if TYPE_CHECKING:
    from testtime.encoding.stream import Source
    from testtime.session.session import Session

SHOWN = 20  # rows of a table
SIDE = 48  # pixels of a thumbnail
REFRESH = 0.2  # seconds between two updates of a bar in a notebook


def session_html(session: Session) -> str:
    """A session as a small table."""
    task, encoder = session.task, session.encoder
    return facts(
        "Session",
        {
            "Method": repr(session.method),
            "Classes": f"{task.classes:,}: {line(', '.join(task.classnames[:100]), 100)}",
            "Encoder": repr(encoder) if encoder is not None else f"{task.encoder or 'none'}, by stored features",
            "Views": f"{session.plan.total} per image",
            "Images seen": f"{session.count:,}",
            "Learned": _learned(session),
        },
    )


def _learned(session: Session) -> str:
    """What a session has learned, from its state alone, so that it is right after loading one too."""
    state = session.state
    if not differ(initial_state(session.method, session.task), state):
        return "nothing yet"
    kept = sum(int(bank.cost.isfinite().sum()) for bank in _banks(state))
    return f"{kept:,} features kept in queues" if kept else "yes"


def _banks(state: Any) -> Iterator[Bank]:
    if isinstance(state, Bank):
        yield state
    elif isinstance(state, tuple):
        for part in state:
            yield from _banks(part)


def table_html(
    columns: Sequence[str], rows: Sequence[Mapping[str, Any]], images: Mapping[int, Source], total: int
) -> str:
    """The first rows of a table of answers, and how many more there are; `images`, by index, are for thumbnails."""
    head = "".join(f"<th>{safe(name)}</th>" for name in ("", *columns))
    body = "".join(
        f"<tr><td>{_picture(images.get(row.get('index', -1)))}</td>"
        f"{''.join(f'<td>{safe(row[name])}</td>' for name in columns)}</tr>"
        for row in rows
    )
    more = f"<p>and {total - len(rows):,} more rows</p>" if total > len(rows) else ""
    return f"<div><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}</div>"


def _picture(image: Source | None) -> str:
    """The thumbnail of an image, as HTML; nothing if there is none, or if it can no longer be read."""
    from testtime.encoding.stream import as_image
    from testtime.images.thumbnail import thumbnail_uri

    if image is None:
        return ""
    try:
        return f'<img src="{thumbnail_uri(as_image(image), SIDE)}" alt="">'
    except ImageError:
        return ""


@contextmanager
def bar(total: int | None) -> Iterator[Callable[[int], None]]:
    """A progress bar of images, `total` if that is known: HTML in a notebook, else on standard error."""
    if in_notebook():
        yield from _notebook_bar(total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("images"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        job = progress.add_task("", total=total)
        yield lambda done: progress.update(job, completed=done)


def _notebook_bar(total: int | None) -> Iterator[Callable[[int], None]]:
    # rich would need ipywidgets here, and without them draw nothing
    from IPython.display import HTML, display

    start, shown, done = time.monotonic(), 0.0, 0
    of = "" if total is None else f" of {total:,}"

    def html() -> Any:
        scale = "" if total is None else f' value="{done}" max="{total}"'
        seconds = time.monotonic() - start
        return HTML(f"<progress{scale}></progress> {done:,}{of} images, {seconds:.0f} s")

    handle = display(html(), display_id=True)

    def advance(count: int) -> None:
        nonlocal shown, done
        done = count
        if time.monotonic() - shown >= REFRESH:
            shown = time.monotonic()
            handle.update(html())

    try:
        yield advance
    finally:
        total = done if total is None else total
        handle.update(html())

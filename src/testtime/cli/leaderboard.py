"""`testtime leaderboard`: make it, repeat some cells of somebody's, put several together."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from testtime.cli.options import Device, EncoderName, On, Root, benchmarks_with_root, encoder_of, flag, given
from testtime.cli.plans import (
    Described,
    Json,
    Limit,
    Out,
    RecipeAugMix,
    check_out,
    executor_of,
    numbers_of,
    plan_of,
    print_table,
    stopped,
)
from testtime.cli.terminal import counted, note
from testtime.errors import InputError
from testtime.machine.interrupts import on_interrupt

if TYPE_CHECKING:
    from testtime.experiments.jobs import Executor
    from testtime.experiments.lab import Record
    from testtime.experiments.leaderboard import Entry
    from testtime.experiments.plan import Plan

app = typer.Typer(
    no_args_is_help=True,
    help="Rank methods on datasets and hard streams, repeat somebody's results, put results together. "
    "'testtime leaderboard SOURCE' is short for 'testtime leaderboard make SOURCE'.",
)
NAME = "leaderboard"
# of the columns, those for a terminal
SHOWN = ("method", "rank", "accuracy", "expected tail", "against zero-shot", "below zero-shot", "ms per image")
RUNS = Path("runs/leaderboard")

Sources = Annotated[
    list[str] | None,
    typer.Argument(metavar="SOURCE...", help="Where the images are now; by default where the file says."),
]


@app.command(epilog="Example:  testtime leaderboard caltech-101/ --encoder offline --out runs/board")
def make(
    context: typer.Context,
    data: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Folders of labelled images, folders of domains, feature files, or benchmark names with --root.",
            autocompletion=benchmarks_with_root,
        ),
    ],
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods", "-m", metavar="NAMES", help="Comma-separated; by default all but prompt tuning, plug-ins too."
        ),
    ] = None,
    streams: Annotated[
        str | None,
        typer.Option(
            "--streams",
            metavar="NAMES",
            help="Comma-separated streams of the lab, or all; by default one of each kind.",
        ),
    ] = None,
    orders: Annotated[
        int | None, typer.Option("--orders", help="Orders of each stream: seeds 1 to N.", show_default="20")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", metavar="N,N,...", help="Comma-separated seeds in place of --orders.")
    ] = None,
    oracle: Annotated[
        bool, flag("--oracle", help="Add a track of settings that are chosen with the test labels.")
    ] = False,
    root: Root = None,
    encoder: EncoderName = "offline",
    descriptions: Described = None,
    views: Annotated[
        int,
        typer.Option(
            "--views",
            help="Views per image; with several, methods run too that learn from the views of one image alone.",
        ),
    ] = 1,
    augmix: RecipeAugMix = False,
    limit: Limit = None,
    device: Device = "auto",
    on: On = None,
    dry_run: Annotated[bool, flag("--dry-run", help="Encode, estimate the time, and stop.")] = False,
    output: Out = RUNS,
    as_json: Json = False,
) -> None:
    """Run every method over every stream of every dataset, in several orders. Run the command again to resume it.

    Settings are the methods' own (track one-setting), and the authors' for each benchmark where there are any (track
    per-dataset). A new method adds only its own cells. leaderboard.json, .md and .html are written to --out; the first
    can be sent to others, who repeat some of it with 'leaderboard verify'.
    """
    from testtime.experiments import leaderboard
    from testtime.experiments.sources import is_stored
    from testtime.files import check_folder

    if all(map(is_stored, map(Path, data))):
        for option in ("encoder", "descriptions", "augmix"):
            if given(context, option):
                raise InputError(f"--{option}: feature files have their own features and prototypes; leave it out.")
    names, left_out = leaderboard.chosen_methods(_words(methods), views)
    kinds = leaderboard.chosen_streams(_words(streams))
    if augmix and views == 1:
        raise InputError("--augmix: it changes the random crops, so give --views N, at least 2.")
    check_out(output, NAME, data, encoder, descriptions, None)
    check_folder(output)
    if on is not None and dry_run:
        raise InputError(f"--on {on}: --dry-run runs no cells; leave it out.")
    with on_interrupt(lambda: stopped(output)), executor_of(on) as executor:
        plan = _plan(encoder, device, output, _seeds(orders, seeds), descriptions, (views, augmix), limit, executor)
        opened = [(what, leaderboard.open_sources(plan, what, root)) for what in data]
        entries = leaderboard.entries_of(plan, [each for _, found in opened for each in found], names, kinds, oracle)
        seconds = leaderboard.estimate(plan, entries)
        if methods is None and (few := leaderboard.affordable(plan, seconds)):
            entries = leaderboard.shortened(plan, entries, few)
            left_out |= _told_slow(few, entries, seconds, len(plan.seeds))
            seconds = leaderboard.estimate(plan, entries)
        for label, reason in left_out.items():
            note(f"Left out: {label}: {reason}.")
        _print_estimate(seconds)
        if dry_run:
            return
        board = leaderboard.run(plan, opened, entries) | {"left_out": left_out}
        _finish(output, board, as_json)


@app.command(epilog="Example:  testtime leaderboard verify leaderboard.json caltech-101/ --cells 10")
def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A leaderboard.json of somebody's.")],
    data: Sources = None,
    cells: Annotated[int, typer.Option("--cells", help="How many cells to repeat, drawn at random.")] = 10,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the draw; choose one that nobody could expect.")] = 0,
    tolerance: Annotated[
        float,
        typer.Option(
            "--tolerance",
            metavar="POINTS",
            help="Points that a score may differ by; unless 0, an accuracy also by one image.",
        ),
    ] = 0.2,
    root: Root = None,
    descriptions: Described = None,
    device: Device = "auto",
    on: On = None,
    output: Out = RUNS,
    as_json: Json = False,
) -> None:
    """Repeat some cells of a leaderboard file on the same images, and compare. Exit code 1 if any differs."""
    from testtime.experiments.submission import read
    from testtime.experiments.verification import repeat, sample

    if cells < 1 or tolerance < 0:
        raise InputError(f"--cells {cells}, --tolerance {tolerance}: at least one cell, and a tolerance of 0 or more.")
    board = read(file)
    drawn = sample(board, cells, seed)
    if not drawn:
        raise InputError(f"{file} has no cells to repeat.")
    undecided = "Interrupted. Nothing was decided; run the command again."
    with on_interrupt(lambda: undecided), executor_of(on) as executor:
        wanted = {entry["source"] for entry, _ in drawn}
        plan, sources = _reopened(board, wanted, data, root, output, device, descriptions, executor)
        found = []
        for each in repeat(plan, board, sources, drawn, tolerance / 100):
            found.append(each)
            told = f"DIFFERS: {each.problem}" if each.problem else "the same"
            note(f"{each.source}, {each.stream}, {each.label}, order {each.seed}: {told}")
    wrong = sum(bool(each.problem) for each in found)
    if as_json:
        print(json.dumps({"cells": [each._asdict() for each in found], "differ": wrong, "seed": seed}))
    note(f"{counted(len(found), 'cell')} repeated of {sum(len(each['scores']) for each in board['entries']):,}; "
         f"{wrong} differ{'s' * (wrong == 1)}.")  # fmt: skip
    if wrong:
        raise typer.Exit(1)


@app.command(epilog="Example:  testtime leaderboard add mine.json yours.json --out board")
def add(
    submissions: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="leaderboard.json files of several runs, or of others.")
    ],
    output: Out = RUNS,
    as_json: Json = False,
) -> None:
    """Add leaderboard files to the board in --out, or make one there. Nothing is run.

    Orders of the same method on the same stream are united; where two files contradict one another, it stops.
    """
    from testtime.experiments.submission import merge, read
    from testtime.files import check_folder, locked

    check_folder(output)
    here = output / f"{NAME}.json"
    with locked(here, wait=True):  # two who add at once must not lose one another's
        paths = [*([here] if here.exists() else []), *submissions]
        _finish(output, merge([(str(path), read(path)) for path in paths]), as_json)


def _words(text: str | None) -> list[str] | None:
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]


def _seeds(orders: int | None, seeds: str | None) -> Sequence[int]:
    from testtime.experiments.leaderboard import ORDERS

    if seeds is not None and orders is not None:
        raise InputError("--orders and --seeds: give one of the two.")
    if orders is not None and orders < 1:
        raise InputError(f"--orders {orders}: at least one is needed.")
    return numbers_of(seeds, "--seeds") if seeds else range(1, (orders or ORDERS) + 1)


def _plan(
    encoder: str, device: str, output: Path, seeds: Sequence[int], descriptions: Path | None, views: tuple[int, bool],
    limit: int | None, executor: Executor,
) -> Plan:  # fmt: skip
    return plan_of(
        encoder_of(encoder, device), output, seeds=",".join(map(str, seeds)), track="one-setting", protocol="released",
        views=views[0], augmix=views[1], descriptions=descriptions, learned=None, limit=limit, executor=executor,
    )  # fmt: skip


def _reopened(
    board: Record, wanted: set[str], data: Sequence[str] | None, root: Path | None, output: Path, device: str,
    descriptions: Path | None, executor: Executor,
) -> tuple[Plan, list[Any]]:  # fmt: skip
    """The sources of a submission as they are now, and a plan to run them."""
    from testtime.experiments.leaderboard import open_sources
    from testtime.experiments.sources import is_stored
    from testtime.experiments.submission import views_of

    opened: dict[tuple[str, str, tuple[int, bool], int | None], Plan] = {}
    found = []
    for source in (board["sources"][key] for key in sorted(wanted)):
        for what in data or [source["given"]]:
            encoder = "offline" if is_stored(Path(what)) else source["about"]["encoder"]
            views = views_of(source["about"])
            key = what, encoder, views, source["limit"]
            if key not in opened:
                opened[key] = _plan(encoder, device, output, [1], descriptions, views, source["limit"], executor)
                found += open_sources(opened[key], what, root)
    return next(iter(opened.values())), found


def _told_slow(slow: Iterable[str], entries: Sequence[Entry], seconds: dict[str, float], orders: int) -> dict[str, str]:
    """Why slow methods without entries are left out; in how many orders the others run is printed."""
    from testtime.experiments.tables import duration

    left_out = {}
    for label in slow:
        reason = f"all {orders} orders would take about {duration(seconds[label])} here"
        kept = {len(entry.cell.about["orders"]) for entry in entries if entry.cell.row.label == label}
        if not kept:
            left_out[label] = f"{reason}; name it with --methods to run it"
        elif kept != {orders}:  # all of which may have been run before
            note(f"{label}: {' or '.join(map(str, sorted(kept)))} orders; {reason}, and with --methods they run.")
    return left_out


def _print_estimate(seconds: dict[str, float]) -> None:
    from testtime.experiments.tables import duration

    if total := sum(seconds.values()):
        slowest = sorted(seconds, key=lambda label: -seconds[label])
        each = ", ".join(f"{label} {duration(seconds[label])}" for label in slowest)
        note(f"About {duration(total)} on this machine if nothing else runs: {each}.")


def _finish(output: Path, board: Record, as_json: bool) -> None:
    """Write a board, and print it."""
    from testtime.experiments.leaderboard_tables import remarks, sheets, standings, write_board

    if not board["entries"]:
        raise InputError(f"Nothing could run. {'; '.join(each['reason'] for each in board['not_run'][:1])}")
    write_board(output, board, "testtime " + shlex.join(sys.argv[1:]))
    if as_json:
        print(json.dumps(board | {"standings": standings(board)}))
        return
    for sheet in sheets(board)[: len(standings(board))]:
        keep = [sheet.header.index(name) for name in SHOWN]
        print_table(sheet.title, list(SHOWN), [[row[column] for column in keep] for row in sheet.rows])
    for line in remarks(board):
        note(line)
    note(f"Written to {output}/{NAME}.json, {NAME}.md and {NAME}.html.")

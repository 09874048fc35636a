"""`testtime replay`: run a method over features."""

from __future__ import annotations

import json
import shlex
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from testtime import __version__
from testtime.cli import options
from testtime.cli.terminal import err, out, percent, progress
from testtime.errors import InputError

if TYPE_CHECKING:
    from testtime.encoding.store import Features
    from testtime.session.replay import Replay

app = typer.Typer()


@app.command(epilog="Example:  testtime replay photos.safetensors --method dpe --set alpha=4 --json")
def replay(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FEATURES", help="A feature file, or a folder of shards.")],
    method: options.MethodName = "dpe",
    settings: options.Settings = None,
    preset: options.Preset = None,
    guard: options.GuardOn = False,
    guard_settings: options.GuardSettings = None,
    reject: options.Reject = False,
    labelled: options.Labelled = 0,
    recorded: Annotated[
        bool,
        options.flag(
            "--recorded", help="Use the method and the settings in the file's metadata; --method and --set go first."
        ),
    ] = False,
    oracle: Annotated[
        bool,
        options.flag("--oracle", help="dmn and mcp only: choose fusion weights with the test labels, as published."),
    ] = False,
    dtype: Annotated[str, typer.Option("--dtype", metavar="NAME", help="float32 or float64.")] = "float32",
    device: options.Device = "cpu",
    limit: options.Limit = None,
    seed: options.Seed = 0,
    shuffle: options.Shuffle = False,
    reference: options.Reference = False,
    output: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File for logits [N,C] and pred [N] (.safetensors)."),
    ] = None,
    report: options.Report = None,
    force: options.Force = False,
    as_json: Annotated[bool, options.flag("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Run a method over a feature file; no encoder, no images.

    --report makes a second pass, with zero-shot beside the method.
    """
    from testtime.encoding.store import Features
    from testtime.experiments import oracle as oracles
    from testtime.files import check_place, write_tensors
    from testtime.files.outputs import distinct, refuse_existing
    from testtime.methods.base import need_single
    from testtime.session import replay as replays

    if oracle and report is not None:
        raise InputError("--report shows methods that do not see the labels, and --oracle does; leave out one.")
    if limit is not None and limit < 1:
        raise InputError(f"--limit {limit}: at least one image is needed.")
    check_place(output)
    check_place(report)
    store = Features(file)
    distinct({"--out": output, "--report": report}, {"FEATURES": [file, *store.files, file / "index.json"]})
    refuse_existing({"--out": output, "--report": report}, force)
    if recorded and not options.given(context, "method"):
        method = replays.recorded_method(store) or method
    chosen = replays.recorded_settings(store, method) if recorded else {}
    made = options.method_of(method, preset, settings, chosen)
    guarded = options.guard_of(guard, guard_settings, reject, labelled)
    if report is not None:
        need_single([made], "A report")
    if guarded is not None and (oracle or report is not None):
        raise InputError("--guard goes with neither --report nor --oracle here; leave out one.")
    with progress("images", min(len(store), limit or len(store)), quiet=as_json) as advance:
        replay_store = (
            oracles.replay
            if oracle
            else partial(replays.replay, keep_logits=output is not None, guard=guarded, labelled=labelled)
        )
        result = replay_store(
            store,
            made,
            dtype=dtype,
            device=options.steps_on(device),
            limit=limit,
            shuffle=shuffle,
            seed=seed,
            reference=reference,
            progress=advance,
        )
    found = result.summary()
    if output is not None:
        about = {"method": found["method"]} | {
            key: json.dumps(found[key])
            for key in ("settings", "batch", "reads_ahead", "oracle", "weight", "accuracy_by_weight")
            if key in found
        }
        write_tensors(output, {"logits": result.logits, "pred": result.predictions, "order": result.order}, about)
    if report is not None:
        _write_report(report, store, result, f"shuffled, seed {seed}" if shuffle else "as stored")
    summary = found | {"file": str(file), "dtype": dtype, "device": device, "version": __version__}
    if as_json:
        print(json.dumps(summary))
        return
    per_image = 1000 * result.seconds / summary["n"]
    if report is not None:
        err.print(f"The report is in {escape(str(report))}.", highlight=False, soft_wrap=True)
    err.print(
        f"{summary['n']} images of {len(store.classnames)} classes, {per_image:.2f} ms each in the method; "
        f"{result.loading:.1f} s of warm-up: loading, compiling, graph capture."
    )
    if "reads_ahead" in summary:
        err.print(f"Not one image at a time: {summary['reads_ahead']}.")
    for line in (result.guard if guarded else None, result.late):
        if line is not None:
            err.print(escape(str(line)), highlight=False, soft_wrap=True)
    table = Table("", "accuracy", box=None, pad_edge=False)
    table.add_row("zero-shot", percent(summary["zero_shot_accuracy"]))
    table.add_row(f"[bold]{summary['method']}[/]", f"[bold]{percent(summary['accuracy'])}[/]")
    out.print(table)


def _write_report(file: Path, store: Features, result: Replay, order: str) -> None:
    """The page that `testtime report` makes, for the method that was replayed."""
    from testtime.files import write_atomic
    from testtime.report import gather
    from testtime.report.conditions import conditions
    from testtime.report.page import html

    task = result.session.task
    made = gather.stream_report(
        task,
        store,
        store.labels,
        [result.session.method],
        order=result.order.tolist(),
        images=None if store.images is None else list(store.images),
        place=find_spec("sklearn") is not None,
    )
    about = conditions(
        task,
        command="testtime " + shlex.join(sys.argv[1:]),
        Features=str(store.path),
        Dataset=store.metadata.get("dataset", ""),
        Order=order,
        Views=f"{store.views}, seed {store.metadata.get('seed', 'unknown')}",
        Labels="only score" if store.labels is not None else "none",
    )
    write_atomic(file, html([made], about, "testtime replay"))

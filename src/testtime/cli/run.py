"""`testtime run`: images classified, and learned from as they pass."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from testtime.cli import options
from testtime.cli.terminal import Watch, counted, err, note, opened, percent, progress
from testtime.errors import InputError, Interrupted

if TYPE_CHECKING:
    from testtime.report.record import Record
    from testtime.session.journal import Tally
    from testtime.session.session import Session
    from testtime.types import Method

app = typer.Typer()


@app.command(epilog="Example:  testtime run photos/ --classes cat,dog,fox --out answers.csv --save pets.safetensors")
def run(
    context: typer.Context,
    images: options.Images,
    root: options.Root = None,
    classes: options.Classes = None,
    classes_file: options.ClassesFile = None,
    encoder: options.EncoderName = "offline",
    method: options.MethodName = "dpe",
    settings: options.Settings = None,
    preset: options.Preset = None,
    template: options.Templates = None,
    descriptions: options.Descriptions = None,
    prompts: options.Prompts = None,
    views: options.ViewsOrPaper = None,
    augmix: options.AugMix = False,
    variations: options.Variations = None,
    seed: options.Seed = 0,
    shuffle: options.Shuffle = False,
    limit: options.Limit = None,
    every: options.Every = "1s",
    device: options.Device = "auto",
    output: Annotated[
        Path | None, typer.Option("--out", "-o", help="CSV or .jsonl file; default: standard output.")
    ] = None,
    style: Annotated[str | None, typer.Option("--format", help="csv or jsonl; default: by the name of --out.")] = None,
    save: Annotated[Path | None, typer.Option("--save", help="File for what was learned (.safetensors).")] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Resume from a saved state; images already in --out are skipped.")
    ] = None,
    report: options.Report = None,
    log: options.Logs = None,
    strict: options.Strict = False,
    reference: options.Reference = False,
    json_summary: Annotated[
        bool, options.flag("--json", help="The summary as a JSON object on standard error.")
    ] = False,
) -> None:
    """Classify images and learn from each one along the way.

    Every row holds the label, its confidence and entropy (nats), the zero-shot label, and whether the image was
    learned from. If the images have labels, or are in folders named after classes, the accuracy of both is shown too;
    labels are only used for scoring.
    """
    from testtime.files import check_place, locked
    from testtime.files.outputs import distinct, read_files
    from testtime.machine.devices import find_device
    from testtime.session.journal import Journal, Rows, Tally, no_earlier_run, read_earlier_run
    from testtime.session.logs import check_logs, open_log
    from testtime.session.session import Session

    style = _style(style, output)
    data, names, labels = options.source_of(images, root, classes, classes_file, every)
    # mistakes in names and settings show before the encoder is loaded
    chosen = options.method_of(method, preset, settings)
    order = options.ordered(len(data), shuffle, seed, limit)
    paths, labels = [data.paths[i] for i in order], [labels[i] for i in order]
    source, count = options.variations_of(variations, views, paths, find_device(device))
    for path in (save, report):
        check_place(path)
    logged = check_logs(log)
    distinct(
        {"--out": output, "--save": save, "--report": report} | logged,
        read_files(images, data.paths, encoder, classes_file, descriptions, prompts),
    )
    # --save may be the same file, and often is
    distinct({"--out": output, "--report": report} | logged, {"--resume": resume})
    for path in (output, save):
        if path is not None and (path.is_file() or not path.exists()):  # not a pipe or a device
            context.with_resource(locked(path))
    loaded = options.encoder_of(encoder, device)
    task = options.task_of(loaded, names, template, descriptions, prompts, getattr(chosen, "needs_tower", False))
    if resume is None:
        session = Session(
            task, chosen, encoder=loaded, views=count, augmix=augmix, seed=seed, variations=source, reference=reference
        )
    else:
        session = Session.load(
            resume, task, encoder=loaded, variations=source, device=task.text.device, reference=reference
        )
        plan = session.plan
        own = f"{session.method.name}, {counted(plan.count, 'view')}{', AugMix' * plan.augmix}, seed {plan.seed}"
        note(f"Resuming {resume} after {counted(session.count, 'image')} with its own settings: {own}.")
        if ignored := _ignored_options(context, session, chosen, count, shuffle):
            note(f"note: {', '.join(ignored)} ignored in favour of the saved state; start without --resume to use it.")
    before = no_earlier_run(paths, session.position)
    if resume is not None and output is not None and output.exists():
        before = read_earlier_run(resume, output, style, paths, session.position)
        paths, labels = [paths[i] for i in before.remaining], [labels[i] for i in before.remaining]
        if not paths:
            note(f"All {counted(len(order), 'image')} are already in {output}; nothing is left to do.")
            return
    tally = Tally(labels, session.position)
    session.observers.append(tally)
    for where in log or ():
        context.with_resource(open_log(where, session, labels, on_failure=lambda line: note(f"note: {line}")))
    record = None
    if report is not None:
        from testtime.report.record import Record

        record = Record(session, labels)
        session.observers.append(record)

    def skip(_: object, error: InputError) -> None:
        err.print(f"[yellow]skipped[/] {escape(str(error))}", soft_wrap=True)

    watching, stopped = output is None and sys.stdout.isatty(), False
    with opened(output, append=bool(before.rows)) as file:
        rows = Watch(task.classnames) if watching else Rows(file, style, before.rows)
        kept = rows if isinstance(rows, Rows) and output is not None and output.is_file() else None
        journal = Journal(session, rows.write, before, save, kept)
        session.observers.append(journal)
        with journal.saving(), progress("images", len(paths), quiet=output is None) as advance:
            try:
                with closing(session.run(paths, on_error=None if strict else skip)) as answers:
                    for _ in answers:
                        advance(tally.images + tally.skipped)
            except KeyboardInterrupt:
                stopped = True
    if not tally.images and not stopped:
        raise InputError(f"None of the images could be read; {len(paths):,} of {len(paths):,} were skipped.")
    if report is not None and record is not None and tally.images:
        order_words = f"shuffled, seed {seed}" if shuffle else "as given"
        order_words += f", interrupted after {tally.images:,} of {len(paths):,} images" * stopped
        _write_report(report, record, data.name, order_words)
    _print_tally(tally, session, save, output, json_summary, report if tally.images else None)
    if stopped:
        raise Interrupted(
            f"Interrupted after {tally.images:,} of {len(paths):,} images. {_how_to_resume(save, output)}"
        )


def _ignored_options(context: typer.Context, session: Session, method: Method, views: int, shuffle: bool) -> list[str]:
    """The options given that differ from the saved session, which takes precedence."""
    other = {
        "method": method.name != session.method.name,
        "preset": method != session.method,
        "settings": method != session.method,
        "views": views != session.plan.count,
        "augmix": not session.plan.augmix,
        "seed": context.params["seed"] != session.plan.seed and not shuffle,  # which uses it too
    }
    words = {param.name: param.opts[0] for param in context.command.params}
    given = [name for name in other if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    return [words[name] for name in given if other[name]]


def _how_to_resume(save: Path | None, output: Path | None) -> str:
    if save is None:
        return "What was learned is lost; --save FILE would keep it, and --resume FILE would resume from it."
    if output is None:
        return f"What was learned is in {save}; resume with --resume {save}."
    return f"To resume, run the same command with --resume {save}."


def _style(style: str | None, output: Path | None) -> str:
    if style is None:
        return "jsonl" if output is not None and output.suffix in (".jsonl", ".json", ".ndjson") else "csv"
    if style not in ("csv", "jsonl"):
        raise InputError(f"Unknown --format '{style}'. Available: csv, jsonl.")
    return style


def _write_report(file: Path, record: Record, name: str, order: str) -> None:
    """The page of a run, like that of `testtime report` for features."""
    from testtime.files import write_atomic
    from testtime.report.conditions import conditions
    from testtime.report.data import StreamReport
    from testtime.report.page import html

    session = record.session
    made = record.report(name)
    before = session.count - len(record.images)
    known = sum(label is not None for label in record.labels)
    about = conditions(
        session.task,
        command="testtime " + shlex.join(sys.argv[1:]),
        Dataset=name,
        Order=order + (f", after {before:,} images of an earlier run" if before else ""),
        Views=f"{session.plan.count}, seed {session.plan.seed}" + ", AugMix" * session.plan.augmix,
        Labels="only score" if isinstance(made, StreamReport) else f"known of {known:,} images" if known else "none",
        Time=f"{record.milliseconds:,.1f} ms per image, reading and encoding included",
    )
    write_atomic(file, html([made], about, "testtime run"))


def _print_tally(
    tally: Tally, session: Session, save: Path | None, output: Path | None, as_json: bool, report: Path | None
) -> None:
    about = tally.summary() | {"method": session.method.name, "state": str(save) if save else None}
    about |= {"report": str(report)} if report else {}
    if as_json:
        print(json.dumps(about), file=sys.stderr)
        return
    err.print(
        f"{counted(tally.images, 'image')}, {tally.learned:,} learned from, "
        f"{counted(tally.changed, 'answer')} changed from zero-shot"
        + (f", {tally.skipped} skipped" if tally.skipped else "")
        + (f"; rows in {escape(str(output))}" if output else "")
        + (f"; state in {escape(str(save))}" if save else "")
        + (f"; page in {escape(str(report))}" if report else ""),
        highlight=False,
        soft_wrap=True,
    )
    if labelled := tally.accuracy.images:
        err.print(
            f"accuracy on {counted(labelled, 'image')} whose class is known: "
            f"{percent(tally.accuracy.compute())} ({session.method.name}), "
            f"{percent(tally.zero_shot_accuracy.compute())} (zero-shot)",
            highlight=False,
            soft_wrap=True,
        )

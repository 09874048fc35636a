"""`testtime run`: images classified, and learned from as they pass."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.markup import escape

from testtime.cli import config, options
from testtime.cli.terminal import Watch, counted, err, note, opened, percent, progress
from testtime.errors import InputError, Interrupted, StateError

if TYPE_CHECKING:
    from testtime.guard import Guard
    from testtime.report.record import Record
    from testtime.session.history import History
    from testtime.session.journal import LateLabels, Tally
    from testtime.session.session import Session
    from testtime.types import Method, StoredImage

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
    guard: options.GuardOn = False,
    guard_settings: options.GuardSettings = None,
    reject: options.Reject = False,
    labelled: options.Labelled = 0,
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
        Path | None,
        typer.Option(
            "--out", "-o", help="File for the rows: .csv, .tsv, .jsonl or .parquet; default: standard output."
        ),
    ] = None,
    style: Annotated[
        str | None,
        typer.Option("--format", metavar="NAME", help="Form of standard output: csv (the default), tsv or jsonl."),
    ] = None,
    save: Annotated[Path | None, typer.Option("--save", help="File for what was learned (.safetensors).")] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            help="Resume from a saved state, with its classes, prompts and encoder; images already in --out are "
            "skipped.",
        ),
    ] = None,
    history: options.History = None,
    snapshot_every: options.SnapshotEvery = None,
    history_limit: options.HistoryLimit = None,
    report: options.Report = None,
    log: options.Logs = None,
    force: options.Force = False,
    strict: options.Strict = False,
    reference: options.Reference = False,
    json_summary: Annotated[
        bool, options.flag("--json", help="The summary as a JSON object on standard error.")
    ] = False,
    config_file: config.Config = None,
    save_config: config.SaveConfig = None,
) -> None:
    """Classify images and learn from each one along the way.

    Every row holds the label, its confidence and entropy (nats), the zero-shot label, and whether the image was
    learned from. If the images have labels, or are in folders named after classes, rows hold the true label too, and
    the accuracy of both is shown; labels are only used for scoring.
    """
    from testtime.files.outputs import read_files
    from testtime.machine.devices import find_device
    from testtime.session.answers import style_of
    from testtime.session.logs import check_logs
    from testtime.session.saved_state import Saved
    from testtime.session.session import Session

    style = style_of(output, style)
    saved = None if resume is None else Saved(resume, "cpu")
    own = None if saved is None else saved.task.classnames
    data, names, labels = options.source_of(images, root, classes, classes_file, every, own)
    # mistakes in names and settings show before the encoder is loaded
    chosen = options.method_of(method, preset, settings)
    guarded = options.guard_of(guard, guard_settings, reject, labelled)
    order = options.ordered(len(data), shuffle, seed, limit)
    paths, labels = [data.paths[i] for i in order], [labels[i] for i in order]
    source, count = options.variations_of(variations, views, paths, find_device(device))
    encoder = saved.task.encoder if saved is not None and not options.given(context, "encoder") else encoder
    outputs = Outputs(output, save, report, save_config)
    inputs = read_files(images, data.paths, encoder, classes_file, descriptions, prompts) | {"--config": config_file}
    _check_outputs(context, outputs, check_logs(log), inputs, resume, force)
    config.save(context, save_config)
    loaded, texts = options.encoder_of(encoder, device), (template, descriptions, prompts)
    tower = getattr(chosen if saved is None else saved.method, "needs_tower", False)
    task = None
    if saved is None or tower or any((classes, classes_file, *texts)):  # else the saved state's own
        task = options.task_of(loaded, names, *texts, tower)
    if task is not None and resume is None:
        session = Session(
            task, chosen, encoder=loaded, views=count, augmix=augmix, seed=seed, variations=source, reference=reference,
            guard=guarded,
        )  # fmt: skip
    elif resume is not None:
        session = Session.load(
            resume, task, encoder=loaded, variations=source, device=options.steps_on(device), reference=reference
        )
        _print_resumed(context, session, resume, chosen, count, guarded)
    about = {"name": data.name, "order": f"shuffled, seed {seed}" if shuffle else "as given"}
    _classify(context, session, paths, labels, outputs, style, resume, about)


class Outputs(NamedTuple):
    """The files that a run writes, where they were asked for."""

    rows: Path | None
    state: Path | None
    report: Path | None
    config: Path | None

    def by_option(self) -> dict[str, Path | None]:
        return dict(zip(("--out", "--save", "--report", "--save-config"), self, strict=True))


def _check_outputs(
    context: typer.Context,
    outputs: Outputs,
    logs: dict[str, Path],
    inputs: Mapping[str, Any],
    resume: Path | None,
    force: bool,
) -> None:
    """Lock the outputs; refuse those that cannot be written, are also inputs, or would overwrite earlier ones."""
    from testtime.files import check_place, locked
    from testtime.files.outputs import distinct, refuse_existing
    from testtime.session.answers import partial_file
    from testtime.session.history_files import check_outputs

    for path in outputs[1:]:
        check_place(path)
    if (history := context.params["history"]) is not None:
        check_outputs(history, outputs.by_option() | logs, resume is not None or force)
    distinct(outputs.by_option() | logs | {"--history": history}, inputs)
    # --save may be the same file, and often is
    distinct(outputs._replace(state=None).by_option() | logs, {"--resume": resume})
    for path in (outputs.rows, outputs.state):
        if path is not None and (path.is_file() or not path.exists()):  # not a pipe or a device
            context.with_resource(locked(path))
    if resume is None:
        rows = {"--out": outputs.rows, "rows of a run that was killed,": partial_file(outputs.rows)}
        refuse_existing(rows, force, ", --resume STATE continues it")
        refuse_existing({"--save": outputs.state}, force, f", --resume {outputs.state} continues from it")
        refuse_existing({"--report": outputs.report} | logs, force)
    elif outputs.state is not None and outputs.state.resolve() != resume.resolve():
        refuse_existing({"--save": outputs.state}, force)


def _print_resumed(
    context: typer.Context, session: Session, resume: Path, method: Method, views: int, guard: Guard | None
) -> None:
    plan = session.plan
    views_of = f"{counted(plan.count, 'view')}{', AugMix' * plan.augmix}, seed {plan.seed}"
    own = f"{session.method.name}{', guarded' * (session.guard is not None)}, {views_of}"
    note(f"Resuming {resume} after {counted(session.count, 'image')} with its own settings: {own}.")
    if ignored := _ignored_options(context, session, method, views, guard):
        note(f"note: {', '.join(ignored)} ignored in favour of the saved state; start without --resume to use it.")


def _classify(
    context: typer.Context,
    session: Session,
    paths: Sequence[StoredImage],
    labels: Sequence[int | None],
    outputs: Outputs,
    style: str,
    resume: Path | None,
    about: dict[str, str],
) -> None:
    """Run the session over images, and write what was asked for; an interrupt keeps everything up to it."""
    from testtime.session.answers import appendable
    from testtime.session.journal import Journal, LateLabels, Rows, Tally, no_earlier_run, read_earlier_run
    from testtime.session.logs import open_log

    with appendable(outputs.rows, resume is not None) as file:
        before = no_earlier_run(paths, session.position)
        if resume is not None and file is not None and file.exists():
            try:
                before = read_earlier_run(resume, file, style, paths, session.position)
            except InputError as problem:
                if not context.params["force"]:
                    raise InputError(f"{problem} --force overwrites it.") from None
            if not before.remaining:
                note(f"All {counted(len(paths), 'image')} are already in {outputs.rows}; nothing is left to do.")
                return
        history = _open_history(context, session, resume)
        paths, labels = [paths[i] for i in before.remaining], [labels[i] for i in before.remaining]
        config.keep(context, outputs.rows, bool(before.rows))
        tally = Tally(labels, session.position)
        session.observers.append(tally)
        late = None
        if budget := context.params["labelled"]:
            if session.guard is None or not any(label is not None for label in labels):
                raise InputError(f"--labelled {budget}: needs a guard, and images whose class is known.")
            late = LateLabels(session, labels, budget, session.position)
            session.observers.append(late)
        for where in context.params["log"] or ():
            context.with_resource(open_log(where, session, labels, on_failure=lambda line: note(f"note: {line}")))
        record = None
        if outputs.report is not None:
            from testtime.report.record import Record

            record = Record(session, labels)
            session.observers.append(record)
        watching, stopped = file is None and sys.stdout.isatty(), False
        with opened(file, append=bool(before.rows)) as stream:
            rows = Watch(session.task.classnames) if watching else Rows(stream, style, before.rows)
            kept = rows if isinstance(rows, Rows) and file is not None and file.is_file() else None
            flush = {} if history is None else {"before_save": history.flush}  # a state is never ahead of its history
            journal = Journal(session, rows.write, before, outputs.state, kept, labels, **flush)
            session.observers.append(journal)
            skip = None if context.params["strict"] else _print_skipped
            with journal.saving(), progress("images", len(paths), quiet=file is None) as advance:
                try:
                    with closing(session.run(paths, on_error=skip)) as answered:
                        for _ in answered:
                            advance(tally.images + tally.skipped)
                except KeyboardInterrupt:
                    stopped = True
    if not tally.images and not stopped:
        raise InputError(f"None of the images could be read; {len(paths):,} of {len(paths):,} were skipped.")
    if outputs.report is not None and record is not None and tally.images:
        about["order"] += f", interrupted after {tally.images:,} of {len(paths):,} images" * stopped
        _write_report(outputs.report, record, **about)
    _print_tally(context, tally, session, outputs, late)
    if stopped:
        then = _how_to_resume(outputs.state, outputs.rows, context.params["history"])
        raise Interrupted(f"Interrupted after {tally.images:,} of {len(paths):,} images. {then}")


def _open_history(context: typer.Context, session: Session, resume: Path | None) -> History | None:
    """The history that --history asks for, a new one or that of the resumed run, closed at the end of the command."""
    from testtime.session.history import History

    folder, every, limit = (context.params[name] for name in ("history", "snapshot_every", "history_limit"))
    if folder is None:
        if every is not None or limit is not None:
            raise InputError("--snapshot-every and --history-limit need --history FOLDER.")
        return None
    try:
        history = History(session, folder, every=every, limit=limit, overwrite=resume is None)
    except StateError as problem:
        if not context.params["force"]:
            raise StateError(f"{problem} Or --force starts a new history.") from None
        history = History(session, folder, every=every, limit=limit, overwrite=True)
    return context.with_resource(history)


def _print_skipped(_: object, error: InputError) -> None:
    err.print(f"[yellow]skipped[/] {escape(str(error))}", soft_wrap=True)


def _ignored_options(
    context: typer.Context, session: Session, method: Method, views: int, guard: Guard | None
) -> list[str]:
    """The options given that differ from the saved session, which takes precedence."""
    if session.guard is not None:
        method = session.guard.anchored(method)
    other = dict.fromkeys(("guard", "guard_settings", "reject"), guard != session.guard) | {
        "method": method.name != session.method.name,
        "preset": method != session.method,
        "settings": method != session.method,
        "views": views != session.plan.count,
        "augmix": not session.plan.augmix,
        "seed": context.params["seed"] != session.plan.seed and not context.params["shuffle"],  # which uses it too
    }
    words = {param.name: param.opts[0] for param in context.command.params}
    return [words[name] for name in other if other[name] and options.given(context, name)]


def _how_to_resume(save: Path | None, output: Path | None, history: Path | None) -> str:
    if save is None and history is not None:
        return (
            f"What was learned is in {history}; 'testtime history rollback {history} --out FILE' writes it to a file."
        )
    if save is None:
        return "What was learned is lost; --save FILE would keep it, and --resume FILE would resume from it."
    if output is None:
        return f"What was learned is in {save}; resume with --resume {save}."
    return f"To resume, run the same command with --resume {save}."


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
    context: typer.Context, tally: Tally, session: Session, outputs: Outputs, late: LateLabels | None
) -> None:
    rows, state, report, _ = outputs
    report, history = report if tally.images else None, context.params["history"]
    about = tally.summary() | {"method": session.method.name, "state": str(state) if state else None}
    about |= {name: str(path) for name, path in (("report", report), ("history", history)) if path}
    about |= {"guard": tally.guard.summary()} if session.guard else {}
    about |= {"labels_used": late.spent, "proven": session.proven} if late else {}
    if context.params["json_summary"]:
        print(json.dumps(about), file=sys.stderr)
        return
    labelled = tally.accuracy.images
    err.print(
        f"{counted(tally.images, 'image')}, {tally.learned:,} learned from, "
        f"{counted(tally.changed, 'answer')} changed from zero-shot"
        + (f", {tally.images - labelled:,} without a known class" if tally.images > labelled else "")
        + (f", {tally.skipped} skipped" if tally.skipped else "")
        + (f"; rows in {escape(str(rows))}" if rows else "")
        + (f"; state in {escape(str(state))}" if state else "")
        + (f"; history in {escape(str(history))}" if history else "")
        + (f"; page in {escape(str(report))}" if report else ""),
        highlight=False,
        soft_wrap=True,
    )
    for line in (tally.guard if session.guard else None, late):
        if line is not None:
            err.print(escape(str(line)), highlight=False, soft_wrap=True)
    if labelled:
        err.print(
            f"accuracy on {counted(labelled, 'image')} whose class is known: "
            f"{percent(tally.accuracy.compute())} ({session.method.name}), "
            f"{percent(tally.zero_shot_accuracy.compute())} (zero-shot)",
            highlight=False,
            soft_wrap=True,
        )

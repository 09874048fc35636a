"""One run over one stream: its answers, with or without the guard, and their scores beside zero-shot's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from testtime import metrics
from testtime.calibration import Calibration
from testtime.experiments.lab import Record
from testtime.experiments.scenarios import FOREIGN, Stream
from testtime.ops import unit
from testtime.report.queues import bank_of, sources
from testtime.session.session import Session
from testtime.types import Decision, Method, Task, log_of

CHUNK = 64  # images between two chances to interrupt a run
WINDOW = 200  # images of which the worst accuracy is recorded
LOOKS = 32  # how often an attacker looks at the state, about; in between it sends more of what did most harm
TRIED = 3  # candidates that it tries then
PROBES = 3  # images of the attacked class whose margin it wants to lower


class Answers(NamedTuple):
    """The answers to every image of a stream."""

    logits: Tensor  # (n, C)
    rows: Tensor  # (n,) what came: the stream's rows, and an attacker's choices
    decisions: list[Decision]  # the guard's, one for each image; none without a guard
    held: Tensor | None  # (k,) positions in the stream of the images in the method's queues; None: it has none


def task_of(task: Task, stream: Stream) -> Task:
    """The task of a stream: the whole one, or without the classes that are held out."""
    if len(stream.classes) == task.classes:
        return task
    names = tuple(task.classnames[number] for number in stream.classes.tolist())
    return replace(task, text=task.text[stream.classes], classnames=names)


def run_stream(session: Session, stream: Stream) -> Answers:
    """A method over a stream from the start, learning along the way; the session's task is the stream's own."""
    session.reset()
    rows, logits, decisions = stream.rows.clone(), list[Tensor](), list[Decision]()
    turns = 0 if stream.turns is None else int(stream.turns.sum())
    every, chosen = max(1, turns // LOOKS), 0
    for start, stop, turn in _parts(stream):
        if turn is not None:
            look, since = divmod(turn, every)
            chosen = chosen if since else most_harmful(session, stream, look)
            rows[start] = stream.candidates[(chosen + since * stream.recipes) % len(stream.candidates)]
        logits.append(session.scan(stream.views[rows[start:stop]]).cpu())
        decisions += session.decisions
    held, bank = None, bank_of(session.state)
    if bank is not None:
        held, _ = sources(bank.keys[bank.cost.isfinite()].cpu(), unit(stream.views[rows, 0]))
    return Answers(torch.cat(logits), rows, decisions, held)


def _parts(stream: Stream) -> Iterator[tuple[int, int, int | None]]:
    """The stream in parts from start to stop; a turn of an attacker's is a part of its own, with its number."""
    turns = [] if stream.turns is None else stream.turns.nonzero()[:, 0].tolist()
    begin = 0
    for number, turn in enumerate([*turns, len(stream.rows)]):
        yield from ((start, min(start + CHUNK, turn), None) for start in range(begin, turn, CHUNK))
        if turn < len(stream.rows):
            yield turn, turn + 1, number
        begin = turn + 1


def most_harmful(session: Session, stream: Stream, look: int) -> int:
    """The number of the candidate after which a session has the lowest margin for the attacked class.

    An attacker tries a few, other ones at each look, on copies of the session, and sees some of the class's images.
    """
    own = stream.rows[stream.scored & (stream.labels == stream.attacked)][:PROBES]
    tried = [(TRIED * look + each) % len(stream.candidates) for each in range(TRIED)]

    def margin(candidate: int) -> float:
        copy = session.fork()
        copy.scan(stream.views[stream.candidates[candidate]][None])
        logits = torch.stack([copy.predict(stream.views[probe]).logits for probe in own])
        others = logits.index_fill(1, torch.tensor([stream.attacked]), -torch.inf).amax(1)
        return float((logits[:, stream.attacked] - others).mean())

    return min(tried, key=margin)


def score(task: Task, method: Method, stream: Stream, answers: Answers) -> Record:
    """The scores of a run as plain data; accuracies and gaps are fractions.

    Foreign and crafted images count for the calibration along the stream, which sees no labels, but not for the scores:
    only for AUROC and FPR95 are scored images of the classes told from foreign ones.
    """
    frozen = task.zero_shot(stream.views[answers.rows, 0])  # one product for the whole stream
    # a guard's answers are logits, whatever the method's scores are
    probabilities = answers.logits.softmax(-1) if answers.decisions else method.probabilities(answers.logits)
    predictions = answers.logits.argmax(-1)
    confidence = probabilities.gather(1, predictions[:, None])[:, 0]
    calibrated = Calibration().update(log_of(probabilities), frozen.softmax(-1).amax(-1))
    inside = stream.scored & (stream.labels != FOREIGN)
    labels, right = stream.labels[inside], (predictions == stream.labels)[inside]
    before = (frozen.argmax(-1) == stream.labels)[inside]
    scores = metrics.Scores(task.classes).update(probabilities[inside], labels, predictions=predictions[inside])
    found = scores.compute()
    result: Record = {
        "images": len(labels),
        **{key: found[key] for key in ("accuracy", "macro_f1", "calibration_error", "brier")},
        "calibrated_error": metrics.ExpectedCalibrationError().update_answers(calibrated[inside], right).compute(),
        "zero_shot": metrics.accuracy(before, torch.ones_like(before)),
        "worst": metrics.worst_window(right, WINDOW),
        "worst_gap": metrics.worst_window(right.double() - before.double(), WINDOW),
    }
    result["gap"] = result["accuracy"] - result["zero_shot"]
    if (stream.labels == FOREIGN).any():
        known = torch.tensor([each.known for each in answers.decisions]) if answers.decisions else confidence
        both = known[stream.scored], stream.labels[stream.scored] != FOREIGN
        result |= {"auroc": metrics.auroc(*both), "fpr95": metrics.false_positive_rate(*both)}
        if answers.held is not None and len(answers.held):
            result["queued_foreign"] = float((stream.labels[answers.held] == FOREIGN).double().mean())
    if stream.attacked >= 0:
        found_by_class = scores.per_class.compute()
        result |= {"attacked": float(found_by_class[stream.attacked]), "target": float(found_by_class[stream.target])}
    if answers.decisions:
        result["learned"] = sum(each.learned for each in answers.decisions) / len(answers.decisions)
        result["refused"] = dict(sorted(Counter(each.refused for each in answers.decisions if each.refused).items()))
    return result

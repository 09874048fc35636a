"""Answers as images: those that the last method corrected, those that it broke, and those that are wrong."""

from __future__ import annotations

from collections.abc import Sequence

from testtime.report.data import Answers, StreamReport
from testtime.report.formatting import count
from testtime.report.markup import safe
from testtime.report.thumbnails import gallery

ROW = 8  # thumbnails per gallery
WRONG = 3 * ROW  # wrong answers that are shown


def by_confidence(answers: Answers) -> list[int]:
    """Indices of the images, most confident answer first."""
    return sorted(range(len(answers.confidences)), key=lambda image: (-answers.confidences[image], image))


def corrected_and_broken(report: StreamReport, most: int = ROW) -> tuple[list[int], list[int]]:
    """Images that the last method corrected against the baseline, and those it broke, most confident first."""
    if len(report.answers) < 2:
        return [], []
    labels, before, after = report.labels, report.answers[0].predictions, report.answers[-1].predictions
    order = _pictured(report)
    corrected = [i for i in order if before[i] != labels[i] == after[i]]
    broken = [i for i in order if before[i] == labels[i] != after[i]]
    return corrected[:most], broken[:most]


def wrong(report: StreamReport) -> list[int]:
    """Images that the last method got wrong, most confident first."""
    if not report.answers:
        return []
    answers = report.answers[-1].predictions
    return [image for image in _pictured(report) if answers[image] != report.labels[image]]


def _pictured(report: StreamReport) -> list[int]:
    """Images by the last method's confidence, without those that are known to have no picture: their name is empty."""
    order = by_confidence(report.answers[-1])
    return [image for image in order if report.names[image]] if report.names else order


def shown(report: StreamReport, row: int = ROW, most: int = WRONG) -> list[int]:
    """The images on the page, those that changed first."""
    corrected, broken = corrected_and_broken(report, row)
    return list(dict.fromkeys([*corrected, *broken, *wrong(report)[:most]]))


def wrong_answers(report: StreamReport, section: int) -> str:
    """Thumbnails of the most confident wrong answers: the answer, its confidence, the label, the baseline's answer."""
    found = wrong(report)
    if not report.thumbnails or not found:
        return ""
    first, last, names = report.answers[0], report.answers[-1], report.classnames

    def caption(image: int) -> str:
        lines = [f"<b>{safe(names[last.predictions[image]])}</b>{last.confidences[image]:.0%}"]
        lines.append(f"<em>label: {safe(names[report.labels[image]])}</em>")
        if first is not last:
            lines.append(f"<em>{safe(first.name)}: {safe(names[first.predictions[image]])}</em>")
        return "".join(lines)

    total = sum(answer != label for answer, label in zip(last.predictions, report.labels, strict=True))
    most = f"; {WRONG} of the most confident are shown" if total > WRONG else ", most confident first"
    return (
        f"<h3>Wrong answers</h3><p>{safe(last.name)} is wrong on {total:,} of "
        f"{count(len(report.labels), 'image')}{most}.</p>"
        + gallery(report, ((image, caption(image)) for image in found[:WRONG]), section)
    )


def changed_answers(report: StreamReport, section: int) -> str:
    """Thumbnails of the images that were corrected, and of those that were broken."""
    corrected, broken = corrected_and_broken(report)
    if not report.thumbnails or not (corrected or broken):
        return ""
    old, new, names = report.answers[0].predictions, report.answers[-1].predictions, report.classnames

    def row(images: Sequence[int]) -> str:
        captions = [(i, f"<s>{safe(names[old[i]])}</s><b>{safe(names[new[i]])}</b>") for i in images]
        return gallery(report, captions, section) if captions else "<p>None.</p>"

    return (
        "<h3>Changed answers</h3>"
        f"<h4>Corrected by {safe(report.answers[-1].name)}, most confident first</h4>{row(corrected)}"
        f"<h4>Broken by {safe(report.answers[-1].name)}, most confident first</h4>{row(broken)}"
    )

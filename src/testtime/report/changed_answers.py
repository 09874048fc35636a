"""Changed answers: the images that the last method corrected, and those that it broke."""

from __future__ import annotations

from collections.abc import Sequence

from testtime.report.data import Answers, StreamReport
from testtime.report.markup import safe
from testtime.report.thumbnails import gallery

ROW = 8  # thumbnails per gallery


def by_confidence(answers: Answers) -> list[int]:
    """Indices of the images, most confident answer first."""
    return sorted(range(len(answers.confidences)), key=lambda image: (-answers.confidences[image], image))


def corrected_and_broken(report: StreamReport, most: int = ROW) -> tuple[list[int], list[int]]:
    """Images that the last method corrected against the baseline, and those it broke, most confident first."""
    if len(report.answers) < 2:
        return [], []
    labels, before, after = report.labels, report.answers[0].predictions, report.answers[-1].predictions
    order = by_confidence(report.answers[-1])
    corrected = [i for i in order if before[i] != labels[i] == after[i]]
    broken = [i for i in order if before[i] == labels[i] != after[i]]
    return corrected[:most], broken[:most]


def changed_answers(report: StreamReport, section: int) -> str:
    """Thumbnails of the images that were corrected, and of those that were broken."""
    corrected, broken = corrected_and_broken(report)
    if not report.thumbnails or not (corrected or broken):
        return ""
    old, new, names = report.answers[0].predictions, report.answers[-1].predictions, report.classnames

    def shown(images: Sequence[int]) -> str:
        captions = [(i, f"<s>{safe(names[old[i]])}</s><b>{safe(names[new[i]])}</b>") for i in images]
        return gallery(report, captions, section) if captions else "<p>None.</p>"

    return (
        "<h3>Changed answers</h3>"
        f"<h4>Corrected by {safe(report.answers[-1].name)}, most confident first</h4>{shown(corrected)}"
        f"<h4>Broken by {safe(report.answers[-1].name)}, most confident first</h4>{shown(broken)}"
    )

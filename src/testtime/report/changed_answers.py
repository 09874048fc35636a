"""Answers that changed: the images that the last method put right, and those that it spoilt."""

from __future__ import annotations

from collections.abc import Sequence

from testtime.report.data import Answers, StreamReport
from testtime.report.markup import safe
from testtime.report.thumbnails import gallery

ROW = 8  # pictures in a gallery of one kind


def by_confidence(answers: Answers) -> list[int]:
    """The images, most confident answer first."""
    return sorted(range(len(answers.confidences)), key=lambda image: (-answers.confidences[image], image))


def righted_and_spoilt(report: StreamReport, most: int = ROW) -> tuple[list[int], list[int]]:
    """Images that the last method put right against the baseline, and those it spoilt, most confident first."""
    if len(report.answers) < 2:
        return [], []
    labels, before, after = report.labels, report.answers[0].predictions, report.answers[-1].predictions
    order = by_confidence(report.answers[-1])
    righted = [i for i in order if before[i] != labels[i] == after[i]]
    spoilt = [i for i in order if before[i] == labels[i] != after[i]]
    return righted[:most], spoilt[:most]


def changed_answers(report: StreamReport, section: int) -> str:
    """The pictures of images that were put right, and of those that were spoilt."""
    righted, spoilt = righted_and_spoilt(report)
    if not report.thumbnails or not (righted or spoilt):
        return ""
    old, new, names = report.answers[0].predictions, report.answers[-1].predictions, report.classnames

    def shown(images: Sequence[int]) -> str:
        captions = [(i, f"<s>{safe(names[old[i]])}</s><b>{safe(names[new[i]])}</b>") for i in images]
        return gallery(report, captions, section) if captions else "<p>None.</p>"

    return (
        "<h3>Answers that changed</h3>"
        f"<h4>Put right by {safe(report.answers[-1].name)}, most confident first</h4>{shown(righted)}"
        f"<h4>Spoilt by it</h4>{shown(spoilt)}"
    )

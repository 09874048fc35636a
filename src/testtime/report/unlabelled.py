"""A stream without labels: what changed, of which images the method is surest, and what it learned from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from testtime.report.data import UnlabelledReport
from testtime.report.maps import queues
from testtime.report.pictures import ROW, gallery, thumbnail
from testtime.report.plot import styles_of
from testtime.report.words import count, milliseconds, plain, safe

MOVES = 15  # kinds of change listed
EXAMPLES = 4  # pictures beside each
ANSWERED = 10  # classes listed by how often they are the answer


class Move(NamedTuple):
    """Images whose answer the last method changed in the same way."""

    before: int  # class
    after: int
    images: list[int]


def moves(report: UnlabelledReport) -> list[Move]:
    """What the last method answers where the baseline answers something else, most frequent first."""
    before, after = (plain(report.answers[k].predictions) for k in (0, -1))
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for image, pair in enumerate(zip(before, after, strict=True)):
        if pair[0] != pair[1]:
            groups[pair].append(image)
    found = [Move(old, new, images) for (old, new), images in groups.items()]
    return sorted(found, key=lambda move: (-len(move.images), move.before, move.after))


def confident(report: UnlabelledReport, most: int = ROW) -> tuple[list[int], list[int]]:
    """The images that the last method is surest of, and those it is least sure of."""
    confidences = plain(report.answers[-1].confidences)
    order = sorted(range(len(confidences)), key=lambda image: (-confidences[image], image))
    return order[:most], order[: -most - 1 : -1]


def unlabelled_parts(report: UnlabelledReport, slots: Mapping[str, int], section: int) -> list[str]:
    """The parts of the section, in order."""
    return [
        _cards(report, slots),
        _moves(report, section),
        _confident(report, section),
        _answered(report),
        queues(report, section),
    ]


def _cards(report: UnlabelledReport, slots: Mapping[str, int]) -> str:
    baseline, cards = plain(report.answers[0].predictions), []
    for index, (answers, style) in enumerate(
        zip(report.answers, styles_of([a.name for a in report.answers], slots), strict=True)
    ):
        changed = sum(old != new for old, new in zip(baseline, plain(answers.predictions), strict=True))
        confidence = sum(plain(answers.confidences)) / len(baseline)
        time = milliseconds(answers.seconds, len(baseline))
        big = f"{changed:,} <small>changed</small>" if index else f"{len(baseline):,} <small>images</small>"
        cards.append(
            f'<li class="card {style}"><span class="name">{safe(answers.name)}</span><span class="big">{big}</span>'
            f'<span class="gain">mean confidence {confidence:.0%}, {time} ms per image</span></li>'
        )
    return f'<ul class="cards">{"".join(cards)}</ul>'


def _moves(report: UnlabelledReport, section: int) -> str:
    found = moves(report)
    names = report.classnames
    old, new = safe(report.answers[0].name), safe(report.answers[-1].name)
    if not found:
        return f"<h3>What changed</h3><p>{new} gives every image the answer of {old}.</p>"
    total = sum(len(move.images) for move in found)
    images = len(report.answers[0].predictions)
    rows = "".join(
        f'<tr><th scope="row">{safe(names[move.before])} → <b>{safe(names[move.after])}</b></th>'
        f'<td>{len(move.images):,}</td><td class="pictures">'
        f"{''.join(thumbnail(report, image, section) for image in move.images[:EXAMPLES])}</td></tr>"
        for move in found[:MOVES]
    )
    rest = len(found) - MOVES
    more = f"<p>And {count(rest, 'rarer change')}.</p>" if rest > 0 else ""
    return (
        f"<h3>What changed</h3><p>{new} answers {total:,} of {count(images, 'image')} otherwise than {old}. "
        "There are no labels, so this does not say which of the two is right.</p>"
        f'<table class="moves"><thead><tr><th scope="col">{old} → {new}</th><th scope="col">Images</th>'
        f'<th scope="col">Among them</th></tr></thead><tbody>{rows}</tbody></table>{more}'
    )


def _confident(report: UnlabelledReport, section: int) -> str:
    last = report.answers[-1]
    predictions, confidences = plain(last.predictions), plain(last.confidences)

    def shown(images: list[int]) -> str:
        captions = [(i, f"<b>{safe(report.classnames[predictions[i]])}</b>{confidences[i]:.0%}") for i in images]
        return gallery(report, captions, section)

    most, least = confident(report)
    return (
        f"<h3>How sure {safe(last.name)} is</h3><h4>Most confident</h4>{shown(most)}"
        f"<h4>Least confident</h4>{shown(least)}"
    )


def _answered(report: UnlabelledReport) -> str:
    """How often each class is the answer, before and after."""
    tallies = []
    for answers in report.answers:
        tally = [0] * len(report.classnames)
        for prediction in plain(answers.predictions):
            tally[prediction] += 1
        tallies.append(tally)
    order = sorted(range(len(report.classnames)), key=lambda c: (-tallies[-1][c], c))
    head = "".join(f'<th scope="col">{safe(answers.name)}</th>' for answers in report.answers)

    def row(label: int) -> str:
        cells = "".join(f"<td>{tally[label]:,}</td>" for tally in tallies)
        return f'<tr><th scope="row">{safe(report.classnames[label])}</th>{cells}</tr>'

    def table(labels: list[int]) -> str:
        return (
            f'<div class="scroll" tabindex="0"><table><thead><tr><th scope="col">Class</th>{head}</tr></thead>'
            f"<tbody>{''.join(map(row, labels))}</tbody></table></div>"
        )

    rest = order[ANSWERED:]
    more = f"<details><summary>{count(len(rest), 'more class')}</summary>{table(rest)}</details>" if rest else ""
    return f"<h3>How often each class is the answer</h3>{table(order[:ANSWERED])}{more}"

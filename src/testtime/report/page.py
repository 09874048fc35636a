"""The page: sections in one self-contained HTML file.

Pure functions of plain data: the same input gives the same bytes. Styles, images and a short script are embedded,
and the content security policy forbids the page to fetch anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from testtime.report import sweep_charts
from testtime.report.board import board
from testtime.report.changed_answers import changed_answers, wrong_answers
from testtime.report.chart import slots_of, styles_of
from testtime.report.class_changes import class_table
from testtime.report.confusion_matrix import confusion_matrix
from testtime.report.data import Answers, Curve, Section, StreamReport, TablesReport, UnlabelledReport
from testtime.report.formatting import milliseconds, signed
from testtime.report.gap_chart import gap_chart
from testtime.report.markup import WIDE, Cell, as_table, asset, card, safe, scrolling, table
from testtime.report.queue_map import queue_map
from testtime.report.reliability import figure as reliability_diagrams
from testtime.report.running_accuracy import running_accuracy
from testtime.report.thumbnails import styles
from testtime.report.unlabelled import unlabelled_parts


def html(sections: Sequence[Section], conditions: Mapping[str, str], title: str) -> str:
    """The whole page. `conditions` apply to all sections and are at its end.

    >>> curves = [Curve("zero-shot", [True, False], 0.1), Curve("DPE", [True, True], 0.2)]
    >>> stream = StreamReport("Pets", "two photos", curves, ["cat", "dog"], [0, 1], {"Seed": "0"})
    >>> page = html([stream], {}, "A small test")
    >>> "+50.0" in page and page.startswith("<!doctype html>")
    True
    """
    numbered = list(enumerate(sections, start=1))
    slots = slots_of(name for section in sections for name in _compared(section))
    parts = [_section(section, slots, number) for number, section in numbered]
    labelled = [(number, section) for number, section in numbered if isinstance(section, StreamReport)]
    if len(labelled) > 1:
        parts.insert(0, _overview(labelled))
    if conditions:
        parts.append(f"<section><h2>About this page</h2>{_conditions(conditions)}</section>")
    style = "".join(map(asset, ("tokens.css", "chart.css", "page.css", "parts.css")))
    style += "".join(styles(section.thumbnails, number) for number, section in numbered)
    ranked = any(isinstance(section, TablesReport) and section.board for section in sections)
    style += asset("board.css") if ranked else ""
    script = asset("hover.js") + asset("maps.js") + (asset("board.js") if ranked else "")
    return asset("page.html").format(title=safe(title), style=style, body="\n".join(parts), script=script)


def framed(section: Section) -> str:
    """The page of one report for a notebook: in a sandboxed frame, so that neither changes the other."""
    page = safe(html([section], {}, "testtime report"))
    return f'<iframe sandbox="allow-scripts" style="width:100%;height:640px;border:0" srcdoc="{page}"></iframe>'


def _compared(section: Section) -> list[str]:
    """The names that need their own colour: the baseline is grey."""
    if isinstance(section, TablesReport):
        methods = section.gaps.methods if section.gaps else []
        return [*methods, *(name for series in section.series for name in series.lines)]
    return [each.name for each in (section.curves if isinstance(section, StreamReport) else section.answers)][1:]


def _section(report: Section, slots: Mapping[str, int], number: int) -> str:
    paragraphs = [" ".join(paragraph.split()) for paragraph in report.text.split("\n\n")]
    parts = [
        f'<section id="stream-{number}">',
        f"<h2>{safe(report.title)}</h2>",
        f'<p class="subtitle">{safe(report.subtitle)}</p>' if report.subtitle else "",
        *(f"<p>{safe(paragraph)}</p>" for paragraph in paragraphs if paragraph),
    ]
    if isinstance(report, UnlabelledReport):
        parts += [*unlabelled_parts(report, slots, number), queue_map(report, number)]
    elif isinstance(report, TablesReport):
        beside, apart = ([each for each in report.tables if each.apart == kind] for kind in (False, True))
        parts += [board(report.board), gap_chart(report.gaps, slots)]
        parts += [f"<h3>{safe(each.title)}</h3>{scrolling(table(each.head, each.rows))}" for each in beside]
        parts += [queue_map(report, number), *_figures(report, slots)]
        parts += [_notes(report.notes), *(as_table(each.head, each.rows, each.title) for each in apart)]
    else:
        parts += _labelled_parts(report, slots, number)
    if report.conditions:
        parts += ["<h3>Conditions</h3>", _conditions(report.conditions)]
    return "\n".join(part for part in [*parts, _settings(report.answers), "</section>"] if part)


def _labelled_parts(report: StreamReport, slots: Mapping[str, int], number: int) -> list[str]:
    method_styles = styles_of([curve.name for curve in report.curves], slots)
    return [
        _cards(report.curves, method_styles),
        "<h3>Accuracy along the stream</h3>",
        running_accuracy(report, slots),
        *([class_table(report), confusion_matrix(report)] if len(report.curves) > 1 else []),
        changed_answers(report, number),
        wrong_answers(report, number),
        reliability_diagrams(report, slots) if report.answers else "",
        queue_map(report, number),
        *_figures(report, slots),
        "<h3>Method comparison</h3>",
        _method_table(report.curves, method_styles),
    ]


def _figures(report: StreamReport | TablesReport, slots: Mapping[str, int]) -> list[str]:
    figures = [sweep_charts.heat_map(grid) for grid in report.grids]
    figures += [sweep_charts.line_chart(series, slots) for series in report.series]
    return ["<h3>Effect of the settings</h3>", *figures] if figures else []


def _cards(curves: Sequence[Curve], method_styles: Sequence[str]) -> str:
    cards = ""
    for curve, style in zip(curves, method_styles, strict=True):
        gain = "baseline" if curve is curves[0] else f"<b>{signed(_gain(curves[0], curve))}</b> points"
        cards += card(curve.name, style, f"{100 * curve.accuracy:.1f}<small>%</small>", gain)
    return f'<ul class="cards">{cards}</ul>'


def _method_table(curves: Sequence[Curve], method_styles: Sequence[str]) -> str:
    baseline, rows = curves[0], []
    for curve, style in zip(curves, method_styles, strict=True):
        note = f'<span class="note">{safe(curve.note)}</span>' if curve.note else ""
        gain = changed = "–"
        if curve is not baseline:
            pairs = list(zip(baseline.correct, curve.correct, strict=True))
            gain = signed(_gain(baseline, curve))
            changed = f"{sum(new > old for old, new in pairs):,} / {sum(new < old for old, new in pairs):,}"
        rows.append(
            [
                Cell(f'<span class="name {style}">{safe(curve.name)}</span>{note}'),
                f"{curve.accuracy:.1%}",
                gain,
                Cell(changed, WIDE),
                Cell(milliseconds(curve.seconds, len(curve.correct))),
            ]
        )
    corrected = Cell("Corrected / broken", WIDE)
    return table(["Method and settings", "Accuracy", "Gain, points", corrected, "ms per image"], rows, kind="methods")


def _overview(sections: Sequence[tuple[int, StreamReport]]) -> str:
    names = list(dict.fromkeys(curve.name for _, section in sections for curve in section.curves))
    rows = []
    for number, section in sections:
        accuracies = {curve.name: curve.accuracy for curve in section.curves}
        best = max(accuracies.values())
        cells = {
            name: Cell(f"{accuracy:.1%}", ' class="best"' if accuracy == best else "")
            for name, accuracy in accuracies.items()
        }
        link = Cell(f'<a href="#stream-{number}">{safe(section.title)}</a>')
        rows.append([link, *(cells.get(name, "–") for name in names), f"{len(section.labels):,}"])
    return f"<section><h2>Overview</h2>{scrolling(table(['Stream', *names, 'Images'], rows))}</section>"


def _notes(notes: Sequence[str]) -> str:
    return (
        f'<h3>Notes</h3><ul class="notes">{"".join(f"<li>{safe(note)}</li>" for note in notes)}</ul>' if notes else ""
    )


def _conditions(conditions: Mapping[str, str]) -> str:
    items = []
    for key, value in conditions.items():
        shown = f"<code>{safe(value)}</code>" if key.lower() == "command" else safe(value)
        items.append(f"<div><dt>{safe(key)}</dt><dd>{shown}</dd></div>")
    return f"<dl>{''.join(items)}</dl>"


def _settings(answers: Sequence[Answers]) -> str:
    """Every setting of every method, in a collapsed table."""
    rows = [[f"{each.name}: {key}", value] for each in answers for key, value in each.settings.items()]
    return as_table(["Method and setting", "Value"], rows, "All settings") if rows else ""


def _gain(baseline: Curve, curve: Curve) -> float:
    return 100 * (curve.accuracy - baseline.accuracy)

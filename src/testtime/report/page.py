"""The page: sections of streams in one HTML file that needs nothing else.

Pure functions of plain data: the same input gives the same bytes. Styles, pictures and the few lines of
script are inside the page, and its policy forbids it to fetch anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from testtime.report import classes, curves, heat, maps, pictures, reliability
from testtime.report.data import Answers, Curve, QueuesReport, StreamReport, TablesReport, UnlabelledReport, check
from testtime.report.plot import slots_of, styles_of
from testtime.report.unlabelled import unlabelled_parts
from testtime.report.words import as_table, milliseconds, part, plain, safe, signed, table

Section = StreamReport | TablesReport | QueuesReport | UnlabelledReport


def html(sections: Sequence[Section], facts: Mapping[str, str], title: str) -> str:
    """The whole page. `facts` hold for all sections and close the page.

    >>> curves = [Curve("zero-shot", [True, False], 0.1), Curve("DPE", [True, True], 0.2)]
    >>> stream = StreamReport("Pets", "two photos", curves, ["cat", "dog"], [0, 1], {"Seed": "0"})
    >>> page = html([stream], {}, "A small test")
    >>> "+50.0" in page and page.startswith("<!doctype html>")
    True
    """
    for section in sections:
        check(section)
    slots = slots_of(name for section in sections for name in _names(section)[1:])
    parts = [_section(section, slots, number) for number, section in enumerate(sections, start=1)]
    labelled = [(number, each) for number, each in enumerate(sections, start=1) if isinstance(each, StreamReport)]
    if len(labelled) > 1:
        parts.insert(0, _overview(labelled))
    if facts:
        parts.append(f"<section><h2>About this page</h2>{_facts(facts)}</section>")
    style = "".join(map(part, ("tokens.css", "chart.css", "page.css", "parts.css")))
    for number, section in enumerate(sections, start=1):
        if not isinstance(section, TablesReport):
            style += pictures.styles(section.thumbnails, number)
    script = part("hover.js") + part("maps.js")
    return part("page.html").format(title=safe(title), style=style, body="\n".join(parts), script=script)


def _names(section: Section) -> list[str]:
    if isinstance(section, TablesReport):
        return ["", *(name for series in section.series for name in series.lines)]
    if isinstance(section, QueuesReport):
        return []
    return [each.name for each in (section.curves if isinstance(section, StreamReport) else section.answers)]


def _section(report: Section, slots: Mapping[str, int], number: int) -> str:
    paragraphs = [" ".join(paragraph.split()) for paragraph in report.text.split("\n\n")]
    parts = [
        f'<section id="stream-{number}">',
        f"<h2>{safe(report.title)}</h2>",
        f'<p class="subtitle">{safe(report.subtitle)}</p>' if report.subtitle else "",
        *(f"<p>{safe(paragraph)}</p>" for paragraph in paragraphs if paragraph),
    ]
    if isinstance(report, StreamReport):
        parts += _labelled_parts(report, slots, number)
    elif isinstance(report, TablesReport | QueuesReport):
        parts += [f"<h3>{safe(each.title)}</h3>{table(each.head, each.rows)}" for each in report.tables]
        parts += _figures(report, slots) if isinstance(report, TablesReport) else [maps.queues(report, number)]
    else:
        parts += unlabelled_parts(report, slots, number)
    if report.facts:
        parts += ["<h3>How this was made</h3>", _facts(report.facts)]
    if not isinstance(report, TablesReport | QueuesReport):
        parts.append(_settings(report.answers))
    return "\n".join(part for part in [*parts, "</section>"] if part)


def _labelled_parts(report: StreamReport, slots: Mapping[str, int], number: int) -> list[str]:
    parts = [_cards(report, slots), "<h3>Along the stream</h3>", curves.figure(report, slots)]
    if len(report.curves) > 1:
        parts += [classes.class_table(report), classes.confusion(report)]
    parts.append(pictures.examples(report, number))
    if report.answers:
        parts.append(reliability.figure(report, slots))
    parts.append(maps.queues(report, number))
    parts += _figures(report, slots)
    return [*parts, "<h3>Side by side</h3>", _method_table(report, slots)]


def _figures(report: StreamReport | TablesReport, slots: Mapping[str, int]) -> list[str]:
    if not report.grids and not report.series:
        return []
    maps, lines = map(heat.heat_map, report.grids), (heat.line_chart(series, slots) for series in report.series)
    return ["<h3>What the settings do</h3>", *maps, *lines]


def _cards(report: StreamReport, slots: Mapping[str, int]) -> str:
    cards = []
    for curve, style in zip(report.curves, styles_of(_names(report), slots), strict=True):
        gain = f"<b>{signed(_gain(report.curves[0], curve))}</b> points"
        cards.append(
            f'<li class="card {style}"><span class="name">{safe(curve.name)}</span>'
            f'<span class="big">{100 * curve.accuracy:.1f}<small>%</small></span>'
            f'<span class="gain">{"baseline" if curve is report.curves[0] else gain}</span></li>'
        )
    return f'<ul class="cards">{"".join(cards)}</ul>'


def _method_table(report: StreamReport, slots: Mapping[str, int]) -> str:
    baseline, rows = report.curves[0], []
    for curve, style in zip(report.curves, styles_of(_names(report), slots), strict=True):
        note = f'<span class="note">{safe(curve.note)}</span>' if curve.note else ""
        pairs = list(zip(plain(baseline.correct), plain(curve.correct), strict=True))
        righted = sum(bool(new) > bool(old) for old, new in pairs)
        spoilt = sum(bool(new) < bool(old) for old, new in pairs)
        compared = signed(_gain(baseline, curve)), f"{righted:,} / {spoilt:,}"
        if curve is baseline:
            compared = "–", "–"
        rows.append(
            f'<tr><th scope="row"><span class="name {style}">{safe(curve.name)}</span>{note}</th>'
            f'<td>{curve.accuracy:.1%}</td><td>{compared[0]}</td><td class="wide">{compared[1]}</td>'
            f"<td>{milliseconds(curve.seconds, len(curve.correct))}</td></tr>"
        )
    return (
        '<table class="methods"><thead><tr><th scope="col">Method and settings</th>'
        '<th scope="col">Accuracy</th><th scope="col">Gain, points</th>'
        '<th scope="col" class="wide">Put right / spoilt</th>'
        f'<th scope="col">ms per image</th></tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )


def _overview(sections: Sequence[tuple[int, StreamReport]]) -> str:
    names = list(dict.fromkeys(curve.name for _, section in sections for curve in section.curves))
    rows = []
    for number, section in sections:
        accuracies = {curve.name: curve.accuracy for curve in section.curves}
        best = max(accuracies.values())
        cells = []
        for name in names:
            if name not in accuracies:
                cells.append("<td>–</td>")
            else:
                mark = ' class="best"' if accuracies[name] == best else ""
                cells.append(f"<td{mark}>{accuracies[name]:.1%}</td>")
        link = f'<a href="#stream-{number}">{safe(section.title)}</a>'
        rows.append(f'<tr><th scope="row">{link}</th>{"".join(cells)}<td>{len(section.labels):,}</td></tr>')
    head = "".join(f'<th scope="col">{safe(name)}</th>' for name in names)
    return (
        '<section><h2>At a glance</h2><div class="scroll" tabindex="0"><table><thead><tr><th scope="col">Stream</th>'
        f'{head}<th scope="col">Images</th></tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        "</section>"
    )


def _facts(facts: Mapping[str, str]) -> str:
    items = []
    for key, value in facts.items():
        said = f"<code>{safe(value)}</code>" if key.lower() == "command" else safe(value)
        items.append(f"<div><dt>{safe(key)}</dt><dd>{said}</dd></div>")
    return f"<dl>{''.join(items)}</dl>"


def _settings(answers: Sequence[Answers]) -> str:
    """Every setting of every method, folded away."""
    rows = [[f"{each.name}: {key}", str(value)] for each in answers for key, value in each.settings.items()]
    return as_table(["Method and setting", "Value"], rows, "Every setting") if rows else ""


def _gain(baseline: Curve, curve: Curve) -> float:
    return 100 * (curve.accuracy - baseline.accuracy)

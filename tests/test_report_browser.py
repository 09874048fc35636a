"""The page in a real browser: no console output, self-contained, and readable on a desktop and on a phone."""

from __future__ import annotations

import shutil
from random import Random

import pytest
import torch
from small_data import make_folders

import testtime as tt
from testtime import load_encoder
from testtime.datasets import open_dataset
from testtime.experiments import submission
from testtime.experiments.catalogue import EXPERIMENTS
from testtime.experiments.lab import fingerprint
from testtime.experiments.leaderboard_tables import write_board
from testtime.experiments.plan import Plan
from testtime.experiments.run import page as page_of
from testtime.experiments.run import run_experiment
from testtime.report.data import Answers, Curve, Grid, Series, StreamReport, UnlabelledReport
from testtime.report.gather import stream_report
from testtime.report.page import html

pytest.importorskip("playwright", reason="playwright is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("no chromium on this machine", allow_module_level=True)

OPEN = "for (const d of document.querySelectorAll('details')) d.open = true"
SIZES = [(1280, 900), (390, 844)]
# pages of a stream, of images without labels, of two streams as in the demo, of a full matrix, of kinds of experiments:
# a table of datasets, one of rows, one with costs, a line, a heat map, a map of the queues, gaps on streams, a board
KINDS = "full bare several confused cross components efficiency steps tau-queue tsne streams leaderboard".split()
ROWS = {"cross": ["CLIP", "DPE"], "efficiency": ["CLIP", "TDA", "DPE"], "streams": ["zero-shot", "TDA"]}


def images(folder, number):
    from PIL import Image

    paths = []
    for index in range(number):
        paths.append(folder / f"photograph-{index:03d}.png")
        Image.new("RGB", (80, 60), (index * 3 % 256, index * 7 % 256, 90)).save(paths[-1])
    return paths


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of a labelled stream with every part, one without labels, one of two streams, and experiments."""
    from dataclasses import replace

    folder = tmp_path_factory.mktemp("pages")
    task, stream, labels = tt.toy(classes=14, images=120, views=1)
    task = tt.Task(task.text, tuple(f"a rather long class name {c}" for c in range(task.classes)), task.scale)
    paths = images(folder, 120)
    full: StreamReport = stream_report(task, stream, labels, ["tda", "dpe"], images=paths, snapshots=[50, 120])
    full = replace(
        full,
        grids=[
            Grid("alpha and beta", "alpha", list(range(9)), "beta", [1, 3], [[0.5] * 9, [0.1 * c for c in range(9)]])
        ],
        series=[Series("tau", "entropy_threshold", [0.01, 0.1, 1.0], {"dpe": [0.5, 0.7, 0.6]})],
    )
    bare: UnlabelledReport = stream_report(task, stream, None, ["dpe"], images=paths)
    command = "testtime report " + "a-long-folder-name/" * 12 + "features.safetensors"
    draw = Random(0)
    labels = [draw.randrange(14) for _ in range(1500)]
    guesses = [[label if draw.random() < 0.6 else draw.randrange(14) for label in labels] for _ in range(2)]
    mixed = [Answers(name, made, [0.5] * 1500) for name, made in zip(("zeroshot", "dpe"), guesses, strict=True)]
    curves = [Curve(each.name, [a == b for a, b in zip(each.predictions, labels, strict=True)], 1.0) for each in mixed]
    confused = StreamReport("Confused", "", curves, task.classnames, labels, {}, answers=mixed)
    (folder / "confused.html").write_text(html([confused], {}, "A report"))
    for name, sections in (("full", [full]), ("bare", [bare]), ("several", [full, replace(full, title="Again")])):
        (folder / f"{name}.html").write_text(html(sections, {"Command": command}, "A report"))
    plan = Plan(folder / "runs", load_encoder("tiny"), report=lambda line: None)
    own = {"a-folder-with-a-long-name": open_dataset(make_folders(folder / "own", images=6))}
    for name in EXPERIMENTS.keys() & set(KINDS):
        plans, columns = {"tiny": plan}, own
        if datasets := EXPERIMENTS[name].datasets:
            plans = plans | {"open_clip:RN50/openai": "no weights"}
            columns = dict.fromkeys(datasets, "missing: " + "/a-long-path" * 20) | {
                datasets[0]: next(iter(own.values()))
            }
        result = run_experiment(name, plans, columns, ROWS.get(name), [6, 18] if name == "tsne" else None)
        (folder / f"{name}.html").write_text(page_of(result, columns, command))
    write_board(folder, board_of(3), command)
    return {name: (folder / f"{name}.html").as_uri() for name in KINDS}


def board_of(datasets):
    """A leaderboard of invented scores: methods with long names and assumptions, in all tracks."""
    draw, abouts = Random(0), [{"encoder": "tiny", "images": 100, "classes": 5, "n": n} for n in range(datasets)]
    labels = {
        "zeroshot": [],
        "tda": [],
        "a-method-with-a-long-name": ["stream length", "class balance"],
        "oga": ["batch"],
    }
    board = {
        "format": submission.FORMAT,
        "made": [submission.made(torch.device("cpu"))],
        "left_out": {"tpt": "takes hours"},
        "not_run": [],
    }
    board["sources"] = {
        fingerprint(about): {"name": f"a-folder-with-a-long-name-{n}", "given": "x", "limit": None, "about": about}
        for n, about in enumerate(abouts)
    }
    board["entries"] = [
        {"track": track, "label": label, "method": label, "settings": {}, "package": "", "assumes": assumes,
         "source": source, "stream": stream, "milliseconds": 0.1 + draw.random(), "state_bytes": 10**number,
         "machine": "", "made": 0,
         "scores": [{"seed": seed, "images": 100, "accuracy": draw.randrange(40, 60) / 100, "zero_shot": 0.5,
                     "calibration_error": draw.random()} for seed in (1, 2, 3)]}
        for track in submission.NAMES
        for number, (label, assumes) in enumerate(labels.items())
        for place, source in enumerate(board["sources"])
        for stream in ("shuffled", "10% of classes", "domains in sequence")
        if track == "one-setting" or label != "oga"
        if track != "oracle" or not place
    ]  # fmt: skip
    return board


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser, pages):
    """Opens a page, and checks that it logs nothing to the console and requests nothing else."""
    opened, problems = [], []

    def go(name, size=SIZES[0], **options):
        page = browser.new_page(viewport={"width": size[0], "height": size[1]}, **options)
        opened.append(page)
        page.on("console", lambda message: problems.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("request", lambda asked: asked.url.startswith(("data:", pages[name])) or problems.append(asked.url))
        page.goto(pages[name])
        return page

    yield go
    for page in opened:
        page.close()
    assert problems == []


@pytest.mark.parametrize("size", SIZES, ids=["desk", "phone"])
@pytest.mark.parametrize("name", KINDS)
def test_nothing_hangs_over_the_edge(visit, name, size):
    page = visit(name, size)
    page.evaluate(OPEN)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    over = page.evaluate("""() => [...document.querySelectorAll("main *")].filter((node) =>
        !node.closest(".scroll, .hidden, svg") && node.getBoundingClientRect().right > innerWidth + 1)
        .map((node) => node.outerHTML.slice(0, 80))""")
    assert over == []


@pytest.mark.parametrize("size", SIZES, ids=["desk", "phone"])
@pytest.mark.parametrize("name", KINDS)
def test_every_cell_of_a_table_that_scrolls_can_be_reached_beside_its_name(visit, name, size):
    """Scrolled to its end, a table shows its last column, and its first stays where it was."""
    page = visit(name, size)
    page.evaluate(OPEN)
    boxes = page.evaluate("""() => [...document.querySelectorAll(".scroll")].map((box) => {
        const edge = box.getBoundingClientRect();
        const rows = [...box.querySelectorAll("tr")].filter((row) => row.offsetParent);
        box.scrollLeft = 1e6;
        const at = (node) => node.getBoundingClientRect();
        return { named: rows.every((row) => Math.abs(at(row.firstElementChild).left - edge.left) < 3),
            reached: rows.every((row) => at(row.lastElementChild).right <= edge.right + 1),
            covered: rows.some((row) => row.children.length > 1
                && at(row.lastElementChild).left < at(row.firstElementChild).right - 1) } })""")
    assert boxes == [{"named": True, "reached": True, "covered": False}] * len(boxes)
    assert boxes or name == "tsne"


@pytest.mark.parametrize("size", SIZES, ids=["desk", "phone"])
def test_both_matrices_fit_and_no_cell_is_hidden(visit, size):
    page = visit("confused", size)
    assert page.locator(".matrix").count() == 2 and page.locator(".matrix tbody tr").count() == 24
    fits = page.evaluate("""() => [...document.querySelectorAll(".matrix")].map((box) => {
        const clear = [...box.querySelectorAll("tr")].every(({ children: [name, next] }) =>
            name.getBoundingClientRect().right <= next.getBoundingClientRect().left + 1);
        return clear && box.scrollWidth <= box.clientWidth })""")
    assert fits == [True, True]
    names = page.locator(".matrix tbody th span").evaluate_all(
        "all => all.map((e) => e.getBoundingClientRect().width > 9)"
    )
    assert all(names) if size == SIZES[1] else any(names)  # on a desk, the second repeats only the numbers


@pytest.mark.parametrize("size", SIZES, ids=["desk", "phone"])
def test_pointing_at_a_queued_feature_shows_its_picture_and_its_class(visit, size):
    page = visit("full", size)
    point = page.locator("svg[data-map] .point").nth(2)
    point.scroll_into_view_if_needed()
    box = point.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tip = page.locator(".card-of-image:visible")
    assert tip.count() == 1 and "a rather long class name" in tip.inner_text()
    picture = tip.locator(".thumb").evaluate("node => getComputedStyle(node).backgroundImage")
    assert picture.startswith('url("data:image/jpeg;base64,')
    inside = tip.evaluate(
        "node => { const b = node.getBoundingClientRect(); return b.left >= 0 && b.right <= innerWidth }"
    )
    assert inside
    label = page.locator("svg[data-map].dim .point.on").first.get_attribute("data-label")
    same = page.locator(f'svg[data-map] .point[data-label="{label}"]').count()
    assert page.locator("svg[data-map].dim .point.on").count() == same  # in both maps
    page.mouse.move(2, 2)
    assert tip.count() == 0 and page.locator("svg.dim").count() == 0


def test_pointing_at_the_curves_shows_numbers(visit):
    page = visit("full")
    box = page.locator(".plot.wide svg[data-chart]").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert "images" in page.locator(".tip:visible").inner_text()


def test_light_and_dark_have_colours_of_their_own(visit):
    colours = {}
    for scheme in ("light", "dark"):
        page = visit("full", color_scheme=scheme)
        colours[scheme] = page.evaluate("""() => ["body", ".heat.best", ".matrix .right[style]"].map((selector) => {
            const style = getComputedStyle(document.querySelector(selector));
            return style.color + style.backgroundColor })""")
    assert all(light != dark for light, dark in zip(colours["light"], colours["dark"], strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_numbers_on_coloured_cells_can_be_read(visit, scheme):
    page = visit("full", color_scheme=scheme)
    # the browser paints each cell's two colours on one pixel, whatever colour notation it uses
    ratios = page.evaluate("""() => {
        const dot = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
        const light = (colour) => {
            dot.clearRect(0, 0, 1, 1); dot.fillStyle = colour; dot.fillRect(0, 0, 1, 1);
            const [r, g, b] = [...dot.getImageData(0, 0, 1, 1).data].map((v) => v / 255)
                .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b };
        return [...document.querySelectorAll(".heat, .matrix td[style]")].map((cell) => {
            const style = getComputedStyle(cell), pair = [light(style.color), light(style.backgroundColor)];
            return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05) }) }""")
    assert len(ratios) > 18 and min(ratios) >= 4.5


def test_every_chart_has_words_and_its_numbers(visit):
    page = visit("full")
    nameless = page.evaluate("""() => [...document.querySelectorAll("svg[role=img]")].filter((svg) =>
        !svg.getAttribute("aria-label") && !(svg.querySelector("title") && svg.querySelector("desc"))).length""")
    assert nameless == 0
    assert page.locator("details table").count() >= 4


def test_the_scores_fit_on_a_phone(visit):
    page = visit("full", SIZES[1])
    width, needed = page.evaluate("(e => [e.clientWidth, e.scrollWidth])(document.querySelector('.scores').parentNode)")
    assert needed <= width


def column(page, place, number=0):
    """The numbers in a column of a table of the leaderboard, as they are sorted, of the rows that can be seen."""
    return page.evaluate(
        """([place, number]) => [...document.querySelectorAll("table.board")[number].rows]
        .filter((row) => row.parentNode.tagName === "TBODY" && row.offsetParent).map((row) => row.children[place])
        .map((cell) => place ? Number(cell.dataset.value) : cell.firstChild.textContent)""",
        [place, number],
    )


def test_a_board_sorts_by_any_column_in_both_directions(visit):
    page = visit("leaderboard")
    headings = page.locator("table.board").first.locator("thead th")
    assert headings.count() == 12 and page.locator("table.board").count() == 3
    for place in (2, 5, 8):
        button = headings.nth(place).locator("button")
        button.click()
        down = column(page, place)
        assert down == sorted(down, reverse=True) and len(set(down)) > 1
        assert headings.nth(place).get_attribute("aria-sort") == "descending"
        button.press("Enter")  # and by keyboard
        assert column(page, place) == down[::-1]
        assert page.locator("table.board").first.locator("[aria-sort]").count() == 1
    headings.nth(0).locator("button").click()
    assert column(page, 0) == sorted(column(page, 0))


def test_a_board_filters_by_name_cells_and_assumption(visit):
    page = visit("leaderboard")
    assert len(column(page, 0)) == 4 and page.locator("form.filters output").inner_text() == ""
    page.locator("input[type=search]").fill("LONG")
    assert column(page, 0) == column(page, 0, 1) == ["a-method-with-a-long-name"]
    assert page.locator("form.filters output").inner_text() == "3 of 10 rows"
    page.locator("input[type=search]").fill("")
    page.get_by_label("stream length").check()
    assert "a-method-with-a-long-name" not in column(page, 0) and len(column(page, 0)) == 3
    before = column(page, 2)
    page.locator("select").select_option("stream: 10% of classes")
    after = column(page, 2)
    assert len(after) == 3 and after != before and "a-method-with-a-long-name" not in column(page, 0)
    counts = page.evaluate("() => document.querySelectorAll('table.board')[0].tBodies.length")
    assert counts == 1 + 3 + 3  # all cells, each dataset, each stream
    titles = page.get_by_role("heading", name="Oracle", exact=True)
    assert titles.is_visible()
    page.locator("select").select_option("dataset: a-folder-with-a-long-name-1")
    assert not titles.is_visible() and len(column(page, 0)) == 3  # in the oracle track it did not run


@pytest.mark.parametrize("width", [390, 620, 1280, 1920])
def test_a_board_shows_all_it_can_at_any_width(visit, width):
    page = visit("leaderboard", (width, 900))
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    hidden = page.evaluate("""() => { const box = document.querySelector("table.board").parentNode;
        return box.scrollWidth - box.clientWidth }""")
    assert hidden <= 1 if width >= 1280 else hidden >= 0
    form = page.locator("form.filters").bounding_box()
    assert form["x"] >= 0 and form["x"] + form["width"] <= width


def test_a_board_without_scripts_shows_all_cells(visit, browser, pages):
    page = visit("leaderboard", java_script_enabled=False)
    assert page.locator("table.board").first.locator("tbody tr:visible").count() == 4


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_board_has_the_colours_of_the_page(visit, scheme):
    page = visit("leaderboard", color_scheme=scheme)
    page.locator("table.board thead button").nth(2).click()
    paint = page.evaluate("""() => [document.body, document.querySelector("[aria-sort] button"),
        document.querySelector("select"), document.querySelector("input[type=search]")]
        .map((node) => getComputedStyle(node).color)""")
    assert len(set(paint)) == 1 and paint[0] == {"light": "rgb(25, 28, 32)", "dark": "rgb(233, 235, 238)"}[scheme]

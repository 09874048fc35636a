"""The page and its chart: their content, their consistency, and that they are self-contained."""

from __future__ import annotations

import random
import re
import xml.etree.ElementTree as xml
from html.parser import HTMLParser

import pytest
import torch

from testtime.report import chart, class_changes, running_accuracy
from testtime.report.data import Curve, StreamReport
from testtime.report.page import html
from testtime.types import InputError

NASTY = "<script>alert('x')</script> & \"quotes\"\x00\ud800"
SVG = "{http://www.w3.org/2000/svg}"
VOID = {"meta"}


def curve(name="DPE", rate=0.7, images=400, seed=0, **others):
    draw = random.Random(seed)
    return Curve(name, [draw.random() < rate for _ in range(images)], **({"seconds": 1.0} | others))


def stream(*curves, classes=20, **others):
    curves = curves or (curve("Zero-shot", 0.6), curve("TDA", 0.65, seed=1), curve("DPE", 0.7, seed=2))
    labels = [index % classes for index in range(len(curves[0].correct))]
    settings = {"title": "Pets", "subtitle": "photos", "classnames": [f"class {c}" for c in range(classes)]}
    return StreamReport(**(settings | {"curves": curves, "labels": labels, "conditions": {"Seed": "0"}} | others))


class Page(HTMLParser):
    """The tags and the text of a page; checks that every tag is closed in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.words, self.open = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.words.append(text)


def points(svg):
    """The curves of a standalone chart, as lists of (x, y)."""
    lines = [n for n in xml.fromstring(svg).iter(f"{SVG}polyline") if n.get("class").startswith("line")]
    return [[tuple(map(float, pair.split(","))) for pair in line.get("points").split()] for line in lines]


def test_page_says_accuracy_gain_and_time():
    zero = Curve("Zero-shot", [True, False] * 50, 0.1, "frozen")
    better = Curve("DPE", [True, True, True, False] * 25, 1.234, "alpha=6")
    page = html([stream(zero, better)], {"Machine": "2 cores"}, "A page")
    words = Page(page).words
    expected = ["A page", "Pets", "Zero-shot", "DPE", "50.0%", "75.0%", "+25.0", "12.3", "alpha=6", "2 cores"]
    assert not set(expected) - set(words)
    assert "25 / 0" in words  # corrected, broken


def test_a_loss_has_a_minus_and_no_change_has_no_sign():
    zero, same, worse = (Curve(name, [name != "Worse"] * 10, 0) for name in ("Zero-shot", "Same", "Worse"))
    words = Page(html([stream(zero, same, worse)], {}, "t")).words
    assert "−100.0" in words and "0.0" in words and "+0.0" not in words and "−0.0" not in words


def test_same_input_gives_same_bytes():
    make = lambda: html([stream(), stream(title="Other")], {"a": "b"}, "t").encode()  # noqa: E731
    assert make() == make()


def test_page_fetches_nothing():
    page = html([stream(), stream()], {"a": "b"}, "t")
    assert not re.search(r"https?://|//[a-z]|\bsrc\s*=|@import|url\((?!data:)|<link|<img|<iframe|fetch\(", page)
    assert all(value.startswith("#") for key, value in Page(page).attributes if key == "href")
    assert "default-src 'none'" in page


def test_markup_in_names_stays_text():
    zero, last = curve(NASTY, note=NASTY), curve(NASTY + "2", 0.9, note=NASTY)
    given = stream(
        zero,
        last,
        classes=4,
        classnames=[NASTY, "</svg>", "'", "-->"],
        title=NASTY,
        subtitle=NASTY,
        text=NASTY,
        conditions={NASTY: NASTY, "command": NASTY},
    )
    page = html([given, given], {NASTY: NASTY}, NASTY)
    parsed, plain = Page(page), Page(html([stream(classes=4), stream(classes=4)], {"a": "b"}, "t"))
    assert parsed.tags.count("script") == plain.tags.count("script") == 1
    assert "alert('x')" not in page
    assert "\x00" not in page and page.encode()  # a lone surrogate could not be written
    assert any("<script>alert('x')</script> & \"quotes\"" in word for word in parsed.words)


def test_picture_alone_is_xml_for_light_and_dark():
    curves = [curve(NASTY), curve()]
    svg = running_accuracy.running_accuracy_svg(curves, width=700, height=300, standalone=True, title=NASTY)
    root = xml.fromstring(svg.encode())
    assert root.tag == f"{SVG}svg" and root.get("width") == "700"
    assert root.find(f"{SVG}title") is not None and "At the end" in root.find(f"{SVG}desc").text
    assert root.find(f"{SVG}rect").get("class") == "paper"
    assert "prefers-color-scheme: dark" in root.find(f"{SVG}style").text
    assert svg.count("http") == 1


def test_curve_is_drawn_where_its_accuracy_is():
    correct = [index % 4 != 0 for index in range(1000)]
    curves = [Curve("Zero-shot", [True] * 1000, 1), Curve("DPE", correct, 1)]
    svg = running_accuracy.running_accuracy_svg(curves, standalone=True)
    root = xml.fromstring(svg)
    ticks = [node for node in root.iter(f"{SVG}text") if node.get("class") == "tick end"]
    (low_y, low), (high_y, high) = [(float(n.get("y")), float(n.text[:-1])) for n in (ticks[0], ticks[-1])]
    heights = [float(node.get("cy")) for node in root.iter(f"{SVG}circle")]
    ends = [low + (y - low_y) * (high - low) / (high_y - low_y) for y in heights]
    assert ends == pytest.approx([100, 75], abs=0.05)
    first, last = points(svg)[-1][0], points(svg)[-1][-1]
    assert first[0] < last[0]  # time runs to the right


def test_range_ignores_the_first_images():
    late = [False] * 8 + [True] * 1992
    svg = running_accuracy.running_accuracy_svg([Curve("a", late, 1), Curve("b", [True] * 2000, 1)], standalone=True)
    ticks = [n.text for n in xml.fromstring(svg).iter(f"{SVG}text") if n.get("class") == "tick end"]
    assert ticks[-1] == "100%" and float(ticks[0][:-1]) >= 80


@pytest.mark.parametrize(("low", "high"), [(0, 0), (100, 100), (61.3, 61.3), (0, 100), (33, 71), (99.7, 100)])
@pytest.mark.parametrize("most", [5, 6])
def test_ticks_are_tidy_and_enclose(low, high, most):
    ticks = chart.tidy_range(low, high, most)
    assert 1 <= len(ticks) - 1 <= most
    assert 0 <= ticks[0] <= low and high <= ticks[-1] <= 100


@pytest.mark.parametrize("images", [1, 2, 7, 99, 1000, 8041, 50_000])
def test_image_ticks_and_samples_stay_within_the_stream(images):
    ticks, seen = running_accuracy.image_ticks(images, 8), running_accuracy.sampled(images)
    assert ticks[0] == 0 and ticks[-1] <= images and len(ticks) <= 9
    assert seen[0] == 1 and seen[-1] == images and len(seen) == min(images, running_accuracy.POINTS) == len(set(seen))


@pytest.mark.parametrize("seed", range(20))
def test_labels_keep_apart_in_order_and_inside(seed):
    draw = random.Random(seed)
    wanted = sorted(draw.choice([50, 55, draw.uniform(0, 300)]) for _ in range(draw.randint(1, 14)))
    positions = chart.spread_out(wanted, 17, 0, 300)
    assert all(b - a >= 17 - 1e-9 for a, b in zip(positions, positions[1:], strict=False))
    assert positions[0] >= -1e-9 and positions[-1] <= 300 + 1e-9


def test_labels_with_room_are_not_moved():
    assert chart.spread_out([10, 40, 90], 17, 0, 100) == [10, 40, 90]


def test_more_labels_than_fit_share_the_height():
    assert chart.spread_out([5.0] * 11, 17, 0, 100) == pytest.approx(range(0, 101, 10))


def test_classes_are_sorted_by_gain_and_unseen_ones_left_out():
    zero = Curve("z", [True, False, True, True, False, False], 1)
    last = Curve("d", [False, True, True, True, True, False], 1)
    changes = class_changes.changes(stream(zero, last, classnames=["a", "b", "c", "d"], labels=[0, 1, 2, 0, 1, 2]))
    assert changes == [("b", 2, 0.0, 1.0), ("c", 2, 0.5, 0.5), ("a", 2, 1.0, 0.5)]


def test_only_the_greatest_changes_are_named():
    names = [f"<{c}>" for c in range(60)]
    zero = Curve("z", [c >= 30 for c in range(60)], 1)
    last = Curve("d", [c < 30 for c in range(60)], 1)
    page = html([stream(zero, last, classes=60, classnames=names)], {}, "t")
    assert len(re.findall('<i class="up"', page)) == len(re.findall('<i class="down"', page)) == class_changes.SHOWN


def test_tensors_and_lists_give_the_same_page():
    plain = stream()
    curves = [Curve(c.name, torch.tensor(c.correct), c.seconds) for c in plain.curves]
    tensors = stream(*curves, labels=torch.tensor(plain.labels))
    assert html([tensors], {}, "t") == html([plain], {}, "t")


@pytest.mark.parametrize("images", [1, 2, 5])
@pytest.mark.parametrize("curves", [1, 2, 16])
def test_tiny_streams_and_any_number_of_curves_draw(images, curves):
    given = [curve(f"method {n}", images=images, seed=n) for n in range(curves)]
    page = html([stream(*given, classes=2)], {}, "t")
    assert not re.search(r"\bnan\b", page) and Page(page).tags.count("svg") >= 2
    assert len(points(running_accuracy.running_accuracy_svg(given, standalone=True))) >= curves


def test_a_long_stream_makes_a_small_page():
    given = stream(curve("Zero-shot", images=50_000), curve("DPE", images=50_000, seed=1))
    assert len(html([given], {}, "t")) < 100_000


def test_a_method_keeps_its_colour_from_stream_to_stream():
    first = stream(curve("Zero-shot"), curve("TDA"), curve("DPE"))
    page = html([first, stream(curve("Zero-shot"), curve("DPE"))], {}, "t")
    assert len(re.findall(r'class="card s2 last"><span class="name">DPE', page)) == 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda: stream(curves=[]), "at least one curve"),
        (lambda: stream(curve(images=3), curve(images=4)), "same stream"),
        (lambda: stream(curve(images=0)), "no images"),
        (lambda: stream(curve(images=3), labels=[0]), "1 labels for 3 images"),
        (lambda: stream(curve(images=2), labels=[0, 20]), "label 20, but there are 20 class names"),
    ],
)
def test_what_does_not_fit_is_named(given, words):
    with pytest.raises(InputError, match=words):
        html([given()], {}, "t")

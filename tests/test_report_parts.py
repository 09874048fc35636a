"""The parts of a page besides the curves: what they count, and what they reject."""

from __future__ import annotations

import random
import re
from html.parser import HTMLParser

import pytest
import torch

from testtime import metrics
from testtime.report import (
    changed_answers,
    confusion_matrix,
    queue_map,
    reliability,
    sweep_charts,
    thumbnails,
    unlabelled,
)
from testtime.report.data import (
    Answers,
    Curve,
    Grid,
    Queued,
    QueueMap,
    Series,
    Snapshot,
    StreamReport,
    UnlabelledReport,
)
from testtime.report.page import html
from testtime.types import InputError

NASTY = "<script>alert('x')</script> & \"quotes\"\x00\ud800"
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
)


def answers(name, predictions, confidences=None, **others):
    return Answers(name, predictions, confidences or [0.5] * len(predictions), **others)


def stream(labels, before, after, classes=4, **others):
    names = [f"class {c}" for c in range(classes)]
    given = [answers("zeroshot", before), answers("dpe", after)]
    curves = [
        Curve(a.name, [p == t for p, t in zip(a.predictions, labels, strict=True)], 1.0)
        for a in others.get("answers", given)
    ]
    settings = {"title": "Pets", "subtitle": "photos", "classnames": names, "labels": labels, "conditions": {}}
    return StreamReport(**(settings | {"curves": curves, "answers": given} | others))


def folder(before, after, classes=4, **others):
    names = [f"class {c}" for c in range(classes)]
    given = [answers("zeroshot", before), answers("dpe", after)]
    return UnlabelledReport(
        **({"title": "A", "subtitle": "b", "answers": given, "classnames": names, "conditions": {}} | others)
    )


def random_stream(images=200, classes=30, seed=0, **others):
    draw = random.Random(seed)
    pick = lambda: [draw.randrange(classes) for _ in range(images)]  # noqa: E731
    labels, before, after = pick(), pick(), pick()
    sure = lambda: [draw.random() for _ in range(images)]  # noqa: E731
    given = [answers("zeroshot", before, sure(), brier=0.5), answers("dpe", after, sure(), settings={"alpha": 6.0})]
    entries = [Queued(c, i, draw.gauss(0, 9), draw.gauss(0, 9)) for i, c in enumerate(labels[:60])]
    queues = QueueMap("dpe", [Snapshot(30, entries[:30]), Snapshot(60, entries)], "Each is one image.")
    parts = {
        "answers": given,
        "queues": queues,
        "grids": [Grid("two", "alpha", [2, 4], "beta", [1, 3, 5], [[0.5, 0.6], [0.7, None], [0.4, 0.3]])],
        "series": [Series("one", "tau", [0.1, 0.2, 0.5], {"dpe": [0.5, 0.6, 0.55], "tda": [0.5, 0.5, 0.5]})],
        "names": [f"photos/{i}.jpg" for i in range(images)],
        "thumbnails": {i: PIXEL for i in range(0, 60, 2)},
    }
    return stream(labels, before, after, classes, **(parts | others))


class Balanced(HTMLParser):
    """The tags and the text of a page; checks that every tag is closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.words, self.tags = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.words.append(text)


def test_every_part_is_in_the_page_and_its_tags_close():
    page = Balanced(html([random_stream()], {"a": "b"}, "t"))
    text = " ".join(page.words)
    for heading in ("Confusion matrix", "Calibration", "Contents of the queues of dpe", "Effect of the settings"):
        assert heading in text
    assert "dpe: alpha" in page.words and "6.0" in page.words  # every setting


def test_the_same_parts_give_the_same_bytes():
    assert html([random_stream()], {}, "t") == html([random_stream()], {}, "t")


def test_pictures_are_inside_the_page_once_and_nothing_is_fetched():
    page = html([random_stream()], {}, "t")
    assert page.count(PIXEL) == 30
    assert not re.search(r"https?://|\bsrc\s*=|@import|url\((?!data:)|<link|<img|<iframe|fetch\(", page)
    assert "default-src 'none'" in page and "img-src data:" in page


def test_markup_in_any_part_stays_text():
    given = random_stream(
        names=[NASTY] * 200,
        grids=[Grid(NASTY, NASTY, [NASTY], NASTY, [NASTY], [[0.5]])],
        series=[Series(NASTY, NASTY, [NASTY, NASTY], {NASTY: [0.1, 0.2]})],
        classnames=[NASTY + str(c) for c in range(30)],
    )
    other = folder([0, 1], [1, 1], classnames=[NASTY] * 4, names=[NASTY] * 2, thumbnails={0: PIXEL})
    page = html([given, other], {}, "t")
    assert Balanced(page).tags.count("script") == 1
    assert "alert('x')" not in page and "\x00" not in page and page.encode()


# Confusion


def test_the_classes_that_take_part_in_most_changes_are_chosen():
    labels, before, after = [0] * 5 + [1, 2], [3] * 5 + [1, 2], [0] * 5 + [1, 1]
    assert confusion_matrix.most_changed(labels, before, after, most=2) == [0, 3]
    assert confusion_matrix.most_changed(labels, before, before) == []


def test_the_matrix_counts_every_answer_of_a_row():
    labels, before, after = [0, 0, 0, 1, 1], [0, 1, 1, 1, 2], [0, 0, 0, 1, 1]
    page = confusion_matrix.confusion_matrix(stream(labels, before, after))
    rows = re.findall(
        r'<tr><th scope="row"><small>\d</small> <span title="class \d">class (\d)</span></th>(.*?)</tr>', page
    )
    cells = [(int(name), [int(text or 0) for text in re.findall(r"<td[^>]*>(\d*)</td>", row)]) for name, row in rows]
    assert cells[:2] == [(0, [1, 2, 0, 0]), (1, [0, 1, 1, 0])]  # zero-shot as 0, 1, 2 and other
    assert cells[3:5] == [(0, [3, 0, 0, 0]), (1, [0, 2, 0, 0])]  # dpe
    assert sum(sum(row) for _, row in cells) == 2 * len(labels)
    assert page.count("no images") == 2 and cells[2][1] == []  # of class 2, which is only an answer


def test_answers_outside_the_matrix_are_counted_as_other(monkeypatch):
    monkeypatch.setattr(confusion_matrix, "most_changed", lambda *_: [0])
    page = confusion_matrix.confusion_matrix(stream([0, 0, 0], [1, 2, 0], [0, 0, 3]))
    assert re.findall(r"<td[^>]*>(\d*)</td>", page) == ["1", "2", "2", "1"]


def test_no_change_makes_no_matrix():
    assert confusion_matrix.confusion_matrix(stream([0, 1], [0, 1], [0, 1])) == ""


# Reliability


@pytest.mark.parametrize("seed", range(5))
def test_calibration_error_is_that_of_metrics(seed):
    noise = torch.Generator().manual_seed(seed)
    probabilities = (4 * torch.randn(300, 7, generator=noise, dtype=torch.float64)).softmax(1)
    labels = torch.randint(7, (300,), generator=noise)
    confidence, predictions = probabilities.max(1)
    score = metrics.ExpectedCalibrationError(reliability.BINS).update_answers(confidence, predictions == labels)
    bins = reliability.reliability(score)
    expected = metrics.expected_calibration_error(probabilities, labels, bins=reliability.BINS)
    assert score.compute() == expected
    assert sum(b.images * abs(b.confidence - b.accuracy) for b in bins) / 300 == pytest.approx(expected, abs=1e-12)
    assert sum(b.images for b in bins) == 300
    for b in bins:
        inside = (confidence > b.low) & (confidence <= b.high)
        assert b.images == int(inside.sum())
        assert not b.images or b.confidence == pytest.approx(float(confidence[inside].mean()), abs=1e-12)


def test_edges_belong_to_the_lower_bin():
    score = metrics.ExpectedCalibrationError(bins=2)
    score.update_answers(torch.tensor([0.0, 0.5, 0.500001, 1.0]), torch.ones(4, dtype=torch.bool))
    assert [b.images for b in reliability.reliability(score)] == [2, 2]


def test_bars_are_as_high_as_their_accuracy():
    labels = [0, 0, 0, 0]
    given = [answers("zeroshot", [0, 0, 0, 1], [0.99] * 4), answers("dpe", [0, 0, 0, 0], [0.99] * 4)]
    page = reliability.figure(stream(labels, [], [], answers=given), {"dpe": 1})
    heights = [float(h) for h in re.findall(r'class="bar" [^>]*height="([\d.]+)"', page)]
    assert heights == [0.75 * reliability.SIDE, reliability.SIDE]
    assert "ECE 24.0" in page and "ECE 1.0" in page


# Settings


def test_a_heat_map_is_coloured_from_the_worst_to_the_best():
    page = sweep_charts.heat_map(Grid("t", "a", [1, 2], "b", ["x", "y"], [[0.2, 0.4], [0.3, float("nan")]]))
    cells = re.findall(r'class="heat( best)?" style="--share:([\d.]+)">([\d.]+)<', page)
    assert cells == [("", "0.00", "20.0"), (" best", "1.00", "40.0"), ("", "0.50", "30.0")]
    assert page.count("<td>–</td>") == 1


def test_a_flat_grid_has_no_best():
    page = sweep_charts.heat_map(Grid("t", "a", [1, 2], "b", [1], [[0.5, 0.5]]))
    assert "best" not in re.sub("<figcaption>.*", "", page)


@pytest.mark.parametrize("values", [1, 2, 40])
def test_a_line_chart_draws_every_value_and_names_what_fits(values):
    page = sweep_charts.line_chart(Series("t", "setting", list(range(values)), {"dpe": [0.5] * values}), {})
    wide = page.split("</svg>")[0]
    assert len(re.search(r'class="line[^"]*" points="([^"]*)"', wide)[1].split()) == values
    names = re.findall(r'class="tick middle" x="([\d.]+)"', wide)
    gaps = [float(b) - float(a) for a, b in zip(names, names[1:], strict=False)]
    assert names and all(gap > 18 for gap in gaps)


# Queues


def test_a_map_marks_what_is_in_a_wrong_queue_and_carries_pictures():
    entries = [Queued(0, 0, 0.0, 0.0), Queued(1, 1, 1.0, 1.0), Queued(1, 2, 2.0, 0.5)]
    queues = QueueMap("dpe", [Snapshot(2, entries[:2]), Snapshot(3, entries)])
    given = stream(
        [0, 1, 2], [0, 1, 2], [0, 1, 1], queues=queues, thumbnails={2: PIXEL}, names=["a.jpg", "b.jpg", "c.jpg"]
    )
    page = queue_map.queue_map(given, 1)
    points = re.findall(r'<(circle|polygon) class="point[^>]*data-label="(\d)" data-thumbnail="([^"]*)"', page)
    assert points == [("circle", "0", ""), ("circle", "1", ""), ("circle", "0", ""), ("circle", "1", ""),
                      ("polygon", "1", "t1-2")]  # fmt: skip
    assert "class 1\nc.jpg\nlabel: class 2" in page
    assert "3 features, 1 in a wrong queue" in page


def test_snapshots_share_one_map():
    entries = [Queued(0, 0, 0.0, 0.0), Queued(1, 1, 1.0, 1.0), Queued(1, 2, 50.0, 20.0)]
    page = queue_map.queue_map(
        folder([0, 1, 1], [0, 1, 1], queues=QueueMap("dpe", [Snapshot(2, entries[:2]), Snapshot(3, entries)])), 1
    )
    positions = re.findall(r'data-x="([\d.]+)" data-y="([\d.]+)"', page)
    assert positions[0] == positions[2] and positions[1] == positions[3]
    assert all(0 < float(value) < queue_map.SIDE for position in positions for value in position)


def test_queues_without_places_are_listed_and_not_drawn():
    queues = QueueMap("tda", [Snapshot(2, [Queued(0, 0), Queued(1, 1)])])
    page = queue_map.queue_map(folder([0, 1], [0, 1], queues=queues), 1)
    assert "<svg" not in page and page.count('class="thumb none"') == 2 and "2 classes with an empty queue" in page


def test_names_on_a_map_do_not_cover_each_other():
    draw = random.Random(3)
    entries = [Queued(c, 0, 0, 0) for c in range(200) for _ in range(2)]
    positions = [(draw.uniform(20, 400), draw.uniform(20, 400)) for _ in entries]
    named = queue_map._names([f"a long name {c}" for c in range(200)], entries, positions)
    spots = [tuple(map(float, re.search(r'x="([\d.]+)" y="([\d.]+)"', text).groups())) for text in named]
    assert 3 < len(spots) <= queue_map.NAMED
    for i, (x, y) in enumerate(spots):
        assert all(abs(y - b) > 14 or abs(x - a) > 60 for a, b in spots[:i])


# Pictures


def test_thumbnails_are_small_bounded_and_skip_what_cannot_be_read(tmp_path):
    from PIL import Image

    paths = {}
    for number in range(5):
        paths[number] = tmp_path / f"{number}.png"
        Image.new("RGB", (300, 200 + number), (40 * number, 90, 30)).save(paths[number])
    paths[2].write_bytes(b"no image")
    made = thumbnails.make_thumbnails(paths)
    assert list(made) == [0, 1, 3, 4] and all(len(uri) < 4000 for uri in made.values())
    assert made == thumbnails.make_thumbnails(paths)
    assert list(thumbnails.make_thumbnails(paths, most=2)) == [0, 1]
    assert list(thumbnails.make_thumbnails(paths, total=len(made[0]) + 5)) == [0]


def test_examples_are_what_was_corrected_and_broken_most_confident_first():
    given = [answers("zeroshot", [1, 1, 0, 0]), answers("dpe", [0, 0, 1, 0], [0.4, 0.9, 0.5, 1.0])]
    made = stream([0, 0, 0, 0], [], [], answers=given)
    assert changed_answers.corrected_and_broken(made) == ([1, 0], [2])


def test_wrong_answers_are_shown_most_confident_first_with_all_that_was_said():
    given = [answers("zeroshot", [1, 2, 0, 3]), answers("dpe", [1, 1, 2, 0], [0.4, 0.98, 0.5, 1.0])]
    made = stream([0, 0, 0, 0], [], [], answers=given, thumbnails=dict.fromkeys(range(4), PIXEL))
    assert changed_answers.wrong(made) == [1, 2, 0]
    page = changed_answers.wrong_answers(made, 7)
    assert "dpe is wrong on 3 of 4 images, most confident first" in page
    assert re.findall(r"t7-(\d)", page) == ["1", "2", "0"]
    first = page[page.index("<li>") : page.index("</li>")]
    assert "<b>class 1</b>98%" in first and "label: class 0" in first and "zeroshot: class 2" in first
    assert page in html([made], {}, "t").replace("t1-", "t7-")


def test_wrong_answers_are_bounded_and_need_pictures(monkeypatch):
    monkeypatch.setattr(changed_answers, "WRONG", 2)
    shown = stream([0] * 5, [1] * 5, [2] * 5, thumbnails={0: PIXEL})
    page = changed_answers.wrong_answers(shown, 1)
    assert page.count("<li>") == 2 and "wrong on 5 of 5 images; 2 of the most confident are shown" in page
    assert changed_answers.wrong_answers(stream([0], [1], [1]), 1) == ""
    assert changed_answers.wrong_answers(stream([0], [1], [0], thumbnails={0: PIXEL}), 1) == ""


def test_images_without_a_picture_are_passed_over():
    shown = stream([0] * 3, [1, 0, 1], [2, 2, 2], names=["", "b.png", "c.png"], thumbnails={1: PIXEL})
    assert changed_answers.wrong(shown) == [1, 2] and changed_answers.corrected_and_broken(shown) == ([], [1])
    assert changed_answers.shown(shown) == [1, 2]
    assert thumbnails.image_name(shown, 0) == "image 1"
    assert "wrong on 3 of 3 images" in changed_answers.wrong_answers(shown, 1)


# Without labels


def test_changes_are_counted_by_kind():
    given = folder([0, 0, 0, 1, 2], [1, 1, 0, 0, 3])
    assert [(m.before, m.after, m.images) for m in unlabelled.moves(given)] == [
        (0, 1, [0, 1]),
        (1, 0, [3]),
        (2, 3, [4]),
    ]
    words = Balanced(html([given], {}, "t")).words
    assert any("dpe and zeroshot differ on 4 of 5 images" in text for text in words)


def test_the_surest_and_the_least_sure_images_are_found():
    given = folder([0] * 3, [0] * 3, answers=[answers("zeroshot", [0] * 3), answers("dpe", [0] * 3, [0.2, 0.9, 0.5])])
    assert unlabelled.confident(given, 2) == ([1, 2], [0, 2])


def test_a_folder_without_changes_says_so():
    page = html([folder([0, 1], [0, 1])], {}, "t")
    assert "gives the same answer as zeroshot for every image" in page and not re.search(r"\bnan\b", page)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda: stream([0], [0], [0], curves=[Curve("a", [True], 1)]), "answers of zeroshot, dpe, but curves of a"),
        (lambda: stream([0, 1], [0, 1], [0, 4]), "dpe answers class 4"),
        (lambda: folder([0], [0], answers=[Answers("a", [0], [0.1, 0.2])]), "1 answers and 2 confidences"),
        (lambda: folder([0], [0], answers=[answers("a", [0], [1.5])]), "confidence 1.5"),
        (lambda: folder([0], [0], answers=[]), "needs answers"),
        (lambda: folder([], []), "no images"),
        (lambda: folder([0], [0], names=["a", "b"]), "2 image names for 1 images"),
        (lambda: folder([0], [0], thumbnails={1: PIXEL}), "thumbnail of image 1"),
        (lambda: folder([0], [0], thumbnails={0: "https://elsewhere/a.png"}), "not a base64 data URI"),
        (lambda: folder([0], [0], queues=QueueMap("dpe", [Snapshot(1, [Queued(9, 0)])])), "queue of class 9"),
        (lambda: folder([0], [0], queues=QueueMap("dpe", [Snapshot(1, [Queued(0, 7)])])), "not among the 1"),
        (lambda: stream([0], [0], [0], grids=[Grid("g", "a", [1], "b", [1], [[0.1, 0.2]])]), "1 rows of 1 are needed"),
        (lambda: stream([0], [0], [0], series=[Series("s", "a", [1, 2], {"dpe": [0.1]})]), "1 values of dpe for 2"),
        (lambda: stream([0], [0], [0], series=[Series("s", "a", [1], {})]), "no line"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_named(given, words):
    with pytest.raises(InputError, match=words):
        html([given()], {}, "t")


def test_an_experiment_is_a_page_of_tables_and_figures() -> None:
    from testtime.report.data import Grid, Series, Table, TablesReport
    from testtime.report.page import html

    report = TablesReport(
        "Queue size",
        "seed 1",
        [
            Table("apart", ["row", "published"], [["M = 1", "62.91"]], apart=True),
            Table("on <pets>", ["row", "accuracy"], [["M = 1", "54.2"], ["M = 3", "55.1"]]),
        ],
        {"Command": "testtime bench queue-size pets"},
        grids=[Grid("both", "M", [1, 3], "tau", [0.1], [[0.542, None]])],
        series=[Series("one", "M", [1, 3], {"measured": [0.542, 0.551]})],
        notes=["Not run: <b>"],
    )
    page = html([report], {}, "An experiment")
    assert (
        page.index("55.1")
        < page.index("<li>Not run: &lt;b&gt;</li>")
        < page.index("<summary>apart")
        < page.index("62.91")
    )
    assert "on &lt;pets&gt;" in page and "55.1" in page and page.count("<svg") >= 1
    with pytest.raises(InputError, match="a row of 1 cells under a head of 2"):
        html([TablesReport("t", "", [Table("t", ["a", "b"], [["x"]])], {})], {}, "t")

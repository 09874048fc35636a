"""Images classified in one call: every form of input, the same answers as a session, and a table of them."""

from __future__ import annotations

import pickle
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small_data import make_folders

import testtime as tt
from testtime.images.reading import labels_from_folders
from testtime.session import classify as module
from testtime.session.display import SHOWN
from testtime.session.journal import row
from testtime.types import InputError, MissingPart, UnknownName

NAMES = ["cat", "dog", "fox"]


def classify(images, classes=None, **options):
    return tt.classify(images, classes, **({"encoder": "tiny", "pandas": False} | options))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folders(tmp_path_factory.mktemp("classify") / "photos", NAMES, images=3)


def expected(paths: list[Path], names: list[str], method: str = "dpe", views: int = 1, **settings) -> list[dict]:
    """The rows of `testtime run`, from a session."""
    encoder = tt.load_encoder("tiny")
    session = tt.Session(tt.build_task(encoder, names), method, encoder=encoder, views=views, **settings)
    labels = labels_from_folders(paths, names)
    return [row(i, path, answer, labels[i], names) for i, (path, answer) in enumerate(session.run(paths))]


def test_a_folder_has_its_own_classes_and_the_rows_of_a_run(photos: Path, cli, tmp_path: Path) -> None:
    answers = classify(photos)
    paths = sorted(photos.glob("*/*"))
    assert list(answers) == expected(paths, NAMES)
    assert answers.session.task.classnames == tuple(NAMES) and answers.session.count == 9
    assert cli("run", photos, "--encoder", "tiny", "--device", "cpu", "--out", tmp_path / "a.csv").code == 0
    header, *lines = (tmp_path / "a.csv").read_text().splitlines()
    assert answers.columns == header.split(",") and len(answers) == len(lines)
    assert answers["label"] == [line.split(",")[answers.columns.index("label")] for line in lines]


def test_options_reach_the_session(photos: Path) -> None:
    paths = sorted(photos.glob("cat/*"))
    with pytest.warns(UserWarning, match="2 of 3 classes have no images: dog, fox"):
        answers = classify(str(photos / "cat" / "*.png"), NAMES, method="tda", pos_alpha=3, views=4, templates="a {}.")
    assert answers.session.method == tt.make_method("tda", settings={"pos_alpha": 3})
    assert answers.session.plan.count == 4 and answers["image"] == [str(path) for path in paths]
    one = tt.build_task(tt.load_encoder("tiny"), NAMES, templates="a {}.")
    assert (answers.session.task.text == one.text).all()
    assert classify(paths, NAMES, views=4, seed=7)[0] == expected(paths, NAMES, views=4, seed=7)[0]
    assert classify(paths, NAMES, encoder=tt.load_encoder("tiny"), preset="paper").session.method.name == "dpe"


@pytest.mark.parametrize("form", ["paths", "words", "images", "arrays", "flipped twice", "generator", "batch"])
def test_every_form_of_images_has_the_same_answers(photos: Path, form: str) -> None:
    paths = sorted(photos.glob("*/*"))
    images = [Image.open(path).convert("RGB") for path in paths]
    arrays = [np.asarray(image) for image in images]
    assert not arrays[0].flags.writeable
    given = {
        "paths": paths,
        "words": [str(path) for path in paths],
        "images": images,
        "arrays": arrays,
        "flipped twice": [np.ascontiguousarray(array[:, ::-1])[:, ::-1] for array in arrays],
        "generator": tt.folder(photos),
        "batch": np.stack(arrays),
    }[form]
    answers = classify(given, NAMES)
    for made, wanted in zip(answers, expected(paths, NAMES), strict=True):
        named, listed = form in ("paths", "words", "generator"), form in ("paths", "words")
        unnamed = {} if named else {"image": f"image {wanted['index']}"}
        assert made == wanted | unnamed | ({} if listed else {"truth": None, "correct": None})


def test_one_image_alone_is_an_image(photos: Path) -> None:
    image = Image.open(photos / "cat" / "0.png").convert("RGB")
    assert len(classify(image, NAMES)) == len(classify(np.asarray(image), NAMES)) == 1


def test_the_table_is_indexed_by_row_by_column_and_by_slice(photos: Path) -> None:
    answers = classify(photos)
    assert answers[0] == answers.rows[0] == next(iter(answers)) and answers[-1]["index"] == 8
    assert answers["index"] == list(range(9))
    assert [values["index"] for values in answers[2:4]] == [2, 3] and isinstance(answers[2:4], tt.Answers)
    assert repr(answers).startswith("Answers(9 rows of index, image, label") and len(repr(answers)) < 120
    with pytest.raises(KeyError):
        answers["nothing"]


def test_unusable_images_are_skipped_with_one_warning_or_raised(photos: Path, tmp_path: Path) -> None:
    bad = [tmp_path / f"{number}.png" for number in range(5)]
    for path in bad:
        path.write_text("no image")
    good = sorted(photos.glob("*/*"))[:2]
    with pytest.warns(UserWarning, match="5 of 7 images could not be used.*0.png.*and 2 more") as caught:
        answers = classify([good[0], *bad, good[1]], NAMES)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert answers["index"] == [0, 6] and len(answers.skipped) == 5
    with pytest.raises(tt.ImageError, match="0.png"):
        classify([good[0], *bad], NAMES, on_error="raise")
    with pytest.raises(InputError, match="5 of 5 images could not be used"):
        classify(bad, NAMES)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda photos: classify([], NAMES), "No images given"),
        (lambda photos: classify([np.zeros((4, 4, 3), np.uint8)]), "no class names. Name them, as in classify"),
        (lambda photos: classify(photos / "cat"), "no class names"),
        (lambda photos: classify(photos, on_error="ignore"), "on_error='ignore': must be 'skip' or 'raise'"),
        (lambda photos: classify(photos, "cat,dog"), "Expected a list of class names"),
        (lambda photos: classify(7, NAMES), "Expected a folder, a pattern or images; got int"),
        (lambda photos: classify([0.1, 0.2], NAMES), "got a float"),
        (lambda photos: classify(np.zeros((8, 8, 3)), NAMES), "pixels .H, W, 3. uint8"),
        (lambda photos: classify(photos, method=tt.make_method("dpe"), alpha=4), "ready-made method has its own"),
        (lambda photos: classify(str(photos) + "x", NAMES), "No folder, file or benchmark"),
    ],
)
def test_mistakes_say_what_to_do(photos: Path, call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(photos)


def test_a_wrong_setting_is_noticed_before_the_encoder_is_loaded(photos: Path) -> None:
    with pytest.raises(UnknownName, match="Did you mean 'alpha'"):
        classify(photos, encoder="open_clip:ViT-B-16/nowhere.pt", alhpa=4)


def test_notes_on_the_data_are_warnings(tmp_path: Path) -> None:
    make_folders(tmp_path, ("a", "b"), images=1)
    (tmp_path / "list.csv").write_text("path,label\na/0.png,0\nb/0.png,1\n")
    with pytest.warns(UserWarning, match="classes are numbers without names"):
        classify(tmp_path / "list.csv")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        classify(tmp_path / "list.csv", ["cat", "dog"])


def test_without_pandas_the_table_is_plain(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    answers = classify(photos, pandas=None)
    assert isinstance(answers, tt.Answers)
    with pytest.raises(MissingPart, match="pip install pandas"):
        answers.to_pandas()
    with pytest.raises(MissingPart, match="pip install pandas"):
        classify(photos, pandas=True)


def test_with_pandas_the_table_is_a_frame(photos: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = classify(photos, pandas=None)
    assert isinstance(frame, pandas.DataFrame)
    answers = frame.answers
    assert list(frame.columns) == answers.columns and frame.to_dict("records") == answers.rows
    assert type(frame[frame.learned]) is type(frame.sort_values("confidence")) is pandas.DataFrame
    assert pickle.loads(pickle.dumps(frame)).equals(frame)
    assert answers.to_pandas().equals(frame)
    assert frame._repr_html_() == answers._repr_html_()
    frame["mine"], frame.loc[0, "label"] = "<b>", "changed"  # it draws what it holds now
    page = frame._repr_html_()
    assert page.count("&lt;b&gt;") == 9 and ">changed<" in page and page.count("<img") == 9


def test_a_table_is_drawn_with_thumbnails_of_its_first_rows(photos: Path, tmp_path: Path) -> None:
    path = tmp_path / "<b>.png"
    path.write_bytes((photos / "cat" / "0.png").read_bytes())
    answers = classify([path] * (SHOWN + 5), ["<script>", "dog"])
    page = answers._repr_html_()
    assert page.count('<img src="data:image/jpeg;base64,') == SHOWN and "and 5 more rows" in page
    assert "<script" not in page and "<b>" not in page and "&lt;b&gt;.png" in page
    assert len(page) < 100_000
    path.unlink()
    assert "<img" not in answers._repr_html_() and answers._repr_html_().count("<tr>") == SHOWN + 1


def test_images_in_memory_are_not_all_kept(photos: Path) -> None:
    pixels = np.asarray(Image.open(photos / "cat" / "0.png").convert("RGB"))
    answers = classify((pixels for _ in range(SHOWN + 10)), NAMES)
    assert len(answers) == SHOWN + 10 and len(answers.images) == SHOWN
    assert answers._repr_html_().count("<img") == SHOWN
    assert "<img" not in answers[SHOWN:]._repr_html_()


def test_the_session_goes_on(photos: Path, tmp_path: Path) -> None:
    answers = classify(photos)
    again = tt.Session.load(answers.session.save(tmp_path / "s.safetensors"), encoder=answers.session.encoder)
    assert again.step(photos / "cat" / "0.png").label == answers.session.step(photos / "cat" / "0.png").label


def test_importing_the_package_does_not_import_pandas(photos: Path) -> None:
    import subprocess

    code = "import sys, testtime as tt; tt.Session, tt.classify; print('pandas' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

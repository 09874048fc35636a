from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from testtime import InputError, UnknownName, load_encoder
from testtime.text.prompts import build_task, find_templates, parse_classes, read_classes, read_classes_file
from testtime.text.templates import TEMPLATES
from testtime.types import Preprocess


class Letters:
    """An encoder whose text feature counts letters; it records its calls."""

    name, dim, scale, preprocess = "letters", 26, 50.0, Preprocess()

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def encode_images(self, pixels: Tensor) -> Tensor:
        raise NotImplementedError

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        self.calls.append(list(texts))
        counts = [[text.lower().count(chr(97 + i)) for i in range(26)] for text in texts]
        return normalize(torch.tensor(counts, dtype=torch.float32), dim=1)


@pytest.fixture
def letters() -> Letters:
    return Letters()


def test_prototype_is_the_unit_mean_of_templates_and_sentences(letters: Letters) -> None:
    sentences = {"cat": ["It purrs.", "It has whiskers."], "grand piano": ["It has keys."]}
    task = build_task(letters, ["cat", "grand_piano"], ["a {}.", "the {}."], sentences)
    for name, row in zip(["cat", "grand piano"], task.text, strict=True):
        texts = [f"a {name}.", f"the {name}.", *sentences[name]]
        expected = normalize(letters.encode_texts(texts).mean(dim=0), dim=0)
        torch.testing.assert_close(row, expected)


def test_task_carries_the_encoder_s_name_and_scale(letters: Letters) -> None:
    task = build_task(letters, ["cat", "dog"])
    assert (task.encoder, task.scale, task.classnames) == ("letters", 50.0, ("cat", "dog"))


def test_all_texts_go_to_the_encoder_in_one_call(letters: Letters) -> None:
    build_task(letters, ["cat", "dog", "fox"], "imagenet7")
    assert [len(call) for call in letters.calls] == [21]


def test_templates_default_to_a_photo(letters: Letters) -> None:
    build_task(letters, ["cat", "dog"])
    assert letters.calls == [["a photo of a cat.", "a photo of a dog."]]


def test_descriptions_work_without_templates(letters: Letters) -> None:
    build_task(letters, ["cat", "dog"], (), {"cat": ["It purrs."], "dog": ["It barks."]})
    assert letters.calls == [["It purrs.", "It barks."]]


def test_neither_templates_nor_descriptions_is_refused(letters: Letters) -> None:
    with pytest.raises(InputError, match="nothing describes"):
        build_task(letters, ["cat", "dog"], ())


def test_class_name_with_braces_is_used_as_it_is(letters: Letters) -> None:
    build_task(letters, ["{0}", "{x}"])
    assert letters.calls == [["a photo of a {0}.", "a photo of a {x}."]]


def test_task_has_the_requested_dtype(letters: Letters) -> None:
    task = build_task(letters, ["cat", "dog"], "imagenet7", dtype=torch.float64)
    assert task.text.dtype == torch.float64
    torch.testing.assert_close(task.text.norm(dim=1), torch.ones(2, dtype=torch.float64))


def test_prototypes_can_be_used_in_autograd() -> None:
    task = build_task(load_encoder("tiny"), ["cat", "dog"])
    shift = torch.zeros_like(task.text, requires_grad=True)
    ((task.text + shift) ** 2).sum().backward()
    assert shift.grad is not None


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["cat"], "two classes or more.*'cat'"),
        ([], "two classes or more.*none"),
        (["cat", " "], "2 of 2 is empty"),
        (["cat", "dog", "cat"], "more than once: 'cat'.*allow_duplicates"),
        (["grand_piano", "grand piano"], "more than once: 'grand piano'"),
        (["cat", 3], "must be text; got 3"),
        ("cat,dog", "parse_classes"),
    ],
)
def test_unusable_class_names_are_refused(letters: Letters, names: list[str], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        build_task(letters, names)


def test_duplicates_are_accepted_when_allowed(letters: Letters) -> None:
    task = build_task(letters, ["missile", "missile", "cat"], allow_duplicates=True)
    assert torch.equal(task.text[0], task.text[1])


def test_seven_imagenet_templates() -> None:
    assert len(TEMPLATES["imagenet7"]) == 7
    assert find_templates("imagenet7") == TEMPLATES["imagenet7"]
    assert find_templates("one {} alone") == ("one {} alone",)


def test_unknown_templates_list_the_available_ones() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'imagenet7'.*single"):
        find_templates("imagenet")


def test_template_without_braces_for_the_class_is_refused() -> None:
    with pytest.raises(InputError, match="'a photo.'.*{}"):
        find_templates(["a photo."])
    with pytest.raises(InputError, match="Template 'photo of' has no {} for the class"):
        find_templates("photo of")  # no set's name has a space


def test_sets_and_templates_can_be_combined() -> None:
    assert find_templates(["imagenet7"]) == TEMPLATES["imagenet7"]
    assert find_templates(["a {}.", "dtd"]) == ("a {}.", "{} texture.")


def test_the_eighty_templates_are_a_set_by_name(letters: Letters) -> None:
    eighty = find_templates("imagenet80")
    assert len(eighty) == len(set(eighty)) == 80 and all("{}" in template for template in eighty)
    build_task(letters, ["cat", "dog"], "imagenet80")
    assert [len(call) for call in letters.calls] == [160]


def test_descriptions_are_found_whatever_the_case(letters: Letters) -> None:
    build_task(letters, ["Grand_Piano", "cat"], (), {"grand piano": ["Keys."], "CAT": ["Purrs."]})
    assert letters.calls == [["Keys.", "Purrs."]]


def test_missing_descriptions_are_named_with_the_closest(letters: Letters) -> None:
    with pytest.raises(InputError, match="2 of 3.*'airplane', 'fox'.*did you mean 'airplanes'"):
        build_task(letters, ["airplane", "fox", "cat"], "single", {"airplanes": ["Wings."], "cat": ["Furs."]})


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "not JSON"),
        ("[1]", "must map names.*list"),
        ('{"cat": "purrs", "dog": ["barks"]}', "'cat' must be a list"),
        ('{"cat": [], "dog": ["barks"]}', "'cat' must be sentences"),
        ('{"cat": [3], "dog": ["barks"]}', r"'cat' must be sentences; got \[3\]"),
    ],
)
def test_malformed_descriptions_are_refused(letters: Letters, tmp_path: Path, content: str, expected: str) -> None:
    file = tmp_path / "cupl.json"
    file.write_text(content)
    with pytest.raises(InputError, match=expected):
        build_task(letters, ["cat", "dog"], descriptions=file)


def test_missing_descriptions_file_is_named(letters: Letters) -> None:
    with pytest.raises(InputError, match="nowhere.json.*No such file"):
        build_task(letters, ["cat", "dog"], descriptions="nowhere.json")


def test_published_descriptions_cover_caltech(letters: Letters, data: Path) -> None:
    split = json.loads((data / "caltech-101/split_zhou_Caltech101.json").read_text())["test"]
    names = sorted({name for _, _, name in split})
    task = build_task(letters, names, "imagenet7", data / "prompts/CuPL_prompts_caltech101.json")
    assert task.classes == 100


def test_classes_file_skips_comments_blanks_and_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "classes.txt"
    file.write_bytes("\ufeffcat\n\n# pets\n  dog \r\nfox, red\n".encode())
    assert read_classes_file(file) == ["cat", "dog", "fox, red"]
    assert read_classes(str(file)) == ["cat", "dog", "fox, red"]


def test_classes_come_from_text_when_no_file_has_that_name() -> None:
    assert read_classes("cat, dog") == parse_classes("cat,dog,") == ["cat", "dog"]


def test_classes_file_without_classes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("# nothing\n")
    with pytest.raises(InputError, match="no class names"):
        read_classes_file(tmp_path / "empty.txt")
    with pytest.raises(InputError, match="neither a file nor"):
        read_classes("clases.txt")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        read_classes_file(tmp_path / "binary.txt")

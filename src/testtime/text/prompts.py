"""From class names to a task: an ensemble of prompt templates and CuPL descriptions, or a learned prompt."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch.nn.functional import normalize

from testtime.files import parse_json, read_bytes
from testtime.machine.devices import step_device
from testtime.registry import closest, folded_name, unknown
from testtime.text.templates import PROMPTS
from testtime.types import Context, Encoder, InputError, Task, UnknownName

Descriptions = Mapping[str, Sequence[str]]


def build_task(
    encoder: Encoder,
    classnames: Sequence[str],
    templates: str | Sequence[str] | None = None,
    descriptions: Descriptions | str | os.PathLike[str] | None = None,
    dtype: torch.dtype = torch.float32,
    allow_duplicates: bool = False,
    context: bool | str = False,
    prompts: str | None = None,
) -> Task:
    """The task of telling `classnames` apart, with text prototypes from the encoder.

    `templates` are sentences with `{}` for the class, or names of template sets, see `testtime list prompts`
    ("single" by default); `()` for none. `descriptions` are sentences by class, or a JSON file of them. A prototype is
    the unit mean of all the class's unit text features, templates and sentences alike. In names, `_` is read as a
    space. `context`, for prompt tuning, attaches the encoder's text tower with tunable words: True for
    "a photo of a", or the words themselves. `prompts`, "coop:FILE", uses learned prompt tokens instead of templates,
    and the context then starts from them.

    >>> from testtime import load_encoder
    >>> task = build_task(load_encoder("tiny"), ["cat", "grand_piano"], templates="imagenet7")
    >>> task.text.shape, task.classnames
    (torch.Size([2, 32]), ('cat', 'grand piano'))
    """
    names = check_classes(classnames, allow_duplicates)
    if prompts is not None:
        if templates is not None or descriptions is not None:
            raise InputError(f"Prompts '{prompts}' are learned; leave out templates and descriptions, or the prompts.")
        return _learned_task(encoder, names, prompts, dtype)
    patterns = find_templates("single" if templates is None else templates)
    sentences = [()] * len(names) if descriptions is None else _sentences(names, _checked_descriptions(descriptions))
    texts = [
        [*(pattern.replace("{}", name) for pattern in patterns), *more]
        for name, more in zip(names, sentences, strict=True)
    ]
    if any(not group for group in texts):
        raise InputError("No templates and no descriptions: nothing describes the classes. Give one of them.")

    # all in one call, so that the encoder's batches are full; float64 sums do not depend on their order
    features = encoder.encode_texts([text for group in texts for text in group])
    groups = features.to(step_device(features.device)).double().split([len(group) for group in texts])
    prototypes = normalize(torch.stack([group.mean(dim=0) for group in groups]), dim=1)
    return Task(prototypes.to(dtype), names, encoder.scale, encoder.name, _context(encoder, names, context))


def _learned_task(encoder: Encoder, names: tuple[str, ...], prompts: str, dtype: torch.dtype) -> Task:
    kind, _, file = prompts.partition(":")
    if kind != "coop" or not file:
        raise InputError(f"Prompts '{prompts}': write coop:FILE, a prompt that 'testtime train-prompts' has learned.")
    from testtime.text.coop import apply_prompt

    text, context = apply_prompt(encoder, names, file)
    return Task(text.to(dtype), names, encoder.scale, encoder.name, context)


def _context(encoder: Encoder, names: Sequence[str], context: bool | str) -> Context | None:
    if context is False:
        return None
    from testtime.text.contexts import WORDS, build_context

    return build_context(encoder, names, WORDS if context is True else context)


def find_templates(templates: str | Sequence[str]) -> tuple[str, ...]:
    """The given templates, one or several, with names of sets expanded; each must have a `{}`.

    >>> find_templates(["eurosat", "a {} from above."])
    ('a centered satellite photo of {}.', 'a {} from above.')
    """
    found: list[str] = []
    for given in (templates,) if isinstance(templates, str) else templates:
        if isinstance(given, str) and "{}" not in given and " " not in given:  # the name of a set
            if PROMPTS.known(given) is None:
                raise UnknownName(f"{unknown(PROMPTS.word, given, PROMPTS.names())} {_needs_class(given)}")
            prompts = PROMPTS.find(given)
            found += prompts() if callable(prompts) else prompts
        else:
            found.append(given)
    for template in found:
        if not isinstance(template, str) or "{}" not in template:
            raise InputError(f"Template {template!r} has no {{}} for the class. {_needs_class(str(template))}")
    _check_text(found, "Template")
    return tuple(found)


def _needs_class(text: str) -> str:
    """What to write instead of a template without `{}`."""
    named = re.sub(r"\{[^{}]*\}|%s", "{}", text)  # {name} and %s stand for the class elsewhere
    if "{}" not in named:
        body = text.rstrip(" .")
        named = f"{body} {{}}{text.rstrip()[len(body) :]}".strip()
    return f"A template needs {{}} where the class name goes: '{named}'."


def read_descriptions(path: str | os.PathLike[str]) -> dict[str, list[str]]:
    """Sentences by class name from a JSON file in the CuPL format: {"class name": ["sentence", ...], ...}."""
    found = parse_json(_read(path, "descriptions"), f"The file of descriptions '{path}'")
    if not isinstance(found, dict):
        raise InputError(f"Descriptions '{path}' must map names to sentences; got a {type(found).__name__}.")
    return found


def parse_classes(text: str) -> list[str]:
    """Class names from "a, b, c".

    >>> parse_classes("cat, dog,fox")
    ['cat', 'dog', 'fox']
    """
    return [name.strip() for name in text.split(",") if name.strip()]


def read_classes_file(path: str | os.PathLike[str]) -> list[str]:
    """Class names from a text file, one per line; blank lines and lines that start with # are skipped."""
    lines = (line.strip() for line in _read(path, "class names").splitlines())
    names = [line for line in lines if line and not line.startswith("#")]
    if not names:
        raise InputError(f"'{path}' holds no class names; write one per line.")
    return names


def read_classes(text_or_path: str | os.PathLike[str]) -> list[str]:
    """Class names from a file, if it exists, else from "a, b, c"."""
    if isinstance(text_or_path, os.PathLike) or os.path.isfile(text_or_path):
        return read_classes_file(text_or_path)
    if "," not in text_or_path:
        raise InputError(f"'{text_or_path}' is neither a file nor a list of class names such as cat,dog,fox.")
    return parse_classes(text_or_path)


def _read(path: str | os.PathLike[str], what: str) -> str:
    try:
        return read_bytes(path, piped=True).decode("utf-8-sig")  # some editors write a byte order mark
    except UnicodeDecodeError:
        raise InputError(f"'{path}' is not UTF-8 text.") from None
    except OSError as problem:
        raise InputError(f"Cannot read the {what} in '{path}': {problem.strerror or problem}.") from None


def check_classes(classnames: Sequence[str], allow_duplicates: bool = False) -> tuple[str, ...]:
    """The names with `_` read as a space; too few, empty or repeated names are refused."""
    if isinstance(classnames, str):
        raise InputError(f"Expected a list of class names; got the string {classnames!r}. See parse_classes.")
    not_text = [name for name in classnames if not isinstance(name, str)]
    if not_text:
        raise InputError(f"Class names must be text; got {not_text[0]!r}.")
    names = tuple(" ".join(name.replace("_", " ").split()) for name in classnames)
    _check_text(names, "Class name")
    if empty := [i for i, name in enumerate(names) if not name]:
        raise InputError(f"Class name {empty[0] + 1} of {len(names)} is empty.")
    if len(names) < 2:
        raise InputError(f"Give two classes or more; got {_listed(names) or 'none'}.")
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated and not allow_duplicates:
        raise InputError(
            f"Class names given more than once: {_listed(repeated)}. They would share one prototype; rename them "
            "(in Python, allow_duplicates=True keeps them)."
        )
    return names


def _check_text(texts: Sequence[str], what: str) -> None:
    """Refuse text that no encoder can read: lone surrogates, from bytes that are not UTF-8."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError(f"{what} {ascii(text)} is not UTF-8 text; write it again.") from None


def _checked_descriptions(descriptions: Descriptions | str | os.PathLike[str]) -> dict[str, Sequence[str]]:
    """Checked sentences by folded class name."""
    found = descriptions if isinstance(descriptions, Mapping) else read_descriptions(descriptions)
    for name, sentences in found.items():
        if isinstance(sentences, str) or not isinstance(sentences, Sequence):
            raise InputError(f"Descriptions of {name!r} must be a list; got a {type(sentences).__name__}.")
        if not sentences or not all(isinstance(text, str) and text.strip() for text in sentences):
            raise InputError(f"Descriptions of {name!r} must be sentences; got {list(sentences)[:3]}.")
        _check_text(sentences, "Description")
    return {folded_name(name): sentences for name, sentences in found.items()}


def _sentences(names: Sequence[str], described: Mapping[str, Sequence[str]]) -> list[Sequence[str]]:
    if missing := [name for name in names if folded_name(name) not in described]:
        meant = closest(folded_name(missing[0]), described)
        hint = f" For '{missing[0]}', did you mean '{meant}'?" if meant else ""
        raise InputError(
            f"{len(missing)} of {len(names)} classes lack descriptions: {_listed(missing)}.{hint} Describe every "
            "class, or leave out --descriptions."
        )
    return [described[folded_name(name)] for name in names]


def _listed(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"'{name}'" for name in names[:most]) + more

"""Damaged states through `Session.load` and one step: each is refused in words, or answers with finite numbers.

python tests/fuzz_states.py --cases 3000 --seed 0
"""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

import torch
from fuzz_images import main
from safetensors.torch import load, save

import testtime as tt
from testtime import Session
from testtime.registry import METHODS
from testtime.types import InputError

TOWERED = ("ctpt", "difftpt", "tpt")  # need a text tower, and remember nothing
NUMBERS = (
    math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-310, 1e-45, 1e-30, 1e30, 3e38, -3e38, 1e308, 2.0**63, -(2.0**63), 0.5,
)  # fmt: skip
WORDS = (
    "", "0", "-1", "-0", "1e400", "nan", "inf", "-inf", "9" * 30, "9" * 5000, "1.5", "null", "true", "[]", "{}",
    "[" * 9999, '["a"]', '{"alpha": 1e400}', '{"queue": 99999999999999}', '{"queue": -1}', '{"a\\u0000": 1}', "\ud7ff",
    "dpe", "tda", '{"alpha": 1' + "0" * 400 + "}", '{"queue": 2147483647}', "18446744073709551616",
    "9223372036854775807", "10001",
)  # fmt: skip


@cache
def saved(method: str, reference: bool) -> tuple[bytes, torch.Tensor]:
    """A state some way into a stream, and the next image."""
    task, stream, _ = tt.toy(classes=5, dim=8, images=12, views=3)
    session = Session(task, method, reference=reference)
    session.scan(stream[:11])
    with tempfile.TemporaryDirectory() as folder:
        return session.save(Path(folder) / "s").read_bytes(), stream[11]


def parts(content: bytes) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return load(content), header["__metadata__"]


def damaged(content: bytes, dice: random.Random) -> bytes:
    """The file with something wrong with it."""
    kind = dice.choice(("header", "bytes", "cut", "metadata", "metadata", "value", "value", "value", "shape"))
    data = bytearray(content)
    if kind == "header":
        end = 8 + int.from_bytes(content[:8], "little")
        for _ in range(dice.choice((1, 2, 8))):
            data[dice.randrange(end)] = dice.randrange(256)
        return bytes(data)
    if kind == "bytes":
        for _ in range(dice.choice((1, 4, 64))):
            data[dice.randrange(len(data))] = dice.choice((0, 0x7F, 0x80, 0xFF, dice.randrange(256)))
        return bytes(data)
    if kind == "cut":
        del data[dice.randrange(len(data)) :]
        return bytes(data)
    tensors, facts = parts(content)
    name = dice.choice(sorted(tensors))
    if kind == "metadata":
        for _ in range(dice.choice((1, 1, 3))):
            key = dice.choice(sorted(facts))
            if dice.random() < 0.1 and len(facts) > 1:
                del facts[key]
            else:
                facts[key] = dice.choice(WORDS)
    elif kind == "value":
        for _ in range(dice.choice((1, 1, 4))):
            tensors[name] = spoilt(tensors[name], dice)
    else:
        tensor = tensors[name]
        others = (tensor[None], tensor.reshape(-1), tensor.double(), tensor.half(), tensor.long(), tensor.new_zeros(0))
        tensors[name] = dice.choice(others)
    return save({name: tensor.contiguous() for name, tensor in tensors.items()}, facts)


def spoilt(tensor: torch.Tensor, dice: random.Random) -> torch.Tensor:
    tensor, number = tensor.clone(), dice.choice(NUMBERS)
    if not tensor.is_floating_point():
        return tensor.fill_(int(max(-(2**63), min(2**63 - 1, number))) if math.isfinite(number) else -7)
    flat = tensor.reshape(-1)
    many = flat.numel() if dice.random() < 0.3 else 1
    for place in dice.sample(range(flat.numel()), min(many, flat.numel())):
        flat[place] = torch.tensor(number, dtype=torch.float64)  # rounded to infinity where it is too large
    return tensor


def outcome(content: bytes, views: torch.Tensor, reference: bool, folder: Path) -> str:
    """How a file ends: refused when it is loaded, when it answers or when it is saved, or with answers."""
    path = folder / "s.safetensors"
    path.write_bytes(content)
    stage = "load"
    try:
        session = Session.load(path, reference=reference)
        stage = "step"
        answers = [session.predict(views), session.step(views)]
        stage = "scan"
        logits = session.scan(views[None])
        stage = "save"
        session.save(folder / "again.safetensors")
    except InputError as error:
        assert "\n" not in str(error), f"more than a line: {error}"
        return f"refused by {stage}"
    assert torch.isfinite(logits).all()
    for answer in answers:
        numbers = (answer.confidence, answer.entropy, answer.zero_shot_confidence)
        assert all(map(math.isfinite, numbers)) and torch.isfinite(answer.logits).all(), answer
    return "answers"


def run(cases: int, seed: int) -> Counter[str]:
    """How many files ended in which way; one that ended otherwise is raised, with its number and seed."""
    found: Counter[str] = Counter()
    names = sorted(set(METHODS.ours) - set(TOWERED))
    with tempfile.TemporaryDirectory() as folder:
        for number in range(cases):
            dice = random.Random(f"{seed} {number}")
            method, reference = dice.choice(names), dice.random() < 0.5
            content, views = saved(method, reference)
            content = damaged(content, dice)
            try:
                found[outcome(content, views, reference, Path(folder))] += 1
            except Exception as error:
                error.add_note(f"case {number} of seed {seed}: {method}, reference={reference}")
                raise
    return found


if __name__ == "__main__":
    main(run, __doc__)

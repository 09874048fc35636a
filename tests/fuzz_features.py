"""Feature files with something wrong in them: each is read and replayed, or refused as wrong input; nothing else.

python tests/fuzz_features.py --cases 3000 --seed 0
"""

from __future__ import annotations

import argparse
import io
import json
import random
import struct
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from conftest import command

import testtime as tt
from testtime.encoding.store import Features, save_features, write_index
from testtime.session.replay import replay
from testtime.types import InputError

N, V, C, D = 6, 2, 4, 8
TYPES = ("BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "F16", "BF16", "F32", "F64", "F8_E4M3",
         "F8_E5M2", "F8_E8M0", "C64", "F4", "", "f32", "Q")  # fmt: skip
NUMBERS = (-1, 0, 1, 2, 3, 7, 8, 9, 31, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), 1.5, 1e400)
TEXTS = ("", "0", "1", "-1", "2", "nan", "inf", "-inf", "1e400", "1e-400", "1e300", "1e38", "x", "null", "true", "[]",
         "{}", "[[[[]]]]", "[" * 100_000, "[" * 900 + "]" * 900, '["\\ud800"]', '["a", "b", "c", "\\udcff"]',
         '["a\\u0000", "b", "c", "d"]', '["", "", "", ""]', "[1, 2, 3, 4]", "[1, 2, 3, [4]]", '[null, true, {}, "x"]',
         '["a", "b", "c", "d", "e", "f"]', "[0, 1, 2, 3, 4, 5]", "[5, 5, 5, 5, 5, 5]", "[-1, 0, 0, 0, 0, 9e99]",
         "9" * 5000, "[" + "9" * 5000 + "]", "\u202e", "\0", "a" * 100_000)  # fmt: skip
KEYS = ("classnames", "scale", "logit_scale", "version", "images", "positions", "encoder", "seed", "hp.alpha",
        "hp.text_heads", "hp.activation", "")  # fmt: skip
FLOATS = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, 3e38, -1.0)

Parts = tuple[dict[str, Any], bytearray]


def base(random_: random.Random, folder: Path) -> Parts:
    """A good file's header and data: with or without labels, names, images, and a text tower of its own."""
    task, stream, labels = tt.toy(classes=C, dim=D, images=N, views=V)
    metadata = {"images": json.dumps([f"{n}.png" for n in range(N)]), "positions": json.dumps(list(range(N)))}
    path = save_features(
        folder / "good.safetensors",
        stream.half() if random_.random() < 0.3 else stream,
        task.text,
        labels=labels if random_.random() < 0.8 else None,
        metadata=metadata if random_.random() < 0.5 else None,
    )
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), bytearray(content[end:])


def packed(header: Any, data: bytes) -> bytes:
    text = json.dumps(header, ensure_ascii=False).encode(errors="surrogatepass")
    return len(text).to_bytes(8, "little") + text + bytes(data)


def _entry(random_: random.Random, header: dict[str, Any]) -> dict[str, Any]:
    names = [name for name in header if name != "__metadata__" and isinstance(header[name], dict)]
    return header[random_.choice(names)] if names else {}


def offsets(random_: random.Random, parts: Parts) -> None:
    _entry(random_, parts[0])["data_offsets"] = random_.choice(
        [[random_.choice(NUMBERS), random_.choice(NUMBERS)], [], [0], None, "0", [0, len(parts[1])], [0, 1, 2]]
    )


def kind(random_: random.Random, parts: Parts) -> None:
    _entry(random_, parts[0])["dtype"] = random_.choice([*TYPES, None, 3])


def kind_of_a_size(random_: random.Random, parts: Parts) -> None:
    """Another type whose numbers take as many bytes, so that the file stays whole."""
    alike = {"F32": ("I32", "U32"), "F16": ("BF16", "I16", "U16"), "I64": ("F64", "U64", "C64")}
    entry = _entry(random_, parts[0])
    entry["dtype"] = random_.choice([*alike.get(str(entry.get("dtype")), ("F32",))])


def narrow_labels(random_: random.Random, parts: Parts) -> None:
    """Labels of a type of one byte."""
    entry = parts[0].get("labels")
    if not isinstance(entry, dict) or not isinstance(entry.get("data_offsets"), list):
        return
    entry["dtype"], entry["shape"] = random_.choice(["U8", "BOOL", "I8", "F8_E4M3", "F8_E5M2"]), [N * 8]


def shape(random_: random.Random, parts: Parts) -> None:
    entry = _entry(random_, parts[0])
    sizes = entry.get("shape")
    if not isinstance(sizes, list) or not sizes or random_.random() < 0.3:
        entry["shape"] = random_.choice([[], [0], [-1], None, [N * V * D], [1] * 70, [2**32, 2**32], "6"])
    elif random_.random() < 0.5:
        sizes[random_.randrange(len(sizes))] = random_.choice(NUMBERS)
    else:
        random_.shuffle(sizes)


def names(random_: random.Random, parts: Parts) -> None:
    old = random_.choice(list(parts[0]))
    new = random_.choice(["", "views", "text", "labels", "ctx_init", "tokens", "clip.x", "\ud800", "\0", "x" * 9999])
    parts[0][new] = parts[0].pop(old)


def metadata(random_: random.Random, parts: Parts) -> None:
    facts = parts[0].setdefault("__metadata__", {})
    if isinstance(facts, dict):
        facts[random_.choice(KEYS)] = random_.choice(TEXTS)


def odd_metadata(random_: random.Random, parts: Parts) -> None:
    deep: Any = []
    for _ in range(random_.choice([5, 120, 130, 900])):
        deep = [deep]
    parts[0]["__metadata__"] = random_.choice([None, [], "x", 3, {"a": None}, {"a": 1}, {"a": {}}, {"a": deep}])


def data(random_: random.Random, parts: Parts) -> None:
    """Some numbers become others."""
    for _ in range(random_.choice([1, 3, 50])):
        place = random_.randrange(max(1, len(parts[1]) // 4)) * 4
        parts[1][place : place + 4] = struct.pack("<f", random_.choice(FLOATS))


def length(random_: random.Random, parts: Parts) -> None:
    if random_.random() < 0.5:
        del parts[1][random_.randrange(len(parts[1]) + 1) :]
    else:
        parts[1].extend(random_.randbytes(random_.choice([1, 8, 1000])))


def tower(random_: random.Random, parts: Parts) -> None:
    """Parts of a text tower, which prompt tuning would read."""
    header, room = parts
    for name in random_.sample(
        ["ctx_init", "tokens", "clip.token_embedding.weight", "clip.positional_embedding", "clip.text_projection",
         "clip.transformer.resblocks.0.ln_1.weight", "clip.ln_final.bias"], random_.randint(1, 7),
    ):  # fmt: skip
        sizes = [random_.choice([0, 1, 2, 4, 8]) for _ in range(random_.choice([0, 1, 2, 2, 2, 3]))]
        count = 1
        for size in sizes:
            count *= size
        begin = len(room)
        whole = name == "tokens" and random_.random() < 0.8
        numbers = [random_.choice([0, 1, 2, 99, -1]) for _ in range(count)]
        room.extend(struct.pack(f"<{count}{'q' if whole else 'f'}", *numbers))
        header[name] = {"dtype": "I64" if whole else "F32", "shape": sizes, "data_offsets": [begin, len(room)]}
    facts = header.setdefault("__metadata__", {})
    if isinstance(facts, dict):
        facts["hp.text_heads"] = random_.choice(["1", "2", "0", "-1", "x", "3", "9" * 5000])


CHANGES: tuple[Callable[[random.Random, Parts], None], ...] = (
    offsets, kind, kind_of_a_size, narrow_labels, shape, names, metadata, metadata, odd_metadata, data, length, tower,
)  # fmt: skip


def case(number: int, folder: Path) -> Path:
    """The file, or the folder of shards, of a number."""
    random_ = random.Random(number)
    parts = base(random_, folder)
    for _ in range(random_.choice([1, 1, 1, 2, 3])):
        random_.choice(CHANGES)(random_, parts)
    content = bytearray(packed(*parts))
    if random_.random() < 0.1:  # and now and then bytes of the header itself
        for _ in range(random_.choice([1, 4])):
            content[random_.randrange(min(len(content), 400))] = random_.randrange(256)
    path = folder / "case.safetensors"
    path.write_bytes(content)
    if random_.random() < 0.2:
        store = folder / "store"
        store.mkdir(exist_ok=True)
        (store / "a.safetensors").write_bytes((folder / "good.safetensors").read_bytes())
        (store / "b.safetensors").write_bytes(content)
        write_index(store, random_.choice([["a.safetensors", "b.safetensors"], ["b.safetensors"] * 2]))
        return store
    return path


def use(path: Path, number: int) -> str:
    """How a file ends: used, or refused; anything else is raised."""
    random_ = random.Random(number + 1)
    method = random_.choice(["zeroshot", "tda", "dpe", "tpt", "zero"])
    ends = []
    for do in (
        lambda: Features(path),
        lambda: Features(path).task(context=random_.random() < 0.5),
        lambda: Features(path).read(0, len(Features(path))),
        lambda: replay(Features(path), method, reference=random_.random() < 0.3),
    ):
        try:
            do()
            ends.append("used")
        except InputError as error:
            assert str(error), "an error that says nothing"
            str(error).encode(errors="surrogateescape")
            ends.append("refused")
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = command("replay", path, "--method", method, "--json", *(["--recorded"] if number % 2 else []))
    assert code in (0, 2), f"exit code {code}: {err.getvalue()}"
    if code == 0:
        answer = json.loads(out.getvalue())
        assert answer["accuracy"] is None or 0 <= answer["accuracy"] <= 1
    return ends[-1]


def run(cases: int, seed: int) -> tuple[Counter[str], list[int]]:
    """How many were used and refused, and the numbers of those that ended otherwise."""
    found: Counter[str] = Counter()
    faults = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(seed * 1_000_000, seed * 1_000_000 + cases):
            try:
                found[use(case(number, Path(folder)), number)] += 1
            except BaseException as fault:  # a panic of the library is no Exception
                if isinstance(fault, KeyboardInterrupt):
                    raise
                found["fault"] += 1
                faults.append(number)
                print(f"case {number}:")
                traceback.print_exception(fault, limit=-6)
    return found, faults


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    counts, wrong = run(given.cases, given.seed)
    print(dict(counts), wrong)
    sys.exit(bool(wrong))

"""Hostile checkpoints: tensors are read, no code runs, and problems are reported as bad input."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz_data
import open_clip
import pytest
import torch
from torch import Tensor, nn

from testtime import load_encoder
from testtime.encoding.encoders import hf
from testtime.encoding.encoders import open_clip as clip
from testtime.files import torchscript
from testtime.types import InputError


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, but OpenAI's files use it
        yield


class Tower(nn.Module):
    """A small model as in open_clip: a transformer, shared and strided weights, buffers, other tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = open_clip.transformer.VisionTransformer(
            image_size=32, patch_size=16, width=32, layers=2, heads=2, mlp_ratio=2.0, output_dim=16
        )
        self.norms = nn.ModuleList([nn.LayerNorm(16), nn.BatchNorm1d(16)])
        self.logit_scale = nn.Parameter(torch.tensor(2.5))
        self.turned = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
        self.part = nn.Parameter(torch.ones(4, 4).half()[1:3])
        self.register_buffer("input_resolution", torch.tensor(32))
        self.register_buffer("mask", torch.zeros(2, 2, dtype=torch.bool), persistent=False)
        self.register_buffer("nothing", torch.zeros(0))
        self.beside, self.sizes, self.word = torch.ones(3), [1, 2], "x"

    def forward(self, x: Tensor) -> Tensor:
        return self.norms[1](self.norms[0](self.visual(x))) * self.logit_scale


class Plain(nn.Module):
    """A scriptable module with attributes of several kinds and shared modules."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3, bias=False)
        self.same = self.one
        self.inside = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.tied = self.inside[0].weight
        self.beside, self.sizes, self.words = torch.ones(3), [1.5, 2.0], {"a": torch.ones(2)}
        self.register_buffer("steps", torch.tensor(7))
        self.where = torch.device("cpu")

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(self.same(self.one(x))) + self.beside * self.sizes[0] + self.words["a"][0]


@pytest.mark.parametrize("how", ["script", "trace"])
def test_an_archive_is_read_as_torch_reads_it(tmp_path: Path, how: str) -> None:
    if how == "script":
        made = torch.jit.script(Plain())
    else:
        made = torch.jit.trace(Tower().eval(), torch.ones(2, 3, 32, 32), check_trace=False)
    torch.jit.save(made, tmp_path / "a.pt")
    found, wanted = torchscript.read_tensors(tmp_path / "a.pt"), torch.jit.load(tmp_path / "a.pt").state_dict()
    assert found.keys() == wanted.keys() and len(found) > 5
    for name, value in wanted.items():
        assert torch.equal(found[name], value) and found[name].dtype == value.dtype
        assert found[name].stride() == value.stride()


def test_an_archive_from_before_buffers_were_listed_gives_all_its_tensors(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(Plain()), tmp_path / "a.pt")
    rewrite(tmp_path / "a.pt", lambda name, data: b"" if "/code/" in name else data)
    assert torchscript.read_tensors(tmp_path / "a.pt").keys() > {"one.weight", "inside.0.bias", "steps"}


# --- code in a file ---


class Evil(nn.Module):
    """A module that writes a file as soon as it is loaded."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.path = path

    @torch.jit.export
    def __getstate__(self) -> tuple[Tensor, str, bool]:
        return self.weight, self.path, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[Tensor, str, bool]) -> None:
        self.weight = state[0]
        self.path = state[1]
        self.training = state[2]
        torch.save(state[0], state[1])

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_an_archive_that_writes_a_file_when_loaded_writes_none(tmp_path: Path) -> None:
    written = tmp_path / "written"
    torch.jit.save(torch.jit.script(Evil(str(written))), tmp_path / "evil.pt")
    with pytest.raises(InputError, match="has its own serialization, and code in a file is never run"):
        clip.read(tmp_path / "evil.pt")
    assert not written.exists()
    torch.jit.load(tmp_path / "evil.pt")
    assert written.exists(), "the archive should be one that torch.jit.load runs"


class Command:
    """Its pickle runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.mark.parametrize("form", ["pickle", "legacy", "zip", "archive"])
def test_a_pickle_that_runs_a_command_runs_none(tmp_path: Path, form: str) -> None:
    written, file = tmp_path / "written", tmp_path / "evil.pt"
    evil = Command(f"touch {written}")
    if form == "pickle":
        file.write_bytes(pickle.dumps(evil))
    elif form == "archive":
        with zipfile.ZipFile(file, "w") as archive:
            for name in ("data.pkl", "constants.pkl"):
                archive.writestr(f"evil/{name}", pickle.dumps(evil, protocol=2))
    else:
        torch.save({"state_dict": evil}, file, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(InputError, match="code in a file is never run"):
        clip.read(file)
    assert not written.exists()
    if form == "pickle":
        pickle.loads(file.read_bytes())
        assert written.exists()


def test_hub_code_for_attention_is_refused(tmp_path: Path) -> None:
    for config in (
        {"attn_implementation": "someone/kernel"},
        {"text_config": {"_attn_implementation": {"": "someone/kernel@main"}}},
    ):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip", **config}))
        with pytest.raises(InputError, match="asks for code from the hub"):
            hf._config(tmp_path)


# --- malformed archives ---


def rewrite(path: Path, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path) as before:
        entries = {name: before.read(name) for name in before.namelist()}
    with zipfile.ZipFile(path, "w", compression) as after:
        for name, data in entries.items():
            if changed := change(name, data):
                after.writestr(name, changed)


def archive(path: Path, described: bytes, data: bytes = bytes(16), name: str = "evil") -> Path:
    """An archive with one storage, whose data.pkl is given."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}/data/0", data)
        file.writestr(f"{name}/data.pkl", described)
        file.writestr(f"{name}/constants.pkl", b"\x80\x02).")
    return path


def long(number: int) -> bytes:
    return pickle.LONG1 + bytes([16]) + number.to_bytes(16, "little", signed=True)


def whole(numbers: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(long, numbers)) + b"t"


def word(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def tensor(size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0, count: int = 4, key: str = "0") -> bytes:
    storage = b"(" + word("storage") + b"ctorch\nFloatStorage\n" + word(key) + word("cpu") + long(count) + b"tQ"
    rest = whole(size) + whole(stride) + b"\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + long(offset) + rest + b"tR"


def module(*attributes: bytes) -> bytes:
    return b"c__torch__\nM\n)\x81}(" + b"".join(attributes) + b"ub"


def test_a_hand_made_archive_is_read(tmp_path: Path) -> None:
    described = b"\x80\x02" + module(word("w"), tensor((2, 2), (2, 1))) + b"."
    content = struct.pack("<4f", 1, 2, 3, 4)
    found = clip.read(archive(tmp_path / "a.pt", described, content))
    assert found.openai and found.tensors["w"].tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        (tensor((2, 3), (3, 1)), "larger than the 4 numbers"),
        (tensor((2,), (1,), offset=3), "larger than the 4 numbers"),
        (tensor((2,), (-1,), offset=1), "impossible shape"),
        (tensor((-1,), (1,)), "impossible shape"),
        (tensor((10**9, 10**9), (0, 0)), "larger than the 4 numbers"),
        (tensor((0, 2**80), (1, 1)), "damaged|cannot be read"),
        (tensor((1,) * 99, (1,) * 99), "impossible shape"),
        (tensor((4,), (1,), count=5), "cut short"),
        (tensor((4,), (1,), count=-1), "cut short"),
        (tensor((4,), (1,), count=2**100), "cut short"),
        (tensor((4,), (1,), key="9"), "damaged"),
        (b"cbuiltins\neval\n(" + word("1") + b"tR", "it wants to run 'builtins.eval'"),
        (b"ctorch\nload\n(" + word("x") + b"tR", "it wants to run 'torch.load'"),
        (b"N", "holds no tensors"),
    ],
)
def test_a_malformed_archive_is_refused(tmp_path: Path, described: bytes, expected: str) -> None:
    file = archive(tmp_path / "a.pt", b"\x80\x02" + module(word("w"), described) + b".")
    with pytest.raises(InputError, match=expected):
        clip.read(file)


@pytest.mark.parametrize(
    "described",
    [
        b"", b".", b"\x80\x02.", b"N.", b"(", b"t.", b"h\x00.", b"Nb.", b"N}b.", b"]]s.", b"}(NNu.", b"](Ne0.", b"NR.",
        b"cos\nsystem\n.", b"N)\x81.", b"]Q.", b"\x8c\x02os\x8c\x06system\x93.", b"V\\ud800\n.",
        b"I1" + b"0" * 5000 + b"\n.",
        b"(" * 10**5 + b"t" * 10**5 + b".", b")" + b"\x85" * 10**5 + b"}q\x00h\x00Nu.", b"r\xff\xff\xff\xffN.",
        b"\x8b\xff\xff\xff\x7fx.",
    ],
)  # fmt: skip
def test_a_pickle_without_a_module_is_refused(tmp_path: Path, described: bytes) -> None:
    with pytest.raises(InputError, match="cannot be read as a checkpoint"):
        clip.read(archive(tmp_path / "a.pt", described))


def test_modules_that_contain_each_other_are_refused(tmp_path: Path) -> None:
    """Forty modules, each twice in the next, have 2**40 names; one inside itself has infinitely many."""
    layers, below = b"", word("w") + tensor((4,), (1,))
    for level in range(40):
        below = word("a") + module(below) + b"q" + bytes([level]) + word("b") + b"h" + bytes([level])
    layers = b"\x80\x02" + module(below) + b"."
    endless = b"\x80\x02c__torch__\nM\n)\x81q\x00}(" + word("a") + b"h\x00ub."
    for described in (layers, endless):
        with pytest.raises(InputError, match="more than 100,000 names"):
            clip.read(archive(tmp_path / "a.pt", described))


def test_a_zip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    described = b"\x80\x02" + module(word("w"), tensor((4,), (1,))) + b"."
    file = archive(tmp_path / "a.pt", described, bytes(50_000_000))
    rewrite(file, lambda name, data: data, zipfile.ZIP_DEFLATED)
    assert file.stat().st_size < 100_000
    with pytest.raises(InputError, match="is compressed"):
        clip.read(file)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("a/constants.pkl", b"N.")
        packed.writestr("a/data.pkl", b"N" * (torchscript.MAX_TEXT + 2))
    with pytest.raises(InputError, match="longer than 67,108,864 bytes"):
        clip.read(file)


def test_an_archive_of_another_byte_order_is_refused(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(Plain()), tmp_path / "a.pt")
    rewrite(tmp_path / "a.pt", lambda name, data: b"big" if name.endswith("/byteorder") else data)
    with pytest.raises(InputError, match="big-endian"):
        clip.read(tmp_path / "a.pt")


# --- plain checkpoints and the files beside them ---


def test_a_long_name_in_a_pickle_is_refused_at_once(tmp_path: Path) -> None:
    evil = b"\x80\x02ctorch._utils\n" + b'{"a":' * 3000 + b"\n."  # torch.load would take minutes to report it
    torch.save(torch.ones(2), tmp_path / "zip.pt")
    rewrite(tmp_path / "zip.pt", lambda name, data: evil if name.endswith("data.pkl") else data)
    buffer = io.BytesIO()
    torch.save(torch.ones(2), buffer, _use_new_zipfile_serialization=False)
    start = buffer.getvalue().index(b"ctorch._utils\n") - 2
    (tmp_path / "legacy.pt").write_bytes(buffer.getvalue()[:start] + evil)
    for name in ("zip.pt", "legacy.pt"):
        with fuzz_data.bounded(), pytest.raises(InputError, match="is not a checkpoint"):
            clip.read(tmp_path / name)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({1: torch.ones(2), (1, 2): torch.ones(2)}, "holds no tensors"),
        ({"w": torch.ones(2).to_sparse()}, "as a sparse, quantised or meta tensor"),
        ({"w": torch.ones(2, device="meta")}, "as a sparse, quantised or meta tensor"),
        ([torch.ones(2)], "holds a list"),
        (5, "holds a int"),
    ],
)
def test_anything_but_a_state_dict_is_refused(tmp_path: Path, state: object, expected: str) -> None:
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(InputError, match=expected):
        clip.read(tmp_path / "a.pt")


@pytest.mark.parametrize(
    "config_text",
    [
        b"[" * 100_000, b"5", b"[]", b'{"preprocess_cfg": 5}', b'{"preprocess_cfg": []}', b'{"model_cfg": "x"}',
        b'{"preprocess_cfg": {"mean": 5}}', b'{"preprocess_cfg": {"std": "abc"}}', b'{"preprocess_cfg": null}',
        b'{"preprocess_cfg": {"std": [[1], 1, 1]}}', b'{"preprocess_cfg": {"mean": null}}', b"\xff\xfe\x00",
        b'{"preprocess_cfg": {"interpolation": []}}', b'{"preprocess_cfg": {"resize_mode": {}}}',
        b'{"preprocess_cfg": {"mean": [' + b"9" * 5000 + b"]}}",
    ],
)  # fmt: skip
def test_a_malformed_configuration_beside_a_checkpoint_is_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config_text: bytes
) -> None:
    vision = dict(image_size=32, patch_size=16, width=32, layers=1, head_width=16)
    text = dict(context_length=77, vocab_size=49408, width=32, heads=2, layers=1)
    config = dict(embed_dim=16, vision_cfg=vision, text_cfg=text)
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "small", config)
    torch.save(clip.build("small").state_dict(), tmp_path / "a.pt")
    (tmp_path / "open_clip_config.json").write_bytes(config_text)
    with pytest.raises(InputError):
        load_encoder(f"open_clip:small/{tmp_path}/a.pt")


def test_a_pipe_is_refused_as_a_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.pt")
    with fuzz_data.bounded(), pytest.raises(InputError, match="No checkpoint file"):
        load_encoder(f"open_clip:ViT-B-16/{tmp_path}/a.pt")

"""Images behind URLs, through fsspec: found, labelled, read and identified where they are."""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path

import pytest
from PIL import Image
from small_data import make_folders

from testtime import Features
from testtime.datasets import open_dataset
from testtime.datasets.own import read_folders
from testtime.errors import ImageError, InputError, MissingPart
from testtime.files import remote
from testtime.files.identity import identity
from testtime.images.reading import read_image

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def memory():
    """An empty file system in memory."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


@pytest.fixture
def folders(tmp_path) -> Path:
    return make_folders(tmp_path / "pets")


@pytest.fixture
def uploaded(memory, folders) -> str:
    for path in folders.rglob("*.png"):
        memory.pipe(f"/pets/{path.relative_to(folders).as_posix()}", path.read_bytes())
    memory.pipe("/pets/README.md", b"pets")
    memory.pipe("/pets/cat/.hidden.png", b"no image")
    return "memory://pets"


def archive(folder: Path) -> bytes:
    """A tar of images and class numbers."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for number, path in enumerate(sorted(folder.rglob("*.png"))):
            for suffix, data in ((".png", path.read_bytes()), (".cls", str(number % 3).encode())):
                member = tarfile.TarInfo(f"{number:04d}{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return content.getvalue()


def test_folders_are_classes_as_on_a_disk(uploaded, folders) -> None:
    local, found = read_folders(folders), open_dataset(uploaded)
    assert (found.name, found.labels, found.classnames) == (local.name, local.labels, local.classnames)
    for path, image in zip(local.paths, found.paths, strict=True):
        assert image.read_bytes() == path.read_bytes() and str(image).startswith("memory://")
        assert read_image(image).tobytes() == read_image(path).tobytes()


def test_loose_images_and_patterns_have_no_labels(uploaded, memory) -> None:
    assert open_dataset(f"{uploaded}/cat").labels is None and len(open_dataset(f"{uploaded}/cat")) == 4
    assert len(open_dataset(f"{uploaded}/{{cat,dog}}/*.png")) == 8
    one = open_dataset(f"{uploaded}/fox/2.png")
    assert len(one) == 1 and str(one.paths[0]).endswith("fox/2.png")


def test_shards_are_read_by_their_members(memory, folders) -> None:
    for number in range(2):
        memory.pipe(f"/shards/part-{number:03d}.tar", archive(folders))
    found = open_dataset("memory://shards/part-{000..001}.tar")
    assert found.labels == [0, 1, 2] * 8 and len(found) == 24
    first = sorted(folders.rglob("*.png"))[0]
    assert found.paths[12].read_bytes() == first.read_bytes() and str(found.paths[12]).endswith("001.tar/0000.png")
    assert len(open_dataset("memory://shards")) == 24


def test_a_broken_archive_is_an_error_that_names_it(memory, folders) -> None:
    memory.pipe("/shards/cut.tar", archive(folders)[:3000])
    with pytest.raises(InputError, match=r"memory://.*cut\.tar"):
        open_dataset("memory://shards/cut.tar")


def test_the_identity_changes_with_the_file_and_reads_nothing(memory, uploaded, monkeypatch) -> None:
    before = open_dataset(f"{uploaded}/cat")
    monkeypatch.setattr(remote.RemoteImage, "read_bytes", lambda self: pytest.fail("read"))
    assert [identity(image) for image in before.paths] == [
        identity(image) for image in open_dataset(f"{uploaded}/cat").paths
    ]
    memory.pipe("/pets/cat/0.png", b"another")
    after = open_dataset(f"{uploaded}/cat")
    changed = [identity(a) != identity(b) for a, b in zip(before.paths, after.paths, strict=True)]
    assert changed == [True, False, False, False]


def test_what_cannot_be_read_is_an_error_that_names_the_url(memory, uploaded, monkeypatch) -> None:
    for url, message in [
        ("memory://nothing", "no such file or folder"),
        ("memory://nothing/*.jpg", "No images"),
        ("nowhere://bucket", "nowhere"),
    ]:
        with pytest.raises(InputError, match=message):
            open_dataset(url)
    gone = open_dataset(f"{uploaded}/cat").paths[0]
    memory.rm("/pets/cat/0.png")
    with pytest.raises(ImageError, match=r"cat/0\.png: no such file"):
        read_image(gone)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingPart, match=r"testtime\[ray\]"):
        open_dataset("memory://pets")


def test_the_command_encodes_a_url_and_resumes(cli, folders, tmp_path) -> None:
    arguments = ("encode", folders.as_uri(), "--encoder", "tiny", "--shard", 5, "--out", tmp_path / "out")
    assert cli(*arguments).code == 0
    store = Features(tmp_path / "out")
    assert len(store) == 12 and store.labels is not None
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("features-*")}
    Image.new("RGB", (40, 36)).save(folders / "fox" / "3.png")
    assert cli(*arguments).code == 0
    changed = [path.stat().st_mtime_ns != before for path, before in sorted(files.items())]
    assert changed == [False, False, True]

"""Make the photographs that `testtime demo` shows, from a copy of Caltech101.

    python scripts/make_thumbnails.py CALTECH101_FOLDER OUT.tar

The folder holds `101_ObjectCategories/` and `split_zhou_Caltech101.json`. The demo shows what it finds in
`src/testtime/data/caltech101-thumbnails.tar`. Chosen are the images that its page shows, and half as many again, since
another machine rounds differently; none is of the class of faces. The same folder and Pillow give the same bytes.
"""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path

from PIL import Image, ImageOps
from rich.console import Console

from testtime.cli.demo import CREDIT, demo_stream, photographs, run_streams
from testtime.datasets import open_dataset
from testtime.files import write_atomic
from testtime.images.reading import read_image
from testtime.report.changed_answers import ROW, WRONG, shown
from testtime.report.thumbnails import SIDE

FACES = "face"  # people who can be recognised


def main(folder: str, out: Path) -> None:
    data = open_dataset(folder)
    faces = data.classnames.index(FACES)
    every = photographs(folder, out)
    stream = demo_stream(["" if label == faces else path for path, label in zip(every, data.labels or (), strict=True)])
    wanted = set()
    for report, _ in run_streams(stream, Console(stderr=True)):
        wanted |= {report.names[image] for image in shown(report, ROW * 3 // 2, WRONG * 3 // 2)}
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        _add(tar, "CREDIT", f"{CREDIT}. https://creativecommons.org/licenses/by/4.0/\n".encode())
        for row, path in enumerate(every):
            if str(path) in wanted:
                _add(tar, f"{row:04d}.jpg", _small(read_image(path)))
    write_atomic(out, archive.getvalue())
    print(f"{out}: {len(wanted)} photographs, {out.stat().st_size / 1e3:.0f} kB", file=sys.stderr)


def _small(image: Image.Image) -> bytes:
    data = io.BytesIO()
    ImageOps.fit(image, (SIDE, SIDE), Image.Resampling.LANCZOS).save(data, "JPEG", quality=85, optimize=True)
    return data.getvalue()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

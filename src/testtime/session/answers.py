"""Where the rows of a run go: the form by the ending of --out, and Parquet, which cannot be appended to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from testtime import files
from testtime.errors import UNENCODABLE
from testtime.machine.interrupts import deferred_interrupts
from testtime.session.journal import COLUMNS, NAMES, check_columns, json_line
from testtime.types import InputError, MissingPart

PARQUET = ".parquet"
ENDINGS = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", PARQUET: "jsonl"}
STREAMS = ("csv", "tsv", "jsonl")  # what --format offers
PARTIAL = ".partial.jsonl"  # the rows of a Parquet file while its run goes on


def style_of(output: Path | None, style: str | None) -> str:
    """The form in which rows are written: by the ending of a file; to standard output or a pipe, `style` or CSV."""
    if style is not None and style not in STREAMS:
        raise InputError(f"Unknown --format '{style}'. Available: {', '.join(STREAMS)}.")
    if output is None or files.is_stream(output):
        return style or "csv"
    if style is not None:
        raise InputError(f"--format is for standard output; the ending of --out {output} says its form. Leave it out.")
    found = ENDINGS.get(output.suffix.lower())
    if found is None:
        raise InputError(f"--out {output}: its ending says its form, and must be one of {', '.join(ENDINGS)}.")
    if output.suffix.lower() == PARQUET and find_spec("pyarrow") is None:
        raise MissingPart(
            f"--out {output}: Parquet needs pyarrow; pip install 'testtime[datasets]', or use another ending, such as "
            ".csv."
        )
    return found


def partial_file(output: Path | None) -> Path | None:
    """Where the rows of a Parquet file are while its run goes on; None for other forms."""
    if output is None or output.suffix.lower() != PARQUET:
        return None
    return output.with_name(output.name + PARTIAL)


@contextmanager
def appendable(output: Path | None, resume: bool) -> Iterator[Path | None]:
    """The file to append rows to: `output` itself, or JSON lines beside a Parquet file, which become it at the end.

    They do so after an error or an interrupt too. A run that is killed leaves the JSON lines, and `resume` starts from
    them, or else from the rows of the Parquet file.
    """
    partial = partial_file(output)
    if output is None or partial is None:
        yield output
        return
    known = None
    if resume and output.is_file() and not partial.exists():
        known = _read_parquet(output)
        files.write_atomic(partial, known)
    try:
        yield partial
    finally:
        with deferred_interrupts():
            if partial.exists():
                if (rows := partial.read_bytes()) != known:
                    _write_parquet(output, rows)
                os.unlink(partial)


def _write_parquet(output: Path, rows: bytes) -> None:
    """Write JSON lines as Parquet; the end of a line that was cut off is left out."""
    import pyarrow
    from pyarrow import parquet

    kinds = dict.fromkeys(NAMES, pyarrow.string()) | {"index": pyarrow.int64()}
    kinds |= dict.fromkeys(("learned", "correct"), pyarrow.bool_())
    schema = pyarrow.schema([(name, kinds.get(name, pyarrow.float64())) for name in COLUMNS])
    lines = rows[: rows.rfind(b"\n") + 1].decode().split("\n")[:-1]
    found = [files.parse_json(line, output) for line in lines]
    for values in found:  # file names may not be UTF-8
        values.update({name: _encodable(values[name]) for name in NAMES})
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(found, schema=schema), sink)
    files.write_atomic(output, sink.getvalue().to_pybytes())


def _encodable(text: str | None) -> str | None:
    return None if text is None else text.encode("utf-8", UNENCODABLE).decode()


def _read_parquet(output: Path) -> bytes:
    """The rows of a Parquet file as the JSON lines that it was written from."""
    import pyarrow
    from pyarrow import parquet

    try:
        table: Any = parquet.read_table(output)
    except (OSError, pyarrow.ArrowException) as problem:
        raise InputError(f"{output} is not a Parquet file that can be read ({problem}); use another --out.") from None
    check_columns(table.column_names, output)
    return "".join(map(json_line, table.to_pylist())).encode()

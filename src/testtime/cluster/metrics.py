"""Metrics of several processes in one text, each sample with the name of its process."""

from __future__ import annotations

from collections.abc import Mapping


def merged(texts: Mapping[str, bytes]) -> bytes:
    """Prometheus' text format of several processes as one: families together, samples labelled with `process`.

    >>> one = b"# HELP a_total A.\\n# TYPE a_total counter\\na_total 1.0\\n"
    >>> print(merged({"x": one, "y": one.replace(b"1.0", b"2.0")}).decode(), end="")
    # HELP a_total A.
    # TYPE a_total counter
    a_total{process="x"} 1.0
    a_total{process="y"} 2.0
    """
    families: dict[str, tuple[list[str], list[str]]] = {}  # by name: what is said of it, and its samples
    for process, text in texts.items():
        said: list[str] = []
        samples: list[str] = []
        for line in text.decode().splitlines():
            if line.startswith("# HELP"):
                said, samples = families.setdefault(line.split()[2], ([], []))
                first = not said
            if not line.startswith("#"):
                samples.append(_labelled(line, process))
            elif first:
                said.append(line)
    return "".join(f"{line}\n" for said, samples in families.values() for line in said + samples).encode()


def _labelled(sample: str, process: str) -> str:
    name, brace, rest = sample.partition("{")
    if brace:
        return f'{name}{{process="{process}",{rest}'
    name, _, value = sample.partition(" ")
    return f'{name}{{process="{process}"}} {value}'

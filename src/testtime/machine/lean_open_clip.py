"""open_clip, imported without `transformers`, which few of its models need and which takes as long as all the rest."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, reload


@contextmanager
def _left_out(module: str) -> Iterator[None]:
    """While inside, a module that is not loaded yet cannot be imported."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]


with _left_out("transformers"):
    import open_clip as open_clip


def with_transformers() -> None:
    """Let open_clip build models whose text tower is one of `transformers`."""
    towers = import_module("open_clip.hf_model")
    if towers.transformers is None:
        import_module("open_clip.model").HFTextEncoder = reload(towers).HFTextEncoder  # type: ignore[attr-defined]

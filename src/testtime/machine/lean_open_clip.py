"""open_clip, imported without `transformers`, which few of its models need and which doubles the import time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, reload


@contextmanager
def _import_blocked(module: str) -> Iterator[None]:
    """Within the block, a module that is not loaded yet cannot be imported."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]


with _import_blocked("transformers"):
    import open_clip as open_clip


def with_transformers() -> None:
    """Let open_clip build models whose text tower comes from `transformers`."""
    towers = import_module("open_clip.hf_model")
    if towers.transformers is None:
        import_module("open_clip.model").HFTextEncoder = reload(towers).HFTextEncoder  # type: ignore[attr-defined]

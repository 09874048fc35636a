"""What tests share: the folders of stored traces and of real data, where they are there."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

SHARED = Path(__file__).parents[2] / "shared"

# the machine that runs these may be busy: a slow example is no failure, and the same examples come every time
settings.register_profile("testtime", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("testtime")


def _shared(name: str) -> Path:
    folder = SHARED / name
    if not folder.is_dir():
        pytest.skip(f"no folder {folder}")
    return folder


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of stored traces of the authors' released code."""
    return _shared("golden")


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real images and prompts."""
    return _shared("data")

"""testtime: zero-shot image classifiers that get better while they are in use.

Names are imported when first used, so that `import testtime` stays light and touches no network.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Waiting threads sleep instead of spinning: on a busy machine a spinning thread uses up its share of a core, and the
# thread it waits for gets none. Steps took up to 60 times as long. OpenMP reads this when its threads start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# On an Apple GPU, an operation that it lacks runs on the CPU instead of failing. Torch reads this when it is imported.
os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")

__version__ = "0.1.0"

_MODULES = {
    "Answers": "testtime.session.classify",
    "Features": "testtime.encoding.store",
    "FeatureError": "testtime.types",
    "ImageError": "testtime.types",
    "InputError": "testtime.types",
    "MissingPart": "testtime.types",
    "Prediction": "testtime.types",
    "Session": "testtime.session.session",
    "SettingError": "testtime.types",
    "StateError": "testtime.types",
    "Task": "testtime.types",
    "TesttimeError": "testtime.types",
    "UnknownName": "testtime.types",
    "build_task": "testtime.text.prompts",
    "classify": "testtime.session.classify",
    "folder": "testtime.images.reading",
    "load_encoder": "testtime.encoding.encoders",
    "make_method": "testtime.registry",
    "method_names": "testtime.registry",
    "save_features": "testtime.encoding.store",
    "sweep": "testtime.steppers.sweep",
    "toy": "testtime.synthetic",
}

__all__ = sorted([*_MODULES, "__version__"])

if TYPE_CHECKING:
    from testtime.encoding.encoders import load_encoder
    from testtime.encoding.store import Features, save_features
    from testtime.images.reading import folder
    from testtime.registry import make_method, method_names
    from testtime.session.classify import Answers, classify
    from testtime.session.session import Session
    from testtime.steppers.sweep import sweep
    from testtime.synthetic import toy
    from testtime.text.prompts import build_task
    from testtime.types import (
        FeatureError,
        ImageError,
        InputError,
        MissingPart,
        Prediction,
        SettingError,
        StateError,
        Task,
        TesttimeError,
        UnknownName,
    )


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'testtime' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__

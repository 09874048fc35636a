"""Functions through torch's compiler, where there is one that works."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch


@cache
def compiled(function: Callable[..., Any], fallback: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled at its first call; `fallback` where that fails, for want of a C++ compiler, say."""
    fast = torch.compile(function, dynamic=False)
    chosen = fast

    @wraps(function)
    def call(*arguments: Any) -> Any:
        nonlocal chosen
        if chosen is fallback:
            return fallback(*arguments)
        try:
            return chosen(*arguments)
        except Exception as problem:  # the compiler's own, of many kinds; a fault of ours shows in the fallback too
            warnings.warn(f"Not compiled, so slower: {str(problem).splitlines()[0]}", RuntimeWarning, stacklevel=2)
            chosen = fallback
            return fallback(*arguments)

    return call

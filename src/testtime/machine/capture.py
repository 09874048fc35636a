"""Capturing what a function launches on a GPU as a graph, to replay it in one call."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

WARM_UPS = 2  # calls before a capture: libraries allocate their workspaces in the first ones

MAX_QUOTED = 80  # characters quoted from another library's message

# parts of the long messages of torch and CUDA, and their meaning
MEANINGS = {
    "OutOfMemoryError": "the GPU's memory is full",
    "capturing": "it reads a value back from the GPU, or waits for it",
    "StreamCapture": "it reads a value back from the GPU, or waits for it",
    "data-dependent": "what it does depends on a tensor's values",
}

_warned: set[str] = set()


_capture_lock = threading.Lock()


def capture(
    launch: Callable[[], None], warm_up: Callable[[], None] | None = None, priority: int = 0, exact: bool = False
) -> torch.cuda.CUDAGraph:
    """The kernels that `launch` launches, as a graph. `warm_up`, or `launch` itself, runs first and must be harmless.

    Kernels of `priority` -1 run before waiting ones of priority 0. With `exact`, products are in full float32.
    """
    stream = torch.cuda.Stream(priority=priority)
    with _capture_lock, exact_products() if exact else nullcontext():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                (warm_up or launch)()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: threads that decode meanwhile may allocate without aborting the capture
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            launch()
    return graph


@contextmanager
def exact_products() -> Iterator[None]:
    """Within the block, float32 products are computed in full precision, with TensorFloat-32 off."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # it advises the setting we avoid
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def warn_once(message: str) -> None:
    """Warn, unless the same message was already shown in this process."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def reason(error: BaseException) -> str:
    """Why something could not be captured, in one short line for a warning."""
    name, text = type(error).__name__, str(error).strip()
    for part, meaning in MEANINGS.items():
        if part in name or part in text:
            return meaning
    first = text.partition("\n")[0].strip()
    return f"{name}: {first[:MAX_QUOTED].rstrip()}{'...' * (len(first) > MAX_QUOTED)}" if first else name

"""Capturing what functions launch on a GPU, so that it is launched again in one call."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

WARM_UPS = 2  # calls before a capture: libraries allocate their workspaces in the first ones

LONGEST = 80  # letters of somebody else's message in ours

# what torch and CUDA say, in paragraphs, and what it comes to
MEANINGS = {
    "OutOfMemoryError": "the GPU's memory is full",
    "capturing": "it reads a value back from the GPU, or waits for it",
    "StreamCapture": "it reads a value back from the GPU, or waits for it",
    "data-dependent": "what it does depends on a tensor's values",
}

_said: set[str] = set()


_one_at_a_time = threading.Lock()


def capture(
    launch: Callable[[], None], warm_up: Callable[[], None] | None = None, priority: int = 0, exact: bool = False
) -> torch.cuda.CUDAGraph:
    """What `launch` puts on the GPU, as a graph. `warm_up`, or it itself, runs first, so it must do no harm.

    Kernels of `priority` -1 go before those of 0 that wait for a processor. With `exact`, float32 products are that.
    """
    stream = torch.cuda.Stream(priority=priority)
    with _one_at_a_time, exact_products() if exact else nullcontext():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                (warm_up or launch)()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: threads that decode meanwhile may allocate without ending the capture
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            launch()
    return graph


@contextmanager
def exact_products() -> Iterator[None]:
    """While inside, float32 products are float32 throughout, TensorFloat-32 being off; then all is as it was."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # its advice is what we refuse
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def warn_once(message: str) -> None:
    """Warn, unless the same was said before in this process."""
    if message not in _said:
        _said.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def reason(error: BaseException) -> str:
    """Why something could not be captured, in a few words of one line, for a warning."""
    name, text = type(error).__name__, str(error).strip()
    for said, meaning in MEANINGS.items():
        if said in name or said in text:
            return meaning
    first = text.partition("\n")[0].strip()
    return f"{name}: {first[:LONGEST].rstrip()}{'...' * (len(first) > LONGEST)}" if first else name

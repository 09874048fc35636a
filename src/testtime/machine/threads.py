"""Threads of our own for work that is done side by side, one core each."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch


@cache
def workers(count: int, flush: bool = False) -> ThreadPoolExecutor:
    """`count` threads that stay, in each of which torch keeps to one core, and with `flush` takes denormals for zero.

    Pieces of work that are one core's each give the same numbers however many cores there are, and wait for nobody:
    beside a busy neighbour they take their share of the cores, where threads that share a product wait for the slowest.
    """
    before, ready = torch.get_num_threads(), threading.Barrier(count + 1)
    pool = ThreadPoolExecutor(count, "testtime", initializer=_alone, initargs=(flush,))
    for _ in range(count):
        pool.submit(ready.wait)
    ready.wait()
    torch.set_num_threads(before)  # what a thread is told, those that start later hear too
    return pool


def _alone(flush: bool) -> None:
    torch.get_num_threads()  # which takes over the number that others were told last, once and for good
    torch.set_num_threads(1)
    torch.set_flush_denormal(flush)

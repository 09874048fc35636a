"""A pool of threads for parallel tasks, one core each."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch


@cache
def workers(count: int, flush: bool = False) -> ThreadPoolExecutor:
    """`count` persistent threads in which torch uses one core each, and with `flush` flushes denormals to zero.

    Single-core tasks give the same numbers on any number of cores, and need not wait for one another: on a busy machine
    they get their share of the cores, while threads that share a product wait for the slowest.
    """
    before, ready = torch.get_num_threads(), threading.Barrier(count + 1)
    pool = ThreadPoolExecutor(count, "testtime", initializer=_use_one_core, initargs=(flush,))
    for _ in range(count):
        pool.submit(ready.wait)
    ready.wait()
    torch.set_num_threads(before)  # set_num_threads in a thread also affects threads that start later
    return pool


def _use_one_core(flush: bool) -> None:
    torch.get_num_threads()  # adopts the number set last in any thread, once; later calls do not change it
    torch.set_num_threads(1)
    torch.set_flush_denormal(flush)

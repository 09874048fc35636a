from __future__ import annotations

import subprocess
import sys

import testtime as tt

PROBE = """
import socket, sys, time
def refuse(*arguments, **settings):
    raise AssertionError("touched the network")
socket.socket.connect = refuse
socket.create_connection = refuse
import torch
start = time.perf_counter()
import testtime
from testtime import Session, Task, make_method, toy
make_method("dpe")
print(time.perf_counter() - start)
heavy = {"open_clip", "transformers", "timm", "torchvision", "sklearn", "PIL"} & set(sys.modules)
print(sorted(heavy))
"""


def test_importing_is_light_and_touches_no_network() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    seconds, heavy = done.stdout.splitlines()
    assert float(seconds) < 2.0
    assert heavy == "[]"


def test_every_public_name_is_there_and_the_list_is_sorted() -> None:
    assert tt.__all__ == sorted(tt.__all__)
    for name in tt.__all__:
        assert getattr(tt, name) is not None
    assert set(tt.__all__) <= set(dir(tt))


def test_a_missing_name_is_an_attribute_error() -> None:
    assert not hasattr(tt, "nothing")

"""Start `testtime eval`, kill it at random moments, start it again; the files must come out the same every time.

Run as a process of its own: it imports once and forks, so that a kill costs no import.
    python kill_eval.py DATA WORK KILLS
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

import testtime.encoding.encoders.tiny
import testtime.experiments.scores  # imported before forking, as are the next
import testtime.methods.dpe
from testtime.cli.app import main
from testtime.steppers.sweep import sweep


def warm_up() -> None:
    """Do once, before forking, what every child would do again: make the encoder, compile the kernels."""
    torch.set_num_threads(1)
    encoder = testtime.encoding.encoders.tiny.tiny()
    testtime.encoding.encoders.tiny.tiny = lambda *given: encoder  # type: ignore[assignment]
    task, stream, _ = testtime.toy()
    for method in (testtime.methods.dpe.DPE(), testtime.methods.dpe.DPE.paper()):
        sweep(task, [method], [stream[:2]])


def start(data: Path, out: Path) -> int:
    """A child that runs the evaluation."""
    child = os.fork()
    if child:
        return child
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    code = 0
    try:
        main(["eval", str(data), "--encoder", "tiny", "--methods", "zeroshot,tda,dpe,dpe:paper", "--seeds", "1,2",
              "--views", "3", "--shard", "3", "--out", str(out)])  # fmt: skip
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        os._exit(code)


def content(out: Path) -> dict[str, bytes]:
    """All files but timings and what a killed write left aside."""
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file() and "timings" not in path.parts and not path.name.startswith(".")
    }


def run(data: Path, work: Path, kills: int) -> None:
    begin = time.monotonic()
    code = os.waitstatus_to_exitcode(os.waitpid(start(data, work / "whole"), 0)[1])
    assert code == 0, f"the uninterrupted run ended with {code}"
    whole, length = content(work / "whole"), time.monotonic() - begin
    assert any(name.startswith("cells") for name in whole) and "results.json" in whole
    chance = random.Random(0)
    done, rounds = 0, 0
    while done < kills:
        rounds += 1
        out = work / f"round{rounds}"
        while True:
            child = start(data, out)
            if done < kills:
                time.sleep(chance.uniform(0, 0.6 * length))
                os.kill(child, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code == 0:
                break
            assert code == -signal.SIGKILL, f"a resumed run ended with {code}"
            done += 1
        found = content(out)
        differ = [name for name in found.keys() | whole.keys() if found.get(name) != whole.get(name)]
        assert not differ, f"round {rounds} differs in {differ}"
    print(f"killed {done} times in {rounds} rounds")


if __name__ == "__main__":
    warm_up()
    run(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))

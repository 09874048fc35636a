from __future__ import annotations

import subprocess
import sys

PROBE = """
import torch
from testtime.machine.memory import Peak
before = torch.ones(100_000_000)
del before  # an earlier and higher peak
with Peak() as peak:
    block = torch.ones(50_000_000)
with Peak() as calm:
    pass
print(round(peak.megabytes, -2), calm.megabytes < 50)
"""


def test_a_peak_counts_what_its_block_took_and_not_what_came_before() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["200.0", "True"]

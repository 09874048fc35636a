"""Peak memory of a block of code."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Peak:
    """Peak memory within a `with` block, in megabytes above what was in use at its start.

    On a GPU, memory allocated by torch; otherwise the resident memory of this process, whose high-water mark can be
    reset on Linux. On other systems the mark of the whole process is used, and a later block may report 0.

        with Peak() as peak:
            block = torch.ones(50_000_000)
        print(peak.megabytes)  # about 200
    """

    megabytes = 0.0

    def __enter__(self) -> Peak:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self._start = torch.cuda.memory_allocated() / 1e6
            return self
        try:
            RESET.write_text("5")  # sets the high-water mark to what is resident now
        except OSError:
            pass
        self._start = _high_water()
        return self

    def __exit__(self, *problem: object) -> None:
        now = torch.cuda.max_memory_allocated() / 1e6 if torch.cuda.is_available() else _high_water()
        self.megabytes = max(0.0, now - self._start)


def _high_water() -> float:
    try:
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return 1.024 * int(line.split()[1]) / 1000  # in kibibytes
    except (OSError, StopIteration):
        mark = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return mark / 1e6 if sys.platform == "darwin" else mark / 1e3

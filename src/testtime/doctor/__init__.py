"""`testtime doctor`: the machine, the images, the classes and the encoder, judged before a run or after a bad one."""

from __future__ import annotations

from testtime.doctor.finding import Finding
from testtime.doctor.judge import doctor

__all__ = ["Finding", "doctor"]

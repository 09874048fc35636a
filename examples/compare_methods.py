"""Compare methods, one of them your own, over photographs whose features come with the package.

    python examples/compare_methods.py --out comparison.html

Features do not depend on the method, so nothing is encoded here; `testtime encode` makes such a file of your images.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

import testtime as tt
from testtime.methods.base import Base
from testtime.ops import unit
from testtime.report.conditions import conditions
from testtime.report.gather import stream_report
from testtime.report.page import html


class State(NamedTuple):
    text: Tensor  # (C, D) prototypes so far


@dataclass(frozen=True)
class Drift(Base):
    """A method of our own: the prototype of the class that is answered moves a little towards the image."""

    name: ClassVar[str] = "drift"
    rate: float = 0.05  # how far

    def init(self, task: tt.Task) -> State:
        return State(task.text)

    def step(self, task: tt.Task, state: State, views: Tensor) -> tuple[Tensor, State]:
        logits = task.scale * (state.text @ views[0])
        label = logits.argmax()
        moved = unit(torch.lerp(state.text[label], views[0], self.rate))
        return logits, State(state.text.index_copy(0, label[None], moved[None]))  # the old state stays as it was


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--features", type=Path, default=files("testtime") / "data" / "caltech101.safetensors")
parser.add_argument("--images", type=int, default=600)
parser.add_argument("--classes", type=int, default=20, help="the most frequent ones")
parser.add_argument("--out", type=Path, default=Path("comparison.html"))
options = parser.parse_args()

store = tt.Features(options.features)
print(store)
common = store.labels.bincount().topk(options.classes).indices.sort().values
names = tuple(store.classnames[number] for number in common.tolist())
task = tt.Task(unit(store.text[common].float()), names, store.scale, store.metadata.get("encoder", ""))

# a stream of these classes in random order; labels only score
chosen = torch.isin(store.labels, common).nonzero()[:, 0]
order = chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(1))][: options.images]
stream = torch.cat(list(store.chunks(order)))
labels = torch.searchsorted(common, store.labels[order])

methods = ["tda", "dpe", tt.make_method("dpe", settings={"alpha": 4}), Drift()]
report = stream_report(task, stream, labels, methods, place=False)  # a notebook draws it
for curve in report.curves:
    print(f"{curve.name:<12} {curve.accuracy:6.1%}   {curve.note}")
options.out.write_text(html([report], conditions(task), "Methods compared"), encoding="utf-8")
print(f"The page is in {options.out}.")

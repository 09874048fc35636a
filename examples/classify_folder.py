"""Classify a folder of photographs, print what adaptation changed, and write all answers as a CSV.

    python examples/classify_folder.py photos/ cat dog fox --out answers.csv

Without class names, the names of the folder's own subfolders are used.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import testtime as tt

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("images", help="a folder, a quoted pattern, a list or a CSV")
parser.add_argument("classes", nargs="*", help="class names; by default the data's own")
parser.add_argument("--encoder", default="offline")
parser.add_argument("--out", type=Path, default=Path("answers.csv"))
options = parser.parse_args()

# pandas=False gives the same rows with and without pandas; leave it out for a DataFrame
answers = tt.classify(options.images, options.classes or None, encoder=options.encoder, pandas=False, progress=True)

with open(options.out, "w", newline="") as file:
    writer = csv.DictWriter(file, answers.columns)
    writer.writeheader()
    writer.writerows(answers)

changed = [row for row in answers if row["label"] != row["zero_shot"]]
for row in changed:
    print(f"{row['image']}: {row['zero_shot']} -> {row['label']} ({row['confidence']:.0%})")
print(f"{len(answers)} images, {sum(answers['learned'])} learned from, {len(changed)} answers changed")

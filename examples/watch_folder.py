"""Watch a folder, answer each new photograph as it arrives, and remember what was learned.

    python examples/watch_folder.py inbox/ cat dog fox

Stop it with Ctrl-C and start it again: it goes on from the saved state, and answers no photograph twice. The same loop
fits a camera: `session.step` also takes the frame itself, a NumPy array (H, W, 3) uint8 in RGB.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import testtime as tt
from testtime.images.reading import IMAGE_SUFFIXES

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder", type=Path)
parser.add_argument("classes", nargs="+")
parser.add_argument("--encoder", default="offline")
parser.add_argument("--state", type=Path, default=Path("watch.safetensors"), help="what was learned")
parser.add_argument("--log", type=Path, default=Path("watch.tsv"), help="one line for each answer")
parser.add_argument("--once", action="store_true", help="stop when no photograph is new")
options = parser.parse_args()

encoder = tt.load_encoder(options.encoder, device="auto")
task = tt.build_task(encoder, options.classes)
if options.state.exists():
    session = tt.Session.load(options.state, task, encoder=encoder)
else:
    session = tt.Session(task, "dpe", encoder=encoder)
print(session)

with open(options.log, "a+") as log:
    log.seek(0)
    done = {line.partition("\t")[0] for line in log}
    try:
        while True:
            found = sorted(path for path in options.folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
            new = [path for path in found if path.name not in done]
            for path in new:
                done.add(path.name)
                try:
                    prediction = session.step(path)  # predicts, then learns
                except tt.ImageError as error:  # the session is as it was before
                    print(f"skipped {error}")
                    continue
                log.write(f"{path.name}\t{prediction.label}\t{prediction.confidence:.4f}\n")
                log.flush()
                print(f"{path.name}: {prediction}")
            if new:
                session.save(options.state)
            if options.once and not new:
                break
            time.sleep(0 if new else 1)
    except KeyboardInterrupt:
        session.save(options.state)
print(session)

"""`testtime replay`: from features."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from testtime import __version__
from testtime.commands.options import (
    Device,
    Limit,
    MethodName,
    Preset,
    Reference,
    Seed,
    Settings,
    Shuffle,
    method_of,
)
from testtime.devices import find_device
from testtime.terminal import err, out, percent, progress

app = typer.Typer()


@app.command(epilog="Example:  testtime replay photos.safetensors --method dpe --set alpha=4 --json")
def replay(
    file: Annotated[Path, typer.Argument(help="A feature file, or a folder of shards.")],
    method: MethodName = "dpe",
    settings: Settings = None,
    preset: Preset = None,
    recorded: Annotated[
        bool, typer.Option("--recorded", help="Take the settings that the file's metadata gives under 'hp.'.")
    ] = False,
    oracle: Annotated[
        bool,
        typer.Option("--oracle", help="dmn only: choose its fusion weight with the test labels, as was published."),
    ] = False,
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or float64.")] = "float32",
    device: Device = "cpu",
    limit: Limit = None,
    seed: Seed = 0,
    shuffle: Shuffle = False,
    reference: Reference = False,
    output: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Where to write logits [N,C] and pred [N] (.safetensors)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Run a method over a feature file; no encoder, no images."""
    from testtime import oracle as oracles
    from testtime import replay as replays
    from testtime.features import Features
    from testtime.files import write_tensors

    store = Features(file)
    chosen = replays.recorded_settings(store, method) if recorded else {}
    made = method_of(method, preset, settings, chosen)
    with progress("images", min(len(store), limit or len(store)), quiet=as_json) as advance:
        result = (oracles.replay if oracle else replays.replay)(
            store,
            made,
            dtype=dtype,
            device=find_device(device),
            limit=limit,
            shuffle=shuffle,
            seed=seed,
            reference=reference,
            progress=advance,
        )
    found = result.summary()
    if output is not None:
        facts = {"method": found["method"]} | {
            key: json.dumps(found[key])
            for key in ("settings", "oracle", "weight", "accuracy_by_weight")
            if key in found
        }
        write_tensors(output, {"logits": result.logits, "pred": result.predictions, "order": result.order}, facts)
    summary = found | {"file": str(file), "dtype": dtype, "device": device, "version": __version__}
    if as_json:
        print(json.dumps(summary))
        return
    per_image = 1000 * result.seconds / summary["n"]
    err.print(f"{summary['n']} images of {store.task().classes} classes, {per_image:.2f} ms each in the method.")
    table = Table("", "accuracy", box=None, pad_edge=False)
    table.add_row("zero-shot", percent(summary["zero_shot_accuracy"]))
    table.add_row(f"[bold]{summary['method']}[/]", f"[bold]{percent(summary['accuracy'])}[/]")
    out.print(table)

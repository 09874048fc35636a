"""Write the generated pages of the documentation; `--check` only lists the stale ones.

    python scripts/make_docs.py [--check]

Some pages are generated completely. Others are written by hand and have generated parts, each between the lines
`<!-- generated: NAME -->` and `<!-- end of generated -->`. The sources are tables in the code and
`benchmarks/results/*.json`, which the scripts in `benchmarks/` write.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from pages import architecture, benchmarks, board, cluster, commands, differences, experiments, methods, speed

DOCS = Path(__file__).parents[1] / "docs"

WHOLE: dict[str, Callable[[], str]] = {
    "commands.md": commands.page,
    "methods.md": methods.page,
}
PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "architecture.md": {"subpackages": architecture.diagram},
    "cluster.md": {"plan": cluster.plan, "gpus": cluster.gpus},
    "data.md": {"benchmarks": benchmarks.table, "layouts": benchmarks.layouts},
    "dpe.md": {"differences": differences.part},
    "experiments.md": {
        "experiments": experiments.experiments,
        "systems": experiments.systems,
        "recipes": experiments.settings,
        "published": experiments.published,
    },
    "leaderboard.md": {"ranks": board.ranks},
    "speed.md": {"cpu": speed.cpu, "gpu": speed.gpu, "measured": speed.systems},
}
REGION = re.compile(r"(<!-- generated: (\w+) -->\n).*?(\n<!-- end of generated -->)", re.DOTALL)


def filled(text: str, parts: dict[str, Callable[[], str]], page: str) -> str:
    """A page with its generated parts up to date; an error unless the page has exactly one marker for each part."""
    found = [name for _, name, _ in REGION.findall(text)]
    if sorted(found) != sorted(parts):
        sys.exit(f"{page} has markers for {found}, but the generated parts are {sorted(parts)}.")
    return REGION.sub(lambda match: f"{match[1]}\n{parts[match[2]]()}{match[3]}", text)


def generated() -> dict[Path, str]:
    """Every page with generated content, up to date."""
    whole = {DOCS / name: page() for name, page in WHOLE.items()}
    return whole | {DOCS / name: filled((DOCS / name).read_text(), parts, name) for name, parts in PARTS.items()}


def main() -> None:
    stale = {path: text for path, text in generated().items() if not path.exists() or path.read_text() != text}
    if "--check" in sys.argv:
        if stale:
            names = ", ".join(f"docs/{path.name}" for path in stale)
            sys.exit(f"Stale: {names}; run python scripts/make_docs.py")
        return
    for path, text in stale.items():
        path.write_text(text)


if __name__ == "__main__":
    main()

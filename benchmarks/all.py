"""Run every benchmark, keep the figures in `performance.json`, and rebuild the page's tables and plot from them.

Run `make bench` on an otherwise idle machine; `--report` only rebuilds the tables and the plot.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import (
    gather,
    goodput,
    growth,
    incremental,
    ledger,
    order,
    overhead,
    parts,
    report,
    resume,
    samplers,
    save,
    size,
    start,
    streaming,
)

DOCS = Path(__file__).parent.parent / "docs"
_RUN = {
    "overhead": overhead.main,
    "ranks": lambda arguments: overhead.main(["--ranks", "2", *arguments]),
    "gather": gather.main,
    "ledger": ledger.main,
    "parts": parts.main,
    "resume": lambda arguments: resume.main(["--torchdata", *arguments]),
    "start": start.main,
    "samplers": samplers.main,
    "save": save.main,
    "incremental": incremental.main,
    "size": size.main,
    "growth": growth.main,
    "goodput": goodput.main,
    "streaming": streaming.main,
    "order": order.main,
}


def measure(directory: Path, *, only: list[str], quick: bool) -> None:
    """Run the benchmarks and merge their figures into the existing ones."""
    kept = directory / "performance.json"
    figures = json.loads(kept.read_text()) if kept.exists() else {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in only:
            print(f"{name}:", flush=True)
            output = Path(temporary) / f"{name}.json"
            _RUN[name](["--output", str(output), *(["--quick"] if quick else [])])
            figures[name] = json.loads(output.read_text())
            figures.pop("note", None)  # a note about figures that were merged by hand
            kept.write_text(json.dumps(figures, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> None:
    """Measure, then rebuild the page and the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=_RUN, help="only this one; may be given several times")
    parser.add_argument("--quick", action="store_true", help="short runs, to see that it runs: figures mean nothing")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument(
        "--directory", type=Path, default=DOCS, help="where page, plot and figures are (default: docs/)"
    )
    options = parser.parse_args(arguments)
    if not options.report:
        measure(options.directory, only=options.only or list(_RUN), quick=options.quick)
    figures = json.loads((options.directory / "performance.json").read_text())
    page = options.directory / "performance.md"
    page.write_text(report.filled(page.read_text(), figures))
    report.draw(options.directory / "performance.svg", figures)


if __name__ == "__main__":
    main()

"""How much memory a long run takes: the growth of the process between its tenth and its last step.

Each case runs in its own process, with and without the callback, and saves after each hundred steps.

Run `python benchmarks/growth.py --help` from the repository.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.ranks import in_ranks
from benchmarks.runs import BareRandomDataset, OwnSampler, Stream, be_quiet, fit, machine
from lightning_faulttolerant import FaultTolerance


def _with_own_sampler(num: int) -> DataLoader[Any]:
    dataset = BareRandomDataset(32, num)
    return DataLoader(dataset, sampler=OwnSampler(dataset))


CASES: dict[str, Callable[[int], DataLoader[Any]]] = {
    "no workers": lambda num: DataLoader(BareRandomDataset(32, num)),
    "shuffled, 2 workers": lambda num: DataLoader(BareRandomDataset(32, num), shuffle=True, num_workers=2),
    "a sampler of your own": lambda num: DataLoader(
        BareRandomDataset(32, num), sampler=OwnSampler(BareRandomDataset(32, num))
    ),
    "an iterable data set": lambda num: DataLoader(Stream(32, num)),
}
_STEPS, _STEPS_PER_SAVE = 20_000, 100


class MemoryAt(Callback):
    """Reads the resident memory of this process, in bytes, after some of its steps."""

    def __init__(self, steps: tuple[int, ...]) -> None:
        self.steps = steps
        self.found: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 in self.steps:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.found.append(pages * resource.getpagesize())


def growth(name: str, num_steps: int, is_ours: bool, directory: Path) -> int:
    """Return the bytes that a process grows between the first tenth of its steps and the last step."""
    memory = MemoryAt((num_steps // 10, num_steps))
    ours = [FaultTolerance(directory, every_n_train_steps=_STEPS_PER_SAVE)] if is_ours else []
    fit(BoringModel(), CASES[name](num_steps), [memory, *ours], directory)
    first, last = memory.found
    return last - first


def main(arguments: list[str] | None = None) -> None:
    """Measure each case with and without the callback, and print the growth in megabytes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=CASES, help="only this one; may be given several times")
    parser.add_argument("--steps", type=int, default=_STEPS, help="steps of each run")
    parser.add_argument("--quick", action="store_true", help="short runs, to see that it runs: figures mean nothing")
    parser.add_argument("--output", type=Path, help="file for the figures, as JSON")
    options = parser.parse_args(arguments)
    be_quiet()
    num_steps = 400 if options.quick else options.steps
    cases = {}
    for name in options.case or CASES:
        with tempfile.TemporaryDirectory() as directory:
            found = {
                kind: in_ranks(growth, 1, name, num_steps, kind == "ours", Path(directory, kind), limit_seconds=3600)
                for kind in ("without", "ours")
            }
        cases[name] = found
        print(f"{name}: without {found['without'] / 1e6:.1f} MB, with {found['ours'] / 1e6:.1f} MB", flush=True)
    if options.output:
        figures = {"machine": machine(), "steps": num_steps, "saves": num_steps // _STEPS_PER_SAVE, "cases": cases}
        options.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.pop("PL_FAULT_TOLERANT_TRAINING", None)
    main()

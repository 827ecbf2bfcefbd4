"""The cost of a ledger per step: fits with and without a ledger, both with the callback, paired in one process.

Run `python benchmarks/ledger.py --help` from the repository.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.overhead import lower_half, ratio
from benchmarks.runs import AugmentedImages, BareRandomDataset, ConvNet, TimedModel, be_quiet, fit, machine
from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.records.ledger import LEDGER_VARIABLE

_WARM_UP_STEPS = 10


class LargeImages(Dataset[tuple[Tensor, int]]):
    """Images of 224x224 that cost nothing to load. A batch of 64 is 38.5 MB, all of which is read for its digest."""

    def __init__(self, length: int) -> None:
        self.image = torch.rand(3, 224, 224)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.image, index % 10


class LargeConvNet(ConvNet):
    """The same small net on images of 224x224, pooled to the original size first: its step is short for its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.AvgPool2d(7), *self.layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One kind of training."""

    model: Callable[[], Any]
    dataset: Callable[[int], Dataset[Any]]
    batch_size: int = 1
    num_workers: int = 0
    steps_share: float = 1.0

    def loader(self, steps: int) -> DataLoader[Any]:
        """Return a loader of `steps` batches."""
        dataset = self.dataset(steps * self.batch_size)
        return DataLoader(dataset, batch_size=self.batch_size, num_workers=self.num_workers)


CASES = {
    "BoringModel": Case(model=TimedModel, dataset=partial(BareRandomDataset, 32)),
    "BoringModel, 2 workers": Case(model=TimedModel, dataset=partial(BareRandomDataset, 32), num_workers=2),
    "conv net, 64 x 3 x 32 x 32": Case(
        model=ConvNet, dataset=AugmentedImages, batch_size=64, num_workers=2, steps_share=0.2
    ),
    "conv net, 64 x 3 x 224 x 224": Case(model=LargeConvNet, dataset=LargeImages, batch_size=64, steps_share=0.1),
}


def step_times(case: Case, *, steps: int, directory: Path, has_ledger: bool) -> Tensor:
    """Fit once; return the seconds of each step except the first few."""
    torch.manual_seed(0)
    loader, model = case.loader(steps), case.model()
    gc.collect()
    os.environ[LEDGER_VARIABLE] = str(directory / "ledger.jsonl") if has_ledger else ""
    fit(model, loader, [FaultTolerance(directory / "saves")], directory)
    return torch.tensor(model.began[_WARM_UP_STEPS:], dtype=torch.float64).diff()


def measure(case: Case, *, rounds: int, steps: int) -> dict[str, Any]:
    """Return the time of a step without a ledger, and the ratio of a step with a ledger to it."""
    steps = max(_WARM_UP_STEPS + 10, int(steps * case.steps_share))
    found: dict[bool, list[Tensor]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(rounds):
            for has_ledger in random.sample([True, False], 2):
                directory = Path(temporary) / f"{number}-{has_ledger}"
                found[has_ledger].append(step_times(case, steps=steps, directory=directory, has_ledger=has_ledger))
    without, with_ledger = (lower_half(torch.cat(found[has_ledger])) for has_ledger in (False, True))
    return {
        "step_us": without * 1e6,
        "added_us": (with_ledger - without) * 1e6,
        "steps": steps,
        "rounds": rounds,
        **ratio(found[True], found[False], lower_half),
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure the requested cases, print a table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=CASES, help="only this one; may be given several times")
    parser.add_argument("--rounds", type=int, default=10, help="fits of each kind (default: 10)")
    parser.add_argument("--steps", type=int, default=500, help="steps of a fit (default: 500)")
    parser.add_argument(
        "--quick", action="store_true", help="a few short fits, to see that it runs: figures mean nothing"
    )
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.steps = 1, 30
    be_quiet()
    torch.set_num_threads(1)
    results = {}
    print(f"{'case':32} {'a step':>10} {'added':>10} {'with a ledger':>14} {'(90 %)':>15}")
    for name in options.case or CASES:
        found = results[name] = measure(CASES[name], rounds=options.rounds, steps=options.steps)
        print(
            f"{name:32} {found['step_us']:7.0f} us {found['added_us']:7.0f} us   x{found['ratio']:10.3f}"
            f"   ({found['low']:.3f}-{found['high']:.3f})",
            flush=True,
        )
    if options.output is not None:
        options.output.write_text(json.dumps({"machine": machine(), "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What the callback costs a step: fits with it, without it, and with an empty callback, paired in one process.

Run `python benchmarks/overhead.py --help` from the repository.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.runs import (
    AugmentedImages,
    BareRandomDataset,
    ConvNet,
    MetricsModel,
    TimedModel,
    be_quiet,
    fit,
    machine,
)
from lightning_faulttolerant import FaultTolerance

VARIANTS: dict[str, Callable[[], list[Callback]]] = {
    "without": list,
    "empty": lambda: [Callback()],
    "with": lambda: [FaultTolerance()],
}
_WARM_UP_STEPS = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One kind of training."""

    model: Callable[[], LightningModule]
    num_workers: int
    target: float
    shuffle: bool = False
    images: bool = False
    steps_share: float = 1.0

    def loader(self, steps: int) -> DataLoader[Any]:
        """Return a loader of so many batches."""
        batch_size = 64 if self.images else 1
        dataset = AugmentedImages(steps * batch_size) if self.images else BareRandomDataset(32, steps * batch_size)
        return DataLoader(dataset, batch_size=batch_size, shuffle=self.shuffle, num_workers=self.num_workers)


CASES = {
    "plain": Case(model=TimedModel, num_workers=0, target=1.05),
    "plain, 2 workers": Case(model=TimedModel, num_workers=2, target=1.05),
    "shuffled": Case(model=TimedModel, num_workers=0, target=1.05, shuffle=True),
    "shuffled, 2 workers": Case(model=TimedModel, num_workers=2, target=1.05, shuffle=True),
    "metrics": Case(model=MetricsModel, num_workers=0, target=1.05),
    "metrics, 2 workers": Case(model=MetricsModel, num_workers=2, target=1.05),
    "conv net, 2 workers": Case(model=ConvNet, num_workers=2, target=1.01, shuffle=True, images=True, steps_share=0.2),
}


def step_times(case: Case, variant: str, steps: int, directory: Path) -> list[float]:
    """Fit once; return the seconds of each step but the first few, in which everything is set up."""
    torch.manual_seed(0)
    loader, model = case.loader(steps), case.model()
    gc.collect()
    with tempfile.TemporaryDirectory(dir=directory) as root:
        fit(model, loader, VARIANTS[variant](), Path(root))
    began: list[float] = model.began  # type: ignore[assignment]
    return [after - before for before, after in zip(began[_WARM_UP_STEPS:], began[_WARM_UP_STEPS + 1 :], strict=False)]


def lower_half(times: list[float]) -> float:
    """Return the mean of the shorter half of the steps: what others do on the machine only ever makes steps longer."""
    return statistics.fmean(sorted(times)[: max(1, len(times) // 2)])


def measure(case: Case, *, rounds: int, steps: int, directory: Path) -> dict[str, Any]:
    """Return the step times of each variant, and the ratios to the fit without, round by round."""
    steps = max(_WARM_UP_STEPS + 10, int(steps * case.steps_share))
    found: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    order = list(VARIANTS)
    for _ in range(rounds):
        random.shuffle(order)  # so that no variant always follows the same one
        for variant in order:
            times = step_times(case, variant, steps, directory)
            found[variant].append(
                {"lower half": lower_half(times), "median": statistics.median(times), "mean": statistics.fmean(times)}
            )
    ratios = {
        f"{variant}, {what}": _ratios([one[what] for one in found[variant]], [one[what] for one in found["without"]])
        for variant in ("empty", "with")
        for what in ("lower half", "median", "mean")
    }
    base = statistics.median(one["lower half"] for one in found["without"])
    return {"step_us": base * 1e6, "steps": steps, "rounds": rounds, "target": case.target, "ratios": ratios}


def _ratios(values: list[float], bases: list[float]) -> dict[str, float]:
    ratios = sorted(value / base for value, base in zip(values, bases, strict=True))
    quarter = len(ratios) // 4
    return {"median": statistics.median(ratios), "low": ratios[quarter], "high": ratios[len(ratios) - 1 - quarter]}


def main(arguments: list[str] | None = None) -> None:
    """Measure the cases asked for, print a table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=CASES, help="only this one; may be given several times")
    parser.add_argument("--rounds", type=int, default=15, help="fits of each variant (default: 15)")
    parser.add_argument("--steps", type=int, default=1500, help="steps of a fit (default: 1500)")
    parser.add_argument(
        "--quick", action="store_true", help="a few short fits, to see that it runs: figures mean nothing"
    )
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.steps = 1, 60
    be_quiet()
    torch.set_num_threads(1)
    results = {}
    print(f"{'case':22} {'step':>9} {'empty callback':>15} {'with':>7} {'(quartiles)':>15} {'mean':>7} {'target':>7}")
    with tempfile.TemporaryDirectory() as directory:
        for name in options.case or CASES:
            found = measure(CASES[name], rounds=options.rounds, steps=options.steps, directory=Path(directory))
            results[name] = found
            ours, empty, mean = (
                found["ratios"][key] for key in ("with, lower half", "empty, lower half", "with, mean")
            )
            spread = f"({ours['low']:.3f}-{ours['high']:.3f})"
            print(
                f"{name:22} {found['step_us']:6.0f} us {'x%.3f' % empty['median']:>15} {'x%.3f' % ours['median']:>7}"
                f" {spread:>15} {'x%.3f' % mean['median']:>7} {'x%.2f' % found['target']:>7}",
                flush=True,
            )
    if options.output is not None:
        options.output.write_text(json.dumps({"machine": machine(), "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

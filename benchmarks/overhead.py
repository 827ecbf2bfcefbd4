"""The cost of the callback per step: fits with it, without it, and with an empty callback, paired in one process.

With ``--ranks n``, this runs in n processes that train together. Each does all of these fits in the same order.

Run `python benchmarks/overhead.py --help` from the repository.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.ranks import in_ranks
from benchmarks.runs import (
    AugmentedImages,
    BareRandomDataset,
    ChangingModel,
    ConvNet,
    EvaluatedMetricsModel,
    EvaluatedModel,
    GrowingDataset,
    MetricsModel,
    OwnSampler,
    StatefulStream,
    Stream,
    TimedModel,
    be_quiet,
    fit,
    machine,
)
from lightning_faulttolerant import FaultTolerance

VARIANTS: dict[str, Callable[..., list[Callback]]] = {
    "without": lambda **options: [],
    "empty": lambda **options: [Callback()],
    "with": lambda **options: [FaultTolerance(**options)],
}
_WARM_UP_STEPS = 30
_CHOICES = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One kind of training."""

    model: Callable[[], LightningModule]
    num_workers: int
    target: float | None
    shuffle: bool = False
    sampler: Callable[[Any], Sampler[int]] | None = None
    dataset: Callable[[int], Dataset[Any]] = field(default_factory=lambda: partial(BareRandomDataset, 32))
    batch_size: int = 1
    steps_share: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)
    function: str = "fit"

    def loader(self, steps: int, *, num_ranks: int = 1) -> DataLoader[Any]:
        """Return a loader of `steps` batches for each rank."""
        dataset = self.dataset(steps * self.batch_size * num_ranks)
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            sampler=None if self.sampler is None else self.sampler(dataset),
            shuffle=self.shuffle,
            num_workers=self.num_workers,
        )


CASES = {
    "plain": Case(model=TimedModel, num_workers=0, target=1.05),
    "plain, 2 workers": Case(model=TimedModel, num_workers=2, target=1.05),
    "shuffled": Case(model=TimedModel, num_workers=0, target=1.05, shuffle=True),
    "shuffled, 2 workers": Case(model=TimedModel, num_workers=2, target=1.05, shuffle=True),
    "ten attributes that change": Case(model=ChangingModel, num_workers=0, target=1.05),
    "growing data set": Case(
        model=TimedModel, num_workers=0, target=1.05, shuffle=True, dataset=partial(GrowingDataset, 32)
    ),
    "growing data set, 2 workers": Case(
        model=TimedModel, num_workers=2, target=1.05, shuffle=True, dataset=partial(GrowingDataset, 32)
    ),
    "metrics": Case(model=MetricsModel, num_workers=0, target=1.05),
    "metrics, 2 workers": Case(model=MetricsModel, num_workers=2, target=1.05),
    "conv net, 2 workers": Case(
        model=ConvNet,
        num_workers=2,
        target=1.01,
        shuffle=True,
        dataset=AugmentedImages,
        batch_size=64,
        steps_share=0.25,
    ),
    "per sample": Case(model=TimedModel, num_workers=0, target=1.05, options={"worker_rng": "per_sample"}),
    "per sample, 2 workers": Case(model=TimedModel, num_workers=2, target=1.05, options={"worker_rng": "per_sample"}),
    "own sampler": Case(model=TimedModel, num_workers=0, target=1.05, sampler=OwnSampler),
    "iterable": Case(model=TimedModel, num_workers=0, target=1.05, dataset=partial(Stream, 32)),
    "iterable, 2 workers": Case(model=TimedModel, num_workers=2, target=1.05, dataset=partial(Stream, 32)),
    "iterable with a state": Case(model=TimedModel, num_workers=0, target=1.05, dataset=partial(StatefulStream, 32)),
    "iterable with a state, 2 workers": Case(
        model=TimedModel, num_workers=2, target=1.05, dataset=partial(StatefulStream, 32)
    ),
}
EVALUATIONS = {
    name: Case(model=EvaluatedModel, num_workers=0, target=1.05, function=name)
    for name in ("validation", "validate", "test", "predict")
}
EVALUATIONS |= {
    "validation, 2 workers": Case(model=EvaluatedModel, num_workers=2, target=1.05, function="validation"),
    "validation, metrics": Case(model=EvaluatedMetricsModel, num_workers=0, target=1.05, function="validation"),
    "test, metrics": Case(model=EvaluatedMetricsModel, num_workers=0, target=1.05, function="test"),
}
# The cases in which a rank with one or two cores does not spend its time waiting for a core.
CASES_OF_RANKS = ("plain", "shuffled", "metrics", "shuffled, 2 workers")


def step_times(case: Case, variant: str, steps: int, directory: Path, *, num_ranks: int = 1) -> Tensor:
    """Fit once; return the seconds of each step except the first few, in which everything is set up."""
    torch.manual_seed(0)
    loader, model = case.loader(steps, num_ranks=num_ranks), case.model()
    gc.collect()
    callbacks = VARIANTS[variant](**case.options)
    fit(model, loader, callbacks, directory, num_ranks=num_ranks, function=case.function)
    began: list[float] = model.began  # type: ignore[assignment]
    return torch.tensor(began[_WARM_UP_STEPS:], dtype=torch.float64).diff()


def all_times(
    case: Case, orders: list[list[str]], steps: int, directory: Path, num_ranks: int = 1
) -> dict[str, list[Tensor]]:
    """Fit each variant once per round, in the given order. Return its step times per round."""
    found: dict[str, list[Tensor]] = {variant: [] for variant in VARIANTS}
    for number, order in enumerate(orders):
        for variant in order:
            place = directory / f"{number}" / variant  # the same directory on each rank
            found[variant].append(step_times(case, variant, steps, place, num_ranks=num_ranks))
    return found


def lower_half(times: Tensor) -> float:
    """Return the mean of the shorter half of the steps. Other load on the machine only makes steps longer."""
    return times.sort().values[: max(1, len(times) // 2)].mean().item()


def measure(case: Case, *, rounds: int, steps: int, directory: Path, num_ranks: int = 1) -> dict[str, Any]:
    """Return the step times of each variant on rank 0, and their ratios to those of the fit without the callback."""
    steps = max(_WARM_UP_STEPS + 10, int(steps * case.steps_share))
    # Drawn at random, so that no variant always follows the same one. Drawn here, so that all ranks use the same order.
    orders = [random.sample(list(VARIANTS), len(VARIANTS)) for _ in range(rounds)]
    with tempfile.TemporaryDirectory(dir=directory) as place:
        fits = (case, orders, steps, Path(place), num_ranks)
        found: dict[str, list[Tensor]] = all_times(*fits) if num_ranks == 1 else in_ranks(all_times, num_ranks, *fits)
    ratios = {variant: ratio(found[variant], found["without"], lower_half) for variant in ("empty", "with")}
    return {
        "step_us": lower_half(torch.cat(found["without"])) * 1e6,
        "steps": steps,
        "rounds": rounds,
        "ranks": num_ranks,
        "target": case.target,
        **ratios,
        "with, all steps": ratio(found["with"], found["without"], lambda times: times.mean().item()),
    }


def ratio(times: list[Tensor], bases: list[Tensor], of: Callable[[Tensor], float]) -> dict[str, float]:
    """Return the ratio over all rounds, and the range that contains 90 of 100 resampled choices of rounds."""
    rounds = range(len(times))
    ratios = []
    for _ in range(_CHOICES):
        chosen = random.choices(rounds, k=len(times))
        ratios.append(of(torch.cat([times[i] for i in chosen])) / of(torch.cat([bases[i] for i in chosen])))
    ratios.sort()
    ratio = of(torch.cat(times)) / of(torch.cat(bases))
    return {"ratio": ratio, "low": ratios[_CHOICES // 20], "high": ratios[-1 - _CHOICES // 20]}


def main(arguments: list[str] | None = None) -> None:
    """Measure the requested cases, print a table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--case", action="append", choices=CASES | EVALUATIONS, help="only this one; may be given several times"
    )
    parser.add_argument("--evaluation", action="store_true", help="the cost per step of evaluations instead of fits")
    parser.add_argument("--ranks", type=int, default=1, help="so many ranks under DDP, over gloo (default: 1)")
    parser.add_argument("--rounds", type=int, default=20, help="fits of each variant (default: 20)")
    parser.add_argument("--steps", type=int, default=500, help="steps of a fit (default: 500)")
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
    print(
        f"{'case':32} {'a step':>10} {'empty callback':>15} {'with':>7} {'(90 %)':>15} {'all steps':>10} {'target':>7}"
    )
    with tempfile.TemporaryDirectory() as directory:
        of_fits = CASES if options.ranks == 1 else CASES_OF_RANKS
        for name in options.case or (EVALUATIONS if options.evaluation else of_fits):
            found = measure(
                (CASES | EVALUATIONS)[name],
                rounds=options.rounds,
                steps=options.steps,
                directory=Path(directory),
                num_ranks=options.ranks,
            )
            results[name] = found
            empty, ours, whole = (f"x{found[key]['ratio']:.3f}" for key in ("empty", "with", "with, all steps"))
            spread = f"({found['with']['low']:.3f}-{found['with']['high']:.3f})"
            print(
                f"{name:32} {found['step_us']:7.0f} us {empty:>15} {ours:>7} {spread:>15} {whole:>10}"
                f" {found['target'] or '-':>7}",
                flush=True,
            )
            if options.output is not None:  # after each case, since all of them take long
                options.output.write_text(json.dumps({"machine": machine(), "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

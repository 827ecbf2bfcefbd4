"""The cost of the callback per step: fits with it, without it, and with two other callbacks, paired in one process.

One of these is empty. The other one saves one checkpoint of Lightning's before the first step, and is empty otherwise.

This is repeated in several processes: objects have other addresses in each, which alone changes a ratio by a few
percent. With ``--ranks n``, it runs in n processes that train together. Each does all of these fits in the same order.

Run `python benchmarks/overhead.py --help` from the repository.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context, set_start_method
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
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


class SavesOnce(Callback):
    """Saves one checkpoint of Lightning's before the first step.

    On Python 3.11 and 3.12, the attributes of an object take longer to read once something has asked for its
    ``__dict__``. Lightning does this with its loops when it saves their states.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir) / "once.ckpt")


VARIANTS: dict[str, Callable[..., list[Callback]]] = {
    "without": lambda **options: [],
    "empty": lambda **options: [Callback()],
    "saves once": lambda **options: [SavesOnce()],
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


def times_of_cases(names: Sequence[str], rounds: int, steps: int, num_ranks: int) -> list[dict[str, list[Tensor]]]:
    """Return the step times of each case, of each variant, on rank 0, per round."""
    be_quiet()
    torch.set_num_threads(1)
    found = []
    for name in names:
        # Drawn at random, so that no variant always follows the same one; drawn here, so that all ranks have one order.
        orders = [random.sample(list(VARIANTS), len(VARIANTS)) for _ in range(rounds)]
        case = (CASES | EVALUATIONS)[name]
        with tempfile.TemporaryDirectory() as place:
            fits = (case, orders, _steps_of(case, steps), Path(place), num_ranks)
            found.append(all_times(*fits) if num_ranks == 1 else in_ranks(all_times, num_ranks, *fits))
    return found


def _steps_of(case: Case, steps: int) -> int:
    return max(_WARM_UP_STEPS + 10, int(steps * case.steps_share))


def compared(case: Case, found: Sequence[dict[str, list[Tensor]]], *, steps: int, num_ranks: int) -> dict[str, Any]:
    """Return the step time without a callback, and the ratios of the others to it.

    Args:
        case: The case.
        found: Its step times of each process.
        steps: The number of steps that was requested.
        num_ranks: The number of ranks.
    """
    times = {variant: [each for of in found for each in of[variant]] for variant in VARIANTS}
    rounds = [len(of["without"]) for of in found]
    bases = times["without"]
    ratios = {variant: ratio(times[variant], bases, lower_half, rounds) for variant in VARIANTS if variant != "without"}
    return {
        "step_us": lower_half(torch.cat(bases)) * 1e6,
        "steps": _steps_of(case, steps),
        "rounds": sum(rounds),
        "processes": len(found),
        "ranks": num_ranks,
        "target": case.target,
        **ratios,
        "with, all steps": ratio(times["with"], bases, lambda times: times.mean().item(), rounds),
    }


def ratio(
    times: list[Tensor], bases: list[Tensor], of: Callable[[Tensor], float], rounds: Sequence[int] = ()
) -> dict[str, float]:
    """Return the ratio over all rounds, and the range that contains 90 of 100 resampled choices.

    Args:
        times: The step times of a variant, per round.
        bases: Those of the variant that it is compared with.
        of: Returns one figure for many step times.
        rounds: The number of rounds of each process. Processes are chosen first, and rounds of them. Default: one
            process.
    """
    ends = list(itertools.accumulate(rounds or [len(times)]))
    of_processes = [range(begin, end) for begin, end in itertools.pairwise([0, *ends])]
    ratios = []
    for _ in range(_CHOICES):
        processes = random.choices(of_processes, k=len(of_processes))
        chosen = [number for process in processes for number in random.choices(process, k=len(process))]
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
    parser.add_argument("--rounds", type=int, default=3, help="fits of each variant in each process (default: 3)")
    parser.add_argument("--processes", type=int, default=4, help="how many processes (default: 4)")
    parser.add_argument("--steps", type=int, default=500, help="steps of a fit (default: 500)")
    parser.add_argument(
        "--quick", action="store_true", help="a few short fits, to see that it runs: figures mean nothing"
    )
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.processes, options.steps = 1, 1, 60
    of_fits = CASES if options.ranks == 1 else CASES_OF_RANKS
    names = list(options.case or (EVALUATIONS if options.evaluation else of_fits))
    fits = (names, options.rounds, options.steps, options.ranks)
    if options.processes == 1:
        of_processes = [times_of_cases(*fits)]
    else:
        of_processes = [_in_new_process(*fits) for _ in range(options.processes)]
    results = {}
    print(
        f"{'case':32} {'a step':>10} {'empty callback':>15} {'saves once':>10} {'with':>7} {'(90 %)':>15}"
        f" {'all steps':>10} {'target':>7}"
    )
    for name, *found in zip(names, *of_processes, strict=True):
        of = compared((CASES | EVALUATIONS)[name], found, steps=options.steps, num_ranks=options.ranks)
        results[name] = of
        empty, once, ours, whole = (
            f"x{of[key]['ratio']:.3f}" for key in ("empty", "saves once", "with", "with, all steps")
        )
        spread = f"({of['with']['low']:.3f}-{of['with']['high']:.3f})"
        print(
            f"{name:32} {of['step_us']:7.0f} us {empty:>15} {once:>10} {ours:>7} {spread:>15} {whole:>10}"
            f" {of['target'] or '-':>7}"
        )
    if options.output is not None:
        options.output.write_text(json.dumps({"machine": machine(), "cases": results}, indent=1) + "\n")


def _in_new_process(*fits: Any) -> list[dict[str, list[Tensor]]]:
    # Loaders in the new process would start their workers by the method by which it was started itself.
    forks = {"initializer": set_start_method, "initargs": ("fork", True)}
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn"), **forks) as processes:
        return processes.submit(times_of_cases, *fits).result()


if __name__ == "__main__":
    main()

"""The time to the first step of a fresh fit, and of a fit resumed far inside its epoch, for torch's own samplers.

Run `python benchmarks/resume.py --help` from the repository.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, Sampler, SequentialSampler

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.runs import TimedModel, be_quiet, fit, machine
from lightning_faulttolerant import FaultTolerance

SAMPLERS: dict[str, Callable[[Any], Sampler[int]]] = {
    "RandomSampler": RandomSampler,
    "SequentialSampler": SequentialSampler,
    "DistributedSampler": lambda dataset: DistributedSampler(dataset, num_replicas=1, rank=0),
}
_NUM_BATCHES = 1000
_TARGET = 1.2


class Numbers(Dataset[int]):
    """Samples that cost nothing: only their order is of interest."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class ReachedStep(Exception):  # noqa: N818 - it is not an error
    """The run has reached its target step."""


class StopAt(Callback):
    """Ends the run at the start of a step."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            raise ReachedStep


def collate(samples: list[int]) -> Tensor:
    """Return a batch that costs nothing."""
    return torch.zeros(1, 32)


def seconds_to_reach(*arguments: Any) -> float:
    """Start or resume a fit in a separate process, as after a crash, and return the result of `_seconds_to_reach`."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(_seconds_to_reach(*arguments)))
    process.start()
    sender.close()
    seconds: float = receiver.recv()
    process.join()
    return seconds


def _seconds_to_reach(batch: int, sampler: str, num_workers: int, num_samples: int, directory: Path) -> float:
    """Fit until the step of `batch` begins; return how long that took."""
    dataset = Numbers(num_samples)
    loader = DataLoader(
        dataset,
        batch_size=max(1, num_samples // _NUM_BATCHES),
        sampler=SAMPLERS[sampler](dataset),
        num_workers=num_workers,
        collate_fn=collate,
    )
    torch.manual_seed(0)
    gc.collect()
    began = time.perf_counter()
    try:
        fit(TimedModel(), loader, [FaultTolerance(every_n_train_steps=max(1, batch)), StopAt(batch)], directory)
    except ReachedStep:
        return time.perf_counter() - began
    raise RuntimeError(f"The run ended without a step {batch}.")


def measure(
    sampler: str, num_workers: int, *, num_samples: int, at: float, rounds: int, directory: Path
) -> dict[str, float]:
    """Return the median seconds of fresh fits and of resumed fits."""
    batch = int(_NUM_BATCHES * at)
    far = directory / f"{sampler}-{num_workers}"
    seconds_to_reach(batch, sampler, num_workers, num_samples, far)
    fresh, resumed = [], []
    for i in range(rounds):
        fresh.append(seconds_to_reach(0, sampler, num_workers, num_samples, directory / f"{far.name}-fresh-{i}"))
        resumed.append(seconds_to_reach(batch, sampler, num_workers, num_samples, far))
    ratios = [one / other for one, other in zip(resumed, fresh, strict=True)]
    return {
        "fresh_s": statistics.median(fresh),
        "resumed_s": statistics.median(resumed),
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "target": _TARGET,
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure each sampler with and without workers, print a table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=10_000_000, help="length of the epoch (default: 10 million)")
    parser.add_argument("--at", type=float, default=0.9, help="where in the epoch to resume (default: 0.9)")
    parser.add_argument("--rounds", type=int, default=5, help="fits of each kind (default: 5)")
    parser.add_argument("--quick", action="store_true", help="a small epoch, to see that it runs")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args(arguments)
    if options.quick:
        options.samples, options.rounds = 2000, 1
    be_quiet()
    torch.set_num_threads(1)
    print(f"{'sampler':28} {'fresh':>9} {'resumed':>9} {'ratio':>7} {'(range)':>13} {'target':>7}")
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        for sampler in SAMPLERS:
            for num_workers in (0, 2):
                found = measure(
                    sampler,
                    num_workers,
                    num_samples=options.samples,
                    at=options.at,
                    rounds=options.rounds,
                    directory=Path(directory),
                )
                name = sampler + (f", {num_workers} workers" if num_workers else "")
                results[name] = found
                spread = f"({found['low']:.2f}-{found['high']:.2f})"
                print(
                    f"{name:28} {found['fresh_s']:7.3f} s {found['resumed_s']:7.3f} s {found['ratio']:7.2f}"
                    f" {spread:>13} {found['target']:7.2f}",
                    flush=True,
                )
    if options.output is not None:
        figures = {"machine": machine(), "samples": options.samples, "at": options.at, "cases": results}
        options.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

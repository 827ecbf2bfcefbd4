"""The time to the first step of a fresh fit, and of a fit resumed far inside its epoch, for torch's own samplers.

With `--torchdata`, also that of a fit that Lightning resumes with torchdata's `StatefulDataLoader` and its samplers.

Run `python benchmarks/resume.py --help` from the repository.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import warnings
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
from lightning_faulttolerant.trainer.bases import served_of_any

SAMPLERS: dict[str, Callable[[Any], Sampler[int]]] = {
    "RandomSampler": RandomSampler,
    "SequentialSampler": SequentialSampler,
    "DistributedSampler": lambda dataset: DistributedSampler(dataset, num_replicas=1, rank=0),
}
OURS, TORCHDATA = "ours", "torchdata"
_NUM_BATCHES = 1000
_TARGET = 1.2
_TARGET_OF_TORCHDATA = 0.7


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


class SaveAt(Callback):
    """Saves as Lightning does, before a step, and ends the run."""

    def __init__(self, batch: int, path: Path) -> None:
        self.batch, self.path = batch, path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch - 1:
            trainer.save_checkpoint(self.path)
            raise ReachedStep


def stateful_loader(dataset: Numbers, sampler: str, **options: Any) -> Any:
    """Return torchdata's loader, with the fastest of its samplers that yields the same indices."""
    from torchdata.stateful_dataloader import StatefulDataLoader, sampler as of_torchdata

    samplers: dict[str, Callable[[Any], Sampler[int]]] = {
        **SAMPLERS,
        "RandomSampler": of_torchdata.RandomSampler,
        "DistributedSampler": lambda data: of_torchdata.StatefulDistributedSampler(data, num_replicas=1, rank=0),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a function that it calls
        return StatefulDataLoader(dataset, sampler=samplers[sampler](dataset), **options)


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


def _seconds_to_reach(
    batch: int, sampler: str, num_workers: int, num_samples: int, directory: Path, library: str = OURS
) -> float:
    """Fit until the step of `batch` begins; return how long that took."""
    dataset = Numbers(num_samples)
    options: dict[str, Any] = {
        "batch_size": max(1, num_samples // _NUM_BATCHES),
        "num_workers": num_workers,
        "collate_fn": collate,
    }
    torch.manual_seed(0)
    callbacks: list[Callback] = [StopAt(batch)]
    checkpoint = None
    if library == OURS:
        loader = DataLoader(dataset, sampler=SAMPLERS[sampler](dataset), **options)
        callbacks = [FaultTolerance(directory / "autosaves", every_n_train_steps=max(1, batch)), *callbacks]
    else:
        loader = stateful_loader(dataset, sampler, **options)
        path = directory / "lightning.ckpt"
        callbacks, checkpoint = (callbacks, path) if path.exists() else ([SaveAt(batch, path)], None)
    gc.collect()
    began = time.perf_counter()
    try:
        fit(TimedModel(), loader, callbacks, directory, checkpoint=checkpoint)
    except ReachedStep:
        return time.perf_counter() - began
    raise RuntimeError(f"The run ended without a step {batch}.")


def measure(
    sampler: str,
    num_workers: int,
    *,
    num_samples: int,
    at: float,
    rounds: int,
    directory: Path,
    torchdata: bool = False,
) -> dict[str, Any]:
    """Return the median seconds of fresh fits, of resumed fits, and, if requested, of torchdata's resumed fits."""
    batch = int(_NUM_BATCHES * at)
    case = (sampler, num_workers, num_samples)
    far, theirs = (directory / f"{sampler}-{num_workers}-{library}" for library in (OURS, TORCHDATA))
    seconds_to_reach(batch, *case, far)
    if torchdata:
        seconds_to_reach(batch, *case, theirs, TORCHDATA)
    fresh, resumed, of_torchdata = [], [], []
    for i in range(rounds):
        fresh.append(seconds_to_reach(0, *case, directory / f"{far.name}-fresh-{i}"))
        resumed.append(seconds_to_reach(batch, *case, far))
        if torchdata:
            of_torchdata.append(seconds_to_reach(batch, *case, theirs, TORCHDATA))
    found = {
        "fresh_s": statistics.median(fresh),
        "resumed_s": statistics.median(resumed),
        **_ratio(resumed, fresh),
        "target": _TARGET,
    }
    if torchdata:
        ratio = {**_ratio(resumed, of_torchdata), "target": _TARGET_OF_TORCHDATA}
        found[TORCHDATA] = {"resumed_s": statistics.median(of_torchdata), **ratio}
    return found


def _ratio(seconds: list[float], others: list[float]) -> dict[str, float]:
    ratios = [one / other for one, other in zip(seconds, others, strict=True)]
    return {"ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}


def main(arguments: list[str] | None = None) -> None:
    """Measure each sampler with and without workers, print a table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=10_000_000, help="length of the epoch (default: 10 million)")
    parser.add_argument("--at", type=float, default=0.9, help="where in the epoch to resume (default: 0.9)")
    parser.add_argument("--rounds", type=int, default=5, help="fits of each kind (default: 5)")
    parser.add_argument("--sampler", action="append", choices=SAMPLERS, help="only this one; may be repeated")
    parser.add_argument("--torchdata", action="store_true", help="compare with torchdata, too")
    parser.add_argument("--quick", action="store_true", help="a small epoch, to see that it runs")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args(arguments)
    if options.quick:
        options.samples, options.rounds = 2000, 1
    be_quiet()
    torch.set_num_threads(1)
    served_of_any()  # imported by the first fit otherwise; `start.py` measures imports
    if options.torchdata:
        importlib.import_module("torchdata.stateful_dataloader")
    print(f"{'sampler':28} {'fresh':>9} {'resumed':>9} {'ratio':>7} {'(range)':>13} {'target':>7}")
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        for sampler in options.sampler or SAMPLERS:
            for num_workers in (0, 2):
                found = measure(
                    sampler,
                    num_workers,
                    num_samples=options.samples,
                    at=options.at,
                    rounds=options.rounds,
                    directory=Path(directory),
                    torchdata=options.torchdata,
                )
                name = sampler + (f", {num_workers} workers" if num_workers else "")
                results[name] = found
                spread = f"({found['low']:.2f}-{found['high']:.2f})"
                print(
                    f"{name:28} {found['fresh_s']:7.3f} s {found['resumed_s']:7.3f} s {found['ratio']:7.2f}"
                    f" {spread:>13} {found['target']:7.2f}",
                    flush=True,
                )
                if options.torchdata:
                    of = found[TORCHDATA]
                    spread = f"({of['low']:.2f}-{of['high']:.2f})"
                    print(
                        f"{'  to torchdata':28} {of['resumed_s']:7.3f} s {'':9} {of['ratio']:7.2f} {spread:>13}"
                        f" {of['target']:7.2f}",
                        flush=True,
                    )
    if options.output is not None:
        figures = {"machine": machine(), "samples": options.samples, "at": options.at, "cases": results}
        options.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

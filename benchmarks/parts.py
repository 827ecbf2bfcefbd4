"""The cost of each part of the work, timed in a real fit, since a training step leaves the processor's caches cold.

Run `python benchmarks/parts.py --help` from the repository.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.ranks import in_ranks
from benchmarks.runs import BareRandomDataset, Stream, TimedModel, be_quiet, fit, machine
from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.loader import iterable, per_sample, worker_side
from lightning_faulttolerant.trainer import boundary as boundaries
from lightning_faulttolerant.trainer.save.autosave import Autosaver

_MOST = 100_000
_WARM_UP = 30
_OF_ITERABLE: dict[str, tuple[type | ModuleType, str]] = {
    "iterable data set: digest of a sample": (iterable, "sample_digest"),
    "iterable data set: a look at the generators, two for each batch": (iterable.IterableSide, "_states"),
    "iterable data set: its position after a batch": (iterable.IterableRecord, "note_position"),
}
_OF_SAMPLES: dict[str, tuple[type | ModuleType, str]] = {
    "per_sample: seeding the generators of a sample": (per_sample, "seed_generators"),
    "per_sample: reading the states to restore": (per_sample, "saved_globals"),
    "per_sample: restoring them": (per_sample, "restore_globals"),
}
_WIDTHS = {"BoringModel": 0, "10 million parameters": 3162}


class Clocked:
    """Records the duration of each call of a method or function, in this process or in a process forked from it.

    Args:
        owner: The class or module.
        name: The method or function.
    """

    def __init__(self, owner: type | ModuleType, name: str) -> None:
        self._owner, self._name = owner, name
        self._original: Callable[..., Any] = getattr(owner, name)
        self._seconds = RawArray("d", _MOST)
        self._num_calls = RawArray("q", 1)

    def __enter__(self) -> Clocked:
        seconds, num_calls, original, clock = self._seconds, self._num_calls, self._original, time.perf_counter

        def clocked(*args: Any, **kwargs: Any) -> Any:
            began = clock()
            result = original(*args, **kwargs)
            seconds[num_calls[0] % _MOST] = clock() - began
            num_calls[0] += 1
            return result

        setattr(self._owner, self._name, clocked)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(self._owner, self._name, self._original)

    @property
    def seconds(self) -> list[float]:
        """The durations of all calls, in order."""
        return list(self._seconds[: min(_MOST, self._num_calls[0])])


class WideModel(LightningModule):
    """One square layer with Adam. Each checkpoint holds three times its parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


class SaveEachStep(Callback):
    """Saves as Lightning does, and records how long that takes."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "lightning.ckpt"
        self.seconds: list[float] = []

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        began = time.perf_counter()
        trainer.save_checkpoint(self.path)
        self.seconds.append(time.perf_counter() - began)


class NotesSometimes(Callback):
    """Switches the noting of batches off and on again every 20 batches, and records the durations of both kinds."""

    def __init__(self) -> None:
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self._noting: Any = None
        self._began = 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Tensor, batch_idx: int) -> None:
        replaced = vars(trainer.strategy)
        if batch_idx % 20 > 2:  # the first ones are slower
            self.seconds["training_step" in replaced].append(time.perf_counter() - self._began)
        elif batch_idx % 40 == 20:
            self._noting = replaced.pop("training_step")
        elif batch_idx % 40 == 0 and batch_idx:
            replaced["training_step"] = self._noting
        self._began = time.perf_counter()

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        vars(trainer.strategy).setdefault("training_step", self._noting)


def lower_median(seconds: Sequence[float]) -> float:
    """Return the median of the shorter half."""
    return statistics.median(sorted(seconds)[: max(1, len(seconds) // 2)])


def calls(steps: int, directory: Path) -> dict[str, float]:
    """Return the microseconds of the work at each boundary, in each worker's batch, and from time to time."""
    found = {}
    for num_workers in (0, 2):
        at_boundary, at_capture = Clocked(boundaries.Boundary, "before_batch"), Clocked(boundaries, "take_capture")
        with at_boundary as boundary, at_capture as capture:
            loader = DataLoader(BareRandomDataset(32, steps), num_workers=num_workers)
            fit(TimedModel(), loader, [FaultTolerance(directory / f"{num_workers}")], directory)
        workers = f", {num_workers} workers" if num_workers else ""
        found[f"boundary at which nothing is due{workers}"] = lower_median(boundary.seconds[_WARM_UP:])
        found[f"capture{workers}"] = lower_median(capture.seconds)
    noting = NotesSometimes()
    fit(
        TimedModel(),
        DataLoader(BareRandomDataset(32, 5 * steps)),
        [FaultTolerance(directory / "noting"), noting],
        directory,
    )
    noted, others = (lower_median(noting.seconds[kind][_WARM_UP:]) for kind in (True, False))
    found["noting a batch"] = noted - others
    found["a step without it"] = others
    with Clocked(worker_side.WorkerStates, "_leave") as worker:
        loader = DataLoader(BareRandomDataset(32, steps), num_workers=1)
        fit(TimedModel(), loader, [FaultTolerance(directory / "worker")], directory)
    found["recording the state of a batch, in its worker"] = lower_median(worker.seconds[_WARM_UP:])
    for loader, options, parts in (
        (DataLoader(Stream(32, steps)), {}, _OF_ITERABLE),
        (DataLoader(BareRandomDataset(32, steps)), {"worker_rng": "per_sample"}, _OF_SAMPLES),
    ):
        for name, (owner, function) in parts.items():
            with Clocked(owner, function) as part:
                fit(TimedModel(), loader, [FaultTolerance(directory / name, **options)], directory)
            found[name] = lower_median(part.seconds[_WARM_UP:])
    return {name: seconds * 1e6 for name, seconds in found.items()}


def save(width: int, steps: int, directory: Path) -> dict[str, float]:
    """Return the seconds of an autosave and of a checkpoint of Lightning's, for a model with a layer of this width."""

    def run(callbacks: list[Callback]) -> None:
        fit(WideModel(width) if width else TimedModel(), loader, callbacks, directory)

    loader = DataLoader(BareRandomDataset(width or 32, steps))
    with Clocked(Autosaver, "save") as autosave:
        run([FaultTolerance(directory / "ours", every_n_train_steps=1, overhead_budget=1e-6)])
    lightnings = SaveEachStep(directory)
    run([lightnings])
    first, *others = autosave.seconds
    return {
        "bytes": lightnings.path.stat().st_size,
        "first_s": first,
        "autosave_s": statistics.median(others),
        "lightning_s": statistics.median(lightnings.seconds),
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure all parts, print them and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short runs, to see that it runs: figures mean nothing")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args(arguments)
    be_quiet()
    torch.set_num_threads(1)
    saves = {}
    for name, width in _WIDTHS.items():  # in processes that have saved nothing yet, as this one
        arguments = min(width, 32) if options.quick else width, 12
        with tempfile.TemporaryDirectory() as directory:
            saves[name] = found = in_ranks(save, 1, *arguments, Path(directory))
        print(
            f"{name:25} {found['bytes'] / 1e6:7.1f} MB: autosave {found['autosave_s'] * 1e3:7.1f} ms, the first"
            f" {found['first_s'] * 1e3:7.1f} ms, Lightning's {found['lightning_s'] * 1e3:7.1f} ms"
        )
    with tempfile.TemporaryDirectory() as directory:
        parts = calls(60 if options.quick else 3000, Path(directory))
    for name, microseconds in parts.items():
        print(f"{name:45} {microseconds:8.1f} us")
    if options.output is not None:
        figures = {"machine": machine(), "calls_us": parts, "saves": saves}
        options.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

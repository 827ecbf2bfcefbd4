"""What scripts that are killed and run again share: the callback, and values that they record for the test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from lightning_faulttolerant import FaultTolerance, FlightRecorder, HangWatch
from tests.data_sets import secret_count


def weights(trainer: Any) -> str:
    """Return a fit's final weights, bit for bit."""
    return str([p.tolist() for p in trainer.lightning_module.parameters()])


def told(directory: Path, name: str) -> list[Any]:
    """Return the values that a script has recorded under a name."""
    path = directory / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tell(directory: Path, name: str, value: Any) -> None:
    """Record a value for the test."""
    with open(directory / f"{name}.jsonl", "a") as file:
        file.write(json.dumps(value) + "\n")


def protected(**options: Any) -> FaultTolerance:
    """Return the callback with an autosave at every step."""
    return FaultTolerance(**{"every_n_train_steps": 1, **options})


def protection(**options: Any) -> list[Any]:
    """Return the callback, and those next to it that have the other options."""
    recorder = {name: options.pop(name) for name in ("rule", "stop", "keep_every") if name in options}
    watch = {name: options.pop(name) for name in ("action", "timeout") if name in options}
    found: list[Any] = [FaultTolerance(**options)]
    found += [FlightRecorder(**{"rule": None, **recorder})] if recorder else []
    return found + ([HangWatch(**watch)] if watch else [])


class CountBatches(Callback):
    """Counts the training batches that this process trains."""

    def __init__(self) -> None:
        self._add, self._count = secret_count()

    @property
    def num_batches(self) -> int:
        """Return how many there were."""
        return self._count()

    def on_train_batch_start(self, *_: Any) -> None:
        self._add()


def autosaves(directory: Path) -> list[Path]:
    """Return the autosaves below a directory."""
    return sorted(directory.rglob("autosave-*.ckpt"))

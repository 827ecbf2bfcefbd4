"""How much our part adds to a checkpoint: the difference between the files with and without its key.

Run `python benchmarks/size.py --help` from the repository.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.runs import BareRandomDataset, ChangingModel, be_quiet, fit, machine
from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.checkpoint.verify import load_file

KEY = "lightning_faulttolerant"
_BASE_BYTES, _WORKER_BYTES = 20_000, 15_000
_WORKERS = (0, 2, 4)


class DrawingDataset(BareRandomDataset):
    """Draws from every global generator, so that the states in a checkpoint all differ and are hard to compress."""

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + random.random() + np.random.rand() + torch.rand(())


class DrawAtEachStep(Callback):
    """Draws in the main process, too."""

    def on_train_batch_end(self, *arguments: Any) -> None:
        random.random()
        np.random.rand()
        torch.rand(())


def file_bytes(checkpoint: Any) -> int:
    """Return the file size of a checkpoint."""
    file = io.BytesIO()
    torch.save(checkpoint, file)
    return file.tell()


def measure(
    num_workers: int, steps: int, directory: Path, model: Callable[[], LightningModule] = BoringModel
) -> dict[str, float]:
    """Return the bytes of our part in an autosave in the middle of an epoch, and the seconds to load it."""
    loader = DataLoader(DrawingDataset(32, steps * 5 // 4), shuffle=True, num_workers=num_workers)
    callbacks = [FaultTolerance(directory, run_id="size", every_n_train_steps=steps), DrawAtEachStep()]
    np.random.seed(0)
    random.seed(0)
    fit(model(), loader, callbacks, directory)
    [path] = directory.rglob(f"*batch={steps}.ckpt")
    checkpoint = load_file(path)
    with_ours = statistics.median(_seconds_to_save(checkpoint) for _ in range(20))
    size = file_bytes(checkpoint)
    del checkpoint[KEY]
    without = statistics.median(_seconds_to_save(checkpoint) for _ in range(20))
    return {
        "bytes": size - file_bytes(checkpoint),
        "target": _BASE_BYTES + _WORKER_BYTES * num_workers,
        "without_bytes": file_bytes(checkpoint),
        "write_ms": (with_ours - without) * 1e3,
    }


def _print(name: str, found: dict[str, float]) -> None:
    print(
        f"{name:>14} {found['bytes']:8.0f} bytes {found['target']:8.0f} bytes"
        f" {found['without_bytes']:8.0f} bytes {found['write_ms']:9.2f} ms"
    )


def _seconds_to_save(checkpoint: Any) -> float:
    began = time.perf_counter()
    file_bytes(checkpoint)
    return time.perf_counter() - began


def main(arguments: list[str] | None = None) -> None:
    """Measure with several numbers of workers, print a table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a short run, to see that it runs")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args(arguments)
    be_quiet()
    results = {}
    print(f"{'workers':>14} {'our part':>14} {'target':>14} {'the rest':>14} {'to write it':>12}")
    for num_workers in _WORKERS[:2] if options.quick else _WORKERS:
        with tempfile.TemporaryDirectory() as directory:
            found = measure(num_workers, 40 if options.quick else 1700, Path(directory))
        _print(str(num_workers), found)
        results[str(num_workers)] = found
    with tempfile.TemporaryDirectory() as directory:
        found = measure(0, 40 if options.quick else 1700, Path(directory), ChangingModel)
    _print("ten attributes", found)
    results["ten attributes"] = found
    if options.output is not None:
        options.output.write_text(json.dumps({"machine": machine(), "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""How many bytes an incremental autosave writes, and how long it stalls training, next to Lightning's checkpoint.

A hundredth of the parameters is trained. Run `python benchmarks/incremental.py --help` from the repository.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.runs import BareRandomDataset, be_quiet, fit, machine
from benchmarks.save import Save, timed
from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.position import BOUNDARY, position_of
from lightning_faulttolerant.trainer.save.autosave import Autosaver

LIGHTNINGS = "trainer.save_checkpoint"
INCREMENTAL = "autosave, incremental"
_NUM_BYTES = 1000e6
# The allowed minimum of each, as a ratio of Lightning's figure to ours.
TARGETS = {"bytes": 20.0, "seconds": 5.0}
_LAYERS = 99


class FrozenLayers(LightningModule):
    """A hundred square layers with `num_bytes` bytes of parameters, of which the last one is trained with Adam."""

    def __init__(self, num_bytes: float) -> None:
        super().__init__()
        width = max(1, int((num_bytes / 4 / (_LAYERS + 1)) ** 0.5))
        self.backbone = nn.Sequential(*[nn.Linear(width, width) for _ in range(_LAYERS)]).requires_grad_(False)
        self.head = nn.Linear(width, width)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.backbone(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.head.parameters())


class Pairs(Callback):
    """Saves in both ways at the end of each batch, in a new order each time, and records durations and sizes."""

    def __init__(self, callback: FaultTolerance, directory: Path) -> None:
        self.callback, self.directory = callback, directory
        self.seconds: dict[str, list[float]] = {LIGHTNINGS: [], INCREMENTAL: []}
        self.bytes: dict[str, list[int]] = {LIGHTNINGS: [], INCREMENTAL: []}

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:  # the second save is the first that only compares
            return
        session = self.callback._session
        assert session is not None
        assert session.autosaver is not None
        module.zero_grad()
        path = self.directory / "lightning.ckpt"
        saves: dict[str, Save] = {
            LIGHTNINGS: partial(_of_lightning, session.autosaver, trainer, path),
            INCREMENTAL: partial(_autosave, session.autosaver, trainer),
        }
        for name in random.sample(list(saves), len(saves)):
            seconds, _ = timed(saves[name])
            if batch_idx > 1:  # the first round warms up
                self.seconds[name].append(seconds)
        if batch_idx > 1:
            self.bytes[LIGHTNINGS].append(path.stat().st_size)
            series = session.autosaver._series
            assert series is not None
            self.bytes[INCREMENTAL].extend(series.num_bytes.values())


def _of_lightning(autosaver: Autosaver, trainer: Trainer, path: Path) -> Callable[[], object]:
    autosaver.is_dumping = True  # without our part
    try:
        checkpoint = compat.dump_checkpoint(trainer)
    finally:
        autosaver.is_dumping = False
    TorchCheckpointIO().save_checkpoint(checkpoint, path)
    return lambda: None


def _autosave(autosaver: Autosaver, trainer: Trainer) -> Callable[[], object]:
    autosaver.save(position_of(trainer, BOUNDARY))
    return lambda: None


def measure(num_bytes: float, *, rounds: int, directory: Path) -> dict[str, Any]:
    """Return the figures of a model with `num_bytes` bytes of parameters."""
    torch.manual_seed(0)
    model = FrozenLayers(num_bytes)
    # Only requested saves happen here. The first one, which writes the base, is over when the rounds begin.
    callback = FaultTolerance(directory / "autosaves", every_n_train_steps=10**9, incremental=True)
    found = Pairs(callback, directory)
    loader = DataLoader(BareRandomDataset(model.head.in_features, rounds + 2))
    fit(model, loader, [callback, found], directory)
    ratios = sorted(a / b for a, b in zip(found.seconds[LIGHTNINGS], found.seconds[INCREMENTAL], strict=True))
    kinds = {"bytes": found.bytes, "seconds": found.seconds}
    return {
        "rounds": rounds,
        **{kind: {name: statistics.median(of[name]) for name in of} for kind, of in kinds.items()},
        "ratio": {
            "bytes": statistics.median(found.bytes[LIGHTNINGS]) / max(found.bytes[INCREMENTAL]),
            "seconds": statistics.median(ratios),
        },
        "low": ratios[len(ratios) // 10],
        "high": ratios[-1 - len(ratios) // 10],
        "target": TARGETS,
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="saves in each way (default: 15)")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it runs: figures mean nothing")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args(arguments)
    be_quiet()
    num_bytes, rounds = (1e6, 1) if options.quick else (_NUM_BYTES, options.rounds)
    with tempfile.TemporaryDirectory() as directory:
        found = measure(num_bytes, rounds=rounds, directory=Path(directory))
    for name in (LIGHTNINGS, INCREMENTAL):
        print(f"{name:24} {found['bytes'][name] / 1e6:10.2f} MB {found['seconds'][name] * 1e3:9.1f} ms")
    ratio, target = found["ratio"], found["target"]
    print(
        f"{ratio['bytes']:.1f} times fewer bytes (at least {target['bytes']:.0f}), {ratio['seconds']:.1f} times less"
        f" time (at least {target['seconds']:.0f}; 8 of 10 rounds: {found['low']:.1f}-{found['high']:.1f})"
    )
    if options.output is not None:
        options.output.write_text(json.dumps({"machine": machine(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

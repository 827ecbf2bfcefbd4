"""How long a save stalls training: ours and Lightning's, blocking and in the background, interleaved in one process.

Run `python benchmarks/save.py --help` from the repository.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.runs import BareRandomDataset, be_quiet, fit, machine
from lightning_faulttolerant import AtomicCheckpointIO, FaultTolerance
from lightning_faulttolerant.checkpoint.saving import BackgroundWriter, Staging
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.position import BOUNDARY, position_of
from lightning_faulttolerant.trainer.save.autosave import Autosaver

# Bytes of the state. That is three times the weights, since Adam keeps two numbers for each weight.
SIZES = {"10 MB": 10e6, "100 MB": 100e6, "1 GB": 1000e6}
LIGHTNINGS = "TorchCheckpointIO"
# The allowed maximum of each, as a ratio to Lightning's own time.
VARIANTS: dict[str, float | None] = {
    LIGHTNINGS: None,
    "AtomicCheckpointIO": 1.0,
    "autosave": 1.0,
    "AsyncCheckpointIO": None,
    "autosave, async_save": 0.25,
}
_LAYERS = 16
_FILE = {"epoch": 0, "batch": 0, "global_step": 0}

# Begins a save, and returns a function that waits until the save is on disk.
Save = Callable[[], Callable[[], object]]


class Layers(LightningModule):
    """Square layers with Adam, with a state of `num_bytes` bytes."""

    def __init__(self, num_bytes: float) -> None:
        super().__init__()
        width = max(1, int((num_bytes / 12 / _LAYERS) ** 0.5))
        self.layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(_LAYERS)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


class Rounds(Callback):
    """Saves in every way at the end of the second batch, in a new order each round, and records the durations."""

    def __init__(self, callback: FaultTolerance, directory: Path, rounds: int) -> None:
        self.callback, self.directory, self.rounds = callback, directory, rounds
        self.seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
        self.on_disk: dict[str, list[float]] = {name: [] for name in VARIANTS}
        self.peaks: dict[str, int] = {}
        self.num_bytes = 0

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 1:
            return
        module.zero_grad()
        session = self.callback._session
        assert session is not None
        assert session.autosaver is not None
        dump = partial(_lightnings, session.autosaver, trainer)
        session.autosaver.settle()
        saves = {
            **of_plugins(dump, self.directory),
            "autosave": partial(_autosave, session.autosaver, trainer),
            "autosave, async_save": partial(_autosave_in_background, session.autosaver, trainer),
        }
        for number in range(-1, self.rounds):  # the first round warms up
            names = random.sample(list(saves), len(saves))
            for name in names:
                stall, whole = timed(saves[name])
                if number >= 0:
                    self.seconds[name].append(stall)
                    self.on_disk[name].append(whole)
        self.num_bytes = (self.directory / f"{LIGHTNINGS}.ckpt").stat().st_size
        self.peaks = {name: peak_of(name, dump(), self.directory) for name in VARIANTS}
        trainer.should_stop = True


def _lightnings(autosaver: Autosaver, trainer: Trainer) -> dict[str, Any]:
    """Return what Lightning saves without our callback."""
    autosaver.contents.is_dumping = True
    try:
        return compat.dump_checkpoint(trainer)
    finally:
        autosaver.contents.is_dumping = False


def of_plugins(dump: Callable[[], dict[str, Any]], directory: Path) -> dict[str, Save]:
    """Return the saves of `trainer.save_checkpoint` by `CheckpointIO`. Lightning's asynchronous one uses a thread."""

    def at_once(plugin: Any) -> Callable[[], object]:
        plugin.save_checkpoint(dump(), directory / f"{type(plugin).__name__}.ckpt")
        return lambda: None

    def in_background() -> Callable[[], object]:
        plugin = AsyncCheckpointIO(TorchCheckpointIO())
        plugin.save_checkpoint(dump(), directory / "AsyncCheckpointIO.ckpt")
        return plugin.teardown

    return {
        LIGHTNINGS: partial(at_once, TorchCheckpointIO()),
        "AtomicCheckpointIO": partial(at_once, AtomicCheckpointIO()),
        "AsyncCheckpointIO": in_background,
    }


def _autosave(autosaver: Autosaver, trainer: Trainer) -> Callable[[], object]:
    autosaver.save(position_of(trainer, BOUNDARY))
    return lambda: None


def _autosave_in_background(autosaver: Autosaver, trainer: Trainer) -> Callable[[], object]:
    autosaver.save_due(position_of(trainer, BOUNDARY))
    return autosaver.settle


def timed(save: Save) -> tuple[float, float]:
    """Return the seconds that a save blocks its caller, and the seconds until it is on disk."""
    gc.collect()
    os.sync()  # so that no save pays for unwritten data of another one
    began = time.perf_counter()
    wait = save()
    stall = time.perf_counter() - began
    wait()
    return stall, time.perf_counter() - began


def peak_of(name: str, checkpoint: dict[str, Any], directory: Path) -> int:
    """Return the bytes by which a process grows during one save, measured in a fork that has saved nothing yet."""
    output = directory / "peak.txt"
    process_id = os.fork()
    if process_id == 0:
        code = 1
        try:
            output.write_text(str(_grown_by(partial(_save_once, name, checkpoint, directory))))
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(process_id, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise RuntimeError(f"{name} could not be measured in its own process.")
    return int(output.read_text())


def _save_once(name: str, checkpoint: dict[str, Any], directory: Path) -> None:
    series = AutosaveSeries(directory / "peak", check=lambda: None)
    if name == "autosave":
        series.save(checkpoint, **_FILE)
    elif name == "autosave, async_save":
        writer, copy = BackgroundWriter("autosave"), Staging().copy(checkpoint)
        writer.start(partial(series.save, copy, **_FILE))
        writer.wait()
    else:
        of_plugins(lambda: checkpoint, directory)[name]()()


def _grown_by(save: Callable[[], object]) -> int:
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = _memory("VmRSS")
    save()
    return _memory("VmHWM") - before


def _memory(name: str) -> int:
    [line] = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def measure(num_bytes: float, *, rounds: int, directory: Path) -> dict[str, Any]:
    """Return the figures of a state of `num_bytes` bytes."""
    torch.manual_seed(0)
    model = Layers(num_bytes)
    # Only requested saves happen here. The first save, which is test-loaded, is over when the rounds begin.
    callback = FaultTolerance(directory / "autosaves", every_n_train_steps=10**9, async_save=True)
    found = Rounds(callback, directory, rounds)
    loader = DataLoader(BareRandomDataset(model.layers[0].in_features, 3))
    fit(model, loader, [callback, found], directory)
    variants = {}
    for name in VARIANTS:
        ratios = sorted(a / b for a, b in zip(found.seconds[name], found.seconds[LIGHTNINGS], strict=True))
        variants[name] = {
            "stall_s": statistics.median(found.seconds[name]),
            "on_disk_s": statistics.median(found.on_disk[name]),
            "ratio": statistics.median(ratios),
            "low": ratios[len(ratios) // 10],
            "high": ratios[-1 - len(ratios) // 10],
            "target": VARIANTS[name],
            "peak_bytes": found.peaks[name],
        }
    return {"bytes": found.num_bytes, "rounds": rounds, "variants": variants}


def _print(size: str, found: Mapping[str, Any]) -> None:
    for name, of in found["variants"].items():
        print(
            f"{size:>8} {name:22} {of['stall_s'] * 1e3:9.1f} ms x{of['ratio']:.2f} ({of['low']:.2f}-{of['high']:.2f})"
            f" {'' if of['target'] is None else 'at most x' + format(of['target'], '.2f'):14}"
            f" on disk {of['on_disk_s'] * 1e3:9.1f} ms, memory {of['peak_bytes'] / found['bytes']:5.2f} x",
            flush=True,
        )


def main(arguments: list[str] | None = None) -> None:
    """Measure the requested sizes, print a table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", action="append", choices=SIZES, help="only this one; may be given several times")
    parser.add_argument("--rounds", type=int, default=15, help="saves in each way (default: 15)")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it runs: figures mean nothing")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args(arguments)
    be_quiet()
    torch.set_num_threads(1)
    results = {}
    for size in options.size or SIZES:
        num_bytes, rounds = (100e3, 1) if options.quick else (SIZES[size], options.rounds)
        with tempfile.TemporaryDirectory() as directory:
            results[size] = measure(num_bytes, rounds=rounds, directory=Path(directory))
        _print(size, results[size])
        if options.output is not None:
            options.output.write_text(json.dumps({"machine": machine(), "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Interrupts an unchanged script, and records its training: a callback for each of its Trainers.

``RECORD`` is a file that gets a line for each training batch. ``INTERRUPT`` is ``SIGNAL@BATCHES``: the process gets the
signal after that number of batches in all its fits.
"""

import hashlib
import importlib
import json
import os
import signal
from pathlib import Path
from typing import Any


def for_lightning() -> Any:
    """Return the callback for a Trainer of `lightning.pytorch`."""
    return _callback("lightning.pytorch")


def for_pytorch_lightning() -> Any:
    """Return the callback for a Trainer of `pytorch_lightning`."""
    return _callback("pytorch_lightning")


def _callback(package: str) -> Any:
    class Interrupt(importlib.import_module(package).Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            _trained(trainer, pl_module)

    return Interrupt()


def _trained(trainer: Any, module: Any) -> None:
    line = {"process": os.getpid(), "step": trainer.global_step, "weights": _digest(module)}
    record = Path(os.environ["RECORD"])
    with record.open("a") as file:
        file.write(json.dumps(line) + "\n")
    name, _, batches = os.environ.get("INTERRUPT", "").partition("@")
    if name and len(
        [line for line in record.read_text().splitlines() if json.loads(line)["process"] == os.getpid()]
    ) == int(batches):
        os.kill(os.getpid(), signal.Signals[f"SIG{name}"])


def _digest(module: Any) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        if hasattr(tensor, "detach"):
            digest.update(name.encode() + tensor.detach().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]

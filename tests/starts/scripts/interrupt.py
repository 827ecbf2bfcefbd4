"""The requests of a test to a script, by environment variables: to be interrupted, to be slow, to record its training.

``INTERRUPT`` is ``SIGNAL@STEP`` or ``SIGNAL@STEP@NAME``: a fit (of that name) gets the signal after that many optimizer
steps. ``SIGNAL`` is TERM or KILL; GROUP-TERM and GROUP-KILL go to the whole process group. ``RECORD`` is a file that
gets a line for each training batch. ``SLEEP`` is the seconds that a batch takes. Without the variables nothing happens.
SIGKILL comes at the step or after it, as soon as the fit (each fit, for a group) has an autosave to continue from: a
busy machine saves slowly, and therefore rarely.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


def digest(model: torch.nn.Module) -> str:
    """Return a digest that distinguishes the weights of two models, to the last bit."""
    sha = hashlib.sha256()
    for tensor in model.state_dict().values():
        sha.update(tensor.detach().cpu().numpy().tobytes())
    return sha.hexdigest()[:16]


def record(event: str, name: str, **values: Any) -> None:
    """Record an event for the test."""
    if "RECORD" in os.environ:
        line = json.dumps({"event": event, "name": name, "process": os.getpid(), **values}) + "\n"
        file = os.open(os.environ["RECORD"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(file, line.encode())
        os.close(file)


def finished(name: str, model: torch.nn.Module, **values: Any) -> None:
    """Record the final weights of a fit, and that the script continued after it."""
    record("finished", name, weights=digest(model), **values)


class Interrupt(Callback):
    """Records each training batch, and sends this process the requested signal at a step.

    Args:
        name: Name of the fit.
    """

    def __init__(self, name: str = "fit") -> None:
        self.name = name

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Record the weights before the batch."""
        record("begins", self.name, step=trainer.global_step, weights=digest(pl_module))
        time.sleep(float(os.environ.get("SLEEP", "0")))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Record the weights after the batch, and send the signal."""
        record("trained", self.name, step=trainer.global_step, weights=digest(pl_module))
        how, step, name = (os.environ.get("INTERRUPT", "") + "@@").split("@")[:3]
        if how and trainer.global_step >= int(step):
            _interrupt(how, is_this=name in ("", self.name), is_exact=trainer.global_step == int(step))


def _interrupt(how: str, *, is_this: bool, is_exact: bool) -> None:
    group, _, name = how.rpartition("-")
    if name == "TERM" and is_this and is_exact:
        _send(signal.SIGTERM, group)
    if name == "KILL" and is_this and num_saved() >= (2 if group else 1):
        _send(signal.SIGKILL, group)
    if name == "KILL" and (is_this or group):
        time.sleep(2)  # until an autosave exists


def _send(signum: signal.Signals, group: str) -> None:
    if group:
        os.killpg(os.getpgrp(), signum)
    else:
        os.kill(os.getpid(), signum)


def num_saved() -> int:
    """Return how many fits have an autosave from after their start."""
    found = Path(os.environ["RECORD"]).parent.rglob("fit-*/autosave-*.ckpt")
    return len({path.parent for path in found if "epoch=0-batch=0" not in path.name})

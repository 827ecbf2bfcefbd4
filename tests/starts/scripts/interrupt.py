"""What a test asks of a script, by environment variables: to be interrupted, to be slow, to write down what it trains.

``INTERRUPT`` is ``SIGNAL@STEP`` or ``SIGNAL@STEP@NAME``: a fit (of that name) gets the signal after that many steps of
the optimizer. ``SIGNAL`` is TERM or KILL; GROUP-TERM and GROUP-KILL go to the whole process group. ``RECORD`` is a file
that gets a line for each training batch, ``SLEEP`` the seconds that a batch takes. Without the variables nothing
happens.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


def digest(model: torch.nn.Module) -> str:
    """Return what tells the weights of two models apart, to the last bit."""
    sha = hashlib.sha256()
    for tensor in model.state_dict().values():
        sha.update(tensor.detach().cpu().numpy().tobytes())
    return sha.hexdigest()[:16]


def record(event: str, name: str, **values: Any) -> None:
    """Write something down for the test."""
    if "RECORD" in os.environ:
        line = json.dumps({"event": event, "name": name, "process": os.getpid(), **values}) + "\n"
        file = os.open(os.environ["RECORD"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(file, line.encode())
        os.close(file)


def finished(name: str, model: torch.nn.Module, **values: Any) -> None:
    """Write down the final weights of a fit, and that the script went on after it."""
    record("finished", name, weights=digest(model), **values)


class Interrupt(Callback):
    """Writes down each training batch, and sends this process the signal that the test wants at a step.

    Args:
        name: Name of the fit.
    """

    def __init__(self, name: str = "fit") -> None:
        self.name = name

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Write down the weights before the batch."""
        record("begins", self.name, step=trainer.global_step, weights=digest(pl_module))
        time.sleep(float(os.environ.get("SLEEP", "0")))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Write down the weights after the batch; send the signal."""
        record("trained", self.name, step=trainer.global_step, weights=digest(pl_module))
        how, step, name = (os.environ.get("INTERRUPT", "") + "@@").split("@")[:3]
        if step == str(trainer.global_step) and name in ("", self.name):
            _send(how)


def _send(how: str) -> None:
    group, _, name = how.rpartition("-")
    signum = {"TERM": signal.SIGTERM, "KILL": signal.SIGKILL}[name]
    if group:
        os.killpg(os.getpgrp(), signum)
    else:
        os.kill(os.getpid(), signum)

"""Checkpoints as a run leaves them, and the command line called in this process."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_faulttolerant.checkpoint.saving import atomic_torch_save
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.cli import main
from lightning_faulttolerant.state.packing import pack_blobs
from tests.messages import plain


def checkpoint(*, step: int = 3, epoch: int = 0, batch: int = 3, world_size: int = 1, **part: Any) -> dict[str, Any]:
    """Return a checkpoint in Lightning's format with our part, with entries replaced by those of `part`."""
    rank = pack_blobs({"rng": {"python": b"p" * 100, "torch": b"t" * 50}, "metrics": {}, "flags": {"frozen": []}})
    ours = {
        "version": 1,
        "world_size": world_size,
        "position": {"where": "boundary", "epoch": epoch, "batch": batch, "global_step": step, "hook": ""},
        "run": "the-mark",
        "origin": None,
        "surroundings": {"torch": "2.13.0", "device": "cpu"},
        "fingerprint": {"module": {"class": "Net", "parameters": {"weight": [4, 8], "bias": [4]}}},
        "ranks": [rank],
        "opaque": {"hyper_parameters": torch.zeros(19, dtype=torch.uint8)},
    }
    return {**foreign(step=step, epoch=epoch, batch=batch), "lightning_faulttolerant": {**ours, **part}}


def foreign(*, step: int = 3, epoch: int = 0, batch: int = 3) -> dict[str, Any]:
    """Return a checkpoint in Lightning's format without our part."""
    counts = {"ready": batch, "completed": batch, "started": batch, "processed": batch}
    return {
        "epoch": epoch,
        "global_step": step,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {"weight": torch.zeros(4, 8), "bias": torch.zeros(4)},
        "loops": {"fit_loop": {"epoch_loop.batch_progress": {"current": counts, "total": counts}}},
    }


def save_series(folder: Any, num_autosaves: int) -> list[str]:
    """Save a number of autosaves of one fit, the k-th at step k, and return their paths, oldest first."""
    series = AutosaveSeries(folder, keep_last=100)
    for step in range(1, num_autosaves + 1):
        series.save(checkpoint(step=step, batch=step), epoch=0, batch=step, global_step=step)
    return [str(path) for path in series.paths()]


def save(path: Path, content: Any = None) -> Path:
    """Save one checkpoint, as a user's callback does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_torch_save(foreign() if content is None else content, path)
    return path


@dataclass(frozen=True)
class Result:
    """The result of a call of the command line."""

    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


def call(capsys: pytest.CaptureFixture[str], *arguments: Any) -> Result:
    """Run the command line here."""
    capsys.readouterr()
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return Result(status, captured.out, captured.err)


def told(result: Result, **paths: Path | str) -> str:
    """Return status and texts of a call, without what differs from run to run: sizes, times, and column widths."""
    text = f"status {result.status}\n{result.out}{'--- stderr' if result.err else ''}\n{result.err}"
    text = re.sub(r"\b\d+(\.\d+)? (B|kB|MB)\b", "SIZE", plain(text, **paths))
    text = re.sub("base=[0-9a-f]{8}", "base=CRC32", text.replace(f" on {socket.gethostname()}", " on HOST"))
    return re.sub(r"(?<=\S) {2,}", "  ", text.strip())

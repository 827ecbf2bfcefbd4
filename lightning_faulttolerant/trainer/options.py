"""The arguments of `FaultTolerance`, checked once, before any work."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import PurePath

from lightning_faulttolerant.checkpoint.store import is_url, local_path
from lightning_faulttolerant.trainer.launched import Script
from lightning_faulttolerant.trainer.run import check_run_id, this_process

_UNSTOPPABLE = ("SIGKILL", "SIGSTOP", "SIGCHLD")
_SPOILT_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:/[^/]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """See `FaultTolerance` for what each argument means."""

    dirpath: str | None
    run_id: str | None
    keep_last: int
    every_n_train_steps: int | None
    train_time_interval: timedelta | None
    overhead_budget: float
    stop_signals: tuple[str, ...]
    grace_seconds: float
    save_on_exception: bool
    auto_resume: bool
    strict: bool
    worker_rng: str = "capture"
    async_save: bool = False
    script: Script = field(default_factory=this_process)
    """The process in which the callback was made: Lightning may run the fit in others."""

    def __post_init__(self) -> None:
        if self.run_id is not None:
            check_run_id(self.run_id)
        if self.keep_last < 1:
            raise ValueError(
                f"keep_last must be at least 1, got {self.keep_last}: without an autosave nothing resumes."
            )
        if self.every_n_train_steps is not None and self.train_time_interval is not None:
            raise ValueError("every_n_train_steps and train_time_interval contradict each other; pass one of them.")
        if self.every_n_train_steps is not None and self.every_n_train_steps < 1:
            raise ValueError(f"every_n_train_steps must be at least 1, got {self.every_n_train_steps}.")
        if self.train_time_interval is not None and self.train_time_interval <= timedelta(0):
            raise ValueError(f"train_time_interval must be positive, got {self.train_time_interval}.")
        if not 0 < self.overhead_budget <= 1:
            raise ValueError(f"overhead_budget is a share of the time, in (0, 1]; got {self.overhead_budget}.")
        if not self.grace_seconds > 0:  # so that NaN is refused too
            raise ValueError(f"grace_seconds must be positive, got {self.grace_seconds}.")
        if self.worker_rng not in ("capture", "per_sample"):
            raise ValueError(f'worker_rng must be "capture" or "per_sample", got {self.worker_rng!r}.')
        for name in self.stop_signals:
            _check_signal(name)

    @property
    def signals(self) -> tuple[signal.Signals, ...]:
        """The stop signals that exist on this system."""
        return tuple(dict.fromkeys(signal.Signals[name] for name in self.stop_signals))


def _check_signal(name: str) -> None:
    if name in _UNSTOPPABLE:
        raise ValueError(f"stop_signals can't hold {name}: no process can handle it as a wish to stop.")
    if name not in signal.Signals.__members__:
        raise ValueError(f"stop_signals holds {name!r}, which is no signal here. Use names such as 'SIGTERM'.")


def checked_dirpath(dirpath: str | os.PathLike[str] | None) -> str | None:
    """Return `dirpath` as a local path or as a URL of another file system.

    Raises:
        ValueError: If it is a URL that `Path` has spoilt.
    """
    if dirpath is None:
        return None
    text = os.fspath(dirpath)
    if isinstance(dirpath, PurePath) and _SPOILT_URL.match(text):
        raise ValueError(f"dirpath is {dirpath!r}: Path takes a slash from a URL. Pass the URL as a string.")
    return text if is_url(text) else local_path(text)

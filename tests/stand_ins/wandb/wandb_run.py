"""A run, which sends its rows some rows late, and at its end."""

from __future__ import annotations

import atexit
import json
import os
from pathlib import Path
from typing import Any


class Run:
    """What WandbLogger uses of a run."""

    def __init__(self, run_id: str, server: Path) -> None:
        self.id = self.name = run_id
        self.offline = os.environ.get("WANDB_MODE") == "dryrun"
        self.config: Any = Config()
        self._file = server / f"{run_id}.jsonl"
        self._file.touch()
        self.starting_step = 0 if self.offline else len(self._file.read_text().splitlines())
        self.step = 0  # wandb's own is 0 here until the first row
        self._next = self.starting_step
        self._unsent: list[str] = []
        atexit.register(self.finish)

    def define_metric(self, *args: Any, **kwargs: Any) -> None:
        """Take how a metric is plotted."""

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        self._log(data, step, commit)

    def _log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        if step is not None and step < self._next:
            return
        self._unsent.append(json.dumps({**data, "_step": self._next}))
        self._next = self.step = self._next + 1
        self._send(int(os.environ.get("STAND_IN_WANDB_LATE", "0")))

    def _send(self, num_late: int) -> None:
        num = max(len(self._unsent) - num_late, 0)
        with self._file.open("a") as file:
            file.writelines(f"{line}\n" for line in self._unsent[:num])
        del self._unsent[:num]

    def finish(self) -> None:
        self._send(0)


class Config(dict[str, Any]):
    def update(self, values: Any, allow_val_change: bool = False) -> None:  # type: ignore[override]
        super().update(values)

"""A disk and a store that reject autosaves for a while, for tests of runs that continue during that time."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, Trainer

from tests.faulty_files import FaultyFiles
from tests.file_faults import Step

NEVER = 1_000_000


class _Full(Callback):
    """Is full from the start of batch `first` of this process to the start of batch `last`.

    Args:
        first: When it becomes full; -1 for the beginning of the fit.
        last: When there is room again.
        rank: On which rank; on all by default.
    """

    def __init__(self, first: int, last: int = NEVER, *, rank: int | None = None) -> None:
        self.first = first
        self.last = last
        self.rank = rank
        self.num_begun = -1
        self.num_refused = 0
        self.block: Any = None

    @property
    def is_full(self) -> bool:
        return self.first <= self.num_begun < self.last

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if self.rank in (None, trainer.global_rank):
            self.block = self.faulty(str(trainer.default_root_dir))
            self.block.__enter__()

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        block, self.block = self.block, None
        if block is not None:
            block.__exit__()

    def on_train_batch_start(self, *_: Any) -> None:
        self.num_begun += 1

    def faulty(self, directory: str) -> Any:
        raise NotImplementedError


class FullDisk(_Full):
    """A local disk that accepts half of a write to an autosave or to the history, and then fails."""

    def faulty(self, directory: str) -> Any:
        return FaultyFiles(directory, self.write, kind="write")

    def write(self, step: Step, carry_out: Callable[..., Any]) -> Any:
        in_autosave = any(name.lstrip(".").startswith("autosave-") for name in step.path.parts)
        is_ours = in_autosave or step.path.name == "history.jsonl"
        if not self.is_full or not is_ours:
            return carry_out()
        self.num_refused += 1
        carry_out(step.num_bytes // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(step.path))

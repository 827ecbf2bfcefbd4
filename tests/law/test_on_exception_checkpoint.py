"""With Lightning's OnExceptionCheckpoint a run resumes from its autosave, which is exact, not from that file."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.runs import fit_eight

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*was called without a model:UserWarning"),
]


class RaisesAt(Callback):
    """Raises before a step, the first time."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:
            raise RuntimeError("in the middle")


@pytest.mark.parametrize(
    ("fault", "continues_at"),
    [
        (KillAt(3, signum=signal.SIGTERM), (0, 4)),
        (KillAt(11, signum=signal.SIGINT), (1, 4)),
        (RaisesAt(5), (0, 5)),
        (KillAt(3, hook="validation", signum=signal.SIGTERM), (0, 4)),
    ],
    ids=["stop", "stop in epoch 1", "exception", "stop in validation"],
)
@pytest.mark.parametrize("is_first", [False, True])
def test_continues_from_the_autosave(fault: Callback, continues_at: tuple[int, int], is_first: bool) -> None:
    """The run resumes from the autosave after any fault, in either order of the callbacks, and after one more kill."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        own = OnExceptionCheckpoint(directory / "own")
        all_callbacks = [own, *callbacks] if is_first else [*callbacks, own]
        return fit_eight(all_callbacks, directory, enable_checkpointing=True, val_check_interval=4)

    first, second = assert_resumes_exactly(fit, [fault, KillAt(2)], options={"every_n_train_steps": 1})
    assert (first.epoch, first.batch) == continues_at
    assert (second.epoch, second.batch) == divmod(continues_at[0] * 8 + continues_at[1] + 2, 8)

"""A multiple of `keep_every` is kept once it is saved, and no earlier state is taken for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_faulttolerant.trainer.position import BOUNDARY, TrainerPosition
from lightning_faulttolerant.trainer.save.kept_steps import KeptSteps

EVERY = 3


class Run:
    """A fit with epochs of 5 batches, of which each is a step, counted by Lightning or not."""

    def __init__(self, *, counts_steps: bool) -> None:
        self.counts_steps = counts_steps
        current, total = SimpleNamespace(completed=0), SimpleNamespace(completed=0)
        self.trainer: Any = SimpleNamespace(
            global_step=0,
            current_epoch=0,
            lightning_module=SimpleNamespace(automatic_optimization=counts_steps),
            fit_loop=SimpleNamespace(
                epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(current=current, total=total))
            ),
        )
        self.kept = KeptSteps(self.trainer, EVERY)
        assert not self.kept.is_due()

    def go_to(self, step: int, where: str = BOUNDARY) -> TrainerPosition:
        """Do the steps up to this one. Return the position."""
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        self.trainer.current_epoch, progress.current.completed = divmod(step, 5)
        progress.total.completed = step
        self.trainer.global_step = step if self.counts_steps else 0
        return TrainerPosition(
            where=where,
            epoch=self.trainer.current_epoch,
            batch=progress.current.completed,
            global_step=self.trainer.global_step,
        )

    def save(self, position: TrainerPosition, *, succeeds: bool = True) -> bool:
        """Save a state. Return whether its autosave is to be kept."""
        self.kept.note_taken(position)
        keeps = self.kept.keeps(position)
        if succeeds:
            self.kept.note_written(position)
        else:
            self.kept.note_failed(position)
        self.kept.note_save(position)
        return keeps


@pytest.fixture(params=[True, False], ids=["steps", "batches"])
def fit(request: pytest.FixtureRequest) -> Run:
    """A fit whose steps Lightning counts, or that counts batches."""
    return Run(counts_steps=request.param)


def test_each_multiple_is_due_and_kept_once(fit: Run) -> None:
    """The first state at or after a multiple is kept, over epochs, and no other one."""
    kept = []
    for step in range(12):
        position = fit.go_to(step)
        if fit.kept.is_due() or step % 2:
            kept += [step] if fit.save(position) else []
            assert not fit.kept.is_due()
    assert kept == [3, 6, 9]


def test_a_multiple_that_could_not_be_saved_is_tried_again_after_1_2_and_4_steps(fit: Run) -> None:
    """Or it would be lost where no save is due before the next multiple. A save that succeeds ends that."""
    tried = []
    fit.kept = KeptSteps(fit.trainer, 12)
    assert not fit.kept.is_due()
    for step in range(24):
        position = fit.go_to(step)
        if fit.kept.is_due() or fit.kept.is_retry_due():
            tried.append(step)
            assert fit.save(position, succeeds=step >= 19)
    assert tried == [12, 13, 15, 19]
    assert not fit.save(fit.go_to(23), succeeds=False)
    assert not fit.kept.is_retry_due()


def test_a_capture_from_before_a_multiple_is_not_kept_for_it(fit: Run) -> None:
    """What counts is the step of the state, not the current one; the multiple itself is still due."""
    capture = fit.go_to(2)
    fit.go_to(3)
    assert not fit.save(capture)
    assert fit.kept.is_due()
    assert fit.save(fit.go_to(3))

"""The law for loaders from a plain data module, which has no state and no hooks.

Laws that test a module use such a data module, too (`tests.runs.fit_net`).
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningDataModule, Trainer
from torch.utils.data import DataLoader

from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.data_sets import NoisyDataset
from tests.faults import RaiseIn
from tests.hook_saves import assert_continues_from, save, saving_module
from tests.runs import Net, fit_net, make_trainer

ALWAYS = {"overhead_budget": 1.0}


def fit_from_data_module(callbacks: list[Callback], directory: Path, **arguments: Any) -> Trainer:
    """Fit with a data module."""
    return fit_net(callbacks, directory, module=Net(), **arguments)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_stopped_in_validation(signum: int) -> None:
    """A stop inside a validation run saves the boundary before it, and the run continues from there."""
    fault = KillAt(4, hook="validation", signum=signum)
    [cost] = assert_resumes_exactly(fit_from_data_module, [fault], options=ALWAYS)
    assert (cost.exit_code, cost.epoch, cost.batch, cost.num_batches_twice) == (128 + signum, 0, 5, 0)


def test_exception_keeps_its_capture() -> None:
    """An error in the script saves the last capture: only the failed batch is trained again."""
    options = {**ALWAYS, "every_n_train_steps": 100}
    [cost] = assert_resumes_exactly(fit_from_data_module, [RaiseIn("on_after_backward", 3)], options=options)
    assert (cost.exit_code, cost.epoch, cost.batch, cost.num_batches_twice) == (1, 0, 3, 1)


class StatefulData(LightningDataModule):
    """Has a state, which a checkpoint would hold as it is when it is written."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(NoisyDataset(20), batch_size=4, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(NoisyDataset(8), batch_size=4)

    def state_dict(self) -> dict[str, Any]:
        return {"global_step": self.trainer.global_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def test_exception_with_a_stateful_data_module_keeps_no_capture() -> None:
    """The data module's state would be of the exception, not of the capture: the last autosave stays."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        trainer = make_trainer(callbacks, directory)
        trainer.fit(Net(), datamodule=StatefulData())
        return trainer

    options = {**ALWAYS, "every_n_train_steps": 2}
    [cost] = assert_resumes_exactly(fit, [RaiseIn("on_after_backward", 3)], options=options)
    assert (cost.exit_code, cost.epoch, cost.batch, cost.num_batches_twice) == (1, 0, 2, 2)


@pytest.mark.parametrize(("hook", "at"), [("training_step", 2), ("on_train_batch_start", 7)])
def test_saved_by_the_module(hook: str, at: int) -> None:
    """A run resumes from a checkpoint that the module saves in its step, or before it."""
    assert_continues_from(hook, module=lambda: saving_module(hook, at))


class Saves(Net):
    """Saves a checkpoint each time that a hook is called."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook

    def on_before_zero_grad(self, *_: Any) -> None:
        self._save("on_before_zero_grad")

    def on_validation_epoch_end(self) -> None:
        self._save("on_validation_epoch_end")

    def _save(self, hook: str) -> None:
        if hook == self.hook and not self.trainer.sanity_checking:
            save(self.trainer)


@pytest.mark.parametrize("hook", ["on_before_zero_grad", "on_validation_epoch_end"])
def test_saving_in_a_hook_changes_nothing(hook: str) -> None:
    """A module that saves in any hook trains as without us."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_net(callbacks, directory, module=Saves(hook))

    [cost] = assert_resumes_exactly(fit, [KillAt(8)], options={"every_n_train_steps": 1})
    assert (cost.epoch, cost.batch) == (1, 3)

"""Models and faults that the tests of the object state share."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.faults import EVERY_STEP, RaiseIn
from tests.runs import Net, fit_net

# An epoch has 5 batches.
FIRST_EPOCH = pytest.param(KillAt(3), id="first-epoch")
LATER_EPOCH = pytest.param(KillAt(8), id="later-epoch")
EDGE = pytest.param(KillAt(5), id="edge")
STOPPED = pytest.param(KillAt(7, signum=signal.SIGTERM), id="stopped")
RAISED = pytest.param(RaiseIn("on_before_backward", 7), id="raised-in-a-batch")
RAISED_BEHIND = pytest.param(RaiseIn("on_train_batch_end", 7), id="raised-after-a-batch")


def slowly(value: Any) -> Any:
    """Return a parameter of a test that marks the case as slow."""
    values, name = (value.values, value.id) if hasattr(value, "values") else ((value,), value.__name__)
    return pytest.param(*values, id=name, marks=pytest.mark.slow)


each_cut = pytest.mark.parametrize("fault", [slowly(FIRST_EPOCH), LATER_EPOCH, slowly(EDGE)])


def assert_carried(
    *faults: Callback,
    module: Callable[[], LightningModule] = Net,
    users: Callable[[], list[Callback]] = list,
    train: Callable[[], Any] | None = None,
    **arguments: Any,
) -> None:
    """Check that a fit obeys the law; `arguments` go to the Trainer."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_net(
            [*users(), *callbacks],
            directory,
            module=None if module is Net else module(),
            train=train and train(),
            **arguments,
        )

    assert_resumes_exactly(fit, faults, options=EVERY_STEP)


class Own(Net):
    """Multiplies its loss by the result of `factor`; subclasses keep state for it."""

    def factor(self, loss: Tensor) -> Any:
        return 1.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layers(batch).square().mean()
        loss = loss * self.factor(loss)
        self.log("loss", loss)
        return loss

"""What callbacks keep and don't save, read from single callbacks and put back into fresh ones."""

from __future__ import annotations

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from torchmetrics import MeanMetric

from lightning_faulttolerant.trainer.adapters.state import callbacks_state, load_callbacks, why_ended


@pytest.fixture
def trainer() -> Trainer:
    """Return a trainer that has trained nothing."""
    return Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")


class Holding(Callback):
    """Holds a metric, and what is none."""

    def __init__(self) -> None:
        self.mean = MeanMetric()
        self.number = 3


class Without(Callback):
    """Holds none."""


def test_metrics_of_a_callback_come_back(trainer: Trainer) -> None:
    """A metric in an attribute goes on; other attributes are the user's own."""
    saved, fresh = Holding(), Holding()
    saved.mean.update(2.0)
    saved.number = 4
    assert load_callbacks(trainer, {"a": fresh}, callbacks_state(trainer, {"a": saved})) == []
    assert (fresh.mean.compute().item(), fresh.number) == (2.0, 3)


def test_what_has_nothing_to_go_to_is_named(trainer: Trainer) -> None:
    """A callback that is gone, and a metric that it has no more, are each named."""
    state = callbacks_state(trainer, {"a": Holding(), "b": Holding()})
    assert load_callbacks(trainer, {"b": Without()}, state) == ["a", "b.mean"]


def test_callbacks_that_keep_nothing_leave_nothing(trainer: Trainer) -> None:
    """A checkpoint says nothing of a callback that has nothing to say, so that it may be taken away."""
    assert callbacks_state(trainer, {"a": Without()}) == {}


@pytest.mark.parametrize("values", [[0.1, 0.2], [], [1, 2.0]])
def test_history_of_rates_comes_back(trainer: Trainer, values: list[float]) -> None:
    """The history is equal in value and in type."""
    saved, fresh = LearningRateMonitor(), LearningRateMonitor()
    saved.lrs, saved.last_momentum_values, saved.last_weight_decay_values = {"lr": values}, {"m": 0.9}, {}
    load_callbacks(trainer, {"a": fresh}, callbacks_state(trainer, {"a": saved}))
    assert fresh.lrs == {"lr": values}
    assert [type(value) for value in fresh.lrs["lr"]] == [type(value) for value in values]
    assert fresh.last_momentum_values == {"m": 0.9}


def test_fit_that_ended_as_it_was_trained_can_be_trained_further(trainer: Trainer) -> None:
    """Without a callback that changes the weights at the end there is no reason to refuse."""
    assert why_ended(trainer) is None

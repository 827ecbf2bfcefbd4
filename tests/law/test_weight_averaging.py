"""The law for WeightAveraging, which swaps weights for its validation runs."""

from __future__ import annotations

import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from lightning.pytorch import Callback
from torch import Tensor

from lightning_faulttolerant.testing import KillAt
from tests.hook_saves import assert_continues_from, saver
from tests.runs import Net, RaiseAt, assert_exact, eight_batches

averaging = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging", reason="Lightning 2.5 has none")

EVERY_STEP = {"every_n_train_steps": 1}
ALWAYS = {"overhead_budget": 1.0}
NUM_BATCHES = 5


def ema(**arguments: Any) -> Callable[[], list[Callback]]:
    """Return a function that creates an exponential average."""
    return lambda: [averaging.EMAWeightAveraging(decay=0.8, **arguments)]


@pytest.mark.parametrize("kill", [1, 5, 9])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_exponential_average(accumulate: int, kill: int) -> None:
    """The averaged weights and their count continue."""
    users = ema(update_every_n_steps=2, update_starting_at_step=1)
    options = {"train_time_interval": timedelta(microseconds=1)}
    [cost] = assert_exact(users, KillAt(kill), accumulate_grad_batches=accumulate, options=options)
    assert (cost.epoch, cost.batch) == divmod(kill, NUM_BATCHES)


@pytest.mark.parametrize("kill", [3, 5, 8])
def test_average_over_epochs(kill: int) -> None:
    """A WeightAveraging that averages at the end of epochs, without buffers, continues."""

    class OverEpochs(averaging.WeightAveraging):
        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            return epoch_idx is not None

    [cost] = assert_exact(lambda: [OverEpochs(use_buffers=False)], KillAt(kill), max_epochs=3)
    assert (cost.epoch, cost.batch) == divmod(kill, NUM_BATCHES)


@pytest.mark.parametrize("kill", [3, 15])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_exponential_average_in_a_validation_run(signum: int, kill: int) -> None:
    """After a kill or a stop during swapped weights, trained and averaged weights are as before the swap."""
    fault = KillAt(kill, hook="validation", signum=signum)
    train = eight_batches()
    [cost] = assert_exact(ema(), fault, train=train, val_check_interval=4, options={**ALWAYS, **EVERY_STEP})
    assert (cost.epoch, cost.batch) == (kill // len(train), kill % len(train) + (signum != signal.SIGKILL))


@pytest.mark.parametrize(
    ("hook", "continues_at"),
    [
        ("on_train_epoch_start", (0, 4)),
        ("on_train_epoch_end", (1, 4)),
        ("on_validation_batch_end", (1, 5)),
        ("on_validation_end", (1, 5)),
    ],
)
def test_exception_beside_an_exponential_average(hook: str, continues_at: tuple[int, int]) -> None:
    """A save never mixes two states: it has neither swapped weights nor averages that are ahead."""
    users = ema(update_starting_at_epoch=0)
    [cost] = assert_exact(users, RaiseAt(hook, 1), options={**ALWAYS, **EVERY_STEP})
    assert (cost.exit_code, cost.epoch, cost.batch) == (1, *continues_at)


class Counting(Net):
    """Counts its batches in its extra state, and the count changes its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.count += 1
        return super().training_step(batch + 0.01 * self.count, batch_idx)

    def on_validation_batch_end(self, *_: Any) -> None:
        if not self.trainer.sanity_checking:
            self.count += 1


def test_extra_state_beside_an_exponential_average() -> None:
    """A module's extra state in its ``state_dict`` is that of the saved moment, not that of the stop."""
    fault = KillAt(4, hook="validation", signum=signal.SIGTERM)
    [cost] = assert_exact(ema(), fault, module=Counting, options={**ALWAYS, **EVERY_STEP})
    assert (cost.exit_code, cost.epoch, cost.batch) == (143, 0, 5)


@pytest.mark.parametrize("in_front", [True, False], ids=["in front", "after"])
@pytest.mark.parametrize(
    ("hook", "at"), [("on_train_batch_end", 7), ("on_train_epoch_end", 0), ("on_validation_end", 1)]
)
def test_saved_beside_an_exponential_average(hook: str, at: int, in_front: bool) -> None:
    """A checkpoint that other code saves in a hook, before the average's or after it, continues exactly."""
    users = ema(update_starting_at_epoch=0)
    both = (lambda: [saver(hook, at), *users()]) if in_front else (lambda: [*users(), saver(hook, at)])
    assert_continues_from(hook, users=both, max_epochs=3)


def test_saved_with_swapped_weights_is_refused() -> None:
    """A checkpoint from inside a validation run has swapped weights, so resuming from it is refused."""
    hook = "on_validation_batch_end"
    with pytest.raises(AssertionError, match=r"NotExactError.*can't be resumed exactly.*parameters have changed"):
        assert_continues_from(hook, users=lambda: [*ema()(), saver(hook, 1)])

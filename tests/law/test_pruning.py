"""The law for ModelPruning, whose masks are not in Lightning's checkpoints."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor
from torch.nn.utils import prune

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.testing import KillAt
from tests.hook_saves import assert_continues_from, saver
from tests.modules import PlainNet
from tests.processes import run
from tests.runs import RaiseAt, assert_exact, fit_net

ALWAYS = {"overhead_budget": 1.0}


def pruning(**arguments: Any) -> list[Callback]:
    """Return a callback that prunes a quarter of the rest at each epoch's end."""
    return [ModelPruning("l1_unstructured", amount=0.25, parameter_names=["weight"], **arguments)]


class Decays(PlainNet):
    """Has weight decay, which changes hidden weights, too."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("kill", [3, 5, 7, 12])
def test_pruning(kill: int) -> None:
    """Killed before or after the first pruning, the masks and the original weights, to which it returns, continue."""
    [cost] = assert_exact(pruning, KillAt(kill), module=PlainNet, max_epochs=4)
    assert (cost.epoch, cost.batch) == divmod(kill, 5)


ARGUMENTS: list[dict[str, Any]] = [
    {"use_lottery_ticket_hypothesis": False},
    {"make_pruning_permanent": False},
    {"resample_parameters": True},
    {"use_global_unstructured": False, "prune_on_train_epoch_end": False},
]


@pytest.mark.parametrize("kill", [2, 12])
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_ways_to_prune(arguments: dict[str, Any], kill: int) -> None:
    """For each method and time of pruning, the weights behind the masks continue, too."""
    [cost] = assert_exact(
        lambda: pruning(**arguments), KillAt(kill), module=Decays, max_epochs=4, accumulate_grad_batches=2
    )
    assert (cost.epoch, cost.batch) == divmod(kill, 5)


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_epoch_end", "on_validation_end"])
def test_exception_beside_pruning(hook: str) -> None:
    """A save after an exception is never between two prunings."""
    [cost] = assert_exact(pruning, RaiseAt(hook, 1), module=PlainNet, max_epochs=3, options=ALWAYS)
    assert cost.exit_code == 1


@pytest.mark.parametrize("in_front", [True, False], ids=["in front", "after"])
@pytest.mark.parametrize(
    ("hook", "at"), [("on_train_epoch_end", 0), ("on_train_epoch_end", 1), ("on_train_batch_end", 7)]
)
def test_saved_beside_pruning(hook: str, at: int, in_front: bool) -> None:
    """A checkpoint that other code saves before or after a pruning continues exactly."""
    both = (lambda: [saver(hook, at), *pruning()]) if in_front else (lambda: [*pruning(), saver(hook, at)])
    assert_continues_from(hook, users=both, module=PlainNet, max_epochs=3)


class ByHand(PlainNet):
    """Has a layer that was pruned earlier, and repeatedly prunes another one itself."""

    def __init__(self) -> None:
        super().__init__()
        prune.random_unstructured(self.layers[2], "weight", 3)  # type: ignore[no-untyped-call]

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx % 3 == 1:
            prune.l1_unstructured(self.layers[0], "weight", 2)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("kill", [4, pytest.param(9, marks=pytest.mark.slow)])
def test_pruning_by_hand(kill: int) -> None:
    """Masks from a hook continue, even right before the next pruning, which depends on the last pass."""
    [cost] = assert_exact(list, KillAt(kill), module=ByHand, accumulate_grad_batches=2)
    assert (cost.epoch, cost.batch) == divmod(kill, 5)


class AtItsStart(PlainNet):
    """Prunes at each start."""

    def on_train_start(self) -> None:
        prune.l1_unstructured(self.layers[0], "weight", 2)  # type: ignore[no-untyped-call]


def test_pruning_at_each_start() -> None:
    """The next process prunes again at its start, but its mask is the first one."""
    assert_exact(list, KillAt(3), module=AtItsStart)


def test_pruned_run_whose_masks_are_gone_does_not_grow(tmp_path: Path) -> None:
    """More epochs after a fit that has removed its masks are refused."""

    def main(max_epochs: int) -> None:
        fit_net([*pruning(), FaultTolerance()], tmp_path, module=PlainNet(), max_epochs=max_epochs)
        os.kill(os.getpid(), signal.SIGKILL)

    assert run(lambda: main(2)).exit_code == -signal.SIGKILL
    ended = run(lambda: main(3))
    assert ended.exit_code == 1
    assert "ended with the masks of its pruned weights removed" in ended.output

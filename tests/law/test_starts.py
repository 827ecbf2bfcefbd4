"""The law for hooks at the start of a fit that change weights after a checkpoint is loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_faulttolerant.testing import KillAt, NotTheSame
from tests.runs import FIRST_EPOCH, Net, assert_continues, assert_exact


class StartsFromWeights(Net):
    """Loads weights at each start, and passes a batch through its norm when it creates its optimizer."""

    def configure_optimizers(self) -> Any:
        self.layers(torch.ones(4, 4))
        return super().configure_optimizers()

    def on_train_start(self) -> None:
        self.layers[0].load_state_dict({"weight": torch.ones(8, 4), "bias": torch.zeros(8)})


def test_hooks_at_the_start_that_change_weights() -> None:
    """Hooks change the weights once, as in the uninterrupted run: the restored weights are put back."""
    assert_continues(FIRST_EPOCH, module=StartsFromWeights)


class LoadsAnother(Net):
    """Loads another weight than the one in the file, and sets it again at the start."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["layers.0.weight"] = checkpoint["state_dict"]["layers.0.weight"] * 2

    def on_train_start(self) -> None:
        self.layers[0].weight.data.fill_(1.0)


def test_weights_that_cant_be_put_back_are_named() -> None:
    """If the loaded weights differ from the file's, a hook that changes those is refused."""
    with pytest.raises(NotTheSame, match=r"has changed layers\.0\.weight after the load of the checkpoint"):
        assert_continues(FIRST_EPOCH, module=LoadsAnother)


class LazyNet(Net):
    """Learns its shapes from a first batch, when it creates its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(1))

    def configure_optimizers(self) -> Any:
        self.layers(torch.ones(4, 4))
        return torch.optim.Adam(self.parameters())


def test_lazy_modules() -> None:
    """A module with unknown shapes at its load continues, twice."""
    assert_exact(list, KillAt(3), KillAt(3), module=LazyNet)


class FirstBatchNet(LazyNet):
    """Learns its shapes from the first batch of the training, or of the sanity check."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("num_sanity_steps", [0, 1])
def test_lazy_modules_without_a_shape_at_the_start(num_sanity_steps: int) -> None:
    """A module whose shapes follow from a batch continues after that batch, twice."""
    assert_exact(list, KillAt(1), KillAt(3), module=FirstBatchNet, num_sanity_val_steps=num_sanity_steps)

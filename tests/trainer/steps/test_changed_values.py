"""``replay --set`` sets attributes, keys, indices, and tensors of the fit, and nothing that isn't there yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_faulttolerant.errors import ReplayError
from lightning_faulttolerant.trainer.steps.replay import set_value


class SizedNet(LightningModule):
    """Has hyperparameters, a dict, a buffer, and a property without a setter."""

    fixed = property(lambda self: 1)

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(size, size), nn.Dropout(0.3))
        self.weights = {"first": 1, "keys": [1, 2]}
        self.register_buffer("mean", torch.zeros(2))


@pytest.fixture
def trainer() -> Any:
    """A trainer with a module and an optimizer."""
    module = SizedNet()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return SimpleNamespace(lightning_module=module, optimizers=[optimizer], datamodule=None, limit_train_batches=1.0)


@pytest.mark.parametrize(
    ("key", "text", "read", "value"),
    [
        ("model.layers.1.p", "0.5", lambda t: t.lightning_module.layers[1].p, 0.5),
        ("model.hparams.size", "7", lambda t: t.lightning_module.hparams.size, 7),
        ("model.weights.first", "some text", lambda t: t.lightning_module.weights["first"], "some text"),
        ("model.weights.keys.1", "(3, 'x')", lambda t: t.lightning_module.weights["keys"][1], (3, "x")),
        ("model.mean", "[1, 2.5]", lambda t: t.lightning_module.mean.tolist(), [1, 2.5]),
        ("model.layers.0.bias", "3", lambda t: t.lightning_module.layers[0].bias.tolist(), [3, 3]),
        ("optimizers.0.param_groups.0.lr", "1e-4", lambda t: t.optimizers[0].param_groups[0]["lr"], 1e-4),
        ("trainer.limit_train_batches", "5", lambda t: t.limit_train_batches, 5),
    ],
)
def test_a_value_is_set(trainer: Any, key: str, text: str, read: Any, value: object) -> None:
    """It has the type that Python gives to the text; a parameter stays the same object."""
    bias = trainer.lightning_module.layers[0].bias
    assert read(trainer) != value
    set_value(trainer, key, text)
    assert read(trainer) == value
    assert trainer.lightning_module.layers[0].bias is bias


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("net.layers", "a key, such as model.hparams.size, begins with one of model, datamodule, optimizers, trainer."),
        ("model.layer.1.p", "model, a SizedNet, has no layer."),
        ("model.weights.second", "model.weights, a dict, has no second."),
        ("optimizers.1.lr", "optimizers, a list, has no 1."),
        ("optimizers.x.lr", "optimizers, a list, has no x."),
        ("model.mean", "it can't be set to 1, 2, 3"),
        ("model.fixed", "it can't be set to 1, 2, 3"),
    ],
)
def test_what_is_not_there_is_an_error(trainer: Any, key: str, why: str) -> None:
    """A misspelled key never creates an attribute that nothing reads."""
    with pytest.raises(ReplayError, match=r"^--set ") as caught:
        set_value(trainer, key, "1, 2, 3")
    assert why in str(caught.value)

"""Weights under their names from before a pruning, and the adapter of ModelPruning on single layers."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning
from torch import nn

from lightning_faulttolerant.trainer.adapters.state import Pruning, without_masks


class Layers(LightningModule):
    """Two layers; one of them is pruned."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.pruned, self.other = nn.Linear(4, 4), nn.Linear(4, 4)


def prepared(seed: int, **arguments: Any) -> tuple[Layers, ModelPruning]:
    """Return a module, and a callback that has seen it."""
    module = Layers(seed)
    callback = ModelPruning("l1_unstructured", parameters_to_prune=[(module.pruned, "weight")], amount=0.5, **arguments)
    callback.setup(Trainer(logger=False, enable_checkpointing=False, accelerator="cpu"), module, "fit")
    return module, callback


def safe(state: dict[str, Any]) -> dict[str, Any]:
    """Save a state to a file and load it safely."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def test_names_are_those_from_before() -> None:
    """A mask is dropped, and the weight that it hides gets its original name; names that only look alike stay."""
    weights = {"a.weight_orig": 1, "a.weight_mask": 2, "a.bias": 3, "b.attention_mask": 4, "c.weight_orig": 5}
    expected = {"a.weight": 1, "a.bias": 3, "b.attention_mask": 4, "c.weight_orig": 5}
    assert without_masks(weights) == expected


@pytest.mark.parametrize("arguments", [{}, {"use_lottery_ticket_hypothesis": False}], ids=["lottery", "plain"])
@pytest.mark.parametrize("num_prunings", [0, 1, 2])
def test_masks_and_first_weights_come_back(num_prunings: int, arguments: dict[str, Any]) -> None:
    """A state that is loaded and read again is the same; the parameter is still the object that an optimizer holds."""
    adapter, trainer = Pruning(), Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    saved, callback = prepared(1, **arguments)
    for _ in range(num_prunings):
        callback._run_pruning(0)
    fresh, other = prepared(2, **arguments)
    parameter = fresh.pruned.weight
    fresh.load_state_dict(without_masks(saved.state_dict()))
    state = adapter.state_dict(trainer, callback)
    adapter.load_state_dict(trainer, other, safe(state))
    again = adapter.state_dict(trainer, other)
    assert again["pruned"].keys() == state["pruned"].keys() == ({"0"} if num_prunings else set())
    assert again["shared"] == state["shared"]
    for part in ("mask", "hidden"):
        assert all(torch.equal(again["pruned"][key][part], state["pruned"][key][part]) for key in state["pruned"])
    assert all(torch.equal(again["first"][key], value) for key, value in state["first"].items())
    assert dict(fresh.named_parameters())["pruned.weight_orig" if num_prunings else "pruned.weight"] is parameter

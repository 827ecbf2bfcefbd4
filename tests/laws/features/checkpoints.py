"""What hooks and overrides of a user leave out of a checkpoint, rename, or add."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tests.laws.features.starts import stopping
from tests.laws.rows import Net, row


class Leaves(Net):
    """Loads what is there."""

    strict_loading = False


@row("module", takes=("checkpoint", "optimizer", "layers", "argument accumulate_grad_batches"), callbacks=stopping)
class Drops(Leaves):
    """Saves only some of its trained layers, and nothing that isn't weights."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        kept = {name: value for name, value in checkpoint["state_dict"].items() if "layers.0" not in name}
        checkpoint["state_dict"] = kept
        checkpoint["optimizer_states"] = []
        checkpoint["lr_schedulers"].clear()
        for name in ("loops", "callbacks"):
            del checkpoint[name]


@row("module", takes="checkpoint")
class Renames(Net):
    """Saves its weights under other names, and translates them when it loads."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {f"old.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict({name[4:]: value for name, value in state_dict.items()}, *args, **kwargs)


class Hidden(Leaves):
    """Has a part that its ``state_dict`` lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_part = self.make_hidden().requires_grad_(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = super().state_dict(*args, **kwargs)
        return {name: value for name, value in found.items() if not name.startswith("hidden_part.")}


@row("module", part="buffers", shows="hidden_teacher", takes=("checkpoint", "layers"))
class HidesTeacher(Hidden):
    """A teacher that averages the weights, with moving statistics, is not in the ``state_dict``."""

    def make_hidden(self) -> nn.Module:
        return nn.Sequential(copy.deepcopy(self.layers), nn.BatchNorm1d(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for own, other in zip(self.hidden_part[0].parameters(), self.layers.parameters(), strict=True):
            own.data.mul_(0.9).add_(other.detach(), alpha=0.1)
        self.log("hidden_teacher", self.hidden_part[1].running_mean.sum())
        return loss + self.hidden_part(torch.rand(4, 4)).square().mean()


@row("module", takes=("checkpoint", "layers"))
class HidesCopy(Hidden):
    """A teacher that a hook copies from the student at the start, and that stays as it is, is not saved."""

    def make_hidden(self) -> nn.Module:
        return copy.deepcopy(self.layers)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.hidden_part.load_state_dict(self.layers.state_dict())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            taught = self.hidden_part.eval()(batch)
        return loss + (self.layers(batch) - taught).square().mean()


@row("module", takes="checkpoint")
class Adapts(Hidden):
    """Trains an adapter of a frozen base, and saves only the adapter."""

    def make_hidden(self) -> nn.Module:
        base = nn.Linear(4, 4)
        nn.init.orthogonal_(base.weight, generator=torch.Generator().manual_seed(1))
        nn.init.zeros_(base.bias)
        return base

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(self.hidden_part(batch), batch_idx)


@row("module", takes=("checkpoint", "optimizer", "layers"), callbacks=stopping)
class Thins(Net):
    """Saves half of the bits of its weights; keeps parts of the states, changes some, and adds others."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        weights = checkpoint["state_dict"]
        halves = {name: value.half() for name, value in weights.items() if value.is_floating_point()}
        checkpoint["state_dict"] = {**weights, **halves}
        checkpoint["optimizer_states"] = [
            {
                "state": {number: {"step": one["step"]} for number, one in state["state"].items()},
                "param_groups": [{**group, "lr": 7} for group in state["param_groups"]],
            }
            for state in checkpoint["optimizer_states"]
        ]
        checkpoint["lr_schedulers"] = None
        checkpoint["callbacks"] = {name: {"another": 1} for name in checkpoint["callbacks"]}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        assert all(state["another"] == 1 for state in checkpoint["callbacks"].values())


@row("module", takes=("checkpoint", "first autosave"), ranks=False)  # ranks don't put a save off
class SavesWhatStepsMake(Net):
    """Has nothing to save before its first step: the first autosave comes after a batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.made_in_step = super().training_step(batch, batch_idx)
        return self.made_in_step

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["made_in_step"] = self.made_in_step.detach()

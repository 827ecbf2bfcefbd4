"""Hooks at the start of a fit that change what a checkpoint has restored, and modules that learn their shapes late."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn

from tests.laws.rows import Net, add, row


def stopping() -> EarlyStopping:
    """Return a callback whose state hooks change."""
    return EarlyStopping("loss", patience=9, min_delta=9.0)  # there is one whatever the validation loaders


@row("module", takes="layers")
class StartsFromWeights(Net):
    """Loads weights at each start, and passes a batch through its norm when it creates its optimizer."""

    def configure_optimizers(self) -> Any:
        self.layers(torch.ones(4, 4))
        return super().configure_optimizers()

    def on_train_start(self) -> None:
        super().on_train_start()
        self.layers[0].load_state_dict({"weight": torch.ones(8, 4), "bias": torch.zeros(8)})


class Scaled(Net):
    """Saves another weight and momentum than its own, loads its own, and sets the weight at each start."""

    def scale(self, checkpoint: dict[str, Any], factor: float) -> None:
        """Multiply what is in a checkpoint."""
        weights, [optimizer] = checkpoint["state_dict"], checkpoint["optimizer_states"]
        weights["layers.0.weight"] = weights["layers.0.weight"] * factor
        states = optimizer["state"].items()
        optimizer["state"] = {number: {**one, "exp_avg": one["exp_avg"] * factor} for number, one in states}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        self.scale(checkpoint, 0.5)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.scale(checkpoint, 2.0)

    def on_train_start(self) -> None:
        super().on_train_start()
        self.layers[0].weight.data.fill_(1.0)


add("SavesInAnotherForm", module=Scaled, takes=("checkpoint", "optimizer", "layers"))


@row("module", takes=("checkpoint", "optimizer"))
class SetsOptimizer(Net):
    """Sets values of its optimizer at each start, counts in its group, and keeps a tensor of its state."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        checkpoint["optimizer_states"] = []

    def on_train_start(self) -> None:
        super().on_train_start()
        [optimizer] = self.trainer.optimizers
        optimizer.param_groups[0].update(lr=0.05, num_seen=0)
        for parameter, state in optimizer.state.items():
            state["exp_avg"].zero_()
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            self.held_average = state["exp_avg_sq"]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        [optimizer] = self.trainer.optimizers
        optimizer.param_groups[0]["num_seen"] += 1
        held = getattr(self, "held_average", None)
        assert held is None or any(held is state["exp_avg_sq"] for state in optimizer.state.values())
        return loss


class SetsOthers(Callback):
    """Sets values of a scheduler, of Lightning's callbacks, and of its own state, at each start."""

    def __init__(self) -> None:
        self.num_batches_seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"num_batches_seen": self.num_batches_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_batches_seen = state_dict["num_batches_seen"]

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        trainer.early_stopping_callback.wait_count = 5

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.num_batches_seen = 0
        for config in trainer.lr_scheduler_configs:
            config.scheduler.last_epoch = 0

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.num_batches_seen += 1
        module.log("num_batches_seen", float(self.num_batches_seen))


add("SetsOthers", callbacks=lambda: [SetsOthers(), stopping()])


@row("module", takes=("checkpoint", "optimizer", "layers"), callbacks=stopping)
class ChangesOnLoad(Net):
    """Changes states and weights of a checkpoint in ``on_load_checkpoint``."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        [optimizer] = checkpoint["optimizer_states"]
        if optimizer["state"]:
            optimizer["state"][0]["exp_avg"].zero_()
            optimizer["state"][1]["exp_avg"] = torch.zeros_like(optimizer["state"][1]["exp_avg"])
            del optimizer["state"][2]
        checkpoint["callbacks"].clear()
        optimizer["param_groups"][0]["lr"] = 1.0
        checkpoint["lr_schedulers"][0].update(last_epoch=0, _last_lr=[1.0])
        checkpoint["state_dict"]["layers.0.weight"] = torch.zeros(8, 4)


@row("module", takes="layers", ranks=False)  # DDP wants shapes before
class Lazy(Net):
    """Learns its shapes when it creates its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(1))

    def configure_optimizers(self) -> Any:
        self.layers(torch.ones(4, 4))
        return super().configure_optimizers()


class LazyUntilFirstBatch(Lazy):
    """Learns its shapes from the first batch, of the training or of the sanity check."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


add("LazyUntilFirstBatch", module=LazyUntilFirstBatch, takes=("layers", "optimizer", "first autosave"), ranks=False)


@row("module", takes=("log", "copies"))
class LogIsFunction(Net):
    """Has a function as its ``log``, which does not belong to a module."""

    def __init__(self) -> None:
        super().__init__()
        log = self.log
        self.log = lambda *args, **arguments: log(*args, **arguments)  # type: ignore[method-assign]

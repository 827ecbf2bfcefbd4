"""Lightning's own callbacks that keep more than their ``state_dict`` holds."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelPruning,
    OnExceptionCheckpoint,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    throughput_monitor,
)
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader

from lightning_faulttolerant import clock
from tests.laws.data_sets import NoisyDataset
from tests.laws.rows import Net, Row, add, row


class Backbone(Net):
    """A backbone with batch norm, and a head; at first the optimizer has only the head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8))
        self.layers = nn.Sequential(self.backbone, nn.Linear(8, 1))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


class Unfreezing(BaseFinetuning):
    """Freezes the whole backbone, including its norm; unfreezes it in two steps, each with its own arguments."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone[3], optimizer, lr=0.005)
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.backbone[:3], optimizer)
            optimizer.param_groups[-1]["weight_decay"] = 0.3


ALL = ("optimizer", "layers", "copies")
EMA = ("layers", "copies", "checkpoint")  # it loads all weights itself
THREE: dict[str, Any] = {"takes": ALL, "trainer": {"max_epochs": 3}}
add("unfreezing", module=Backbone, callbacks=Unfreezing, ranks=False, **THREE)


class NormNet(Net):
    """Has a batch norm with its own momentum, and a scheduler per epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=0.2), nn.Dropout(0.3), nn.Linear(8, 1))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)]


def averaging() -> Callback:
    """Return an averaging from the second epoch on, which ends with an epoch that only updates the norm."""
    return StochasticWeightAveraging([0.05], swa_epoch_start=1, annealing_epochs=2, annealing_strategy="linear")


# Lightning refuses an epoch without a length, as rows that are fetched ahead have it.
add("stochastic weight averaging", module=NormNet, callbacks=averaging, apart="counts", **THREE)

try:
    from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging
except ImportError:  # Lightning 2.5 has none
    pass
else:
    add("exponential average", callbacks=lambda: EMAWeightAveraging(decay=0.8, update_every_n_steps=2), takes=EMA)


ODD = {"make_pruning_permanent": False, "use_lottery_ticket_hypothesis": False}
BY_LAYER = {"use_global_unstructured": False, "prune_on_train_epoch_end": False}
for name, arguments in {"pruning": {}, "pruning each layer after validation": {**ODD, **BY_LAYER}}.items():
    every = {"pruning_fn": "l1_unstructured", "amount": 0.25, "parameter_names": ["weight"], **arguments}
    add(name, module=NormNet, callbacks=lambda every=every: ModelPruning(**every), ranks=False, **THREE)


@row("module", takes=ALL)
class PrunesItself(NormNet):
    """Has a layer that was pruned before, and prunes another one again and again in a hook."""

    def __init__(self) -> None:
        super().__init__()
        prune.random_unstructured(self.layers[3], "weight", 3)  # type: ignore[no-untyped-call]

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx % 3 == 1:
            prune.l1_unstructured(self.layers[0], "weight", 2)  # type: ignore[no-untyped-call]


class FindsRate(LearningRateFinder):
    """Looks for a learning rate at the start of two epochs, as in Lightning's guide."""

    def __init__(self) -> None:
        super().__init__(num_training_steps=20)

    def on_fit_start(self, *_: Any) -> None:
        """Not yet."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch < 2:
            self.lr_find(trainer, pl_module)


class Sought(Net):
    """Has a learning rate that a finder sets, and no scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), self.lr)


class FindsSize(BatchSizeFinder):
    """Looks for a batch size at the start of two epochs, as in Lightning's guide."""

    def __init__(self) -> None:
        super().__init__(mode="power", steps_per_trial=2, max_trials=2)

    def on_fit_start(self, *_: Any) -> None:
        """Not yet."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch in (0, 2):
            self.scale_batch_size(trainer, pl_module)


class Sized(LightningDataModule):
    """Creates its loader with a batch size that a finder sets."""

    batch_size = 2

    def train_dataloader(self) -> Any:
        return DataLoader(NoisyDataset(64), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(NoisyDataset(16), batch_size=4)


# Their trials call the hooks of all other rows, so they are no rows themselves.
FINDERS = [
    Row(name="learning rate finder", module=Sought, callbacks=FindsRate, trainer={"max_epochs": 3}),
    Row(name="batch size finder", data=Sized, callbacks=FindsSize, trainer={"limit_train_batches": 6, "max_epochs": 3}),
]

add(
    "accumulation by epoch", callbacks=lambda: GradientAccumulationScheduler({0: 1, 1: 3}), repeats=4,
    takes="argument accumulate_grad_batches",
)  # fmt: skip
add(
    "early stopping that waits", trainer={"val_check_interval": 3, "min_epochs": 2, "max_epochs": 5},
    callbacks=lambda: EarlyStopping("val_loss", patience=1, min_delta=100.0, check_on_train_epoch_end=False),
)  # fmt: skip
add("monitor of rates", callbacks=lambda: LearningRateMonitor(log_momentum=True))


class ShowsSpikes(Callback):
    """Logs the values of a SpikeDetection: before a batch its last value, after it its mean."""

    def __init__(self, detection: SpikeDetection) -> None:
        self.detection = detection

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        pl_module.log("last_of_spikes", self.detection.last_val, batch_size=4)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        pl_module.log("mean_of_spikes", self.detection.running_mean.compute(), batch_size=4, on_epoch=True)


def calm() -> list[Callback]:
    """Return a detection that finds nothing, and keeps a window."""
    detection = SpikeDetection(window=4, warmup=2, atol=1e9, rtol=None, exclude_batches_path="unused.json")
    return [detection, ShowsSpikes(detection)]


add("spike detection", callbacks=calm, ranks=False)


class Clock:
    """Replaces ``time``; it passes only when it is told to."""

    def __init__(self) -> None:
        # The package does not look for state here: another process's time is not state.
        self.now = ContextVar("now", default=0.0)
        self.perf_counter = self.now.get

    def pass_seconds(self, seconds: float) -> None:
        self.now.set(self.now.get() + seconds)


class MovesClock(Callback):
    """Moves the clock: each batch takes another time, and the start of a training takes long."""

    def setup(self, *_: Any, **__: Any) -> None:
        self.clock = throughput_monitor.time = Clock()
        real = clock.perf_counter
        for module in list(sys.modules.values()):
            if "faulttolerant" in module.__name__ and vars(module).get("perf_counter") is real:
                module.perf_counter = self.clock.perf_counter

    def on_train_start(self, *_: Any) -> None:
        self.clock.pass_seconds(1000)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.clock.pass_seconds(1 + batch_idx / 8)

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.clock.pass_seconds(0.25 + batch_idx / 16)


class Measured(Net):
    """Knows the cost of a batch."""

    flops_per_batch = 64


def measuring() -> list[Callback]:
    """Return a monitor that also counts lengths, and what moves its clock."""
    monitor = ThroughputMonitor(len, length_fn=lambda batch: 100 * len(batch), window_size=3)
    return [MovesClock(), monitor]


add("ThroughputMonitor", module=Measured, callbacks=measuring, takes=("clock", "layers"), ranks=False)
add(
    "OnExceptionCheckpoint",
    callbacks=lambda: OnExceptionCheckpoint("on_exception"),
    trainer={"enable_checkpointing": True},
    warns=(".*there is no last checkpoint available", ".*was called without a model"),
)

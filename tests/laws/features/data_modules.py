"""Data modules with state, and loaders that Lightning requests again."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader

from tests.laws.data_sets import NoisyDataset, batch_of
from tests.laws.rows import add, rows_of

RELOADED = {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2}


class Data(LightningDataModule):
    """Has validation rows."""

    def val_dataloader(self) -> Any:
        return rows_of(8, shuffle=False)()


class Counts(Data):
    """Counts the batches that were used, as its state, and shifts each by the count."""

    num_used = 0

    def train_dataloader(self) -> Any:
        return rows_of(24)()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.num_used += 1
        return batch + self.num_used / 100

    def state_dict(self) -> dict[str, Any]:
        return {"num_used": self.num_used}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_used = state_dict["num_used"]


class Levels(Data):
    """Its loaders depend on attributes that training changes; it has no state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def train_dataloader(self) -> Any:
        data = NoisyDataset(24)
        data.rows = data.rows + sum(self.losses)
        return DataLoader(data, batch_size=4, shuffle=True)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            self.losses.append(float(batch.mean()) / 10)
        return batch


class Keeps(Data):
    """Returns the same loader each time, with persistent workers, in the same CombinedLoader."""

    combined: Any = None

    def train_dataloader(self) -> Any:
        if self.combined is None:
            self.combined = CombinedLoader([rows_of(24, num_workers=2, persistent_workers=True)()])
        return self.combined


class Generates(Data):
    """Its ``train_dataloader`` is a generator function."""

    def train_dataloader(self) -> Iterator[Tensor]:
        yield from map(batch_of, range(6))


class Enlarges(Data):
    """Trains each epoch on more samples, in larger batches."""

    def train_dataloader(self) -> Any:
        epoch = self.trainer.current_epoch
        return DataLoader(NoisyDataset(24 + 8 * epoch), batch_size=4 + epoch, shuffle=True)


class Seeded(NoisyDataset):
    """Holds a seed, and no other sign of what its samples are."""

    def __init__(self, seed: int, length: int) -> None:
        super().__init__(length)
        self.seed = seed

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + torch.rand(4, generator=torch.Generator().manual_seed(self.seed + index))


class Derives(Data):
    """Creates its loaders from what trainer, module, and generators show when they are requested, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.own = random.Random(1)

    def derived(self) -> int:
        """Return a seed."""
        trainer, module = self.trainer, self.trainer.lightning_module
        loss = trainer.callback_metrics.get("loss_epoch", torch.zeros(()))
        rates = trainer.optimizers[0].param_groups[0]["lr"], trainer.lr_scheduler_configs[0].scheduler.get_last_lr()
        with torch.no_grad():
            weights = sum(float(each.sum()) for each in module.parameters())
        drawn = float(torch.rand(())), self.own.random()
        shown = trainer.current_epoch, trainer.global_step, float(loss), rates, weights, drawn
        return zlib.crc32(repr(shown).encode())

    def train_dataloader(self) -> Any:
        return DataLoader(Seeded(self.derived(), 24), batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Seeded(self.derived(), 8), batch_size=4)


add("state of a data module", data=Counts, trainer=RELOADED)
add("attributes of a data module", part="objects", shows="content", data=Levels, trainer=RELOADED)
add("one combined loader again", part="loaders", shows="content", data=Keeps, trainer=RELOADED)
add("generator function", part="loaders", shows="content", data=Generates, trainer=RELOADED, takes="early loaders")
add("larger epochs", part="loaders", shows="content", data=Enlarges, trainer=RELOADED, ranks=False)
add(
    "derived from the trainer", part="loaders", shows="content", data=Derives, trainer=RELOADED,
    takes=("optimizer", "checkpoint"),  # hidden weights: `KNOWN`
)  # fmt: skip

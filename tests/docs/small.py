"""Names that preludes provide to pages: a model and data so small that a fit is instant, with the pages' names."""

from __future__ import annotations

from typing import Any, ClassVar

import fsspec
import torch
import torch._dynamo  # takes a second, which each process would need at its optimizer's first step
from fsspec.implementations.memory import MemoryFileSystem
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

# Imported here, and not in each process that runs a page.
import lightning_faulttolerant.testing.exactness
import lightning_faulttolerant.trainer.callback  # noqa: F401

# Lightning's defaults for a Trainer's arguments; the arguments on a page override them.
ENVIRONMENT = {
    "PL_TRAINER_ACCELERATOR": "cpu",
    "PL_TRAINER_MAX_EPOCHS": "1",
    "PL_TRAINER_LOGGER": "False",
    "PL_TRAINER_ENABLE_PROGRESS_BAR": "False",
    "PL_TRAINER_ENABLE_MODEL_SUMMARY": "False",
}


class MyModel(LightningModule):
    """Drops out at random, and logs its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.layers(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def my_dataset() -> TensorDataset:
    """Return 12 samples."""
    return TensorDataset(torch.linspace(-1, 1, 48).reshape(12, 4))


def my_loader(**arguments: Any) -> DataLoader[Any]:
    """Return a loader of 6 shuffled batches."""
    return DataLoader(my_dataset(), **{"batch_size": 2, "shuffle": True, **arguments})


def keep_buckets_in_memory() -> None:
    """Keep `s3://` and `gs://` in this process: pages name buckets, and tests have no network."""
    for protocol, kind in (("s3", _InMemory), ("gs", _InMemory)):
        fsspec.register_implementation(protocol, kind, clobber=True)


class _InMemory(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no annotations
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    protocol = "bucket"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.partition("://")[2] or path if isinstance(path, str) else path)

"""What a script draws before ``fit``: each start draws another split, and the first start's split stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, SubsetRandomSampler, random_split

from tests.laws.rows import row


class Names(Dataset[Tensor]):
    """Its samples derive from file names."""

    def __init__(self, num: int) -> None:
        self.names = [f"/data/part-{i // 12}/{i:03d}/volume.nii" for i in range(num)]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Tensor:
        number = number_in(self.names[index])
        return torch.tensor([number, number**2, number % 5, 1.0]) + torch.randn(4)


def number_in(name: str) -> float:
    """Return the number in a file name."""
    return float(name.split("/")[3])


@row("data", takes="first autosave", trainer={"num_sanity_val_steps": 0})
class SplitInsideConcatenation(LightningDataModule):
    """Drawn parts of several data sets are joined; the validation loader comes late, in a resumed run after it."""

    def setup(self, stage: str) -> None:
        (a, b), (c, d) = random_split(Names(36), [16, 20]), random_split(Names(12), [8, 4])
        self.parts = ConcatDataset([a, c]), b, ConcatDataset([b, d])

    def train_dataloader(self) -> Any:
        return DataLoader(self.parts[0], 4, shuffle=True, num_workers=2)

    def val_dataloader(self) -> Any:
        return [DataLoader(part, batch_size=4, shuffle=part is self.parts[2]) for part in self.parts[1:]]

    test_dataloader = predict_dataloader = val_dataloader


@row("data", takes="first autosave", ranks=False)
class SplitBySamplers(LightningDataModule):
    """Samplers select drawn parts of one data set."""

    def setup(self, stage: str) -> None:
        dataset, order = Names(32), np.random.permutation(32).tolist()
        self.loaders = [DataLoader(dataset, 4, sampler=SubsetRandomSampler(part)) for part in (order[:24], order[24:])]

    def train_dataloader(self) -> Any:
        return self.loaders[0]

    def val_dataloader(self) -> Any:
        return self.loaders[1]

"""The objects that workers copy are carried, without those that other code carries."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_faulttolerant.loader.objects import LoaderObjects
from lightning_faulttolerant.loader.resumable import ResumableDataLoader


class Numbers(Dataset[int]):
    """Holds a module, and an object with a count."""

    def __init__(self) -> None:
        self.module = nn.Linear(2, 2)
        self.counter = SimpleNamespace(count=0)
        self.kept: Any = None

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


def test_weights_are_not_carried_again() -> None:
    """The weights of a module that the data set holds are in the checkpoint once; counts beside it are carried."""
    dataset = Numbers()
    objects = LoaderObjects(DataLoader(dataset))
    with torch.no_grad():
        dataset.module.weight.add_(1)
    assert objects.of_workers() == {}
    dataset.counter.count = 1
    assert list(objects.of_workers()["dataset"]["nodes"]) == ["dataset.counter"]


def test_state_of_a_loader_is_not_in_its_next_state() -> None:
    """A data set that keeps a state of its loader has nothing lost; otherwise each state would contain all before."""
    dataset = Numbers()
    objects = LoaderObjects(DataLoader(dataset))
    dataset.kept = ResumableDataLoader(dataset).state_dict()
    assert objects.of_workers() == {}

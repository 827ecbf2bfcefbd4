"""Any change to the order of samples or to the arithmetic shows in the fingerprint, with both values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from lightning_faulttolerant.trainer.run.fingerprint import (
    differences,
    loader_fingerprint,
    module_fingerprint,
    optimizer_fingerprint,
    trainer_fingerprint,
)
from tests.runs import make_trainer


class Rows(Dataset[Any]):
    def __init__(self, rows: Any, **attributes: Any) -> None:
        self.rows = rows
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a sample was read")


class Model(LightningModule):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(4, width)


def loader(data: Any = None, **arguments: Any) -> DataLoader[Any]:
    """Return a loader."""
    return DataLoader(Rows(torch.ones(8, 2)) if data is None else data, **{"batch_size": 2, **arguments})


BASE, CHANGED = Rows(torch.ones(8, 2)), Rows(torch.ones(8, 2).index_fill(0, torch.tensor(0), 2.0))

LOADERS: dict[str, tuple[DataLoader[Any], DataLoader[Any], str]] = {
    "batch size": (loader(), loader(batch_size=4), "batch_size: 2 when it was saved, 4 now"),
    "workers": (loader(), loader(num_workers=1), "num_workers: 0 when it was saved, 1 now"),
    "shuffling": (loader(), loader(shuffle=True), "SequentialSampler' when it was saved, 'BatchSampler over Random"),
    "no batching": (loader(), loader(batch_size=None), "'no batching over SequentialSampler' now"),
    "length": (loader(), loader(Rows(torch.ones(9, 2))), "dataset.length: 8 when it was saved, 9 now"),
    "first value": (loader(), loader(CHANGED), "dataset.rows: '[8, 2] torch.float32 crc "),
    "array": (loader(Rows(np.ones(8))), loader(Rows(np.arange(8.0))), "dataset.rows: '[8] float64 crc "),
    "tensors": (loader(TensorDataset(torch.ones(8))), loader(TensorDataset(2 * torch.ones(8))), "dataset.tensors.0: "),
    "split": (loader(Subset(BASE, [0, 1])), loader(Subset(BASE, [0, 2])), "dataset.indices: "),
    "data after it": (loader(Subset(BASE, [0, 1])), loader(Subset(CHANGED, [0, 1])), "dataset.dataset.rows: "),
    "class of the data": (loader(), loader(TensorDataset(torch.ones(8, 2))), "dataset.class: 'Rows' when"),
}


UP, DOWN = list(range(8)), list(range(8))[::-1]
HELD: dict[str, tuple[Any, Any, bool]] = {  # what data sets hold in two starts, and whether a difference counts
    "objects": ([SimpleNamespace(n=i) for i in UP], [SimpleNamespace(n=i) for i in DOWN], True),
    "by class": ({0: UP[:5], 1: UP[5:]}, {0: UP[3:], 1: UP[:3]}, True),
    "few numbers": ([0.1, 0.2], [0.3, 0.4], False),
    "small mapping": ({"pid": 1}, {"pid": 2}, False),
    "few names": (["a", "b"], ["b", "a"], True),
    "moved files": ([(f"/a/{i}/x.nii", i) for i in UP], [(f"/b/c/{i}/x.nii", i) for i in UP], False),
    "files of one name": ([(f"/a/{i}/x.nii", 0) for i in UP], [(f"/a/{i}/x.nii", 0) for i in DOWN], True),
    "no plain data": ([object()] * 8, [object()] * 8, False),
}
LOADERS |= {
    name: (loader(Rows(torch.ones(8), held=one)), loader(Rows(torch.ones(8), held=other)), "dataset.held: " * counts)
    for name, (one, other, counts) in HELD.items()
}
NEXT_TO_DATA: dict[str, Callable[[list[int]], DataLoader[Any]]] = {
    "dataset.samples": loader,
    "sampler.indices": lambda order: loader(sampler=SubsetRandomSampler(order)),
    "batch_sampler.sampler.indices": lambda order: DataLoader(
        UP, batch_sampler=BatchSampler(SubsetRandomSampler(order), 2, drop_last=False)
    ),
    "collate_fn.order": lambda order: loader(collate_fn=lambda samples: order),
    "worker_init_fn.order": lambda order: loader(worker_init_fn=partial(print, order=order)),
}
LOADERS["list of objects"] = (loader([object()] * 8), loader([object()] * 8), "")
LOADERS |= {name: (make(UP), make(DOWN), f"{name}: '[8] crc ") for name, make in NEXT_TO_DATA.items()}


def test_seed_of_a_distributed_sampler_gives_a_line() -> None:
    """Another seed is another order; with one rank, or without shuffling, there is none to compare."""

    def distributed(seed: int, *, shuffle: bool = True) -> dict[str, Any]:
        sampler: DistributedSampler[Any] = DistributedSampler(
            range(8), num_replicas=2, rank=0, seed=seed, shuffle=shuffle
        )
        fingerprint = loader_fingerprint(DataLoader(range(8), sampler=sampler))
        return {name: value for name, value in fingerprint.items() if name != "sampler"}

    assert [*map(str, differences(distributed(1), distributed(2)))] == ["sampler_seed: 1 when it was saved, 2 now"]
    alone = loader_fingerprint(DataLoader(range(8), shuffle=True))
    del alone["sampler"]
    for one, other in ((distributed(1), distributed(1)), (alone, distributed(1)), (distributed(1), alone)):
        assert list(differences(one, other)) == []
    assert list(differences(distributed(1, shuffle=False), distributed(2, shuffle=False))) == []


def sgd(kind: Any = torch.optim.SGD, now: float | None = None, **arguments: Any) -> dict[str, Any]:
    """Return the fingerprint of an optimizer, whose rate a schedule has changed to `now`."""
    made: torch.optim.Optimizer = kind([nn.Parameter(torch.ones(1))], **{"lr": 0.1, **arguments})
    made.param_groups[0]["lr"] = now or made.param_groups[0]["lr"]
    return optimizer_fingerprint(made)


def trainer(**arguments: Any) -> dict[str, Any]:
    """Return the fingerprint of a trainer."""
    return trainer_fingerprint(make_trainer([], Path("unused"), **arguments))


FINGERPRINTS: dict[str, tuple[Any, Any, str]] = {
    "shape": (
        lambda: module_fingerprint(Model()),
        lambda: module_fingerprint(Model(width=5)),
        "parameters.layer.weight: [4, 4] when",
    ),
    "rate": (sgd, lambda: sgd(lr=0.2), "lr: 0.1 when it was saved, 0.2 now"),
    "optimizer": (sgd, lambda: sgd(torch.optim.Adam), "class: 'SGD' when it was saved, 'Adam' now"),
    "schedule": (sgd, lambda: sgd(now=0.01), ""),
    "window": (trainer, lambda: trainer(accumulate_grad_batches=2), "accumulate_grad_batches: 1 when it was saved, 2"),
    "limit": (trainer, lambda: trainer(limit_train_batches=0.5), "limit_train_batches: 1.0 when it was saved, 0.5 now"),
    "precision": (trainer, lambda: trainer(precision="bf16-true"), "precision: '32-true' when it was saved, 'bf16-tr"),
    "longer": (trainer, lambda: trainer(max_epochs=7), ""),
}
CASES = {**LOADERS, **FINGERPRINTS}


@pytest.mark.parametrize("case", CASES)
def test_each_change_gives_a_line(case: str) -> None:
    """Each change of data, order, shapes, classes, and original arguments has a line with both values.

    What a schedule has reached, and longer training, have none.
    """
    saved, now, expected = CASES[case]
    then, here = (loader_fingerprint(one) if isinstance(one, DataLoader) else one() for one in (saved, now))
    lines = [str(one) for one in differences(then, here)]
    assert any(expected in line for line in lines) == bool(lines) == bool(expected), lines
    assert all(" when it was saved, " in line and line.endswith(" now") for line in lines)
    assert list(differences(then, then)) == []

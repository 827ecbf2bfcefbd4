"""Any change to the order of samples or to the arithmetic shows in the fingerprint, with both values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from lightning_faulttolerant.errors import FingerprintMismatchError
from lightning_faulttolerant.state.rng import rng_state
from lightning_faulttolerant.trainer.run.fingerprint import (
    Comparison,
    Fingerprint,
    differences,
    loader_fingerprint,
    module_fingerprint,
    optimizer_fingerprint,
    trainer_fingerprint,
)
from tests.runs import make_trainer


class Rows(Dataset[Any]):
    """Fails if a sample is read."""

    def __init__(self, rows: Any, **attributes: Any) -> None:
        self.rows = rows
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a sample was read")


class Model(LightningModule):
    def __init__(self, width: int = 4, rate: float = 0.1, note: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(4, width)


class OtherModel(Model):
    pass


def ones(*shape: int) -> torch.Tensor:
    """Return a tensor of ones."""
    return torch.ones(*shape)


def changed(place: int) -> torch.Tensor:
    """Return ones, except for one value."""
    tensor = ones(8, 2)
    tensor.view(-1)[place] = 2
    return tensor


class Own(Sampler[int]):
    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return iter(range(len(self.data)))

    def __len__(self) -> int:
        return len(self.data)


def loader(data: Any = None, **arguments: Any) -> DataLoader[Any]:
    """Return a loader."""
    return DataLoader(Rows(ones(8, 2)) if data is None else data, **{"batch_size": 2, **arguments})


BASE = Rows(ones(8, 2))

LOADERS: dict[str, tuple[DataLoader[Any], DataLoader[Any], str]] = {
    "batch size": (loader(), loader(batch_size=4), "batch_size: 2 when it was saved, 4 now"),
    "last batch": (loader(), loader(drop_last=True), "drop_last: False when it was saved, True now"),
    "workers": (loader(), loader(num_workers=1), "num_workers: 0 when it was saved, 1 now"),
    "shuffling": (loader(), loader(shuffle=True), "SequentialSampler' when it was saved, 'BatchSampler over Random"),
    "sampler": (loader(BASE, sampler=SequentialSampler(BASE)), loader(BASE, sampler=Own(BASE)), "over Own' now"),
    "no batching": (loader(), loader(batch_size=None), "'no batching over SequentialSampler' now"),
    "length": (loader(), loader(Rows(ones(9, 2))), "dataset.length: 8 when it was saved, 9 now"),
    "first value": (loader(), loader(Rows(changed(0))), "dataset.rows: '[8, 2] torch.float32 crc "),
    "last value": (loader(), loader(Rows(changed(15))), "dataset.rows: "),
    "dtype": (loader(), loader(Rows(ones(8, 2).double())), "torch.float64 crc "),
    "array": (loader(Rows(np.ones(8))), loader(Rows(np.arange(8.0))), "dataset.rows: '[8] float64 crc "),
    "second array": (loader(Rows(ones(8), y=ones(8))), loader(Rows(ones(8), y=2 * ones(8))), "dataset.y: "),
    "list of arrays": (loader(Rows([ones(1)] * 8)), loader(Rows([2 * ones(1)] * 8)), "dataset.rows.0: "),
    "tensors": (loader(TensorDataset(ones(8))), loader(TensorDataset(2 * ones(8))), "dataset.tensors.0: "),
    "split": (loader(Subset(BASE, [0, 1])), loader(Subset(BASE, [0, 2])), "dataset.indices: "),
    "size of the split": (loader(Subset(BASE, [0, 1])), loader(Subset(BASE, [0])), "dataset.length: 2 when"),
    "data after a split": (
        loader(Subset(BASE, [0, 1])),
        loader(Subset(Rows(changed(0)), [0, 1])),
        "dataset.dataset.rows: ",
    ),
    "part of a chain": (
        loader(ConcatDataset([BASE, BASE])),
        loader(ConcatDataset([BASE, Rows(changed(3))])),
        "dataset.parts.1.rows: ",
    ),
    "class of the data": (loader(), loader(TensorDataset(ones(8, 2))), "dataset.class: 'Rows' when"),
}


@pytest.mark.parametrize("case", LOADERS)
def test_each_change_of_a_loader_gives_a_line(case: str) -> None:
    """Each change of batch size, sampler, workers, data or split has a line with both values."""
    saved, now, expected = LOADERS[case]
    lines = list(differences(loader_fingerprint(saved), loader_fingerprint(now)))
    assert any(expected in line for line in lines), lines
    assert all(" when it was saved, " in line and line.endswith(" now") for line in lines)
    assert list(differences(loader_fingerprint(saved), loader_fingerprint(saved))) == []


def test_taking_it_draws_nothing_and_reads_nothing(tmp_path: Path) -> None:
    """No random number is drawn and no sample is read (the data set here would raise)."""
    trainer, model = make_trainer([], tmp_path), Model()
    trainer.strategy.connect(model)
    before = rng_state()
    loader_fingerprint(loader(shuffle=True))
    fingerprint = Fingerprint(trainer)
    fingerprint.state_dict({"train/0": loader_fingerprint(loader())})
    assert rng_state() == before


def test_seed_of_a_distributed_sampler_gives_a_line() -> None:
    """Another seed is another order; with one rank, or without shuffling, there is none to compare."""

    def distributed(seed: int, *, shuffle: bool = True) -> dict[str, Any]:
        sampler: DistributedSampler[Any] = DistributedSampler(
            range(8), num_replicas=2, rank=0, seed=seed, shuffle=shuffle
        )
        fingerprint = loader_fingerprint(DataLoader(range(8), sampler=sampler))
        return {name: value for name, value in fingerprint.items() if name != "sampler"}

    assert list(differences(distributed(1), distributed(2))) == ["sampler_seed: 1 when it was saved, 2 now"]
    alone = loader_fingerprint(DataLoader(range(8), shuffle=True))
    del alone["sampler"]
    for one, other in ((distributed(1), distributed(1)), (alone, distributed(1)), (distributed(1), alone)):
        assert list(differences(one, other)) == []
    assert list(differences(distributed(1, shuffle=False), distributed(2, shuffle=False))) == []


def sgd(kind: Any = torch.optim.SGD, **arguments: Any) -> torch.optim.Optimizer:
    """Return an optimizer."""
    made: torch.optim.Optimizer = kind([nn.Parameter(ones(1))], **{"lr": 0.1, **arguments})
    return made


def scheduled() -> torch.optim.Optimizer:
    """Return an optimizer whose rate a schedule has changed."""
    optimizer = sgd()
    optimizer.param_groups[0]["lr"] = 0.01
    return optimizer


OTHERS: dict[str, tuple[Any, Any, Any, list[str]]] = {
    "shape": (
        module_fingerprint,
        Model(),
        Model(width=5),
        ["parameters.layer.weight: [4, 4] when", "parameters.layer"],
    ),
    "class": (module_fingerprint, Model(), OtherModel(), ["class: 'Model' when it was saved, 'OtherModel' now"]),
    "rate": (optimizer_fingerprint, sgd(), sgd(lr=0.2), ["lr: 0.1 when it was saved, 0.2 now"]),
    "momentum": (optimizer_fingerprint, sgd(), sgd(momentum=0.9), ["momentum: 0 when it was saved, 0.9 now"]),
    "optimizer": (optimizer_fingerprint, sgd(), sgd(torch.optim.Adam), ["class: 'SGD' when it was saved, 'Adam' now"]),
    "schedule": (optimizer_fingerprint, sgd(), scheduled(), []),
}


@pytest.mark.parametrize("case", OTHERS)
def test_each_change_of_the_module_and_its_optimizer_gives_a_line(case: str) -> None:
    """Shapes, classes, and the optimizer's original arguments count, not the values that a schedule has reached."""
    of, saved, now, expected = OTHERS[case]
    lines = list(differences(of(saved), of(now)))
    assert bool(lines) == bool(expected)
    assert all(any(line.startswith(start) for line in lines) for start in expected), lines


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches: 1 when it was saved, 2 now"),
        ({"limit_train_batches": 0.5}, "limit_train_batches: 1.0 when it was saved, 0.5 now"),
        ({"gradient_clip_val": 1.0}, "gradient_clip_val: None when it was saved, 1.0 now"),
        ({"precision": "bf16-true"}, "precision: '32-true' when it was saved, 'bf16-true' now"),
    ],
)
def test_each_change_of_the_trainer_gives_a_line(arguments: dict[str, Any], expected: str, tmp_path: Path) -> None:
    """Each setting that groups batches or changes the arithmetic has a line; longer training is not a difference."""
    saved = trainer_fingerprint(make_trainer([], tmp_path))
    assert expected in list(differences(saved, trainer_fingerprint(make_trainer([], tmp_path, **arguments))))
    longer: Trainer = make_trainer([], tmp_path, max_epochs=7)
    assert trainer_fingerprint(longer) == saved


def test_error_shows_all_lines_and_what_to_do() -> None:
    """The error lists each difference, and names the checkpoint and the command that accepts them."""
    comparison = Comparison("run/autosave-1.ckpt", strict=True, is_elastic=False, accepted=["a"])
    saved, now = {"a": {"one": 1}, "b": 2, "c d": 3}, {"a": {"one": 2}, "b": 3, "c d": 4}
    with pytest.raises(FingerprintMismatchError) as error:
        comparison.compare(saved, now, ("a", "b", "c d"))
    for text in ("run/autosave-1.ckpt", "  - b: 2 when it was saved, 3 now", " run --accept b --accept 'c d' -- "):
        assert text in str(error.value)
    assert "a.one" not in str(error.value)

"""What a checkpoint can't carry is refused by name, with advice."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from syrupy.assertion import SnapshotAssertion
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.laws.cuts import Cut
from tests.laws.data_sets import NoisyDataset, StatefulStream
from tests.laws.features.any_iterables import Queue, ReadsAhead, Wrapper
from tests.laws.features.data_libraries import chunks, tars
from tests.laws.features.drawn_data import Names
from tests.laws.features.loaders_with_state import WARNS, Prefetching
from tests.laws.features.user_callbacks import Tables
from tests.laws.rows import Factor, Group, Net, Row
from tests.laws.runs import Training
from tests.messages import plain

CUT = Cut(at=(1, 3))


class Swaps(Factor):
    def __init__(self) -> None:
        super().__init__()
        self.twins = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])

    def factor(self, loss: Tensor) -> Any:
        if self.global_step == 3:
            self.twins[0], self.twins[1] = self.twins[1], self.twins[0]
        return 1 + self.twins[0](torch.ones(4)).sum() + 2 * self.twins[1](torch.ones(4)).sum()


class AddsTensor(Net):
    """Adds a new tensor to its optimizer after the first epoch."""

    def on_train_epoch_end(self) -> None:
        [optimizer] = self.trainer.optimizers
        if self.current_epoch == 0:
            optimizer.add_param_group({"params": [torch.zeros(3, requires_grad=True)]})


class ReplacesOptimizer(Net):
    """Continues with another optimizer in the second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.strategy.optimizers = [torch.optim.AdamW(self.parameters(), lr=0.01)]


class LeavesOut(Net):
    """Leaves out a layer that is never used, and that differs in each process."""

    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(4, 1).requires_grad_(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = super().state_dict(*args, **kwargs)
        return {name: value for name, value in found.items() if not name.startswith("unused.")}


class KeepsGraph(Net):
    """Lets the gradient of a batch flow back into the previous batch."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def loss(self, batch: Tensor) -> Tensor:
        before, self.last = self.last, self.layers[0](batch).mean()
        return super().loss(batch) + (before if before is not None and self.training else 0.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def told_where() -> Any:
    """Return a loader with a state that was loaded before fit."""
    other, loader = (StatefulDataLoader(NoisyDataset(), 4) for _ in range(2))
    next(iter(other))
    loader.load_state_dict(other.state_dict())
    return loader


class ReturnsWeight(Callback):
    """Returns a weight of the module in its state."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.held = [pl_module.layers[0].weight]

    def state_dict(self) -> dict[str, Any]:
        return self.__dict__


def holds_others() -> DataLoader[Any]:
    """Return a loader with a list of others, one of which is out of order."""
    loader = ReadsAhead(num_workers=1)
    vars(loader)["others"] = [DataLoader(NoisyDataset(24), num_workers=2, in_order=False)]
    return loader


def litdata_mixture() -> DataLoader[Any]:
    """A mixture of data sets of LitData."""
    import litdata

    return DataLoader(litdata.CombinedStreamingDataset([litdata.StreamingDataset(chunks()) for _ in range(2)]))


def webdataset(make: Callable[[Any], Any]) -> Callable[[], DataLoader[Any]]:
    """Return what makes a loader of a pipeline."""

    def made() -> DataLoader[Any]:
        import webdataset

        return DataLoader(make(webdataset), batch_size=4)

    return made


class Drawn(Names):
    """Shuffles what it holds, in each kind of container: a resume refuses it."""

    def __init__(self) -> None:
        super().__init__(24)
        shuffled = lambda: random.sample(self.names, 24)  # noqa: E731
        self.names, self.fixed, self.rotating = shuffled(), tuple(shuffled()), deque(shuffled())
        self.records = [{"name": name, "boxes": [[0, 1]]} for name in shuffled()]
        self.first, self.second = np.random.permutation(24), torch.randperm(24)
        self.few = [random.random() for _ in range(5)]


class OneStream(LightningDataModule):
    """One stream with a state is in two places, which would both move it."""

    def setup(self, stage: str) -> None:
        self.one = StatefulStream()

    def train_dataloader(self) -> Any:
        return DataLoader(self.one, batch_size=4)

    def val_dataloader(self) -> Any:
        return DataLoader(self.one, batch_size=4)


MODULES = [Swaps, AddsTensor, ReplacesOptimizer, LeavesOut, KeepsGraph]
LOADERS: dict[str, Callable[[], Any]] = {
    "told before": told_where,
    "ahead": lambda: Prefetching(ahead=1),
    "queue with an iterator": lambda: DataLoader(Queue(), batch_size=4),
    "thread that draws": lambda: ReadsAhead(NoisyDataset(24)),
    "out of order in a wrapper": lambda: Wrapper(NoisyDataset(24), num_workers=2, in_order=False),
    "out of order in a list of a loader": holds_others,
    "drawn orders": lambda: DataLoader(Drawn(), 4, shuffle=True),
    "litdata mixture": litdata_mixture,
    "webdataset without a seed": webdataset(lambda w: w.WebDataset(tars(), shardshuffle=False).shuffle(8)),
}
ROWS = [
    *(Row(name=kind.__name__, module=kind) for kind in MODULES),
    *(Row(name=name, train=train, warns=WARNS) for name, train in LOADERS.items()),
    Row(name="one stream in two places", data=OneStream),
    Row(name="ReturnsWeight", callbacks=ReturnsWeight),
    Row(name="untrusted", callbacks=Tables, options={"trust_autosaves": False}),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_no_resume_can_restore_is_refused(row: Row, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """What a resume can't restore is refused, where it can be seen at once, or in the start that resumes."""
    training = Training(group=Group(rows=(row,)), root=tmp_path)
    start = training.start(CUT, run_id="run")
    if start.codes == [CUT.exit_code]:
        start = training.start(run_id="run")
    else:  # a mended script finds no state of it
        assert [path for path in tmp_path.rglob("autosave-*") if "superseded-" not in path.parent.name] == []
    assert start.codes == [1]
    assert plain(start.output.rpartition("Error: ")[2].partition("\nThe result")[0], DIR=tmp_path) == snapshot

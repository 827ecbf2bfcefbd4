"""``PL_FAULT_TOLERANT_TRAINING=manual``: the user's objects keep the positions, and the package keeps the rest."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.testing import KillAt, NotTheSame, assert_resumes_exactly
from lightning_faulttolerant.trainer.process import VARIABLE
from tests.data_sets import HoldingDataset, NoisyDataset, StatefulSampler, counted
from tests.runs import Net, each_cut, fit_net


class StatefulBatches:
    """A loader that is not torch's: yields noisy batches, and continues where its state says."""

    def __init__(self, *, sized: bool) -> None:
        self.sized = sized
        self.data, self.sampler = NoisyDataset(), StatefulSampler()

    def __len__(self) -> int:
        if not self.sized:
            raise TypeError("no length")
        return 8

    def __iter__(self) -> Iterator[Tensor]:
        batch = []
        for index in self.sampler:
            batch.append(self.data[index])
            if len(batch) == 4:
                yield torch.stack(batch)
                batch = []

    def state_dict(self) -> dict[str, Any]:
        return {"sampler": self.sampler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state["sampler"])


def sampled() -> DataLoader[Any]:
    """Return a loader over a data set with generators; its sampler keeps the position."""
    return DataLoader(HoldingDataset(), batch_size=4, sampler=StatefulSampler())


def manual_fit(make_loader: Callable[[], Any]) -> Callable[[list[Callback], Path], Trainer]:
    """Return a fit that sets ``manual`` in its process if it has our callback."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        if any(isinstance(callback, FaultTolerance) for callback in callbacks):
            os.environ[VARIABLE] = "manual"
        return fit_net(callbacks, directory, train=make_loader(), module=Net(), val_check_interval=4)

    return fit


@pytest.mark.filterwarnings("ignore:.*does not have a batch_sampler")
@each_cut
@pytest.mark.parametrize(
    "make_loader",
    [sampled, counted, lambda: StatefulBatches(sized=True), lambda: StatefulBatches(sized=False)],
    ids=["sampler", "sampler-and-dataset", "loader", "unsized-loader"],
)
def test_own_states_are_the_position(make_loader: Callable[[], Any], cut: Any) -> None:
    """The positions of the user's objects are saved and restored; the rest of the run stays exact."""
    [cost] = assert_resumes_exactly(
        manual_fit(make_loader), [KillAt(cut.kill)], options={"every_n_train_steps": cut.every}
    )
    assert (cost.exit_code, cost.epoch, cost.batch) == (-signal.SIGKILL, *cut.continues_at)


@pytest.fixture
def manual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variable."""
    monkeypatch.setenv(VARIABLE, "manual")


@pytest.mark.usefixtures("manual")
def test_nothing_is_wrapped(tmp_path: Path) -> None:
    """The loader that the trainer iterates over is the user's object itself."""
    loader = sampled()
    seen = []

    class Looks(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            seen.append(trainer.train_dataloader)

    fit_net([FaultTolerance(), Looks()], tmp_path, train=loader, max_epochs=1)
    assert len(seen) == 8
    assert all(found is loader for found in seen)


@pytest.mark.usefixtures("manual")
@pytest.mark.parametrize(
    ("make_loader", "reason"),
    [
        (
            lambda: DataLoader(NoisyDataset(), batch_size=4, shuffle=True),
            "neither it nor its data set",
        ),
        (
            lambda: DataLoader(NoisyDataset(), batch_size=4, sampler=StatefulSampler(), num_workers=2),
            "its 2 workers have copies of the sampler, and run ahead",
        ),
    ],
)
def test_refused_where_nobody_keeps_the_position(make_loader: Callable[[], Any], reason: str, tmp_path: Path) -> None:
    """A loader without a stored position, or with one ahead of the trained batches, is refused with the reason."""
    with pytest.raises(NotExactError, match=f"Loader train/0 can't be resumed exactly: {reason}.*strict=False"):
        fit_net([FaultTolerance()], tmp_path, train=make_loader(), max_epochs=1)


def test_state_that_does_not_keep_its_word_is_seen() -> None:
    """A sampler that forgets its position repeats samples, and the law detects it."""

    class Forgets(StatefulSampler):
        def load_state_dict(self, state: dict[str, int]) -> None:
            self.epoch = state["epoch"]

    fit = manual_fit(lambda: DataLoader(NoisyDataset(), batch_size=4, sampler=Forgets()))
    with pytest.raises(NotTheSame):
        assert_resumes_exactly(fit, [KillAt(3)], options={"every_n_train_steps": 1})


@pytest.mark.usefixtures("manual")
def test_samples_are_not_seeded(tmp_path: Path) -> None:
    """Since no loader is replaced, samples can't be seeded one by one: the combination is refused."""
    with pytest.raises(ValueError, match=r'worker_rng="per_sample" seeds the samples of loaders, and .*manual'):
        fit_net([FaultTolerance(worker_rng="per_sample")], tmp_path, train=StatefulBatches(sized=True), max_epochs=1)

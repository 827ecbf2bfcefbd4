"""A run with its autosaves in an object store obeys the same law as one on a disk."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lightning_faulttolerant.testing import assert_resumes_exactly
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.data_sets import NoisyDataset
from tests.emulators import EMULATORS, WARNING
from tests.runs import each_num_workers, fit_net


@each_num_workers
def test_killed_run_continues_from_s3(s3: str, num_workers: int) -> None:
    """A run below a URL, killed in its first epoch and again in its second, equals the uninterrupted one."""
    _assert_killed_run_continues(s3, num_workers=num_workers)


@pytest.mark.slow
@pytest.mark.filterwarnings(WARNING)
@pytest.mark.parametrize("name", sorted(EMULATORS))
def test_killed_run_continues_from_each_store(emulated: Callable[[str], str], name: str) -> None:
    """The same holds in Azure's store, in Google's, and in another S3."""
    _assert_killed_run_continues(emulated(name))


def _assert_killed_run_continues(bucket: str, *, num_workers: int = 0) -> None:
    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        train = DataLoader(NoisyDataset(16), batch_size=4, shuffle=True, num_workers=num_workers)
        return fit_net(callbacks, f"{bucket}/{directory.name}", train=train)  # type: ignore[arg-type]

    costs = assert_resumes_exactly(fit, [KillAt(3), KillAt(2)], options={"every_n_train_steps": 1})
    assert [(cost.exit_code, cost.epoch, cost.batch) for cost in costs] == [
        (-signal.SIGKILL, 0, 3),
        (-signal.SIGKILL, 1, 1),
    ]


class FewClients(Callback):
    """Checks that saves do not each open another client of the store."""

    def on_train_end(self, trainer: Trainer, module: object) -> None:
        from s3fs import S3FileSystem

        assert len(S3FileSystem._cache) <= 3


def test_killed_run_that_saves_in_background_continues_from_s3(s3: str) -> None:
    """With async_save, a run that is killed during uploads resumes, and loses at most the upload in flight."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        train = DataLoader(NoisyDataset(16), batch_size=4, shuffle=True)
        return fit_net([*callbacks, FewClients()], f"{s3}/{directory.name}", train=train)  # type: ignore[arg-type]

    options = {"every_n_train_steps": 1, "async_save": True}
    costs = assert_resumes_exactly(fit, [KillAt(3), KillAt(3)], options=options)
    assert [cost.exit_code for cost in costs] == [-signal.SIGKILL] * 2
    assert (costs[0].epoch, costs[0].batch) in [(0, 2), (0, 3)]
    assert costs[1].epoch == 1

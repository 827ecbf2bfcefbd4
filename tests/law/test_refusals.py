"""Anything that can't be exact is reported with the reason: an error under ``strict``, a warning without."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.testing import KillAt, NotTheSame, assert_resumes_exactly
from tests.data_sets import CountingSampler, NoisyDataset
from tests.processes import run
from tests.runs import fit_net

pytestmark = pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined:UserWarning")


def out_of_order() -> DataLoader:
    """Return a loader that yields batches as they become ready."""
    return DataLoader(NoisyDataset(), batch_size=4, num_workers=2, in_order=False)


def already_iterated() -> DataLoader:
    """Return a loader that holds an iterator and its workers."""
    loader = DataLoader(NoisyDataset(), batch_size=4, num_workers=2, persistent_workers=True)
    list(loader)
    return loader


each_loader = pytest.mark.parametrize(
    ("make_loader", "reason"),
    [
        (out_of_order, "with in_order=False, the order of its batches depends on the speed of its workers"),
        (already_iterated, "it already has its own iterator"),
    ],
)


@each_loader
def test_refused_with_the_reason(make_loader: Callable[[], DataLoader], reason: str, tmp_path: Path) -> None:
    """A loader that can't be resumed exactly is refused before training, with its place, the reason, and the remedy."""
    trained = Steps()
    with pytest.raises(NotExactError, match=rf"Loader train/0 can't be resumed exactly: {reason}.*strict=False"):
        fit_net([FaultTolerance(), trained], tmp_path, train=make_loader(), max_epochs=1)
    assert trained.count == 0


@each_loader
def test_trains_with_a_warning_if_not_strict(
    make_loader: Callable[[], DataLoader], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With ``strict=False`` such a loader trains, and the same reason is a warning."""
    trained = Steps()
    with caplog.at_level(logging.WARNING, "lightning_faulttolerant"):
        fit_net([FaultTolerance(strict=False), trained], tmp_path, train=make_loader(), max_epochs=1)
    assert trained.count == 8
    assert f"Loader train/0 can't be resumed exactly: {reason}" in caplog.text


class Steps(KillAt):
    """Counts the batches that were trained, and does not kill."""

    def __init__(self) -> None:
        super().__init__(-1)

    @property
    def count(self) -> int:
        return self._seen + 1


def fit_with_hidden_state(callbacks: list[Any], directory: Path) -> Trainer:
    """Fit with a sampler that yields another order at each start; write the resume's report to a file."""
    trainer = fit_net(
        callbacks, directory, train=DataLoader(NoisyDataset(), batch_size=4, sampler=CountingSampler(), num_workers=2)
    )
    for callback in callbacks:
        if isinstance(callback, FaultTolerance) and callback.resume_report is not None:
            (directory.parent.parent / "report.txt").write_text(str(callback.resume_report))
    return trainer


def test_sampler_with_a_hidden_state_is_refused_on_resume() -> None:
    """A sampler that does not yield the same indices again is detected when the run resumes."""
    reason = r"NotExactError: .*CountingSampler yields other indices .* its own state.* strict=False\.\s*$"
    with pytest.raises(NotTheSame, match=reason):
        assert_resumes_exactly(fit_with_hidden_state, [KillAt(11)], options={"every_n_train_steps": 1})


def test_sampler_with_a_hidden_state_continues_if_not_strict(tmp_path: Path) -> None:
    """With ``strict=False`` the run continues, with another order, and the report says so."""
    options = {"every_n_train_steps": 1, "strict": False}
    with pytest.raises(NotTheSame, match=r"Event \d+ of the interrupted run differs"):
        assert_resumes_exactly(fit_with_hidden_state, [KillAt(11)], options=options, directory=tmp_path)
    report = (tmp_path / "report.txt").read_text()
    assert "NOT EXACTLY" in report
    assert "CountingSampler yields other indices" in report


@pytest.mark.parametrize(("before", "after"), [(2, 3), (2, 0)])
def test_another_number_of_workers_continues_if_not_strict(before: int, after: int, tmp_path: Path) -> None:
    """With ``strict=False`` the order of the samples continues with more workers or none, and the report says so."""

    def main(num_workers: int, callbacks: list[Any]) -> None:
        ours = FaultTolerance(tmp_path, run_id="run", every_n_train_steps=1, strict=False)
        train = DataLoader(NoisyDataset(), batch_size=4, shuffle=True, num_workers=num_workers)
        fit_net([ours, *callbacks], tmp_path, train=train, max_epochs=1)

    assert run(lambda: main(before, [KillAt(4)])).exit_code == -signal.SIGKILL
    ended = run(lambda: main(after, []))
    assert ended.exit_code == 0, ended.output
    assert f"NOT EXACT train/0.num_workers: {before} when it was saved, {after} now" in ended.output

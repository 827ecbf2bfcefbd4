"""However a rank ends, all processes end in time, with the right exit code, and with a valid autosave."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.trainer.ranks import watch
from tests.laws.data_sets import NoisyDataset
from tests.laws.ranks import FOR_RANKS
from tests.trainer.ranks.stopped_ranks import rank_fit, rank_processes

BOUND = 2.0

pytestmark = FOR_RANKS
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def _short_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the other ranks end in two seconds rather than ten; the processes are forked."""
    monkeypatch.setattr(watch, "ENDS_WITHIN_SECONDS", BOUND)


class Does(Callback):
    """Prints where each rank is, and does something in a batch of a training, or of the sanity check."""

    def __init__(self, rank: int, what: Callable[[], object], where: str = "train 3") -> None:
        self._rank, self._what, self._where = rank, what, where

    def _come_to(self, trainer: Trainer, place: str) -> None:
        print(place, flush=True)
        if (trainer.global_rank, place) == (self._rank, self._where):
            self._what()

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self._come_to(trainer, f"train {batch_idx}")

    def on_validation_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        self._come_to(trainer, f"sanity {batch_idx}")


def fit_main(
    tmp_path: Path, *callbacks: Callback, num_ranks: int = 2, grace_seconds: float = 30.0, **arguments: Any
) -> Callable[[int], Any]:
    """Return a main function of ranks that train and save at each step."""

    def main(rank: int) -> None:
        ours = FaultTolerance(tmp_path / "autosaves", every_n_train_steps=1, grace_seconds=grace_seconds)
        trainer = rank_fit(num_ranks, [*callbacks, ours], tmp_path, **arguments)
        print(f"has trained {trainer.global_step} steps", flush=True)

    return main


def raise_error() -> None:
    """Raise an error, as a user's step may."""
    raise ZeroDivisionError("of the user")


def sleep_long() -> None:
    """Be busy for longer than a test may take."""
    time.sleep(100)


def assert_continues(tmp_path: Path) -> None:
    """Check that two ranks continue to the end."""
    with rank_processes(fit_main(tmp_path)) as ranks:
        ended = ranks.wait()
    for each in ended:
        assert each.exit_code == 0, each.output
        assert "has trained 16 steps" in each.output
    assert "Resumed exactly" in ended[0].output


@pytest.mark.parametrize("rank", [pytest.param(0, marks=SLOW), 1])
def test_one_rank_raises(rank: int, tmp_path: Path) -> None:
    """Its traceback is printed immediately, the other rank leaves its collective and ends, and the run continues."""
    with rank_processes(fit_main(tmp_path, Does(rank, raise_error))) as ranks:
        ended = ranks.wait()
    assert [each.exit_code for each in ended] == [1, 1]
    assert f"[rank {rank}] FaultTolerance: an exception has ended this rank" in ended[rank].output
    assert "ZeroDivisionError: of the user" in ended[rank].output
    assert_continues(tmp_path)


@SLOW
@pytest.mark.parametrize("dead", [0, 1])
def test_one_rank_dies(dead: int, tmp_path: Path) -> None:
    """The other rank learns immediately that a rank has died, and ends within the bound, though it sleeps."""
    dies = Does(dead, lambda: os.kill(os.getpid(), signal.SIGKILL))
    with rank_processes(fit_main(tmp_path, dies, Does(1 - dead, sleep_long))) as ranks:
        ended = ranks.wait()
    assert (ended[dead].exit_code, ended[1 - dead].exit_code) == (-signal.SIGKILL, 1)
    assert f"rank {dead} has died" in ended[1 - dead].output
    assert abs(ended[0].at - ended[1].at) < BOUND + 2


@SLOW
def test_stopped_rank_is_not_taken_for_dead(tmp_path: Path) -> None:
    """A process that stands still longer than the bound is waited for, and the run finishes."""
    with rank_processes(fit_main(tmp_path, Does(0, int), max_epochs=1)) as ranks:
        ranks.wait_for("train 3")
        ranks.send(signal.SIGSTOP, 1)
        time.sleep(2 * BOUND)
        ranks.send(signal.SIGCONT, 1)
        ended = ranks.wait()
    assert [each.exit_code for each in ended] == [0, 0], [each.output for each in ended]


@SLOW
def test_main_thread_that_is_stuck_is_ended_with_the_grace_period(tmp_path: Path) -> None:
    """One rank sleeps and the other one waits for it in a collective: both end in time and report why."""
    with rank_processes(fit_main(tmp_path, Does(1, sleep_long), grace_seconds=2.0)) as ranks:
        ranks.wait_for("train 3")
        ranks.send(signal.SIGTERM, 1)
        began = time.monotonic()
        ended = ranks.wait()
    assert 1.5 < max(each.at for each in ended) - began < 4.5
    assert [each.exit_code for each in ended] == [143, 143], [each.output for each in ended]
    assert any("could not end within its grace period of 2 seconds" in each.output for each in ended)
    assert_continues(tmp_path)


@SLOW
@pytest.mark.parametrize("where", ["train 1", "sanity 1"])
@pytest.mark.parametrize("is_stopped", [False, True], ids=["raises", "is stopped"])
def test_process_that_was_made_for_a_fit_ends_its_workers(is_stopped: bool, where: str, tmp_path: Path) -> None:
    """Lightning calls no exception hook there; workers that ignore a termination are ended."""

    def loader() -> DataLoader[Any]:
        return DataLoader(NoisyDataset(64), batch_size=4, num_workers=2)

    does = Does(0, (lambda: signal.raise_signal(signal.SIGTERM)) if is_stopped else raise_error, where)
    arguments: dict[str, Any] = {"strategy": "ddp_fork", "train": loader, "validation": loader}
    main = fit_main(tmp_path, does, num_ranks=1, grace_seconds=15.0, **arguments)
    began = time.monotonic()
    with rank_processes(main, num_ranks=1) as ranks:
        [ended] = ranks.wait()
    assert ended.at - began < 12
    assert "could not end within its grace period" not in ended.output
    assert ("Stopped by SIGTERM" if is_stopped else "ZeroDivisionError") in ended.output


def test_the_excepthook_is_given_back(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The printed exception gets one line more, any other one goes to the hook that was there."""
    told, printed, other = [], ValueError("one"), ValueError("other")
    monkeypatch.setattr(sys, "excepthook", original := lambda kind, error, trace: told.append(error))
    for error in (printed, other):
        watch.print_traceback(printed, 0)
        sys.excepthook(type(error), error, None)
        assert sys.excepthook is original
    assert (told, capsys.readouterr().err.count("Its traceback is printed above.")) == ([other], 1)

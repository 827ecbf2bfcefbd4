"""However a rank ends, all processes end in time, with the right exit code, and with a valid autosave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.checkpoint.verify import load_file
from lightning_faulttolerant.trainer.ranks import watch
from tests.data_sets import NoisyDataset
from tests.laws.ranks import FOR_RANKS
from tests.trainer.ranks.stopped_ranks import RankProcesses, rank_fit

BOUND = 2.0

pytestmark = FOR_RANKS
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def _short_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the other ranks end in two seconds rather than ten; the processes are forked."""
    monkeypatch.setattr(watch, "ENDS_WITHIN_SECONDS", BOUND)


class Events(Callback):
    """Prints where each rank is, and does something at one place."""

    def __init__(self, rank: int = -1, hook: str = "", batch: int = 2, what: Callable[[], None] = lambda: None) -> None:
        self._where = (rank, hook, batch)
        self._what = what

    def _come_to(self, hook: str, trainer: Trainer, batch: int) -> None:
        print(f"{hook} {batch}", flush=True)
        if (trainer.global_rank, hook, batch) == self._where:
            self._what()

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self._come_to("train", trainer, batch_idx)

    def on_validation_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        self._come_to("sanity" if trainer.sanity_checking else "validation", trainer, batch_idx)


def fit_main(
    tmp_path: Path, *callbacks: Callback, options: Mapping[str, Any] | None = None, **arguments: Any
) -> Callable[[int], Any]:
    """Return a main function of two ranks that train and save at each step."""

    def main(rank: int) -> None:
        ours = FaultTolerance(**{"dirpath": tmp_path / "autosaves", "every_n_train_steps": 1, **(options or {})})
        trainer = rank_fit(2, [*callbacks, ours], tmp_path, **arguments)
        print(f"has trained {trainer.global_step} steps", flush=True)

    return main


def raise_error() -> None:
    """Raise an error, as a user's step may."""
    raise ZeroDivisionError("of the user")


def sleep_long() -> None:
    """Be busy for longer than a test may take."""
    time.sleep(100)


def assert_continues(tmp_path: Path) -> None:
    """Check that the last autosave is valid, and that two ranks continue from there to the end."""
    newest = sorted((tmp_path / "autosaves").rglob("autosave-*.ckpt"))[-1]
    load_file(str(newest))
    with RankProcesses(fit_main(tmp_path)) as ranks:
        for ended in ranks.wait():
            assert ended.exit_code == 0, ended.output
            assert "has trained 16 steps" in ended.output
        assert "Resumed exactly" in ranks.output(0)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=SLOW), 1])
def test_one_rank_raises(rank: int, tmp_path: Path) -> None:
    """Its traceback is printed immediately, the other rank leaves its collective and ends, and the run continues."""
    with RankProcesses(fit_main(tmp_path, Events(rank, "train", 3, raise_error))) as ranks:
        ended = ranks.wait()
    assert [each.exit_code for each in ended] == [1, 1]
    assert f"[rank {rank}] FaultTolerance: an exception has ended this rank" in ended[rank].output
    assert "ZeroDivisionError: of the user" in ended[rank].output
    assert_continues(tmp_path)


@SLOW
@pytest.mark.parametrize("dead", [0, 1])
def test_one_rank_dies(dead: int, tmp_path: Path) -> None:
    """The other rank learns immediately that a rank has died, and ends within the bound, though it sleeps."""
    callbacks = [Events(dead, "train", 3, lambda: os.kill(os.getpid(), signal.SIGKILL))]
    with RankProcesses(fit_main(tmp_path, *callbacks, Events(1 - dead, "train", 3, sleep_long))) as ranks:
        ended = ranks.wait()
    assert (ended[dead].exit_code, ended[1 - dead].exit_code) == (-signal.SIGKILL, 1)
    assert f"rank {dead} has died" in ended[1 - dead].output
    assert abs(ended[0].seconds - ended[1].seconds) < BOUND + 2


@SLOW
def test_stopped_rank_is_not_taken_for_dead(tmp_path: Path) -> None:
    """A process that stands still longer than the bound is waited for, and the run finishes."""
    with RankProcesses(fit_main(tmp_path, Events(), max_epochs=1)) as ranks:
        ranks.wait_for("train 3", 0, 1)
        ranks.send(signal.SIGSTOP, 1)
        time.sleep(2 * BOUND)
        ranks.send(signal.SIGCONT, 1)
        ended = ranks.wait()
    assert [each.exit_code for each in ended] == [0, 0], [each.output for each in ended]


@SLOW
def test_main_thread_that_is_stuck_is_ended_with_the_grace_period(tmp_path: Path) -> None:
    """One rank sleeps and the other one waits for it in a collective: both end in time and report why."""
    main = fit_main(tmp_path, Events(1, "train", 3, sleep_long), options={"grace_seconds": 2.0})
    with RankProcesses(main) as ranks:
        ranks.wait_for("train 3", 0, 1)
        ranks.send(signal.SIGTERM, 1)
        began = time.monotonic()
        ended = ranks.wait()
        assert 1.5 < time.monotonic() - began < 4.5
    assert [each.exit_code for each in ended] == [143, 143], [each.output for each in ended]
    assert any("could not end within its grace period of 2 seconds" in each.output for each in ended)
    assert_continues(tmp_path)


@SLOW
@pytest.mark.parametrize("hook", ["train", "sanity"])
@pytest.mark.parametrize("what", ["raises", "is stopped"])
def test_process_that_was_made_for_a_fit_ends_its_workers(what: str, hook: str, tmp_path: Path) -> None:
    """Lightning calls no exception hook there; workers that ignore a termination are ended."""

    def loader() -> DataLoader[Any]:
        return DataLoader(NoisyDataset(64), batch_size=4, num_workers=2)

    strike = raise_error if what == "raises" else lambda: signal.raise_signal(signal.SIGTERM)
    strategy = {"devices": 1, "strategy": "ddp_fork", "num_sanity_val_steps": 3, "train": loader, "validation": loader}
    options = {"grace_seconds": 15.0}
    with RankProcesses(fit_main(tmp_path, Events(0, hook, 1, strike), options=options, **strategy), num_ranks=1) as run:
        [ended] = run.wait()
    assert ended.seconds < 12
    assert "could not end within its grace period" not in ended.output
    assert ("ZeroDivisionError" if what == "raises" else "Stopped by SIGTERM") in ended.output


PRINTS = """
from lightning_faulttolerant.trainer.ranks.watch import print_traceback
try:
    1 / 0
except ZeroDivisionError as error:
    print_traceback(error, rank=1)
    raise
"""


def test_traceback_is_printed_once() -> None:
    """If the exception ends the process, Python adds one line."""
    ended = subprocess.run([sys.executable, "-c", PRINTS], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback (most recent call last)") == 1
    assert ended.stderr.splitlines()[-1] == "[rank 1] Its traceback is printed above."

"""The watching thread: all ranks learn what happens to one rank, and a process that can't end is ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from lightning_faulttolerant.errors import RanksLostError, TrainingStopped
from lightning_faulttolerant.trainer.ranks import watch as watch_module
from lightning_faulttolerant.trainer.ranks.connection import Hub, Spoke
from lightning_faulttolerant.trainer.ranks.watch import Watch
from lightning_faulttolerant.trainer.signals import StopSignals, signal_reason


@dataclass
class Pair:
    """Two ranks in one process."""

    stops: list[StopSignals]
    watches: list[Watch]
    ends: list[tuple[int, str]] = field(default_factory=list)
    now: float = 1000.0

    def look(self, times: int = 5) -> None:
        """Let both watches look."""
        for _ in range(times):
            for watch in self.watches:
                watch.look()
            time.sleep(0.002)

    def look_until(self, condition: Callable[[], object]) -> None:
        """Let both watches look until the condition holds; pytest's timeout ends a test in which it never does."""
        while not condition():
            self.look(1)

    def monotonic(self) -> float:
        """Stand in for the clock that measures how long ago a rank has failed."""
        return self.now


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Return two connected ranks that have 0.2 seconds to end; their ends are noted."""
    hub = Hub()
    lines = [hub, Spoke(1, ("127.0.0.1", hub.port), hub.token)]
    stops = [StopSignals([signal.SIGTERM], grace_seconds=60.0) for _ in lines]
    watches = [
        Watch(stop, rank=rank, num_ranks=2, line=line)
        for rank, (stop, line) in enumerate(zip(stops, lines, strict=True))
    ]
    made = Pair(stops, watches)
    monkeypatch.setattr(watch_module, "time", made)
    monkeypatch.setattr(watch_module, "ENDS_WITHIN_SECONDS", 0.2)
    monkeypatch.setattr(watch_module, "end_process", lambda code, why: made.ends.append((code, why)))
    hub.wait_for(1)
    made.look()
    yield made
    for watch in made.watches:
        watch.close()


@pytest.mark.parametrize("failed", [0, 1])
def test_failure_is_told_and_the_other_is_ended(failed: int, pair: Pair, capfd: pytest.CaptureFixture[str]) -> None:
    """The traceback is printed immediately; the other rank ends when its time is over."""
    try:
        raise ZeroDivisionError("of the user")
    except ZeroDivisionError as error:
        pair.watches[failed].fail(error)
        pair.watches[failed].fail(error)
    printed = capfd.readouterr().err
    assert printed.count("Traceback") == 1
    assert f"[rank {failed}] FaultTolerance: an exception has ended this rank" in printed
    pair.look_until(lambda: pair.watches[1 - failed].failure)
    assert pair.ends == []
    assert f"rank {failed} has failed: ZeroDivisionError('of the user')" in capfd.readouterr().err
    assert pair.watches[1 - failed].member.lost is not None
    pair.now += 0.25
    pair.watches[1 - failed].look()
    [(code, why)] = pair.ends
    assert code == 1
    assert f"Rank {failed} has failed" in why


def test_all_failed_and_nobody_is_ended(pair: Pair) -> None:
    """If every rank has failed, none waits for another: each ends in its own time."""
    for watch in pair.watches:
        watch.fail(ValueError("everywhere"))
    pair.look_until(lambda: all(watch.end_together for watch in pair.watches))
    pair.now += 0.25
    pair.look()
    assert pair.ends == []


def test_rank_that_is_lost_for_the_failure_of_another_has_not_failed_itself(pair: Pair) -> None:
    """Its teardown may wait for unfinished work of the other rank: the bound holds for both."""
    pair.watches[1].fail(ValueError("x"))
    pair.look_until(lambda: pair.watches[0].failure)
    pair.watches[0].fail(RanksLostError("rank 1 has failed"))
    pair.look()
    pair.now += 0.25
    pair.look(1)
    assert [code for code, _ in pair.ends] == [1, 1]


def test_stop_at_once_has_its_own_code(pair: Pair, capfd: pytest.CaptureFixture[str]) -> None:
    """After a second Ctrl-C on one rank, the other one ends with the exit code of a Ctrl-C, without a traceback."""
    pair.watches[1].fail(TrainingStopped(130, "Stopped by SIGINT at once"))
    pair.look_until(lambda: pair.watches[0].failure)
    pair.now += 0.25
    pair.watches[0].look()
    assert pair.ends[0][0] == 130
    assert "Traceback" not in capfd.readouterr().err


def test_rank_that_is_lost_when_the_time_is_over(pair: Pair) -> None:
    """If a collective breaks because the grace period has ended another rank, this rank ends for the same reason."""
    pair.stops[0].note(signal_reason(signal.SIGTERM), 0.5)
    pair.watches[0].fail(RuntimeError("Connection closed by peer"))
    assert pair.ends[0][0] == 143

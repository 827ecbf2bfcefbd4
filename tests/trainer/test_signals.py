"""Stop signals, deadlines, and exceptions: acted on at a boundary, or told, with everything given back afterwards."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_faulttolerant import FaultTolerance, TrainingStopped
from lightning_faulttolerant.trainer import signals as stop_module
from lightning_faulttolerant.trainer.signals import (
    RESERVE_SECONDS,
    Deadline,
    StopReason,
    StopSignals,
    checked_deadline,
    signal_reason,
)
from tests.laws.cuts import ends_in
from tests.runs import fit_net

BOTH = (signal.SIGTERM, signal.SIGINT)


class Clock:
    """Stands in for ``time`` where the code checks whether the grace period is over."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def let_look_on(self, stop: StopSignals) -> None:
        """Look eight times a second, for ten seconds."""
        for _ in range(80):
            stop.look()
            self.now += 0.125


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock that the code uses."""
    made = Clock()
    monkeypatch.setattr(stop_module, "time", made)
    return made


@pytest.fixture
def stop() -> Iterator[StopSignals]:
    """Handle stop signals while the test runs; the original handlers are restored."""
    before = {signum: signal.getsignal(signum) for signum in (*BOTH, signal.SIGUSR1)}
    made = StopSignals(BOTH, grace_seconds=10.0)
    yield made
    made.uninstall()
    made.uninstall()
    after = {signum: signal.getsignal(signum) for signum in before}
    for signum, handler in before.items():
        signal.signal(signum, handler)
    assert after == before


def test_signal_that_another_rank_has_told_of_before_is_the_first_one(stop: StopSignals) -> None:
    """The line may report a signal to all ranks before a rank's own handler can run: the signal is not a second one."""
    stop.is_alone = False
    stop.install({})
    stop.note(signal_reason(signal.SIGTERM))  # from the thread
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(TrainingStopped, match="at the second signal"):
        signal.raise_signal(signal.SIGINT)


def test_handler_that_was_there_is_called_too(stop: StopSignals) -> None:
    """The user's own handler gets the first signal, with its frame; the requeue signal is one more stop signal."""
    heard: list[tuple[int, bool]] = []

    def own(signum: int, frame: FrameType | None) -> None:
        heard.append((signum, frame is not None))

    stop.install({signal.SIGTERM: own}, requeue_signal=signal.SIGUSR1)
    stop.grace.announced_seconds = lambda: 90.0
    signal.raise_signal(signal.SIGUSR1)
    assert stop.requested == StopReason(name="SIGUSR1", exit_code=138, requeues=True)
    assert 80 < stop.grace.seconds_left() <= 90
    signal.raise_signal(signal.SIGTERM)
    assert heard in ([], [(signal.SIGTERM, True)])


@pytest.mark.parametrize("error", [SystemExit(0), ValueError("x")])
def test_handler_that_raises_ends_no_run_unsaved(
    error: BaseException, stop: StopSignals, caplog: pytest.LogCaptureFixture
) -> None:
    """A script whose own handler calls sys.exit is saved too; one message afterwards says what became of the exit."""

    def own(*_: object) -> None:
        raise error

    stop.install({signal.SIGTERM: own})
    signal.raise_signal(signal.SIGTERM)
    assert caplog.messages == []
    stop.look()
    assert stop.requested == signal_reason(signal.SIGTERM)
    [told] = caplog.messages
    assert f"own handler of SIGTERM has raised {error!r}" in told


def test_outside_the_main_thread_nothing_is_taken(stop: StopSignals, caplog: pytest.LogCaptureFixture) -> None:
    """Python handles signals in the main thread only: in another thread this is reported, and the fit continues."""
    thread = threading.Thread(target=stop.install, args=({},))
    thread.start()
    thread.join()
    assert "fit does not run in the main thread" in caplog.text


@pytest.mark.parametrize(("save_seconds", "expected"), [(0.0, 8.0), (6.0, 2.8), (100.0, 2.0)])
def test_the_longer_a_save_takes_the_earlier_a_batch_is_broken_off(
    save_seconds: float, expected: float, stop: StopSignals, clock: Clock
) -> None:
    """Of ten seconds, a save keeps what it takes, at least two; a batch gets at least two, even if no save can fit."""
    stop.grace.save_seconds = lambda: save_seconds
    stop.install({})
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(TrainingStopped):
        clock.let_look_on(stop)
    assert clock.now - 0.125 <= 1000.0 + expected < clock.now
    stop.grace.save_seconds = lambda: 10.0
    assert [stop.grace.save_fits(seconds) for seconds in (5, 10, 15)] == [False, False, True]


# Deadlines


def test_kinds_of_deadlines() -> None:
    """A datetime is a point in time, in local time if it has no zone; a timedelta counts from now; so do texts."""
    moment = datetime(2040, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
    assert checked_deadline(moment) == moment.timestamp()
    assert checked_deadline(moment.astimezone(timezone(timedelta(hours=7)))) == moment.timestamp()
    assert checked_deadline(moment.astimezone().replace(tzinfo=None)) == moment.timestamp()
    assert checked_deadline(timedelta(hours=1)) == pytest.approx(time.time() + 3600, abs=5)
    assert checked_deadline(None) is None
    for text in ("2040-01-02 03:04:05+00:00", "2040-01-02T03:04:05Z", moment.isoformat()):
        assert checked_deadline(text) == moment.timestamp()
    assert checked_deadline("2040-01-02 03:04") == datetime(2040, 1, 2, 3, 4).timestamp()
    for duration in (timedelta(hours=4), timedelta(days=1, minutes=5), timedelta(days=20, seconds=1.5)):
        assert checked_deadline(str(duration)) == pytest.approx(time.time() + duration.total_seconds(), abs=5)


def test_longest_batch_counts() -> None:
    """One long batch, or one long pause between two batches, counts from then on."""
    run = SimpleNamespace(now=0.0, batch=0)
    clock = {"progress": lambda: run.batch, "clock": lambda: run.now}
    deadline = Deadline(1000.0, save_seconds=lambda: 0.0, **clock)  # type: ignore[arg-type]
    for pause in (1.0, 1.0, 100.0, 1.0):
        run.now, run.batch = run.now + pause, run.batch + 1
        assert not deadline.is_near()
    while not deadline.is_near():
        run.now, run.batch = run.now + 1, run.batch + 1
    assert run.now == pytest.approx(1000 - RESERVE_SECONDS - 100, abs=1.5)


# A fit that a signal or an exception ends


def test_stop_before_anything_is_saved_names_what_the_start_continued_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After a stop in the sanity check, the next start begins where this one did: here at a checkpoint."""
    given = tmp_path / "given.ckpt"
    fit_net([], tmp_path, max_epochs=1).save_checkpoint(given)
    stops = ends_in("on_sanity_check_start", signal.SIGTERM)
    with caplog.at_level("INFO"), pytest.raises(TrainingStopped):
        fit_net([FaultTolerance(tmp_path, run_id="run"), stops], tmp_path, ckpt_path=given)
    assert f"To continue from {given}, type: " in caplog.text


class BreaksInTheEnd(CSVLogger):
    def finalize(self, status: str) -> None:
        raise OSError("no space left on device")


def test_nothing_is_left_where_lightning_does_not_tear_down(tmp_path: Path) -> None:
    """If a logger that raises after an exception prevents Lightning's teardown, everything is still given back."""
    ours = FaultTolerance(dirpath=tmp_path / "autosaves")
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    with pytest.raises(OSError, match="no space left"):
        fit_net([ours, ends_in("on_after_backward", 0)], tmp_path, logger=BreaksInTheEnd(tmp_path))
    left = [signal.getsignal(signum) for signum in before]
    for signum, handler in before.items():
        signal.signal(signum, handler)
    assert not any(isinstance(getattr(handler, "__self__", None), StopSignals) for handler in left)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fault-tolerance")]

"""Stop signals are noted immediately, acted on at a boundary that all ranks agree on, and given back afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

import pytest

from lightning_faulttolerant.errors import TrainingStopped
from lightning_faulttolerant.trainer import signals as stop_module
from lightning_faulttolerant.trainer.ranks import watch as watch_module
from lightning_faulttolerant.trainer.ranks.watch import Watch
from lightning_faulttolerant.trainer.signals import StopReason, StopSignals, exit_code, signal_reason, stopped_by

BOTH = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def _handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Watch ten times as often, and check that each test restores the original handlers."""
    monkeypatch.setattr(watch_module, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(stop_module, "_STUCK_FETCH_SECONDS", 0.05)
    monkeypatch.setattr(stop_module, "end_process", lambda code, why: None)  # the original would end the tests
    before = {signum: signal.getsignal(signum) for signum in (*BOTH, signal.SIGUSR1)}
    yield
    after = {signum: signal.getsignal(signum) for signum in before}
    for signum, handler in before.items():
        signal.signal(signum, handler)
    assert after == before


@contextlib.contextmanager
def watched(grace_seconds: float) -> Iterator[StopSignals]:
    """Handle stop signals, with the watching thread."""
    signals = StopSignals(BOTH, grace_seconds=grace_seconds)
    watch = Watch(signals)
    signals.install({})
    watch.start()
    try:
        yield signals
    finally:
        signals.uninstall()
        watch.close()


@pytest.fixture
def stop() -> Iterator[StopSignals]:
    """Stop signals that are handled while the test runs, with a long grace period."""
    with watched(60.0) as signals:
        yield signals


class Clock:
    """Stands in for ``time`` where the code checks whether the grace period is over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(stop_module, "time", self)

    def monotonic(self) -> float:
        return self.now

    def let_look_on(self, stop: StopSignals) -> None:
        """Look eight times a second, for ten seconds."""
        for _ in range(80):
            stop.look()
            self.now += 0.125


def send(signum: int) -> None:
    """Send a real signal to this process; its handler runs before the next line."""
    os.kill(os.getpid(), signum)


def wait_for_signal(seconds: float = 5.0) -> None:
    """Wait like a main thread that can't reach its next boundary."""
    time.sleep(seconds)
    raise AssertionError("nobody stepped in")


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 138)])
def test_exit_codes(signum: signal.Signals, code: int) -> None:
    """A stopped process ends as the shell expects: with 128 plus the signal's number."""
    assert exit_code(signum) == code
    error = stopped_by(signal_reason(signum), "before batch 3")
    assert isinstance(error, SystemExit)
    assert error.code == code
    assert str(error) == f"Stopped by {signum.name} before batch 3 (exit code {code})"


@pytest.mark.parametrize("signum", BOTH)
def test_first_signal_is_only_noted(signum: signal.Signals, stop: StopSignals) -> None:
    """Nothing is raised where the signal arrives: the batch is finished first."""
    assert stop.requested is None
    send(signum)
    assert stop.requested == signal_reason(signum)


@pytest.mark.parametrize("first", BOTH)
def test_second_interrupt_ends_at_once(first: signal.Signals, stop: StopSignals) -> None:
    """A user who presses Ctrl-C again wants to stop immediately."""
    send(first)
    with pytest.raises(TrainingStopped, match="at once, at the second signal") as error:
        send(signal.SIGINT)
    assert error.value.code == 130


@pytest.mark.parametrize("code", [stop_module.DEADLINE_EXIT_CODE, 143])
@pytest.mark.parametrize("requeues", [True, False])
def test_announced_end_is_the_end_whoever_tells_of_it(code: int, requeues: bool) -> None:
    """A rank that hears of a stop by the line has as much time as if it had received the signal itself."""
    stop = StopSignals(BOTH, grace_seconds=20.0)
    stop.grace.announced_seconds = lambda: 120.0
    stop.note(StopReason.from_text(StopReason(name="x", exit_code=code, requeues=requeues).to_text()))
    is_announced = requeues or code != 143
    assert (stop.grace.seconds_left() > 100) == is_announced
    assert stop.grace.seconds_left() > 15


def test_handler_that_was_there_is_called_too() -> None:
    """The user's own handler gets the first signal, with its frame, and is back in place afterwards."""
    heard: list[tuple[int, bool]] = []

    def own(signum: int, frame: FrameType | None) -> None:
        heard.append((signum, frame is not None))

    before = signal.signal(signal.SIGTERM, own)
    stop = StopSignals(BOTH, grace_seconds=60.0)
    stop.install({signal.SIGTERM: own})
    send(signal.SIGTERM)
    send(signal.SIGTERM)
    stop.uninstall()
    assert heard == [(signal.SIGTERM, True)]
    assert stop.requested == signal_reason(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is own
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), ValueError("x")])
def test_handler_that_raises_ends_no_run_unsaved(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """A script whose own handler calls sys.exit is saved too; one message afterwards says what became of the exit."""

    def own(*_: object) -> None:
        raise error

    stop = StopSignals(BOTH, grace_seconds=60.0)
    stop.install({signal.SIGTERM: own})
    send(signal.SIGTERM)
    assert caplog.messages == []
    stop.look()
    stop.uninstall()
    assert stop.requested == signal_reason(signal.SIGTERM)
    [told] = caplog.messages
    assert f"own handler of SIGTERM has raised {error!r}" in told


def test_outside_the_main_thread_nothing_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    """Python handles signals in the main thread only: in another thread this is reported, and the fit continues."""
    stop = StopSignals(BOTH, grace_seconds=60.0)
    thread = threading.Thread(target=stop.install, args=({},))
    thread.start()
    thread.join()
    assert "fit does not run in the main thread" in caplog.text
    stop.uninstall()


def test_watcher_ends_a_fetch_that_is_stuck(stop: StopSignals) -> None:
    """A stop that is requested while no batch comes does not wait until the grace period is over."""
    stop.fetch_began = time.monotonic() - 100
    send(signal.SIGTERM)
    began = time.monotonic()
    with pytest.raises(TrainingStopped, match="Stopped by SIGTERM while it waited for a batch from a worker") as error:
        wait_for_signal(30)
    assert error.value.code == 143
    assert time.monotonic() - began > 0.04


@pytest.mark.parametrize(("save_seconds", "expected"), [(0.0, 8.0), (6.0, 2.8), (100.0, 2.0)])
def test_the_longer_a_save_takes_the_earlier_a_batch_is_broken_off(
    monkeypatch: pytest.MonkeyPatch, save_seconds: float, expected: float
) -> None:
    """Of ten seconds, a save keeps what it takes, at least two; a batch gets at least two, even if no save can fit."""
    clock = Clock(monkeypatch)
    stop = StopSignals(BOTH, grace_seconds=10.0)
    stop.grace.save_seconds = lambda: save_seconds
    stop.install({})
    send(signal.SIGTERM)
    with pytest.raises(TrainingStopped):
        clock.let_look_on(stop)
    stop.uninstall()
    assert clock.now - 0.125 <= 1000.0 + expected < clock.now


def test_process_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the grace period is over, the process is ended, whatever its main thread does, even in a save."""
    ends: list[tuple[int, str]] = []
    monkeypatch.setattr(stop_module, "end_process", lambda code, why: ends.append((code, why)))
    clock = Clock(monkeypatch)
    with watched(0.25) as stop, stop.saving():
        asked: list[StopReason] = []
        stop.before_hard_end = asked.append
        send(signal.SIGTERM)
        clock.now += 0.125
        time.sleep(0.1)
        assert ends == []
        clock.now += 0.125
        while not ends:  # pytest's timeout ends a test that never gets there
            time.sleep(0.005)
    code, why = ends[0]
    assert code == 143
    assert "SIGTERM has asked the run to stop" in why
    assert "within its grace period of 0.25 seconds" in why
    assert asked[0] == signal_reason(signal.SIGTERM)


def test_requeue_signal_asks_for_a_requeue() -> None:
    """The signal that announces the end of a SLURM job is one more stop signal, with the time that the job has left."""
    stop = StopSignals(BOTH, grace_seconds=20.0)
    stop.install({}, requeue_signal=signal.SIGUSR1)
    stop.grace.announced_seconds = lambda: 90.0
    send(signal.SIGUSR1)
    stop.uninstall()
    assert stop.requested == StopReason(name="SIGUSR1", exit_code=138, requeues=True)
    assert 80 < stop.grace.seconds_left() <= 90

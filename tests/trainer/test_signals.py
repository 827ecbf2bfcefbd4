"""Stop signals are noted immediately, acted on at a boundary, and given back afterwards."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from lightning_faulttolerant.errors import TrainingStopped
from lightning_faulttolerant.trainer import signals as stop_module
from lightning_faulttolerant.trainer.signals import StopReason, StopSignals, signal_reason

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

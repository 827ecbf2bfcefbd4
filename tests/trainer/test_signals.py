"""Stop signals are noted immediately, acted on at a boundary, and given back afterwards."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from lightning_faulttolerant.errors import TrainingStopped
from lightning_faulttolerant.trainer import signals as stop_module
from lightning_faulttolerant.trainer.ranks.agreement import STOP
from lightning_faulttolerant.trainer.signals import StopReason, StopSignals, exit_code, signal_reason, stopped_by
from lightning_faulttolerant.trainer.stopping import SoleRank

BOTH = (signal.SIGTERM, signal.SIGINT)


class Clock:
    """Stands in for ``time`` where the code checks whether the grace period is over."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def let_look_on(self, stop: StopSignals, seconds: float = 10.0) -> None:
        """Look eight times a second."""
        for _ in range(int(seconds * 8)):
            stop.look()
            self.now += 0.125


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock that the code uses."""
    made = Clock()
    monkeypatch.setattr(stop_module, "time", made)
    return made


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Return the ends of the process, which goes on."""
    found: list[tuple[int, str]] = []
    monkeypatch.setattr(stop_module, "end_process", lambda code, why: found.append((code, why)))
    return found


@pytest.fixture
def stop(ends: list[tuple[int, str]]) -> Iterator[StopSignals]:
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


def send(signum: int) -> None:
    """Send a real signal to this process; its handler runs before the next line."""
    os.kill(os.getpid(), signum)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 138)])
def test_exit_codes(signum: signal.Signals, code: int) -> None:
    """A stopped process ends as the shell expects: with 128 plus the signal's number."""
    error = stopped_by(signal_reason(signum), "before batch 3")
    assert isinstance(error, SystemExit)
    assert error.code == exit_code(signum) == code
    assert str(error) == f"Stopped by {signum.name} before batch 3 (exit code {code})"


@pytest.mark.parametrize("signum", BOTH)
def test_first_signal_is_only_noted_and_ctrl_c_then_ends_at_once(signum: signal.Signals, stop: StopSignals) -> None:
    """Nothing is raised where a signal arrives; a second SIGTERM counts once, a second Ctrl-C wants to stop now."""
    stop.install({})
    assert stop.requested is None
    send(signum)
    send(signal.SIGTERM)
    assert stop.requested == signal_reason(signum)
    with pytest.raises(TrainingStopped, match="at once, at the second signal") as error:
        send(signal.SIGINT)
    assert error.value.code == 130


@pytest.mark.parametrize("signum", BOTH)
def test_signal_that_another_rank_has_told_of_before_is_the_first_one(
    signum: signal.Signals, stop: StopSignals
) -> None:
    """The line may report a signal to all ranks before a rank's own handler can run: the signal is not a second one."""
    stop.is_alone = False
    stop.install({})
    stop.note(signal_reason(signal.SIGTERM))  # from the thread
    send(signum)
    with pytest.raises(TrainingStopped, match="at the second signal"):
        send(signal.SIGINT)


@pytest.mark.parametrize("code", [stop_module.DEADLINE_EXIT_CODE, 143])
@pytest.mark.parametrize("requeues", [True, False])
def test_announced_end_is_the_end_whoever_tells_of_it(code: int, requeues: bool, stop: StopSignals) -> None:
    """A rank that hears of a stop by the line has as much time as if it had received the signal itself."""
    stop.grace.announced_seconds = lambda: 120.0
    reason = StopReason(name="x", exit_code=code, requeues=requeues)
    stop.note(StopReason.from_text(reason.to_text()))
    assert stop.requested == reason
    assert (stop.grace.seconds_left() > 100) == (requeues or code != 143)


def test_handler_that_was_there_is_called_too(stop: StopSignals) -> None:
    """The user's own handler gets the first signal, with its frame; the requeue signal is one more stop signal."""
    heard: list[tuple[int, bool]] = []

    def own(signum: int, frame: FrameType | None) -> None:
        heard.append((signum, frame is not None))

    stop.install({signal.SIGTERM: own}, requeue_signal=signal.SIGUSR1)
    stop.grace.announced_seconds = lambda: 90.0
    send(signal.SIGUSR1)
    assert stop.requested == StopReason(name="SIGUSR1", exit_code=138, requeues=True)
    assert 80 < stop.grace.seconds_left() <= 90
    send(signal.SIGTERM)
    assert heard in ([], [(signal.SIGTERM, True)])


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), ValueError("x")])
def test_handler_that_raises_ends_no_run_unsaved(
    error: BaseException, stop: StopSignals, caplog: pytest.LogCaptureFixture
) -> None:
    """A script whose own handler calls sys.exit is saved too; one message afterwards says what became of the exit."""

    def own(*_: object) -> None:
        raise error

    stop.install({signal.SIGTERM: own})
    send(signal.SIGTERM)
    assert caplog.messages == []
    stop.look()
    assert stop.requested == signal_reason(signal.SIGTERM)
    [told] = caplog.messages
    assert f"own handler of SIGTERM has raised {error!r}" in told


@pytest.mark.parametrize("original", [signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler, None])
def test_handlers_that_would_end_the_process_are_not_called(original: Any, stop: StopSignals) -> None:
    """Python's own handler of Ctrl-C raises, and the default one ends the process: a stop must do neither."""
    stop.install({signal.SIGINT: original})
    send(signal.SIGINT)
    assert stop.requested == signal_reason(signal.SIGINT)


def test_outside_the_main_thread_nothing_is_taken(stop: StopSignals, caplog: pytest.LogCaptureFixture) -> None:
    """Python handles signals in the main thread only: in another thread this is reported, and the fit continues."""
    thread = threading.Thread(target=stop.install, args=({},))
    thread.start()
    thread.join()
    assert "fit does not run in the main thread" in caplog.text


def test_fetch_that_is_stuck_is_ended(stop: StopSignals, clock: Clock) -> None:
    """A stop that is requested while no batch comes does not wait until the grace period is over."""
    stop.install({})
    stop.fetch_began = clock.now - 100
    clock.let_look_on(stop, 1)
    assert stop.requested is None  # a slow fetch alone is not a reason to stop
    send(signal.SIGTERM)
    with pytest.raises(TrainingStopped, match="Stopped by SIGTERM while it waited for a batch from a worker") as error:
        clock.let_look_on(stop)
    assert error.value.code == 143


@pytest.mark.parametrize(("save_seconds", "expected"), [(0.0, 8.0), (6.0, 2.8), (100.0, 2.0)])
def test_the_longer_a_save_takes_the_earlier_a_batch_is_broken_off(
    save_seconds: float, expected: float, stop: StopSignals, clock: Clock
) -> None:
    """Of ten seconds, a save keeps what it takes, at least two; a batch gets at least two, even if no save can fit."""
    stop.grace.save_seconds = lambda: save_seconds
    stop.install({})
    send(signal.SIGTERM)
    with pytest.raises(TrainingStopped):
        clock.let_look_on(stop)
    assert clock.now - 0.125 <= 1000.0 + expected < clock.now
    stop.grace.save_seconds = lambda: 10.0
    assert [stop.grace.save_fits(seconds) for seconds in (5, 10, 15)] == [False, False, True]


def test_process_that_does_not_end_is_ended(stop: StopSignals, clock: Clock, ends: list[tuple[int, str]]) -> None:
    """A save is left alone; when the grace period is over, the process is ended, whatever its main thread does."""
    stop.install({})
    asked: list[StopReason] = []
    stop.before_hard_end = asked.append
    with stop.saving():
        send(signal.SIGTERM)
        clock.let_look_on(stop, 9.75)
        assert ends == []
        clock.let_look_on(stop, 1)
    code, why = ends[0]
    assert code == 143
    assert "SIGTERM has asked the run to stop" in why
    assert "within its grace period of 10 seconds" in why
    assert asked[0] == signal_reason(signal.SIGTERM)


def test_rank_among_several_is_not_interrupted(stop: StopSignals, clock: Clock) -> None:
    """Others may wait for it in a collective: it reaches the appointed boundary, or is ended."""
    stop.is_alone = False
    stop.install({})
    stop.fetch_began = time.monotonic() - 100
    send(signal.SIGTERM)
    clock.let_look_on(stop, 9.5)
    stop.note(signal_reason(signal.SIGINT))
    assert stop.requested == signal_reason(signal.SIGTERM)


def test_sole_rank_does_what_it_was_asked(stop: StopSignals) -> None:
    """One rank agrees with itself, and counts the places where it was asked."""
    agreement = SoleRank(stop)
    assert (agreement.at_boundary(), agreement.at_validation_batch()) == (None, False)
    stop.note(signal_reason(signal.SIGTERM))
    assert (agreement.at_boundary(), agreement.at_validation_batch(), agreement.num_places) == (STOP, True, 4)

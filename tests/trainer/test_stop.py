"""Stop signals: noted at once, acted upon at a boundary that all ranks agree on, and given back afterwards."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from lightning_faulttolerant.errors import TrainingStopped
from lightning_faulttolerant.trainer import stop as stop_module
from lightning_faulttolerant.trainer.stop import SoleRank, StopSignals, StoreAgreement, exit_code, stopped_by

BOTH = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def _handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Watch ten times as closely, and see to it that each test leaves the handlers that it found."""
    monkeypatch.setattr(stop_module, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(stop_module, "_STUCK_FETCH_SECONDS", 0.05)
    before = {signum: signal.getsignal(signum) for signum in (*BOTH, signal.SIGUSR1)}
    yield
    after = {signum: signal.getsignal(signum) for signum in before}
    for signum, handler in before.items():
        signal.signal(signum, handler)
    assert after == before


@pytest.fixture
def stop() -> Iterator[StopSignals]:
    """Stop signals that are handled while the test runs, with a long grace period."""
    signals = StopSignals(BOTH, grace_seconds=60.0)
    signals.install({})
    yield signals
    signals.uninstall()


def send(signum: int) -> None:
    """Send a real signal to this process; its handler runs before the next line."""
    os.kill(os.getpid(), signum)


def wait_for_signal(seconds: float = 5.0) -> None:
    """Wait as a main thread does that can't reach its next boundary."""
    time.sleep(seconds)
    raise AssertionError("nobody stepped in")


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 138)])
def test_exit_codes(signum: signal.Signals, code: int) -> None:
    """A process that was stopped ends as the shell expects: with 128 and the signal's number."""
    assert exit_code(signum) == code
    error = stopped_by(signum, "before batch 3")
    assert isinstance(error, SystemExit)
    assert error.code == code
    assert str(error) == f"Stopped by {signum.name} before batch 3 (exit code {code})"


@pytest.mark.parametrize("signum", BOTH)
def test_first_signal_is_only_noted(signum: signal.Signals, stop: StopSignals) -> None:
    """Nothing is raised where the signal arrives: the batch is finished first."""
    assert stop.requested is None
    send(signum)
    assert stop.requested == signum


def test_other_signals_are_left_alone(stop: StopSignals) -> None:
    """A signal that was not asked for goes to the handler that it had."""
    heard: list[int] = []
    previous = signal.signal(signal.SIGUSR1, lambda signum, frame: heard.append(signum))
    send(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, previous)
    assert heard == [signal.SIGUSR1]
    assert stop.requested is None


@pytest.mark.parametrize("first", BOTH)
def test_second_interrupt_ends_at_once(first: signal.Signals, stop: StopSignals) -> None:
    """Who presses Ctrl-C again wants out now."""
    send(first)
    with pytest.raises(TrainingStopped, match="at once, at the second signal") as error:
        send(signal.SIGINT)
    assert error.value.code == 130


def test_second_termination_changes_nothing(stop: StopSignals) -> None:
    """Schedulers send SIGTERM several times, to the group and to the process: once is enough."""
    send(signal.SIGTERM)
    send(signal.SIGTERM)
    assert stop.requested == signal.SIGTERM


def test_handler_that_was_there_is_called_too() -> None:
    """The user's own handler hears the first signal, with its frame, and is back in place afterwards."""
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
    assert stop.requested == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is own
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("original", [signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler, None])
def test_handlers_that_would_end_the_process_are_not_called(original: Any) -> None:
    """Python's own handler of Ctrl-C raises, and the default one ends: neither is what stopping means here."""
    stop = StopSignals(BOTH, grace_seconds=60.0)
    stop.install({signal.SIGINT: original})
    send(signal.SIGINT)
    stop.uninstall()
    assert stop.requested == signal.SIGINT


def test_handler_that_somebody_else_set_since_stays() -> None:
    """What was set over ours during the fit is not ours to take away."""
    stop = StopSignals(BOTH, grace_seconds=60.0)
    stop.install({})

    def other(signum: int, frame: FrameType | None) -> None:
        raise AssertionError

    ours = signal.signal(signal.SIGTERM, other)
    stop.uninstall()
    assert signal.getsignal(signal.SIGTERM) is other
    assert ours == stop._handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_uninstalled_twice_or_never_installed() -> None:
    """Giving back what was not taken is harmless."""
    stop = StopSignals(BOTH, grace_seconds=60.0)
    stop.uninstall()
    stop.install({})
    stop.uninstall()
    stop.uninstall()


def test_outside_the_main_thread_nothing_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    """Python handles signals in the main thread only: elsewhere that is said, and the fit goes on."""
    stop = StopSignals(BOTH, grace_seconds=60.0)
    thread = threading.Thread(target=stop.install, args=({},))
    thread.start()
    thread.join()
    assert "fit does not run in the main thread" in caplog.text
    stop.uninstall()


def test_watcher_ends_a_fetch_that_is_stuck(stop: StopSignals) -> None:
    """A stop that was asked for while no batch comes is not waited for until the grace period is over."""
    stop.fetch_began = time.monotonic() - 100
    send(signal.SIGTERM)
    began = time.monotonic()
    with pytest.raises(TrainingStopped, match="Stopped by SIGTERM while it waited for a batch from a worker") as error:
        wait_for_signal()
    assert error.value.code == 143
    assert 0.04 < time.monotonic() - began < 2.0


def test_watcher_steps_in_when_the_grace_period_ends() -> None:
    """A batch that takes longer than the grace period is broken off in time for a save, with the right code."""
    stop = StopSignals(BOTH, grace_seconds=0.2)
    stop.install({})
    try:
        send(signal.SIGINT)
        began = time.monotonic()
        with pytest.raises(TrainingStopped, match="within its grace period") as error:
            wait_for_signal()
        assert error.value.code == 130
        assert 0.1 < time.monotonic() - began < 0.2 + 1.0
    finally:
        stop.uninstall()


def test_batch_that_came_after_all_is_not_thrown_away(stop: StopSignals) -> None:
    """If the batch arrives while the watcher steps in, nothing is raised: the next boundary stops the run."""
    send(signal.SIGTERM)
    stop._must_raise = stop_module._FETCH  # the watcher has decided
    stop.fetch_began = None  # and the batch is there
    send(signal.SIGTERM)
    assert stop.requested == signal.SIGTERM


def test_watcher_leaves_a_save_alone() -> None:
    """While the state is being saved nobody steps in; afterwards, if the process is still stuck, somebody does."""
    stop = StopSignals(BOTH, grace_seconds=0.05)
    stop.install({})
    saved: list[bool] = []

    def save_and_wait() -> None:
        with stop.saving():
            send(signal.SIGTERM)
            time.sleep(0.3)
            saved.append(True)
        wait_for_signal()

    try:
        with pytest.raises(TrainingStopped):
            save_and_wait()
    finally:
        stop.uninstall()
    assert saved == [True]


def test_nobody_steps_in_without_a_request(stop: StopSignals) -> None:
    """A slow fetch alone is no reason to stop."""
    stop.fetch_began = time.monotonic() - 100
    time.sleep(0.15)
    assert stop.requested is None


def test_nobody_steps_in_after_the_fit() -> None:
    """Once the signals are given back, the watcher is gone: nothing is raised behind ``fit``."""
    stop = StopSignals(BOTH, grace_seconds=0.1)
    stop.install({})
    send(signal.SIGTERM)
    stop.uninstall()
    time.sleep(0.2)
    assert not [t for t in threading.enumerate() if t.name == "fault-tolerance-stop"]


def test_sole_rank_does_what_it_was_asked() -> None:
    """One rank agrees with itself."""
    assert SoleRank().stop_signal(None) is None
    assert SoleRank().stop_signal(15) == 15


NUM_RANKS = 3
NUM_BOUNDARIES = 8


class Ranks:
    """Threads as ranks, each with a view of one store."""

    def __init__(self, max_drift: int = 0) -> None:
        self.max_drift = max_drift
        self.store = HashStore()
        self.store.set_timeout(timedelta(seconds=3))
        self.stopped: dict[int, tuple[int, int]] = {}
        self.errors: list[BaseException] = []

    def run(self, requests: dict[int, tuple[int, int]], pause: Callable[[int, int], Any]) -> None:
        """Let each rank pass its boundaries; `requests` says at which of them it is asked for which signal."""
        threads = [threading.Thread(target=self._rank, args=(rank, requests, pause)) for rank in range(NUM_RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert self.errors == []

    def _rank(self, rank: int, requests: dict[int, tuple[int, int]], pause: Callable[[int, int], Any]) -> None:
        agreement = StoreAgreement(self.store, prefix="fit-1", max_drift=self.max_drift)
        requested = None
        try:
            for boundary in range(NUM_BOUNDARIES):
                at, signum = requests.get(rank, (NUM_BOUNDARIES, 0))
                requested = signum if boundary >= at else requested
                found = agreement.stop_signal(requested)
                if found is not None:
                    self.stopped[rank] = (boundary, found)
                    return
                pause(rank, boundary)
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self.errors.append(error)


def test_nobody_asked_nobody_stops() -> None:
    """Without a request all ranks pass all boundaries, and nothing is left in the store."""
    ranks = Ranks()
    ranks.run({}, lambda rank, boundary: None)
    assert ranks.stopped == {}
    assert ranks.store.num_keys() == 0


@settings(max_examples=30)
@given(
    asked=st.dictionaries(st.integers(0, 2), st.integers(0, 4), min_size=1, max_size=3),
    delays=st.lists(st.integers(0, 3), min_size=NUM_RANKS, max_size=NUM_RANKS),
    window=st.integers(1, 3),
)
def test_all_stop_at_one_boundary(asked: dict[int, int], delays: list[int], window: int) -> None:
    """Whichever ranks are asked, at whichever boundaries, however fast each is: all stop at the same one.

    Ranks meet in a collective at the end of each accumulation window, and may drift apart inside it.
    """
    ranks = Ranks(max_drift=window - 1)
    collective = threading.Barrier(NUM_RANKS, timeout=3)

    def step(rank: int, boundary: int) -> None:
        time.sleep(0.001 * delays[rank])
        if (boundary + 1) % window == 0:
            collective.wait()

    ranks.run({rank: (at, signal.SIGTERM) for rank, at in asked.items()}, step)
    assert len(ranks.stopped) == NUM_RANKS
    assert len(set(ranks.stopped.values())) == 1
    assert {found for _, found in ranks.stopped.values()} == {signal.SIGTERM}


def test_rank_that_is_asked_after_the_others_have_passed_its_boundary() -> None:
    """Nobody waits for a rank that waits for him in a collective: all stop at the next boundary."""
    store = HashStore()
    one, other = (StoreAgreement(store, prefix="fit-1", max_drift=0) for _ in range(2))
    assert other.stop_signal(None) is None
    assert one.stop_signal(signal.SIGTERM) is None
    assert [agreement.stop_signal(None) for agreement in (one, other)] == [signal.SIGTERM] * 2


def test_drift_too_small_for_the_ranks_is_what_max_drift_is_for() -> None:
    """A rank that is two boundaries ahead stops with the others only if max_drift says that it can be."""
    for max_drift, stops_together in ((2, True), (0, False)):
        store = HashStore()
        slow, fast = (StoreAgreement(store, prefix="fit-1", max_drift=max_drift) for _ in range(2))
        assert [fast.stop_signal(None) for _ in range(3)] == [None] * 3
        at = next(boundary for boundary in range(8) if slow.stop_signal(signal.SIGTERM) is not None)
        fast_at = 3 + next(boundary for boundary in range(5) if fast.stop_signal(None) is not None)
        assert (at == fast_at) == stops_together


def test_fits_that_share_a_store_don_t_hear_each_other() -> None:
    """A request of one fit is none of the next: each has its prefix."""
    store = HashStore()
    one = StoreAgreement(store, prefix="fit-1", max_drift=0)
    assert [one.stop_signal(15), one.stop_signal(15)] == [None, 15]
    other = StoreAgreement(store, prefix="fit-2", max_drift=0)
    assert [other.stop_signal(None), other.stop_signal(None)] == [None, None]


def test_two_ranks_asked_for_two_signals_stop_for_one() -> None:
    """Asked for different signals at once, all ranks name the same one: their exit codes are the job's."""
    store = HashStore()
    one, other = (StoreAgreement(store, prefix="f", max_drift=0) for _ in range(2))
    assert [one.stop_signal(signal.SIGTERM), other.stop_signal(signal.SIGINT)] == [None, None]
    assert [one.stop_signal(signal.SIGTERM), other.stop_signal(signal.SIGINT)] == [signal.SIGTERM] * 2

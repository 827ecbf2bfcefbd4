"""The ring yields the state of a position, or the reason why it can't, but never another state."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import time

import pytest
from hypothesis import given, strategies as st

from lightning_faulttolerant.loader.ring import WorkerRing


@given(
    num_workers=st.integers(1, 4),
    num_slots=st.integers(1, 6),
    num_batches=st.integers(0, 15),
    length=st.integers(0, 64),
)
def test_last_states_of_each_worker_are_there(num_workers: int, num_slots: int, num_batches: int, length: int) -> None:
    """The last states of each worker, one per slot, are as it left them; older ones are refused."""
    ring = WorkerRing(num_workers=num_workers, num_slots=num_slots, slot_bytes=64)

    def state(worker: int, count: int) -> bytes:
        return bytes([worker, count]) * (length // 2)

    for count in range(num_batches + 1):
        for worker in range(num_workers):
            ring.put(worker, count, state(worker, count))
    for worker in range(num_workers):
        for count in range(num_batches + 1):
            if count > num_batches - num_slots:
                assert ring.get(worker, count) == state(worker, count)
            else:
                with pytest.raises(LookupError, match=f"worker {worker} has no state after {count} batches"):
                    ring.get(worker, count)


def test_state_that_was_never_left_is_refused() -> None:
    """A worker that has not left a state yet has none, not an empty one."""
    ring = WorkerRing(num_workers=1, num_slots=2, slot_bytes=8)
    with pytest.raises(LookupError, match="no state after 0 batches"):
        ring.get(0, 0)


def test_state_that_is_too_long_is_refused_and_touches_nobody() -> None:
    """A state longer than its slot is not cut: it is refused with both lengths, and its neighbors stay whole."""
    ring = WorkerRing(num_workers=2, num_slots=2, slot_bytes=8)
    for worker in range(2):
        for count in range(2):
            ring.put(worker, count, b"12345678")
    ring.put(0, 2, b"123456789")
    with pytest.raises(LookupError, match="the state of worker 0 has 9 bytes, but its slots have 32"):
        ring.get(0, 2)
    assert [ring.get(0, 1), ring.get(1, 0), ring.get(1, 1)] == [b"12345678"] * 3


def test_state_that_is_on_its_way_is_waited_for() -> None:
    """A batch that was handed out, but is not fetched yet, is waited for, unless its worker could not fetch it."""
    ring = WorkerRing(num_workers=1, num_slots=2, slot_bytes=8)
    ring.register(0, os.getpid())
    ring.put(0, 0, b"first")
    threading.Timer(0.05, ring.put, (0, 1, b"second")).start()
    assert ring.get(0, 1) == b"second"
    threading.Timer(0.05, ring.note_failure, (0,)).start()
    with pytest.raises(LookupError, match="no state after 2 batches"):
        ring.get(0, 2)


def test_half_written_state_is_never_given() -> None:
    """A worker that is killed while it writes leaves a slot that is refused: no old and no torn state is read."""

    class Torn(WorkerRing):
        def _write(self, offset: int, data: bytes) -> None:
            if data == b"new":
                raise KeyboardInterrupt
            super()._write(offset, data)

    ring = Torn(num_workers=1, num_slots=1, slot_bytes=8)
    ring.put(0, 1, b"old")
    with pytest.raises(KeyboardInterrupt):
        ring.put(0, 2, b"new")
    for count in (1, 2):
        with pytest.raises(LookupError):
            ring.get(0, count)


def test_state_that_is_overwritten_while_it_is_read_is_never_torn() -> None:
    """The reader looks again after the copy: it takes the new state of the same position, and no other one."""

    class Overwritten(WorkerRing):
        later = (1, b"new state")

        def _read(self, offset: int, length: int) -> bytes:
            begin = super()._read(offset, length // 2)
            if self.later:
                (count, state), self.later = self.later, ()
                self.put(0, count, state)
            return begin + super()._read(offset + length // 2, length - length // 2)

    ring = Overwritten(num_workers=1, num_slots=1, slot_bytes=9)
    ring.put(0, 1, b"old state")
    assert ring.get(0, 1) == b"new state"
    ring.later = (2, b"2nd state")
    with pytest.raises(LookupError):
        ring.get(0, 1)
    assert ring.slot_bytes % 8 == 0  # or a count is not written at once


def _work(ring: WorkerRing) -> None:
    ring.register(1, os.getpid())
    ring.put(1, 3, b"state")
    while not ring.is_closing(1):
        time.sleep(0.001)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_memory_is_shared_with_a_worker(method: str) -> None:
    """The main process reads what a forked or spawned worker writes, and the worker sees that it must end."""
    ring = WorkerRing(num_workers=2, num_slots=4, slot_bytes=8)
    ring.put(0, 0, b"mine")  # so that this process keeps an address, which is useless in another process
    worker = multiprocessing.get_context(method).Process(target=_work, args=(ring,))
    worker.start()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            found = ring.get(1, 3)
            break
        except LookupError:
            continue
    assert found == b"state"
    assert not ring.is_closing(1)
    assert ring.close() == [worker.pid]  # worker 0 has never started
    worker.join(10)
    assert worker.exitcode == 0
    assert ring.get(0, 0) == b"mine"


def test_what_workers_say_arrives() -> None:
    """Each message arrives once, whichever workers send it, as long as there is room; states stay whole."""
    ring = WorkerRing(num_workers=3, num_slots=1, slot_bytes=8)
    for worker in range(3):
        ring.put(worker, 0, b"state %d" % worker)
    assert ring.said() == []
    ring.say(1, ["one", "zwölf"])
    ring.say(2, ["one"])
    ring.say(2, ["one", "two"])
    assert ring.said() == ["one", "zwölf", "two"]
    ring.say(0, ["ö" * 4096])
    assert ring.said()[0] == "ö" * (len(ring.said()[0]))
    assert 1000 < len(ring.said()[0]) < 4096
    assert [ring.get(worker, 0) for worker in range(3)] == [b"state 0", b"state 1", b"state 2"]


def test_close_tells_every_worker() -> None:
    """Each worker, started or not, sees that it must end."""
    ring = WorkerRing(num_workers=3, num_slots=1, slot_bytes=8)
    ring.register(0, 11)
    ring.register(2, 12)
    assert not any(ring.is_closing(worker) for worker in range(3))
    assert ring.close() == [11, 12]
    assert all(ring.is_closing(worker) for worker in range(3))


def test_address_does_not_travel() -> None:
    """The pickled ring starts in another process without an address of this one."""
    ring = WorkerRing(num_workers=1, num_slots=1, slot_bytes=8)
    ring.put(0, 0, b"x")
    assert ring.__getstate__()["_bytes"] is None
    with pytest.raises(TypeError):
        pickle.dumps(ring._bytes)

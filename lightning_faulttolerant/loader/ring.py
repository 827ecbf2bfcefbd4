"""Shared memory in which the data-loading workers of one iterator leave their states, batch by batch.

Each worker has its own slots and writes only to those. The main process reads only when it saves. A slot is found by
the number of batches that the worker has fetched, and it holds that number. So a slot that is not written yet, or was
overwritten, is never taken for the right one.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import time
import weakref
from collections.abc import Sequence
from multiprocessing.util import Finalize

import torch

from lightning_faulttolerant.processes import is_running

# The numbers of a worker, and where they are. For an iterable data set, it also notes the number of its iteration, and
# how many batches it had fetched when that began, and when it ran out of samples.
_PROCESS_ID, _IS_CLOSING, _HAS_FAILED, _ITERATION, _BEGAN, _ENDED, _NOTE_LENGTH, _NOTE = range(0, 64, 8)
_NOTE_BYTES = 4096
# Of a slot: the number of batches fetched; how often it was written; the length of the state, or the length it needed;
# the state.
_COUNT, _WRITES, _LENGTH, _STATE = range(0, 32, 8)
_EMPTY = -1


_rings: weakref.WeakSet[WorkerRing] = weakref.WeakSet()
_finalizers: dict[int, Finalize] = {}
"""The finalizer of this process, by its id: a forked process starts without."""


class WorkerRing:
    """States of `num_workers` workers, the last `num_slots` of each, at most `slot_bytes` long.

    The memory is a shared tensor. Forked workers inherit it, and spawned workers receive it by file descriptor.
    """

    def __init__(self, *, num_workers: int, num_slots: int, slot_bytes: int) -> None:
        self.num_workers = num_workers
        self.num_slots = num_slots
        self.slot_bytes = _STATE + -(-slot_bytes // 8) * 8  # a number that is not aligned is not written at once
        self._process_id = os.getpid()
        self._views: tuple[memoryview, memoryview] | None = None  # of bytes and of numbers
        self._memory = torch.zeros(num_workers * self._worker_bytes, dtype=torch.uint8)
        self._memory.share_memory_()  # type: ignore[no-untyped-call]
        for worker in range(num_workers):
            for slot in range(num_slots):
                self._set(self._slot_offset(worker, slot) + _COUNT, _EMPTY)
        _rings.add(self)
        _close_at_the_end()

    @property
    def _worker_bytes(self) -> int:
        return _NOTE + _NOTE_BYTES + self.num_slots * self.slot_bytes

    def _slot_offset(self, worker: int, count: int) -> int:
        return worker * self._worker_bytes + _NOTE + _NOTE_BYTES + (count % self.num_slots) * self.slot_bytes

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_views": None}  # addresses differ in another process

    def _viewed(self) -> tuple[memoryview, memoryview]:
        if self._views is None:
            data = _bytes_of(self._memory)
            self._views = data, data.cast("q")
        return self._views

    def _read(self, offset: int, length: int) -> bytes:
        return bytes(self._viewed()[0][offset : offset + length])

    def _write(self, offset: int, data: bytes) -> None:
        self._viewed()[0][offset : offset + len(data)] = data

    def _get(self, offset: int) -> int:
        return int(self._viewed()[1][offset // 8])

    def _set(self, offset: int, number: int) -> None:
        self._viewed()[1][offset // 8] = number

    # In a worker.

    def register(self, worker: int, process_id: int) -> None:
        """Note the process id of a new worker."""
        self._set(worker * self._worker_bytes + _PROCESS_ID, process_id)

    def put(self, worker: int, count: int, state: bytes) -> None:
        """Leave the state of `worker` after `count` batches."""
        offset = self._slot_offset(worker, count)
        # The count is written last, so a half-written slot is never taken for a complete one.
        self._set(offset + _COUNT, _EMPTY)
        self._set(offset + _WRITES, self._get(offset + _WRITES) + 1)
        self._set(offset + _LENGTH, len(state))
        if _STATE + len(state) <= self.slot_bytes:
            self._write(offset + _STATE, state)
        self._set(offset + _COUNT, count)

    def note_begin(self, worker: int, iteration: int, count: int) -> None:
        """Note that `worker` begins `iteration` over its iterable data set after `count` batches."""
        offset = worker * self._worker_bytes
        self._set(offset + _BEGAN, count)
        self._set(offset + _ENDED, _EMPTY)
        self._set(offset + _ITERATION, iteration)

    def note_end(self, worker: int, count: int) -> None:
        """Note that `worker` ran out of samples: its iteration ends after `count` batches."""
        self._set(worker * self._worker_bytes + _ENDED, count)

    def note_failure(self, worker: int) -> None:
        """Note that `worker` could not fetch a batch: it leaves no state after it."""
        self._set(worker * self._worker_bytes + _HAS_FAILED, 1)

    def say(self, worker: int, sentences: Sequence[str]) -> None:
        """Replace the worker's earlier sentences for the main process; cut them off where the space ends."""
        offset = worker * self._worker_bytes
        said = "\0".join(sentences).encode()[:_NOTE_BYTES]
        self._set(offset + _NOTE_LENGTH, 0)
        self._write(offset + _NOTE, said)
        self._set(offset + _NOTE_LENGTH, len(said))

    def is_closing(self, worker: int) -> bool:
        """Return whether the main process wants this worker to exit."""
        return bool(self._get(worker * self._worker_bytes + _IS_CLOSING))

    # In the main process.

    def said(self) -> list[str]:
        """Return the sentences that workers have left so far, each once."""
        found: dict[str, None] = {}
        for worker in range(self.num_workers):
            offset = worker * self._worker_bytes
            if length := self._get(offset + _NOTE_LENGTH):
                said = self._read(offset + _NOTE, length).decode(errors="ignore")
                found.update(dict.fromkeys(said.split("\0")))
        return list(found)

    def is_working(self, worker: int) -> bool:
        """Return whether `worker` still fetches what it was given, or may."""
        offset = worker * self._worker_bytes
        process_id = self._get(offset + _PROCESS_ID)
        if self._get(offset + _HAS_FAILED):
            return False
        return is_running(process_id) if process_id else bool(multiprocessing.active_children())

    def span(self, worker: int, iteration: int) -> tuple[int, int | None]:
        """Return the number of batches that `worker` had fetched when `iteration` began, and when it ended, if it has.

        Raises:
            LookupError: If the worker is in another iteration.
        """
        offset = worker * self._worker_bytes
        while self._get(offset + _ITERATION) < iteration and self.is_working(worker):
            time.sleep(0.001)
        first, last = self._get(offset + _BEGAN), self._get(offset + _ENDED)
        at = self._get(offset + _ITERATION)
        if at != iteration:
            raise LookupError(f"worker {worker} is in iteration {at} over its data set, not in {iteration}")
        return first, None if last == _EMPTY else last

    def has(self, worker: int, count: int) -> bool:
        """Return whether the state after `count` batches exists."""
        return self._get(self._slot_offset(worker, count) + _COUNT) == count

    def get(self, worker: int, count: int) -> bytes:
        """Return the state of `worker` after `count` batches.

        Raises:
            LookupError: If the slot was overwritten, never written, or too small for the state.
        """
        offset = self._slot_offset(worker, count)
        is_over = False
        while True:
            before = self._head(offset)
            state = self._read(offset + _STATE, min(before[2], self.slot_bytes - _STATE))
            is_whole = before == self._head(offset)  # the worker may have written it during the copy
            if (is_whole and before[0] >= count) or is_over:
                break
            is_over = not self.is_working(worker)  # it was handed out, but may not be fetched yet
            time.sleep(0.001)
        written, _, length = before
        if written != count or not is_whole:
            raise LookupError(f"worker {worker} has no state after {count} batches in its ring (found {written})")
        if _STATE + length > self.slot_bytes:
            raise LookupError(f"the state of worker {worker} has {length} bytes, but its slots have {self.slot_bytes}")
        return state

    def _head(self, offset: int) -> tuple[int, int, int]:
        return self._get(offset + _COUNT), self._get(offset + _WRITES), self._get(offset + _LENGTH)

    def close(self) -> list[int]:
        """Tell the workers to exit; return the process ids of those that have started."""
        process_ids = []
        for worker in range(self.num_workers):
            offset = worker * self._worker_bytes
            self._set(offset + _IS_CLOSING, 1)
            process_ids.append(self._get(offset + _PROCESS_ID))
        return [process_id for process_id in process_ids if process_id]


def _bytes_of(memory: torch.Tensor) -> memoryview:
    return memoryview((ctypes.c_ubyte * memory.numel()).from_address(memory.data_ptr())).cast("B")


def _close_at_the_end() -> None:
    """Close this process's rings when it ends, before multiprocessing ends its children and waits for them.

    The functions of atexit are too late, since a process of multiprocessing does not call them. A finalizer belongs to
    the process that created it.
    """
    if os.getpid() not in _finalizers:
        _finalizers[os.getpid()] = Finalize(None, _close_all, exitpriority=0)


def _close_all() -> None:
    for ring in _rings:
        if ring._process_id == os.getpid():
            ring.close()

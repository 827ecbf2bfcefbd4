"""Shared memory in which the data-loading workers of one iterator leave their states, batch by batch.

Each worker has its own slots and writes only to those. The main process reads only when it saves. A slot is found by
the number of batches that the worker has fetched, and it holds that number. So a slot that is not written yet, or was
overwritten, is never taken for the right one.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
import weakref
from collections.abc import Sequence
from multiprocessing.util import Finalize

import torch

# Process id of the worker; 1 once the main process wants it to exit; for an iterable data set, the number of its
# iteration, and the number of batches fetched by the worker when that began, and when it ran out of samples.
_WORKER_HEADER = struct.Struct("<qqqqq")
_NOTE_HEADER = struct.Struct("<q")  # length of the worker's message, which follows it
_NOTE_BYTES = 4096
_SLOT_HEADER = struct.Struct("<qq")  # number of batches fetched; length of the state, or the length it needed
_EMPTY = -1
_WAIT_SECONDS = 5.0


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
        self.slot_bytes = slot_bytes + _SLOT_HEADER.size
        self._process_id = os.getpid()
        self._bytes: memoryview | None = None
        self._memory = torch.zeros(num_workers * self._worker_bytes, dtype=torch.uint8)
        self._memory.share_memory_()  # type: ignore[no-untyped-call]
        for worker in range(num_workers):
            for slot in range(num_slots):
                self._write(self._slot_offset(worker, slot), _SLOT_HEADER.pack(_EMPTY, 0))
        _rings.add(self)
        _close_at_the_end()

    @property
    def _worker_bytes(self) -> int:
        return _WORKER_HEADER.size + _NOTE_BYTES + self.num_slots * self.slot_bytes

    def _note_offset(self, worker: int) -> int:
        return worker * self._worker_bytes + _WORKER_HEADER.size

    def _slot_offset(self, worker: int, count: int) -> int:
        return self._note_offset(worker) + _NOTE_BYTES + (count % self.num_slots) * self.slot_bytes

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_bytes": None}  # addresses differ in another process

    def _view(self, offset: int, length: int) -> memoryview:
        if self._bytes is None:
            self._bytes = _bytes_of(self._memory)
        return self._bytes[offset : offset + length]

    def _write(self, offset: int, data: bytes) -> None:
        self._view(offset, len(data))[:] = data

    # In a worker.

    def register(self, worker: int, process_id: int) -> None:
        """Note the process id of a new worker."""
        self._write(worker * self._worker_bytes, struct.pack("<q", process_id))

    def put(self, worker: int, count: int, state: bytes) -> None:
        """Leave the state of `worker` after `count` batches."""
        offset = self._slot_offset(worker, count)
        # The count is written last, so a half-written slot is never taken for a complete one.
        self._write(offset, _SLOT_HEADER.pack(_EMPTY, len(state)))
        if _SLOT_HEADER.size + len(state) <= self.slot_bytes:
            self._write(offset + _SLOT_HEADER.size, state)
        self._write(offset, struct.pack("<q", count))

    def note_begin(self, worker: int, iteration: int, count: int) -> None:
        """Note that `worker` begins `iteration` over its iterable data set after `count` batches."""
        offset = worker * self._worker_bytes + 16
        self._write(offset + 8, struct.pack("<qq", count, _EMPTY))
        self._write(offset, struct.pack("<q", iteration))

    def note_end(self, worker: int, count: int) -> None:
        """Note that `worker` ran out of samples: its iteration ends after `count` batches."""
        self._write(worker * self._worker_bytes + 32, struct.pack("<q", count))

    def say(self, worker: int, sentences: Sequence[str]) -> None:
        """Replace the worker's earlier sentences for the main process; cut them off where the space ends."""
        offset = self._note_offset(worker)
        said = "\0".join(sentences).encode()[: _NOTE_BYTES - _NOTE_HEADER.size]
        self._write(offset, _NOTE_HEADER.pack(0))
        self._write(offset + _NOTE_HEADER.size, said)
        self._write(offset, _NOTE_HEADER.pack(len(said)))

    def is_closing(self, worker: int) -> bool:
        """Return whether the main process wants this worker to exit."""
        return bool(_WORKER_HEADER.unpack(self._view(worker * self._worker_bytes, _WORKER_HEADER.size))[1])

    # In the main process.

    def said(self) -> list[str]:
        """Return the sentences that workers have left so far, each once."""
        found: dict[str, None] = {}
        for worker in range(self.num_workers):
            offset = self._note_offset(worker)
            [length] = _NOTE_HEADER.unpack(self._view(offset, _NOTE_HEADER.size))
            if length:
                said = bytes(self._view(offset + _NOTE_HEADER.size, length)).decode(errors="ignore")
                found.update(dict.fromkeys(said.split("\0")))
        return list(found)

    def span(self, worker: int, iteration: int) -> tuple[int, int | None]:
        """Return the number of batches that `worker` had fetched when `iteration` began, and when it ended, if it has.

        Raises:
            LookupError: If the worker is in another iteration.
        """
        deadline = time.monotonic() + _WAIT_SECONDS
        while True:
            header = self._view(worker * self._worker_bytes, _WORKER_HEADER.size)
            _, _, at, first, last = _WORKER_HEADER.unpack(header)
            if at >= iteration or time.monotonic() > deadline:
                break
            time.sleep(0.001)
        if at != iteration:
            raise LookupError(f"worker {worker} is in iteration {at} over its data set, not in {iteration}")
        return first, None if last == _EMPTY else last

    def has(self, worker: int, count: int) -> bool:
        """Return whether the state after `count` batches exists."""
        offset = self._slot_offset(worker, count)
        return bool(_SLOT_HEADER.unpack(self._view(offset, _SLOT_HEADER.size))[0] == count)

    def get(self, worker: int, count: int) -> bytes:
        """Return the state of `worker` after `count` batches.

        Raises:
            LookupError: If the slot was overwritten, never written, or too small for the state.
        """
        offset = self._slot_offset(worker, count)
        deadline = time.monotonic() + _WAIT_SECONDS
        written, length = _SLOT_HEADER.unpack(self._view(offset, _SLOT_HEADER.size))
        while written < count and time.monotonic() < deadline:  # batches handed out but not fetched yet
            time.sleep(0.001)
            written, length = _SLOT_HEADER.unpack(self._view(offset, _SLOT_HEADER.size))
        if written != count:
            raise LookupError(f"worker {worker} has no state after {count} batches in its ring (found {written})")
        if _SLOT_HEADER.size + length > self.slot_bytes:
            raise LookupError(f"the state of worker {worker} has {length} bytes, but its slots have {self.slot_bytes}")
        return bytes(self._view(offset + _SLOT_HEADER.size, length))

    def close(self) -> list[int]:
        """Tell the workers to exit; return the process ids of those that have started."""
        process_ids = []
        for worker in range(self.num_workers):
            offset = worker * self._worker_bytes
            self._write(offset + 8, struct.pack("<q", 1))
            process_ids.append(struct.unpack("<q", self._view(offset, 8))[0])
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

"""Warm up a process for the runs that fork from it, so that work common to all of them is done once.

Nothing of this changes the result of a run: it is about late imports, caches, and the kernel's memory layout.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import logging
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from lightning.fabric.utilities import registry
from lightning.pytorch import Callback
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.trainer.process import without_collections
from lightning_faulttolerant.trainer.recorder import Recorder
from tests.runs import fit_net

_HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


def warm_up() -> None:
    """Do once what each run would otherwise repeat. Call it before the first fork, and not on machines with CUDA.

    A process that has computed gradients on a machine with CUDA has threads, and autograd refuses to work in its forks.
    """
    # Each Trainer requests the entry points, and reads a file of each installed package for them: 25 ms.
    registry.entry_points = functools.cache(registry.entry_points)
    with tempfile.TemporaryDirectory() as directory, _quiet(), isolate_rng():
        for epochs in (1, 2):  # the second fit resumes
            callbacks: list[Callback] = [
                FaultTolerance(dirpath=directory, run_id="warm", every_n_train_steps=1),
                Recorder(Path(directory) / "events.jsonl"),
            ]
            with contextlib.suppress(SystemExit):
                fit_net(callbacks, Path(directory), max_epochs=epochs, limit_train_batches=3)


def settle_memory() -> None:
    """Keep memory from being copied: hide it from the garbage collector of forks, and use as few pages as possible.

    A fork copies an entry for each page, and pages of 2 MiB need a 512th of the entries.
    """
    gc.collect()
    gc.freeze()
    with without_collections():  # counts the frozen objects, which takes 0.1 s: here, and not in each fork
        pass
    libc = ctypes.CDLL(None)
    if hasattr(libc, "madvise"):
        for begin, end in _private_memory():
            for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):  # a kernel refuses advice that it does not know
                libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)


def _private_memory() -> Iterator[tuple[int, int]]:
    """Yield the bounds of the whole huge pages in each mapping of the heap."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        addresses, access, *_, name = (*line.split(), "")[:6] if len(line.split()) < 6 else line.split()[:6]
        begin, end = (int(address, 16) for address in addresses.split("-"))
        begin, end = -(-begin // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES, end // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        if access == "rw-p" and name in ("", "[heap]") and begin < end:
            yield begin, end


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)

"""Memory of batches is used again once nothing refers to a batch, and never before."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_faulttolerant.streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from lightning_faulttolerant.streaming.batch_memory import BatchMemory, free_parts_of_ended_children
from lightning_faulttolerant.streaming.loader import SharedCollate, collate
from tests.streaming.same_batches import assert_same

NUM_SAMPLES, BATCH_SIZE = 64, 2
COLUMNS = {
    "number": "int",
    "large": "ndarray:int32:50,100",
    "small": "ndarray:float32:3",
    "varying": "ndarray",
    "name": "str",
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data set of numbers, of arrays small and large, of arrays that grow, and of strings."""
    where = tmp_path_factory.mktemp("samples")
    with MDSWriter(out=str(where), columns=COLUMNS, size_limit=200_000) as writer:
        for i in range(NUM_SAMPLES):
            large, small = np.arange(i, i + 5000, dtype=np.int32).reshape(50, 100), np.full(3, i, np.float32)
            grows = np.full(1 + i // BATCH_SIZE * 4000, i, np.int64)  # the last ones are larger than a batch should be
            writer.write({"number": i, "large": large, "small": small, "varying": grows, "name": f"sample {i}"})
    return where


def loader_of(directory: Path, **options: Any) -> StreamingDataLoader:
    """Return a loader with workers."""
    dataset = StreamingDataset(directory, batch_size=BATCH_SIZE)
    return StreamingDataLoader(dataset, batch_size=BATCH_SIZE, **{"num_workers": 2, **options})


def places_of(loader: StreamingDataLoader) -> list[int]:
    """Return where the large arrays of each batch are, each gone before the next one comes."""
    return [batch["large"].data_ptr() for batch in loader]


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}, {"prefetch_factor": 5, "drop_last": True}])
def test_batches_are_those_of_the_main_process(directory: Path, options: dict[str, Any]) -> None:
    """All batches of two epochs are equal, kept together or not, and each array has memory of its size."""
    expected = list(loader_of(directory, num_workers=0))
    loader = loader_of(directory, **options)
    for _ in range(2):
        assert_same(list(loader), expected)
        for batch, other in zip(loader, expected, strict=True):
            assert_same(batch, other)
            assert batch["large"].untyped_storage().nbytes() == 4 * batch["large"].numel()
            batch["large"] += 1
    assert loader.collate_fn is collate


def test_memory_is_used_again(directory: Path) -> None:
    """Batches that are gone leave their place to others: there are as many places as batches at a time."""
    assert len(set(places_of(loader_of(directory, prefetch_factor=2)))) <= 2 * (2 + 2)


def test_without_memory_batches_take_torchs_way(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spawned workers can't have it, and a system may refuse it: the batches are the same."""
    assert loader_of(directory, multiprocessing_context="spawn")._new_memory() is None
    monkeypatch.setattr("lightning_faulttolerant.streaming.loader.BatchMemory", refuse)
    loader = loader_of(directory)
    assert loader._new_memory() is None
    assert_same(list(loader), list(loader_of(directory, num_workers=0)))


def refuse(**arguments: object) -> None:
    """Stand for a system that has no memory left."""
    raise OSError("no memory")


def test_loaders_of_others_use_none(directory: Path) -> None:
    """Code that sees samples or batches in the worker gets them as torch's loader would pass them."""
    loader = loader_of(directory, collate_fn=list, num_workers=1)
    assert isinstance(next(iter(loader)), list)
    memory = BatchMemory(num_workers=1, batches_per_worker=1, batch_bytes=100)
    samples = [{"number": 1}, {"number": 2}]
    assert_same(SharedCollate(memory)(samples), collate(samples))  # in the main process


class Filled:
    """A memory of one worker with two parts, which are filled here instead of in a worker."""

    def __init__(self) -> None:
        self.memory = BatchMemory(num_workers=1, batches_per_worker=2, batch_bytes=800)

    def batch(self) -> torch.Tensor:
        """Return the tensor of a new batch."""
        part = self.memory.part_of(0)
        assert part is not None
        stored = part.array((100,), np.dtype(np.int64))
        assert stored is not None
        stored[0][:] = 7
        function, arguments = part.batch({"numbers": stored[1]}).__reduce__()  # type: ignore[misc]
        tensor: torch.Tensor = function(*arguments)["numbers"]  # type: ignore[operator]
        return tensor

    def num_free(self) -> int:
        """Return how many parts are free."""
        gc.collect()
        free_parts_of_ended_children()
        free = 0
        while (part := self.memory.part_of(0)) is not None:
            self.memory.use(part._part)
            free += 1
        for number in range(2):
            if number not in {*self.memory._handed_out, *self.memory._kept}:
                self.memory._pages[number] = 0
        return free


KEPT: dict[str, Callable[[torch.Tensor], object]] = {
    "tensor": lambda tensor: tensor,
    "view": lambda tensor: tensor[1:3].reshape(2, 1),
    "detached": lambda tensor: tensor.detach(),
    "storage": lambda tensor: tensor.untyped_storage(),
    "array": lambda tensor: tensor.numpy(),
    "view of an array": lambda tensor: tensor.numpy()[5:].view(np.uint8),
    "graph": lambda tensor: (tensor.float() * torch.ones(100, requires_grad=True)).sum(),
}


@pytest.mark.parametrize("kind", KEPT)
def test_every_reference_keeps_the_memory(kind: str) -> None:
    """A part is free once nothing refers to its batch, and not before."""
    filled = Filled()
    assert filled.num_free() == 2
    kept = KEPT[kind](filled.batch())
    assert filled.num_free() == (2 if kind == "graph" else 1)  # what torch computes from it is a copy
    del kept
    assert filled.num_free() == 2


def test_a_full_memory_has_no_part() -> None:
    """With all parts in use, there is none; what does not fit in a part has no place there."""
    filled = Filled()
    kept = [filled.batch(), filled.batch()]
    assert filled.memory.part_of(0) is None
    del kept
    part = filled.memory.part_of(0)
    assert part is not None
    assert part.array((5000,), np.dtype(np.int64)) is None
    assert part.array((0, 3), np.dtype(np.int64)) is None
    assert part.batch({"name": ["a"]}) == {"name": ["a"]}


def test_parts_that_a_child_has_are_used_again_after_its_end() -> None:
    """A child forked meanwhile still has the batch when its parent has let go of it, and frees nothing itself."""
    filled = Filled()
    batches, (end, end_of_child) = [filled.batch()], os.pipe()
    for _ in range(2):
        if not os.fork():
            batches.clear()
            os.read(end, 1)
            os._exit(0)
    batches.clear()
    assert filled.num_free() == 1
    batches.append(filled.batch())  # after the forks
    batches.clear()
    for _ in range(2):
        assert filled.num_free() == 1
        os.write(end_of_child, b" ")
        os.wait()
    assert filled.num_free() == 2


def test_other_loaders_in_the_loop_take_no_memory_away(directory: Path) -> None:
    """After many validation runs, whose workers are forked while a batch is in use, batches still have its memory."""
    fds = len(os.listdir("/proc/self/fd"))
    batches = iter(loader_of(directory, prefetch_factor=2))
    for _ in range(16):
        batch = next(batches)
        list(DataLoader(range(2), num_workers=1))  # type: ignore[arg-type]
        assert not batch["large"].is_shared()  # torch's way
    assert [batch["large"].is_shared() for batch in batches] == [False] * 16
    del batch, batches
    while len(os.listdir("/proc/self/fd")) > fds:  # torch's processes end on their own
        gc.collect()
        time.sleep(0.01)


def test_child_reads_its_batch_during_training(directory: Path) -> None:
    """A process that draws a batch while training continues sees that batch, not a later one."""
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()
    batches = iter(loader_of(directory, num_workers=1))
    kept = [next(batches)]
    expected = kept[0]["large"].clone()

    def look() -> None:
        assert ready.wait(20)
        assert torch.equal(kept[0]["large"], expected)

    process = fork.Process(target=look)
    process.start()
    kept.clear()
    for _ in batches:
        pass
    ready.set()
    process.join(20)
    assert process.exitcode == 0

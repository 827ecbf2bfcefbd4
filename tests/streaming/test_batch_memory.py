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
from lightning_faulttolerant.streaming.loader import collate
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
    return StreamingDataLoader(dataset, batch_size=BATCH_SIZE, **{"num_workers": 1, **options})


@pytest.mark.parametrize("options", [{"persistent_workers": True}, {"num_workers": 2, "drop_last": True}], ids=str)
def test_batches_are_those_of_the_main_process(directory: Path, options: dict[str, Any]) -> None:
    """All batches of two epochs are equal, kept together or not, and each array has memory of its size."""
    expected = list(loader_of(directory, num_workers=0))
    loader = loader_of(directory, **options)
    assert_same(list(loader), expected)
    places = set()
    for batch, other in zip(loader, expected, strict=True):
        assert_same(batch, other)
        assert batch["large"].untyped_storage().nbytes() == 4 * batch["large"].numel()
        places.add(batch["large"].data_ptr())
        batch["large"] += 1
    assert loader.collate_fn is collate
    assert len(places) < len(expected) / 2  # batches that are gone leave their place to others


def test_a_collate_of_others_gets_samples(directory: Path) -> None:
    """Code that sees samples in the worker gets them as torch's loader would pass them."""
    assert isinstance(next(iter(loader_of(directory, collate_fn=list))), list)


KEPT: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda tensor: tensor,
    "view": lambda tensor: tensor[:, 1:3].reshape(-1),
    "detached": lambda tensor: tensor.detach(),
    "storage": lambda tensor: tensor.untyped_storage(),
    "array": lambda tensor: tensor.numpy(),
    "view of an array": lambda tensor: tensor.numpy()[:, 5:].view(np.uint8),
}


def test_every_reference_keeps_the_memory(directory: Path) -> None:
    """Whatever refers to a batch sees its values, however many batches follow."""
    for kind, keep in KEPT.items():
        kept: list[Any] = []
        for batch in loader_of(directory):
            if len(kept) < 3:
                kept.append(keep(batch["large"]))
            del batch
        expected = [keep(batch["large"]) for _, batch in zip(range(3), loader_of(directory, num_workers=0))]  # noqa: B905
        assert [bytes(np.asarray(found)) for found in kept] == [bytes(np.asarray(other)) for other in expected], kind


def test_other_loaders_in_the_loop_take_no_memory_away(directory: Path) -> None:
    """After validation runs, whose workers are forked while a batch is in use, no file stays open."""
    fds = len(os.listdir("/proc/self/fd"))
    batches = iter(loader_of(directory, num_workers=2))
    for _ in range(4):
        batch = next(batches)
        list(DataLoader(range(2), num_workers=1))  # type: ignore[arg-type]
        assert not batch["large"].is_shared()  # torch's way
    assert [batch["large"].is_shared() for batch in batches] == [False] * 28
    del batch, batches
    while len(os.listdir("/proc/self/fd")) > fds:  # torch's processes end on their own
        gc.collect()
        time.sleep(0.01)


def test_a_child_reads_its_batch_during_training(directory: Path) -> None:
    """A process that draws a batch while training continues sees that batch, not a later one."""
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()
    batches = iter(loader_of(directory))
    kept = [next(batches)]
    expected = kept[0]["large"].clone()

    def look() -> None:
        ready.wait()
        assert torch.equal(kept[0]["large"], expected)

    process = fork.Process(target=look)
    process.start()
    kept.clear()
    for _ in batches:
        pass
    ready.set()
    process.join()
    assert process.exitcode == 0

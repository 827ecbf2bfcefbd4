"""Shards that others may have written run no code when torch loads them, and those of torch load as they were."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from lightning_faulttolerant.errors import UnsafeCheckpointError
from lightning_faulttolerant.trainer.ranks.stored_shards import safely_unpickled
from tests.damage import Payload

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state(value: object = 0.5) -> dict[str, Any]:
    """Return tensors of several kinds, and values that are no tensors."""
    weights = {f"{dtype}": torch.ones(3, 2).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64)}
    weights["channels"] = torch.ones(1, 2, 2, 2).to(memory_format=torch.channels_last)
    return {"weights": OrderedDict(weights), "groups": [{"lr": value, "betas": (0.9, 0.99), "params": ["a"]}]}


def load(directory: Path, target: dict[str, Any]) -> None:
    """Load it as an untrusted autosave."""
    with safely_unpickled(str(directory), "others can write there"):
        dcp.load(target, storage_reader=dcp.FileSystemReader(directory), no_dist=True)


def test_real_shards_load_as_they_were(tmp_path: Path) -> None:
    """Tensors of each kind and plain values are loaded, and torch is as before afterwards."""
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    target = state(0.0)
    for tensor in target["weights"].values():
        tensor.zero_()
    load(tmp_path, target)
    assert target["groups"] == state()["groups"]
    for name, tensor in state()["weights"].items():
        assert torch.equal(target["weights"][name], tensor)
    assert filesystem.pickle is pickle  # type: ignore[attr-defined]
    assert DefaultLoadPlanner.load_bytes.__module__ == "torch.distributed.checkpoint.default_planner"


def in_index(directory: Path, payload: Payload) -> None:
    """Put an object into the index."""
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(directory), no_dist=True)
    (directory / ".metadata").write_bytes(pickle.dumps(payload))


def in_value(directory: Path, payload: Payload) -> None:
    """Put an object into a shard."""
    dcp.save(state(payload), storage_writer=dcp.FileSystemWriter(directory), no_dist=True)


@pytest.mark.parametrize("put", [in_index, in_value])
def test_an_object_is_not_unpickled(put: Callable[[Path, Payload], None], tmp_path: Path) -> None:
    """The error names it, and its code does not run; without the block, it runs."""
    proof = tmp_path / "proof"
    put(tmp_path / "shards", Payload(proof))
    with pytest.raises(
        UnsafeCheckpointError,
        match=r"others can write there\. .*: it refers to (os|posix)\.mkdir\. If",
    ):
        load(tmp_path / "shards", state(0.0))
    assert not os.path.exists(proof)

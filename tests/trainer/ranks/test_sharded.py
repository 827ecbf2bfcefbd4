"""Several ranks write one directory of shards, or none; sharded tensors are saved and restored as they were."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lightning_faulttolerant.checkpoint.autosave_files import METADATA_NAME
from lightning_faulttolerant.checkpoint.ranks import Alone, Ranks
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.errors import RanksLostError
from lightning_faulttolerant.state.tensors import TensorMarks, gradients_state, load_gradients
from lightning_faulttolerant.trainer.position import BOUNDARY, TrainerPosition
from lightning_faulttolerant.trainer.ranks.sharded import ShardWriter
from lightning_faulttolerant.trainer.ranks.strategies import connect_all
from tests.ranks import on_ranks

FULL = OSError(28, "No space left on device")
TORCHS = CheckpointException(
    "", {1: _wrap_exception(RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"))}
)


class Writes:
    """Writes as a strategy does, one file per rank; fails on one rank in the saves with some numbers."""

    def __init__(self, rank: int, *, fails: tuple[int, int] | None = None, error: BaseException = FULL) -> None:
        self._rank = rank
        self._fails = fails
        self._error = error

    def save_checkpoint(self, checkpoint: dict[str, Any], directory: str) -> None:
        if self._fails == (self._rank, checkpoint["number"]):
            raise self._error
        Path(directory, f"__{self._rank}_0.distcp").write_bytes(bytes([checkpoint["number"]]) * 100)
        if self._rank == 0:
            torch.save(checkpoint, Path(directory, METADATA_NAME))


def _save_three(
    rank: int, directory: Path, fails: tuple[int, int] | None, *, raises: bool = True, error: BaseException = FULL
) -> list[str]:
    ranks = connect_all()
    series = AutosaveSeries(directory, keep_last=2) if rank == 0 else None
    writer = ShardWriter(SimpleNamespace(strategy=Writes(rank, fails=fails, error=error)), series, ranks)  # type: ignore[arg-type]
    outcomes = []
    for number in range(3):
        position = TrainerPosition(where=BOUNDARY, epoch=0, batch=number, global_step=number)
        try:
            path, failure = writer.save({"number": number}, position, raises=raises)
            assert bool(path) != bool(failure)
            outcomes.append(os.path.basename(path) or f"failed: {failure}")
        except Exception as error:  # noqa: BLE001 - an exception of a rank is its answer
            outcomes.append(f"{type(error).__name__}: {error}")
    ranks.close()
    return outcomes


@pytest.mark.parametrize("error", [FULL, TORCHS], ids=["disk", "torch"])
def test_a_disk_that_is_full_in_mid_run_is_told_on_all(error: BaseException, tmp_path: Path) -> None:
    """If a full disk is not an error, all ranks must learn of it, nothing may be left, and the next save must work."""
    directory = tmp_path / "fit-1"
    first, second = on_ranks(
        lambda rank: _save_three(rank, directory, (1, 1), raises=False, error=error), tmp_path / "ranks"
    )
    assert first == second
    assert first[1].startswith(f"failed: rank 1: {type(error).__name__}: ")
    assert sorted(os.listdir(directory)) == [first[0], first[2]]


class _InStore:
    """Writes one file, below any URL; `broadcast` is the strategy's own."""

    def broadcast(self, value: Any) -> Any:
        return value

    def save_checkpoint(self, checkpoint: dict[str, Any], directory: str) -> None:
        torch.save(dict(checkpoint), os.path.join(self.broadcast(directory), METADATA_NAME))


class _RankDies(Alone):
    """Another rank dies while this one commits."""

    def to_first(self, step: str, value: Any) -> Any:
        if step == "commit":
            raise RanksLostError("rank 1: its connection is closed")
        return super().to_first(step, value)


def _save_in_store(series: AutosaveSeries, ranks: Ranks, number: int) -> str:
    writer = ShardWriter(SimpleNamespace(strategy=_InStore()), series, ranks)  # type: ignore[arg-type]
    position = TrainerPosition(where=BOUNDARY, epoch=0, batch=number, global_step=number)
    return writer.save({"number": number}, position, raises=False)[0]


def test_an_autosave_in_a_store_stays_if_a_rank_dies_right_after_its_commit(tmp_path: Path) -> None:
    """With one autosave kept, the one before is deleted by then: the new one is all that there is."""
    series = AutosaveSeries(f"memory://{tmp_path.name}-dies", keep_last=1)
    _save_in_store(series, Alone(), 1)
    with pytest.raises(RanksLostError):
        _save_in_store(series, _RankDies(), 2)
    _, content = AutosaveSeries(series.directory).load_newest() or ("", {})
    assert content == {"number": 2}


def _gradients(rank: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (2,))
    module = nn.Linear(3, 2)
    module.weight = nn.Parameter(distribute_tensor(torch.arange(6.0).reshape(2, 3), mesh, [Shard(0)]))
    module.bias = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Replicate()]))
    module.weight.grad = distribute_tensor(torch.ones(2, 3), mesh, [Shard(0)])
    module.bias.grad = DTensor.from_local(torch.full((2,), float(rank + 1)), mesh, [Partial()])
    state = gradients_state(module)
    module.weight.grad = module.bias.grad = None
    load_gradients(module, state)
    weight, bias = module.weight.grad, module.bias.grad
    assert weight is not None
    assert bias is not None
    return [
        torch.equal(weight.to_local(), torch.ones(1, 3)),
        repr(weight.placements),
        bias.to_local().tolist(),
        repr(bias.placements),
        all(type(value) in (torch.Tensor, list) for entry in state.values() for value in entry.values()),
    ]


def test_gradients_in_shards_come_back_as_they_were(tmp_path: Path) -> None:
    """A sharded gradient, and one that is a pending sum, must come back with each rank's part, unsummed."""
    first, second = on_ranks(_gradients, tmp_path)
    assert first == [True, "(Shard(dim=0),)", [1.0, 1.0], "(Partial(sum),)", True]
    assert second == [True, "(Shard(dim=0),)", [2.0, 2.0], "(Partial(sum),)", True]


def _marks(rank: int) -> list[bool]:
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(torch.arange(6.0).reshape(2, 3), mesh, [Shard(0)]))
    marks = TensorMarks([weight])
    before = marks.unmoved([weight])
    if rank == 1:
        weight.to_local().data[0, 0] += 1
    return [before, marks.unmoved([weight])]


def test_a_change_of_a_shard_is_seen_by_its_rank_alone(tmp_path: Path) -> None:
    """Each rank must report whether its own part of a sharded tensor has moved, without asking the others."""
    assert on_ranks(_marks, tmp_path) == [[True, True], [True, False]]

"""The states of ranks are kept as bytes, each rank reads its own only, and none reads a damaged one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_faulttolerant import DamagedCheckpointError, atomic_torch_save
from lightning_faulttolerant.checkpoint.ranks import RankReader, as_bytes, joined, packed_state
from lightning_faulttolerant.checkpoint.schema import KEY, part_in
from lightning_faulttolerant.checkpoint.verify import verify_file
from lightning_faulttolerant.state.packing import pack_blobs, unpack_blobs
from lightning_faulttolerant.trainer.position import TrainerPosition

NUM_RANKS = 5


def state(rank: int) -> dict[str, Any]:
    """Return a state that differs from rank to rank, and has another length for each."""
    return {"rng": {"torch": bytes([rank]) * 5000}, "tensor": torch.full((rank + 1,), float(rank)), "flags": [rank]}


def checkpoint(num_ranks: int = NUM_RANKS) -> dict[str, Any]:
    """Return a checkpoint of several ranks, with weights that are tied."""
    packed = [pack_blobs(state(rank)) for rank in range(num_ranks)]
    states = joined([packed[0], *map(as_bytes, packed[1:])])
    part = {
        "version": 2,
        "world_size": num_ranks,
        "position": TrainerPosition(where="boundary", epoch=0, batch=1, global_step=1).state_dict(),
        "origin": None,
        "surroundings": {},
        "fingerprint": {"loaders": {}},
        **states,
    }
    weight = torch.arange(100.0)
    return {"state_dict": {"a": weight, "tied": weight, "rows": weight[10:20]}, KEY: part}


def assert_is_state_of(found: dict[str, Any], rank: int) -> None:
    """Check a loaded state."""
    loaded, expected = unpack_blobs(packed_state(found[KEY], rank)), state(rank)
    assert torch.equal(loaded.pop("tensor"), expected.pop("tensor"))
    assert loaded == expected


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a file of five ranks."""
    atomic_torch_save(checkpoint(), tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


def place_in(path: Path, found: bytes) -> int:
    """Return where these bytes are in the file; they are there once."""
    data = path.read_bytes()
    assert data.count(found) == 1
    return data.index(found)


def flip(path: Path, at: int) -> None:
    """Change one byte."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def place_of_state(path: Path, rank: int) -> int:
    """Return a place in the middle of the bytes of a rank."""
    made = as_bytes(pack_blobs(state(rank)))
    assert not isinstance(made, dict)
    return place_in(path, made.data) + len(made.data) // 2


def test_a_file_with_states_as_bytes_loads_and_has_each_state(path: Path) -> None:
    """The file is one of torch.save that loads safely, its schema is right, and each rank finds its state."""
    found = torch.load(path, weights_only=True)
    assert part_in(found, path) is not None
    assert found[KEY]["ranks"][1:] == [None] * (NUM_RANKS - 1)
    for rank in range(NUM_RANKS):
        assert_is_state_of(found, rank)


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_rank_reads_its_own_state_only(path: Path, rank: int) -> None:
    """It has its state and all that is not of one rank, shared as it was; it has no state of another rank."""
    found = RankReader(rank=rank, num_ranks=NUM_RANKS).load(path, verifies_all=rank == 0)
    assert_is_state_of(found, rank)
    weights = found["state_dict"]
    assert weights["a"].tolist() == list(range(100))
    assert weights["rows"].tolist() == list(range(10, 20))
    assert weights["a"].data_ptr() == weights["tied"].data_ptr() == weights["rows"].data_ptr() - 40
    other = 1 + rank % (NUM_RANKS - 1)
    with pytest.raises(ValueError, match=f"The state of rank {other} was not read"):
        packed_state(found[KEY], other)


def test_the_bytes_of_other_ranks_are_not_read(path: Path) -> None:
    """A rank does not notice damage in another rank's bytes, which rank 0 finds before, and finds it in its own."""
    flip(path, place_of_state(path, 3))
    for rank in (1, 2, 4):
        assert_is_state_of(RankReader(rank=rank, num_ranks=NUM_RANKS).load(path, verifies_all=False), rank)
    with pytest.raises(DamagedCheckpointError, match="The state of rank 3 is damaged"):
        RankReader(rank=3, num_ranks=NUM_RANKS).load(path, verifies_all=False)
    with pytest.raises(DamagedCheckpointError, match="CRC32"):
        RankReader(rank=0, num_ranks=NUM_RANKS).load(path, verifies_all=True)
    with pytest.raises(DamagedCheckpointError, match="CRC32"):
        verify_file(path)


def test_each_rank_verifies_what_is_not_of_one_rank(path: Path) -> None:
    """A changed byte in the weights is found on each rank."""
    flip(path, place_in(path, bytes(torch.arange(100.0).untyped_storage())) + 200)
    for rank in range(NUM_RANKS):
        with pytest.raises(DamagedCheckpointError, match="CRC32"):
            RankReader(rank=rank, num_ranks=NUM_RANKS).load(path, verifies_all=False)


@pytest.mark.parametrize("num_ranks", [1, 2, NUM_RANKS + 1])
def test_another_number_of_ranks_reads_all_states(path: Path, num_ranks: int) -> None:
    """They are merged, so each rank needs all, verified."""
    for rank in {0, num_ranks - 1}:
        found = RankReader(rank=rank, num_ranks=num_ranks).load(path, verifies_all=rank == 0)
        for other in range(NUM_RANKS):
            assert_is_state_of(found, other)
    flip(path, place_of_state(path, 3))
    with pytest.raises(DamagedCheckpointError, match="CRC32"):
        RankReader(rank=num_ranks - 1, num_ranks=num_ranks).load(path, verifies_all=False)


def test_a_state_changed_on_its_way_is_found(tmp_path: Path) -> None:
    """The checksum is that of the rank that made the bytes, so the network is covered, too."""
    made = as_bytes(pack_blobs(state(1)))
    assert not isinstance(made, dict)
    whole = checkpoint(2)
    whole[KEY].update(joined([pack_blobs(state(0)), type(made)(made.data[:-1] + b"?", made.crc32)]))
    atomic_torch_save(whole, tmp_path / "a.ckpt")
    verify_file(tmp_path / "a.ckpt")
    with pytest.raises(DamagedCheckpointError, match="The state of rank 1 is damaged"):
        RankReader(rank=1, num_ranks=2).load(tmp_path / "a.ckpt", verifies_all=False)
    with pytest.raises(DamagedCheckpointError, match="The state of rank 1 is damaged"):
        RankReader(rank=0, num_ranks=2).load(tmp_path / "a.ckpt", verifies_all=True)  # so it takes an older one


@pytest.mark.parametrize("error", [RuntimeError("unable to mmap 9 bytes: No such device (19)"), OSError(19, "")])
def test_where_the_file_system_maps_no_files_all_is_read(
    error: Exception, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is the same."""
    original, was_refused = torch.load, []

    def load(*arguments: Any, mmap: bool | None = None, **more: Any) -> Any:
        if mmap:
            was_refused.append(True)
            raise error
        return original(*arguments, **more)

    monkeypatch.setattr(torch, "load", load)
    for rank in (0, 2):
        assert_is_state_of(RankReader(rank=rank, num_ranks=NUM_RANKS).load(path, verifies_all=rank == 0), rank)
    assert len(was_refused) == 2


def test_a_state_that_would_not_load_stays_as_it_is() -> None:
    """It is not kept as bytes, so that whoever reads the file decides whether to unpickle it."""
    unsafe = pack_blobs({"mine": Path("/data")})
    assert as_bytes(unsafe) is unsafe
    part = joined([pack_blobs(state(0)), unsafe, as_bytes(pack_blobs(state(2)))])
    assert packed_state(part, 1) is unsafe
    assert_is_state_of({KEY: part}, 2)

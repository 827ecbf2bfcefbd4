"""Our part of a checkpoint: its keys and values are checked, and each rank reads its own state only, undamaged."""

import pytest
import torch

from lightning_faulttolerant import atomic_torch_save
from lightning_faulttolerant.checkpoint.ranks import RankReader, as_bytes, joined, packed_state
from lightning_faulttolerant.checkpoint.schema import KEY, VERSION, part_in
from lightning_faulttolerant.checkpoint.verify import verify_file
from lightning_faulttolerant.errors import DamagedCheckpointError
from lightning_faulttolerant.state.packing import pack_blobs, unpack_blobs
from lightning_faulttolerant.trainer.position import TrainerPosition
from tests.messages import error_of

WHOLE = {
    "version": VERSION,
    "world_size": 1,
    "position": TrainerPosition(where="boundary", epoch=0, batch=1, global_step=1).state_dict(),
    "origin": None,
    "surroundings": {},
    "fingerprint": {"loaders": {}},
    "ranks": [{}],
}


def test_what_is_no_damage():
    """Unknown keys, a part of a later version, which its reader refuses, and no part at all are no error."""
    for part in ({**WHOLE, "of a later version": object()}, {"version": VERSION + 1}):
        assert part_in({KEY: part}, "a.ckpt") is part
    assert part_in({"state_dict": {}}, "a.ckpt") is part_in(None, "a.ckpt") is None


DAMAGED = {
    **{f"without {name}": {key: WHOLE[key] for key in WHOLE if key != name} for name in sorted(WHOLE)},
    **{f"{name} {value}": {**WHOLE, name: value} for name, value in (("ranks", {}), ("origin", 1), ("run", 1))},
    "a position with a text": {**WHOLE, "position": {**WHOLE["position"], "epoch": "0"}},
    "a position without a batch": {**WHOLE, "position": {"where": "boundary"}},
    "a list in what is instead": {**WHOLE, "instead": {"buffers": []}},
    "a list": [],
}


def test_damage_is_named(snapshot):
    """The error says where in the part it is, also in nested dicts."""
    said = {
        name: error_of(DamagedCheckpointError, lambda part=part: part_in({KEY: part}, "a.ckpt"))
        for name, part in DAMAGED.items()
    }
    assert said == snapshot


# The states of ranks, which are kept as bytes

NUM_RANKS = 5


def state(rank):
    """Return a state that differs from rank to rank, and has another length for each."""
    return {"rng": {"torch": bytes([rank]) * 5000}, "tensor": torch.full((rank + 1,), float(rank)), "flags": [rank]}


def checkpoint(packed):
    """Return a checkpoint of several ranks, with weights that are tied."""
    part = {**WHOLE, "world_size": len(packed), **joined(packed)}
    weight = torch.arange(100.0)
    return {"state_dict": {"a": weight, "tied": weight, "rows": weight[10:20]}, KEY: part}


PACKED = [pack_blobs(state(0)), *(as_bytes(pack_blobs(state(rank))) for rank in range(1, NUM_RANKS))]


def assert_is_state_of(found, rank):
    """Check a loaded state."""
    loaded, expected = unpack_blobs(packed_state(found[KEY], rank)), state(rank)
    assert torch.equal(loaded.pop("tensor"), expected.pop("tensor"))
    assert loaded == expected


@pytest.fixture
def path(tmp_path):
    """Return a file of five ranks."""
    atomic_torch_save(checkpoint(PACKED), tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


def load(path, rank, num_ranks=NUM_RANKS):
    """Load a file as a rank."""
    return RankReader(rank=rank, num_ranks=num_ranks).load(path, verifies_all=rank == 0)


def flip(path, found):
    """Change one byte in the middle of these bytes, which are in the file once."""
    data = bytearray(path.read_bytes())
    assert data.count(found) == 1
    data[data.index(found) + len(found) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("error", [None, RuntimeError("unable to mmap 9 bytes: No such device (19)")])
def test_a_rank_reads_its_own_state_only(path, monkeypatch, error):
    """It has its state and all that is not of one rank, shared as it was, also where files can't be mapped."""
    original, was_refused = torch.load, []

    def loaded(*arguments, mmap=None, **more):
        if mmap and error is not None:
            was_refused.append(True)
            raise error
        return original(*arguments, mmap=mmap, **more)

    monkeypatch.setattr(torch, "load", loaded)
    for rank in range(NUM_RANKS):
        found = load(path, rank)
        assert_is_state_of(found, rank)
        weights = found["state_dict"]
        assert weights["a"].tolist() == list(range(100))
        assert weights["rows"].tolist() == list(range(10, 20))
        assert weights["a"].data_ptr() == weights["tied"].data_ptr() == weights["rows"].data_ptr() - 40
        other = 1 + rank % (NUM_RANKS - 1)
        if error is None:
            with pytest.raises(ValueError, match=f"The state of rank {other} was not read"):
                packed_state(found[KEY], other)
    assert bool(was_refused) == (error is not None)


def test_each_rank_verifies_what_it_reads(path, tmp_path):
    """A rank finds damage in its own bytes and in those of all, and rank 0 finds all before; others' are not read."""
    sound = path.read_bytes()
    flip(path, PACKED[3].data)
    for rank in (1, 2, 4):
        assert_is_state_of(load(path, rank), rank)
    assert "The state of rank 3 is damaged" in error_of(DamagedCheckpointError, lambda: load(path, 3))
    assert "CRC32" in error_of(DamagedCheckpointError, lambda: load(path, 0))
    assert "CRC32" in error_of(DamagedCheckpointError, lambda: verify_file(path))
    assert "CRC32" in error_of(DamagedCheckpointError, lambda: load(path, 1, 2))
    path.write_bytes(sound)
    flip(path, bytes(torch.arange(100.0).untyped_storage()))
    for rank in range(NUM_RANKS):
        assert "CRC32" in error_of(DamagedCheckpointError, lambda rank=rank: load(path, rank))
    # The checksum is that of the rank that made the bytes, so the network is covered, too.
    changed = [*PACKED[:1], type(PACKED[1])(PACKED[1].data[:-1] + b"?", PACKED[1].crc32)]
    atomic_torch_save(checkpoint(changed), path)
    verify_file(path)
    for rank in range(2):
        said = error_of(DamagedCheckpointError, lambda rank=rank: load(path, rank, 2))
        assert "The state of rank 1 is damaged" in said

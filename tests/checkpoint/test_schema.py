"""Our part of a checkpoint is checked when it is read: its keys, and the types of their values."""

from __future__ import annotations

from lightning_faulttolerant.checkpoint.schema import KEY, VERSION, part_in
from lightning_faulttolerant.errors import DamagedCheckpointError
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

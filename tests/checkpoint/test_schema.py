"""Our part of a checkpoint is checked when it is read: its keys, and the types of their values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.checkpoint.schema import KEY, VERSION, part_in
from lightning_faulttolerant.errors import DamagedCheckpointError
from lightning_faulttolerant.trainer.position import TrainerPosition
from tests.runs import fit_net


def whole() -> dict[str, Any]:
    """Return a part with the keys that each one has."""
    return {
        "version": VERSION,
        "world_size": 1,
        "position": TrainerPosition(where="boundary", epoch=0, batch=1, global_step=1).state_dict(),
        "origin": None,
        "surroundings": {},
        "fingerprint": {"loaders": {}},
        "ranks": [{}],
    }


def test_a_part_with_more_keys_is_returned_as_it_is() -> None:
    """Keys that only some parts have may be missing, and keys that nobody knows may be there."""
    part = {**whole(), "of a later version": object()}
    assert part_in({KEY: part}, "a.ckpt") is part


def test_a_checkpoint_without_our_part_has_none() -> None:
    """Checkpoints that Lightning alone has written are no error."""
    assert part_in({"state_dict": {}}, "a.ckpt") is None
    assert part_in(None, "a.ckpt") is None


@pytest.mark.parametrize("name", sorted(whole()))
def test_a_missing_key_is_named(name: str) -> None:
    """Each key that every part has must be there."""
    part = {key: value for key, value in whole().items() if key != name}
    with pytest.raises(
        DamagedCheckpointError, match=rf"a\.ckpt is damaged\. .*: {name} is missing\. Take another checkpoint\.$"
    ):
        part_in({KEY: part}, "a.ckpt")


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("ranks", {}, "ranks is of type dict"),
        ("origin", 1, "origin is of type int"),
        ("position", {**whole()["position"], "epoch": "0"}, "position.epoch is of type str"),
        ("position", {"where": "boundary"}, "position.batch is missing; position.epoch is missing"),
        ("instead", {"buffers": []}, "instead.buffers is of type list"),
        ("param_groups", 1, "param_groups is of type int"),
    ],
)
def test_a_value_of_another_type_is_named(name: str, value: object, told: str) -> None:
    """The error says where in the part it is, also in nested dicts."""
    with pytest.raises(DamagedCheckpointError, match=told):
        part_in({KEY: {**whole(), name: value}}, "a.ckpt")


def test_a_part_of_a_later_version_is_left_to_its_reader() -> None:
    """Its keys are not known here. The reader says that a newer version of the package is needed."""
    part = {"version": VERSION + 1}
    assert part_in({KEY: part}, "a.ckpt") is part


def test_something_else_under_our_key_is_named() -> None:
    """The part must be a dict."""
    with pytest.raises(DamagedCheckpointError, match="it is of type list, not a dict"):
        part_in({KEY: []}, "a.ckpt")


def test_a_fit_does_not_start_from_a_part_that_lacks_a_key(tmp_path: Path) -> None:
    """The error names the file and the key, before anything is restored."""
    trainer = fit_net([FaultTolerance(dirpath=tmp_path / "saves")], tmp_path, max_epochs=1)
    [*_, newest] = sorted((tmp_path / "saves").rglob("*.ckpt"))
    checkpoint = torch.load(newest)
    del checkpoint[KEY]["fingerprint"]
    torch.save(checkpoint, tmp_path / "lacks.ckpt")
    assert trainer.global_step
    with pytest.raises(DamagedCheckpointError, match=r"lacks\.ckpt is damaged\. .*: fingerprint is missing\."):
        fit_net([FaultTolerance(run_id="other")], tmp_path, max_epochs=2, ckpt_path=tmp_path / "lacks.ckpt")

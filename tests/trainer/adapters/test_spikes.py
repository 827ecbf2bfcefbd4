"""A SpikeDetection that loads its own state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import SpikeDetection

from lightning_faulttolerant.trainer.adapters.state import spikes_restored


def trainer_with(*callbacks: Any) -> Any:
    """Return a stand-in for a trainer on a device other than the callbacks' initial device."""
    return SimpleNamespace(callbacks=list(callbacks), strategy=SimpleNamespace(root_device=torch.device("meta")))


def test_what_it_has_saved_is_loaded_where_it_continues() -> None:
    """It loads the state that it saved, its metric is on the trainer's device, and no attribute of ours stays on it."""
    saved, fresh = SpikeDetection(), SpikeDetection()
    saved.last_val, saved.bad_batches = 0.5, [3, 4]
    names = vars(fresh).keys() | set()
    with spikes_restored(trainer_with(fresh)):
        fresh.load_state_dict(saved.state_dict())
    assert (fresh.last_val, fresh.bad_batches) == (0.5, [3, 4])
    assert fresh.running_mean.device.type == "meta"
    assert vars(fresh).keys() == names


def test_nothing_stays_behind_an_error() -> None:
    """No attribute of ours stays on it when the block raises."""
    fresh = SpikeDetection()
    with pytest.raises(KeyError), spikes_restored(trainer_with(fresh)):
        fresh.load_state_dict({})
    assert not hasattr(fresh, "running")


def test_a_name_of_the_user_is_his() -> None:
    """An attribute that the user has set under the missing name stays."""
    mended = SpikeDetection()
    mended.running = mended.running_mean  # type: ignore[attr-defined]
    with spikes_restored(trainer_with(mended)):
        mended.load_state_dict(SpikeDetection().state_dict())
    assert mended.running is mended.running_mean  # type: ignore[attr-defined]

"""SpikeDetection: Lightning makes it save a state that it can't load again.

The best and last files of ModelCheckpoints, which forget them if their directory has changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, SpikeDetection

from lightning_faulttolerant.trainer.compat import callbacks

_BEST = ("best_model_score", "best_model_path", "best_k_models", "kth_best_model_path", "kth_value", "last_model_path")


def restore_best_models(trainer: Trainer, states: Mapping[str, Any]) -> None:
    """Let each ModelCheckpoint know its best and last files again, even in another directory.

    The default logger takes a new version directory at each start. ModelCheckpoint drops what it knew if its
    ``dirpath`` has changed: it would take the first result after a resume for the best of all.

    Args:
        trainer: The trainer of the callbacks.
        states: The callbacks' states in the checkpoint, by state key.
    """
    for callback in trainer.checkpoint_callbacks:
        state = states.get(callback.state_key)
        if isinstance(callback, ModelCheckpoint) and state and state.get("dirpath") != callback.dirpath:
            for name in _BEST:
                if name in state:
                    setattr(callback, name, state[name])


@contextmanager
def spikes_restored(trainer: Trainer) -> Iterator[None]:
    """Within the block, let each SpikeDetection load its saved state, on the device where it continues.

    Its ``load_state_dict`` looks for ``running``, but the name is ``running_mean``: every restore would fail.
    The values of that metric are not in this state; they continue with the callbacks' other metrics, after the block.
    """
    found = [callback for callback in callbacks(trainer) if isinstance(callback, SpikeDetection)]
    lacking = [callback for callback in found if not hasattr(callback, "running")]
    for callback in lacking:
        callback.running = callback.running_mean  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for callback in lacking:
            del callback.running  # type: ignore[attr-defined]
    for callback in found:  # by itself it moves there at the first batch of an epoch, which may be over
        callback.running_mean.to(trainer.strategy.root_device)

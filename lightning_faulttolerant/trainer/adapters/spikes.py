"""SpikeDetection: Lightning makes it save a state that it can't load again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import SpikeDetection

from lightning_faulttolerant.trainer.compat import callbacks


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

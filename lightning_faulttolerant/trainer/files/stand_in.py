"""Our `CheckpointIO` in place of Lightning's default one during a fit."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

from lightning.fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import Trainer

from lightning_faulttolerant.trainer.files import compat
from lightning_faulttolerant.trainer.patches import Patches
from lightning_faulttolerant.trainer.save.checkpoint_io import AtomicCheckpointIO

# Those that the user has not chosen: they stand in for Lightning's default during a fit.
_stand_ins: weakref.WeakSet[CheckpointIO] = weakref.WeakSet()


def write_atomically(trainer: Trainer, patches: Patches) -> None:
    """Let a Trainer that has Lightning's default `CheckpointIO` use ours until `patches` are undone."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        ours = AtomicCheckpointIO()
        _stand_ins.add(ours)
        patches.replace(trainer.strategy, compat.CHECKPOINT_IO, ours)


@contextlib.contextmanager
def own_file_restored(trainer: Trainer) -> Iterator[None]:
    """Within the block, read files as without us: the fit itself has just written them, as finders do.

    Lightning before 2.6 unpickles any content there, and a training that runs without us must run with us.
    """
    patches = Patches()
    if trainer.strategy.checkpoint_io in _stand_ins:
        patches.replace(trainer.strategy, compat.CHECKPOINT_IO, TorchCheckpointIO())
    try:
        yield
    finally:
        patches.undo()

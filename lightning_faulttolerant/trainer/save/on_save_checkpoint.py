"""Whether user code adds data to a checkpoint that depends on the instant of the write.

If such hooks have nothing to save before the first batch, the first autosave waits for that batch.
"""

from __future__ import annotations

import traceback

from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.bases import is_lightnings
from lightning_faulttolerant.trainer.log import tell
from lightning_faulttolerant.trainer.position import TrainerPosition

_OURS = "lightning_faulttolerant."


def overrides_save_hook(trainer: Trainer) -> bool:
    """Return whether the module or a user's callback has an ``on_save_checkpoint``, or the data module a state."""
    if type(trainer.lightning_module).on_save_checkpoint is not LightningModule.on_save_checkpoint:
        return True
    module = compat.datamodule(trainer)
    if module is not None and type(module).state_dict is not LightningDataModule.state_dict:
        return True  # it has no on_save_checkpoint that Lightning calls
    # A hook that a user's class inherits from Lightning is Lightning's. A LambdaCallback has its hook on the instance.
    modules = [callback.on_save_checkpoint.__module__ for callback in compat.callbacks(trainer)]
    return any(not is_lightnings(module) and not module.startswith(_OURS) for module in modules)


_HOOKS = ("on_save_checkpoint", "state_dict")


def can_wait(error: Exception, trainer: Trainer, position: TrainerPosition) -> bool:
    """Return whether the first save is put off, and report it: without us, such a hook first runs after a step.

    Args:
        error: The error that the save raised.
        trainer: The trainer that runs the fit. With several ranks a save is not put off: it may have failed on this
            rank alone.
        position: The position of the first boundary.
    """
    if trainer.world_size > 1 or position.global_step or position.batch:
        return False
    names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    hook = next((name for name in _HOOKS if name in names), None)
    if hook is None:
        return False
    tell(
        f"{hook} can't be called before the first batch yet, it raised {error!r}. The first autosave is made after that"
        " batch. A run that is interrupted before starts again from the beginning."
    )
    return True

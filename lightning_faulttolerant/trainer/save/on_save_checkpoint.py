"""Whether user code adds data to a checkpoint that depends on the instant of the write."""

from __future__ import annotations

from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.bases import is_lightnings

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

"""Whether somebody adds to a checkpoint what is of the instant at which it is written."""

from __future__ import annotations

from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from lightning_faulttolerant.trainer import compat

_NOT_USERS = ("lightning.pytorch.", "lightning_faulttolerant.")


def overrides_save_hook(trainer: Trainer) -> bool:
    """Return whether the module, data module or a user's callback has an ``on_save_checkpoint`` of its own."""
    if type(trainer.lightning_module).on_save_checkpoint is not LightningModule.on_save_checkpoint:
        return True
    module = compat.datamodule(trainer)
    if module is not None and _keeps_state(type(module)):
        return True
    # What a user's class inherits from one of Lightning's is Lightning's; a LambdaCallback's hook is its instance's.
    return any(not c.on_save_checkpoint.__module__.startswith(_NOT_USERS) for c in compat.callbacks(trainer))


def _keeps_state(kind: type[LightningDataModule]) -> bool:
    names = ("state_dict", "on_save_checkpoint")
    return any(getattr(kind, name) is not getattr(LightningDataModule, name) for name in names)

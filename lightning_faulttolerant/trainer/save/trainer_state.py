"""What a trainer keeps from batch to batch and does not save: its attributes, and gradients that outlive their step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn.parallel import DistributedDataParallel

from lightning_faulttolerant.trainer import compat


def trainer_state(trainer: Trainer) -> dict[str, object]:
    """Return the attributes of a trainer that decide how its run continues."""
    return {
        "should_stop": trainer.should_stop,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "num_training_batches": trainer.num_training_batches,
        "epoch_length": compat.epoch_length(trainer),
        "val_check_batch": getattr(trainer, "val_check_batch", None),
        "validation_is_set_up": compat.are_set_up(trainer, for_training=False),
        "reload_epochs": compat.reload_epochs(trainer),
        "seen_validation_batches": compat.seen_validation_batches(trainer),
        **{name: getattr(trainer.strategy.model, name) for name in _of_ddp(trainer)},
    }


def load_trainer_state(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Restore the attributes of a trainer."""
    trainer.should_stop = state["should_stop"]
    trainer.accumulate_grad_batches = state["accumulate_grad_batches"]
    if state["num_training_batches"] == trainer.num_training_batches:  # of as many ranks, and by the same limit
        compat.set_epoch_length(trainer, state["epoch_length"])
    if state["validation_is_set_up"]:
        compat.set_up_validation(trainer)
    compat.set_reload_epochs(trainer, state["reload_epochs"])
    compat.set_seen_validation_batches(trainer, state["seen_validation_batches"])
    for name in _of_ddp(trainer):
        if name in state:
            setattr(trainer.strategy.model, name, state[name])


def _of_ddp(trainer: Trainer) -> tuple[str, ...]:
    # The flag says whether the next forward takes rank 0's buffers. A new DDP does. After a forward that reduced no
    # gradients (validation, an open accumulation window, manual optimization) it doesn't: each rank keeps its own.
    is_ddp = isinstance(trainer.strategy.model, DistributedDataParallel)
    return ("require_forward_param_sync",) if is_ddp else ()


_HOOKS = ("optimizer_zero_grad", "optimizer_step", "backward", "on_before_zero_grad")
# The optimizers of these packages begin a step with a new gradient, whatever the old one was.
_PLAIN = frozenset({"apex", "bitsandbytes", "colossalai", "deepspeed", "fairscale", "lightning", "lightning_fabric",
                    "lion_pytorch", "pytorch_lightning", "timm", "torch", "torchao", "transformer_engine",
                    "transformers"})  # fmt: skip


def keeps_gradients(trainer: Trainer) -> bool:
    """Return whether the next step can read the gradients of the previous one.

    A manual step, an overridden hook, or a custom optimizer may read them. Examples are gradient norms that are logged
    before the gradients are set to zero, or a step that uses the previous gradient.
    """
    module = trainer.lightning_module
    if not module.automatic_optimization or _overrides(module, LightningModule, _HOOKS):
        return True
    if any(_overrides(callback, Callback, ("on_before_zero_grad",)) for callback in compat.callbacks(trainer)):
        return True
    return any(_root(type(optimizer)) not in _PLAIN for optimizer in trainer.optimizers)


def _overrides(owner: object, base: type, hooks: tuple[str, ...]) -> bool:
    found = (getattr(type(owner), hook) for hook in hooks)
    return any(
        own is not getattr(base, hook) and _root(own) not in _PLAIN for hook, own in zip(hooks, found, strict=True)
    )


def _root(part: object) -> str:
    return (getattr(part, "__module__", None) or "").partition(".")[0]

"""Whether gradients outlive their step. If so, they are part of the state at each boundary."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_faulttolerant.trainer import compat

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

"""What a flight recorder reads from a step: its loss and gradients, and sums of the bits of all its tensors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_faulttolerant.state.rng import rng_state
from lightning_faulttolerant.state.tensors import bit_sums, shard_of
from lightning_faulttolerant.trainer.incidents.seams import SeenStep
from lightning_faulttolerant.trainer.ledger.digests import digest
from lightning_faulttolerant.trainer.replay.step_dump import leaves_of


@torch.no_grad()
def loss_and_norm(loss: Tensor | None, gradients: Iterable[Tensor]) -> tuple[float | None, float]:
    """Return a loss, and the 2-norm of all gradients together, with one wait for the device.

    Args:
        loss: A tensor with one element; ``None`` if there is none.
        gradients: Gradients of any shapes.
    """
    by_kind: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        values = shard_of(gradient).detach()
        values = values.coalesce().values() if values.layout is torch.sparse_coo else values
        if values.numel():
            by_kind[values.device, values.dtype].append(values)
    norms = [_wide(_norm(each)) for each in by_kind.values()]
    device = norms[0].device if norms else None
    scalars = [] if loss is None or loss.numel() != 1 else [_wide(loss.reshape(()))]
    found = [scalar.to(device or scalar.device) for scalar in (*scalars, *norms)]
    numbers: list[float] = torch.stack(found).tolist() if found else []
    return (numbers[0] if scalars else None), math.hypot(*numbers[len(scalars) :])


def _norm(values: list[Tensor]) -> Tensor:
    """Return the 2-norm of tensors of one device and type together."""
    if hasattr(torch.nn.utils, "get_total_norm"):  # since torch 2.6: a few kernels for all of them
        return torch.nn.utils.get_total_norm(values)
    norm: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in values]))
    return norm


def _wide(values: Tensor) -> Tensor:
    """Return values in a type in which a norm of theirs does not overflow, if their device has one."""
    return values.float() if values.device.type == "mps" else values.double()


def has_scaler(module: LightningModule) -> bool:
    """Return whether an attribute of the module is a gradient scaler that is enabled, as in manual optimization."""
    return any(isinstance(value, torch.amp.GradScaler) and value.is_enabled() for value in vars(module).values())


def not_finite(module: LightningModule) -> tuple[str, ...]:
    """Return the names of the parameters with a gradient that is not finite."""
    grads = ((name, parameter.grad) for name, parameter in module.named_parameters())
    return tuple(name for name, grad in grads if grad is not None and not _is_finite(shard_of(grad)))


def _is_finite(values: Tensor) -> bool:
    values = values.coalesce().values() if values.layout is torch.sparse_coo else values
    return bool(torch.isfinite(values).all())


def sums_of_step(trainer: Trainer, seen: SeenStep) -> dict[str, str]:
    """Return a sum of the bits of each tensor of a step by its name, roughly in the order in which they are computed.

    Args:
        trainer: The trainer that runs the step.
        seen: The step, after a backward pass.
    """
    found = {name: digest(bit_sums(_strided(tensor))) for name, tensor in _tensors(trainer.lightning_module, seen)}
    return {"random generators": digest(rng_state()), **found}


def _tensors(module: LightningModule, seen: SeenStep) -> Iterator[tuple[str, Tensor]]:
    for name, value in leaves_of("", [seen.batch]):
        if isinstance(value, Tensor):
            yield f"input {name}", value
    yield from ((f"buffer {name}", buffer) for name, buffer in module.named_buffers())
    if seen.loss is not None:
        yield "loss", seen.loss
    for name, parameter in reversed(list(module.named_parameters())):  # the order of a backward pass
        if parameter.grad is not None:
            yield f"gradient of {name}", parameter.grad


def _strided(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()

"""Weights as Lightning has loaded them, held against what hooks at the start of a fit do to them after that.

``configure_optimizers``, ``on_fit_start`` and ``on_train_start`` are called again in each process, with the weights of
the checkpoint: one that loads pretrained weights, or passes a batch through a norm, would change what was restored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_faulttolerant.state.tensors import buffers_of, sums_of_bits


@final
class LoadedWeights:
    """Parameters and persistent buffers, as they were right after the load.

    Args:
        module: Whose.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        found = self._now()
        self._dtypes = {name: tensor.dtype for name, tensor in found.items()}
        self._sums = sums_of_bits(found)

    @torch.no_grad()
    def put_back(self, read: Callable[[], Mapping[str, Any]]) -> list[str]:
        """Give what was changed since its value again; return a reason for each that can't have it.

        Args:
            read: Reads the weights of the checkpoint once more.
        """
        # What was converted since, to another type, has its value by that.
        now = {name: tensor for name, tensor in self._now().items() if self._dtypes.get(name) == tensor.dtype}
        changed = [name for name, total in sums_of_bits(now).items() if total != self._sums[name]]
        saved = read() if changed else {}
        reasons = []
        for name in changed:
            value = saved.get(name)
            if isinstance(value, Tensor) and value.shape == now[name].shape:
                value = value.to(now[name].dtype)
                if sums_of_bits({name: value}) == {name: self._sums[name]}:
                    now[name].copy_(value)
                    continue
            reasons.append(
                f"a hook at the start, or configure_optimizers, has changed {name} after the load of the checkpoint,"
                " and its value is not in the file as it was loaded"
            )
        return reasons

    def _now(self) -> dict[str, Tensor]:
        found = {**dict(self._module.named_parameters()), **buffers_of(self._module, persistent=True)}
        return {name: tensor for name, tensor in found.items() if not is_lazy(tensor)}

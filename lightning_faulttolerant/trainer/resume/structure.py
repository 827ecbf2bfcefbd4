"""The changes that training makes to the structure of a module. A new process does not repeat them by itself."""

from __future__ import annotations

import dis
import types
from collections.abc import Mapping
from typing import Any

from torch import nn
from torchmetrics import Metric, MetricCollection

from lightning_faulttolerant.state.objects.kinds import once_per_kind

_EPOCH_START = ("on_train_epoch_start", "on_epoch_start")


class Structure:
    """The modules inside a module when the fit began.

    Args:
        module: The module that is trained.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._modules = _modules_of(module)
        self._ids = {id(one) for one in self._modules.values()}

    def lost(self) -> dict[str, str]:
        """Return the parts that a new process would not create again, by path, with the reason."""
        now, before = _modules_of(self._module), self._modules
        added = now.keys() - before.keys()
        outer = [name for name in sorted(added) if name.rpartition(".")[0] not in added]
        found = {f"module.{name}": "a module that training has assigned; make it in __init__" for name in outer}
        moved = [name for name in now.keys() & before.keys() if now[name] is not before[name]]
        if any(id(now[name]) in self._ids for name in moved):
            found["module"] = "layers that have changed places: their optimizer states would be those of others"
        return found


def _modules_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return all modules by name, without metrics and the modules of metric trackers, which are saved separately."""
    return {
        name: one
        for name, one in module.named_modules(remove_duplicate=False)
        if not isinstance(one, (Metric, MetricCollection)) and not type(one).__module__.startswith("torchmetrics.")
    }


def made_at_epoch_start(owners: Mapping[str, Any]) -> set[str]:
    """Return the paths of the attributes that the epoch-start hooks of these objects set."""
    return {f"{path}.{name}" for path, owner in owners.items() for name in _set_at_epoch_start(type(owner))}


@once_per_kind
def _set_at_epoch_start(kind: type) -> frozenset[str]:
    hooks = [vars(base)[hook] for base in kind.__mro__ for hook in _EPOCH_START if hook in vars(base)]
    codes = [hook.__code__ for hook in hooks if isinstance(hook, types.FunctionType)]
    return frozenset(
        step.argval for code in codes for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"
    )

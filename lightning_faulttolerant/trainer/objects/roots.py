"""The roots of the object state: the objects of a fit that may hold state of the user, and what is not the user's.

User state is also on objects of Lightning: functions that these objects hold, and attributes of the Trainer.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import Logger

from lightning_faulttolerant.loader.exactness import REPLAYED, has_own_class, names_of_others
from lightning_faulttolerant.loader.objects import goes_by_attributes, is_iterated
from lightning_faulttolerant.state.metrics import metrics_of, with_metrics_state
from lightning_faulttolerant.state.objects.kinds import Namespace, is_optimizer
from lightning_faulttolerant.state.objects.walk import Detached, Rules, users_namespaces
from lightning_faulttolerant.state.reachable import is_librarys, names_in_code, names_in_libraries, once_per_kind
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.files.compat import experiments_of
from lightning_faulttolerant.trainer.process import is_left_out

_TRAINERS = ("lightning.pytorch.trainer", "lightning.pytorch.loops")
_EPOCH_START = ("on_train_epoch_start", "on_epoch_start")
# The attributes of a trainer that callbacks change, and that no other part carries.
_OF_TRAINER = ("gradient_clip_val", "gradient_clip_algorithm", "check_val_every_n_epoch", "log_every_n_steps",
               "limit_train_batches", "limit_val_batches")  # fmt: skip
_OF_FIT_LOOP = ("max_epochs", "min_epochs")
FIT_LOOP = "fit_loop"
# Lightning saves the states of these, but the states do not hold everything that the objects keep.
_BY_ATTRIBUTES = (Callback, LightningDataModule, Logger)
_OF_TORCH = ("torch.optim.", "torch.distributed.")


class Roots:
    """The objects of a fit that hold the user's state, by path.

    Args:
        trainer: The trainer that runs the fit.
        callbacks: Its callbacks, by name.
    """

    def __init__(self, trainer: Trainer, callbacks: Mapping[str, Callback]) -> None:
        self._trainer = trainer
        self.callbacks = {name: callback for name, callback in callbacks.items() if not is_left_out(callback)}

    @property
    def module(self) -> LightningModule:
        """The module that is trained."""
        return self._trainer.lightning_module

    @property
    def rules(self) -> Rules:
        """What a state of these objects leaves out."""
        return rules_of(self._trainer)

    def owners(self) -> dict[str, object]:
        """Return the objects whose hooks save and load state themselves."""
        owners: dict[str, object] = {"module": self.module, "datamodule": compat.datamodule(self._trainer)}
        owners.update({f"callbacks['{name}']": callback for name, callback in self.callbacks.items()})
        return owners

    def all(self) -> dict[str, object]:
        """Return all of them."""
        trainer, owners = self._trainer, self.owners()
        for owner in (owners["module"], owners["datamodule"]):
            getattr(owner, "hparams", None)  # they are created on first access, and a save accesses them
        roots = {
            **owners,
            **{f"optimizers[{i}]": optimizer for i, optimizer in enumerate(trainer.optimizers)},
            **{f"schedulers[{i}]": one for i, one in enumerate(schedulers_of(trainer)) if may_leave_out(one)},
            **{f"loggers[{i}]": logger for i, logger in enumerate(trainer.loggers)},
            **_own_keys_of_groups(trainer.optimizers),
            **functions_of(trainer, self.callbacks),
            "trainer": Namespace(owner=trainer, names=_OF_TRAINER),
            "trainer's own": Namespace(owner=trainer),
            FIT_LOOP: Namespace(owner=trainer.fit_loop, names=_OF_FIT_LOOP),
            **_known_stores(),
        }
        return {**roots, **users_namespaces(roots)}


def _own_keys_of_groups(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Namespace]:
    """Return the plain values in groups that are not the optimizer's, such as a port or a start time."""
    groups = {
        f"optimizers[{i}].param_groups[{j}]": (group, group.keys() - getattr(optimizer, "defaults", {}))
        for i, optimizer in enumerate(optimizers)
        for j, group in enumerate(optimizer.param_groups)
    }
    return {
        path: Namespace(owner=Detached(group), names=tuple(n for n in own if isinstance(group[n], (int, float, str))))
        for path, (group, own) in groups.items()
    }


def schedulers_of(trainer: Trainer) -> list[Any]:
    """Return the schedulers of a trainer."""
    return [config.scheduler for config in trainer.lr_scheduler_configs]


def may_leave_out(value: Any) -> bool:
    """Return whether the ``state_dict`` of an optimizer or a scheduler is not torch's: it may lack a part of it."""
    module = getattr(getattr(type(value), "state_dict", None), "__module__", None)  # it may be of the object alone
    return not (module or "").startswith(_OF_TORCH)


def functions_of(trainer: Trainer, callbacks: Mapping[str, Callback]) -> dict[str, object]:
    """Return the functions that schedulers and Lightning's own callbacks hold, by path: they may keep state.

    Args:
        trainer: The trainer that runs the fit.
        callbacks: The callbacks, by name.
    """
    owners: dict[str, object] = {f"schedulers[{i}]": one for i, one in enumerate(schedulers_of(trainer))}
    owners.update({name: one for name, one in callbacks.items() if is_librarys(type(one))})
    held = ((f"{path}.{name}", value) for path, owner in owners.items() for name, value in vars(owner).items())
    found: dict[str, object] = {}
    for path, value in held:
        values = value if isinstance(value, list) else [value]
        found.update({f"{path}[{i}]": one for i, one in enumerate(values) if isinstance(one, types.FunctionType)})
    return found


def _known_stores() -> dict[str, object]:
    """Return the global stores of the libraries that are in use."""
    pyro: object = sys.modules.get("pyro")
    return {"pyro's parameters": pyro.get_param_store()} if hasattr(pyro, "get_param_store") else {}


def made_at_epoch_start(owners: Mapping[str, object]) -> set[str]:
    """Return the paths of the attributes that the epoch-start hooks of these objects set."""
    return {f"{path}.{name}" for path, owner in owners.items() for name in _set_at_epoch_start(type(owner))}


@once_per_kind
def _set_at_epoch_start(kind: type) -> frozenset[str]:
    hooks = [vars(base)[hook] for base in kind.__mro__ for hook in _EPOCH_START if hook in vars(base)]
    codes = [hook.__code__ for hook in hooks if isinstance(hook, types.FunctionType)]
    return frozenset(
        step.argval for code in codes for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"
    )


def rules_of(trainer: Trainer) -> Rules:
    """Return what a state of these objects leaves out.

    Args:
        trainer: The trainer that runs the fit.
    """
    module = trainer.lightning_module
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    schedulers = {id(one) for one in schedulers_of(trainer)}
    own |= {id(one) for one in schedulers_of(trainer) if not may_leave_out(one)}
    own |= {id(metric) for metric in with_metrics_state(module)}
    own |= {id(metric) for callback in compat.callbacks(trainer) for metric in metrics_of(callback).values()}
    own |= {id(experiment) for experiment in experiments_of(trainer.loggers)} - {id(None)}
    optimizers = {id(optimizer) for optimizer in trainer.optimizers}

    def is_live(value: object) -> bool:
        is_replayed = hasattr(type(value), REPLAYED)
        is_loader = is_replayed or (isinstance(value, torch.utils.data.DataLoader) and not has_own_class(value))
        return id(value) in own or is_loader or isinstance(value, Trainer) or is_iterated(value)

    def left_out(value: object) -> Collection[str]:
        if isinstance(value, Namespace):
            return names_of_trainers() if value.owner is trainer and value.names is None else ()
        if isinstance(value, torch.utils.data.DataLoader):
            return names_of_others(type(value))
        if is_optimizer(value):
            is_saved = id(value) in optimizers and not may_leave_out(value)
            return _of_optimizers() if is_saved else _of_optimizers() - {"state", "param_groups"}
        if id(value) in schedulers:
            return ("optimizer",)
        return _of_lightnings(type(value))

    return Rules(
        left_out=left_out,
        is_live=is_live,
        goes_by_attributes=lambda value: (
            isinstance(value, _BY_ATTRIBUTES) or id(value) in schedulers or goes_by_attributes(value)
        ),
    )


@functools.cache
def names_of_trainers() -> frozenset[str]:
    """Return every name that Lightning's own code for trainers uses. A trainer's attributes are among them."""
    return names_in_code(_functions())


def _functions() -> Iterator[object]:
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(_TRAINERS)]
    for value in [value for module in modules for value in vars(module).values()]:
        yield value
        if isinstance(value, type):
            yield from vars(value).values()


@functools.cache
def _of_optimizers() -> frozenset[str]:
    names = vars(torch.optim.SGD([torch.zeros(1, device="cpu")], lr=0.1))
    # Schedulers replace the first two by functions, and count with the third.
    return frozenset({*names, "step", "profile_hook_step", "_opt_called"})


@functools.cache
def _names_of(make: Callable[[], object]) -> frozenset[str]:
    return frozenset(vars(make()))


# torch removes them once the shapes are known: in a resumed run, at its own first batch.
_OF_LAZY_MODULES = frozenset({"_initialize_hook", "_load_hook"})


@once_per_kind
def _of_lightnings(kind: type) -> frozenset[str]:
    """Return the names of the attributes that torch's or Lightning's own code sets on objects of this class."""
    if issubclass(kind, LightningModule):
        return _names_of(LightningModule)
    if issubclass(kind, torch.nn.Module):
        return _names_of(torch.nn.Module) | _OF_LAZY_MODULES
    if issubclass(kind, LightningDataModule):
        return _names_of(LightningDataModule)
    return names_in_libraries(kind) | ({"log", "log_dict"} if issubclass(kind, Callback) else set())

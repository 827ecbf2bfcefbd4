"""The object state of a fit: the objects that it begins with, and the state that Lightning or another part carries.

User state on objects of Lightning: functions that these objects hold, and attributes of the Trainer.

The changes that training makes to the structure of a module. A new process does not repeat them by itself.
"""

from __future__ import annotations

import dis
import functools
import logging
import re
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import Metric, MetricCollection

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.objects import (
    AN_ITERATOR,
    goes_by_attributes,
    is_iterated,
    lost_in_loaders,
    lost_in_workers,
)
from lightning_faulttolerant.loader.tracked_class import REPLAYED, has_own_class, has_own_state, names_of_others
from lightning_faulttolerant.state.metrics import metrics_of, with_metrics_state
from lightning_faulttolerant.state.objects.decoding import Decoder
from lightning_faulttolerant.state.objects.encoding import Encoder
from lightning_faulttolerant.state.objects.graph import Graph, is_at
from lightning_faulttolerant.state.objects.kinds import Namespace, is_loader_iterator, is_optimizer, once_per_kind
from lightning_faulttolerant.state.objects.modules import users_namespaces
from lightning_faulttolerant.state.objects.names import CantCarryError
from lightning_faulttolerant.state.objects.object_state import LOST, NODES, TABLE, ObjectState
from lightning_faulttolerant.state.objects.users import is_global, is_librarys, names_in_code, names_in_libraries
from lightning_faulttolerant.state.objects.walk import Rules
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.experiments.compat import experiments_of
from lightning_faulttolerant.trainer.loaders.loaders import TRAIN, Loaders
from lightning_faulttolerant.trainer.loaders.reloads import Reloads
from lightning_faulttolerant.trainer.loaders.trackers import followed_loaders
from lightning_faulttolerant.trainer.objects.drawn import Drawn, parts_of_loaders
from lightning_faulttolerant.trainer.position import FINISHED
from lightning_faulttolerant.trainer.process import Registered, is_left_out
from lightning_faulttolerant.trainer.ranks.deepspeed import users_optimizers

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
        found = {f"module.{name}": "a module that training has assigned; create it in __init__" for name in outer}
        moved = [name for name in now.keys() & before.keys() if now[name] is not before[name]]
        if any(id(now[name]) in self._ids for name in moved):
            found["module"] = "layers that have changed places: they would get each other's optimizer states"
        return found


def _modules_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return all modules by name, without metrics and the modules of metric trackers, which are saved separately."""
    return {
        name: one
        for name, one in module.named_modules(remove_duplicate=False)
        if not isinstance(one, (Metric, MetricCollection)) and not type(one).__module__.startswith("torchmetrics.")
    }


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


_TRAINERS = ("lightning.pytorch.trainer", "lightning.pytorch.loops")


def functions_of(trainer: Trainer, callbacks: Mapping[str, Callback]) -> dict[str, object]:
    """Return the functions that schedulers and Lightning's own callbacks hold, by path: they may keep state.

    Args:
        trainer: The trainer that runs the fit.
        callbacks: The callbacks, by name.
    """
    owners: dict[str, object] = {f"schedulers[{i}]": c.scheduler for i, c in enumerate(trainer.lr_scheduler_configs)}
    owners.update({name: one for name, one in callbacks.items() if is_librarys(type(one))})
    held = ((f"{path}.{name}", value) for path, owner in owners.items() for name, value in vars(owner).items())
    found: dict[str, object] = {}
    for path, value in held:
        values = value if isinstance(value, list) else [value]
        found.update({f"{path}[{i}]": one for i, one in enumerate(values) if isinstance(one, types.FunctionType)})
    return found


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


_log = logging.getLogger(__name__)

# The attributes of a trainer that callbacks change, and that no other part carries.
_OF_TRAINER = ("gradient_clip_val", "gradient_clip_algorithm", "check_val_every_n_epoch", "log_every_n_steps",
               "limit_train_batches", "limit_val_batches")  # fmt: skip
_OF_FIT_LOOP = ("max_epochs", "min_epochs")
_FIT_LOOP = "fit_loop"
_HOOKS = ("on_load_checkpoint", "load_state_dict")
STORES, RELOADS, DRAWN = "stores", "reloads", "drawn"
_CALLBACK = re.compile(r"callbacks\['(.*?#\d+)'\]")


# Lightning saves the states of these, but the states do not hold everything that the objects keep.
_BY_ATTRIBUTES = (Callback, LightningDataModule, Logger)

NO_OBJECT_STATE = (
    "object state: the checkpoint was written by a version of the package that did not save it. What training had"
    " changed on plain attributes starts again"
)
"""The reason that a report gives for an old checkpoint."""


def refuse_lost(state: Mapping[str, Any], path: str, *, strict: bool) -> None:
    """Refuse a state that lost something that could not be carried, if `strict`.

    Raises:
        NotExactError: If something was lost. The message names each loss.
    """
    lost: Mapping[str, str] = state.get(LOST, {})
    if lost and strict:
        lines = "\n".join(f"  - {name}: {reason}" for name, reason in lost.items())
        raise NotExactError(
            f"{path} can't be resumed exactly: training had changed something that a checkpoint can't carry.\n"
            f"{lines}\n"
            "Give these objects state_dict and load_state_dict, or save their state with FaultTolerance.register; or "
            "pass strict=False to continue without it."
        )


class Objects:
    """Reads and restores the changes that training has made to the user's own objects.

    Args:
        trainer: The trainer that runs the fit.
        loaders: Its loaders.
        callbacks: Its callbacks, by name.
        registered: The functions that were passed to `FaultTolerance.register`, by name.
        manual: Whether only the registered state is saved, and no attributes.
    """

    def __init__(
        self,
        trainer: Trainer,
        loaders: Loaders,
        callbacks: Mapping[str, Callback],
        registered: Mapping[str, Registered],
        *,
        manual: bool,
    ) -> None:
        self._trainer = trainer
        self._loaders = loaders
        self._manual = manual
        self._registered = registered
        self._callbacks = {name: callback for name, callback in callbacks.items() if not is_left_out(callback)}
        self._state: ObjectState | None = None
        self.live: Mapping[str, str] = {}
        """What the last `state_dict` left out because it is no state (files, locks, bars), by path."""
        self._structure: Structure | None = None
        self._warned_of: set[str] = set()
        self.notes: list[str] = []
        """Lines for the report of a resume, besides the missing parts."""
        self.keeps_bytes = False
        """Whether autosaves may hold objects as bytes that only their library can read."""
        self._before_sanity_check: ObjectState | None = None
        self._changed_by_sanity_check: Mapping[str, set[str]] = {}
        self._made_by_sanity_check: list[object] = []
        self.drawn = None if manual else Drawn(lambda: _rules(trainer))
        loaders.note_draws(self.drawn)
        if self.drawn is not None:
            module, datamodule = trainer.lightning_module, compat.datamodule(trainer)
            self.drawn.note({"module": module, "datamodule": datamodule}, of_loader=False)
        self.reloads = Reloads(
            trainer, roots=self._roots, roots_of_loaders=parts_of_loaders, rules=lambda: _rules(trainer)
        )

    def before_sanity_check(self) -> None:
        """Note the state before the sanity check, which a resumed run does not repeat."""
        self._before_sanity_check = self._state_of(self._roots)

    def after_sanity_check(self) -> None:
        """Note the changes that the sanity check has made."""
        before, self._before_sanity_check = self._before_sanity_check, None
        if before is not None:
            self._changed_by_sanity_check = before.changed
            self._made_by_sanity_check = before.not_known(self._roots()) if not self._manual else []

    def tell_drawn(self) -> None:
        """Report, at the first start, what the script may have drawn without a seed."""
        if self.drawn is not None:
            self.drawn.tell()

    def begin(self) -> ObjectState:
        """Take the baseline, once: from here on training changes the objects. Return what compares with it.

        Raises:
            NotExactError: If something in it can't be followed, and the loaders are strict.
        """
        if self._state is not None:
            return self._state
        state = self._state = self._baseline()
        state.carry(self._changed_by_sanity_check)
        state.forget(self._made_by_sanity_check)
        self._made_by_sanity_check = []
        module = self._trainer.lightning_module
        self._structure = None if self._manual else Structure(module)
        state.carry_copies((*module.parameters(), *module.buffers()))
        for path in state.things_of(is_loader_iterator):
            if is_global(path):
                continue  # the script may have taken a batch from it; it is reported if training draws from it
            reason = f"The iterator {path} can't be resumed exactly: it belongs to a loader that is not followed."
            remedy = "Let the training loaders yield these batches, too, or pass strict=False."
            self._loaders.exactness.refuse(f"{reason} {remedy}")
        return state

    def state_dict(self, where: str, places: Mapping[str, object]) -> dict[str, Any]:
        """Return the changes since the baseline, and those among them that can't be carried.

        Args:
            where: The place in the fit.
            places: The states of the loaders. Their workers report what they can't carry.
        """
        current = self._state
        if current is None:
            return {}
        self._add(current)
        current.keeps_bytes = self.keeps_bytes
        state, self.live = current.state_dict(), current.live
        state[LOST].update(lost_in_loaders(places))
        made_again = _made_again(self._users(), state[LOST]) + self._replayed(current, state[LOST])
        for path in (*self._carried_by_hooks(state[LOST]), *made_again):
            state[LOST].pop(path, None)
        state[LOST].update(lost_in_workers(places))
        state[LOST].update(self._not_made_again(current))
        state[STORES] = {
            name: _encoded(name, functions[0], state[LOST]) for name, functions in self._registered.items()
        }
        state[RELOADS] = self.reloads.last
        state[DRAWN] = self.drawn.state_dict() if self.drawn is not None else {}
        self._warn_of(state[LOST])
        if where == FINISHED:  # a run that trains further sets its own limits
            state[NODES].pop(_FIT_LOOP, None)
        return state

    def _not_made_again(self, current: ObjectState) -> dict[str, str]:
        """Return what a new process would lack, because the code that created it is not called again."""
        skipped = made_at_epoch_start(self._owners())
        live = {path: reason for path, reason in current.live.items() if path in skipped}
        found = {
            path: (f"{reason}, and a resume in the middle of an epoch does not call the hook")
            for path, reason in live.items()
        }
        return {**found, **(self._structure.lost() if self._structure is not None else {})}

    def _replayed(self, current: ObjectState, lost: Mapping[str, str]) -> list[str]:
        """Return the paths of objects that reach the same place again when a loader is drawn from again."""
        ids = {id(one) for one in self._loaders.replayed()}
        at = list(current.things_of(lambda value: id(value) in ids)) if ids and lost else []
        return [path for path in lost if any(is_at(path, other) for other in at)]

    def _owners(self) -> dict[str, Any]:
        owners: dict[str, object] = {
            "module": self._trainer.lightning_module,
            "datamodule": compat.datamodule(self._trainer),
        }
        owners.update({f"callbacks['{name}']": callback for name, callback in self._callbacks.items()})
        return owners

    def _carried_by_hooks(self, lost: Mapping[str, str]) -> list[str]:
        """Return the lost paths that their owners save and load themselves, in Lightning's hooks."""
        own = {f"{path}.{name}" for path, owner in self._owners().items() for name in _names_in_hooks(type(owner))}
        return [path for path in lost if any(is_at(path, name) for name in own)]

    def _warn_of(self, lost: Mapping[str, str]) -> None:
        for path, reason in lost.items():
            if path not in self._warned_of:
                self._warned_of.add(path)
                _log.warning(
                    "Training has changed %s, which a checkpoint can't carry: %s. A resumed run would continue "
                    "without it. Give the object state_dict and load_state_dict, or save its state with "
                    "FaultTolerance.register.",
                    path,
                    reason,
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restore the state. Return a line for each thing that is not as it was."""
        current = self.begin()
        if not state:
            return []
        self._add(current)
        self.notes = [
            f"{name} is no longer among the callbacks, and its state is dropped"
            for name in sorted(_callbacks_in(state) - self._callbacks.keys())
        ]
        lost = [f"{path}: {reason}" for path, reason in state[LOST].items()]
        lost += self._load_stores(state.get(STORES, {}))
        lost += current.load_state_dict(_without_callbacks(state, keep=self._callbacks.keys()))
        for line in lost:
            _log.warning("The run was resumed without %s", line)
        return lost

    def _load_stores(self, states: Mapping[str, Any]) -> list[str]:
        stores = self._registered
        for name, state in states.items():
            if name in stores and state is not None:
                stores[name][1](Decoder(Graph(), state[TABLE]).decode(state["value"]))
        return [f"{name}: nothing is registered under this name now" for name in states.keys() - stores.keys()]

    def look_again(self) -> None:
        """Take the baseline of loaders that are new since `begin`, before anything is drawn from them."""
        if self._state is not None:
            self._add(self._state)

    def _add(self, current: ObjectState) -> None:
        if not self._manual:
            current.add(self._of_loaders())

    def _users(self) -> dict[str, Any]:
        """Return the user's own loaders by place, whether they are followed or not."""
        followed = {place: getattr(t, "user_loader", None) for place, t in self._loaders.trackers.items()}
        users = {**followed, **self._loaders.untracked}
        # An object that several loaders share gets the path of the training loader: a resumed run has no sanity check,
        # which creates other loaders first.
        return dict(sorted(users.items(), key=lambda item: not item[0].startswith(f"{TRAIN}/")))

    def _baseline(self) -> ObjectState:
        return self._state_of(lambda: {**self._of_loaders(), **self._roots()})

    def _of_loaders(self) -> dict[str, object]:
        users = self._users()
        own = {place: one for place, one in users.items() if has_own_state(one)}
        followed = {f"{place}.followed": one for place, one in followed_loaders(self._loaders.trackers).items()}
        return {**parts_of_loaders(users), **own, **followed}

    def _state_of(self, roots: Callable[[], Mapping[str, object]]) -> ObjectState:
        return ObjectState({}) if self._manual else ObjectState(roots(), _rules(self._trainer))

    def _roots(self) -> dict[str, object]:
        trainer, owners = self._trainer, self._owners()
        for owner in (owners["module"], owners["datamodule"]):
            getattr(owner, "hparams", None)  # they are created on first access, and a save accesses them
        roots = {
            **owners,
            **{f"optimizers[{i}]": optimizer for i, optimizer in enumerate(users_optimizers(trainer))},
            **{f"loggers[{i}]": logger for i, logger in enumerate(trainer.loggers)},
            **functions_of(trainer, self._callbacks),
            "trainer": Namespace(owner=trainer, names=_OF_TRAINER),
            "trainer's own": Namespace(owner=trainer),
            _FIT_LOOP: Namespace(owner=trainer.fit_loop, names=_OF_FIT_LOOP),
            **_known_stores(),
        }
        return {**roots, **users_namespaces(roots)}


def _encoded(name: str, state_dict: Callable[[], object], lost: dict[str, str]) -> dict[str, Any] | None:
    encoder = Encoder(Graph())
    try:
        return {"value": encoder.encode(state_dict()), TABLE: encoder.table}
    except CantCarryError as error:
        lost[name] = str(error)
        return None


def _known_stores() -> dict[str, object]:
    """Return the global stores of the libraries that are in use."""
    pyro: object = sys.modules.get("pyro")
    return {"pyro's parameters": pyro.get_param_store()} if hasattr(pyro, "get_param_store") else {}


def _callbacks_in(state: Mapping[str, Any]) -> set[str]:
    """Return the names of the callbacks in a state."""
    found = (_CALLBACK.match(path) for path in state[NODES])
    return {match.group(1) for match in found if match is not None}


def _without_callbacks(state: Mapping[str, Any], *, keep: Collection[str]) -> dict[str, object]:
    found = ((path, _CALLBACK.match(path)) for path in state[NODES])
    nodes = {path: state[NODES][path] for path, match in found if match is None or match.group(1) in keep}
    return {**state, NODES: nodes}


def _made_again(loaders: Mapping[str, object], lost: Mapping[str, str]) -> list[str]:
    """Return the paths of the iterators that samplers and iterable data sets create again when a loader resumes."""
    own = [f"{place}.{name}" for place in loaders for name in ("sampler", "batch_sampler")]
    own += [
        f"{p}.dataset" for p, loader in loaders.items() if isinstance(getattr(loader, "dataset", None), IterableDataset)
    ]
    return [path for path, reason in lost.items() if reason.startswith(AN_ITERATOR) and path.startswith(tuple(own))]


def _rules(trainer: Trainer) -> Rules:
    module = trainer.lightning_module
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    own |= {id(config.scheduler) for config in trainer.lr_scheduler_configs}
    own |= {id(metric) for metric in with_metrics_state(module)}
    own |= {id(metric) for callback in compat.callbacks(trainer) for metric in metrics_of(callback).values()}
    own |= {id(experiment) for experiment in experiments_of(trainer.loggers)} - {id(None)}
    optimizers = {id(optimizer) for optimizer in users_optimizers(trainer)}

    def is_live(value: object) -> bool:
        is_replayed = hasattr(type(value), REPLAYED)
        is_loader = is_replayed or (isinstance(value, DataLoader) and not has_own_class(value))
        return id(value) in own or is_loader or isinstance(value, Trainer) or is_iterated(value)

    def left_out(value: object) -> Collection[str]:
        if isinstance(value, Namespace):
            return names_of_trainers() if value.owner is trainer and value.names is None else ()
        if isinstance(value, DataLoader):
            return names_of_others(type(value))
        if is_optimizer(value):
            return _of_optimizers() if id(value) in optimizers else _of_optimizers() - {"state", "param_groups"}
        return _of_lightnings(type(value))

    return Rules(
        left_out=left_out,
        is_live=is_live,
        goes_by_attributes=lambda value: isinstance(value, _BY_ATTRIBUTES) or goes_by_attributes(value),
    )


@functools.cache
def _of_optimizers() -> frozenset[str]:
    names = vars(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    # Schedulers replace the first two by functions, and count with the third.
    return frozenset({*names, "step", "profile_hook_step", "_opt_called"})


@functools.cache
def _names_of(make: Callable[[], object]) -> frozenset[str]:
    return frozenset(vars(make()))


@once_per_kind
def _of_lightnings(kind: type) -> frozenset[str]:
    """Return the names of the attributes that torch's or Lightning's own code sets on objects of this class."""
    if issubclass(kind, LightningModule):
        return _names_of(LightningModule)
    if issubclass(kind, nn.Module):
        return _names_of(nn.Module)
    if issubclass(kind, LightningDataModule):
        return _names_of(LightningDataModule)
    return names_in_libraries(kind) | ({"log", "log_dict"} if issubclass(kind, Callback) else set())


def _names_in_hooks(kind: type) -> frozenset[str]:
    """Return every name that a class uses in its own load hooks."""
    users = [base for base in kind.__mro__ if not is_librarys(base)]
    return names_in_code([vars(base).get(hook) for base in users for hook in _HOOKS])

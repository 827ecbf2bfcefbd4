"""The object state of a fit: the objects that it begins with, and the state that Lightning or another part carries.

The changes that training makes to the structure of a module. A new process does not repeat them by itself.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch import nn
from torch.utils.data import IterableDataset
from torchmetrics import Metric, MetricCollection

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.exactness import has_own_state
from lightning_faulttolerant.loader.objects import AN_ITERATOR, lost_in_loaders, lost_in_workers
from lightning_faulttolerant.state.generators import HeldGenerators
from lightning_faulttolerant.state.objects.decoding import Decoder
from lightning_faulttolerant.state.objects.encoding import Encoder
from lightning_faulttolerant.state.objects.graph import Graph, is_at
from lightning_faulttolerant.state.objects.kinds import is_loader_iterator
from lightning_faulttolerant.state.objects.leaves import CantCarryError, unpickled
from lightning_faulttolerant.state.objects.object_state import ObjectState, is_no_data
from lightning_faulttolerant.state.objects.saved import LOST, NODES, TABLE, contents_of, without_parts
from lightning_faulttolerant.state.packing import digests_of
from lightning_faulttolerant.state.process_settings import process_settings
from lightning_faulttolerant.state.reachable import is_global, is_librarys, names_in_code
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.identity.compat import loaders_by_place
from lightning_faulttolerant.trainer.loaders.loaders import TRAIN, Loaders
from lightning_faulttolerant.trainer.loaders.reloads import Reloads
from lightning_faulttolerant.trainer.loaders.trackers import followed_loaders
from lightning_faulttolerant.trainer.objects.roots import FIT_LOOP, Roots, made_at_epoch_start, rules_of
from lightning_faulttolerant.trainer.objects.splits import Splits, parts_of_loaders
from lightning_faulttolerant.trainer.objects.start_values import StartValues
from lightning_faulttolerant.trainer.position import FINISHED, FIT, function_of
from lightning_faulttolerant.trainer.process import Registered
from lightning_faulttolerant.trainer.resume.schedulers import lost_by_callbacks

_log = logging.getLogger(__name__)


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
            found["module"] = (
                "layers that have changed places: they would get each other's optimizer states. Leave them in place, "
                "and let forward choose between them"
            )
        return found


def _modules_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return all modules by name, without metrics and the modules of metric trackers, which are saved separately."""
    return {
        name: one
        for name, one in module.named_modules(remove_duplicate=False)
        if not isinstance(one, (Metric, MetricCollection)) and not type(one).__module__.startswith("torchmetrics.")
    }


_HOOKS = ("on_load_checkpoint", "load_state_dict")
STORES, RELOADS, SPLITS, NUM_RANKS = "stores", "reloads", "splits", "num_ranks"
_CALLBACK = re.compile(r"callbacks\['(.*?#\d+)'\]")


def refuse_lost(state: Mapping[str, Any], path: str, *, strict: bool) -> None:
    """Refuse a state that lost something that could not be carried, if `strict`.

    Raises:
        NotExactError: If something was lost. The message names each loss.
    """
    lost: Mapping[str, str] = state.get(LOST, {})
    if lost and strict:
        raise NotExactError(_told(lost, path))


def _told(lost: Mapping[str, str], path: str) -> str:
    lines = "\n".join(f"  - {name}: {reason}" for name, reason in lost.items())
    return (
        f"{path} can't be resumed exactly: training has changed something that a checkpoint can't carry.\n{lines}\n"
        "Unless a line says what to do, set it in on_load_checkpoint of the module or callback that holds it, or name "
        f"functions that save and restore it: FaultTolerance.register({next(iter(lost))!r}, state_dict, "
        "load_state_dict), or pass strict=False to continue without it."
    )


@dataclass(kw_only=True, slots=True)
class _SanityCheck:
    """What the sanity check has changed. A resumed run does not repeat it.

    Args:
        before: The state before the check, during the check.
        changed: The names of the attributes that it has changed, by path.
        made: The objects that it has created.
        opaque: Those that it has created and that a checkpoint can't carry: handles, files.
        of_loaders: Those of `made` that the loaders' hooks have created, during the check.
    """

    before: ObjectState | None = None
    changed: Mapping[str, set[str]] = field(default_factory=dict)
    made: list[object] = field(default_factory=list)
    opaque: list[object] = field(default_factory=list)
    of_loaders: list[object] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Baseline:
    """What training is compared with.

    Args:
        state: The state of the objects when training begins.
        structure: The modules of the model then; ``None`` if only registered state is saved.
        lost: What callbacks can't carry in their own states, by path, with the reason.
        callbacks: The Trainer's callbacks.
    """

    state: ObjectState
    structure: Structure | None
    lost: Mapping[str, str]
    callbacks: Sequence[Callback]


class Objects:
    """Reads and restores the changes that training has made to the user's own objects.

    Args:
        trainer: The trainer that runs the fit.
        loaders: Its loaders.
        callbacks: Its callbacks, by name.
        registered: The functions that were passed to `FaultTolerance.register`, by name.
        held: The generators that objects hold.
        manual: Whether only the registered state is saved, and no attributes.
    """

    def __init__(
        self,
        trainer: Trainer,
        loaders: Loaders,
        callbacks: Mapping[str, Callback],
        registered: Mapping[str, Registered],
        held: HeldGenerators,
        *,
        manual: bool,
    ) -> None:
        self._roots = Roots(trainer, callbacks)
        self._loaders = loaders
        self._manual = manual
        self._registered = registered
        self._baseline: _Baseline | None = None
        self.live: Mapping[str, str] = {}
        """What the last `state_dict` left out because it is no state (files, locks, bars), by path."""
        self._warned_of: set[str] = set()
        self.notes: list[str] = []
        """Lines for the report of a resume, besides the missing parts."""
        self.keeps_bytes = False
        """Whether autosaves may hold objects as bytes that only their library can read."""
        self._settings: Mapping[str, object] = {}
        self._sanity_check = _SanityCheck()
        self.started: StartValues | None = None
        """What the hooks at the start of the fit are compared with."""
        self._set_at_start: dict[str, set[str]] = {}
        owners = {"module": trainer.lightning_module, "datamodule": compat.datamodule(trainer)}
        self.splits = Splits(None if manual else {**loaders_by_place(trainer), **owners})
        """The parts of splits, as they were before training."""
        self.reloads = Reloads(
            trainer,
            held,
            roots=self._roots.all,
            roots_of_loaders=parts_of_loaders,
            rules=lambda: rules_of(trainer),
        )

    def before_sanity_check(self) -> None:
        """Note the state before the sanity check, which a resumed run does not repeat."""
        if not self._manual:
            self._sanity_check.before = self._state_of(self._roots.all)

    def set_up_loaders(self, set_up: Callable[[], None]) -> None:
        """Set up loaders. Each process creates again the data that their hooks create before the sanity check ends."""
        known = self._new_since_sanity_check()
        ids = {id(one) for one in known}
        set_up()
        self._sanity_check.of_loaders += [one for one in self._new_since_sanity_check() if id(one) not in ids]

    def _new_since_sanity_check(self) -> list[object]:
        before = self._sanity_check.before
        return [] if before is None else before.not_known(self._roots.all())[0]

    def after_sanity_check(self) -> None:
        """Note the changes that the sanity check has made."""
        before = self._sanity_check.before
        if before is not None:
            data = {id(one) for one in self._sanity_check.of_loaders if not is_no_data(one)}
            made, opaque = before.not_known(self._roots.all())
            made = [one for one in made if id(one) not in data]
            self._sanity_check = _SanityCheck(changed=before.changed, made=made, opaque=opaque)

    def begin(self) -> ObjectState:
        """Take the baseline, once: from here on training changes the objects. Return what compares with it.

        Raises:
            NotExactError: If something in it can't be followed, and the loaders are strict.
        """
        if self._baseline is not None:
            return self._baseline.state
        state = self._state_of(lambda: {**self._of_loaders(), **self._roots.all()})
        module = self._roots.module
        structure = None if self._manual else Structure(module)
        lost = lost_by_callbacks(module, self._roots.callbacks) if function_of(module.trainer) == FIT else {}
        callbacks = [*compat.callbacks(module.trainer)]
        self._baseline = _Baseline(state=state, structure=structure, lost=lost, callbacks=callbacks)
        state.carry(self._sanity_check.changed, without=self._sanity_check.opaque)
        state.forget(self._sanity_check.made)
        self._sanity_check = _SanityCheck()
        self._settings = {} if self._manual else process_settings()
        state.carry_copies((*module.parameters(), *module.buffers()), replaced=not module.trainer.is_global_zero)
        if self.started is not None:
            self._set_at_start = self.started.carry(state, self._roots.rules)
        for path in state.things_of(is_loader_iterator):
            if is_global(path):
                continue  # the script may have taken a batch from it; it is reported if training draws from it
            reason = f"The iterator {path} can't be resumed exactly: the position of its loader is not saved."
            remedy = (
                "Let the training loaders yield these batches, too. If a data set holds it, pass the Trainer an object "
                "whose __iter__ creates the data set and its loader in each pass. Or pass strict=False."
            )
            self._loaders.exactness.refuse(f"{reason} {remedy}")
        return state

    def changed_settings(self) -> dict[str, object]:
        """Return the settings of the process that training has changed."""
        now, then = process_settings(), self._settings
        return {name: now[name] for name in then.keys() & now.keys() if now[name] != then[name]}

    def state_dict(self, where: str, places: Mapping[str, object], *, strict: bool = False) -> dict[str, Any]:
        """Return the changes since the baseline, and those among them that can't be carried.

        Args:
            where: The place in the fit.
            places: The states of the loaders. Their workers report what they can't carry.
            strict: Whether what can't be carried is an error; otherwise it is a warning.
        """
        if self._baseline is None:
            return {}
        current = self._baseline.state
        self._add(current)
        current.carry(self.reloads.changed)
        current.keeps_bytes = self.keeps_bytes
        state, self.live = current.state_dict(), current.live
        state[LOST].update(lost_in_loaders(places))
        made_again = _made_again(self._users(), state[LOST]) + self._replayed(current, state[LOST])
        for path in (*self._carried_by_users(state[LOST]), *made_again):
            state[LOST].pop(path, None)
        state[LOST].update(lost_in_workers(places))
        state[LOST].update(self._not_made_again(self._baseline))
        state[STORES] = {
            name: _encoded(name, functions[0], state[LOST]) for name, functions in self._registered.items()
        }
        state[RELOADS] = self.reloads.state_dict()
        state[SPLITS] = self.splits.state_dict()
        state[NUM_RANKS] = self._roots.module.trainer.world_size
        self._tell(state[LOST], strict=strict)
        if where == FINISHED:  # a run that trains further sets its own limits
            state[NODES].pop(FIT_LOOP, None)
        return state

    def _not_made_again(self, baseline: _Baseline) -> dict[str, str]:
        """Return what a new process would lack, because the code that created it is not called again."""
        skipped = made_at_epoch_start(self._roots.owners())
        remedy = "a resume in the middle of an epoch calls no epoch-start hook; create it in on_train_start"
        found = {path: f"{why}; {remedy}" for path, why in baseline.state.live.items() if path in skipped}
        known = set(map(id, baseline.callbacks))
        added = [one for one in compat.callbacks(self._roots.module.trainer) if id(one) not in known]
        reason = "a callback that training has added; pass it to the Trainer, and let it wait"
        found |= {f"callbacks[{type(one).__qualname__!r}]": reason for one in added}
        return {**found, **baseline.lost, **(baseline.structure.lost() if baseline.structure is not None else {})}

    def _replayed(self, current: ObjectState, lost: Mapping[str, str]) -> list[str]:
        """Return the paths of objects that reach the same place again when a loader is drawn from again."""
        ids = {id(one) for one in self._loaders.replayed()}
        at = list(current.things_of(lambda value: id(value) in ids)) if ids and lost else []
        return [path for path in lost if any(is_at(path, other) for other in at)]

    def _carried_by_users(self, lost: Mapping[str, str]) -> list[str]:
        """Return the lost paths that are registered, or that their owners save and load in Lightning's hooks."""
        own = {*self._registered}
        for path, owner in self._roots.owners().items():
            own |= {f"{path}.{name}" for name in _names_in_hooks(type(owner))}
        return [path for path in lost if any(is_at(path, name) for name in own)]

    def _tell(self, lost: Mapping[str, str], *, strict: bool) -> None:
        new = {path: reason for path, reason in lost.items() if path not in self._warned_of}
        refuse_lost({LOST: lost}, "This run", strict=strict)
        if new:
            self._warned_of.update(new)
            _log.warning("%s", _told(new, "This run"))

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restore the state. Return a line for each thing that is not as it was."""
        current = self.begin()
        if not state:
            return []
        self._add(current)
        self.notes = [
            f"{name} is no longer among the callbacks, and its state is dropped"
            for name in sorted({*_callbacks_in(state).values()} - self._roots.callbacks.keys())
        ]
        lost = [f"{path}: {reason}" for path, reason in state[LOST].items()]
        lost += self._load_stores(state.get(STORES, {}))
        before = current.contents(self._set_at_start)
        lost += current.load_state_dict(self._of_this_run(state))
        now = current.contents(self._set_at_start)
        others = [name for name, one in before.items() if digests_of(now.get(name)) != digests_of(one)]
        self.notes += [f"{name} has the value that a start hook gave it in the first process" for name in others]
        return lost

    def compared(self, state: Mapping[str, Any]) -> tuple[dict[str, object], dict[str, object]]:
        """Return the contents of everything in a state, and the live ones: of objects by path, of stores by name."""
        if self._baseline is None or not state:
            return {}, {}
        saved, current = self._of_this_run(state), self._baseline.state
        current.keeps_bytes = True
        live = unpickled(current.values_of(saved))
        stores = {
            name: _encoded(name, self._registered[name][0], {}) for name in state[STORES].keys() & self._registered
        }
        return {**contents_of(saved), **state[STORES]}, {**contents_of(live), **stores}

    def _of_this_run(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state without callbacks that are gone, and without what start hooks set for other ranks."""
        gone = {path for path, name in _callbacks_in(state).items() if name not in self._roots.callbacks}
        found = {**state, NODES: {path: one for path, one in state[NODES].items() if path not in gone}}
        if state[NUM_RANKS] != self._roots.module.trainer.world_size:
            found[NODES] = without_parts(found[NODES], self._set_at_start)
        return found

    def _load_stores(self, states: Mapping[str, Any]) -> list[str]:
        stores = self._registered
        for name, state in states.items():
            if name in stores and state is not None:
                stores[name][1](Decoder(Graph(), state[TABLE]).decode(state["value"]))
        return [f"{name}: nothing is registered under this name now" for name in states.keys() - stores.keys()]

    def look_again(self) -> None:
        """Take the baseline of loaders that are new since `begin`, before anything is drawn from them."""
        if self._baseline is not None:
            self._add(self._baseline.state)

    def _add(self, current: ObjectState) -> None:
        if not self._manual:
            current.add(self._of_loaders())

    def _users(self) -> dict[str, object]:
        """Return the user's own loaders by place, whether they are followed or not."""
        followed = {place: getattr(t, "user_loader", None) for place, t in self._loaders.trackers.items()}
        users = {**followed, **self._loaders.untracked}
        # An object that several loaders share gets the path of the training loader: a resumed run has no sanity check,
        # which creates other loaders first.
        return dict(sorted(users.items(), key=lambda item: not item[0].startswith(f"{TRAIN}/")))

    def _of_loaders(self) -> dict[str, object]:
        users = self._users()
        own = {place: one for place, one in users.items() if has_own_state(one)}
        followed = {f"{place}.followed": one for place, one in followed_loaders(self._loaders.trackers).items()}
        return {**parts_of_loaders(users), **own, **followed}

    def _state_of(self, roots: Callable[[], Mapping[str, object]]) -> ObjectState:
        return ObjectState({}) if self._manual else ObjectState(roots(), self._roots.rules)


def _encoded(name: str, state_dict: Callable[[], object], lost: dict[str, str]) -> dict[str, object] | None:
    encoder = Encoder(Graph())
    try:
        return {"value": encoder.encode(state_dict()), TABLE: encoder.table}
    except CantCarryError as error:
        lost[name] = str(error)
        return None


def _callbacks_in(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of the callback that each object in a state belongs to, by the object's path."""
    found = {path: _CALLBACK.match(path) for path in state[NODES]}
    return {path: match.group(1) for path, match in found.items() if match is not None}


def _made_again(loaders: Mapping[str, object], lost: Mapping[str, str]) -> list[str]:
    """Return the paths of the iterators that samplers and iterable data sets create again when a loader resumes."""
    own = [f"{place}.{name}" for place in loaders for name in ("sampler", "batch_sampler")]
    own += [
        f"{p}.dataset" for p, loader in loaders.items() if isinstance(getattr(loader, "dataset", None), IterableDataset)
    ]
    return [path for path, reason in lost.items() if reason.startswith(AN_ITERATOR) and path.startswith(tuple(own))]


def _names_in_hooks(kind: type) -> frozenset[str]:
    """Return every name that a class uses in its own load hooks."""
    users = [base for base in kind.__mro__ if not is_librarys(base)]
    return names_in_code([vars(base).get(hook) for base in users for hook in _HOOKS])

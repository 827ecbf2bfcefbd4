"""What a resume has loaded: values that a hook changes before the first batch are put back in place, leaf by leaf.

Each process calls ``configure_optimizers``, ``on_fit_start`` and ``on_train_start`` again, with the state of the
checkpoint. A hook that loads pretrained weights, sets a learning rate, or passes a batch through a norm would change
that state. A second ``load_state_dict`` would replace tensors that a hook has just referenced. Before the load,
``on_load_checkpoint`` may change the checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import json
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, final

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from lightning_faulttolerant.state.reachable import names_in_libraries
from lightning_faulttolerant.state.tensors import is_readable, mark_of, sums_of_bits, weights_of
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.adapters.state import OwnMasks
from lightning_faulttolerant.trainer.patches import Method, Patches, is_users_function
from lightning_faulttolerant.trainer.ranks.compat import has_shards
from lightning_faulttolerant.trainer.resume.parameters import GROUPS

Path = tuple[Any, ...]
"""The keys, indices, and attributes that lead to a value."""

_Sum = tuple[torch.dtype, int]
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MISSING: Final = object()
_ANY_HOOK = "a hook at the start, or configure_optimizers,"


@final
class LoadedValues:
    """Plain values and tensors in dicts, lists, schedulers, and callbacks, compared with those at an earlier time.

    Args:
        roots: Returns the values. Those at its top can only be changed in place, and may be gone later.
        names: The names of parameters in messages, by their IDs.
        keep: Whether the value at a path is one of them, or has one of them inside.
    """

    def __init__(
        self,
        roots: Callable[[], Mapping[Any, Any]],
        names: Mapping[int, str] = MappingProxyType({}),
        *,
        keep: Callable[[Path], bool] = lambda path: True,
    ) -> None:
        self._roots = roots
        self._names = names
        self._keep = keep
        self.note()

    def note(self) -> None:
        """Note the present values."""
        found = self._now()
        self._noted: dict[Path, Any] = {
            path: list(value) if isinstance(value, list) else value for path, value in found.items()
        }
        self._sums = _sums(found)
        self._seen = {path: _mark(value) for path, value in found.items()}
        self._changed_by: dict[Path, str] = {}

    def look(self, hook: str | None = None) -> None:
        """Note that `hook`, or no hook, has made the changes since the last look."""
        now = self._now()
        for path, mark in self._seen.items():
            self._seen[path] = new = _mark(now.get(path, _MISSING))
            if new != mark and hook is not None:
                self._changed_by[path] = hook

    def changed(self) -> dict[Path, Any]:
        """Return the present values that differ from those noted, by path."""
        now = self._now()
        sums = _sums({path: now[path] for path in self._sums if path in now})
        there = ((path, noted) for path, noted in self._noted.items() if len(path) > 1 or path in now)
        pairs = ((path, noted, now.get(path, _MISSING)) for path, noted in there)
        return {path: one for path, noted, one in pairs if not self._is_same(path, noted, one, sums)}

    def _is_same(self, path: Path, noted: Any, now: Any, sums: Mapping[Path, _Sum]) -> bool:
        if isinstance(noted, Tensor) and isinstance(now, Tensor):
            # A tensor that was since converted to another type keeps its converted value.
            is_converted = sums[path][0] != self._sums[path][0]
            return is_converted or (now.shape == noted.shape and sums[path] == self._sums[path])
        if isinstance(noted, list):
            return isinstance(now, list) and len(now) == len(noted)
        if isinstance(noted, _CONTAINERS):
            return isinstance(now, _CONTAINERS) and isinstance(now, dict) == isinstance(noted, dict)
        return type(now) is type(noted) and (now == noted or now != now)

    @torch.no_grad()
    def put_back(self, paths: Mapping[Path, Any], read: Callable[[Path], object]) -> list[str]:
        """Put noted values back. Return a reason for each tensor that can't be put back.

        Args:
            paths: Some of `changed`.
            read: Returns the value that the checkpoint has for a path, or ``None``.
        """
        reasons = []
        for path, now in paths.items():
            noted, inside = self._noted[path], _items_of(_at(self._roots(), path[:-1]))
            value = self._tensor(path, read) if isinstance(noted, Tensor) else noted
            is_tensor = isinstance(noted, Tensor)
            has_shape = is_tensor and isinstance(now, Tensor) and now.shape == noted.shape
            if is_tensor and (value is None or (len(path) == 1 and not has_shape)):
                reasons.append(
                    f"{self._changed_by.get(path, _ANY_HOOK)} has changed {self._name_of(path)} after the load of the "
                    "checkpoint, and the loaded value can't be read from the file again"
                )
            elif has_shape:
                now.copy_(value)
            elif isinstance(noted, list) and isinstance(now, list):
                now[:] = noted
            else:
                inside[path[-1]] = value
                if now is _MISSING and isinstance(inside, dict):
                    for key in [one[-1] for one in self._noted if one[:-1] == path[:-1]]:
                        inside[key] = inside.pop(key, None)  # in the same order
        return reasons

    def _tensor(self, path: Path, read: Callable[[Path], object]) -> Tensor | None:
        noted = self._noted[path]
        for value in (noted, read(path)):
            if isinstance(value, Tensor) and value.shape == noted.shape:
                value = value.to(noted.device, noted.dtype)
                if _sums({path: value})[path] == self._sums[path]:
                    return value
        return None

    def _now(self) -> dict[Path, Any]:
        return {path: value for path, value in _walk(self._roots(), self._keep) if path}

    def told(self, changed: Mapping[Path, Any]) -> list[str]:
        """Return a line for each hook that has made some of the changes.

        Args:
            changed: Some of `changed`.
        """
        by_hook: dict[str, list[str]] = {}
        for path, now in changed.items():
            noted, name = self._noted[path], self._name_of(path)
            values = f" from {noted!r} to {now!r}" if _is_plain(noted) and _is_plain(now) else ""
            by_hook.setdefault(self._changed_by.get(path, _ANY_HOOK), []).append(f"{name}{values}")
        return [
            f"{hook} has changed {names[0]}{f' (and {len(names) - 1} more)' if len(names) > 1 else ''}"
            for hook, names in by_hook.items()
        ]

    def _name_of(self, path: Path) -> str:
        names = [self._names.get(id(key), key) for key in path]
        inner = (f".{key}" if isinstance(key, str) and id(own) not in self._names else f"[{key}]"
                 for key, own in zip(names[1:], path[1:], strict=True))  # fmt: skip
        return f"{names[0]}{''.join(inner)}"


_CONTAINERS = (dict, list, LRScheduler, Callback)


def _walk(
    value: object, keep: Callable[[Path], bool], path: Path = (), holders: tuple[object, ...] = ()
) -> Iterator[tuple[Path, Any]]:
    """Return the values that are compared, each before those inside it."""
    yield path, value
    items = {} if any(value is one for one in holders) else _items_of(value)
    for key, one in enumerate(items) if isinstance(items, list) else items.items():
        is_compared = isinstance(one, _CONTAINERS) or _is_plain(one) or (isinstance(one, Tensor) and is_readable(one))
        # The parameters of groups are restored before the load.
        if is_compared and key != "params" and keep((*path, key)):
            yield from _walk(one, keep, (*path, key), (*holders, value))


def _items_of(value: object) -> Any:
    if isinstance(value, (LRScheduler, Callback)):
        return vars(value)
    return value if isinstance(value, (dict, list)) else {}


def _at(value: Any, path: Path) -> Any:
    """Return the value at a path, or ``None``."""
    try:
        return functools.reduce(lambda inside, key: _items_of(inside)[key], path, value)
    except (KeyError, IndexError):
        return None


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _mark(value: object) -> object:
    if isinstance(value, Tensor):
        return mark_of(value)
    return value if _is_plain(value) else (type(value), len(value) if isinstance(value, list) else None)


def _sums(values: Mapping[Path, object]) -> dict[Path, _Sum]:
    """Return the type and the sum of each tensor. Its owner may convert it in place."""
    tensors = {path: value for path, value in values.items() if isinstance(value, Tensor)}
    sums = sums_of_bits({str(number): tensor for number, tensor in enumerate(tensors.values())})
    return {path: (tensor.dtype, sums[str(number)]) for number, (path, tensor) in enumerate(tensors.items())}


_WEIGHTS: Final = "weights"
_LEN_OF_KEY = 5  # optimizers, a number, param_groups, a number, and a key
_OF_FSDP = "_fsdp_wrapped_module."
_LOAD_HOOK = "on_load_checkpoint"
_CHECKPOINT, _TRAINING, _CALLBACKS = "checkpoint", "training", "callbacks"


@final
class RestoredState:
    """The state that Lightning restores in a resume, from the load of the checkpoint until the first batch.

    Args:
        trainer: The trainer that runs the fit.
        read: Reads the checkpoint from its file again, as Lightning loads it.
        wins: Whether the run's own state wins over what ``on_load_checkpoint`` makes of it.
    """

    def __init__(self, trainer: Trainer, read: Callable[[], Mapping[str, Any]], *, wins: bool) -> None:
        self._trainer = trainer
        self._read = functools.cache(read)
        self._wins = wins
        self._own_masks: OwnMasks | None = None
        self._parts: dict[str, LoadedValues] = {}
        module, data = trainer.lightning_module, compat.datamodule(trainer)
        self._owners: dict[str, object] = {
            f"[LightningModule]{type(module).__name__}": module,
            f"[LightningDataModule]{type(data).__name__}": data,
            **{f"[Callback]{callback.state_key}": callback for callback in compat.callbacks(trainer)},
        }
        self._watched: dict[str, dict[Path, Any]] = {}
        self._num_schedulers = float("inf")
        self._reasons: list[str] = []
        self.notes: list[str] = []
        """A line for each hook whose changes are undone."""
        self.not_exact: list[str] = []
        """A line for each hook whose changes of the checkpoint are kept."""
        self._patches = Patches()
        self._patches.around(compat.profiler(trainer), "profile", self._around_hook)

    @contextlib.contextmanager
    def _around_hook(self, original: Method, action: str) -> Iterator[object]:
        # Lightning enters this context around each hook, by a name such as "[LightningModule]Net.on_train_start".
        is_users = self._is_users(action)
        for values in self._parts.values() if is_users else ():
            values.look()  # Lightning changes values between two hooks
        with original(action) as entered:
            yield entered
        for values in self._parts.values() if is_users else ():
            values.look(action.rpartition("]")[2])
        if action.endswith(_LOAD_HOOK) and _CHECKPOINT in self._parts:
            self._after_load_hook(self._parts[_CHECKPOINT], is_users=is_users)

    def _is_users(self, action: str) -> bool:
        owner, _, hook = action.rpartition(".")
        function = getattr(self._owners.get(owner), hook, None)
        return function is not None and is_users_function(function)

    def note_checkpoint(self, checkpoint: dict[str, Any], *, rewritten: Collection[str]) -> None:
        """Note what Lightning loads next, if a hook of the user's receives it first.

        Args:
            checkpoint: The checkpoint.
            rewritten: The parts of it from `rewritten_in`.
        """
        self._num_schedulers = len(checkpoint.get("lr_schedulers") or ())
        if not any(self._is_users(f"{owner}.{_LOAD_HOOK}") for owner in self._owners):
            return
        # What a checkpoint of Lightning's has of a run, and the type that it has there.
        of_run = {"state_dict": dict, "optimizer_states": list, "lr_schedulers": list, "callbacks": dict, "loops": dict}
        kept = {name for name, kind in of_run.items() if isinstance(checkpoint.get(name), kind)} - {*rewritten}
        # A hook may translate the weights of another version of the module.
        weights, here = checkpoint.get("state_dict", {}), weights_of(self._trainer.lightning_module)
        fits = {name for name in weights.keys() & here.keys() if weights[name].shape == here[name].shape}

        def keep(path: Path) -> bool:
            is_weight = len(path) > 2 and path[1] == "state_dict"
            return len(path) == 1 or (path[1] in kept and (not is_weight or path[2] in fits))

        self._parts[_CHECKPOINT] = LoadedValues(lambda: {_CHECKPOINT: checkpoint}, keep=keep)

    def _after_load_hook(self, values: LoadedValues, *, is_users: bool) -> None:
        changed = values.changed() if is_users else {}
        if self._wins:
            self._undo(values, changed, lambda path: _at(self._read(), path[1:]))
        else:
            self.not_exact += values.told(changed)
        values.note()

    def _undo(self, values: LoadedValues, changed: Mapping[Path, Any], read: Callable[[Path], object]) -> None:
        self.notes += _won(values.told(changed))
        self._reasons += values.put_back(changed, read)

    def note_loaded(self) -> None:
        """Note the weights and the states of callbacks that Lightning has loaded. Only the first call has an effect."""
        if _CALLBACKS in self._parts:
            return
        states = compat.loaded_checkpoint(self._trainer).get("callbacks", {})
        own = {one.state_key: one for one in compat.callbacks(self._trainer)}
        # The states of ModelCheckpoints continue together with their files.
        held = {
            key: one
            for key, one in own.items()
            if isinstance(states.get(key), dict) and not isinstance(one, ModelCheckpoint)
        }
        names = {key: set(states[key]) for key in held}
        self._parts[_CALLBACKS] = LoadedValues(
            lambda: held, keep=lambda path: len(path) == 1 or path[1] in names[path[0]]
        )
        if not self._trainer.strategy.restore_checkpoint_after_setup:  # it has already loaded them
            self._parts[_WEIGHTS] = LoadedValues(lambda: weights_of(self._trainer.lightning_module))

    def note_optimizers(self) -> None:
        """Note what Lightning has loaded, with the user's own masks. The last call counts: a finder loads others."""
        if self._own_masks is not None:
            self._own_masks.apply()
        self._parts.pop(_CHECKPOINT, None)
        names = {id(one): name for name, one in self._trainer.lightning_module.named_parameters()}
        self._parts[_TRAINING] = LoadedValues(lambda: _training(self._trainer), names)
        num = len(self._trainer.lr_scheduler_configs)
        if self._num_schedulers < num:  # Lightning loads those that there are
            self._reasons.append(f"schedulers: the checkpoint has the states of only {self._num_schedulers} of {num}")
            self._num_schedulers = num

    def put_back(self, created: Mapping[str, Any]) -> list[str]:
        """Put back what has changed since. Return a reason for each value that is not the run's.

        Args:
            created: How the optimizers of the run were created, if the checkpoint says so.
        """
        groups = [one["groups"] for one in created.get("optimizers", ())]
        readers = {_WEIGHTS: lambda path: self._read()["state_dict"].get(path[0]), _TRAINING: self._of_optimizers}
        for part, values in self._parts.items():
            changed = values.changed()
            # The object state knows which of the user's own values continue: those that training has changed.
            watched = {path: now for path, now in changed.items() if self._is_users_value(part, path, groups)}
            self._watched[part] = watched
            changed = {path: now for path, now in changed.items() if path not in watched}
            self._undo(values, changed, readers.get(part, lambda path: None))
        if self._own_masks is not None:
            self._own_masks.load()
        return self._reasons

    def _is_users_value(self, part: str, path: Path, created: Sequence[Sequence[Mapping[str, Any]]]) -> bool:
        if part == _CALLBACKS:
            [callback] = (one for one in compat.callbacks(self._trainer) if one.state_key == path[0])
            return len(path) == 1 or path[1] not in names_in_libraries(type(callback))
        if part != _TRAINING or path[2:3] != (GROUPS,) or len(path) != _LEN_OF_KEY:
            return False
        _, number, _, group, key = path
        return any(key not in groups[group] for groups in created[number : number + 1] if group < len(groups))

    def _of_optimizers(self, path: Path) -> object:
        kind, number, place, *rest = path
        if kind != "optimizers":
            return None
        saved, optimizer = self._read()["optimizer_states"][number], self._trainer.optimizers[number]
        if place == "state":  # the saved state numbers the parameters
            held, numbers = ([one for group in groups for one in group["params"]]
                             for groups in (optimizer.param_groups, saved["param_groups"]))  # fmt: skip
            rest[0] = dict(zip(map(id, held), numbers, strict=True)).get(id(rest[0]))
        return _at(saved, (place, *rest))

    def close(self) -> None:
        """Watch no further hook, free what was read, and note what the object state has put back."""
        self._patches.undo()
        for values, watched in ((self._parts[part], watched) for part, watched in self._watched.items() if watched):
            still = values.changed()
            self.notes += _won(values.told({path: now for path, now in watched.items() if path not in still}))
        self._parts.clear()
        self._watched.clear()
        self._read.cache_clear()

    def note_masks(self, state_dict: dict[str, object]) -> None:
        """Note the masks of pruned weights in a ``state_dict`` that Lightning loads next."""
        self._own_masks = OwnMasks(self._trainer, state_dict)


def _won(lines: list[str]) -> list[str]:
    return [f"{line}: the change is undone, so that the run keeps its own value" for line in lines]


def rewritten_in(checkpoint: Mapping[str, Any], trainer: Trainer) -> list[str]:
    """Return which parts of a dump hold other tensors than the live objects: those of a hook that changes them.

    Such a hook has a counterpart in ``on_load_checkpoint``.

    Args:
        checkpoint: A dump of Lightning's.
        trainer: The trainer of the fit.
    """
    if has_shards(trainer.strategy):
        return []  # it loads them before that hook
    weights, saved = weights_of(trainer.lightning_module), checkpoint.get("state_dict", {})
    live = {"state_dict": weights, "optimizer_states": _training(trainer)["optimizers"]}
    dumped = {**checkpoint, "state_dict": {name: saved[name] for name in weights if name in saved}}
    return [name for name, one in live.items() if not _marks(dumped.get(name)) <= _marks(one)]


_STATES = {"optimizers": "optimizer_states", "schedulers": "lr_schedulers", "callbacks": "callbacks"}


def sums_of_states(checkpoint: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return how many values each state in a checkpoint of Lightning's has, and a sum of them."""
    found = {}
    for kind, key in _STATES.items():
        states = checkpoint.get(key) or ()
        for name, state in states.items() if isinstance(states, dict) else enumerate(states):
            found[f"{kind} {name}"] = _sum_of(state)
    return found


def sums_of_weights(checkpoint: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the number of the weights in a checkpoint of Lightning's, and a sum of them."""
    return {"weights": _sum_of(checkpoint.get("state_dict"))}


def _sum_of(state: object) -> list[int]:
    values = dict(_walk(state, lambda path: True))
    sums = _sums(values)
    leaves = [(path, sums.get(path, one)) for path, one in values.items() if not isinstance(one, _CONTAINERS)]
    return [len(leaves), zlib.crc32(repr(leaves).encode())]


IN_SHARDS: Final = "in_shards"
"""The result of `sums_of_shards`, in the state of a rank."""


def sums_of_shards(trainer: Trainer) -> dict[str, list[int]]:
    """Return sums, as `sums_of_states` does, of each weight and its states in optimizers: of this rank's parts of them.

    Without a strategy that shards, nothing is returned.
    """
    if not has_shards(trainer.strategy):
        return {}
    found: dict[str, object] = {}
    for number, one in enumerate(trainer.optimizers):  # a load may add settings, and make a list of a tuple
        settings = [[group.get(key) for key in one.defaults] for group in one.param_groups]
        found[f"settings of optimizer {number}"] = json.dumps(settings, default=str)
    for name, weight in trainer.lightning_module.named_parameters():
        found[name] = weight
        found[f"optimizers of {name}"] = [dict(sorted(one.state.get(weight, {}).items())) for one in trainer.optimizers]
    return {name.replace(_OF_FSDP, ""): _sum_of([one]) for name, one in found.items()}


def changed_states(checkpoint: Mapping[str, Any], saved: Mapping[str, list[int]], trainer: Trainer) -> list[str]:
    """Return a line for each state that a hook has changed in a checkpoint of the user's, after our part was made.

    Args:
        checkpoint: The checkpoint as it was loaded.
        saved: The sums of what Lightning saved, and of what this rank had in shards.
        trainer: The trainer. A strategy that shards has loaded its weights and optimizers.
    """
    now = {**sums_of_states(checkpoint), **sums_of_shards(trainer)} if saved else {}
    now |= sums_of_weights(checkpoint) if "weights" in saved else {}
    return [
        f"{name}: a hook (on_save_checkpoint), a state_dict, or a CheckpointIO has changed it ({first[0]} values "
        f"before, {now.get(name, [0])[0]} in the checkpoint); resume from an autosave, which is complete"
        for name, first in saved.items()
        if now.get(name) != first
    ]


def _marks(values: object) -> set[object]:
    found = (value for _, value in _walk(values, lambda path: True) if isinstance(value, Tensor))
    return {mark_of(tensor) for tensor in found if tensor.numel()}


def _training(trainer: Trainer) -> dict[str, list[object]]:
    return {
        "optimizers": [
            {"param_groups": one.param_groups, "state": getattr(one, "state", {})} for one in trainer.optimizers
        ],
        "schedulers": [getattr(config.scheduler, "__dict__", {}) for config in trainer.lr_scheduler_configs],
    }

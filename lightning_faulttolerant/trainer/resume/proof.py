"""The round trip of a resume: the live value at each path of the file is read again, and compared bit by bit.

Lightning's own parts are compared by checksums, noted when the checkpoint is loaded: the file's values are not kept.
A leaf that differs each time it is read depends on the clock. Texts are not compared, because a path or an identifier
may be another one in each process.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, final

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_faulttolerant.checkpoint.ranks import Ranks
from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.digests import sample_digest
from lightning_faulttolerant.state.objects.graph import is_at
from lightning_faulttolerant.state.tensors import content_hash, is_readable, shard_of
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.position import TrainerPosition
from lightning_faulttolerant.trainer.ranks.compat import has_shards
from lightning_faulttolerant.trainer.resume.report import Proof
from lightning_faulttolerant.trainer.run.changes import NamedDifference
from lightning_faulttolerant.trainer.run.fingerprint import Comparison, accepting
from lightning_faulttolerant.trainer.save.lightnings import lightnings, weights_in
from lightning_faulttolerant.trainer.save.run_state import ReadBack, RunState
from lightning_faulttolerant.trainer.steps.repetition import Repetition

Leaves = dict[str, object]
"""The leaves of a state, by path: the numbers themselves, and a mark of anything else."""

_NUMBERS = (bool, int, type(None))
_PLAIN = (*_NUMBERS, float, complex, bytes)
_SHOWN_CHARACTERS = 80
_FEW, _MANY = 3, 8
_MAX_HELD = 8  # batches
_VALIDATION_LOOP = ".val_loop."  # its counters begin again with each validation run


class _LeafMark(NamedTuple):
    """Stands for a leaf: equal if, and only if, the bits of the leaf are."""

    text: str
    content: object = None

    def __repr__(self) -> str:
        return self.text


_TEXT = _LeafMark("a text")
_NOTHING = _LeafMark("nothing")


def leaves_of(value: object, path: str = "", *, without: Collection[str] = frozenset()) -> Iterator[tuple[str, object]]:
    """Yield the path and the value, or a mark of it, of each leaf of a state; dicts and lists have no value.

    Args:
        value: The state, or a part of it.
        path: Where it is.
        without: The keys that are left out.
    """
    value = shard_of(value)
    if isinstance(value, Mapping):
        for key, one in value.items():
            if key not in without:
                yield from leaves_of(one, f"{path}.{key}", without=without)
    elif isinstance(value, (list, tuple)) and not all(isinstance(one, _PLAIN) for one in value):
        for number, one in enumerate(value):
            yield from leaves_of(one, f"{path}.{number}", without=without)
    elif isinstance(value, (list, tuple)):
        yield path, list(map(_plain, value))
    elif isinstance(value, Tensor):
        yield path, _mark_of(value)
    else:
        yield path, _plain(value)


def _plain(value: object) -> object:
    if isinstance(value, str):
        return _TEXT
    if isinstance(value, (float, complex)):
        return _LeafMark(repr(value))  # NaN equals itself, and 0.0 is not -0.0
    if isinstance(value, bytes):
        return _LeafMark(f"{len(value)} bytes", value)
    if isinstance(value, _NUMBERS):
        return value
    return _LeafMark(f"a {type(value).__qualname__}", _digest_of(value))


def _digest_of(value: object) -> int:
    """Return a checksum of an object: of its pickle, or else of its attributes."""
    try:  # a pickle shows which parts are shared; a copy shares the same as the next copy
        blob = pickle.dumps(value)
        if b"torch" not in blob:  # that of a tensor has its address
            return zlib.crc32(pickle.dumps(pickle.loads(blob)))
    except Exception:  # noqa: BLE001 - any class may raise anything when it is pickled
        pass
    return sample_digest(value)


def _mark_of(tensor: Tensor) -> _LeafMark:
    form = f"{str(tensor.dtype).removeprefix('torch.')} tensor of shape {list(tensor.shape)}"
    if not is_readable(tensor):
        return _LeafMark(f"a {form}", None if tensor.is_meta else sample_digest(tensor))
    return _LeafMark(f"{tensor.item()}, a {form}" if tensor.numel() == 1 else f"a {form}", content_hash(tensor))


def _changed(path: str, saved: object, now: object) -> NamedDifference:
    """Return the difference of a leaf, from its values or marks."""
    then, here = (repr(one)[:_SHOWN_CHARACTERS] for one in (saved, now))
    return NamedDifference.of(path, then, f"{here} with another content" if then == here else here)


def not_read_back(lines: Sequence[NamedDifference], *, path: str) -> NotExactError:
    """Return the error for values that a resume from `path` has not restored as they were saved, with advice."""
    names = [one.name for one in lines]
    if len(names) > _FEW:
        names = list(dict.fromkeys(name.partition(".")[0] for name in names))
    more = [f"  and {len(lines) - _MANY} more"] if len(lines) > _MANY else []
    return NotExactError(
        "\n".join(
            (
                f"{path} can't be resumed exactly. Read again after the restore, {len(lines)} of its values differ:",
                *(f"  - {line}" for line in lines[:_MANY]),
                *more,
                "Code of this process has changed them, or the checkpoint was changed. To continue all the same, type:",
                accepting(names),
            )
        )
    )


def _live(values: ReadBack) -> object:
    return values()[1]


@final
class Proving:
    """Compares the live objects of a run with the checkpoint that they were restored from, and then its batches.

    Args:
        trainer: The trainer that runs it.
        comparison: Takes batches that differ.
    """

    def __init__(self, trainer: Trainer, comparison: Comparison) -> None:
        self._trainer = trainer
        self.comparison = comparison
        self.changed_arithmetic: Sequence[str] = ()
        self._noted: dict[str, Leaves] = {}
        self._has_workers = False
        self._num_read_back = self._repeats_until = 0
        self._num_to_repeat: int | None = None
        self._repetition: Repetition | None = None

    @property
    def proof(self) -> Proof:
        """What is proved so far."""
        repetition = self._repetition
        return Proof(
            num_read_back=self._num_read_back,
            has_workers=self._has_workers,
            num_to_repeat=self._num_to_repeat,
            num_repeated=0 if repetition is None else repetition.num_repeated,
        )

    def repeat(self, repetition: Repetition) -> None:
        """Compare the batches that an earlier process has run, too."""
        self._repetition = repetition

    def begin_to_repeat(
        self, ranks: Ranks, position: TrainerPosition | None, *, is_exact: bool, changed: Sequence[str]
    ) -> None:
        """Begin with the next batch; a collective.

        Args:
            ranks: All ranks. They save together, so they wait together.
            position: Where the state was taken.
            is_exact: Whether the state is the one of that process.
            changed: The versions, devices, and threads that are others than those of that process.
        """
        self.changed_arithmetic = changed
        if self._repetition is not None and position is not None:
            self._num_to_repeat = self._repetition.begin(position, is_exact=is_exact)
        most = min(max(ranks.to_all("batches to repeat", self._num_to_repeat or 0)), _MAX_HELD)
        self._repeats_until = self._trainer.fit_loop.epoch_loop.batch_progress.total.ready + most

    def holds_saves(self) -> bool:
        """Return whether autosaves wait: most differences show in the first batches, and no state of another run stays.

        They don't wait for more: a process may live shorter than it takes to repeat all batches.
        """
        return self._trainer.fit_loop.epoch_loop.batch_progress.total.ready < self._repeats_until

    def note(self, checkpoint: Mapping[str, Any], *, rewritten: Collection[str]) -> None:
        """Note what Lightning loads next.

        Args:
            checkpoint: The checkpoint.
            rewritten: The parts of it that hooks save in another form.
        """
        own = {one.state_key for one in self._callbacks()}
        found = {**checkpoint, "state_dict": weights_in(checkpoint)}
        found["callbacks"] = {key: one for key, one in checkpoint.get("callbacks", {}).items() if key in own}
        if has_shards(self._trainer.strategy):  # it has loaded them before, into other tensors
            rewritten = [*rewritten, "state_dict", "optimizer_states"]
        self._noted = {
            part.name: dict(leaves_of(part.find(found), part.name))
            for part in lightnings(self._trainer)
            if part.keys[0] not in rewritten or part.is_captured
        }

    def forget(self, *parts: str) -> None:
        """Do not compare these parts of what was noted; without a name, none."""
        self._noted = {name: one for name, one in self._noted.items() if parts and name not in parts}

    def differences(
        self, run_state: RunState, saved: Mapping[str, Any], position: TrainerPosition, *, without: Collection[str] = ()
    ) -> list[NamedDifference]:
        """Return the leaves that are not as they were saved.

        Args:
            run_state: Reads what Lightning does not restore.
            saved: The state that it has restored.
            position: Where it was taken.
            without: The paths of those that are known.
        """
        noted, self._noted = self._noted, {}
        if not self._trainer.is_global_zero:  # the checkpoint has the buffers of rank 0
            noted["weights"] = self._only_parameters(noted.get("weights", {}))
        found = [
            one
            for part in lightnings(self._trainer, run_state.schedulers)
            if part.name in noted
            for one in self._compared(noted[part.name], part.read, part.name)
        ]
        found = [one for one in found if _VALIDATION_LOOP not in one.name and not self._is_added(one)]
        places = saved.get("loaders", {}).get("places", {}).values()
        self._has_workers = any(place.get("workers") for place in places)
        for part, values in run_state.read_back(position, saved):
            then, now = values()
            leaves = dict(leaves_of(then, part.name, without=part.derived))
            found += self._compared(leaves, partial(_live, values), part.name, now)
        return [one for one in found if not any(is_at(one.name, path) for path in without)]

    def _only_parameters(self, weights: Leaves) -> Leaves:
        held = {one.data_ptr() for one in self._trainer.lightning_module.parameters()}
        live = self._trainer.strategy.lightning_module_state_dict() if weights else {}
        shared = {f"weights.{name}" for name, one in live.items() if isinstance(one, Tensor) and one.data_ptr() in held}
        return {path: one for path, one in weights.items() if path in shared}

    def _is_added(self, one: NamedDifference) -> bool:
        """Return whether other code has added a key to the state of a callback in the checkpoint."""
        if not is_at(one.name, "callbacks"):
            return False
        states = {f"callbacks.{callback.state_key}": callback.state_dict() for callback in self._callbacks()}
        own = [f"{path}.{key}" for path, state in states.items() if isinstance(state, dict) for key in state]
        return not any(is_at(one.name, path) for path in own)

    def _callbacks(self) -> list[Callback]:
        # The states of ModelCheckpoints continue together with their files.
        return [one for one in compat.callbacks(self._trainer) if not isinstance(one, ModelCheckpoint)]

    def _compared(
        self, saved: Leaves, read: Callable[[], object], name: str, live: object = None
    ) -> list[NamedDifference]:
        now: Leaves = dict(leaves_of(read() if live is None else live, name))
        pairs = {path: (one, now.get(path, _NOTHING)) for path, one in saved.items()}
        found = {
            path: (one, other) for path, (one, other) in pairs.items() if type(one) is not type(other) or one != other
        }
        self._num_read_back += len(saved) - len(found)
        if not found:
            return []
        again = dict(leaves_of(read(), name))  # what depends on the clock has changed since
        return [_changed(path, *both) for path, both in found.items() if again.get(path, _NOTHING) == both[1]]

"""The schema of our part of a checkpoint: its keys and their types. A part is checked when it is read from a file.

Older versions of the package wrote fewer keys: each key that a class below marks by ``total=False`` may be missing.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypedDict, Union, cast, final, get_args, get_origin, get_type_hints, is_typeddict

from lightning_faulttolerant.errors import DamagedCheckpointError

KEY: Final = "lightning_faulttolerant"
"""The key of our part in a checkpoint."""
VERSION: Final = 2
"""The version of the schema: in version 1, ``ranks`` holds the state of each rank, and ``states`` does not exist.

A part of a later version is not checked here: its reader refuses it.
"""
MARK: Final = "run"
"""The key for the mark of the run; each checkpoint of a run has it."""
PARENT: Final = "parent"
"""The key for the parent of a run that is a branch."""
CREATED: Final = "created"
"""The key for the settings with which optimizers and schedulers were created."""
PICKLED: Final = "pickled"
"""The key for the objects of Lightning's part that are kept as bytes."""
RANKS: Final = "ranks"
"""The key of our part for the states that are not bytes, by rank."""
STATES: Final = "states"
"""The key of our part for the bytes of all ranks."""
DATA: Final = "data"
"""The key for the bytes, one rank after the other."""
INDEX: Final = "index"
"""The key for the length and the CRC32 of each rank's bytes, an integer tensor with a row for each rank."""


def states_in(part: object) -> Mapping[str, Any] | None:
    """Return what our part of a checkpoint holds under `STATES`, or ``None`` if it holds no state as bytes."""
    states = part.get(STATES) if isinstance(part, Mapping) else None
    return states if isinstance(states, Mapping) and {INDEX, DATA} <= states.keys() else None


class _RequiredPosition(TypedDict):
    where: str
    epoch: int
    batch: int
    global_step: int


@final
class SavedPosition(_RequiredPosition, total=False):
    """Where a checkpoint was taken: the arguments of `TrainerPosition`."""

    hook: str
    validation_batch: int | None


class _SavedLoaders(TypedDict):
    loaders: Mapping[str, Mapping[str, object]]


@final
class SavedFingerprint(_SavedLoaders, total=False):
    """What a run is compared by before it is resumed."""

    module: Mapping[str, object]
    hyperparameters: Mapping[str, object]
    optimizers: Mapping[str, object]
    trainer: Mapping[str, object]
    limits: Mapping[str, object]


@final
class Instead(TypedDict, total=False):
    """What replaces parts of Lightning's checkpoint on a resume: they were saved later than our part."""

    loops: Mapping[str, object]
    callbacks: Mapping[str, object]
    schedulers: list[object]
    param_groups: list[list[Mapping[str, object]]]
    precision: Mapping[str, object]
    buffers: Mapping[str, object]
    extra: Mapping[str, object]


class _Changes(TypedDict, total=False):
    param_groups: list[list[list[str]]] | None
    replaced: dict[str, list[str]] | None
    grown: Mapping[str, str]
    created: Mapping[str, object]


class _Origin(TypedDict):
    origin: str | None
    surroundings: Mapping[str, object]
    fingerprint: SavedFingerprint


@final
class Changes(_Changes):
    """How training has changed the optimizers, schedulers, and buffers that a fit began with."""


@final
class SavedStates(TypedDict):
    """The states of ranks as bytes: their lengths and checksums, and the bytes themselves."""

    index: Any
    data: Any


class _Header(_Origin, _Changes, total=False):
    run: str
    buckets: Mapping[str, object]
    parent: Mapping[str, object]
    skipped: Mapping[str, list[list[int]]]


@final
class PartHeader(_Header):
    """What each checkpoint of a run says about the run."""


class _Saved(_Header):
    version: int
    world_size: int
    position: SavedPosition
    ranks: list[Any]


@final
class CheckpointPart(_Saved, total=False):
    """Our part of a checkpoint: an autosave of a fit, one of an evaluation, or a checkpoint that other code saves."""

    # Each fit.
    parts: list[str]
    optimizers_without_state: list[int]
    # Each with several ranks.
    states: SavedStates
    # Autosaves of a fit.
    opaque: Mapping[str, object]
    pickled: Mapping[str, object]
    # Checkpoints that other code saves.
    behind: list[str]
    inexact: list[str]
    instead: Instead
    before_validation: Mapping[str, object]
    # Evaluations.
    starts_over: bool


def part_with(
    header: PartHeader, *, world_size: int, position: SavedPosition, states: Mapping[str, object]
) -> CheckpointPart:
    """Return a new part with what each one has.

    Args:
        header: What each checkpoint of the run says about the run.
        world_size: How many ranks save.
        position: Where it is taken.
        states: The states of the ranks, from `joined`.
    """
    own = {"version": VERSION, "world_size": world_size, "position": position, **header, **states}
    return cast(CheckpointPart, own)


def part_in(checkpoint: Mapping[str, object] | None, path: object) -> CheckpointPart | None:
    """Return our part of a checkpoint that was read from a file, or ``None`` if it has none.

    Args:
        checkpoint: The content of the checkpoint.
        path: The file, for the message of an error.

    Raises:
        DamagedCheckpointError: If a key is missing, or a value has the wrong type.
    """
    part = None if checkpoint is None else checkpoint.get(KEY)
    return None if part is None else checked_part(part, path)


def checked_part(part: object, path: object) -> CheckpointPart:
    """Return our part of a checkpoint once it is checked.

    Args:
        part: The part that was read.
        path: The file, for the message of an error.

    Raises:
        DamagedCheckpointError: As from `part_in`.
    """
    wrong = list(_wrong(part)) if isinstance(part, Mapping) else [f"it is of type {type(part).__name__}, not a dict"]
    if wrong:
        raise DamagedCheckpointError(
            f"{path} is damaged. In its part of {KEY}: {'; '.join(wrong)}. Take another checkpoint."
        )
    return cast(CheckpointPart, part)


def _wrong(part: Mapping[str, object]) -> Iterator[str]:
    version = part.get("version")
    if isinstance(version, int) and version > VERSION:
        return
    yield from _differences(part, CheckpointPart, "")


def _differences(values: Mapping[str, object], schema: Any, place: str) -> Iterator[str]:
    yield from (f"{place}{name} is missing" for name in sorted(schema.__required_keys__ - values.keys()))
    for name, hint in get_type_hints(schema).items():
        value = values.get(name)
        if name not in values:
            continue
        if not isinstance(value, _classes_of(hint)):
            yield f"{place}{name} is of type {type(value).__name__}"
        elif is_typeddict(hint) and isinstance(value, Mapping):
            yield from _differences(value, hint, f"{place}{name}.")


def _classes_of(hint: Any) -> tuple[type, ...]:
    """Return the classes of the values that a type allows."""
    if hint is Any:
        return (object,)
    if is_typeddict(hint):
        return (Mapping,)
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(kind for one in get_args(hint) for kind in _classes_of(one))
    return (get_origin(hint) or hint,)

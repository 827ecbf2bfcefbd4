"""What a checkpoint contains: the schema of our part, and a summary of a whole file that is not loaded.

The schema has the keys of our part and their types. A part is checked when it is read from a file. A key of a class
with ``total=False`` may be missing.

A summary reads only the file's directory and its pickle: no tensor values are read and the pickle is not run. So this
is fast on large files and safe on any file. States that a checkpoint keeps as bytes are summarized in the same way.
"""

from __future__ import annotations

import io
import struct
import types
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, Final, TypedDict, Union, cast, final, get_args, get_origin, get_type_hints, is_typeddict

from lightning_faulttolerant.checkpoint.archive import UNREADABLE, begin_of_content, is_legacy
from lightning_faulttolerant.checkpoint.checked_file import CountedFile
from lightning_faulttolerant.checkpoint.pickled import (
    LongData,
    Made,
    Storage,
    TensorInfo,
    TooLargePickleError,
    UnreadablePickleError,
    describe_pickle,
)
from lightning_faulttolerant.errors import CheckpointError, DamagedCheckpointError

KEY: Final = "lightning_faulttolerant"
"""The key of our part in a checkpoint."""
VERSION: Final = 2
"""The version of the schema. A part of a later version is not checked here: its reader refuses it."""
MARK: Final = "run"
"""The key for the mark of the run; each checkpoint of a run has it."""
PARENT: Final = "parent"
"""The key for the parent of a run that is a branch."""
NOT_EXACT: Final = "not_exact"
"""The key for the reasons why a run is no longer exact, from all of its resumes so far."""
REMARKS: Final = "remarks"
"""The key for what the states of all ranks tell whoever inspects the checkpoint: texts, each with its label."""
REWRITTEN: Final = "rewritten"
"""The key for the names from ``rewritten_in``: what the checkpoint holds in another form than the run."""
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


@final
class SavedPosition(TypedDict):
    """Where a checkpoint was taken: the arguments of `TrainerPosition`."""

    where: str
    epoch: int
    batch: int
    global_step: int
    hook: str
    validation_batch: int


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
    buffers: Mapping[str, Any]
    extra: Mapping[str, object]


class _Origin(TypedDict):
    origin: str | None
    surroundings: Mapping[str, object]
    fingerprint: SavedFingerprint


@final
class SavedStates(TypedDict):
    """The states of ranks as bytes: their lengths and checksums, and the bytes themselves."""

    index: Any
    data: Any


class _Header(_Origin, total=False):
    run: str
    parent: Mapping[str, object]
    not_exact: list[str]
    remarks: Mapping[str, str]


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
    optimizers_without_state: list[int]
    # Each with several ranks.
    states: SavedStates
    # Autosaves of a fit.
    rewritten: list[str]
    opaque: Mapping[str, object]
    pickled: Mapping[str, object]
    # Checkpoints that other code saves.
    pending: list[str]
    inexact: list[str]
    sums: Mapping[str, list[int]]
    instead: Instead
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


_PICKLE_NAME = "data.pkl"
_STORAGES_NAME = "data/"
_NUMBER_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The size of some content.

    Args:
        num_bytes: For tensors, as in the file, each storage once; for texts, their length; for a number, 8.
        num_tensors: The number of tensors.
        num_values: The number of values in all of them together.
    """

    num_bytes: int
    num_tensors: int
    num_values: int


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The content of a checkpoint.

    Args:
        content: The result of `describe_pickle`.
        num_bytes: The length of the file.
        num_bytes_read: The number of bytes that were read for this.
    """

    content: Any
    num_bytes: int
    num_bytes_read: int
    storages: Mapping[str, int]
    """Length of each record of tensor values in the file, by its key."""
    headers: Mapping[str, int]
    """Where the header of each of these records begins."""

    def size_of(self, *values: object) -> Size:
        """Return the size of parts of the content; shared storages count once."""
        found = [value for value in walk(values) if not isinstance(value, (dict, list, tuple, Made))]
        tensors = [value for value in found if isinstance(value, TensorInfo)]
        storages = {info.storage.key: info.storage for info in tensors}
        storages |= {value.key: value for value in found if isinstance(value, Storage)}
        stored = sum(self.storages.get(key, storage.num_bytes) for key, storage in storages.items())
        return Size(
            num_bytes=stored + sum(_num_bytes(value) for value in found),
            num_tensors=len(tensors),
            num_values=sum(info.num_values for info in tensors),
        )


def read_summary(file: IO[bytes], *, name: str) -> Summary:
    """Read the summary of a ``torch.save`` file.

    Args:
        file: Open for reading, seekable; from a URL only the ranges that are read are transferred.
        name: The file's name for errors.

    Returns:
        The summary.

    Raises:
        DamagedCheckpointError: If it is not a ``torch.save`` file, or its directory or pickle is damaged.
        CheckpointError: If it can't be summarized without loading it: it is in torch's format from before 1.6, or its
            pickle has more than 10 million operations.
        OSError: If it can't be read.

    Example:
        >>> import io, torch
        >>> buffer = io.BytesIO()
        >>> torch.save({"step": 3, "weights": torch.zeros(1000)}, buffer)
        >>> summary = read_summary(buffer, name="a checkpoint")
        >>> summary.content["step"], summary.content["weights"].shape, summary.size_of(summary.content).num_bytes
        (3, (1000,), 4019)
    """
    counted = CountedFile(file)
    if is_legacy(cast("IO[bytes]", counted)):
        raise CheckpointError(
            f"{name} is in torch's format from before 1.6, which can't be inspected without loading it."
        )
    try:
        with zipfile.ZipFile(cast("IO[bytes]", counted)) as archive:
            records = archive.infolist()
        prefix = _prefix(records)
        content = _read_pickle(counted, next(record for record in records if record.filename == prefix + _PICKLE_NAME))
    except TooLargePickleError as error:
        raise CheckpointError(f"{name} can't be inspected without loading it: in its pickle, {error}.") from error
    except UNREADABLE as error:
        reason = f"its pickle can't be read: {error}" if isinstance(error, UnreadablePickleError) else str(error)
        raise DamagedCheckpointError(
            f"{name} is not a checkpoint, or it is damaged: {reason}. A file written by torch.save is expected."
        ) from error
    begin = prefix + _STORAGES_NAME
    found = {record.filename.removeprefix(begin): record for record in records if record.filename.startswith(begin)}
    return Summary(
        content=content,
        num_bytes=file.seek(0, 2),
        num_bytes_read=counted.num_bytes,
        storages={key: record.file_size for key, record in found.items()},
        headers={key: record.header_offset for key, record in found.items()},
    )


def begin_of(file: IO[bytes], summary: Summary, key: str) -> int:
    """Return where the values of a storage begin in the file.

    Args:
        file: The file of the summary.
        summary: The summary.
        key: The key of the storage.

    Raises:
        ValueError: If there is no such record, or its header is damaged.
    """
    if key not in summary.headers:
        raise ValueError(f"it has no record {key}")
    return begin_of_content(file, summary.headers[key], key)


def _prefix(records: Iterable[zipfile.ZipInfo]) -> str:
    names = [record.filename for record in records]
    found = [name for name in names if name.count("/") == 1 and name.endswith(f"/{_PICKLE_NAME}")]
    if len(found) != 1:
        raise ValueError(f"it is a zip file with no record {_PICKLE_NAME}")
    return found[0].removesuffix(_PICKLE_NAME)


def _read_pickle(file: Any, record: zipfile.ZipInfo) -> object:
    if record.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"record {record.filename} is compressed, which torch.save never does")
    begin = begin_of_content(file, record.header_offset, record.filename)
    return describe_pickle(file, begin=begin, num_bytes=record.file_size)


def walk(values: Iterable[object]) -> Iterable[object]:
    """Yield the content of nested values, each container once, at any depth, even if they contain themselves.

    Args:
        values: From a described checkpoint.
    """
    left, seen = list(values), set()
    while left:
        value = left.pop()
        if isinstance(value, (dict, list, tuple, Made)):
            if id(value) in seen:
                continue
            seen.add(id(value))
            left.extend(_children(value))
        yield value


def _children(value: Any) -> Iterable[object]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return (value.arguments, value.state) if isinstance(value, Made) else value


def _num_bytes(value: object) -> int:
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, LongData):
        return value.num_bytes
    return _NUMBER_BYTES if isinstance(value, (int, float)) and not isinstance(value, bool) else 0


_ROW = struct.Struct("<2q")


def read_state_summaries(file: IO[bytes], summary: Summary, *, name: str) -> dict[int, Summary]:
    """Read the summary of each state that is kept as bytes.

    Args:
        file: The file of the checkpoint.
        summary: Its summary.
        name: Its name for errors.

    Returns:
        The summaries by the number of the rank; empty if no state is kept as bytes.

    Raises:
        DamagedCheckpointError: If one of them is damaged.
        CheckpointError: As `read_summary`.
        OSError: If the file can't be read.
    """
    content = summary.content
    states = states_in(content.get(KEY) if isinstance(content, Mapping) else None)
    if states is None or not all(isinstance(states[key], TensorInfo) for key in (INDEX, DATA)):
        return {}
    index, data = states[INDEX].storage.key, states[DATA].storage.key
    found = {}
    try:
        file.seek(begin_of(file, summary, index))
        rows = list(_ROW.iter_unpack(file.read(summary.storages[index])))
        file.seek(begin_of(file, summary, data))
        for rank, (num_bytes, _) in enumerate(rows):
            if not 0 <= num_bytes <= summary.num_bytes:
                raise ValueError(f"the state of rank {rank} has {num_bytes} bytes")
            if num_bytes:
                own = io.BytesIO(file.read(num_bytes))
                found[rank] = read_summary(own, name=f"the state of rank {rank} in {name}")
    except (ValueError, struct.error) as error:
        raise DamagedCheckpointError(f"{name} is damaged: {error}. Take another checkpoint.") from error
    return found

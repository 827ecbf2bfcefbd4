"""The ranks of a run: messages between them besides the gradients, and their states in one checkpoint.

Messages go over a separate gloo group, with a time limit. No device is used. A dead rank is an error on the others: the
connection to it breaks, or the time runs out.

In a checkpoint, the state of rank 0 is as it is, and those of the others are separate bytes. Each rank makes its bytes,
with their checksum. Rank 0 passes them on as they are, and a rank that resumes reads only its own, and compares each
loaded byte with a checksum. One rank verifies the whole file before the others read it. All bytes are one tensor, so
the cost of writing and loading them does not grow with the number of ranks. A state that ``weights_only=True`` would
refuse stays as it is: whoever reads the file decides whether to load it.
"""

from __future__ import annotations

import contextlib
import io
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import IO, Any, Protocol, TypeVar, final

import torch
import torch.distributed as dist

from lightning_faulttolerant.checkpoint.joined_file import opened_whole
from lightning_faulttolerant.checkpoint.manifest import MANIFEST_NAME
from lightning_faulttolerant.checkpoint.pickled import TensorInfo
from lightning_faulttolerant.checkpoint.saving import Staging, save_to_file
from lightning_faulttolerant.checkpoint.schema import DATA, INDEX, KEY, RANKS, STATES, read_summary, states_in
from lightning_faulttolerant.checkpoint.verify import (
    damage_named,
    load_file,
    load_open_file,
    load_path,
    unsafe_paths,
    verify_open_file,
)
from lightning_faulttolerant.errors import CheckpointError, DamagedCheckpointError, RanksLostError
from lightning_faulttolerant.state.packing import tensor_to_blob
from lightning_faulttolerant.storage.store import is_url, local_copy, local_path

_Held = TypeVar("_Held")
_Result = TypeVar("_Result")


class Ranks(Protocol):
    """The ranks that do something together, in the same order on each.

    `to_all`, `to_first`, and `from_first` are collectives: all ranks must call them, in the same order. Never call them
    where another rank may not: not in a signal handler, not after an exception. Each raises `RanksLostError` if a rank
    is gone, does not answer in time, or is at another step.
    """

    @property
    def rank(self) -> int:
        """This process's number among them, from 0."""

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""

    def label(self, rank: int) -> str:
        """Return a rank's name for messages."""

    def to_all(self, step: str, value: object) -> list[Any]:
        """Send a value to all ranks, and return all values in order."""

    def to_first(self, step: str, value: object) -> list[Any] | None:
        """Send a value to the first rank; return all values in order on that rank, and ``None`` on the others."""

    def from_first(self, step: str, value: object) -> Any:
        """Return the first rank's value on every rank."""

    def close(self) -> None:
        """Close the connections; each rank by itself."""


@final
@dataclass(frozen=True)
class Alone:
    """A rank that does not communicate."""

    rank: int = 0
    num_ranks: int = 1

    def label(self, rank: int) -> str:
        """Return the process's name for messages."""
        return "this process"

    def to_all(self, step: str, value: object) -> list[object]:
        """Return this rank's value."""
        return [value]

    def to_first(self, step: str, value: object) -> list[object]:
        """Return this rank's value."""
        return [value]

    def from_first(self, step: str, value: object) -> object:
        """Return this rank's value."""
        return value

    def close(self) -> None:
        """Do nothing."""


@final
class RankGroup:
    """Ranks that exchange Python objects; created by all of them at the same time.

    Args:
        ranks: Their numbers in the default group, in one order.
        timeout: How long one exchange may wait for the slowest rank.
        message: What an error says, with ``{}`` for the reason.

    Raises:
        RanksLostError: From each exchange too: if a rank is gone, does not answer in time, or is at another step.
    """

    def __init__(self, ranks: Sequence[int], timeout: timedelta, *, message: str = "{}") -> None:
        self._ranks = list(ranks)
        self._timeout = timeout
        self._message = message
        self.num_ranks = len(self._ranks)
        self.rank = self._ranks.index(dist.get_rank())
        try:
            # A separate group: the default one may be NCCL, which can't send objects on the CPU and has its own time
            # limit. Ranks outside of the group don't take part.
            # A group of some ranks is named by its ranks. A group of all ranks is named by a number that no other group
            # ever has: with the name of a group that is gone, it would find the addresses of the old group.
            some = len(self._ranks) < dist.get_world_size()
            self._group = dist.new_group(self._ranks, timeout=timeout, backend="gloo", use_local_synchronization=some)
        except RuntimeError as error:
            raise self._silence("the first exchange", error) from error

    def label(self, rank: int) -> str:
        """Return a rank's name, by its number in the default group."""
        return f"rank {self._ranks[rank]}"

    def close(self) -> None:
        """Close the connections; each rank does so alone."""
        if dist.is_initialized():
            dist.destroy_process_group(self._group)

    def to_all(self, step: str, value: object) -> list[object]:
        """Send a value to all ranks, and return all values in order."""
        answers: list[object] = [None] * len(self._ranks)
        try:
            dist.all_gather_object(answers, (step, value), group=self._group)
        except RuntimeError as error:
            raise self._silence(step, error) from error
        return self._checked(answers)

    def to_first(self, step: str, value: object) -> list[object] | None:
        """Send a value to the first rank; return all values in order on that rank, and ``None`` on the others."""
        answers: list[object] | None = [None] * len(self._ranks) if self.rank == 0 else None
        try:
            dist.gather_object((step, value), answers, dst=self._ranks[0], group=self._group)
        except RuntimeError as error:
            raise self._silence(step, error) from error
        return None if answers is None else self._checked(answers)

    def from_first(self, step: str, value: object) -> object:
        """Return the first rank's value on every rank."""
        received = [(step, value if self.rank == 0 else None)]
        try:
            dist.broadcast_object_list(received, src=self._ranks[0], group=self._group)
        except RuntimeError as error:
            raise self._silence(step, error) from error
        if received[0][0] != step:
            raise self._lost(
                f"the ranks are out of step: rank {self._ranks[0]} is at {received[0][0]!r}, this one at {step!r}"
            )
        return received[0][1]

    def _checked(self, answers: list[Any]) -> list[object]:
        if len({step for step, _ in answers}) > 1:
            places = [f"rank {rank} is at {step!r}" for rank, (step, _) in zip(self._ranks, answers, strict=True)]
            raise self._lost(f"the ranks are out of step: {', '.join(places)}")
        return [value for _, value in answers]

    def _silence(self, step: str, error: RuntimeError) -> RanksLostError:
        reason = str(error).splitlines()[0].removesuffix(".")
        return self._lost(
            f"rank {self._ranks[self.rank]} had no answer at {step!r}: {reason}. Another rank has died, has failed "
            f"earlier, or took longer than {self._timeout}"
        )

    def _lost(self, reason: str) -> RanksLostError:
        return RanksLostError(self._message.format(reason))


def together(ranks: Ranks, step: str, work: Callable[[], _Result]) -> list[_Result]:
    """Do something on each rank and exchange the results; if it fails on one, every rank raises.

    Args:
        ranks: The participating ranks.
        step: The name of the step; all ranks must be at the same one.
        work: The work of this rank; the result must be picklable.

    Returns:
        The results of all, in order.

    Raises:
        CheckpointError: If it failed on another rank. An error of this rank's own work is raised unchanged.
    """
    own_error: Exception | None = None
    result, failure = None, ""
    try:
        result = work()
    except Exception as error:  # noqa: BLE001 - raised again below, once the other ranks know
        own_error, failure = error, f"{type(error).__name__}: {error}"
    try:
        answers = ranks.to_all(step, (failure, result))
    finally:
        if own_error is not None:
            try:
                raise own_error
            finally:
                own_error = None  # its traceback refers to this frame: a cycle would keep the saver alive
    failures = [f"{ranks.label(rank)}: {text}" for rank, (text, _) in enumerate(answers) if text]
    if failures:
        raise CheckpointError(
            f"Another rank failed, so no rank continues with this checkpoint. {'; '.join(failures)}. Earlier "
            "checkpoints still exist."
        )
    return [result for _, result in answers]


def by_first(ranks: Ranks, step: str, held: _Held | None, work: Callable[[_Held], _Result]) -> _Result:
    """Let rank 0 do its part of a save, and return the result on every rank; a collective.

    Args:
        ranks: The participating ranks.
        step: The name of the step; all ranks must be at the same one.
        held: What only rank 0 has, such as the series of autosaves; ``None`` on the others.
        work: The work of rank 0, which receives it.

    Raises:
        CheckpointError: On the other ranks, if it failed. On rank 0 the exception itself is raised.
    """
    if ranks.rank > 0 or held is None:
        answer: tuple[str, _Result] = ranks.from_first(step, None)
        failure, result = answer
        if failure:
            raise CheckpointError(f"Rank 0 could not save, so no rank has saved. Earlier autosaves are kept. {failure}")
        return result
    try:
        result = work(held)
    except Exception as error:
        ranks.from_first(step, (f"{type(error).__name__}: {error}", None))
        raise
    ranks.from_first(step, ("", result))
    return result


_ONLY = "only"


@dataclass(frozen=True, slots=True)
class StateBytes:
    """The state of a rank as bytes.

    Args:
        data: A file of ``torch.save``.
        crc32: Its checksum, from the rank that made it.
    """

    data: bytes
    crc32: int


def as_bytes(state: dict[str, object]) -> StateBytes | dict[str, object]:
    """Return a rank's state as bytes, or unchanged if ``weights_only=True`` would not load it.

    Args:
        state: A result of `pack_blobs`, with its tensors on the CPU.
    """
    if unsafe_paths(state):
        return state
    buffer = io.BytesIO()
    save_to_file(state, buffer)
    data = buffer.getvalue()
    return StateBytes(data, zlib.crc32(data))


def joined(states: Sequence[StateBytes | dict[str, object]]) -> dict[str, object]:
    """Return the states of all ranks in the form that our part of a checkpoint keeps.

    Args:
        states: One for each rank.

    Returns:
        Under ``ranks`` each state that is not bytes, with ``None`` for the others; the others under `STATES`.
    """
    kept = [None if isinstance(state, StateBytes) else state for state in states]
    found = [state if isinstance(state, StateBytes) else StateBytes(b"", 0) for state in states]
    data = bytearray(b"").join(state.data for state in found)
    if not data:
        return {RANKS: kept}
    index = torch.tensor([[len(state.data), state.crc32] for state in found], dtype=torch.int64, device="cpu")
    return {RANKS: kept, STATES: {INDEX: index, DATA: torch.frombuffer(data, dtype=torch.uint8)}}


def packed_state(part: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return the state of a rank, a result of `pack_blobs`.

    Args:
        part: Our part of a checkpoint.
        rank: The number of the rank, less than the number of ranks that saved.

    Raises:
        DamagedCheckpointError: If its bytes are not those that the rank had made.
    """
    kept: dict[str, object] | None = part[RANKS][rank]
    if kept is not None:
        return kept
    data = _bytes_of(part, rank)
    state: dict[str, object] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return state


def check(part: Mapping[str, Any], rank: int) -> None:
    """Check that the bytes of a rank are those that it had made. Do nothing if its state is kept as it is.

    Raises:
        DamagedCheckpointError: If they are not.
    """
    if part[RANKS][rank] is None:
        _bytes_of(part, rank)


def with_state_of(part: Mapping[str, Any], rank: int) -> dict[str, object]:
    """Return our part of a checkpoint with the bytes of one rank only, copied.

    Args:
        part: Our part of a checkpoint. The bytes of other ranks are not read.
        rank: The number of the rank.
    """
    states = part[STATES]
    begin, num_bytes = _place_of(states[INDEX], rank)
    return {**part, STATES: {**states, DATA: states[DATA][begin : begin + num_bytes].clone(), _ONLY: rank}}


def _place_of(index: torch.Tensor, rank: int) -> tuple[int, int]:
    return int(index[:rank, 0].sum()), int(index[rank, 0])


def _bytes_of(part: Mapping[str, Any], rank: int) -> bytes:
    states = part[STATES]
    index, data, only = states[INDEX], states[DATA], states.get(_ONLY)
    if only is not None and only != rank:
        raise ValueError(f"The state of rank {rank} was not read: only that of rank {only} was.")
    begin, num_bytes = _place_of(index, rank)
    begin = begin if only is None else 0
    own = tensor_to_blob(data[begin : begin + num_bytes])
    crc32, expected = zlib.crc32(own), int(index[rank, 1])
    if len(own) != num_bytes or crc32 != expected:
        raise DamagedCheckpointError(
            f"The state of rank {rank} is damaged: it has {len(own)} bytes with CRC32 {crc32:08x}, but was made with "
            f"{num_bytes} bytes and {expected:08x}. Take another checkpoint."
        )
    return own


def identity_of(path: str | os.PathLike[str]) -> str:
    """Return a short text that differs between two checkpoints with different content, however alike their names.

    Only the checksums in it are read, so call it for a checkpoint that each rank verifies.

    Args:
        path: A file written by ``torch.save``, or a directory with a manifest. A URL has no need of it: all ranks see
            the same object.

    Raises:
        OSError: If it can't be read.
    """
    if is_url(path):
        return ""
    path = local_path(path)
    if os.path.isdir(path):
        with open(os.path.join(path, MANIFEST_NAME), "rb") as manifest:
            return f"{zlib.crc32(manifest.read()):08x}"
    if not zipfile.is_zipfile(path):  # torch's format from before 1.6
        return str(os.path.getsize(path))
    with zipfile.ZipFile(path) as archive:
        records = [(record.filename, record.file_size, record.CRC) for record in archive.infolist()]
    return f"{zlib.crc32(repr(records).encode()):08x}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReader:
    """Which states of a checkpoint a rank needs: its own, or all if a different number of ranks has saved.

    Args:
        rank: The number of this rank.
        num_ranks: The number of ranks now.
    """

    rank: int
    num_ranks: int

    def load(self, path: str | os.PathLike[str], *, verifies_all: bool) -> dict[str, object]:
        """Verify an autosave and load it, without the states of other ranks if they are not needed.

        Args:
            path: A file written by ``torch.save``, or a directory with a manifest, local or in a store.
            verifies_all: Verify the states of other ranks too, each also by the checksum of the rank that made it, and
                the shards of a directory; not needed if another rank has done so.

        Returns:
            The content; for a directory, without the shards. None of it is mapped to the file.

        Raises:
            DamagedCheckpointError: As `load_path`, for what is verified.
            UnsafeCheckpointError: As `load_path`.
            CheckpointError: As `load_path`.
        """
        return load_path(path, partial(self._load_file, verifies_all=verifies_all), verifies_shards=verifies_all)

    def _load_file(self, path: str | os.PathLike[str], *, verifies_all: bool) -> dict[str, object]:
        if verifies_all and self.num_ranks == 1:
            return load_file(path)
        with contextlib.ExitStack() as stack:
            with damage_named(path):
                file = stack.enter_context(opened_whole(path, local_copy))
                left_out = None if verifies_all else self._not_needed(file, path)
                verification = verify_open_file(path, file, without=left_out)
            if self.num_ranks > 1 and (verifies_all or left_out is not None):
                mapped = load_open_file(file, verification, mapped=True)
                if self._is_as_saved(mapped.get(KEY)):
                    for rank in range(self.num_ranks) if verifies_all else ():  # no rank may refuse what this one takes
                        check(mapped[KEY], rank)
                    copied: dict[str, object] = Staging().copy({**mapped, KEY: self._cut(mapped[KEY])})
                    return copied
            return load_open_file(file, verification)

    def _not_needed(self, file: IO[bytes], path: str | os.PathLike[str]) -> str | None:
        """Return the key of the record with the states of all ranks, if this rank needs only its own."""
        try:
            content = read_summary(file, name=os.fspath(path)).content
        except CheckpointError:  # the verification says what is wrong with it
            return None
        part = content.get(KEY) if isinstance(content, Mapping) else None
        states = states_in(part)
        if states is None or not self._is_as_saved(part):
            return None
        data = states[DATA]
        return data.storage.key if isinstance(data, TensorInfo) else None

    def _is_as_saved(self, part: Any) -> bool:
        return states_in(part) is not None and bool(part.get("world_size") == self.num_ranks)

    def _cut(self, part: Mapping[str, object]) -> dict[str, object]:
        own = with_state_of(part, self.rank)
        check(own, self.rank)
        return own

"""The position of one iteration over an index sampler, as plain values, and the plan for the next one.

Index batches are kept with their values and types. A batch with an object in it, such as a named tuple or lhotse's
`CutSet`, is not kept: the sampler draws it again.
"""

from __future__ import annotations

import contextlib
import marshal
import struct
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from lightning_faulttolerant.loader.digests import START, Digest, updated
from lightning_faulttolerant.loader.remaining import GlobalOrder, RankShare, RemainingBatches
from lightning_faulttolerant.loader.samplers import DrawLog
from lightning_faulttolerant.state.generators import HeldGenerators
from lightning_faulttolerant.state.rng import look
from lightning_faulttolerant.state.twister import distance

_WITHOUT_REFERENCES = 2  # a version of marshal
_PLAIN = (int, float, str, bytes, bool, type(None))


@dataclass(frozen=True, slots=True)
class NotKept:
    """Stands for an index batch that a checkpoint can't hold.

    Args:
        num_samples: The number of its items, if it is a list or a tuple.
    """

    num_samples: int

    def __len__(self) -> int:
        return self.num_samples


def pack_indices(batches: list[object]) -> list[object]:
    """Return the index batches as nested lists of plain values and bytes, each with its kind."""
    return [_pack_or_leave(batch) for batch in batches]


def unpack_indices(packed: list[Any]) -> list[Any]:
    """Return the batches that were passed to `pack_indices`, with a `NotKept` for each that could not be kept."""
    return [_unpack(item) for item in packed]


def _pack_or_leave(batch: object) -> object:
    try:
        return _pack(batch)
    except _HoldsObjectError:
        return ["not kept", len(batch) if isinstance(batch, (list, tuple)) else 1]


class _HoldsObjectError(Exception):
    """A batch contains a value that is neither plain nor composed of plain values."""


def _pack(value: Any) -> object:
    if type(value) is list and value and all(type(item) is int for item in value):
        with contextlib.suppress(struct.error):  # too large for 8 bytes
            return ["ints", struct.pack(f"<{len(value)}q", *value)]
    if type(value) in _PLAIN:
        return ["plain", value]
    if type(value) in (list, tuple):
        return [type(value).__name__, *(_pack(item) for item in value)]
    if isinstance(value, Tensor):
        return ["tensor", str(value.dtype).removeprefix("torch."), value.tolist()]
    if _is_numpy(value):
        return ["numpy", str(value.dtype), value.tolist()]
    if type(value) is dict:
        return ["dict", *(_pack(item) for pair in value.items() for item in pair)]
    raise _HoldsObjectError


def _unpack(item: list[Any]) -> object:
    kind, *values = item
    if kind == "ints":
        return list(struct.unpack(f"<{len(values[0]) // 8}q", values[0]))
    if kind == "plain":
        return values[0]
    if kind == "not kept":
        return NotKept(values[0])
    if kind == "tensor":
        return torch.tensor(values[1], dtype=getattr(torch, values[0]))
    if kind == "numpy":
        import numpy as np  # noqa: PLC0415, RUF100 - optional: only indices that were NumPy's need it

        array = np.asarray(values[1], dtype=values[0])
        return array if array.ndim else array[()]
    children = [_unpack(value) for value in values]
    if kind == "dict":
        return dict(zip(children[::2], children[1::2], strict=True))
    return tuple(children) if kind == "tuple" else children


def _is_numpy(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


_WORDS_OF_SEED = 2  # torch draws the seeds of samplers and workers as 64 bits
_HELD = "held/"


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomStates:
    """The random states that a sampler may draw from, at one instant."""

    rng: Mapping[str, bytes]
    held: Mapping[str, bytes]
    sampler_epochs: list[Any]
    """The epoch of each sampler that has ``set_epoch``. For this package's samplers, their whole position."""
    objects: Mapping[str, object] = field(default_factory=dict)
    """The changes on the objects of the sampler, or of the workers that were created."""

    def states(self) -> dict[str, bytes]:
        """Return all states by name."""
        return {**self.rng, **{f"{_HELD}{name}": state for name, state in self.held.items()}}

    def drawn_until(self, later: RandomStates, *, num_seeds: int) -> tuple[list[str], list[str]]:
        """Return the generators that have drawn: global ones, torch's if more than these seeds; and held ones."""
        words = {name: distance(state, later.rng[name], most_blocks=16) for name, state in self.rng.items()}
        least = {"torch": num_seeds * _WORDS_OF_SEED}
        drawn = [name for name, found in words.items() if found is None or found[0] > least.get(name, 0)]
        return drawn, [path for path, state in self.held.items() if later.held.get(path) != state]

    @classmethod
    def from_states(cls, states: Mapping[str, bytes]) -> RandomStates:
        """Return a moment with only `states` known."""
        held = {name.removeprefix(_HELD): state for name, state in states.items() if name.startswith(_HELD)}
        rng = {name: state for name, state in states.items() if not name.startswith(_HELD)}
        return cls(rng=rng, held=held, sampler_epochs=[])

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any] | None) -> RandomStates | None:
        """Return the moment that `state` describes, or ``None`` for ``None``: it had not come yet."""
        return None if state is None else cls(**state)

    def state_dict(self) -> dict[str, object]:
        """Return the moment as plain dicts."""
        more = {"objects": dict(self.objects)} if self.objects else {}
        return {"rng": dict(self.rng), "held": dict(self.held), "sampler_epochs": list(self.sampler_epochs), **more}


def states_now(held: HeldGenerators) -> Mapping[str, bytes]:
    """Return the current states of the global generators and of `held` by name, as `RandomStates.states` does."""
    states = look()
    return (
        {**states, **{f"{_HELD}{name}": state for name, state in held.state_dict().items()}} if held.paths else states
    )


@dataclass(kw_only=True, slots=True)
class IndexRecord:
    """The position of one iteration over the index sampler.

    ``birth`` is when its workers were created, ``start`` when the sampler was started, and ``first`` right before its
    first index was drawn: between the two, torch draws the workers' seed. ``recent`` holds the last batches handed out.
    ``digests`` holds the digest of all batches before those, and of all up to each; it is empty if the states at the
    start determine the order. ``not_compared`` names what the digests can't compare. If each sample is seeded,
    ``epoch`` counts the earlier iterations, ``num_samples`` the samples handed out. ``order`` and ``share`` say what
    all ranks consume, if known; ``deal`` is set if other ranks began. ``has_other_workers`` says whether the run had
    a different number of workers before a resume.
    """

    first_batch: int = 0
    handed_out: int = 0
    birth: RandomStates | None = None
    start: RandomStates | None = None
    first: RandomStates | None = None
    log: DrawLog = field(default_factory=DrawLog)
    recent: deque[object] = field(default_factory=deque)
    digests: deque[Digest] = field(default_factory=lambda: deque([START]))
    not_compared: set[str] = field(default_factory=set)
    epoch: int = 0
    num_samples: int = 0
    order: GlobalOrder | None = None
    share: RankShare | None = None
    deal: RemainingBatches | None = None
    has_other_workers: bool = False

    def batch(self, number: int) -> object | None:
        """Return the index batch of this number, if it is still known."""
        at = number - self.handed_out
        return self.recent[at] if -len(self.recent) <= at < 0 else None

    def checksum(self, number: int) -> int:
        """Return a checksum of the index batch of this number; 0 if it has no indices, or is not known."""
        at, recent = number - self.handed_out, self.recent  # not by `batch`: this runs after each step
        batch: Any = recent[at] if -len(recent) <= at < 0 else None
        first = batch[0] if type(batch) is list and batch else batch
        if first is None:  # torch asks an iterable data set for samples by it
            return 0
        if type(first) is int:
            try:
                return crc32(marshal.dumps(batch, _WITHOUT_REFERENCES))
            except ValueError:  # it has objects, too
                pass
        others: set[str] = set()
        values = updated(START, batch, others)[0]
        return 0 if others else values

    def go_to(self, plan: IndexPlan) -> None:
        """Count on from the position of a plan."""
        self.handed_out, self.num_samples = plan.position, plan.num_samples
        self.digests = deque(plan.digest_at_position, maxlen=self.digests.maxlen)
        self.not_compared = set(plan.not_compared)


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexPlan:
    """How to resume the next iteration: from batch `position`, or, without `start`, only with its workers.

    With a ``deal``, the batches come from the deal and not from the sampler.
    """

    birth: RandomStates | None
    start: RandomStates | None = None
    first: RandomStates | None = None
    position: int = 0
    handed_out: int = 0
    log: bytes = b""
    recent: tuple[object, ...] = ()
    digests: tuple[Digest, ...] = ()
    not_compared: frozenset[str] = frozenset()
    num_samples: int = 0
    order: GlobalOrder | None = None
    deal: RemainingBatches | None = None

    @property
    def digest(self) -> Digest | None:
        """The digest of all that was handed out; ``None`` if the states at the start determine the order."""
        return self.digests[-1] if self.digests else None

    @property
    def digest_at_position(self) -> tuple[Digest, ...]:
        """The digest of all batches before `position`, if known."""
        return self.digests[len(self.digests) - 1 - (self.handed_out - self.position) :][:1]

    @property
    def objects(self) -> list[Mapping[str, object]]:
        """The changes on the loader's objects at each of its moments."""
        return [moment.objects for moment in (self.birth, self.start, self.first) if moment is not None]


def plan_from_state(
    state: Mapping[str, Any], position: int, *, draws_again: bool = False, is_batched: bool | None = None
) -> IndexPlan:
    """Return the plan to resume at batch `position` from a state of `record_state`.

    Args:
        state: The record.
        position: The batch to continue with.
        draws_again: Whether the sampler draws the batches after it again. It does so without workers: each is then
            drawn right before its samples, from the same random states.
        is_batched: If samples are counted: whether an index batch holds the indices of several samples.
    """
    handed_out, recent, log = state["handed_out"], unpack_indices(state["recent"]), state["log"]
    digests = [(values, sizes) for values, sizes in state.get("digests", ())]
    again = recent[len(recent) - (handed_out - position) :]
    num_again = 0 if is_batched is None else sum(len(batch) if is_batched else 1 for batch in again)
    if draws_again and handed_out > position:
        recent = recent[: len(recent) - (handed_out - position)]
        digests = digests[: len(recent) + 1]
        handed_out, log = position, DrawLog(log).until(position).pack()
    return IndexPlan(
        birth=RandomStates.from_state_dict(state["birth"]),
        start=RandomStates.from_state_dict(state["start"]),
        first=RandomStates.from_state_dict(state["first"]),
        position=position,
        handed_out=handed_out,
        log=log,
        recent=tuple(recent),
        digests=tuple(digests),
        not_compared=frozenset(state.get("not_compared", ())),
        num_samples=state.get("num_samples", 0) - num_again,
        order=None if state.get("order") is None else GlobalOrder(**state["order"]),
        deal=None if state.get("deal") is None else RemainingBatches.from_state_dict(state["deal"]),
    )


def birth_plan(state: Mapping[str, Any]) -> IndexPlan:
    """Return the plan for a new iteration in which the workers continue from their positions."""
    return IndexPlan(birth=RandomStates.from_state_dict(state["birth"]))


def moments_state(**moments: RandomStates | None) -> dict[str, object]:
    """Return moments by name as plain dicts; ``None`` for a moment that has not come yet."""
    return {name: None if moment is None else moment.state_dict() for name, moment in moments.items()}


def record_state(record: IndexRecord) -> dict[str, object]:
    """Return a record as plain dicts, lists, and tensors."""
    return {
        **moments_state(birth=record.birth, start=record.start, first=record.first),
        "handed_out": record.handed_out,
        "log": record.log.pack(),
        "recent": pack_indices(list(record.recent)),
        "digests": [list(digest) for digest in record.digests],
        "not_compared": sorted(record.not_compared),
        "num_samples": record.num_samples,
        "order": None if record.order is None else asdict(record.order),
        "share": None if record.share is None else asdict(record.share),
        "deal": None if record.deal is None else record.deal.state_dict(),
    }

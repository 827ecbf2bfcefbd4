"""What a command requests of the script's processes: a replay of steps, and batches that a run leaves out.

The requests are in the environment. Everything that the processes of a replay write is in the directory of the replay.
A user names a batch to leave out as ``EPOCH:BATCH``, both from 0.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

REPLAY_VARIABLE = "PL_FAULT_TOLERANT_REPLAY"
"""For the command ``replay``: its request, in JSON."""

REACHED = "reached"
PASSED = "passed"
ENDED = "ended"
RAISED = "raised"
LEFT = "left"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlace:
    """A training batch of one fit, counted from 0.

    Args:
        number: Its number over all epochs; ``None`` if only epoch and batch are known.
        epoch: Its epoch; ``None`` if only the number is known.
        batch: Its number in the epoch, likewise.
    """

    number: int | None = None
    epoch: int | None = None
    batch: int | None = None

    @classmethod
    def parse(cls, text: str) -> StepPlace:
        """Return the place that a user names: a number, or an epoch and a batch with a colon between.

        Raises:
            ValueError: If `text` is neither.

        Example:
            >>> StepPlace.parse("57").number, StepPlace.parse("2:7").epoch
            (57, 2)
        """
        match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
        if match is None:
            raise ValueError(f"{text} is neither the number of a step, from 0, nor EPOCH:BATCH, such as 2:7")
        first = int(match[1])
        return cls(number=first) if match[2] is None else cls(epoch=first, batch=int(match[2]))

    def is_before(self, other: StepPlace) -> bool:
        """Return whether this place, of which everything is known, is before another one."""
        if other.number is not None:
            return self.number is not None and self.number < other.number
        return self._in_epochs < other._in_epochs

    def is_after(self, other: StepPlace) -> bool:
        """Return whether this place, of which everything is known, is after another one."""
        if other.number is not None:
            return self.number is not None and self.number > other.number
        return self._in_epochs > other._in_epochs

    @property
    def _in_epochs(self) -> tuple[int, int]:
        return self.epoch or 0, self.batch or 0

    def __str__(self) -> str:
        place = f"batch {self.batch} of epoch {self.epoch}"
        if self.number is None:
            return place
        return f"step {self.number}" if self.epoch is None else f"step {self.number} ({place})"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayRequest:
    """What the script's processes have to do.

    Args:
        directory: The absolute path of the directory for all that they write.
        fit: The number of the fit in the script, from 1.
        since: The first step that is of interest; ``None``: the one that the run's exception ended.
        until: The last step; ``None``: likewise.
        opens_debugger: Whether rank 0 opens the debugger before the first of these steps.
        detects_anomalies: Whether autograd looks for the operation that produced a NaN.
        dumps: Where to write what belongs to each of these steps; ``None`` for nowhere.
        without: The batches that the replay leaves out, though the run may not have: epoch and batch.
        values: What to set before the first of these steps: keys and values, as the user wrote them.
    """

    directory: str
    fit: int = 1
    since: StepPlace | None = None
    until: StepPlace | None = None
    opens_debugger: bool = False
    detects_anomalies: bool = False
    dumps: str | None = None
    without: tuple[tuple[int, int], ...] = ()
    values: tuple[tuple[str, str], ...] = ()

    @property
    def is_of_exception(self) -> bool:
        """Whether the steps are those up to the run's exception."""
        return self.until is None

    def to_json(self) -> str:
        """Return the text for the environment."""
        return json.dumps(asdict(self))

    def path(self, name: str) -> str:
        """Return the path of a file in the directory of the replay."""
        return os.path.join(self.directory, name)

    @property
    def ledger(self) -> str:
        """The ledger that rank 0 writes."""
        return self.path("ledger.jsonl")


def replay_requested(environment: Mapping[str, str] = os.environ) -> ReplayRequest | None:
    """Return the request in the environment, if this process belongs to a replay.

    Args:
        environment: The environment of the process.
    """
    text = environment.get(REPLAY_VARIABLE)
    if not text:
        return None
    found = json.loads(text)
    places = {name: None if found[name] is None else StepPlace(**found[name]) for name in ("since", "until")}
    without = tuple((epoch, batch) for epoch, batch in found["without"])
    values = tuple((key, value) for key, value in found["values"])
    return ReplayRequest(**{**found, **places, "without": without, "values": values})


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayStart:
    """Where a replay begins; written by rank 0.

    Args:
        run: The directory of the run; ``None`` if none was found.
        autosave: The autosave that the replay starts from; ``None`` if it starts from the beginning of the fit.
        number: How many steps were done there.
        ledger: The path of the run's ledger; ``None`` if it writes none.
        exception: The exception that ended the run, if the request is for it.
        place: The step in which it was raised.
    """

    run: str | None = None
    autosave: str | None = None
    number: int = 0
    ledger: str | None = None
    exception: str | None = None
    place: StepPlace | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayOutcome:
    """How a replay ended on one rank.

    Args:
        word: ``reached``: the last step is done. ``passed``: there is no such step, or no exception came. ``ended``:
            the fit ended before it. ``raised``: an exception. ``left``: the user has quit the debugger.
        place: The last step that began.
        text: The exception.
        changed: The step before which values were set; ``None`` if none were.
    """

    word: str
    place: StepPlace
    text: str = ""
    changed: StepPlace | None = None


def write_start(request: ReplayRequest, start: ReplayStart) -> None:
    """Report where the replay begins."""
    _write(request.path("start.json"), asdict(start))


def read_start(request: ReplayRequest) -> ReplayStart | None:
    """Return where the replay began; ``None`` if it did not get there."""
    found = _read(request.path("start.json"))
    return None if found is None else ReplayStart(**{**found, "place": _place(found["place"])})


def write_outcome(request: ReplayRequest, rank: int, outcome: ReplayOutcome) -> None:
    """Report how the replay ended on a rank."""
    _write(request.path(f"outcome.rank-{rank}.json"), asdict(outcome))


def read_outcomes(request: ReplayRequest) -> dict[int, ReplayOutcome]:
    """Return how the replay ended, by rank; a rank that did not get there is missing."""
    outcomes = {}
    for name in sorted(os.listdir(request.directory)):
        match = re.fullmatch(r"outcome\.rank-(\d+)\.json", name)
        found = None if match is None else _read(request.path(name))
        if match is not None and found is not None:
            places = {name: _place(found[name]) for name in ("place", "changed")}
            outcomes[int(match[1])] = ReplayOutcome(**{**found, **places})
    return outcomes


def _place(found: dict[str, Any] | None) -> object:
    return None if found is None else StepPlace(**found)


def _write(path: str, content: Mapping[str, object]) -> None:
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(content, file)
    os.replace(temporary, path)


def _read(path: str) -> dict[str, Any] | None:
    try:
        with open(path, encoding="utf-8") as file:
            content: dict[str, object] = json.load(file)
    except FileNotFoundError:
        return None
    return content


SKIP_VARIABLE = "PL_FAULT_TOLERANT_SKIP_BATCHES"
"""The batches to leave out: ``3:17,4:2``."""

Skip = tuple[int, int]
"""Epoch and batch, both from 0."""

_PLACE = re.compile(r"\s*(\d+):(\d+)\s*")


def skip_from(text: str) -> Skip:
    """Return the batch that a text names.

    Args:
        text: Epoch and batch with a colon between.

    Raises:
        ValueError: If `text` is something else.

    Example:
        >>> skip_from("3:17")
        (3, 17)
    """
    match = _PLACE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not EPOCH:BATCH, such as 3:17, both from 0")
    return int(match[1]), int(match[2])


def skips_requested(environment: Mapping[str, str] = os.environ) -> tuple[Skip, ...]:
    """Return the batches that the environment names, in order.

    Args:
        environment: The environment of the process.

    Raises:
        ValueError: If the variable has another form.
    """
    places = environment.get(SKIP_VARIABLE, "").split(",")
    try:
        return tuple(sorted({skip_from(place) for place in places if place.strip()}))
    except ValueError as error:
        raise ValueError(f"{SKIP_VARIABLE}: {error}. Put commas between several.") from None


def text_of_skips(skips: Iterable[Skip]) -> str:
    """Return the text that `skips_requested` reads.

    Example:
        >>> text_of_skips([(4, 2), (3, 17)])
        '3:17,4:2'
    """
    return ",".join(f"{epoch}:{batch}" for epoch, batch in sorted(skips))


ACCEPT_VARIABLE = "PL_FAULT_TOLERANT_ACCEPT"
"""The differences that a resume accepts: ``hyperparameters.lr,trainer.precision``."""


def accepted_names() -> tuple[str, ...]:
    """Return the names that the environment accepts, in order."""
    return tuple(sorted({name.strip() for name in os.environ.get(ACCEPT_VARIABLE, "").split(",")} - {""}))


def skips_in_words(skip: Skip) -> str:
    """Return the name of a batch in a message.

    Example:
        >>> skips_in_words((3, 17))
        'batch 17 of epoch 3'
    """
    return f"batch {skip[1]} of epoch {skip[0]}"

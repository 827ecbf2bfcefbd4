"""The ledger of one process: what it trained, batch by batch, so that two runs can be held against each other.

Written where ``FaultTolerance(ledger=...)``, or else ``PL_FAULT_TOLERANT_LEDGER``, names a file; also where
``PL_FAULT_TOLERANT_TRAINING=0`` switches all else off. Rank 0 writes that file, rank r the one with ``.rank-<r>``
after its name; a process that continues with the same file adds its lines. Each line is one JSON object with its kind
under ``event``, the number of the fit in its script under ``fit`` (from 1) and the time, seconds since 1970, under
``time``. Numbers that are compared are text: a float is ``float.hex()``, a tensor of several elements a digest. Kinds,
and what they have besides:

- ``fit``: a fit begins. ``pid``, ``rank``, ``num_ranks``, ``num_batches`` (of an epoch; ``null`` if not known),
  ``max_epochs``, ``surroundings`` (versions, device, threads: what the last bits of sums depend on).
- ``resumed``: it continues from a checkpoint, before its first batch. ``epoch``, ``batch``, ``text`` (the position in
  words; it begins with "at the validation run" if it was taken inside one, "after the end" after the whole fit),
  ``exact``, ``not_exact`` (the reasons, a list of texts), ``path``.
- ``batch``: the step of a batch is finished; what its last hooks and its end log comes after it. ``epoch``, ``batch``
  (from 0), ``order`` (digest of the indices that the batch was made of; ``null`` if there are none, as with an
  iterable data set, or they are not known, as where all is switched off), ``content`` (digest of the batch as it was
  before the step, on its device; of a step that fetches by itself, of all that it fetched), ``rng`` (digest of the main
  process's generators before the step), ``loss`` (``null`` if the step returns none), ``learning_rates`` (a list for
  each optimizer; those that the step was made with).
- ``validated``: a validation run is over, but for the hooks of its end. ``epoch``, ``batch`` (batches of the epoch
  done), ``content`` (digest of all its batches), ``metrics``.
- ``log``: values given to the loggers, or that would be if there were any. ``epoch``, ``batch`` (batches of the epoch
  begun: one more than the number of the batch that logs), ``step``, ``metrics``, ``validating`` (made in a validation
  run), ``epoch_end`` (made after the last batch of a training epoch), ``logger`` (the class of the one that a callback
  or the module gave them to by itself; else ``null``). The sanity check's are left out, and what is given to a logger
  itself before the fit's first epoch: that is done again at each start.
- ``autosave``: an autosave is written and verified; by rank 0, or by all where a strategy shards. ``epoch``, ``batch``
  (of its position), ``text`` (the position in words), ``path``. One that is written in the background comes later.
- ``end``: the fit came to its end. ``weights``, ``optimizers``, ``metrics``, ``rng``: digests and values.

To join the ledgers of a run's processes: of the earlier ones counts what is not after the place in ``resumed``: lines
whose ``epoch`` and ``batch``, of a ``batch`` line one more, are not greater. "At the validation run": of that place, no
``validated`` and no ``validating`` line. "After the step": of that place, only the ``batch`` line. "At the end of
epoch": of that place, none from the first with ``epoch_end`` on. "After the end of the fit": all but ``end``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_faulttolerant.records.lines import Line, read_lines

FIT = "fit"
RESUMED = "resumed"
BATCH = "batch"
VALIDATED = "validated"
LOG = "log"
AUTOSAVE = "autosave"
END = "end"

LEDGER_VARIABLE = "PL_FAULT_TOLERANT_LEDGER"
DRILL_VARIABLE = "PL_FAULT_TOLERANT_DRILL"
"""In the environment of all that a drill starts: by it one is known that has lost its parent."""
FAULT_VARIABLE = "PL_FAULT_TOLERANT_FAULT"
"""For the drill: ``<fit>:<epoch>:<batch>:<hook>``, where an exception is to be raised. Hooks: ``start`` (before the
step), ``step`` (after the backward pass, before the optimizer's step), ``end``. Where torchrun starts its ranks again
by itself, they have the variables of before: several places, with a comma between, are for one start each.
"""

SAVE_VARIABLE = "PL_FAULT_TOLERANT_SAVE_AT"
"""For the drill: ``<fit>:<epoch>:<batch>``, several with a comma between: it saves before each."""
HOLD_VARIABLE = "PL_FAULT_TOLERANT_HOLD_AT"
"""For the drill: ``<fit>:<epoch>:<batch>``. Before this batch rank 0 waits for its strike."""

HOOKS = ("start", "step", "end")
BatchPlace = tuple[int, int, int]
"""The number of the fit in its script, from 1, and epoch and batch, from 0."""


def places_text(places: Iterable[BatchPlace]) -> str:
    """Return places as the environment names them."""
    return ",".join(":".join(map(str, place)) for place in places)


def places_in(name: str, text: str) -> list[BatchPlace]:
    """Return the places that a variable names.

    Args:
        name: Of the variable.
        text: Its value.

    Raises:
        ValueError: If it names none.
    """
    found = [re.fullmatch(r"(\d+):(\d+):(\d+)", place) for place in text.split(",")]
    places = [(int(match[1]), int(match[2]), int(match[3])) for match in found if match is not None]
    if len(places) < len(found):
        raise ValueError(f"{name} must be <fit>:<epoch>:<batch>, several with a comma between; got {text!r}.")
    return places


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultPlace:
    """Where a drill asks for an exception.

    Args:
        fit: The number of the fit in its script, from 1.
        epoch: From 0.
        batch: From 0.
        hook: One of `HOOKS`.
    """

    fit: int
    epoch: int
    batch: int
    hook: str

    @classmethod
    def parse(cls, text: str) -> FaultPlace:
        """Return the place that the environment names.

        Raises:
            ValueError: If `text` names none.
        """
        match = re.fullmatch(r"(\d+):(\d+):(\d+):(\w+)", text)
        if match is None or match[4] not in HOOKS:
            raise ValueError(
                f"{FAULT_VARIABLE} must be <fit>:<epoch>:<batch>:<hook> with a hook of {', '.join(HOOKS)};"
                f" got {text!r}."
            )
        return cls(fit=int(match[1]), epoch=int(match[2]), batch=int(match[3]), hook=match[4])

    def __str__(self) -> str:
        return f"{self.fit}:{self.epoch}:{self.batch}:{self.hook}"


def path_of_rank(path: str, rank: int) -> str:
    """Return the file that a rank writes, where rank 0 writes `path`."""
    return path if rank == 0 else f"{path}.rank-{rank}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """What one process did of one fit.

    Args:
        number: Of the fit in its script, from 1.
        begun: The line with which it begins.
        resumed: The line that says where it continued, if it did.
        events: All other lines, in order.
    """

    number: int
    begun: Line
    resumed: Line | None
    events: tuple[Line, ...]

    def of(self, kind: str) -> tuple[Line, ...]:
        """Return the lines of one kind."""
        return tuple(line for line in self.events if line["event"] == kind)

    @property
    def end(self) -> Line | None:
        """The line of its end, if the process came there."""
        return next(iter(self.of(END)), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """What one rank did, in one process or, where several have written to one file, in each of them.

    Args:
        fits: In the order in which they began.
    """

    fits: tuple[Fit, ...]

    @property
    def events(self) -> tuple[Line, ...]:
        """The lines of all fits, but for those that begin them and say where they continue."""
        return tuple(line for fit in self.fits for line in fit.events)


def read_ledger(path: str | os.PathLike[str]) -> Ledger:
    """Return what is in a ledger; no fits, if it is not there. A line that a kill has torn is passed over.

    Args:
        path: The file of one rank.
    """
    fits: list[list[Line]] = []
    for line in read_lines(path):
        if line.get("event") == FIT:
            fits.append([line])
        elif fits:  # else the line in front of it is torn
            fits[-1].append(line)
    return Ledger(fits=tuple(_fit(*lines) for lines in fits))


def _fit(begun: Line, *lines: Line) -> Fit:
    return Fit(
        number=begun["fit"],
        begun=begun,
        resumed=next((line for line in lines if line["event"] == RESUMED), None),
        events=tuple(line for line in lines if line["event"] != RESUMED),
    )

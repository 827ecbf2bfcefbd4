"""The ledger of one process: what it trained and evaluated, batch by batch, to compare two runs.

It is written if ``PL_FAULT_TOLERANT_LEDGER`` names a file, even if
``PL_FAULT_TOLERANT_TRAINING=0`` switches everything else off. Rank 0 writes that file. Rank r writes a file with
``.rank-<r>`` after the name. A process that continues with the same file adds its lines. Each line is one JSON object.
``event`` is its kind, ``fit`` the number of the fit or evaluation in its script (from 1), and ``time`` the time in
seconds since 1970. Numbers to compare are strings: a float is ``float.hex()``, a tensor of several elements is a
digest. ``epoch`` and ``batch`` are 0 in all lines of ``validate``, ``test``, and ``predict``. The kinds, and their
other keys:

- ``fit``: a fit or an evaluation begins. ``function`` (``fit``, ``validate``, ``test``, or ``predict``), ``pid``,
  ``rank``, ``num_ranks``, ``num_batches`` (of an epoch, or of the evaluation; ``null`` if not known), ``max_epochs``
  (1 for an evaluation), ``surroundings`` (versions, device, threads: the last bits of sums depend on them).
- ``resumed``: it continues from a checkpoint, before its first batch. ``epoch``, ``batch``, ``validation_batch`` (the
  finished batches of a validation run, or of an evaluation, that continues; left out otherwise), ``where`` (the kind of
  place: ``boundary``, ``batch end``, ``validation`` if that run is repeated, ``finished`` after the whole fit, ...),
  ``text`` (the position in words),
  ``exact``, ``not_exact`` (the reasons, a list of strings), ``path``.
- ``batch``: the step of a batch is finished; values that its last hooks and its end log come after it. ``epoch``,
  ``batch`` (from 0), ``order`` (digest of the batch's indices; ``null`` if there are none, as with an iterable data
  set, or if they are not known, as when everything is switched off), ``content`` (digest of the batch before the step,
  on its device; for a step that fetches by itself, of all that it fetched), ``rng`` (digest of the main process's
  generators before the step), ``loss`` (``null`` if the step returns none), ``learning_rates`` (those of the step, a
  list for each optimizer).
- ``evaluated``: the step of a batch of a validation run, or of an evaluation, is finished. ``epoch``, ``batch``
  (finished training batches of the epoch), ``validation_batch`` (the batches of that run that have begun, this one
  included, over all its loaders), ``content``, ``rng``, ``output`` (what the step returned: for ``predict``, the
  prediction). Batches of the sanity check are left out.
- ``validated``: a validation run is over, except for the hooks of its end. ``epoch``, ``batch`` (finished batches of
  the epoch), ``metrics``.
- ``log``: values passed to the loggers, or that would be if there were any. ``epoch``, ``batch`` (batches of the epoch
  that have begun: one more than the number of the batch that logs), ``step``, ``metrics``, ``validating`` (logged in a
  validation run or an evaluation), ``validation_batch`` (then: the batches of that run that have begun), ``epoch_end``
  (logged after the last batch of a training epoch), ``logger`` (the class of the logger that a callback or the module
  called directly; else ``null``). Values of the sanity check are left out, and values passed directly to a logger
  before the first batch: that is repeated at each start.
- ``autosave``: an autosave is written and verified; by rank 0, or by all ranks if a strategy shards. ``epoch``,
  ``batch``, ``validation_batch``, ``where`` (of its position, as in ``resumed``), ``text`` (the position in words),
  ``path``. One written in the background comes later.
- ``end``: the fit or the evaluation has finished. ``metrics``, ``rng``; of a fit ``weights`` and ``optimizers``; of an
  evaluation ``returned`` (for ``predict``, the number and a digest of the predictions): digests and values.

To join the ledgers of a run's processes, keep the lines of earlier ones that are not after the place in ``resumed``:
their ``epoch`` and ``batch`` (plus one for a ``batch`` line) are not greater. Some places keep only a part of the
lines there. ``validation``: no ``validated``, ``evaluated``, or ``validating`` line. With a ``validation_batch``: no
``validated`` line, and no ``evaluated`` or ``validating`` line with a greater ``validation_batch``. ``batch end``: only
the ``batch`` line. ``epoch end``: none from the first with ``epoch_end`` on. ``finished``, and ``after`` an evaluation:
all except ``end``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

BATCH_END, VALIDATION_START, EPOCH_END = "batch end", "validation", "epoch end"
AT_VALIDATION = (VALIDATION_START, "in validation", "validation end")
IN_EVALUATION = ("in validate", "in test", "in predict")
ENDS = ("finished", "after validate", "after test", "after predict")
"""Places after a whole fit, or a whole evaluation."""

FIT = "fit"
RESUMED = "resumed"
BATCH = "batch"
EVALUATED = "evaluated"
VALIDATED = "validated"
LOG = "log"
AUTOSAVE = "autosave"
END = "end"

LEDGER_VARIABLE = "PL_FAULT_TOLERANT_LEDGER"
DRILL_VARIABLE = "PL_FAULT_TOLERANT_DRILL"
"""In the environment of everything that a drill starts: it identifies processes that have lost their parent."""
FAULT_VARIABLE = "PL_FAULT_TOLERANT_FAULT"
"""For the drill: ``<place>:<hook>``, a place (see below) to raise an exception at. Hooks: ``start`` (before the step),
``step`` (after the backward pass, before the optimizer's step), ``end``; in an evaluation only ``start``. If torchrun
restarts its ranks by itself, they have the same variables as before: several places, separated by commas, are for one
start each.
"""

SAVE_VARIABLE = "PL_FAULT_TOLERANT_SAVE_AT"
"""For the drill: places, separated by commas: save before each."""
HOLD_VARIABLE = "PL_FAULT_TOLERANT_HOLD_AT"
"""For the drill: a place. Before this batch, rank 0 waits for its strike."""

HOOKS = ("start", "step", "end")
BatchPlace = tuple[int, ...]
"""The number of the fit or evaluation in its script, from 1; the epoch and the batch, from 0. In a validation run or an
evaluation, the epoch, the finished training batches of that epoch (both 0 outside a fit), and the batch, from 0. In the
environment, these numbers have colons between them.
"""


def places_text(places: Iterable[BatchPlace]) -> str:
    """Return places in the format of the environment."""
    return ",".join(":".join(map(str, place)) for place in places)


def places_in(name: str, text: str) -> list[BatchPlace]:
    """Return the places that a variable names.

    Args:
        name: The name of the variable.
        text: Its value.

    Raises:
        ValueError: If it does not name places.
    """
    found = text.split(",")
    if not all(map(_is_place, found)):
        raise ValueError(
            f"{name} must be <fit>:<epoch>:<batch>, in an evaluation followed by :<evaluation batch>, or several "
            f"separated by commas; got {text!r}."
        )
    return [tuple(map(int, place.split(":"))) for place in found]


def _is_place(text: str) -> bool:
    return re.fullmatch(r"\d+(:\d+){2,3}", text) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultPlace:
    """The place at which a drill requests an exception.

    Args:
        batch: The batch.
        hook: One of `HOOKS`.
    """

    batch: BatchPlace
    hook: str

    @classmethod
    def parse(cls, text: str) -> FaultPlace:
        """Return the place that the environment names.

        Raises:
            ValueError: If `text` does not name a place, or one in an evaluation with another hook than ``start``.
        """
        batch, _, hook = text.rpartition(":")
        if hook not in HOOKS or not _is_place(batch):
            raise ValueError(
                f"{FAULT_VARIABLE} must be <fit>:<epoch>:<batch>:<hook> with a hook of {', '.join(HOOKS)};"
                f" got {text!r}."
            )
        [numbers] = places_in(FAULT_VARIABLE, batch)
        place = cls(batch=numbers, hook=hook)
        if place.is_in_evaluation and hook != HOOKS[0]:
            raise ValueError(
                f"{FAULT_VARIABLE} must end with :{HOOKS[0]} in an evaluation, where a batch has four numbers; got"
                f" {text!r}."
            )
        return place

    @property
    def is_in_evaluation(self) -> bool:
        """Whether the batch is of a validation run or an evaluation: those have a fourth number."""
        return len(self.batch) == 4

    def __str__(self) -> str:
        return f"{places_text([self.batch])}:{self.hook}"


def path_of_rank(path: str, rank: int) -> str:
    """Return the file that a rank writes if rank 0 writes `path`."""
    return path if rank == 0 else f"{path}.rank-{rank}"

"""Pick the likely cause of a difference from the first event that differs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lightning_faulttolerant.cli.drill import causes
from lightning_faulttolerant.cli.drill.comparison import Mismatch, different_fields
from lightning_faulttolerant.cli.drill.ledgers import STEPS
from lightning_faulttolerant.cli.drill.result import Cause
from lightning_faulttolerant.records import ledger

_MAX_NAMES = 5
_MONITORED = re.compile(r"(\w+)\.on_\w+[./]")
"""A column of DeviceStatsMonitor: its class, the hook that measures, and the measured quantity."""


def cause_of(mismatch: Mismatch) -> Cause:
    """Return the likely cause of a mismatch, judged by the events alone.

    Args:
        mismatch: The first event that differs.
    """
    if not mismatch.fields:
        return causes.COURSE
    if mismatch.kind == ledger.BATCH:
        return _of_batch(mismatch)
    if mismatch.kind == ledger.EVALUATED:
        return {"content": causes.EVALUATION_DATA, "rng": causes.MAIN_RNG}.get(mismatch.fields[0], causes.WEIGHTS)
    if mismatch.kind == ledger.VALIDATED:
        return causes.METRICS if _continues_equal(mismatch) else causes.WEIGHTS
    if mismatch.kind == ledger.LOG:
        source = _source_of(mismatch)
        if source is not None:
            return cause_of(source)
        return causes.LOGGED_VALUES if _continues_equal(mismatch) else causes.WEIGHTS
    return _of_end(mismatch)


def _of_batch(mismatch: Mismatch) -> Cause:
    assert mismatch.expected is not None
    if mismatch.fields[0] == "content":
        has_order = mismatch.expected.values.get("order") is not None
        cause = causes.AUGMENTATION if has_order else causes.ITERABLE_DATA
        return causes.and_main_rng(cause) if "rng" in mismatch.fields else cause
    by_field = {"order": causes.DATA_ORDER, "rng": causes.MAIN_RNG, "learning_rates": causes.LEARNING_RATES}
    return by_field.get(mismatch.fields[0], causes.WEIGHTS)


def _of_end(mismatch: Mismatch) -> Cause:
    if "weights" in mismatch.fields:
        return causes.FINAL_WEIGHTS
    by_field = {
        "optimizers": causes.OPTIMIZERS,
        "returned": causes.RETURNED,
        "metrics": causes.METRICS,
        "rng": causes.MAIN_RNG,
    }
    return by_field.get(mismatch.fields[0], causes.COURSE)


def _continues_equal(mismatch: Mismatch) -> bool:
    """Return whether the weights are the same in everything that follows the mismatch."""
    if any(event.kind in STEPS for event in mismatch.expected_next):
        return mismatch.num_batches_equal_behind > 0
    ends = [
        next((event for event in events if event.kind == ledger.END), None)
        for events in (mismatch.expected_next, mismatch.found_next)
    ]
    weights = [end.values.get("weights", "not of an evaluation") if end is not None else None for end in ends]
    return weights[0] is not None and weights[0] == weights[1]


def _source_of(log: Mismatch) -> Mismatch | None:
    """Return the mismatch of the batch, validation run, or evaluation that logged the values, if it differs too.

    The values that a step, or the end of an evaluation, logs are written before its own line.
    """
    rests = (list(log.expected_next), list(log.found_next))
    places = [next((i for i, event in enumerate(rest) if event.kind != ledger.LOG), None) for rest in rests]
    if None in places:
        return None
    (one, one_next), (other, other_next) = (
        (rest[place], rest[place + 1 :]) for rest, place in zip(rests, places, strict=True) if place is not None
    )
    fields = different_fields(one, other)
    if not fields or (one.kind == ledger.END and "returned" not in fields):
        return None
    return Mismatch(
        rank=log.rank,
        expected=one,
        found=other,
        fields=fields,
        number=log.number,
        num_evaluated=log.num_evaluated,
        expected_next=one_next,
        found_next=other_next,
    )


def not_deterministic(mismatch: Mismatch, difference_place: str) -> Cause:
    """Return the reason why a script differs from run to run without any interruption.

    Args:
        mismatch: The first event that differs.
        difference_place: The place of that event, in words.
    """
    is_first = mismatch.number == 0
    if mismatch.kind == ledger.LOG:
        return causes.changing_values(_patterns(_logged_names(mismatch)))
    if mismatch.kind == ledger.BATCH:
        if is_first and {"rng", "order"} & set(mismatch.fields):
            return causes.NO_SEED
        by_field = {
            "order": causes.CHANGING_ORDER,
            "content": causes.CHANGING_CONTENTS,
            "loss": causes.INITIAL_WEIGHTS if is_first else causes.KERNELS,
        }
        if mismatch.fields[0] in by_field:
            return by_field[mismatch.fields[0]]
    return causes.differs_at(difference_place, cause_of(mismatch))


def _patterns(names: Sequence[str]) -> list[str]:
    """Return patterns that match `names`: a single one for all columns that a monitor prefixes with its own name."""
    monitors = (_MONITORED.match(name) for name in names)
    found = [name if monitor is None else f"{monitor[1]}.*" for name, monitor in zip(names, monitors, strict=True)]
    return list(dict.fromkeys(found))[:_MAX_NAMES]


def _logged_names(mismatch: Mismatch) -> list[str]:
    if mismatch.expected is None or mismatch.found is None:
        return []
    one, other = (event.values.get("metrics") or {} for event in (mismatch.expected, mismatch.found))
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]

"""Requests for strikes that a script can't fulfil: where it never comes."""

from __future__ import annotations

from lightning_faulttolerant.cli.drill.ledgers import STAGES, BatchNumbers
from lightning_faulttolerant.cli.drill.moments import counted_batches
from lightning_faulttolerant.cli.drill.result import NOT_JUDGED, Cause, DrillVerdict
from lightning_faulttolerant.cli.drill.settings import DrillSettings
from lightning_faulttolerant.cli.page.numbers import plural


def never_reached(settings: DrillSettings, numbers: BatchNumbers) -> DrillVerdict | None:
    """Judge a drill with strikes where the script never comes; return None if it reaches all places.

    Args:
        settings: Settings of the drill.
        numbers: Batch numbers of the uninterrupted run.
    """
    missing = [stage for stage in settings.stages if stage not in numbers.stages]
    if missing:
        return _wrong(
            f"--in {missing[0]}: the script has no batch of {missing[0]}. It has batches of"
            f" {' and '.join(numbers.stages)}.",
            f"--in names what is struck: {', '.join(STAGES)}. `trainer.validate` counts as `validation`. The"
            " sanity check can't be struck.",
            f"--in {','.join(numbers.stages)} strikes in everything that the script does.",
        )
    num_batches = len(counted_batches(settings, numbers))
    too_far = [batch for batch in settings.at if batch >= num_batches]
    if too_far:
        stages = " and ".join(settings.stages) or "training"
        return _wrong(
            f"--at {too_far[0]} is after the end: the run has {plural(num_batches, 'batch')} of {stages}.",
            "--at counts batches over the whole run, from 0: those of training, or of what --in names.",
            f"Give numbers from 1 to {num_batches - 1}." if num_batches > 1 else "Leave --at out.",
        )
    return None


def _wrong(text: str, explanation: str, advice: str) -> DrillVerdict:
    cause = Cause(part="usage", text=explanation, advice=(advice,))
    return DrillVerdict(word=NOT_JUDGED, text=text, cause=cause)

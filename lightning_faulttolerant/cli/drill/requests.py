"""Requests for strikes that a script can't fulfil: where it never comes."""

from __future__ import annotations

from lightning_faulttolerant.cli.drill import causes
from lightning_faulttolerant.cli.drill.ledgers import BatchNumbers
from lightning_faulttolerant.cli.drill.moments import counted_batches
from lightning_faulttolerant.cli.drill.result import NOT_JUDGED, DrillVerdict
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
        text = (
            f"--in {','.join(missing)}: the script has no batch of {' or '.join(missing)}. It has batches of"
            f" {' and '.join(numbers.stages)}."
        )
        return DrillVerdict(word=NOT_JUDGED, text=text, cause=causes.stage_never_reached(numbers.stages))
    num_batches = len(counted_batches(settings, numbers))
    too_far = [batch for batch in settings.at if batch >= num_batches]
    if too_far:
        stages = " and ".join(settings.stages) or "training"
        text = f"--at {too_far[0]} is after the end: the run has {plural(num_batches, 'batch')} of {stages}."
        return DrillVerdict(word=NOT_JUDGED, text=text, cause=causes.batch_never_reached(num_batches))
    return None

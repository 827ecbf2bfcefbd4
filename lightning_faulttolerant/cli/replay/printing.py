"""What a replay prints when it is over: where it began and ended, how it compares, and what is in its last step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_faulttolerant.cli.drill.comparison import number_of, shown_value
from lightning_faulttolerant.cli.drill.ledgers import Event
from lightning_faulttolerant.cli.replay.comparison import Compared
from lightning_faulttolerant.records.replay import (
    ENDED,
    LEFT,
    PASSED,
    RAISED,
    ReplayOutcome,
    ReplayRequest,
    ReplayStart,
)
from lightning_faulttolerant.records.skips import in_words

_MAX_NAMED = 5


def lines_of(
    request: ReplayRequest,
    start: ReplayStart,
    outcome: ReplayOutcome,
    steps: Sequence[Event],
    compared: Compared | None,
) -> Iterator[str]:
    """Yield the lines to print.

    Args:
        request: The request.
        start: Where the replay began.
        outcome: How it ended.
        steps: The steps that it did, of rank 0.
        compared: How it compares with the ledger of the run; ``None`` if there is none.
    """
    origin = "the beginning of the fit" if start.autosave is None else f"step {start.number} ({start.autosave})"
    yield f"Replay of fit {request.fit}, from {origin}"
    yield f"  {_end(request, outcome)}"
    if steps:
        last = steps[-1]
        yield f"  loss of {last}: {shown_value(last.values.get('loss'))}"
        yield from _not_finite(steps)
    if request.without:
        yield f"  left out: {', '.join(map(in_words, request.without))}. Later steps are not compared with the run"
    if outcome.changed is not None:
        values = ", ".join(f"{key}={value}" for key, value in request.values)
        yield f"  set before {outcome.changed}: {values}. It and later steps are not compared with the run"
    yield from _compared(compared, len(steps), start)
    if request.dumps is not None:
        yield from _dumped(request.dumps, outcome)


def _end(request: ReplayRequest, outcome: ReplayOutcome) -> str:
    place, last = outcome.place, request.until
    ends = {
        RAISED: f"raised in {place}: {outcome.text}",
        LEFT: f"left in {place}, by the debugger",
        PASSED: "no exception came" if request.is_of_exception else f"there is no {last}: stopped before {place}",
        ENDED: f"the fit ended after {place}, before {'any exception' if last is None else last}",
    }
    return ends.get(outcome.word, f"stopped after {place}")


def _not_finite(steps: Sequence[Event]) -> Iterator[str]:
    losses = ((step, number_of(step.values.get("loss"))) for step in steps)
    first = next((step for step, loss in losses if loss is not None and not math.isfinite(loss)), None)
    if first is not None:
        yield f"  the first loss that is not finite: {first}"


def _compared(compared: Compared | None, num_steps: int, start: ReplayStart) -> Iterator[str]:
    if compared is None:
        yield "  the run has no ledger to compare with: FaultTolerance(ledger=...) writes one"
    elif compared.difference is not None:
        difference = compared.difference
        yield f"  DIFFERS from {start.ledger}, first at {difference.place} (rank {difference.rank}):"
        for value in difference.values:
            yield f"    {value.name}: {value.expected} in the run, {value.found} in the replay"
    elif not compared.num_steps:
        yield f"  no step of the replay is in {start.ledger}"
    else:
        of = "" if compared.num_steps == num_steps else f" of {num_steps}"
        many = "step equals" if num_steps == 1 else "steps equal"
        yield f"  {compared.num_steps}{of} {many} {start.ledger}, bit for bit"


def _dumped(directory: str, outcome: ReplayOutcome) -> Iterator[str]:
    """Yield what is in the last step that was written."""
    yield f"  written to {directory}"
    folder = os.path.join(directory, f"step-{outcome.place.number:08d}")
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        if name.endswith(".json"):
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                yield from _step(json.load(file))


def _step(told: Mapping[str, Any]) -> Iterator[str]:
    for place, worker in told["worker"].items():
        by = "the main process" if worker is None else f"worker {worker}"
        indices = (told["indices"] or {}).get(place)
        yield f"    rank {told['rank']}, {place}: made by {by}, samples {'unknown' if indices is None else indices}"
    for value in told["inputs"]:
        if value.get("not_finite"):
            where = _rows(value["not_finite"])
            number = value["num_not_finite"]
            yield f"    input {value['name']}: {number} value{' is' if number == 1 else 's are'} not finite, in {where}"
    for norms in told["gradient_norms"]:
        bad = [layer for layer, norm in norms.items() if isinstance(norm, str)]
        if bad:
            more = f" and {len(bad) - _MAX_NAMED} more" if len(bad) > _MAX_NAMED else ""
            yield f"    gradients that are not finite: {', '.join(bad[:_MAX_NAMED])}{more}"


def _rows(rows: Sequence[Mapping[str, Any]]) -> str:
    named = [
        f"row {row['row']}" + ("" if row["index"] is None else f" (sample {row['index']})") for row in rows[:_MAX_NAMED]
    ]
    return ", ".join(named) + (f" and {len(rows) - _MAX_NAMED} more" if len(rows) > _MAX_NAMED else "")

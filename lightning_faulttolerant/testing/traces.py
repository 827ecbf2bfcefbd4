"""The events of a run on each of its ranks, and the comparison of two runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class NotTheSame(AssertionError):  # noqa: N818 - reads as a plain statement
    """An interrupted run, resumed, did not do what the uninterrupted one did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The events of one rank's process.

    Args:
        events: In order, without the event that says where it continued.
        resumed: That event, if the process continued from a checkpoint and reached the next batch or validation run.
    """

    events: list[Event]
    resumed: Event | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOutcome:
    """The end of a run's processes, and their events.

    Args:
        exit_code: 0 if all finished, else that of the first one that failed; negative for a signal.
        traces: One per rank.
        output: The end of their output.
    """

    exit_code: int
    traces: Sequence[Trace]
    output: str

    @property
    def events(self) -> list[Event]:
        """The events of rank 0."""
        return self.traces[0].events

    @property
    def resumed(self) -> Event | None:
        """The place where the ranks continued, which must be the same for all.

        Raises:
            NotTheSame: If they continued in different places, or one of them started from the beginning.
        """
        places = {rank: trace.resumed for rank, trace in enumerate(self.traces) if trace.resumed or trace.events}
        if len({str(place) for place in places.values()}) > 1:
            told = "\n".join(f"  rank {rank}: {json.dumps(place)}" for rank, place in places.items())
            raise NotTheSame(f"The ranks continued in different places.\n{told}\n{self.output}")
        return next(iter(places.values()), None)


def read_trace(path: Path) -> Trace:
    """Return the trace that a recorder has written; empty if it was never called."""
    lines = path.read_text().splitlines() if path.exists() else []
    events = [json.loads(line) for line in lines]
    resumed = [event for event in events if event["event"] == "resumed"]
    return Trace(
        events=[event for event in events if event["event"] != "resumed"], resumed=resumed[0] if resumed else None
    )


def before(events: list[Event], resumed: Event | None) -> list[Event]:
    """Return the events before the place where a run continued; none if it started from the beginning."""
    if resumed is None:
        return []
    name = "validation" if "validation" in resumed["text"] else "batch"
    place = (resumed["epoch"], resumed["batch"])
    found = (i for i, e in enumerate(events) if e["event"] == name and (e["epoch"], e["batch"]) == place)
    end = next(found, len(events))
    if resumed["num_validated"] is not None:  # this many batches of that validation run are done
        batches = [i for i, event in enumerate(events) if i > end and event["event"] == "validation batch"]
        end = [*batches, len(events)][min(resumed["num_validated"], len(batches))]
    return events[:end]


def compare(expected: Sequence[list[Event]], found: Sequence[list[Event]], what: str) -> None:
    """Compare the events of two runs, rank by rank.

    Raises:
        NotTheSame: If they differ; it names the first event that differs.
    """
    for rank, (one, other) in enumerate(zip(expected, found, strict=True)):
        _compare(one, other, what if len(expected) == 1 else f"rank {rank} of {what}")


def _compare(expected: list[Event], found: list[Event], what: str) -> None:
    for i, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            both = "\n".join(f"  both:     {json.dumps(event)}" for event in expected[max(0, i - 2) : i])
            differs = f"  expected: {json.dumps(one)}\n  found:    {json.dumps(other)}"
            raise NotTheSame(f"Event {i} of {what} differs.\n{both}\n{differs}")
    if len(expected) != len(found):
        longer, name = (expected, "is missing in") if len(expected) > len(found) else (found, "is too many in")
        event = json.dumps(longer[min(len(expected), len(found))])
        raise NotTheSame(f"Event {min(len(expected), len(found))} {name} {what}: {event}")

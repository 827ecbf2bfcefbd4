"""Compare the traces of two training runs event by event. One of the runs consists of several processes.

`Recorder` in train.py writes the trace: each batch as a digest of its contents, each loss and each logged value with
all its bits, each validation run, and at the end the weights, the optimizer states and the generators' next draws.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Place = tuple[int, int]  # epoch, batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """The events of one process of a run.

    Args:
        seed: Seed of its generators at the start.
        seconds: Time from its start to its end.
        events: Its trace, without the resume event.
        resume: The place where it continued, from `FaultTolerance.resume_report`; ``None`` if it began from the
            beginning.
        autosave: The place of the newest autosave that it left; ``None`` if it left none.
    """

    seed: int
    seconds: float
    events: Sequence[Event]
    resume: Event | None
    autosave: Place | None

    @property
    def start(self) -> Place:
        return place(self.resume) if self.resume else (0, 0)

    @property
    def last(self) -> Place:
        return place(self.of("batch")[-1])

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["event"] == kind]


def read_process(trace: Path, *, seed: int, seconds: float) -> Process:
    """Read the events of a process from its trace and from the autosaves beside it."""
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    resumes = [event for event in events if event["event"] == "resumed"]
    autosaves = sorted(path.name for path in trace.parent.rglob("autosave-*.ckpt"))
    numbers = [int(number) for number in re.findall(r"=(\d+)", autosaves[-1])] if autosaves else []
    return Process(
        seed=seed,
        seconds=seconds,
        events=[event for event in events if event["event"] != "resumed"],
        resume=resumes[0] if resumes else None,
        autosave=(numbers[0], numbers[1]) if numbers else None,
    )


def place(event: Event) -> Place:
    return event["epoch"], event["batch"]


def loss(event: Event) -> float:
    return float.fromhex(event["loss"])


def before(process: Process, start: Place) -> list[Event]:
    """Return the events of a process before the batch at `start`, from which the next process continued."""
    for i, event in enumerate(process.events):
        if event["event"] == "batch" and place(event) == start:
            return list(process.events[:i])
    return list(process.events)


def joined(processes: Sequence[Process]) -> list[Event]:
    """Return the events of each process up to where the next one continued, and all events of the last process."""
    events: list[Event] = []
    for process, following in pairwise(processes):
        events += before(process, following.start)
    return [*events, *processes[-1].events]


def run_twice(process: Process, following: Process) -> list[Event]:
    """Return the steps of a killed process that the next one had to do again."""
    lost = process.events[len(before(process, following.start)) :]
    return [event for event in lost if event["event"] == "step"]


def differences(expected: Sequence[Event], found: Sequence[Event]) -> list[str]:
    """Return each event that differs, with both values."""
    pairs = enumerate(zip_longest(expected, found))
    return [f"event {i}: {json.dumps(one)} against {json.dumps(other)}" for i, (one, other) in pairs if one != other]


def digest(values: Any) -> str:
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=8).hexdigest()


def summary(events: Sequence[Event]) -> dict[str, str]:
    """Return the number and a digest of the events of each kind that is compared."""
    kinds = {
        "batches, all samples": [event for event in events if event["event"] == "batch"],
        "losses": [event["loss"] for event in events if event["event"] == "step"],
        "logged values": [event for event in events if event["event"] == "log"],
        "validation batches": [event for event in events if event["event"] == "validation batch"],
        "validation results": [event for event in events if event["event"] == "validated"],
    }
    result = {name: f"{len(values):>4}  {digest(values)}" for name, values in kinds.items()}
    results = kinds["validation results"][-1]["metrics"] if kinds["validation results"] else {}
    for name in ("val_loss", "val_accuracy"):
        result[f"last {name}"] = f"{'':>4}  {float.fromhex(results.get(name, 'nan')):.9g}"
    end = events[-1] if events[-1]["event"] == "end" else {}
    result["weights at the end"] = f"{'':>4}  {end.get('weights')}"
    result["optimizer state at the end"] = f"{'':>4}  {end.get('optimizers')}"
    result["next random draws at the end"] = f"{'':>4}  {digest(end.get('draws'))}"
    return result

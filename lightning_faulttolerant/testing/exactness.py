"""Test your own model and loaders: an interrupted and resumed run equals an uninterrupted one, event by event.

Needs a system that can fork (not Windows). Each run is one process per rank, and all of them start from this process,
which has imported everything.

The events of a run on each of its ranks, and the comparison of two runs.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_faulttolerant.checkpoint.ranks import packed_state
from lightning_faulttolerant.checkpoint.saving import atomic_torch_save
from lightning_faulttolerant.checkpoint.schema import RANKS, STATES
from lightning_faulttolerant.checkpoint.verify import load_file
from lightning_faulttolerant.records.ledger import AT_VALIDATION
from lightning_faulttolerant.records.requests import skips_requested
from lightning_faulttolerant.records.runs import VARIABLE as REGISTRY_VARIABLE
from lightning_faulttolerant.state.objects.saved import names_in
from lightning_faulttolerant.testing.processes import fork_and_run, run_ranks
from lightning_faulttolerant.trainer.callback import FaultTolerance
from lightning_faulttolerant.trainer.process import OBJECTS, leave_out
from lightning_faulttolerant.trainer.recorder import KillAt, Recorder, record_end

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
            listed = "\n".join(f"  rank {rank}: {json.dumps(place)}" for rank, place in places.items())
            raise NotTheSame(f"The ranks continued in different places.\n{listed}\n{self.output}")
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
    name = "validation" if resumed["where"] in AT_VALIDATION else "batch"
    place = (resumed["epoch"], resumed["batch"])
    kinds = ("batch", "left out") if name == "batch" else (name,)
    found = (i for i, e in enumerate(events) if e["event"] in kinds and (e["epoch"], e["batch"]) == place)
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


__all__ = ["Interruption", "KillAt", "NotTheSame", "Runs", "assert_resumes_exactly", "fork_and_run", "leave_out_part"]

# Takes callbacks and a directory, returns the Trainer: this module does not import Lightning.
Fit = Callable[[list[Any], Path], Any]

_SEED = 1
_OTHER_SEED = 20_000
# How much of a rank's output is shown when a run fails: enough for the stacks of a process and its workers.
_PRINTED_CHARACTERS = 12_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Interruption:
    """The cost of one interruption; with several ranks, the cost for rank 0.

    Args:
        exit_code: Of the interrupted process, or with several ranks of the first one that failed; negative for a signal
            that killed it.
        epoch: The epoch in which the next process continued.
        batch: The batch of the epoch at which it continued.
        num_batches_twice: How many training batches ran both before and after the interruption.
        num_batches_kept: How many ran before and not again.
        num_validation_batches_twice: How many validation batches ran both before and after it.
    """

    exit_code: int
    epoch: int
    batch: int
    num_batches_twice: int
    num_batches_kept: int
    num_validation_batches_twice: int = 0


def assert_resumes_exactly(
    fit: Fit,
    faults: Sequence[object],
    *,
    options: Mapping[str, object] | None = None,
    directory: Path | None = None,
    may_start_over: bool = False,
    timeout_seconds: float = 120.0,
    num_ranks: int = 1,
) -> list[Interruption]:
    """Run `fit` uninterrupted, then with `faults`, and compare the two.

    The comparison covers the contents of every batch, losses, learning rates, every value that a logger receives with
    its step, every validation batch and result, the final weights and optimizer states, the next draw of each global
    generator, and the states of the generators that the module and the loaders hold. The uninterrupted run has no
    callback, except with ``worker_rng="per_sample"`` or ``PL_FAULT_TOLERANT_SKIP_BATCHES``: only the callback seeds
    samples, and leaves batches out.

    With several ranks each run is one process per rank, as under torchrun. Each rank is compared with the same rank of
    the uninterrupted run, and all ranks must continue at the same place.

    Args:
        fit: Takes callbacks and a directory; builds data, model and ``Trainer(callbacks=..., default_root_dir=...)``,
            calls ``fit`` and returns the trainer. It must not seed: each process gets a different seed before the call,
            except the first, which has the seed of the uninterrupted run. With several ranks each rank calls it, and
            its Trainer has ``accelerator="cpu", devices=num_ranks, strategy="ddp"``.
        faults: One for each interrupted run: a callback, such as `KillAt`, or several. Each rank gets them.
        options: Arguments of `FaultTolerance`.
        directory: Where the runs are kept; a temporary one by default.
        may_start_over: Whether a process may start from the beginning.
        timeout_seconds: For each run.
        num_ranks: The number of processes that train together.

    Returns:
        The cost of each interruption.

    Raises:
        NotTheSame: If the runs differ. It names the first event that differs.

    Example::

        def fit(callbacks, directory):
            trainer = Trainer(callbacks=callbacks, default_root_dir=directory, max_epochs=2)
            trainer.fit(MyModel(), my_loader())
            return trainer

        assert_resumes_exactly(fit, [KillAt(5), KillAt(3)], options={"every_n_train_steps": 1})
    """
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        root = Path(temporary)
        runs = Runs(fit, root, dict(options or {}), timeout_seconds, num_ranks=num_ranks)
        needs_callback = (options or {}).get("worker_rng") == "per_sample" or bool(skips_requested())
        expected = _uninterrupted(runs, with_callback=needs_callback)
        interrupted = _Interrupted(runs, expected, may_start_over=may_start_over)
        return interrupted.run(faults)


def _uninterrupted(runs: Runs, *, with_callback: bool) -> list[list[Event]]:
    """Return the events of each rank in an uninterrupted run; the callback must change none of them."""
    reference = runs.uninterrupted("uninterrupted", with_callback=with_callback)
    if reference.exit_code != 0:
        raise NotTheSame(f"The uninterrupted run ended with exit code {reference.exit_code}.\n{reference.output}")
    transparent = runs.uninterrupted("with-callback", with_callback=True)
    if transparent.exit_code != 0:
        raise NotTheSame(f"With the callback it ended with exit code {transparent.exit_code}.\n{transparent.output}")
    expected = [trace.events for trace in reference.traces]
    compare(expected, [trace.events for trace in transparent.traces], "the uninterrupted run with the callback")
    return expected


class Runs:
    """Starts runs that all begin alike.

    Args:
        fit: As for `assert_resumes_exactly`.
        root: The directory for their directories and traces.
        options: Arguments of `FaultTolerance`.
        timeout_seconds: For each run.
        num_ranks: The number of processes that train together.
    """

    def __init__(
        self, fit: Fit, root: Path, options: dict[str, object], timeout_seconds: float, *, num_ranks: int = 1
    ) -> None:
        self.fit = fit
        self.options = options
        self.num_ranks = num_ranks
        self._root = root
        self._timeout_seconds = timeout_seconds
        self._num_started = 0

    def uninterrupted(self, name: str, *, with_callback: bool) -> RunOutcome:
        """Run `fit` in the new directory `name` without interruption, and wait until it finishes.

        The run depends only on `fit`, `num_ranks`, and, with the callback, its `options`.
        """
        return self.start(name, [], seed=_SEED, with_callback=with_callback)

    def start(
        self, name: str, faults: Sequence[object], *, seed: int, with_callback: bool, options: Mapping[str, object] = {}
    ) -> RunOutcome:
        """Run `fit` in the directory `name`, and wait until it finishes."""
        self._num_started += 1
        directory = self._root / name
        directory.mkdir(exist_ok=True)
        ranks = range(self.num_ranks)
        paths = [self._root / f"{name}-{self._num_started}-rank-{rank}.jsonl" for rank in ranks]
        outputs = [path.with_suffix(".txt") for path in paths]
        kept = {**self.options, **options} if with_callback else None
        try:
            exit_code = run_ranks(
                lambda rank: self._run(paths[rank], directory, faults, kept),
                outputs=outputs,
                seed=seed,
                timeout_seconds=self._timeout_seconds,
            )
        except TimeoutError as error:
            raise NotTheSame(f"{error}\n{_printed(outputs)}") from error
        return RunOutcome(exit_code=exit_code, traces=[read_trace(path) for path in paths], output=_printed(outputs))

    def _run(self, path: Path, directory: Path, faults: Sequence[object], options: dict[str, Any] | None) -> None:
        # In the registry of the working directory, this run would find the others, and stay there when it is killed.
        os.environ[REGISTRY_VARIABLE] = str(directory / "registry")
        recorder = Recorder(path)
        leave_out(faults)
        callbacks: list[object] = [] if options is None else [FaultTolerance(**options)]
        trainer = self.fit([*callbacks, recorder, *faults], directory)
        if self.num_ranks > 1 and trainer.world_size != self.num_ranks:
            raise ValueError(
                f"The Trainer of `fit` has {trainer.world_size} ranks, but num_ranks is {self.num_ranks}. The "
                f'processes would not train together. Pass it devices={self.num_ranks}, strategy="ddp".'
            )
        record_end(recorder, trainer, _next_draws())


def _printed(outputs: list[Path]) -> str:
    """Return the end of each rank's output."""
    printed = [path.read_text()[-_PRINTED_CHARACTERS:] if path.exists() else "" for path in outputs]
    if len(printed) == 1:
        return printed[0]
    return "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in enumerate(printed))


class _Interrupted:
    """One run that is interrupted again and again, with the events of all its processes together."""

    def __init__(self, runs: Runs, reference: list[list[Event]], *, may_start_over: bool) -> None:
        self._runs = runs
        self._reference = reference
        self._may_start_over = may_start_over
        self._events: list[list[Event]] = [[] for _ in reference]
        self._costs: list[Interruption] = []
        self._last: RunOutcome | None = None

    def run(self, faults: Sequence[object]) -> list[Interruption]:
        """Run it with one fault after the other, then to the end."""
        for fault in faults:
            self.interrupt(fault)
        return self.finish()

    def interrupt(self, fault: object) -> None:
        faults = list(fault) if isinstance(fault, Sequence) else [fault]
        outcome = self._start(faults)
        if outcome.exit_code == 0:
            raise NotTheSame(f"A run finished, although it should have been interrupted.\n{outcome.output}")

    def finish(self) -> list[Interruption]:
        outcome = self._start([])
        if outcome.exit_code != 0:
            raise NotTheSame(f"The last run ended with exit code {outcome.exit_code}.\n{outcome.output}")
        compare(self._reference, self._events, "the interrupted run")
        return self._costs

    def _start(self, faults: list[object]) -> RunOutcome:
        seed = _SEED if self._last is None else _OTHER_SEED + len(self._costs)
        outcome = self._runs.start("interrupted", faults, seed=seed, with_callback=True)
        if self._last is not None:
            self._join(self._last, outcome)
        for events, trace in zip(self._events, outcome.traces, strict=True):
            events += trace.events
        self._last = outcome
        return outcome

    def _join(self, last: RunOutcome, outcome: RunOutcome) -> None:
        resumed = outcome.resumed
        if resumed is None and (outcome.exit_code != 0 or not self._may_start_over):
            raise NotTheSame(
                f"A restart began from the beginning, or ended before it could continue.\n{outcome.output}"
            )
        epoch, batch = (0, 0) if resumed is None else (resumed["epoch"], resumed["batch"])
        if (epoch, batch) == (0, 0) and not self._may_start_over:
            raise NotTheSame("A restart began from the beginning.")
        kept = [before(events, resumed) for events in self._events]
        again = self._events[0][len(kept[0]) :]
        self._events = kept
        self._costs.append(
            Interruption(
                exit_code=last.exit_code,
                epoch=epoch,
                batch=batch,
                num_batches_twice=_num_batches(again),
                num_batches_kept=_num_batches(kept[0]),
                num_validation_batches_twice=_num_batches(again, "validation batch"),
            )
        )


def _num_batches(events: list[Event], kind: str = "batch") -> int:
    return sum(event["event"] == kind for event in events)


def leave_out_part(path: Path, part: str) -> set[str]:
    """Remove a part of the state from an autosave: a negative control for a test of resuming.

    Args:
        path: The autosave.
        part: Its name, as ``lightning-faulttolerant inspect`` shows it.

    Returns:
        The attributes of the user's objects that are lost with it.
    """
    checkpoint = load_file(path)
    own = checkpoint["lightning_faulttolerant"]
    own[RANKS] = ranks = [packed_state(own, rank) for rank in range(len(own[RANKS]))]
    own.pop(STATES, None)
    found = names_in(ranks[0][OBJECTS]) if part == OBJECTS and ranks[0].get(OBJECTS) else set()
    for rank in ranks:
        for held in (rank, rank.get("own", {})):  # for other ranks it holds their difference from rank 0
            held.pop(part, None)
    atomic_torch_save(checkpoint, path)
    return found


def _next_draws() -> dict[str, str]:
    draws = {"python": [random.gauss(0, 1).hex(), random.random().hex()], "torch": torch.rand(2).tolist()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        draws["numpy"] = [float(numpy.random.randn()).hex(), float(numpy.random.rand()).hex()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        draws["cuda"] = torch.rand(2, device="cuda").tolist()
    return {name: str(values) for name, values in draws.items()}

"""Run a drill from its first process to its verdict.

It names the requested strikes that the script never reaches.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import final

from lightning_faulttolerant.cli.drill import causes, running, verdicts
from lightning_faulttolerant.cli.drill.comparison import Follower, number_of
from lightning_faulttolerant.cli.drill.ledgers import FIT, BatchNumbers, Event, RankOfRun
from lightning_faulttolerant.cli.drill.process import tail_of
from lightning_faulttolerant.cli.drill.progress import Progress
from lightning_faulttolerant.cli.drill.result import (
    INTERRUPTED,
    NOT_JUDGED,
    REPEATED,
    UNINTERRUPTED,
    DrillResult,
    DrillVerdict,
    Point,
    RunOfDrill,
    Strike,
)
from lightning_faulttolerant.cli.drill.running import Ran, Runner
from lightning_faulttolerant.cli.drill.settings import DrillSettings
from lightning_faulttolerant.cli.drill.strikes import counted_batches, stretches_of, strikes_of
from lightning_faulttolerant.cli.page.numbers import plural
from lightning_faulttolerant.records import ledger
from lightning_faulttolerant.records.history import DEFAULT_FOLDER

_NUM_LAST_WORDS = 20


@final
class Drill:
    """One drill.

    Args:
        settings: The settings of the drill.
        progress: Shows the progress of the drill.
        environment: Environment variables of the script.
    """

    def __init__(
        self, settings: DrillSettings, progress: Progress, *, environment: Mapping[str, str] = os.environ
    ) -> None:
        self.progress = progress
        self._settings = settings
        self._runner = Runner(settings, progress, environment=environment)
        self._began = time.time()
        self._runs: dict[str, RunOfDrill] = {}
        self._versions: dict[str, str] = {}
        self._strikes: tuple[Strike, ...] = ()
        self._num_wanted = len(set(settings.at)) or settings.num_strikes

    @property
    def failed_output(self) -> Path | None:
        """The output of the last process, if it failed by itself."""
        last = self._runner.ran[-1] if self._runner.ran else None
        return last.processes[-1].output if last is not None and last.outcome == running.FAILED else None

    def run(self) -> DrillResult:
        """Run the drill.

        Raises:
            KeyboardInterrupt: If the user interrupts the drill; nothing is left running.
        """
        try:
            verdict = self._run()
        finally:
            self._runner.close()
            self._remove_autosaves()
        return DrillResult(
            command=self._settings.command,
            verdict=verdict,
            strikes=self._strikes,
            num_wanted=self._num_wanted,
            kind=self._settings.kind,
            seed=self._settings.seed,
            began=self._began,
            seconds=time.time() - self._began,
            directory=str(self._settings.directory),
            versions=self._versions,
            uninterrupted=self._runs.get(UNINTERRUPTED),
            repeated=self._runs.get(REPEATED),
            interrupted=self._runs.get(INTERRUPTED),
            last_words=() if self.failed_output is None else tuple(tail_of(self.failed_output, _NUM_LAST_WORDS)),
        )

    def _run(self) -> DrillVerdict:
        ran, expected, verdict = self._uninterrupted(UNINTERRUPTED, None)
        if verdict is not None:
            return verdict
        steps = _common_steps(expected)
        numbers = BatchNumbers(steps)
        verdict = never_reached(self._settings, numbers)
        if verdict is not None:
            return verdict
        if self._settings.is_checked:
            ran, found, verdict = self._uninterrupted(REPEATED, numbers, self._follower(expected))
            verdict = verdict or verdicts.of_repeated(expected, found, ran, self._settings)
            if verdict is not None:
                return verdict
        ran = self._runner.run_interrupted(INTERRUPTED, numbers, _gaps(steps), self._follower(expected))
        self._keep(ran, ran.ranks())
        self._strikes = strikes_of(stretches_of(ran.processes, numbers), self._settings.kind)
        return verdicts.of_interrupted(expected, ran, self._strikes, self._settings, num_wanted=self._num_wanted)

    def _follower(self, expected: Sequence[RankOfRun]) -> Follower:
        return Follower(expected[0], self._settings.ignored)

    def _uninterrupted(
        self, name: str, numbers: BatchNumbers | None, follower: Follower | None = None
    ) -> tuple[Ran, list[RankOfRun], DrillVerdict | None]:
        ran = self._runner.run_uninterrupted(name, numbers, follower)
        ranks = ran.ranks()
        self._keep(ran, ranks)
        return ran, ranks, verdicts.of_uninterrupted(ran, ranks)

    def _keep(self, ran: Ran, ranks: Sequence[RankOfRun]) -> None:
        if not ranks:
            return
        first = ranks[0]
        if not self._versions and first.begun:
            surroundings = first.begun[0][1].get("surroundings") or {}
            own = {"lightning-faulttolerant": metadata.version("lightning-faulttolerant")}
            self._versions = {**own, **{name: str(value) for name, value in surroundings.items() if value is not None}}
        self._runs[ran.name] = RunOfDrill(
            name=ran.name,
            curve=_curve(first.batches),
            num_processes=len(ran.processes),
            num_ranks=len(ranks),
            num_fits=sum(function == FIT for function, _ in first.calls.values()),
            num_validations=_count(first.events, ledger.VALIDATED),
            num_evaluated=_count(first.events, ledger.EVALUATED),
            num_logs=_count(first.events, ledger.LOG),
            num_autosaves=len(first.autosaves),
            seconds=ran.seconds,
            is_complete=ran.outcome == running.ENDED,
        )

    def _remove_autosaves(self) -> None:
        """Remove everything that the runs left in the script's autosave directory."""
        begin = self._settings.run_id("")
        processes = [process for ran in self._runner.ran for process in ran.processes]
        paths = {path for process in processes for path in _autosave_paths(process.lines().values())}
        own = (parent for path in paths for parent in Path(path).parents if parent.name.startswith(begin))
        # A process that failed before its first autosave reported no path, but may have left its lock and history.
        for directory in {Path(DEFAULT_FOLDER).absolute(), *(each.parent for each in own)}:
            left = list(directory.glob(f"{begin}*"))
            for each in left:
                shutil.rmtree(each, ignore_errors=True)
            if left and directory.name == DEFAULT_FOLDER:
                with contextlib.suppress(OSError):  # it contains the user's runs
                    directory.rmdir()


def _autosave_paths(ranks: Iterable[Iterable[Mapping[str, object]]]) -> set[str]:
    lines = (line for rank in ranks for line in rank)
    return {str(line.get("path")) for line in lines if line.get("event") == ledger.AUTOSAVE}


def _common_steps(ranks: Sequence[RankOfRun]) -> list[Event]:
    """Return the batches of rank 0 that all ranks have: all of them save together before some of these."""
    others = [{event.place for event in run.steps} for run in ranks[1:]]
    return [event for event in ranks[0].steps if all(event.place in places for places in others)]


def _gaps(batches: Sequence[Event]) -> list[float]:
    """Return the seconds between the end of the previous batch and the end of each batch; 0 for the first batch."""
    times = [event.time for event in batches]
    return [0.0, *(max(after - before, 0.0) for before, after in itertools.pairwise(times))]


def _curve(batches: Sequence[Event]) -> tuple[Point, ...]:
    return tuple(
        Point(
            number=number,
            fit=event.fit,
            epoch=event.place[1],
            batch=event.place[2] - 1,
            loss=number_of(event.values.get("loss")),
            process=event.process,
        )
        for number, event in enumerate(batches)
    )


def _count(events: Sequence[Event], kind: str) -> int:
    return sum(event.kind == kind for event in events)


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

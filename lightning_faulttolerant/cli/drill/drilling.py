"""Run a drill from its first process to its verdict.

The verdict says whether its two runs are the same. If they differ or can't be judged, it gives the reason. If an error
of this package ended the script, the verdict quotes it from the output. It names the requested strikes that the script
never reaches.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import final

from lightning_faulttolerant.cli.drill import causes, result, running
from lightning_faulttolerant.cli.drill.comparison import (
    Follower,
    Mismatch,
    difference_of,
    first_mismatch,
    number_of,
    without,
)
from lightning_faulttolerant.cli.drill.ledgers import FIT, BatchNumbers, Event, RankOfRun, Resumption, place_before
from lightning_faulttolerant.cli.drill.process import EXCEPTION, DrillProcess, DrillSettings, tail_of
from lightning_faulttolerant.cli.drill.result import (
    INTERRUPTED,
    NOT_JUDGED,
    REPEATED,
    UNINTERRUPTED,
    Cause,
    DrillResult,
    DrillVerdict,
    Point,
    Progress,
    RunOfDrill,
    Strike,
)
from lightning_faulttolerant.cli.drill.running import Ran, Runner
from lightning_faulttolerant.cli.drill.strikes import counted_batches, stretches_of, strikes_of
from lightning_faulttolerant.cli.text import plural
from lightning_faulttolerant.records import ledger
from lightning_faulttolerant.records.history import DEFAULT_FOLDER

_NUM_LINES = 60
_CHECK = "--check first runs the script uninterrupted twice and shows whether it is deterministic by itself."
_NOT_HANDED_ON = (
    "SIGTERM ended the command immediately, and its training was killed before it could save: a shell does not pass"
    " the signal on. `exec python train.py` as its script's last line gives the signal to the training, here and on"
    " your machines."
)


def failed(process: DrillProcess, *, run: str, is_restart: bool) -> DrillVerdict:
    """Judge a run in which a process failed by itself.

    Args:
        process: The process that failed.
        run: Name of its run.
        is_restart: Whether the run was struck before. If so, the script can run, but it can't continue.
    """
    code = process.exit_code
    message = refusal_in(process.tail(_NUM_LINES))
    how = f"ended with exit code {code}" if code is None or code >= 0 else f"was ended by signal {-code}"
    if message is not None:
        cause = causes.refusal(message, is_restart=is_restart)
        text = "lightning_faulttolerant refuses this script."
        text = "lightning_faulttolerant refused to resume the run." if is_restart else text
    elif is_restart:
        cause, text = causes.RESTART, f"A restart {how}; the uninterrupted run finished."
    elif run != result.UNINTERRUPTED:
        cause, text = causes.SECOND_RUN, f"The {run} run {how} before any interruption."
    else:
        cause, text = causes.SCRIPT, f"The script {how}."
    word = result.NOT_RESUMED if is_restart else result.NOT_JUDGED
    return DrillVerdict(word=word, text=text, cause=causes.with_output(cause, process.output))


def of_uninterrupted(ran: Ran, ranks: Sequence[RankOfRun]) -> DrillVerdict | None:
    """Judge an uninterrupted run by itself; return None if other runs can be compared with it.

    Args:
        ran: The run.
        ranks: Its ranks.
    """
    if ran.outcome == running.FAILED:
        return failed(ran.processes[-1], run=ran.name, is_restart=False)
    verdict = _of_outcome(ran)
    if verdict is not None:
        return verdict
    if ran.outcome == running.DIFFERENT:
        return None
    if not ranks or not ranks[0].begun:
        return _not_judged("The run wrote no ledger.", causes.NO_LEDGER)
    if not ranks[0].steps:
        return _not_judged("The script trained and evaluated no batch.", causes.NO_LEDGER)
    if ranks[0].is_restarted:
        return _not_judged("More than one process was rank 0 of the same training.", causes.SEVERAL_TRAININGS)
    return None


def _of_outcome(ran: Ran) -> DrillVerdict | None:
    if ran.outcome not in causes.OF_OUTCOMES:
        return None
    text, cause = causes.OF_OUTCOMES[ran.outcome]
    has_output = ran.outcome != running.RESUMED  # the drill ended that process itself
    cause = causes.with_output(cause, ran.processes[-1].output) if has_output else cause
    return _not_judged(text.format(run=ran.name), cause)


def of_repeated(
    expected: Sequence[RankOfRun], found: Sequence[RankOfRun], ran: Ran, settings: DrillSettings
) -> DrillVerdict | None:
    """Judge whether the script is deterministic by itself; return None if it is.

    Args:
        expected: The ranks of an uninterrupted run.
        found: The ranks of a second uninterrupted run.
        ran: The second run.
        settings: Settings of the drill.
    """
    is_ended = ran.outcome == running.DIFFERENT
    mismatch = first_mismatch(expected, found, ignored=settings.ignored, may_end_early=is_ended)
    return _not_deterministic(mismatch, expected, found) if mismatch is not None else None


def of_interrupted(
    expected: Sequence[RankOfRun],
    ran: Ran,
    strikes: Sequence[Strike],
    settings: DrillSettings,
    *,
    num_wanted: int,
) -> DrillVerdict:
    """Judge the interrupted run.

    Args:
        expected: The ranks of the uninterrupted run.
        ran: The interrupted run.
        strikes: The strikes that count.
        settings: Settings of the drill.
        num_wanted: Number of requested strikes.
    """
    if ran.outcome == running.FAILED:
        return failed(ran.processes[-1], run=ran.name, is_restart=ran.is_restarted)
    if ran.outcome == running.BEGAN_AGAIN:
        return DrillVerdict(word=result.NOT_RESUMED, text="A restart did not resume.", cause=causes.NOT_RESUMED)
    verdict = _of_outcome(ran)
    if verdict is not None:
        return verdict
    mismatch, found = _first_of_stages(expected, ran, settings)
    if mismatch is not None:
        return _of_mismatch(mismatch, expected, found, ran, settings)
    same = f"{_what_is_same(expected, settings.ignored)} are bit for bit those of the uninterrupted run"
    if not strikes:
        is_exception = settings.kind == EXCEPTION
        cause = causes.TOO_FEW_BEFORE_EXCEPTION if is_exception else causes.TOO_FEW_AUTOSAVES
        if not any(run.autosaves for run in (*expected, *found)):
            cause = replace(causes.NO_AUTOSAVES, advice=(*causes.NO_AUTOSAVES.advice, *cause.advice))
        return _not_judged(f"No strike came. Without one, {same}.", cause)
    notes = [f"Not compared (--ignore): {', '.join(settings.ignored)}."] if settings.ignored else []
    others = _other_surroundings(expected, found, len(ran.processes))
    if others:
        notes.append(f"Equal, although the processes ran in different environments: {others}.")
    if any(strike.exit_code == -signal.SIGTERM for strike in strikes):
        notes.append(_NOT_HANDED_ON)
    if _inexact(found, len(ran.processes)):
        notes.append("Equal, although a restart could not restore everything exactly.")
    times = "once" if len(strikes) == 1 else f"{len(strikes)} times"
    if len(strikes) < num_wanted:
        times += f", by {len(strikes)} of {plural(num_wanted, 'strike')}"
    return DrillVerdict(word=result.EXACT, text=f"Interrupted {times}, and {same}.", notes=tuple(notes))


def _first_of_stages(
    expected: Sequence[RankOfRun], ran: Ran, settings: DrillSettings
) -> tuple[Mismatch | None, list[RankOfRun]]:
    """Return the first mismatch, also among batches that were repeated after a strike, and the ranks at the end."""
    mismatches = []
    ranks: list[RankOfRun] = []
    for number, ranks in enumerate(ran.stages(), 1):
        may_end_early = number < len(ran.processes) or ran.outcome == running.DIFFERENT or ran.is_cut
        mismatches.append(first_mismatch(expected, ranks, ignored=settings.ignored, may_end_early=may_end_early))
    found = [mismatch for mismatch in mismatches if mismatch is not None]
    return min(found, key=lambda mismatch: mismatch.num_steps, default=None), ranks


def _of_mismatch(
    mismatch: Mismatch, expected: Sequence[RankOfRun], found: Sequence[RankOfRun], ran: Ran, settings: DrillSettings
) -> DrillVerdict:
    is_older = not ran.is_restarted if mismatch.found is None else not mismatch.found.is_restarted
    if is_older and _was_caught(mismatch, expected, ran):
        return _not_judged("The script continued after the drill's exception.", causes.CAUGHT)
    if is_older:
        verdict = _not_deterministic(mismatch, expected, found)
        note = "The difference comes before the first strike, so no restart caused it."
        return replace(verdict, notes=(note, *verdict.notes))
    difference = difference_of(mismatch)
    process = mismatch.process if mismatch.process >= 0 else len(ran.processes) - 1
    by_events = causes.cause_of(mismatch)
    others = _other_surroundings(expected, found, process)
    inexact = _inexact(found, process)
    notes = []
    if others:
        cause = causes.surroundings(others)
        notes.append(f"Otherwise: {by_events.part}. {by_events.text}")
    elif inexact:
        reasons = list(dict.fromkeys(reason for resumption in inexact for reason in resumption.not_exact))
        cause = causes.not_exact(reasons, str(ran.processes[inexact[0].process].output))
    else:
        cause = by_events
    if not settings.is_checked:
        notes.append(_CHECK)
    return DrillVerdict(
        word=result.DIFFERS,
        text=f"The interrupted run differs from the uninterrupted one at {difference.place}.",
        cause=cause,
        difference=difference,
        notes=tuple(notes),
    )


def _was_caught(mismatch: Mismatch, expected: Sequence[RankOfRun], ran: Ran) -> bool:
    """Return whether the mismatch is from a process that trained on after an exception that should have ended it."""
    faults = ran.processes[0].plan.faults
    if not faults:
        return False
    numbers = BatchNumbers(expected[0].steps)
    return mismatch.num_steps >= numbers.at(place_before(faults[0].batch))


def _not_deterministic(mismatch: Mismatch, expected: Sequence[RankOfRun], found: Sequence[RankOfRun]) -> DrillVerdict:
    difference = difference_of(mismatch)
    others = _other_surroundings(expected, found, 0)
    cause = causes.surroundings(others) if others else causes.not_deterministic(mismatch, difference.place)
    text = f"The script is not deterministic by itself: two uninterrupted runs differ at {difference.place}."
    return _not_judged(text, cause, difference=difference)


def _other_surroundings(expected: Sequence[RankOfRun], found: Sequence[RankOfRun], process: int) -> str:
    """Return the surroundings in which processes of the second run, up to this one, differ from the first run."""
    begun = {run.rank: run.begun for run in found}
    pairs = [
        (one.begun[0][1].get("surroundings") or {}, line.get("surroundings") or {})
        for one in expected
        for number, line in begun.get(one.rank, ())
        if one.begun and number <= process
    ]
    texts = [
        f"{name.replace('_', ' ')} {first.get(name)} and then {second.get(name)}"
        for first, second in pairs
        for name in {**first, **second}
        if first.get(name) != second.get(name)
    ]
    return ", ".join(dict.fromkeys(texts))


def _inexact(ranks: Sequence[RankOfRun], process: int) -> list[Resumption]:
    """Return the resumptions, up to this process, that could not restore everything."""
    resumed = [resumption for run in ranks for resumption in run.resumed]
    return [resumption for resumption in resumed if resumption.process <= process and not resumption.is_exact]


def _what_is_same(ranks: Sequence[RankOfRun], ignored: Sequence[str]) -> str:
    events = without(ranks[0].events, ignored)
    nouns = {ledger.BATCH: "batch", ledger.VALIDATED: "validation run", ledger.EVALUATED: "evaluation batch"}
    numbers = {noun: sum(event.kind == kind for event in events) for kind, noun in nouns.items()}
    numbers["logged value"] = sum(
        len(event.values.get("metrics") or {}) for event in events if event.kind == ledger.LOG
    )
    parts = [plural(number, noun) for noun, number in numbers.items() if number]
    ends = [event.values for event in events if event.kind == ledger.END]
    parts += ["the final weights"] if any("weights" in values for values in ends) else []
    parts += ["everything that evaluations returned"] if any(values.get("returned") for values in ends) else []
    of_ranks = f" on each of {len(ranks)} ranks" if len(ranks) > 1 else ""
    comma = "," if len(parts) > 2 else ""
    if len(parts) == 1:
        return f"{parts[0]}{of_ranks}"
    return f"{', '.join(parts[:-1])}{comma} and {parts[-1]}{of_ranks}"


def _not_judged(text: str, cause: Cause, *, difference: result.Difference | None = None) -> DrillVerdict:
    return DrillVerdict(word=result.NOT_JUDGED, text=text, cause=cause, difference=difference)


# The last line of a traceback names the class with its module. torchrun and Lightning put the rank before it.
_ERROR = re.compile(r"^(?:\[rank\d+\]:\s*)?lightning_faulttolerant\.errors\.(\w+): (.*)$")
_MAX_LINES = 12


def refusal_in(lines: Sequence[str]) -> str | None:
    """Return the class and message of the last such error on one line, or ``None``.

    Args:
        lines: The end of a process's output.
    """
    for number in range(len(lines) - 1, -1, -1):
        match = _ERROR.match(lines[number])
        if match is None or match[1] == "DrillFault":
            continue
        rest = []
        for line in lines[number + 1 : number + _MAX_LINES]:
            if not line.startswith("  "):  # the indented lines list what is not exact
                break
            rest.append(line.strip())
        return f"{match[1]}: {' '.join([match[2], *rest])}"
    return None


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
            verdict = verdict or of_repeated(expected, found, ran, self._settings)
            if verdict is not None:
                return verdict
        ran = self._runner.run_interrupted(INTERRUPTED, numbers, _gaps(steps), self._follower(expected))
        self._keep(ran, ran.ranks())
        self._strikes = strikes_of(stretches_of(ran.processes, numbers), self._settings.kind)
        return of_interrupted(expected, ran, self._strikes, self._settings, num_wanted=self._num_wanted)

    def _follower(self, expected: Sequence[RankOfRun]) -> Follower:
        return Follower(expected[0], self._settings.ignored)

    def _uninterrupted(
        self, name: str, numbers: BatchNumbers | None, follower: Follower | None = None
    ) -> tuple[Ran, list[RankOfRun], DrillVerdict | None]:
        ran = self._runner.run_uninterrupted(name, numbers, follower)
        ranks = ran.ranks()
        self._keep(ran, ranks)
        return ran, ranks, of_uninterrupted(ran, ranks)

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

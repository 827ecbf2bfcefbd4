"""The runs of a drill: an uninterrupted run, and a run that is struck and restarted until it ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from lightning_faulttolerant.cli.drill.comparison import Follower
from lightning_faulttolerant.cli.drill.ledgers import BatchNumbers, Place, RankOfRun, place_before
from lightning_faulttolerant.cli.drill.process import EXCEPTION, KILL, TERM, DrillProcess, DrillSettings
from lightning_faulttolerant.cli.drill.result import Progress, Status, duration
from lightning_faulttolerant.cli.drill.strikes import StrikeMoment, moments_of, moved, plan_of, postponed

ENDED = "ended"
FAILED = "failed"
RESUMED = "resumed"
BEGAN_AGAIN = "began again"
DIFFERENT = "different"
TIMED_OUT = "timed out"
NOT_STOPPED = "not stopped"
_STRUCK = "struck"

_LOOK_EVERY_SECONDS = 0.005
_STOP_WITHIN_SECONDS = 90.0
_SAVE_WITHIN_SECONDS = 2.0
_SILENCE_SECONDS = 120.0
# An exception is raised at its batch, whether or not there is an autosave before it, so a strike may need several
# processes. This is the limit per strike.
_MAX_PROCESSES = 3

Judge = Callable[[DrillProcess], "str | None"]


@dataclass(kw_only=True, slots=True)
class Ran:
    """The outcome and the processes of one run.

    Args:
        name: Name of the run.
        outcome: ``ended``, ``failed`` (the last process failed by itself), ``resumed`` (the first process resumed),
            ``began again`` (a later process began again), ``different`` (it differed before the first strike),
            ``timed out``, ``not stopped`` (it did not stop after a SIGTERM).
        processes: The processes, in order.
        seconds: Time from the first start to the end.
        is_cut: Whether a strike hit when rank 0 had finished: other ranks may not have written everything.
    """

    name: str
    outcome: str = ENDED
    processes: list[DrillProcess] = field(default_factory=list)
    seconds: float = 0.0
    is_cut: bool = False

    def ranks(self) -> list[RankOfRun]:
        """Return the events of each rank over all processes."""
        return list(self.stages())[-1]  # each stage holds the same, growing objects

    def stages(self) -> Iterator[list[RankOfRun]]:
        """Yield the events of each rank for the first process, then for the first two, and so on.

        A batch that was done twice is in an earlier stage as first done, and in a later stage as done again. Use each
        stage before requesting the next one: the same rank objects grow from stage to stage.
        """
        ranks: dict[int, RankOfRun] = {}
        for number, process in enumerate(self.processes):
            for rank, lines in process.lines().items():
                run = ranks.setdefault(rank, RankOfRun(rank=rank))
                for line in lines:
                    run.add(number, line)
            yield [ranks[rank] for rank in sorted(ranks)]

    @property
    def is_restarted(self) -> bool:
        """Whether the run was started more than once, by the drill or by a launcher in its process."""
        return len(self.processes) > 1 or any(process.progress.num_restarts for process in self.processes)


@final
class Runner:
    """Runs the user's command as the drill requires.

    Args:
        settings: Settings of the drill.
        progress: Shows the progress of the runs.
        environment: Environment variables of the drill.
    """

    def __init__(
        self, settings: DrillSettings, progress: Progress, *, environment: Mapping[str, str] = os.environ
    ) -> None:
        self.ran: list[Ran] = []
        """The runs so far."""
        self._settings = settings
        self._progress = progress
        self._environment = environment
        self._current: DrillProcess | None = None
        self._deadline = float("inf")
        self._status = Status(run="")
        self._numbers = BatchNumbers([])
        self._follower: Follower | None = None
        self._told_silence = False

    def close(self) -> None:
        """End the current process, if one is running. May be called twice."""
        if self._current is not None:
            self._current.kill()
            self._current = None

    def run_uninterrupted(
        self, name: str, numbers: BatchNumbers | None = None, follower: Follower | None = None
    ) -> Ran:
        """Run the command once.

        Args:
            name: Name of the run.
            numbers: Batch numbers of an earlier run, to report the progress of this one.
            follower: Ends the run as soon as it differs from the earlier one.
        """
        ran = self._begin(name, numbers, follower)
        process = self._next(ran)
        ran.outcome = self._watch(process, self._has_gone_wrong)
        return self._end(ran)

    def run_interrupted(
        self, name: str, numbers: BatchNumbers, seconds: Sequence[float], follower: Follower | None = None
    ) -> Ran:
        """Run the command, strike it, and run it again until it ends.

        Args:
            name: Name of the run.
            numbers: Batch numbers of the uninterrupted run.
            seconds: Seconds that each batch of the uninterrupted run took.
            follower: Ends the run if it differs from the uninterrupted run before the first strike.
        """
        ran = self._begin(name, numbers, follower)
        moments = moments_of(self._settings, numbers)
        self._status = replace(self._status, num_wanted=len(moments))
        while True:
            moments = self._moments_left(moments, ran)
            coming = moments if self._settings.kind == EXCEPTION else moments[:1]
            process = self._next(ran, coming)
            num_before = self._status.num_strikes
            outcome = self._run_and_strike(process, coming, seconds)
            if outcome != _STRUCK:
                ran.outcome = outcome
                return self._end(ran)
            num_new = self._status.num_strikes - num_before
            moments = moments[num_new:]
            is_early = num_new == process.progress.num_restarts  # the last exception came too early to count
            if self._settings.kind == EXCEPTION and is_early:
                moments = postponed(moments, numbers)

    def _begin(self, name: str, numbers: BatchNumbers | None, follower: Follower | None) -> Ran:
        self._numbers = numbers or BatchNumbers([])
        self._follower = follower
        self._status = Status(run=name, num_batches=self._numbers.num_trained or None)
        self._deadline = time.monotonic() + (self._settings.timeout_seconds or float("inf"))
        ran = Ran(name=name, seconds=time.time())
        self.ran.append(ran)
        return ran

    def _end(self, ran: Ran) -> Ran:
        self.close()
        ran.seconds = time.time() - ran.seconds
        self._progress.end(self._status, ran.seconds)
        return ran

    def _next(self, ran: Ran, coming: Sequence[StrikeMoment] = ()) -> DrillProcess:
        self.close()
        plan = plan_of(self._settings, coming, self._numbers, num_saved=self._num_saved(ran))
        number = len(ran.processes)
        process = DrillProcess(
            self._settings,
            ran.name,
            number,
            environment=self._environment,
            plan=plan,
            follow=self._follower.take if self._follower is not None and number == 0 else None,
        )
        self._current = process  # set before the start, so that an interrupted start leaves nothing running
        self._told_silence = False
        ran.processes.append(process)
        process.start()
        return process

    def _moments_left(self, moments: Sequence[StrikeMoment], ran: Ran) -> list[StrikeMoment]:
        """Return the moments that can still come, in order; none if the next process is to end by itself.

        Each comes after the place where the process continues. The drill does not wait for exceptions: a launcher may
        restart its ranks by itself, so one process gets them all, each at a batch after the one before.
        """
        if len(ran.processes) >= _MAX_PROCESSES * self._status.num_wanted:
            return []
        left = moved(moments, self._numbers, self._num_saved(ran) + 1)
        if self._settings.kind != EXCEPTION:
            return left
        apart: list[StrikeMoment] = []
        while left:
            apart.append(left[0])
            left = moved(left[1:], self._numbers, left[0].batch + 1)
        return apart

    def _num_saved(self, ran: Ran) -> int:
        """Return the number of batches before the place where the next process continues."""
        saved = [self._numbers.at(place) for process in ran.processes for place in process.progress.autosaves]
        return max(saved, default=0)

    def _run_and_strike(self, process: DrillProcess, coming: Sequence[StrikeMoment], seconds: Sequence[float]) -> str:
        if not coming:
            return self._watch(process, self._has_gone_wrong)
        if self._settings.kind == EXCEPTION:
            return self._await_exceptions(process, coming)
        clock = Clock(coming[0], seconds)
        outcome = self._watch(
            process,
            lambda process: self._has_gone_wrong(process) or (_STRUCK if self._is_time(process, clock) else None),
            look_every=_LOOK_EVERY_SECONDS / 5,
        )
        return self._strike(process) if outcome == _STRUCK else outcome

    def _await_exceptions(self, process: DrillProcess, coming: Sequence[StrikeMoment]) -> str:
        outcome = self._watch(process, self._has_gone_wrong)
        num_strikes = self._status.num_strikes + process.progress.num_restarts
        expected = coming[min(process.progress.num_restarts, len(coming) - 1)].batch
        # A script that catches the exception may still end with exit code 0.
        has_stopped = outcome == FAILED or (outcome == ENDED and self._done(process) < len(self._numbers))
        was_asked_for = has_stopped and self._done(process) in (expected, expected + 1)
        if was_asked_for and self._has_progress(process):  # otherwise it came too early and does not count
            num_strikes += 1
        self._status = replace(self._status, num_strikes=num_strikes)
        return _STRUCK if was_asked_for else outcome

    def _strike(self, process: DrillProcess) -> str:
        if self._settings.kind == KILL:
            process.kill()
        else:
            process.terminate()
            deadline = time.monotonic() + _STOP_WITHIN_SECONDS
            while process.exit_code is None:
                if time.monotonic() > deadline:
                    process.kill()
                    return NOT_STOPPED
                self._look(process)
                self._progress.update(self._status)
                time.sleep(_LOOK_EVERY_SECONDS)
            process.kill()
        process.read()
        # The run had finished. A restart of a finished run begins again, as it should.
        if process.progress.last_ended >= self._numbers.num_fits:
            self.ran[-1].is_cut = True
            return ENDED
        # After a SIGTERM, a script may end with exit code 0 in the middle of the run.
        if process.exit_code == 0 and (self._settings.kind == KILL or self._done(process) >= len(self._numbers)):
            return ENDED
        self._status = replace(self._status, num_strikes=self._status.num_strikes + 1)
        return _STRUCK

    def _is_time(self, process: DrillProcess, clock: Clock) -> bool:
        done = self._done(process)
        if done < clock.moment.batch or process.progress.last_ended >= self._numbers.num_fits:
            return False
        # A process that receives SIGTERM saves by itself.
        if self._settings.kind != TERM and not self._has_progress(process):
            self._status = replace(self._status, text="waiting for an autosave before the next strike")
            return False
        self._status = replace(self._status, text="")
        return clock.has_come(done, is_saved=self._settings.kind == TERM or self._is_saved(process))

    def _watch(self, process: DrillProcess, judge: Judge, *, look_every: float = _LOOK_EVERY_SECONDS) -> str:
        """Wait until the process ends or `judge` returns an outcome."""
        while True:
            code = process.exit_code
            self._look(process)
            found = judge(process)
            if found is not None:
                if found != _STRUCK:
                    process.kill()
                return found
            self._progress.update(self._status)
            if code is not None:
                process.kill()
                return ENDED if code == 0 else FAILED
            if time.monotonic() > self._deadline:
                process.kill()
                return TIMED_OUT
            time.sleep(look_every)

    def _look(self, process: DrillProcess) -> None:
        process.read()
        known = len(self._numbers) > 0
        place = process.progress.last_saved
        trained_at = self._numbers.trained_at if known else process.progress.num_trained_before
        saved = self._status.saved if place is None else trained_at(place)
        done, num_evaluated = process.progress.num_trained, process.progress.num_batches - process.progress.num_trained
        if known and (process.progress.resumed or process.progress.num_batches):
            done = trained_at(self._place_of(process))
            num_evaluated = self._done(process) - done
        elif known:  # a fit begins before its ledger shows where it continues
            done, num_evaluated = self._status.saved or 0, self._status.num_evaluated
        self._status = replace(
            self._status,
            done=done,
            num_evaluated=num_evaluated,
            evaluating=process.progress.evaluating,
            num_batches=self._status.num_batches if known else process.progress.num_expected,
            saved=saved,
            batches_per_second=process.progress.batches_per_second,
            is_starting=not process.progress.has_begun,
        )
        silence = time.monotonic() - process.last_line_at
        if silence > _SILENCE_SECONDS and not self._told_silence:
            self._told_silence = True
            self._progress.tell(
                f"No batch for {duration(silence)}. The script's output: {process.output}. Ctrl-C ends the drill."
            )

    def _start_of(self, process: DrillProcess) -> int:
        """Return the number of batches before the place where a process continued."""
        return max((self._numbers.at(resumption.place) for resumption in process.progress.resumed), default=0)

    def _done(self, process: DrillProcess) -> int:
        return self._numbers.at(self._place_of(process))

    def _place_of(self, process: DrillProcess) -> Place:
        """Return the place up to which everything is done."""
        if process.progress.done is not None:
            return process.progress.done
        return max((resumption.place for resumption in process.progress.resumed), default=(0, 0, 0, 0))

    def _is_saved(self, process: DrillProcess) -> bool:
        """Return whether the process has saved where it was told to save before its strike."""
        places = [self._numbers.at(place_before(place)) for place in process.plan.saves]
        saved = 0 if process.progress.last_saved is None else self._numbers.at(process.progress.last_saved)
        return saved >= max(places, default=0)

    def _has_progress(self, process: DrillProcess) -> bool:
        if process.progress.last_saved is None:
            return False
        # The autosave after the last batch is written as the run ends: a restart from it would have nothing left to do.
        return self._start_of(process) < self._numbers.at(process.progress.last_saved) < len(self._numbers)

    def _has_gone_wrong(self, process: DrillProcess) -> str | None:
        """Return the outcome of a process that differs, continued from elsewhere, or began again; else None."""
        if process.number == 0 and process.progress.num_restarts == 0:
            if self._follower is not None and self._follower.is_different:
                return DIFFERENT
            return RESUMED if process.progress.resumed else None
        if not process.progress.num_batches or self._start_of(process):
            return None
        earlier = [place for one in self.ran[-1].processes for place in one.progress.autosaves_before]
        return BEGAN_AGAIN if any(map(self._numbers.at, earlier)) else None


@final
class Clock:
    """A clock that reports when the time of a moment has come, once its batch is reached."""

    def __init__(self, moment: StrikeMoment, seconds: Sequence[float]) -> None:
        self.moment = moment
        self._seconds = seconds
        self._began: tuple[int, float] | None = None

    def has_come(self, done: int, *, is_saved: bool) -> bool:
        """Return whether the time has come after `done` batches: at the latest when the next batch is done.

        Args:
            done: Number of batches that are done.
            is_saved: Whether the autosave before the strike is written. It comes soon, if it can be taken there at all.
        """
        now = time.monotonic()
        if self._began is None:
            self._began = done, now
        gap = self._seconds[min(self._began[0], len(self._seconds) - 1)] if self._seconds else 0.0
        wait = max(self.moment.fraction * gap, 0.0 if is_saved else _SAVE_WITHIN_SECONDS)
        return done > self._began[0] or now >= self._began[1] + wait

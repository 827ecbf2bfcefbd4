"""The verdict on a drill: whether its two runs are the same. If they differ or can't be judged, it gives the reason."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace

from lightning_faulttolerant.cli.drill import causes, result, running
from lightning_faulttolerant.cli.drill.causes import different_surroundings
from lightning_faulttolerant.cli.drill.comparison import Mismatch, difference_of, first_mismatch, without
from lightning_faulttolerant.cli.drill.ledgers import BatchNumbers, RankOfRun, Resumption, place_before
from lightning_faulttolerant.cli.drill.process import DrillProcess
from lightning_faulttolerant.cli.drill.refusal import refusal_in
from lightning_faulttolerant.cli.drill.result import Cause, DrillVerdict, Strike, Value
from lightning_faulttolerant.cli.drill.running import Ran
from lightning_faulttolerant.cli.drill.settings import EXCEPTION, DrillSettings
from lightning_faulttolerant.cli.page.numbers import plural
from lightning_faulttolerant.records import ledger

_NUM_LINES = 60
_CHECK = "--check runs the script uninterrupted twice first, and tells whether it is deterministic by itself."
_NO_LEDGER = Cause(
    part="no ledger",
    text="The script ended well, but no Lightning training or evaluation reported what it did.",
    advice=(
        "The drill follows fit, validate, test, and predict of lightning.pytorch's and pytorch_lightning's Trainer"
        " (>= 2.5.6): a script that has a loop of its own can't be drilled.",
        "FaultTolerance(ledger=...) takes the place of the ledger that the drill asks for: leave it out.",
        "PL_FAULT_TOLERANT_TRAINING=0 switches the callback off. fast_dev_run and barebones do too.",
    ),
)
_OWN_RUN = Cause(
    part="existing run",
    text="A run that should have started from the beginning continued from a checkpoint. It was ended.",
    advice=(
        'fit(ckpt_path="last") and a ckpt_path that is found by the script make it continue from an earlier run.'
        " {run} in the command becomes uninterrupted or interrupted, and can keep their outputs apart:"
        " --output out/{run}.",
    ),
)
_SEVERAL = Cause(
    part="several trainings",
    text="The script trains in several processes of its own that write one ledger, or its launcher has started them"
    " again though no one had interrupted it.",
    advice=(
        "Drill what one of these processes does: a command that trains one fold, one model.",
        "A launcher that starts its ranks again tells why in the output of the script.",
    ),
)
_NOT_RESUMED = Cause(
    part=causes.NOT_RESUMED,
    text="A restart of the same command began from the beginning, though an autosave had been written.",
    advice=(
        "The autosaves lie below default_root_dir, or where FaultTolerance(dirpath=...) says: that must be one place"
        " for all processes of a run, without the time or a process id in it (as Hydra's output directories have).",
        "FaultTolerance(run_id=...) must be the same in each process, and auto_resume must not be False.",
    ),
)

_APART = (
    "What the first run has left (an output directory, a file) may be in its way: {run} in the command becomes"
    " uninterrupted or interrupted, and can keep their outputs apart: --output out/{run}."
)
_NO_AUTOSAVE = Cause(
    part="no autosaves",
    text="No autosave was written at all, so that there was nothing to continue from.",
    advice=("PL_FAULT_TOLERANT_TRAINING=0, in the environment or set by the script, switches them off: unset it.",),
)
_NOT_HANDED_ON = (
    "SIGTERM ended the command at once, and the training in it was killed unsaved: a shell keeps the signal for itself."
    " `exec python train.py` as the last line of its script lets the training have it, here and on your machines."
)
_CAUGHT = Cause(
    part="caught exception",
    text="It caught the exception and trained on in the same process: what it left out, or began again from the"
    " beginning, is not what the uninterrupted run did. A run continues where the same command is run again.",
    advice=(
        "Let the exception end the script, and the same command be run again: that is what the drill does.",
        "--signal KILL leaves the script nothing to catch.",
    ),
)


def failed(process: DrillProcess, *, run: str, is_restart: bool) -> DrillVerdict:
    """Judge a run in which a process failed by itself.

    Args:
        process: The process that failed.
        run: Name of its run.
        is_restart: Whether the run was struck before. If so, the script can run, but it can't continue.
    """
    code = process.exit_code
    refusal = refusal_in(process.tail(_NUM_LINES))
    if refusal is not None:
        return _refused(refusal, process, is_restart=is_restart)
    how = f"ended with exit code {code}" if code is None or code >= 0 else f"was ended by signal {-code}"
    if is_restart:
        return DrillVerdict(
            word=result.DIFFERS,
            text=f"A restart {how}; the uninterrupted run finished.",
            cause=Cause(
                part="restart",
                text="The same command, run again after a strike, does not come to its end.",
                advice=(
                    f"Its output says why: {process.output}",
                    "A script must bear being run again: an output that exists already, a port or a lock that is still"
                    " held.",
                ),
            ),
        )
    if run != result.UNINTERRUPTED:
        cause = Cause(
            part="second run",
            text="The same command finished before. Run once more from the beginning, it does not.",
            advice=(f"Its output says why: {process.output}", _APART),
        )
        return _not_judged(f"The {run} run {how} before anybody had interrupted it.", cause)
    return _not_judged(
        f"The script {how}.",
        Cause(part="script", text="The script fails by itself.", advice=(f"Its output says why: {process.output}",)),
    )


def _refused(refusal: str, process: DrillProcess, *, is_restart: bool) -> DrillVerdict:
    """Judge a run that this package refused to train, with the reason."""
    output = f"The whole output: {process.output}"
    if not is_restart:
        cause = Cause(part="refusal", text=refusal, advice=("Nothing was trained that could be resumed.", output))
        return _not_judged("lightning_faulttolerant refuses this script.", cause)
    advice = ("Nothing was trained that differs: the restart was ended before its first batch.", output)
    cause = Cause(part="refusal", text=refusal, advice=advice)
    return DrillVerdict(word=result.DIFFERS, text="lightning_faulttolerant refused to resume the run.", cause=cause)


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
        return _not_judged("The training left no ledger.", _NO_LEDGER)
    if not ranks[0].steps:
        return _not_judged("The script trained and evaluated no batch.", _NO_LEDGER)
    if ranks[0].is_restarted:
        return _not_judged("More than one process was rank 0 of the same training.", _SEVERAL)
    return None


def _of_outcome(ran: Ran) -> DrillVerdict | None:
    if ran.outcome == running.RESUMED:
        return _not_judged(f"The {ran.name} run did not begin from the beginning.", _OWN_RUN)
    if ran.outcome == running.TIMED_OUT:
        cause = Cause(
            part="timeout",
            text="The run took longer than --timeout allows.",
            advice=(f"Its output: {ran.processes[-1].output}",),
        )
        return _not_judged(f"The {ran.name} run did not come to its end in time.", cause)
    if ran.outcome == running.NOT_STOPPED:
        cause = Cause(
            part="stop",
            text="After a SIGTERM the run continues to its next boundary, saves and ends.",
            advice=(
                "A batch or a save that takes longer, or a launcher that keeps the signal for itself, keeps it from"
                " that.",
                f"Its output: {ran.processes[-1].output}",
            ),
        )
        return _not_judged("The run did not end within 90 seconds of SIGTERM.", cause)
    return None


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
        return DrillVerdict(word=result.DIFFERS, text="A restart did not resume.", cause=_NOT_RESUMED)
    verdict = _of_outcome(ran)
    if verdict is not None:
        return verdict
    mismatch, found = _first_of_stages(expected, ran, settings)
    if mismatch is not None:
        return _of_mismatch(mismatch, expected, found, ran, settings)
    same = f"{_what_is_same(expected, settings.ignored)} are bit for bit those of the uninterrupted run"
    if not strikes:
        has_saved = any(run.autosaves for run in (*expected, *found))
        cause = _too_few(settings)
        if not has_saved:
            cause = replace(_NO_AUTOSAVE, advice=(*_NO_AUTOSAVE.advice, *cause.advice))
        return _not_judged(f"No strike came. As far as that goes, {same}.", cause)
    notes = [f"Not compared, as --ignore says: {', '.join(settings.ignored)}."] if settings.ignored else []
    others = _other_surroundings(expected, found, len(ran.processes))
    if others:
        told = ", ".join(f"{value.name} {value.expected} and {value.found}" for value in others)
        notes.append(f"Equal anyway: the processes did not compute in the same surroundings ({told}).")
    if any(strike.exit_code == -signal.SIGTERM for strike in strikes):
        notes.append(_NOT_HANDED_ON)
    if _inexact(found, len(ran.processes)):
        notes.append("Equal anyway: a restart said that it could not restore everything exactly.")
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
        return _not_judged("The script trained on after the exception that the drill had raised.", _CAUGHT)
    if is_older:
        verdict = _not_deterministic(mismatch, expected, found)
        note = "The difference is older than the first strike, so no restart has to do with it."
        return replace(verdict, notes=(note, *verdict.notes))
    difference = difference_of(mismatch)
    process = mismatch.process if mismatch.process >= 0 else len(ran.processes) - 1
    by_events = causes.cause_of(mismatch)
    others = _other_surroundings(expected, found, process)
    inexact = _inexact(found, process)
    notes = []
    if others:
        cause = causes.surroundings_differ(others)
        notes.append(f"If it is not that: {by_events.part}. {by_events.text}")
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
    faults = ran.processes[0].faults
    if not faults:
        return False
    numbers = BatchNumbers(expected[0].steps)
    return mismatch.num_steps >= numbers.at(place_before(faults[0].batch))


def _not_deterministic(mismatch: Mismatch, expected: Sequence[RankOfRun], found: Sequence[RankOfRun]) -> DrillVerdict:
    difference = difference_of(mismatch)
    others = _other_surroundings(expected, found, 0)
    cause = causes.surroundings_differ(others) if others else causes.not_deterministic(mismatch, difference.place)
    text = f"The script is not deterministic by itself: two uninterrupted runs differ at {difference.place}."
    return _not_judged(text, cause, difference=difference)


def _other_surroundings(expected: Sequence[RankOfRun], found: Sequence[RankOfRun], process: int) -> list[Value]:
    """Return the surroundings in which processes of the second run, up to this one, differ from the first run."""
    found_by_rank = {run.rank: run for run in found}
    values: dict[Value, None] = {}
    for one in expected:
        other = found_by_rank.get(one.rank)
        if other is None or not one.begun:
            continue
        first = one.begun[0][1].get("surroundings") or {}
        for number, line in other.begun:
            if number <= process:
                values.update(dict.fromkeys(different_surroundings(first, line.get("surroundings") or {})))
    return list(values)


def _inexact(ranks: Sequence[RankOfRun], process: int) -> list[Resumption]:
    """Return the resumptions, up to this process, that could not restore everything."""
    resumed = [resumption for run in ranks for resumption in run.resumed]
    return [resumption for resumption in resumed if resumption.process <= process and not resumption.is_exact]


def _too_few(settings: DrillSettings) -> Cause:
    if settings.kind == EXCEPTION:
        text = "A strike counts only if an autosave with progress was there before it, and the run has ended by itself."
    else:
        text = "The drill strikes only where an autosave with progress is verified. It asks each process to write one."
    return Cause(
        part="too few autosaves",
        text=text,
        advice=(
            "A run of one batch can't be struck: let it be longer.",
            "An evaluation that can't continue at its batch is run from its start. The output of the script says why.",
        ),
    )


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
    return f"{', '.join(parts[:-1])} and {parts[-1]}{of_ranks}"


def _not_judged(text: str, cause: Cause, *, difference: result.Difference | None = None) -> DrillVerdict:
    return DrillVerdict(word=result.NOT_JUDGED, text=text, cause=cause, difference=difference)

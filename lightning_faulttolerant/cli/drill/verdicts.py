"""The verdict on a drill: whether its two runs are the same. If they differ or can't be judged, it gives the reason.

If an error of this package ended the script, the verdict quotes it from the output.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import replace

from lightning_faulttolerant.cli.drill import causes, result, running
from lightning_faulttolerant.cli.drill.comparison import Mismatch, difference_of, first_mismatch, without
from lightning_faulttolerant.cli.drill.ledgers import BatchNumbers, RankOfRun, Resumption, place_before
from lightning_faulttolerant.cli.drill.process import DrillProcess
from lightning_faulttolerant.cli.drill.result import Cause, DrillVerdict, Strike
from lightning_faulttolerant.cli.drill.running import Ran
from lightning_faulttolerant.cli.drill.settings import EXCEPTION, DrillSettings
from lightning_faulttolerant.cli.page.numbers import plural
from lightning_faulttolerant.records import ledger

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
    word = result.DIFFERS if is_restart else result.NOT_JUDGED
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
        return DrillVerdict(word=result.DIFFERS, text="A restart did not resume.", cause=causes.NOT_RESUMED)
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
        notes.append(f"Equal, although the processes ran in different surroundings: {others}.")
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
        return _not_judged("The script trained on after the drill's exception.", causes.CAUGHT)
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

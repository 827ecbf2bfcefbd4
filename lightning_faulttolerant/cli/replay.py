"""The command ``replay``: it runs any step of a run again.

``replay``: run a step of a run again, exactly as it was, and print how it compares with the ledger of the run.

Whatever both have a line for must be equal, bit for bit.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_faulttolerant.cli.drill.command import ended_by_signals
from lightning_faulttolerant.cli.drill.comparison import (
    Mismatch,
    difference_of,
    different_fields,
    number_of,
    shown_value,
)
from lightning_faulttolerant.cli.drill.ledgers import Event, RankOfRun, join
from lightning_faulttolerant.cli.drill.result import Difference
from lightning_faulttolerant.cli.text import (
    add_command_words,
    at_least_1,
    batch_to_skip,
    command_words,
    fault_of_command,
    safe,
)
from lightning_faulttolerant.errors import RanksLostError
from lightning_faulttolerant.records import ledger
from lightning_faulttolerant.records.ledger import path_of_rank
from lightning_faulttolerant.records.lines import read_json, read_lines
from lightning_faulttolerant.records.requests import (
    ENDED,
    LEFT,
    PASSED,
    RAISED,
    REACHED,
    REPLAY_VARIABLE,
    SKIP_VARIABLE,
    ReplayOutcome,
    ReplayRequest,
    ReplayStart,
    StepPlace,
    read_outcomes,
    read_start,
    skips_in_words,
    skips_requested,
    text_of_skips,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """The result of a comparison.

    Args:
        num_steps: How many training steps of the replay have a line in the ledger of the run.
        difference: The first difference; ``None`` if all is equal.
    """

    num_steps: int = 0
    difference: Difference | None = None


def compare(
    original: str, replay: str, *, fit: int, ranks: Iterable[int], before: tuple[int, int] | None = None
) -> Compared:
    """Compare the ledgers of all ranks.

    Args:
        original: The ledger of the run, of rank 0.
        replay: The ledger of the replay, of rank 0.
        fit: The number of the fit that was replayed.
        ranks: The ranks of the replay.
        before: Epoch and batch of the first step that differs on purpose; it and later ones are not compared.
    """
    found = [
        _of_rank(rank, *(_read(path, rank) for path in (original, replay)), fit=fit, before=before)
        for rank in sorted(ranks)
    ]
    differences = [one.difference for one in found if one.difference is not None]
    first = min(differences, key=lambda difference: (difference.number, difference.rank), default=None)
    return Compared(num_steps=min((one.num_steps for one in found), default=0), difference=first)


def _read(path: str, rank: int) -> RankOfRun:
    return join(rank, [read_lines(ledger.path_of_rank(path, rank))])


def _of_rank(
    rank: int, original: RankOfRun, replay: RankOfRun, *, fit: int, before: tuple[int, int] | None
) -> Compared:
    expected: defaultdict[tuple[object, ...], list[Event]] = defaultdict(list)
    for event in original.fits.get(fit, []):
        expected[_key(event)].append(event)
    num_steps, num_before = 0, 0
    for event in replay.fits.get(fit, []):
        if before is not None and event.place[1:3] > before:
            break
        lines = expected[_key(event)]
        one = _comparable(lines.pop(0), event) if lines else None
        fields = None if one is None else different_fields(one, event)
        if fields is not None:
            mismatch = Mismatch(
                rank=rank,
                expected=one,
                found=event,
                fields=fields,
                number=num_before,
                num_evaluated=0,
                expected_next=(),
                found_next=(),
            )
            return Compared(num_steps=num_steps, difference=difference_of(mismatch))
        num_before += event.kind == ledger.BATCH
        num_steps += event.kind == ledger.BATCH and one is not None
    return Compared(num_steps=num_steps)


def _key(event: Event) -> tuple[object, ...]:
    """Return what the lines of the same moment have in common. A moment may have several of one kind."""
    return event.kind, event.place, event.in_validation, event.is_epoch_end, event.values.get("logger")


def _comparable(expected: Event, found: Event) -> Event:
    """Return the line of the run, with what it does not know as in the replay: a ledger may lack the order."""
    if expected.values.get("order", "") is None:
        expected.values["order"] = found.values.get("order")
    return expected


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
        left_out = ", ".join(map(skips_in_words, request.without))
        yield f"  left out: {left_out}. Later steps are not compared with the run"
    if outcome.changed is not None:
        values = ", ".join(f"{key}={value}" for key, value in request.values)
        yield f"  set before {outcome.changed}: {values}. This step and later ones are not compared"
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
        yield "  the run has no ledger to compare with: PL_FAULT_TOLERANT_LEDGER=FILE writes one"
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
                yield from _lines_of_step(read_json(file))


def _lines_of_step(told: Mapping[str, Any]) -> Iterator[str]:
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


def _rows(rows: Sequence[Mapping[str, object]]) -> str:
    named = [
        f"row {row['row']}" + ("" if row["index"] is None else f" (sample {row['index']})") for row in rows[:_MAX_NAMED]
    ]
    return ", ".join(named) + (f" and {len(rows) - _MAX_NAMED} more" if len(rows) > _MAX_NAMED else "")


DESCRIPTION = """\
Run a step of a run again, exactly as it was. COMMAND is the command of the run. The script starts from the newest
autosave that is not after the step, runs up to the step, and ends there.

  lightning-faulttolerant replay --until 1200 -- python train.py
  lightning-faulttolerant replay --until 3:17 --pdb -- python train.py
  lightning-faulttolerant replay --from 1190 --until 1200 --dump steps -- python train.py
  lightning-faulttolerant replay --until 3:40 --without 3:17 -- python train.py
  lightning-faulttolerant replay --from 3:17 --until 3:40 --set model.dropout.p=0 -- python train.py
  lightning-faulttolerant replay --at-exception --anomaly -- torchrun --nproc_per_node 2 train.py

A STEP is a training batch of the fit, counted from 0 over all epochs, or EPOCH:BATCH, both from 0. The step of
--until is done; --pdb, --anomaly, --dump, and --set begin at that of --from. If only one is given, it stands for
both.

Nothing of the run is touched: neither its autosaves, ledger, and history, nor its checkpoints, and what its loggers
have written. What the script itself writes, it writes again.
"""
EPILOG = """\
Exit status: 0 the step was reached (with --at-exception: the exception was raised), and all that the run's ledger has a
line for is equal; 1 it differs; 2 the step was not reached, or wrong usage.
"""
_SWITCH_VARIABLE = "PL_FAULT_TOLERANT_TRAINING"
_DIFFERS, _FAILED = 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``replay``.

    Args:
        parser: The parser of this command.
    """
    add_command_words(parser)
    parser.add_argument("--from", dest="since", metavar="STEP", type=_step, help="the first step of interest")
    parser.add_argument("--until", metavar="STEP", type=_step, help="the last step")
    parser.add_argument(
        "--at-exception", action="store_true", help="up to the exception that ended the run, instead of --until"
    )
    parser.add_argument("--fit", metavar="N", type=at_least_1, default=1, help="which fit of the script (default: 1)")
    parser.add_argument("--pdb", action="store_true", help="open the debugger in the training_step of the first step")
    parser.add_argument(
        "--anomaly", action="store_true", help="let autograd name the operation whose gradient is the first NaN"
    )
    parser.add_argument(
        "--dump",
        metavar="DIR",
        help="write batch, samples, worker, checksums, loss, gradient norms, and generators of these steps",
    )
    parser.add_argument(
        "--without",
        metavar="EPOCH:BATCH",
        type=batch_to_skip,
        action="append",
        default=[],
        help="leave this batch out; may be repeated. Later steps are not compared",
    )
    parser.add_argument(
        "--set",
        dest="values",
        metavar="KEY=VALUE",
        type=_value,
        action="append",
        default=[],
        help="set a value of model, datamodule, optimizers, or trainer, such as optimizers.0.param_groups.0.lr=1e-4;"
        " may be repeated. These steps are not compared",
    )
    parser.add_argument("--output", metavar="DIR", help="keep the replay's ledger and logs here")


def run(arguments: argparse.Namespace) -> int:
    """Run the script, and print what came of it.

    Args:
        arguments: The parsed arguments.

    Returns:
        The exit status.
    """
    words = command_words(arguments.words)
    problem = _problem(arguments, words)
    if problem is not None:
        print(f"replay: {safe(problem)}", file=sys.stderr)
        return _FAILED
    output = arguments.output
    directory = tempfile.mkdtemp(prefix="replay-") if output is None else os.path.abspath(output)
    os.makedirs(directory, exist_ok=True)
    try:
        request = _request(arguments, directory)
        code = _run(words, request)
        return _result(request, code)
    finally:
        if output is None:
            shutil.rmtree(directory, ignore_errors=True)


def _request(arguments: argparse.Namespace, directory: str) -> ReplayRequest:
    since, until = arguments.since, arguments.until
    if not arguments.at_exception:
        since, until = since or until, until or since
    return ReplayRequest(
        directory=directory,
        fit=arguments.fit,
        since=since,
        until=until,
        opens_debugger=arguments.pdb,
        detects_anomalies=arguments.anomaly,
        dumps=None if arguments.dump is None else os.path.abspath(arguments.dump),
        without=tuple(sorted(set(arguments.without))),
        values=tuple(arguments.values),
    )


def _problem(arguments: argparse.Namespace, words: Sequence[str]) -> str | None:
    """Return what is wrong with the arguments."""
    since, until = arguments.since, arguments.until
    if (fault := fault_of_command(words[0])) is not None:
        return fault
    if arguments.at_exception and until is not None:
        return "--at-exception and --until can't be combined"
    if not arguments.at_exception and since is None and until is None:
        return "no step is named: pass --from, --until, or --at-exception"
    if since is not None and until is not None and _is_after(since, until):
        return f"--from {since} is after --until {until}"
    for name in ("dump", "output"):
        path = getattr(arguments, name)
        if path is not None and os.path.isdir(path) and os.listdir(path):
            return f"{path} is not empty. Pass an empty or new directory: two replays must not mix"
    return None


def _is_after(since: StepPlace, until: StepPlace) -> bool:
    same_kind = (since.number is None) == (until.number is None)
    return same_kind and since.is_after(until)


def _run(words: Sequence[str], request: ReplayRequest, environment: Mapping[str, str] = os.environ) -> int:
    """Run the command in the foreground: the debugger needs the terminal. Return its exit code."""
    variables = {**environment, REPLAY_VARIABLE: request.to_json()}
    if request.without:
        variables[SKIP_VARIABLE] = text_of_skips({*skips_requested(environment), *request.without})
    if not variables.get(_SWITCH_VARIABLE):  # the variable adds nothing if the script has the callback
        variables[_SWITCH_VARIABLE] = "1"
    with ended_by_signals():
        if request.opens_debugger:  # Ctrl-C is for the debugger; were it ignored, the script would ignore it, too
            signal.signal(signal.SIGINT, lambda *_: None)
        process = subprocess.Popen(words, env=variables)
        try:
            return process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()


def _result(request: ReplayRequest, code: int) -> int:
    """Print what came of it, and return the exit status."""
    start, outcomes = read_start(request), read_outcomes(request)
    if start is None or not outcomes:
        why = f"the script ended with exit code {code}" if start is not None or code else "the script has no such fit"
        print(f"replay: fit {request.fit} was not replayed: {why}.", file=sys.stderr)
        return _FAILED
    outcome = _decisive(start, outcomes)
    can_be_compared = start.ledger is not None and os.path.exists(start.ledger)
    ranks = [rank for rank in outcomes if os.path.exists(path_of_rank(request.ledger, rank))]
    first = min([*request.without, *_changed(outcome)], default=None)
    compared = None
    if can_be_compared:
        compared = compare(str(start.ledger), request.ledger, fit=request.fit, ranks=ranks, before=first)
    steps = [event for event in _read(request.ledger, 0).batches if event.fit == request.fit]
    for line in lines_of(request, start, outcome, steps, compared):
        print(safe(line))
    if compared is not None and compared.difference is not None:
        return _DIFFERS
    if request.is_of_exception:
        return _of_exception(start, outcome, outcomes.values())
    return 0 if outcome.word in (REACHED, LEFT) else _FAILED


def _changed(outcome: ReplayOutcome) -> Iterator[tuple[int, int]]:
    """Yield epoch and batch of the step before which values were set."""
    if outcome.changed is not None:
        yield outcome.changed.epoch or 0, outcome.changed.batch or 0


def _decisive(start: ReplayStart, outcomes: Mapping[int, ReplayOutcome]) -> ReplayOutcome:
    """Return the outcome of the rank that ended the replay. When one rank ends, the others lose it, and raise, too."""

    def order(rank: int) -> tuple[bool, bool, bool, bool, int]:
        outcome, raised = outcomes[rank], outcomes[rank].word == RAISED
        is_cause = raised and _type_of(outcome.text) != RanksLostError.__name__
        return outcome.word != LEFT, not is_cause, not raised, not _is_of_run(start, outcome), rank

    return outcomes[min(outcomes, key=order)]


def _type_of(exception: str) -> str:
    return exception.split(":")[0]


def _is_of_run(start: ReplayStart, outcome: ReplayOutcome) -> bool:
    """Return whether a rank raised an exception of the type that ended the run."""
    return outcome.word == RAISED and _type_of(outcome.text) == _type_of(str(start.exception))


def _of_exception(start: ReplayStart, outcome: ReplayOutcome, outcomes: Iterable[ReplayOutcome]) -> int:
    # The history of a run has the exception of one rank, which may be that it has lost another one.
    if outcome.word == RAISED and not any(_is_of_run(start, one) for one in outcomes):
        print(safe(f"  the run was ended by {start.exception}"))
        return _DIFFERS
    return 0 if outcome.word in (RAISED, LEFT) else _DIFFERS


def _value(text: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not sign or "." not in key:
        raise argparse.ArgumentTypeError(f"{text} is not KEY=VALUE, such as model.hparams.size=3")
    return key.strip(), value.strip()


def _step(text: str) -> StepPlace:
    try:
        return StepPlace.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None

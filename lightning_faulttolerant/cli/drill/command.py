"""``drill``: run a script uninterrupted and with faults, compare the two runs, and print the result."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TextIO

from lightning_faulttolerant.cli.drill import result
from lightning_faulttolerant.cli.drill.drilling import Drill
from lightning_faulttolerant.cli.drill.ledgers import STAGES, TRAIN
from lightning_faulttolerant.cli.drill.page import page
from lightning_faulttolerant.cli.drill.process import KILL, KINDS, DrillSettings
from lightning_faulttolerant.cli.drill.result import (
    Cause,
    Difference,
    DrillResult,
    Strike,
    duration,
    equal_before,
    progress_on,
)
from lightning_faulttolerant.cli.text import add_command_words, at_least_1, command_words, fault_of_command, safe, table

_WIDTH = 80
_STYLES = {result.EXACT: "1;32", result.DIFFERS: "1;31", result.NOT_RESUMED: "1;31", result.NOT_JUDGED: "1;33"}
_BOLD = "1"
_LONGEST_VALUE = 24
_MOST_VALUES = 8


def print_result(found: DrillResult, stream: TextIO, *, is_kept: bool) -> None:
    """Print the result of a drill.

    Args:
        found: The result of the drill.
        stream: The stream to print to.
        is_kept: Whether the ledgers and outputs are kept.
    """
    lines = []
    if found.strikes:
        lines += ["", *_strikes(found.strikes)]
    verdict = found.verdict
    lines += ["", _styled(verdict.word.upper(), _STYLES[verdict.word], stream), *_wrapped(verdict.text)]
    if verdict.difference is not None:
        lines += ["", *_difference(verdict.difference, found)]
    if verdict.cause is not None:
        lines += ["", *_cause(verdict.cause, stream)]
    for note in verdict.notes:
        lines += ["", *_wrapped(note)]
    if is_kept:
        lines += ["", f"Ledgers and outputs: {safe(found.directory)}"]
    print("\n".join(lines), file=stream)


def _strikes(strikes: Sequence[Strike]) -> list[str]:
    header = ["STRIKE", "IN", "AT BATCH", "EPOCH", "RESUMED AT", "DONE TWICE", "FIRST BATCH IN"]
    rows = [
        [
            f"{strike.number} {strike.kind}",
            *_places(strike),
            f"{strike.num_twice:,}",
            "-" if strike.seconds_to_first_batch is None else duration(strike.seconds_to_first_batch),
        ]
        for strike in strikes
    ]
    return table(header, rows, right=header[2:])


def _places(strike: Strike) -> list[str]:
    """Return the cells for what was struck, and where: in training the batch of the run, else of the evaluation."""
    number = "" if strike.fit == 1 else f" {strike.fit}"
    stage = f"{strike.stage}{number}" if strike.epoch is None else strike.stage
    epoch = "-" if strike.epoch is None else f"{strike.epoch} of fit{number}" if number else f"{strike.epoch}"
    if strike.stage == TRAIN:
        return [stage, f"{strike.at:,}", epoch, f"{strike.resumed_at:,}"]
    resumed = f"{TRAIN} {strike.resumed_at:,}" if strike.resumed_batch is None else f"{strike.resumed_batch:,}"
    return [stage, f"{strike.batch:,}", epoch, resumed]


def _difference(difference: Difference, found: DrillResult) -> list[str]:
    other = "AGAIN" if found.verdict.word == result.NOT_JUDGED else "INTERRUPTED"
    rows = [[value.name, _short(value.expected), _short(value.found)] for value in difference.values]
    lines = table(["", "UNINTERRUPTED", other], rows[:_MOST_VALUES], right=[], indent=2)
    if len(rows) > _MOST_VALUES:
        lines.append(f"  and {len(rows) - _MOST_VALUES} more values")
    if difference.equal:
        lines += _wrapped(f"Equal there: {', '.join(difference.equal)}.", indent="  ")
    return [*lines, *_wrapped(equal_before(difference, found.strikes), indent="  ")]


def _cause(cause: Cause, stream: TextIO) -> list[str]:
    lines = [_styled(f"Likely cause: {cause.part}", _BOLD, stream), *_wrapped(cause.text, indent="  ")]
    for advice in cause.advice:
        lines += _wrapped(advice, indent="    ", first="  - ")
    return lines


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


def _wrapped(text: str, *, indent: str = "", first: str | None = None) -> list[str]:
    begin = indent if first is None else first
    return textwrap.wrap(
        safe(text),
        _WIDTH,
        initial_indent=begin,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _styled(text: str, style: str, stream: TextIO) -> str:
    plain = not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown")
    return text if plain else f"\x1b[{style}m{text}\x1b[0m"


DESCRIPTION = """\
Prove on your own script that an interrupted run equals an uninterrupted one. The drill runs COMMAND once uninterrupted.
Then it runs COMMAND with faults at random moments, and starts it again after each fault until it ends. It compares the
two runs batch by batch, in training, validation, test, and predict: order and content of the data, random generators,
losses, learning rates, results, predictions, logged values, final weights.

  lightning-faulttolerant drill -- python train.py
  lightning-faulttolerant drill --kills 3 --signal TERM -- torchrun --nproc_per_node 2 train.py
  lightning-faulttolerant drill --in validation,test -- python train.py
  lightning-faulttolerant drill --check --html drill.html -- python train.py --output out/{run}

The script needs no change: if it has no FaultTolerance callback, PL_FAULT_TOLERANT_TRAINING=1 adds it. {run} in COMMAND
becomes "uninterrupted" or "interrupted" (with --check also "repeated"), to separate outputs. Each run has its own run
id, even if the script sets one, so your runs are not touched.
"""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
EPILOG = """\
Before a strike, the process saves its state, so that each restart has something to continue from.

Exit status: 0 exact, 1 the runs differ, or a restart did not resume (it failed, was refused, or started over), 2 could
not be judged: the script fails by itself or is not deterministic, no strike came, wrong usage.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``drill``.

    Args:
        parser: The parser of this command.
    """
    add_command_words(parser)
    parser.add_argument("--kills", metavar="N", type=at_least_1, default=5, help="number of strikes (default: 5)")
    parser.add_argument(
        "--signal",
        choices=KINDS,
        default=KILL,
        help="KILL: kill all processes at once, as a failing machine does (default); TERM: ask them to end, as a"
        " scheduler does; exception: raise one in a step",
    )
    parser.add_argument(
        "--in",
        dest="stages",
        metavar="WHAT",
        type=_stages,
        default=(),
        help=f"what to strike, separated by commas: {', '.join(STAGES)} (default: all that the script does), each about"
        " as often. trainer.validate counts as validation",
    )
    parser.add_argument(
        "--at",
        metavar="STEP",
        type=at_least_1,
        nargs="+",
        default=[],
        help="strike before these batches instead of random ones. Batches of training, or of what --in names, are"
        " counted from 0 over the whole run. The first one can't be struck",
    )
    parser.add_argument("--check", action="store_true", help="first run COMMAND twice, to see if it is deterministic")
    parser.add_argument(
        "--ignore",
        metavar="NAME",
        action="append",
        default=[],
        help="ignore this logged value; * stands for anything",
    )
    parser.add_argument("--html", metavar="FILE", help="write a page with the loss curves, the strikes and the verdict")
    parser.add_argument("--output", metavar="DIR", help="keep ledgers and outputs of the script here")
    parser.add_argument("--seed", metavar="N", type=int, default=None, help="seed for the moments of the strikes")
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=_seconds,
        default=None,
        help="end a run that takes longer, restarts included",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the drill and print its result.

    Args:
        arguments: The parsed arguments.

    Returns:
        The exit status.
    """
    words = command_words(arguments.words)
    problem = _problem(arguments, words)
    if problem is not None:
        print(f"drill: {safe(problem)}", file=sys.stderr)
        return result.EXIT_CODES[result.NOT_JUDGED]
    directory = _directory(arguments)
    settings = DrillSettings(
        command=words,
        num_strikes=len(set(arguments.at)) or arguments.kills,
        kind=arguments.signal,
        stages=arguments.stages,
        at=tuple(arguments.at),
        is_checked=arguments.check,
        ignored=tuple(arguments.ignore),
        seed=secrets.randbelow(10_000) if arguments.seed is None else arguments.seed,
        timeout_seconds=arguments.timeout,
        directory=directory,
        token=secrets.token_hex(4),
    )
    is_kept = True
    try:
        found, output = _drilled(settings)
        is_kept = arguments.output is not None or found.verdict.word != result.EXACT
        if output is not None:
            _print_end(output, found.last_words)
        print_result(found, sys.stdout, is_kept=is_kept)
        sys.stdout.flush()  # print the result even if the page can't be written
        if arguments.html is not None:
            shown = found if is_kept else replace(found, directory="")  # don't name a directory that is removed
            Path(arguments.html).write_text(page(shown), encoding="utf-8")
    except (KeyboardInterrupt, SystemExit):
        print("\nInterrupted. The drill has ended everything that it started.", file=sys.stderr)
        is_kept = arguments.output is not None
        raise
    except OSError:  # a command that could not be started left nothing to look at
        is_kept = arguments.output is not None or next(directory.rglob("*.jsonl"), None) is not None
        raise
    finally:
        if not is_kept:
            shutil.rmtree(directory, ignore_errors=True)
    return found.verdict.exit_code


def _drilled(settings: DrillSettings) -> tuple[DrillResult, Path | None]:
    """Return the result of a drill, and the output of its last process if that failed by itself."""
    with ended_by_signals(), progress_on(sys.stderr) as progress:
        progress.tell(f"Drill: {safe(shlex.join(settings.command))}")
        drill = Drill(settings, progress)
        found = drill.run()
    return found, drill.failed_output


def _problem(arguments: argparse.Namespace, words: Sequence[str]) -> str | None:
    """Return what is wrong with the arguments, before the drill takes hours."""
    fault = fault_of_command(words[0])
    if fault is not None:
        return fault
    if not arguments.at and arguments.kills < len(arguments.stages):
        return (
            f"--kills is {arguments.kills}, but each of the {len(arguments.stages)} parts that --in names gets a strike"
        )
    if arguments.output is not None and os.path.isdir(arguments.output) and os.listdir(arguments.output):
        return f"{arguments.output} is not empty. Pass an empty or new directory: ledgers of two drills must not mix"
    if arguments.html is not None and not os.path.isdir(os.path.dirname(os.path.abspath(arguments.html))):
        return f"{arguments.html}: no such directory"
    if arguments.html is not None and os.path.isdir(arguments.html):
        return f"{arguments.html} is a directory: name a file for the page"
    return None


def _directory(arguments: argparse.Namespace) -> Path:
    if arguments.output is None:
        return Path(tempfile.mkdtemp(prefix="drill-"))
    directory = Path(arguments.output).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turn the first signal that would end this process into an exception, so that nothing is left running.

    Further signals are ignored, since they would interrupt the cleanup. An ignored signal, such as SIGHUP under nohup,
    stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signum: signal.getsignal(signum) for signum in _ENDING}
    before = {signum: handler for signum, handler in before.items() if handler not in (signal.SIG_IGN, None)}

    def end(signum: int, _: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)

    for signum in before:
        signal.signal(signum, end)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _print_end(output: Path, lines: Sequence[str]) -> None:
    print(f"\nThe end of {safe(output)}:" if lines else f"\n{safe(output)} is empty.", file=sys.stderr)
    for line in lines:
        print(f"  | {safe(line)}", file=sys.stderr)


def _stages(text: str) -> tuple[str, ...]:
    named = text.split(",")
    unknown = [name for name in named if name not in STAGES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(STAGES)}")
    return tuple(stage for stage in STAGES if stage in named)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return seconds

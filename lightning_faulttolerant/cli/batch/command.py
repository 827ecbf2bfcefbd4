"""``batch``: show which samples were in a batch of a run, or which batches a sample was in, without training."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

from lightning_faulttolerant.cli.batch.orders import Deals, KnownOrders, in_autosaves, orders_of, places_of, samples_of
from lightning_faulttolerant.cli.text import (
    add_command_words,
    at_least_1,
    command_words,
    fault_of_command,
    remote_errors,
    safe,
)
from lightning_faulttolerant.records.requests import skips_in_words
from lightning_faulttolerant.records.runs import LOOKUP_VARIABLE, read_lookup

DESCRIPTION = """\
Show which samples were in a training batch of a run, or which batches a sample was in. COMMAND is the command of the
run. Nothing is trained: the script runs until its first fit begins, which says where the run is, and ends there.

  lightning-faulttolerant batch --epoch 3 --batch 17 -- python train.py
  lightning-faulttolerant batch --sample 1017 -- torchrun --nproc_per_node 2 train.py

A sample is named by its index in the data set, from 0. With several ranks, each rank's samples are shown. The history
of the run has the order of each epoch that is over; for the others, an autosave within the epoch has it.
"""
EPILOG = """\
Exit status: 0 found; 1 there is no such batch, or the sample was in none; 2 not known, or wrong usage.
"""
_SWITCH_VARIABLE = "PL_FAULT_TOLERANT_TRAINING"
_NONE, _FAILED = 1, 2
_STDERR = 2  # the script prints there: standard output is for our answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``batch``.

    Args:
        parser: The parser of this command.
    """
    add_command_words(parser)
    parser.add_argument("--epoch", metavar="E", type=_number, help="the epoch, from 0")
    parser.add_argument("--batch", metavar="B", type=_number, help="the batch of that epoch, from 0")
    parser.add_argument("--sample", metavar="I", type=_number, help="the index of a sample in the data set, from 0")
    parser.add_argument("--fit", metavar="N", type=at_least_1, default=1, help="which fit of the script (default: 1)")


def run(arguments: argparse.Namespace) -> int:
    """Find the run, and print what is asked for.

    Args:
        arguments: The parsed arguments.

    Returns:
        The exit status.
    """
    words = command_words(arguments.words)
    problem = _problem(arguments) or fault_of_command(words[0])
    if problem is not None:
        return _fail(problem)
    directory, code = _directory_of(words)
    if not directory:
        why = "it begins no fit or evaluation" if directory is None else "it has none, or its directory was removed"
        return _fail(f"no run of this command was found: {why}" + (f" (exit code {code})" if code else ""))
    with remote_errors(directory):
        known = orders_of(directory, arguments.fit)
        if arguments.sample is not None:
            return _show_sample(arguments.sample, known, directory, fit=arguments.fit)
        deals = known.epochs.get(arguments.epoch)
        if deals is None or None in deals.values():
            found = in_autosaves(directory, arguments.fit, arguments.epoch)
            if found is not None:
                deals, limit = found
                known.num_batches.update({} if limit is None else {arguments.epoch: limit})
    return _show_batch((arguments.epoch, arguments.batch), deals, known, directory, words=words, fit=arguments.fit)


def _problem(arguments: argparse.Namespace) -> str | None:
    is_batch = arguments.epoch is not None and arguments.batch is not None
    if arguments.sample is not None:
        is_alone = arguments.epoch is None and arguments.batch is None
        return None if is_alone else "--sample excludes --epoch and --batch"
    return None if is_batch else "which batch? Give --epoch and --batch, or --sample"


def _fail(text: str) -> int:
    print(f"batch: {safe(text)}", file=sys.stderr)
    return _FAILED


def _directory_of(words: Sequence[str], environment: Mapping[str, str] = os.environ) -> tuple[str | None, int]:
    """Run the script until its first fit begins. Return where its run is, and the exit code."""
    with tempfile.TemporaryDirectory(prefix="batch-") as directory:
        path = os.path.join(directory, "run")
        variables = {**environment, LOOKUP_VARIABLE: path}
        if not variables.get(_SWITCH_VARIABLE):  # the variable adds nothing if the script has the callback
            variables[_SWITCH_VARIABLE] = "1"
        code = subprocess.run(words, env=variables, check=False, stdout=_STDERR).returncode
        return read_lookup(path), code


def _show_batch(
    place: tuple[int, int],
    deals: Deals | None,
    known: KnownOrders,
    directory: str,
    *,
    words: Sequence[str],
    fit: int,
) -> int:
    epoch, batch = place
    if deals is None:
        listed = ", ".join(map(str, sorted(known.epochs))) or "none"
        return _fail(
            f"the order of epoch {epoch} is not known: it has not ended, or the run is of an older version. Known"
            f" epochs: {listed}. The batch itself can be looked at: {_replay_line(place, words)}"
        )
    limit = known.num_batches.get(epoch)
    found = {name: None if deal is None else samples_of(deal, batch, limit) for name, deal in deals.items()}
    unknown = [name for name, deal in deals.items() if deal is None]
    if not unknown and all(samples is None for samples in found.values()):
        print(safe(f"Epoch {epoch} of fit {fit} has no batch {batch}."))
        return _NONE
    skipped = ", which was left out" if place in known.skipped else ""
    print(safe(f"{skips_in_words(place).capitalize()} of fit {fit}{skipped} ({directory})"))
    for name, samples in found.items():
        for rank, indices in enumerate(samples or ()):
            on = f"rank {rank}, " if len(samples or ()) > 1 else ""
            print(f"  {on}{name}: {', '.join(map(str, indices))}")
    for name in unknown:
        print(
            f"  {name}: its samples are not known: its data set is iterable, or no rule is known for its sampler."
            " To look at the batch itself, type:"
        )
        print(f"    {_replay_line(place, words)}")
    return _FAILED if unknown else 0


def _replay_line(place: tuple[int, int], words: Sequence[str]) -> str:
    return f"lightning-faulttolerant replay --until {place[0]}:{place[1]} --dump step -- {shlex.join(words)}"


def _show_sample(sample: int, known: KnownOrders, directory: str, *, fit: int) -> int:
    unknown = sorted(epoch for epoch, deals in known.epochs.items() if not deals or None in deals.values())
    lines = []
    for epoch, deals in sorted(known.epochs.items()):
        for name, deal in deals.items():
            if deal is None:
                continue
            for rank, batch, row in places_of(deal, sample, known.num_batches.get(epoch)):
                on = f", rank {rank}" if deal.share.num_ranks > 1 else ""
                several = f" of {name}" if len(deals) > 1 else ""
                skipped = ", which was left out" if (epoch, batch) in known.skipped else ""
                lines.append(f"  {skips_in_words((epoch, batch))}{several}{on}, row {row}{skipped}")
    print(safe(f"Sample {sample} in fit {fit} ({directory})"))
    for line in lines or ["  in no batch of the epochs that are known"]:
        print(line)
    if unknown or not known.epochs:
        print(f"  not known: {', '.join(f'epoch {epoch}' for epoch in unknown) or 'any epoch'}")
        return _FAILED
    return 0 if lines else _NONE


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0")
    return int(text)

"""``batch``: show which samples were in a batch of a run, or which batches a sample was in, without training.

The history of the run tells in which order its epochs had their samples. So do autosaves within an epoch.
"""

from __future__ import annotations

import argparse
import os
import pickle
import shlex
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_faulttolerant.checkpoint.autosave_files import AUTOSAVE_NAME, kept_paths
from lightning_faulttolerant.checkpoint.schema import KEY
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.verify import load_path
from lightning_faulttolerant.cli.found import mapping
from lightning_faulttolerant.cli.text import (
    add_command_words,
    at_least_1,
    command_words,
    fault_of_command,
    remote_errors,
    safe,
)
from lightning_faulttolerant.loader.remaining import GlobalOrder, RankShare, RemainingBatches, deal_from_json
from lightning_faulttolerant.records.history import FILE_NAME, FIT, ORDER, SKIPPED, START, name_of
from lightning_faulttolerant.records.lines import Line, parse_lines
from lightning_faulttolerant.records.requests import skips_in_words
from lightning_faulttolerant.records.runs import LOOKUP_VARIABLE, Parent, parent_from, read_lookup
from lightning_faulttolerant.state.packing import unpack_blobs
from lightning_faulttolerant.storage.store import open_file, open_store

Deals = Mapping[str, RemainingBatches | None]
"""How the samples of an epoch are shared, by place of the loader; ``None`` if that is not known."""

_TRAIN = "train"


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownOrders:
    """What is known of one fit.

    Args:
        epochs: The deals of each epoch that is known.
        skipped: The batches that were left out: epoch and batch.
        parent: What the run began from, if it is a branch.
        num_batches: How many batches each epoch has, where that is known: an order may name more samples.
    """

    epochs: dict[int, Deals] = field(default_factory=dict)
    skipped: set[tuple[int, int]] = field(default_factory=set)
    parent: Parent | None = None
    num_batches: dict[int, int] = field(default_factory=dict)


def orders_of(directory: str, fit: int) -> KnownOrders:
    """Return what the history of a run, and that of its parent, tells of one fit.

    Args:
        directory: The directory of the run, or its URL.
        fit: The number of the fit.
    """
    known, seen = _in_history(directory, fit), {directory}
    parent = known.parent
    while parent is not None and parent.directory not in seen:
        seen.add(parent.directory)
        older = _in_history(parent.directory, fit)
        for epoch, deals in older.epochs.items():
            if epoch <= parent.epoch and epoch not in known.epochs:
                known.epochs[epoch] = deals
                known.num_batches.update({epoch: older.num_batches[epoch]} if epoch in older.num_batches else {})
        known.skipped.update(skip for skip in older.skipped if skip < (parent.epoch, parent.batch))
        parent = older.parent
    return known


def _in_history(directory: str, fit: int) -> KnownOrders:
    known = KnownOrders()
    for line in _lines(directory):
        if line.get("fit") != fit:
            continue
        epoch, batch = line.get("epoch"), line.get("batch")
        if line.get("event") == START:
            known = _from_start(known, line)
        elif not isinstance(epoch, int):
            continue
        elif line.get("event") == ORDER:
            deals = {str(place): _of_line(state) for place, state in mapping(line.get("loaders")).items()}
            known.epochs[epoch] = deals
            known.num_batches.pop(epoch, None)
            if isinstance(line.get("num_batches"), int):
                known.num_batches[epoch] = int(line["num_batches"])
        elif line.get("event") == SKIPPED and isinstance(batch, int):
            known.skipped.add((epoch, batch))
    return known


def _from_start(known: KnownOrders, start: Line) -> KnownOrders:
    """Return what of the history still holds when a process starts: it begins a run, or continues from its place."""
    parent, epoch, batch = parent_from(start.get("parent")), start.get("epoch"), start.get("batch")
    if not start.get("continues"):
        return KnownOrders(parent=parent)
    if not isinstance(epoch, int) or not isinstance(batch, int):
        return replace(known, parent=parent)
    return KnownOrders(
        epochs={number: deals for number, deals in known.epochs.items() if number <= epoch},
        skipped={skip for skip in known.skipped if skip < (epoch, batch)},
        parent=parent,
        num_batches={number: found for number, found in known.num_batches.items() if number <= epoch},
    )


def _lines(directory: str) -> list[Line]:
    try:
        with open_file(open_store(directory).path(FILE_NAME), whole=True) as file:
            return parse_lines(file.read())
    except FileNotFoundError:
        return []


def in_autosaves(directory: str, fit: int, epoch: int) -> tuple[Deals, int | None] | None:
    """Return the deals of an epoch from an autosave within it, and how many batches the epoch has, if that is known.

    Args:
        directory: The directory of the run, or its URL.
        fit: The number of the fit.
        epoch: The epoch.

    Returns:
        ``None`` if there is no such autosave.
    """
    series = AutosaveSeries(open_store(directory).path(f"{FIT}-{fit}"), keep_last=1)
    for path in [*kept_paths(series.store), *series.paths()]:
        match = AUTOSAVE_NAME.fullmatch(name_of(path))
        if match is None or int(match["epoch"]) != epoch:
            continue
        try:
            part = load_path(path).get(KEY)
        except (OSError, RuntimeError, pickle.UnpicklingError):  # the next one may be sound
            continue
        ranks = mapping(part).get("ranks")
        state_of_rank = unpack_blobs(ranks[0]) if isinstance(ranks, list) and ranks else None
        places = mapping(state_of_rank, "loaders", "places")
        deals = {
            str(place): None if mapping(state).get("streams") else _of_record(mapping(state).get("record"))
            for place, state in places.items()
            if str(place).startswith(_TRAIN)
        }
        if any(deals.values()):
            limit = mapping(state_of_rank, "trainer").get("num_training_batches")
            return deals, limit if isinstance(limit, int) else None
    return None


def _of_line(state: Mapping[str, object]) -> RemainingBatches | None:
    try:
        return deal_from_json(state)
    except (TypeError, KeyError, ValueError, zlib.error):
        return None


def _of_record(record: object) -> RemainingBatches | None:
    if not isinstance(record, Mapping):
        return None
    if record.get("deal") is not None:
        return _deal(record["deal"])
    order, share = record.get("order"), record.get("share")
    if not isinstance(order, Mapping) or not isinstance(share, Mapping):
        return None
    return _deal({"order": order, "share": share, "begin": 0, "end": order.get("length")})


def _deal(state: Any) -> RemainingBatches | None:
    try:
        order, share = GlobalOrder(**state["order"]), RankShare(**state["share"])
        return RemainingBatches(order=order, begin=state["begin"], end=state["end"], share=share)
    except (TypeError, KeyError, ValueError):
        return None


def samples_of(deal: RemainingBatches, batch: int, num_batches: int | None) -> list[list[int]] | None:
    """Return the samples of a batch of an epoch, for each rank; ``None`` if the epoch has no such batch.

    Args:
        deal: How the samples of the epoch are shared.
        batch: The number of the batch, from 0.
        num_batches: How many batches the epoch has, if that is known.
    """
    found = []
    if batch >= _end(deal, num_batches):
        return None
    for rank in range(deal.share.num_ranks):
        own = replace(deal, share=replace(deal.share, rank=rank))
        if not own.first_batch <= batch < own.first_batch + own.num_batches:
            return None
        one: Any = next(own.batches(skip=batch - own.first_batch), None)
        found.append([] if one is None else one if isinstance(one, list) else [one])
    return found


def places_of(deal: RemainingBatches, sample: int, num_batches: int | None) -> Iterator[tuple[int, int, int]]:
    """Yield rank, batch, and row of a sample in an epoch, for each time that it comes.

    Args:
        deal: How the samples of the epoch are shared.
        sample: The index of the sample.
        num_batches: How many batches the epoch has, if that is known.
    """
    for rank in range(deal.share.num_ranks):
        own = replace(deal, share=replace(deal.share, rank=rank))
        for number, batch in enumerate(own.batches(), own.first_batch):
            if number >= _end(deal, num_batches):
                break
            rows = batch if isinstance(batch, list) else [batch]
            for row, index in enumerate(rows):
                if index == sample:
                    yield rank, number, row


def _end(deal: RemainingBatches, num_batches: int | None) -> float:
    is_cut = deal.end < deal.order.length  # then it has no other batches, and their numbers begin later
    return float("inf") if is_cut or num_batches is None else num_batches


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


def _directory_of(words: Sequence[str]) -> tuple[str | None, int]:
    """Run the script until its first fit begins. Return where its run is, and the exit code."""
    with tempfile.TemporaryDirectory(prefix="batch-") as directory:
        path = os.path.join(directory, "run")
        variables = {**os.environ, LOOKUP_VARIABLE: path}
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

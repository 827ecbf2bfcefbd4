"""In which order the epochs of a run had their samples: from its history, and from autosaves within an epoch."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_faulttolerant.checkpoint.autosave_directory import AUTOSAVE_NAME
from lightning_faulttolerant.checkpoint.kept_autosaves import kept_paths
from lightning_faulttolerant.checkpoint.schema import KEY
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.verify import load_path
from lightning_faulttolerant.cli.part import mapping
from lightning_faulttolerant.loader.remaining import GlobalOrder, RankShare, RemainingBatches, deal_from_json
from lightning_faulttolerant.records.history import FILE_NAME, FIT, ORDER, SKIPPED, START, name_of
from lightning_faulttolerant.records.lines import Line, parse_lines
from lightning_faulttolerant.records.runs import Parent, parent_from
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

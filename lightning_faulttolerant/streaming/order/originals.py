"""The orders of the original library, MosaicML Streaming, bit for bit: a run that began with it continues here.

Each order draws from one long stream of numpy's random numbers, so it can only be computed from the beginning. Each
epoch creates an array of all samples: 80 MB and 0.3 to 2 s for 10^7 samples. The default order has no such array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from lightning_faulttolerant.streaming.order.shuffles import Ints, PaddedRows


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """The shards of an epoch, in the order that a seed defines for all epochs, cut at the bounds of the rows.

    Args:
        begins: The first sample of each piece.
        sizes: The number of samples in each piece.
        rows: For each row, its first piece and the first piece of the next row.
        num_samples: The number of samples in the epoch.
        generator: The generator that draws for the epoch.
    """

    begins: Ints
    sizes: Ints
    rows: tuple[tuple[int, int], ...]
    num_samples: int
    generator: np.random.Generator


Shuffle = Callable[[Cut, int], Ints]


def naive(cut: Cut, block_size: int) -> Ints:
    """Permute all samples.

    Guarantees: the best possible mixing. Every node reads every shard, and nearly all of them in its first batches.
    """
    del block_size
    return cut.generator.permutation(cut.num_samples)


def py1s(cut: Cut, block_size: int) -> Ints:
    """Permute the shards of each canonical node, and the samples of each shard.

    Guarantees: each canonical node has one open shard, and the same samples in every epoch. Samples of different shards
    mix only because the canonical nodes are read side by side: 64 for each node, if their number isn't given.
    """
    del block_size
    return _drawn_in_pieces(cut, [*_drawn_rows(cut)])


def py2s(cut: Cut, block_size: int) -> Ints:
    """Like ``py1s``, but samples are also permuted inside shards before the cut.

    Guarantees: like ``py1s``. The canonical node of each sample in a shard at a bound is random as well.
    """
    # `shuffled` permutes the samples before the cut. A row is drawn when the previous one is done.
    del block_size
    return _drawn_in_pieces(cut, _drawn_rows(cut))


def _drawn_in_pieces(cut: Cut, rows: Iterable[list[int]]) -> Ints:
    ids = np.empty(cut.num_samples, np.int64)
    for piece, where in _laid_out(cut, rows):
        ids[where] = np.arange(cut.begins[piece], cut.begins[piece] + cut.sizes[piece])
        cut.generator.shuffle(ids[where])
    return ids


def py1br(cut: Cut, block_size: int) -> Ints:
    """Permute the shards of each canonical node, then the samples in blocks of 0.75 to 1.25 times ``block_size``.

    Guarantees: samples mix over a block. Each canonical node has the same samples in every epoch. A block needs all its
    shards when it begins. Blocks of different canonical nodes begin at different times.
    """
    pieces = [*_drawn_rows(cut)]
    ids = np.empty(cut.num_samples, np.int64)
    staggers = cut.generator.integers(0, int(0.75 * block_size), (len(cut.rows),))
    begin = 0
    for row, stagger in zip(pieces, staggers.tolist(), strict=True):
        stop = begin
        for piece in row:
            stop, start = stop + int(cut.sizes[piece]), stop
            ids[start:stop] = np.arange(cut.begins[piece], cut.begins[piece] + cut.sizes[piece])
        # All sizes of the row are drawn before its first block is permuted.
        for first, last in [*_staggered(cut.generator, begin, stop, stagger, block_size)]:
            cut.generator.shuffle(ids[first:last])
        begin = stop
    return ids


def _staggered(
    generator: np.random.Generator, begin: int, stop: int, stagger: int, block_size: int
) -> Iterator[tuple[int, int]]:
    reached = begin
    while reached < stop:
        drawn = int(generator.integers(int(0.75 * block_size), int(1.25 * block_size)))
        first, last = max(reached - stagger, begin), min(reached + drawn - stagger, stop)
        yield first, last
        # A block that is cut at the beginning of the row counts for its remaining part.
        reached += last - first


def py1e(cut: Cut, block_size: int) -> Ints:
    """Permute the shards of each canonical node and the samples of each shard, then move every sample a little.

    Guarantees: a sample moves by at most half of 0.75 to 1.25 times ``block_size``. So about a block of shards is open,
    and the shards are needed one by one. Each canonical node has the same samples in every epoch. A shard larger than
    the block is not mixed with others.

    Raises:
        ValueError: There are fewer samples than canonical nodes.
    """
    pieces = [*_drawn_rows(cut)]
    if not all(pieces):
        raise ValueError(
            f"The epoch has {cut.num_samples} samples for {len(pieces)} canonical nodes, and shuffle_algo='py1e' needs"
            " at least one for each. Pass a smaller num_canonical_nodes."
        )
    ids = np.empty(cut.num_samples, np.int64)
    begin = 0
    for row in pieces:
        of_row = ids[begin : begin + int(cut.sizes[row].sum())]
        for piece, where in _laid_out(cut, [row]):
            of_row[where] = np.arange(cut.begins[piece], cut.begins[piece] + cut.sizes[piece])
            cut.generator.shuffle(of_row[where])
        of_row[:] = of_row[np.argsort(_moved(cut, row, len(of_row), block_size))]
        begin += len(of_row)
    return ids


def _moved(cut: Cut, row: list[int], num_samples: int, block_size: int) -> np.ndarray:
    """Return the place that each sample of a row moves to. The samples are read in this order."""
    moved = np.arange(num_samples).astype(np.float64)
    for piece, where in _laid_out(cut, [row]):
        size = int(cut.sizes[piece])
        drawn = int(cut.generator.integers(int(0.75 * block_size), int(1.25 * block_size)))
        most = max((drawn - size) / 2, 0)
        low, high = max(-most, -where.start), min(most, num_samples - where.stop)
        moved[where] += cut.generator.uniform(low, high, size)
    return moved


def _drawn_rows(cut: Cut) -> Iterator[list[int]]:
    """Yield the pieces of each row, in the order of this epoch."""
    for first, last in cut.rows:
        row = np.arange(first, last)
        cut.generator.shuffle(row)
        yield row.tolist()


def _laid_out(cut: Cut, rows: Iterable[list[int]]) -> Iterator[tuple[int, slice]]:
    """Yield each piece with its new place."""
    stop = 0
    for row in rows:
        for piece in row:
            begin, stop = stop, stop + int(cut.sizes[piece])
            yield piece, slice(begin, stop)


SHUFFLES: dict[str, Shuffle] = {"naive": naive, "py1br": py1br, "py1e": py1e, "py1s": py1s, "py2s": py2s}


def default_block_size(num_canonical_nodes: int) -> int:
    """Return the original library's block size, in samples."""
    return max(4_000_000 // num_canonical_nodes, 1 << 18)


def default_canonical_nodes(algorithm: str | None, num_nodes: int) -> int:
    """Return the number of canonical nodes of a first run on ``num_nodes`` nodes: the original library's rule."""
    return 64 * num_nodes if algorithm in ("py1s", "py2s") else num_nodes


def kept_nodes(*, num_canonical_nodes: int, num_nodes: int, initial_nodes: int | None) -> int | None:
    """Return the number of nodes for which the original library keeps the order inside a global batch, or None.

    It is the number that the run began with, if the current number neither divides the canonical nodes nor is divided
    by them. Pass it to `RemainingPositions` as ``initial_nodes`` and to `epoch_order` as ``num_nodes``.

    Source: ``partition/relaxed.py`` of MosaicML Streaming 0.13.
    """
    fewer, more = sorted((num_nodes, num_canonical_nodes))
    return initial_nodes if more % fewer else None


def shuffled(
    algorithm: str, sizes: Ints, *, num_canonical_nodes: int, seed: int, epoch: int, block_size: int | None
) -> Ints:
    """Return the order of the samples of an epoch.

    Args:
        algorithm: A name in ``SHUFFLES``.
        sizes: The number of samples in each unit (a shard, or a part of it). No unit is empty.
        num_canonical_nodes: The number of rows.
        seed: The seed of the order.
        epoch: The epoch of the order.
        block_size: In samples. ``None`` is the original library's default.

    Source: ``shuffle/*.py`` of MosaicML Streaming 0.13.
    """
    for_all_epochs = np.random.default_rng(seed)
    order = np.arange(len(sizes))
    for_all_epochs.shuffle(order)
    samples = None
    if algorithm == "py2s":
        samples = _drawn_inside(sizes, order, for_all_epochs)
    cut = _cut(sizes, order, num_canonical_nodes, np.random.default_rng(seed + epoch), are_drawn=samples is not None)
    block_size = default_block_size(num_canonical_nodes) if block_size is None else block_size
    ids = SHUFFLES[algorithm](cut, block_size)
    return ids if samples is None else samples[ids]


def _drawn_inside(sizes: Ints, order: Ints, generator: np.random.Generator) -> Ints:
    """Return the samples shard after shard in the given order, permuted inside each shard."""
    begins = np.cumsum(sizes) - sizes
    drawn = [np.arange(begins[unit], begins[unit] + sizes[unit]) for unit in order]
    for samples in drawn:
        generator.shuffle(samples)
    return np.concatenate(drawn)


def _cut(sizes: Ints, order: Ints, num_rows: int, generator: np.random.Generator, *, are_drawn: bool) -> Cut:
    """Cut the units, laid end to end in the given order, at the bounds of the rows."""
    num_samples = int(sizes.sum())
    bounds = num_samples * np.arange(num_rows + 1, dtype=np.int64) // num_rows
    stops = np.cumsum(sizes[order])
    starts = stops - sizes[order]
    edges = np.union1d(starts, bounds)
    places = edges[:-1]
    unit = np.searchsorted(stops, places, side="right")
    begins = (np.cumsum(sizes) - sizes)[order[unit]] + places - starts[unit]
    firsts = np.searchsorted(places, bounds)
    return Cut(
        begins=places if are_drawn else begins,
        sizes=np.diff(edges),
        rows=tuple(zip(firsts[:-1].tolist(), firsts[1:].tolist(), strict=True)),
        num_samples=num_samples,
        generator=generator,
    )


class TableOrder:
    """An order that is stored as an array of all samples.

    Args:
        ids: The sample at each place.
        rows: The canonical nodes.
    """

    def __init__(self, ids: Ints, rows: PaddedRows) -> None:
        self._ids = ids
        self._rows = rows

    @property
    def num_positions(self) -> int:
        """The number of positions in the epoch, including repeats that give all canonical nodes equally many."""
        return self._rows.num_positions

    def sample_ids(self, positions: Ints) -> Ints:
        """Return the ids of the samples at these positions."""
        return self._ids[self._rows.places(np.asarray(positions, np.int64))]

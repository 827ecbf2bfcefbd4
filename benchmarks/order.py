"""The cost of an epoch's order, by number of samples and place of the resume: ours, and the original's.

It measures only the order: the index is synthetic, and nothing is read. A run pays this at each start of an epoch and
at each resume.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.runs import machine
from lightning_faulttolerant.streaming.order.epoch import epoch_order

SAMPLES_PER_SHARD = 4096
BATCH_SIZE = 256
SEED = 9176
POSITIONS = (0.0, 0.1, 0.5, 0.9, 0.99)
# The original takes 4 GB and 20 seconds for 100 million samples.
MOST_OF_MOSAIC = 10_000_000


def sizes_of(num_samples: int) -> np.ndarray[Any, Any]:
    """Return the made-up sizes of the shards."""
    whole, rest = divmod(num_samples, SAMPLES_PER_SHARD)
    return np.array([SAMPLES_PER_SHARD] * whole + [rest] * bool(rest), dtype=np.int64)


def ours(sizes: np.ndarray[Any, Any], position: int) -> Any:
    """Return the samples of the first batch at a position."""
    order = epoch_order([sizes], epoch=1, seed=SEED, shuffle=True)
    return order.sample_ids(np.arange(position, position + BATCH_SIZE))


def mosaic(sizes: np.ndarray[Any, Any], position: int) -> Any:
    """Return the same from the original's default shuffle, which computes the order of the whole epoch first."""
    # A script in this directory would import the streaming.py next to it instead of the package.
    sys.path[:] = [path for path in sys.path if Path(path) != Path(__file__).parent]
    from tests.foreign import mosaic as original

    num_samples = int(sizes.sum())
    partition = original("streaming.base.partition").get_partitions(
        "relaxed", num_samples, 1, 1, 1, 1, BATCH_SIZE, position
    )
    shuffle = original("streaming.base.shuffle").get_shuffle("py1e", sizes, 1, SEED, 1, max(4_000_000, 1 << 18))
    return shuffle[partition.ravel()[:BATCH_SIZE]]


def measure(function: Callable[[Any, int], Any], num_samples: int, *, at: float, rounds: int) -> dict[str, float]:
    """Return the median of the seconds until the first batch's samples are known, and the peak memory for it."""
    sizes = sizes_of(num_samples)
    position = int(num_samples * at) // BATCH_SIZE * BATCH_SIZE
    if num_samples <= MOST_OF_MOSAIC:
        function(sizes[:2], 0)  # triggers the imports
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        ids = function(sizes, position)
        seconds.append(time.perf_counter() - began)
        assert len(ids) == min(BATCH_SIZE, num_samples - position)
    tracemalloc.start()
    function(sizes, position)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {"s": statistics.median(seconds), "bytes": peak}


def main(arguments: list[str] | None = None) -> None:
    """Measure all orders, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each (default: 7)")
    parser.add_argument("--quick", action="store_true", help="few samples: figures mean nothing")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args(arguments)
    powers = (4, 5) if options.quick else (4, 5, 6, 7, 8, 9)
    rounds = 1 if options.quick else options.rounds
    sizes: dict[str, dict[str, Any]] = {}
    for power in powers:
        count = 10**power
        of = {"ours": measure(ours, count, at=0.9, rounds=rounds)}
        if count <= MOST_OF_MOSAIC:
            of["mosaic"] = measure(mosaic, count, at=0.9, rounds=min(rounds, 3))
        sizes[str(count)] = {"shards": len(sizes_of(count)), **of}
        print(f"{count:>13} samples: {of}", flush=True)
    most = 10 ** powers[-1]
    positions = {str(at): measure(ours, most, at=at, rounds=rounds) for at in POSITIONS}
    print(f"{most:>13} samples, by position: {positions}", flush=True)
    if options.output is not None:
        found = {"machine": machine(), "sizes": sizes, "positions": positions}
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The cost of a sampler for 10^4 to 10^9 samples: the time to a position, the memory, and the time of each later index.

torch's `DistributedSampler` has no position and is stepped forward to it; ours jumps there. Each figure comes from its
own process, with one rank. A case that would take more memory than `--gigabytes` is left out: torch's with 10^9.
Run `python benchmarks/samplers.py --help` from the repository.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DistributedSampler

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.runs import machine
from lightning_faulttolerant import InterruptibleDistributedSampler

AT = 0.9
_EXPONENTS = (4, 5, 6, 7, 8, 9)
_NUM_INDICES = 1_000_000


def _of_torch(length: int, skip: int) -> Iterator[int]:
    sampler: Any = DistributedSampler(range(length), num_replicas=1, rank=0)
    return islice(iter(sampler), skip, None)


def _ours(order: Any) -> Callable[[int, int], Iterator[int]]:
    def rest(length: int, skip: int) -> Iterator[int]:
        return InterruptibleDistributedSampler(length, 1, 0, order=order).iter_from(skip)

    return rest


SAMPLERS: dict[str, Callable[[int, int], Iterator[int]]] = {
    "DistributedSampler": _of_torch,
    'order="torch"': _ours("torch"),
    'order="feistel"': _ours("feistel"),
}
_BYTES_PER_SAMPLE = {"DistributedSampler": 56, 'order="torch"': 8, 'order="feistel"': 0}


def measure(name: str, length: int, *, rounds: int) -> dict[str, float]:
    """Return the medians of the seconds to an index at 90 %, its bytes, and the nanoseconds of each index after it."""
    found = [in_process_of_its_own(lambda: _once(SAMPLERS[name], length)) for _ in range(rounds)]
    return {key: statistics.median(of[key] for of in found) for key in found[0]}


def _once(rest: Callable[[int, int], Iterator[int]], length: int) -> dict[str, float]:
    torch.set_num_threads(1)
    next(rest(100, 1))  # torch's work on first use does not count
    before = _reset_peak_bytes()
    began = time.perf_counter()
    indices = rest(length, int(AT * length))
    next(indices)
    seek_s = time.perf_counter() - began
    count = min(_NUM_INDICES, length - int(AT * length) - 1)
    began = time.perf_counter()
    deque(islice(indices, count), maxlen=0)
    index_s = time.perf_counter() - began
    return {"seek_s": seek_s, "bytes": max(0, _peak_bytes() - before), "index_ns": index_s / count * 1e9}


def _reset_peak_bytes() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_bytes()


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [kilobytes] = [line.split()[1] for line in lines if line.startswith("VmHWM")]
    return int(kilobytes) * 1024


def in_process_of_its_own(main: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Run `main` in a forked process and return its result."""
    read_end, write_end = os.pipe()
    process_id = os.fork()
    if not process_id:
        try:
            os.write(write_end, json.dumps(main()).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as answer:
        found: dict[str, float] = json.loads(answer.read())
    os.waitpid(process_id, 0)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Measure all samplers over the lengths, print a table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short data sets once, to see that it runs")
    parser.add_argument("--gigabytes", type=float, default=6.0, help="the most memory that a sampler may take")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args(arguments)
    results: dict[str, dict[str, Any]] = {}
    print(f"{'samples':>8} {'sampler':20} {'to a position':>14} {'memory':>12} {'each index':>11}")
    for exponent in _EXPONENTS[:2] if options.quick else _EXPONENTS:
        of_length = results[f"10^{exponent}"] = {}
        for name in SAMPLERS:
            of_length[name] = None
            if 10**exponent * _BYTES_PER_SAMPLE[name] > options.gigabytes * 1e9:
                print(f"{'10^' + str(exponent):>8} {name:20} {'does not fit':>14}")
                continue
            found = measure(name, 10**exponent, rounds=1 if options.quick else 5 if exponent < 8 else 3)
            of_length[name] = found
            print(
                f"{'10^' + str(exponent):>8} {name:20} {found['seek_s'] * 1e3:11.2f} ms {found['bytes'] / 1e6:9.1f} MB"
                f" {found['index_ns']:8.0f} ns",
                flush=True,
            )
    if options.output is not None:
        figures = {"machine": machine(), "gigabytes": options.gigabytes, "cases": results}
        options.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

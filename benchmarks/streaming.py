"""Compare streaming data sets with MosaicML Streaming and LitData: samples per second, and time to the first batch.

Each library reads the same samples in its own process, which lives through all rounds. Each round calls the libraries
in a new random order. Ratios are taken within a round; the reported ratio is their median over the rounds.

Run `python benchmarks/streaming.py --help` from the repository.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.libraries import LIBRARIES, Data, Served, first_batch, throughput, write
from benchmarks.runs import machine

DATA = {
    data.name: data
    for data in (
        Data(name="small", num_samples=200_000, dtype="int32", length=64, shard_bytes=1 << 20, batch_size=256),
        Data(name="big", num_samples=5_000, dtype="uint8", length=1 << 16, shard_bytes=1 << 24, batch_size=32),
    )
}
POSITIONS = (0.0, 0.1, 0.5, 0.9, 0.99)
COLD = (0.0, 0.9)
WORKERS = (0, 2)
_DISTRIBUTIONS = {"mosaic": "mosaicml-streaming", "litdata": "litdata"}
Found = dict[str, list[float]]


def rounds_of(served: Iterable[Served], num_rounds: int, ask: Callable[[Served], float]) -> Found:
    """Call each library in each round, in a new random order. Return the answers by name, one per round."""
    found: Found = {each.name: [] for each in served}
    for _ in range(num_rounds):
        for each in random.sample(list(served), len(found)):
            found[each.name].append(ask(each))
    return found


def summary(found: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return each library's median, and the median and range of the per-round ratios of ours to the others."""
    medians = {name: statistics.median(values) for name, values in found.items()}
    ratios = {}
    for name in found.keys() - {"ours"} if "ours" in found else ():
        of_rounds = [ours / other for ours, other in zip(found["ours"], found[name], strict=True)]
        ratios[name] = {"ratio": statistics.median(of_rounds), "low": min(of_rounds), "high": max(of_rounds)}
    return {"medians": medians, "ratios": ratios}


def speeds(served: list[Served], places: Mapping[str, Path], data: Data, *, rounds: int, seconds: float) -> Any:
    """Return samples per second, by workers and shuffle."""
    cases = []
    for num_workers in WORKERS:
        for shuffle in (False, True):
            options = {"num_workers": num_workers, "shuffle": shuffle, "seconds": seconds}
            found = rounds_of(
                served,
                rounds,
                lambda each, options=options: each.call(throughput, data, places[each.format], **options),
            )
            case = {"workers": num_workers, "shuffle": shuffle, **summary(found)}
            _print(f"{data.name}, {num_workers} workers{', shuffled' * shuffle}", case, ".0f")
            cases.append(case)
    return cases


def first_batches(
    served: list[Served],
    places: Mapping[str, Path],
    data: Data,
    *,
    rounds: int,
    positions: tuple[float, ...],
    cold: bool,
) -> list[dict[str, Any]]:
    """Return the seconds to the first batch, by workers and position, and the number of shards fetched by then."""
    cases = []
    for num_workers in WORKERS:
        for at in positions:
            fetched: Found = {each.name: [] for each in served}

            def ask(each: Served, num_workers: int = num_workers, at: float = at, fetched: Found = fetched) -> float:
                place = places[each.format]
                seconds, shards = each.call(first_batch, data, place, num_workers=num_workers, at=at, cold=cold)
                fetched[each.name].append(shards)
                return float(seconds)

            found = rounds_of(served, rounds, ask)
            case = {"workers": num_workers, "at": at, **summary(found)}
            if cold:
                case["fetched"] = {name: statistics.median(counts) for name, counts in fetched.items()}
            _print(f"{data.name}, {num_workers} workers, first batch at {at:.0%}{', cold' * cold}", case, ".4f")
            cases.append(case)
    return cases


def _version(name: str) -> str:
    distribution = _DISTRIBUTIONS[name]
    return f"{distribution} {importlib.metadata.version(distribution)}"


def _print(name: str, case: Mapping[str, Any], form: str) -> None:
    medians = " ".join(f"{library} {value:{form}}" for library, value in case["medians"].items())
    ratios = " ".join(
        f"x{of['ratio']:.2f} ({of['low']:.2f}-{of['high']:.2f}) {library}" for library, of in case["ratios"].items()
    )
    print(f"{name:44} {medians} | {ratios} {case.get('fetched', '')}", flush=True)


def measure(
    names: list[str],
    directory: Path,
    *,
    data: list[Data],
    rounds: int,
    seconds: float,
    positions: tuple[float, ...] = POSITIONS,
) -> dict[str, Any]:
    """Write the data sets, then measure everything."""
    served = [Served(name, directory) for name in names]
    try:
        kinds: dict[str, Callable[..., Any]] = {
            "speed": partial(speeds, seconds=seconds),
            "warm": partial(first_batches, positions=positions, cold=False),
            "cold": partial(first_batches, positions=COLD, cold=True),
        }
        cases: dict[str, Any] = {}
        loads = []
        for each in data:
            places = {of.format: directory / f"{each.name}-{of.format}" for of in served}
            for format_, place in places.items():
                next(of for of in served if of.format == format_).call(write, each, place)
            shards = {
                format_: sum(path.suffix in (".mds", ".bin") for path in place.iterdir())
                for format_, place in places.items()
            }
            measured = {}
            for kind, measure_kind in kinds.items():
                measured[kind] = measure_kind(served, places, each, rounds=rounds)
                loads.append(os.getloadavg()[0])
            cases[each.name] = {"samples": each.num_samples, "shards": shards, **measured}
        return {
            "versions": ", ".join(_version(name) for name in names if name in _DISTRIBUTIONS),
            "import_s": {each.name: each.import_seconds for each in served},
            "rounds": rounds,
            "loads": sorted(loads),
            "cases": cases,
        }
    finally:
        for each in served:
            each.close()


def _few(data: Data) -> Data:
    return replace(
        data, num_samples=data.num_samples // 50, shard_bytes=data.shard_bytes // 8, batch_size=data.batch_size // 8
    )


def main(arguments: list[str] | None = None) -> None:
    """Measure the requested libraries, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--library", action="append", choices=LIBRARIES, help="only this one; may be given several times"
    )
    parser.add_argument("--data", action="append", choices=DATA, help="only this one; may be given several times")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each (default: 7)")
    parser.add_argument("--seconds", type=float, default=4.0, help="a measurement takes at most so long (default: 4)")
    parser.add_argument("--quick", action="store_true", help="few samples, one round: figures mean nothing")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args(arguments)
    data = [DATA[name] for name in options.data or DATA]
    if options.quick:
        options.rounds, options.seconds = 1, 0.1
        data = [_few(each) for each in data]
    with tempfile.TemporaryDirectory() as directory:
        found = measure(
            options.library or list(LIBRARIES),
            Path(directory),
            data=data,
            rounds=options.rounds,
            seconds=options.seconds,
            positions=COLD if options.quick else POSITIONS,
        )
    if options.output is not None:
        options.output.write_text(json.dumps({"machine": machine(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

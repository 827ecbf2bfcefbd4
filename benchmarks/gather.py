"""The cost of saving and resuming with up to 16,384 ranks: rank 0's work is done for real, the network is modeled.

The state of one rank comes from a fit with two ranks and 8 workers each. It is copied for each of the other ranks. The
ranks' own work is measured where it happens. The exchange is measured in as many processes as the machine can run.

Run `python benchmarks/gather.py --help` from the repository.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import pickle
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.parts import Clocked
from benchmarks.ranks import in_ranks
from benchmarks.runs import TimedModel, be_quiet, fit, machine
from benchmarks.size import KEY, DrawAtEachStep, DrawingDataset
from lightning_faulttolerant import FaultTolerance, atomic_torch_save
from lightning_faulttolerant.checkpoint.ranks import RankReader, as_bytes, joined, packed_state
from lightning_faulttolerant.checkpoint.verify import load_file, unsafe_paths
from lightning_faulttolerant.state.packing import difference, digests_of, pack_blobs
from lightning_faulttolerant.trainer.ranks.gather import full_state, state_of
from lightning_faulttolerant.trainer.ranks.nodes import NodeGroup
from lightning_faulttolerant.trainer.save.run_state import RunState

NUM_WORKERS = 8
NUM_RANKS = (8, 64, 512, 1024, 4096, 16384)
RANKS_PER_NODE = 8
# Assumptions of the model, since there is only one machine here: a network of 10 Gbit/s at rank 0, and the time from
# one rank to the next, waking it included.
BYTES_PER_SECOND = 1.25e9
HOP_SECONDS = 50e-6
_BATCH_SIZE, _STEP = 32, 60


def states(directory: Path, num_workers: int, *, alike: bool) -> tuple[dict[str, Any], dict[str, float]]:
    """Return an autosave of two ranks in the middle of an epoch, and the cost of building a state.

    Args:
        directory: Directory for the run.
        num_workers: Number of workers of each rank.
        alike: Whether both ranks have the same seed, as `seed_everything` gives them.
    """
    seconds = in_ranks(_fit_and_save, 2, directory, num_workers, alike)
    [path] = directory.rglob(f"*batch={_STEP}.ckpt")
    checkpoint = load_file(path)
    first, second = (state_of(checkpoint[KEY], rank, checkpoint) for rank in range(2))
    digests = digests_of(full_state(first, checkpoint, TimedModel()))
    seconds["pack_s"] = median_of(lambda: pack_blobs(difference(second, digests)))
    return checkpoint, seconds


def _fit_and_save(directory: Path, num_workers: int, alike: bool) -> dict[str, float]:
    if alike:
        seed_everything(0, workers=True, verbose=False)
    else:
        np.random.seed(random.randrange(2**32))
    loader = DataLoader(
        DrawingDataset(32, 2 * _STEP * _BATCH_SIZE * 3 // 2),
        batch_size=_BATCH_SIZE,
        shuffle=True,
        num_workers=num_workers,
    )
    callbacks = [FaultTolerance(directory, run_id="gather", every_n_train_steps=_STEP), DrawAtEachStep()]
    with Clocked(RunState, "state_dict") as clocked:
        fit(TimedModel(), loader, callbacks, directory, num_ranks=2)
    return {"state_s": statistics.median(clocked.seconds[1:])}


def exchange(num_ranks: int, num_bytes: int, rounds: int) -> dict[str, float]:
    """Return the cost of connecting `num_ranks` real processes, each as a node, and sending `num_bytes` to rank 0."""
    found: dict[str, float] = in_ranks(_tell, num_ranks, num_bytes, rounds)
    return found


def _tell(num_bytes: int, rounds: int) -> dict[str, float]:
    dist.init_process_group("gloo")
    descriptors, began = len(os.listdir("/proc/self/fd")), time.perf_counter()
    channel = NodeGroup(
        _get_default_store(),
        timedelta(seconds=60),
        rank=dist.get_rank(),
        num_ranks=dist.get_world_size(),
        host="127.0.0.1",
        node=str(dist.get_rank()),
    )
    connect = time.perf_counter() - began
    descriptors = len(os.listdir("/proc/self/fd")) - descriptors
    value = os.urandom(num_bytes)
    channel.to_first("first", value)
    seconds, used = [], time.process_time()
    for _ in range(rounds):
        began = time.perf_counter()
        channel.to_first("value", value)
        seconds.append(time.perf_counter() - began)
    used = (time.process_time() - used) / rounds
    channel.from_first("end", None)
    dist.barrier()
    return {"connect_s": connect, "s": statistics.median(seconds), "processor_s": used, "descriptors": descriptors}


def first_ranks_work(checkpoint: dict[str, Any], num_ranks: int, directory: Path) -> dict[str, float]:
    """Return the work of rank 0 alone with the states of `num_ranks`, and the work of each rank that resumes."""
    first, other = (packed_state(checkpoint[KEY], rank) for rank in range(2))
    pickled = pickle.dumps(as_bytes(other))
    began = time.perf_counter()
    states = joined([first, *(pickle.loads(pickled) for _ in range(num_ranks - 1))])
    join = time.perf_counter() - began
    whole = {**checkpoint, KEY: {**checkpoint[KEY], **states, "world_size": num_ranks}}
    check = median_of(lambda: unsafe_paths(whole), 3)
    path = directory / "gathered.ckpt"
    write = median_of(lambda: atomic_torch_save(whole, path), 3)
    read, verify = (
        median_of(partial(RankReader(rank=rank, num_ranks=num_ranks).load, path, verifies_all=rank == 0), 3)
        for rank in (num_ranks - 1, 0)
    )
    size = path.stat().st_size
    alone = {**checkpoint, KEY: {**checkpoint[KEY], "ranks": [], "states": {}}}
    atomic_torch_save(alone, path)
    part = size - path.stat().st_size
    path.unlink()
    return {
        "part_bytes": part,
        "told_bytes": len(pickled) * (num_ranks - 1),
        "join_s": join,
        "check_s": check,
        "write_s": write,
        "read_s": read,
        "verify_s": verify,
    }


def median_of(call: Callable[[], Any], times: int = 9) -> float:
    """Return the median of the seconds that a call takes."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def slope(points: dict[int, float]) -> float:
    """Return the growth of the values with each rank, by least squares."""
    at, values = statistics.mean(points), statistics.mean(points.values())
    return sum((n - at) * (value - values) for n, value in points.items()) / sum((n - at) ** 2 for n in points)


def modelled(work: dict[str, float], num_ranks: int, each_s: float) -> dict[str, float]:
    """Return `work` with the time that sending to rank 0 takes.

    The first rank of each node receives a message of each other rank there, all nodes at the same time. Then rank 0
    receives the bytes of all ranks, with some work for each message: one of each node and of each rank of its node.
    """
    messages = RANKS_PER_NODE - 1 + num_ranks // RANKS_PER_NODE - 1
    at_nodes = HOP_SECONDS + (RANKS_PER_NODE - 1) * each_s
    network = at_nodes + HOP_SECONDS + messages * each_s + work["told_bytes"] / BYTES_PER_SECOND
    save = network + sum(work[name] for name in ("join_s", "check_s", "write_s"))
    return {**work, "network_s": network, "save_s": save}


def measure(directory: Path, *, quick: bool) -> dict[str, Any]:
    """Return the parts, and their total for each number of ranks."""
    num_ranks = NUM_RANKS[:2] if quick else NUM_RANKS
    exchanged = {n: exchange(n, 1000, 3 if quick else 20) for n in ((2, 4) if quick else (2, 4, 8, 16, 32))}
    each_s = max(0.0, slope({n: found["processor_s"] for n, found in exchanged.items()}))
    kinds = {}
    for name, alike in (("each with its own seed", False), ("seeded alike", True)):
        checkpoint, own = states(directory / name, 2 if quick else NUM_WORKERS, alike=alike)
        works = {n: first_ranks_work(copy.copy(checkpoint), n, directory) for n in num_ranks}
        kinds[name] = {**own, "ranks": {str(n): modelled(work, n, each_s) for n, work in works.items()}}
    return {
        "num_workers": NUM_WORKERS,
        "bytes_per_second": BYTES_PER_SECOND,
        "hop_s": HOP_SECONDS,
        "each_s": each_s,
        "exchanged": {str(n): found for n, found in exchanged.items()},
        "cases": kinds,
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure, print tables and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a short run, to see that it runs: figures mean nothing")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args(arguments)
    be_quiet()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        found = measure(Path(directory), quick=options.quick)
    for n, of in found["exchanged"].items():
        print(
            f"{n:>5} real ranks: connected in {of['connect_s'] * 1e3:.1f} ms, {of['descriptors']} descriptors of rank 0"
            f"; a round {of['s'] * 1e3:6.2f} ms, of rank 0's processor {of['processor_s'] * 1e3:6.2f} ms"
        )
    for name, case in found["cases"].items():
        print(f"{name}: state made in {case['state_s'] * 1e3:.2f} ms, packed in {case['pack_s'] * 1e3:.2f} ms")
        pieces = ("network", "join", "check", "write", "verify", "read")
        print(f"{'ranks':>6} {'our part':>10} {' '.join(f'{piece:>9}' for piece in pieces)}")
        for n, of in case["ranks"].items():
            seconds = " ".join(f"{of[f'{piece}_s'] * 1e3:6.0f} ms" for piece in pieces)
            print(f"{n:>6} {of['part_bytes'] / 1e6:7.2f} MB {seconds}")
    if options.output is not None:
        options.output.write_text(json.dumps({"machine": machine(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

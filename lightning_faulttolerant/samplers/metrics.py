"""Metrics of a user's loop, reduced over ranks, steps, and epochs; and a timer of its steps.

The ranks sum up a metric, average it, or take its minimum or maximum. Every contribution is counted once, however often
it is reduced. Ranks may know different names, in any order.

The timer reports how long the steps of a script take, and its total time, across restarts.
"""

from __future__ import annotations

import hashlib
import logging
import operator
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from lightning_faulttolerant.errors import FaultToleranceError, NotExactError
from lightning_faulttolerant.streaming.world import current_world

_log = logging.getLogger(__name__)
_VERSION = 2
OPERATIONS = ("sum", "mean", "min", "max")
_EMPTY = {"sum": 0.0, "mean": 0.0, "min": float("inf"), "max": float("-inf")}


@dataclass(frozen=True, slots=True)
class Amount:
    """The accumulated value of one metric: a sum, a minimum, or a maximum; and the number of values."""

    value: float
    count: int

    def of(self, operation: str) -> float:
        """Return the metric: the sum, the minimum, the maximum, or the mean."""
        return self.value / self.count if operation == "mean" else self.value

    def joined(self, other: Amount | None, operation: str) -> Amount:
        """Return both amounts combined."""
        if other is None:
            return self
        join = {"min": min, "max": max}.get(operation, operator.add)
        return Amount(join(self.value, other.value), self.count + other.count)


_Amounts = dict[str, Amount]


class MetricsTracker:
    """Track metrics of all ranks over steps and epochs.

    Without a process group, it tracks this process's metrics. Every method that changes something returns the tracker.

    Args:
        reduce_op: The operation on the values of a metric: ``"sum"``, ``"mean"`` (over all values passed to `update`),
            ``"min"``, or ``"max"``. It may also be a dict of one of these for each name, with ``"sum"`` for missing
            names. It is the same on all ranks.
        device: The device of the exchange; by default one that the process group supports: the current CUDA device for
            NCCL, else the CPU.
        dtype: The data type of the exchange; ``float64`` is exact for counts up to 2**53.
        group: The process group; by default the one of all ranks.

    Raises:
        ValueError: If the operation doesn't exist, or `dtype` is not a floating-point type.

    Example:
        >>> metrics = MetricsTracker()
        >>> for loss in (2.0, 3.0):
        ...     _ = metrics.update({"loss": loss, "num_samples": 4}).reduce().reset_local()
        >>> metrics.end_epoch().epoch_reports
        [{'loss': 5.0, 'num_samples': 8.0}]
    """

    def __init__(
        self,
        reduce_op: str | Mapping[str, str] = "sum",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float64,
        group: Any = None,
    ) -> None:
        operations = (reduce_op,) if isinstance(reduce_op, str) else tuple(reduce_op.values())
        unknown = [operation for operation in operations if operation not in OPERATIONS]
        if unknown:
            raise ValueError(f"reduce_op={unknown[0]!r}: it must be one of {', '.join(map(repr, OPERATIONS))}.")
        if not dtype.is_floating_point:
            raise ValueError(f"dtype={dtype}: it must be a floating-point type.")
        self._reduce_op = reduce_op if isinstance(reduce_op, str) else dict(reduce_op)
        self._device, self._dtype, self._group = device, dtype, group
        self._pending: _Amounts = {}  # this rank's, not exchanged yet
        self._reduced: _Amounts = {}  # all ranks', since reset_local
        self._aggregated: _Amounts = {}  # all ranks', since end_epoch
        self._agreed: tuple[str, ...] = ()
        self.epoch_reports: list[dict[str, float]] = []
        """The metrics of each epoch that has ended."""

    def operation(self, name: str) -> str:
        """Return the operation on the values of a metric."""
        return self._reduce_op if isinstance(self._reduce_op, str) else self._reduce_op.get(name, "sum")

    @property
    def local(self) -> Mapping[str, float]:
        """The metrics since `reset_local`: the reduced values of all ranks, and this rank's values since then."""
        return MappingProxyType(self._values(self._joined(self._reduced, self._pending)))

    @property
    def agg(self) -> Mapping[str, float]:
        """The reduced metrics of all ranks since `end_epoch`."""
        return MappingProxyType(self._values(self._aggregated))

    def _values(self, amounts: _Amounts) -> dict[str, float]:
        return {name: amount.of(self.operation(name)) for name, amount in amounts.items()}

    def _joined(self, first: _Amounts, second: _Amounts) -> _Amounts:
        return first | {name: amount.joined(first.get(name), self.operation(name)) for name, amount in second.items()}

    def update(self, metrics: Mapping[str, float | torch.Tensor]) -> MetricsTracker:
        """Add this rank's values.

        Args:
            metrics: Numbers, or tensors of one number, by name.

        Raises:
            TypeError: If a name is not a string, or a value not a number; nothing is added then.
        """
        for name, value in metrics.items():
            if not isinstance(name, str) or (isinstance(value, torch.Tensor) and value.numel() != 1):
                raise TypeError(f"update({{{name!r}: {value!r}}}): a metric is one number with a name.")
        added = {name: Amount(float(value), 1) for name, value in metrics.items()}
        self._pending = self._joined(self._pending, added)
        return self

    def reduce(self) -> MetricsTracker:
        """Exchange the values added since the last call with all ranks. Every rank must call it, even without metrics.

        Raises:
            FaultToleranceError: On all ranks, if they use different operations for one metric.
        """
        found = self._exchanged() if self._is_distributed() else self._pending
        self._pending = {}
        self._reduced = self._joined(self._reduced, found)
        self._aggregated = self._joined(self._aggregated, found)
        return self

    def reset_local(self) -> MetricsTracker:
        """Begin the next step: `local` is empty."""
        self._pending, self._reduced = {}, {}
        return self

    def end_epoch(self) -> MetricsTracker:
        """Begin the next epoch: `agg` moves to `epoch_reports`, and is empty afterwards."""
        self.epoch_reports.append(dict(self.agg))
        self._aggregated = {}
        return self.reset_local()

    def _is_distributed(self) -> bool:
        return dist.is_available() and dist.is_initialized()

    def _exchanged(self) -> _Amounts:
        """Return the pending amounts of all ranks combined: two or three small exchanges, if all know the names."""
        device = self._device_of_exchange()
        self._agree(device)
        sums = [name for name in self._agreed if self.operation(name) in ("sum", "mean")]
        extremes = [name for name in self._agreed if self.operation(name) in ("min", "max")]
        counts = {name: self._pending[name].count if name in self._pending else 0 for name in self._agreed}
        values = {name: self._pending.get(name, Amount(_EMPTY[self.operation(name)], 0)).value for name in self._agreed}
        numbers = [*(values[name] for name in sums), *(float(counts[name]) for name in self._agreed)]
        summed = self._all_reduced(numbers, device, dist.ReduceOp.SUM)
        signs = {name: -1.0 if self.operation(name) == "min" else 1.0 for name in extremes}
        most = self._all_reduced([signs[name] * values[name] for name in extremes], device, dist.ReduceOp.MAX)
        total = dict(zip(sums, summed, strict=False)) | {
            name: signs[name] * value for name, value in zip(extremes, most, strict=True)
        }
        all_counts = dict(zip(self._agreed, summed[len(sums) :], strict=True))
        return {name: Amount(total[name], round(all_counts[name])) for name in self._agreed if all_counts[name]}

    def _all_reduced(self, numbers: list[float], device: torch.device | str, operation: Any) -> list[float]:
        if not numbers:
            return []
        tensor = torch.tensor(numbers, dtype=self._dtype, device=device)
        dist.all_reduce(tensor, op=operation, group=self._group)
        return [float(value) for value in tensor.tolist()]

    def _agree(self, device: torch.device | str) -> None:
        """Agree with all ranks on the same names, in the same order."""
        digest = hashlib.blake2b(repr((self._agreed, self._reduce_op)).encode(), digest_size=6).digest()
        fingerprint = int.from_bytes(digest, "little")
        is_new = int(not self._pending.keys() <= set(self._agreed))
        tensor = torch.tensor([fingerprint, -fingerprint, is_new], dtype=torch.int64, device=device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        largest, smallest, any_is_new = tensor.tolist()
        if largest == -smallest and not any_is_new:
            return
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, ({*self._agreed, *self._pending}, self._reduce_op), group=self._group)
        others = [reduce_op for _, reduce_op in found if reduce_op != found[0][1]]
        if others:
            raise FaultToleranceError(
                f"Ranks reduce their metrics differently, by {found[0][1]!r} and by {others[0]!r}. The results would "
                "be wrong. Give every rank the same reduce_op."
            )
        self._agreed = tuple(sorted(set().union(*(names for names, _ in found))))

    def _device_of_exchange(self) -> torch.device | str:
        if self._device is not None:
            return self._device
        if "nccl" in str(dist.get_backend(self._group)) and "gloo" not in str(dist.get_backend(self._group)):
            return torch.device("cuda", torch.cuda.current_device())
        return "cpu"

    def state_dict(self) -> dict[str, Any]:
        """Return the tracked values as plain dicts and numbers. Values that are not reduced yet belong to this rank."""
        rank, num_ranks = self._place()
        return {
            "version": _VERSION,
            "epoch_reports": [dict(report) for report in self.epoch_reports],
            "reduce_op": self._reduce_op if isinstance(self._reduce_op, str) else dict(self._reduce_op),
            "agg": {name: amount.value for name, amount in self._aggregated.items()},
            "agg_counts": {name: amount.count for name, amount in self._aggregated.items()},
            "reduced": _plain(self._reduced),
            "pending": _plain(self._pending),
            "rank": rank,
            "num_ranks": num_ranks,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> MetricsTracker:
        """Continue from a state of `state_dict`, of this package or of the original library.

        Args:
            state_dict: A state of a tracker with the same `reduce_op`, or the original's ``{"epoch_reports", "agg"}``.
            strict: Whether it is an error if the state holds unreduced values of another rank, or of a different number
                of ranks. Otherwise they are left out and logged.

        Raises:
            NotExactError: If it holds such values, and `strict`; or if it was reduced with other operations.
            ValueError: If it is not a state of a tracker.
        """
        if state_dict.get("version", 1) not in (1, _VERSION) or not {"epoch_reports", "agg"} <= state_dict.keys():
            raise ValueError(f"This is not a state of a MetricsTracker: it has {sorted(state_dict)}.")
        reduce_op = state_dict.get("reduce_op", "sum")
        if reduce_op != self._reduce_op:
            raise NotExactError(
                f"The metrics were reduced by {reduce_op!r}, but this tracker has reduce_op={self._reduce_op!r}. The "
                "values can't be converted. Create the tracker with the saved reduce_op."
            )
        counts = state_dict.get("agg_counts", {})
        aggregated = {name: Amount(float(value), int(counts.get(name, 1))) for name, value in state_dict["agg"].items()}
        reduced, pending = _amounts(state_dict.get("reduced", {})), _amounts(state_dict.get("pending", {}))
        if pending and (state_dict["rank"], state_dict["num_ranks"]) != self._place():
            pending = self._of_another_rank(state_dict, strict=strict)
        reports = [{name: float(value) for name, value in report.items()} for report in state_dict["epoch_reports"]]
        self.epoch_reports, self._aggregated, self._reduced, self._pending = reports, aggregated, reduced, pending
        return self

    def _of_another_rank(self, state: Mapping[str, Any], *, strict: bool) -> _Amounts:
        rank, num_ranks = self._place()
        message = (
            f"The state holds values of rank {state['rank']} of {state['num_ranks']} that were not reduced, but this "
            f"is rank {rank} of {num_ranks}. Several ranks would count these values, and none those of others. Call "
            "reduce() before you save one state for all ranks, or save one state per rank, or pass strict=False to "
            "leave them out."
        )
        if strict:
            raise NotExactError(message)
        _log.warning(message)
        return {}

    def _place(self) -> tuple[int, int]:
        if not self._is_distributed():
            return 0, 1
        return dist.get_rank(self._group), dist.get_world_size(self._group)


def _plain(amounts: _Amounts) -> dict[str, list[float]]:
    return {name: [amount.value, amount.count] for name, amount in amounts.items()}


def _amounts(plain: Mapping[str, Any]) -> _Amounts:
    return {name: Amount(float(value), int(count)) for name, (value, count) in plain.items()}


_TIMER_VERSION = 1


class TimestampedTimer:
    """Report the time since the last report, and the total time.

    Reports come from rank 0. The clock is monotonic: neither daylight saving nor a manual change affects it.

    Args:
        report: The text of the first report; by default "Start".
        start_time: The start of the first step, as of ``time.monotonic()``; by default now.
        running: Seconds that an earlier process counted.
        sync_cuda: Whether to wait for the GPU to finish its work before a time is taken.
        sink: Receives a line of text.
        rank: The rank of this process; by default read from the process group or the environment.

    Example:
        >>> timer = TimestampedTimer(running=60, sink=lambda line: None)
        >>> seconds = timer.report("loading", ret=True)
        >>> timer.running >= 60
        True
    """

    def __init__(
        self,
        report: str | None = None,
        start_time: float | None = None,
        running: float = 0,
        *,
        sync_cuda: bool = False,
        sink: Callable[[str], object] = print,
        rank: int | None = None,
    ) -> None:
        self._sync_cuda, self._sink, self._rank = sync_cuda, sink, rank
        self.running: float = running
        """The total seconds until the last report."""
        self.start_time = self._now() if start_time is None else start_time
        """The start of the current step."""
        self._say(report or "Start", 0.0)

    def report(self, annot: str, ret: bool = False) -> float | None:
        """Report how long the step took that ends here; the next one begins.

        Args:
            annot: The name of the step.
            ret: Whether to return its seconds.
        """
        now = self._now()
        seconds = now - self.start_time
        self.running += seconds
        self.start_time = now
        self._say(annot, seconds)
        return seconds if ret else None

    def _now(self) -> float:
        if self._sync_cuda and torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.monotonic()

    def _is_reporting(self) -> bool:
        if self._rank is not None:
            return self._rank == 0
        try:
            return current_world().rank == 0
        except FaultToleranceError:  # the rank is not known yet; an extra report does no harm
            return True

    def _say(self, text: str, seconds: float) -> None:
        if self._is_reporting():
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            step, total = f"{1000 * seconds:,.3f}", f"{self.running:,.3f}"
            self._sink(f"[ {stamp} ] {text:<70}{step:>12} ms, {total:>12} s total")

    def state_dict(self) -> dict[str, Any]:
        """Return the total seconds, including those of the current step."""
        return {"version": _TIMER_VERSION, "running": self.running + self._now() - self.start_time}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the seconds of an earlier process. The current step begins now.

        Raises:
            ValueError: If it is not a state of a timer.
        """
        if state_dict.get("version") != _TIMER_VERSION or not isinstance(state_dict.get("running"), (int, float)):
            raise ValueError(f"This is not a state of a TimestampedTimer: {dict(state_dict)!r}.")
        self.running, self.start_time = float(state_dict["running"]), self._now()

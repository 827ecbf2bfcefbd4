"""The points of an MLflow run. A resumed fit logs the points after its autosave again, and the run already has them.

MLflow keeps each value that it gets, even a second time. The points come again in the same order, with the same steps
and values. So the first points of each metric are skipped: as many as the run has beyond the autosave's count.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.loggers import MLFlowLogger

from lightning_faulttolerant.trainer.experiments import compat
from lightning_faulttolerant.trainer.patches import Method, Patches

_log = logging.getLogger(__name__)

Point = tuple[int, float]


class MLflowPoints:
    """Counts the points of a run, and skips those that it already has.

    Args:
        logger: The logger of the run, which has begun.
        patches: Removes our counting from its client later.
        is_resumed: Whether the run is continued, so its start is logged again.
    """

    def __init__(self, logger: MLFlowLogger, patches: Patches, *, is_resumed: bool) -> None:
        self._client = compat.client_of(logger)
        self._run_id = str(logger.run_id)
        self._found = _points_of(self._client, self._run_id)
        self._num_points = _numbers(self._found)
        self._num_to_pass: Counter[str] = Counter()
        self._params = dict(self._client.get_run(self._run_id).data.params) if is_resumed else {}
        self._changed_params: dict[str, None] = {}
        patches.around(self._client, "log_batch", self._log_batch)
        patches.around(self._client, "log_metric", self._log_metric)

    def resume(self, state: Mapping[str, Any]) -> list[str]:
        """Skip what the run already had when this process continued it; return what a user should know.

        Args:
            state: The result of `state_dict`.
        """
        logged, have = Counter(state["num_points"]), _numbers(self._found)
        self._num_to_pass = have - logged
        self._num_points -= self._num_to_pass
        self._params = {}
        lost = logged - have
        notes = []
        if lost:
            notes.append(f"MLflow does not have {lost.total()} of the {logged.total()} values that were logged by then")
        if self._changed_params:
            notes.append(f"MLflow keeps the first value of {', '.join(self._changed_params)}, which is another one now")
        return notes

    def state_dict(self) -> dict[str, Any]:
        """Return how many points each metric has so far, each point counted once."""
        return {"num_points": dict(self._num_points)}

    def _log_batch(
        self,
        log_batch: Method,
        run_id: str,
        metrics: Sequence[Any] = (),
        params: Sequence[Any] = (),
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if run_id != self._run_id:
            return log_batch(run_id, metrics, params, *args, **kwargs)
        new = [one for one in metrics if not self._passes(one.key, one.step, one.value)]
        if metrics and not (new or params or args or kwargs.get("tags")):
            return None
        return log_batch(run_id, new, [one for one in params if self._takes(one)], *args, **kwargs)

    def _log_metric(
        self,
        log_metric: Method,
        run_id: str,
        key: str,
        value: float,
        timestamp: Any = None,
        step: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if run_id == self._run_id and self._passes(key, step or 0, value):
            return None
        return log_metric(run_id, key, value, timestamp, step, *args, **kwargs)

    def _takes(self, param: Any) -> bool:
        """Return whether MLflow accepts a parameter: another value for an existing one is an error there."""
        if self._params.get(param.key, param.value) == param.value:
            return True
        self._changed_params[param.key] = None
        return False

    def _passes(self, key: str, step: int, value: float) -> bool:
        """Count a point; return whether the run already has it."""
        self._num_points[key] += 1
        if self._num_to_pass[key] <= 0:
            return False
        if not self._found[key][_point(step, value)]:
            _log.warning("MLflow has other values of %s after the autosave than are logged now: it gets both.", key)
            del self._num_to_pass[key]
            return False
        self._num_to_pass[key] -= 1
        return True


def _points_of(client: Any, run_id: str) -> dict[str, Counter[Point]]:
    """Return the points of a run, by metric."""
    keys = client.get_run(run_id).data.metrics
    return {key: Counter(_point(p.step, p.value) for p in client.get_metric_history(run_id, key)) for key in keys}


def _numbers(points: Mapping[str, Counter[Point]]) -> Counter[str]:
    return Counter({key: found.total() for key, found in points.items()})


def _point(step: int, value: float) -> Point:
    number = float(value)
    return int(step), number if number == number else float("inf")  # NaN equals nothing

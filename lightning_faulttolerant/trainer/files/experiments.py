"""Runs of W&B and MLflow: a fit that resumes continues in its earlier run.

Only the id of the run is changed on a user's logger for good. A run that the user has named stays.

The rows of a W&B run: a resumed fit skips the rows that the run has, and logs the rows that a kill has lost.

Each call of ``log`` that names no step makes one row, and W&B numbers the rows. So their number is enough to know what
the run has: rows after the autosave come again in the same order, with the same values. W&B sends rows a few seconds
after they are logged, and a kill loses the rows that are not yet sent: the autosave keeps the last ones.

The points of an MLflow run. A resumed fit logs the points after its autosave again, and the run already has them.

MLflow keeps each value that it gets, even a second time. The points come again in the same order, with the same steps
and values. So the first points of each metric are skipped: as many as the run has beyond the autosave's count.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger

from lightning_faulttolerant.errors import TrainingStopped
from lightning_faulttolerant.trainer.files import compat
from lightning_faulttolerant.trainer.log import tell
from lightning_faulttolerant.trainer.patches import Method, Patches
from lightning_faulttolerant.trainer.process import has_told

_log = logging.getLogger(__name__)

_RUNNING, _KILLED = "RUNNING", "KILLED"
_BEGUN = "Its run began before the fit: give WandbLogger, or wandb.init, an id."
_UNKNOWN = "See its documentation for how to name the run in which it continues."
_ADVICE = {
    "CometLogger": "Give it an experiment_key.",
    "NeptuneLogger": "Give it run=neptune.init_run(with_id=...).",
    "LitLogger": "Give it a name.",
}


class _ServiceFollower(Protocol):
    """Knows how much a logger has logged so far, without asking its service."""

    def state_dict(self) -> dict[str, object]:
        """Return how much was logged."""

    def resume(self, state: Mapping[str, object]) -> list[str]:
        """Skip what the run already had when it was continued; return what a user should know."""


class Experiments:
    """The runs of a trainer's WandbLogger and MLFlowLogger.

    Args:
        trainer: The trainer of the loggers.
        patches: Removes our counting from their runs later.
    """

    def __init__(self, trainer: Trainer, patches: Patches) -> None:
        self._trainer = trainer
        self._patches = patches
        self._followers: dict[int, _ServiceFollower] = {}
        self._resumed: list[tuple[str, _ServiceFollower, Mapping[str, object]]] = []
        self.notes: list[str] = []
        """What is lost, split, or logged twice, because a logger could not continue."""
        self.moved: list[str] = []
        """Which runs continue in place of those that the script began."""

    def tell_unknown(self) -> None:
        """Name the loggers that will not continue in their run, once. Call it before they begin."""
        if not self._trainer.is_global_zero:
            return
        for logger in self._trainer.loggers:
            advice = _advice(logger)
            name = type(logger).__qualname__
            if advice is not None and name not in has_told:
                has_told.add(name)
                tell(f"{name} does not continue in its run after a restart. {advice}")

    def resume(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Let each logger continue in its run. Call it before the loggers begin theirs.

        Args:
            states: The result of `state_dict`.
        """
        loggers = dict(self._keyed())
        for state in states:
            logger = loggers.get(state["key"])
            if logger is None:
                self.notes.append(f"{state['key']}, which logged to the run {state['id']}, is missing now")
            elif self._continues(state["key"], logger, state["id"]):
                self._begin(state["key"], logger, state)

    def settle(self) -> None:
        """Skip what is logged again from now on: the fit has resumed."""
        for key, follower, state in self._resumed:
            self.notes += [f"{key}: {note}" for note in follower.resume(state)]
        self._resumed.clear()

    def end(self, exception: BaseException | None) -> None:
        """Make MLflow mark a run as killed if it was told to stop: Lightning would mark it as failed."""
        if not isinstance(exception, TrainingStopped):
            return
        for _, logger in self._keyed():
            if isinstance(logger, MLFlowLogger):
                _finalize_once_as(logger, _KILLED)

    def state_dict(self) -> list[dict[str, object]]:
        """Return the run of each logger that has begun one, and how much was logged to it so far."""
        loggers = [(key, logger) for key, logger in self._keyed() if compat.run_has_begun(logger)]
        return [
            {"key": key, "id": str(compat.run_id(logger)), **self._follower(logger).state_dict()}
            for key, logger in loggers
        ]

    def _follower(self, logger: compat.TrackingLogger, *, is_resumed: bool = False) -> _ServiceFollower:
        if id(logger) not in self._followers:
            self._followers[id(logger)] = (
                WandbRows(logger, self._patches)
                if isinstance(logger, WandbLogger)
                else MLflowPoints(logger, self._patches, is_resumed=is_resumed)
            )
        return self._followers[id(logger)]

    def _continues(self, key: str, logger: compat.TrackingLogger, run_id: str) -> bool:
        """Return whether a logger continues in its saved run; if so, give it that run."""
        own = compat.run_id(logger)
        if own == run_id:
            return True
        if compat.starts_over(logger):
            self.notes.append(f"{key} begins a new run at each start; what was logged so far is in the run {run_id}")
            return False
        if not compat.run_has_begun(logger):
            if own is not None:
                self.notes.append(f"{key} was given the run {own}; what was logged so far is in the run {run_id}")
                return False
        elif isinstance(logger, WandbLogger):
            self.notes.append(
                f"{key} began the run {own} before the fit; what was logged so far is in the run {run_id}. Give it "
                f"id={run_id!r}"
            )
            return False
        else:
            logger.experiment.set_terminated(own, _KILLED)
            self.moved.append(f"{key} began the run {own} before the fit; it continues in the run {run_id}")
        compat.set_run_id(logger, run_id)
        return True

    def _begin(self, key: str, logger: compat.TrackingLogger, state: Mapping[str, object]) -> None:
        """Begin the run of a logger, and find out what it already has."""
        try:
            found = logger.experiment.id if isinstance(logger, WandbLogger) else _set_running(logger)
            if found == state["id"]:
                self._resumed.append((key, self._follower(logger, is_resumed=True), state))
                return
            self.notes.append(
                f"{key} logs to the run {found}, which the script began; what was logged so far is in the run "
                f"{state['id']}. Call wandb.init(id={state['id']!r}, resume='allow')"
            )
        except Exception as error:
            if isinstance(logger, WandbLogger):  # nothing can be logged: Lightning would get the same error
                raise
            self.notes.append(f"{key} begins a new run: the run {state['id']} can't be continued: {error}")
            compat.set_run_id(logger, None)

    def _keyed(self) -> Iterator[tuple[str, compat.TrackingLogger]]:
        """Yield the loggers by class name and number within the class."""
        if not self._trainer.is_global_zero:
            return
        numbers: dict[str, int] = {}
        for logger in self._trainer.loggers:
            if isinstance(logger, (WandbLogger, MLFlowLogger)) and compat.is_tracking(logger):
                name = type(logger).__qualname__
                yield f"{name}#{numbers.setdefault(name, 0)}", logger
                numbers[name] += 1


def _set_running(logger: MLFlowLogger) -> str:
    run_id = str(logger.run_id)
    logger.experiment.update_run(run_id, _RUNNING)
    return run_id


def _finalize_once_as(logger: Logger, status: str) -> None:
    """Give the next end of a logger another status."""
    patches = Patches()

    def finalize_as(finalize: Method, _: str) -> None:
        patches.undo()
        finalize(status)

    patches.around(logger, "finalize", finalize_as)


def _advice(logger: Logger) -> str | None:
    """Return what to do so that a logger continues its run after a restart; ``None`` if it does so by itself."""
    if isinstance(logger, WandbLogger) and compat.is_tracking(logger):
        is_own = compat.given_id(logger) is not None or compat.starts_over(logger)
        return None if is_own or not compat.has_begun_before(logger) else _BEGUN
    return _ADVICE.get(type(logger).__qualname__, _UNKNOWN) if compat.is_unknown(logger) else None


_OFFLINE = "W&B is offline: `wandb sync` joins the parts of the run; after a kill, rows after the autosave appear twice"
_NOT_COUNTED = "this version of W&B has no `_log`, so rows after the autosave may be in the run twice"
_NOT_NUMBERED = "rows after the autosave may be in the run twice, because your code has numbered rows, too"

# W&B sends rows, and writes them to its file, every 15 seconds.
_KEPT_SECONDS, _MAX_KEPT = 60.0, 1000
_PLAIN = (int, float, str, bool, type(None))


class WandbRows:
    """Counts the rows of a run, and skips those that it already has.

    Args:
        logger: The logger of the run, which has begun.
        patches: Removes our counting from the run later.
    """

    def __init__(self, logger: WandbLogger, patches: Patches) -> None:
        self._run = logger.experiment
        self._original = getattr(self._run, compat.LOG, None)
        is_counted = self._original is not None and not compat.syncs_tensorboard(logger)
        self._num_rows = _num_rows_of(self._run) if is_counted else None
        self._num_found = self._num_rows
        self._num_to_pass = 0
        self._kept: deque[tuple[float, dict[str, object] | None]] = deque(maxlen=_MAX_KEPT)
        if self._original is not None:
            patches.around(self._run, compat.LOG, self._log)

    def resume(self, state: Mapping[str, Any]) -> list[str]:
        """Skip what the run already had when this process continued it; return what a user should know.

        Args:
            state: The result of `state_dict`.
        """
        if self._run.offline:
            return [_OFFLINE]
        if self._original is None:
            return [_NOT_COUNTED]
        num_logged = state.get("num_rows")
        if self._num_rows is None or self._num_found is None or num_logged is None:
            return [_NOT_NUMBERED]
        self._num_to_pass = max(self._num_found - num_logged, 0)
        num_lost = max(num_logged - self._num_found, 0)
        lost = state["rows"][-num_lost:] if num_lost else []
        if len(lost) < num_lost or None in lost:
            self._num_rows -= self._num_to_pass
            return [f"W&B has {self._num_found} of the {num_logged} rows that were logged before the autosave"]
        for row in lost:
            self._original(row, None, None)
            self._kept.append((time.monotonic(), row))  # the next kill may lose it again
        self._num_rows += num_lost - self._num_to_pass
        return []

    def state_dict(self) -> dict[str, object]:
        """Return how many rows were logged so far, each counted once, and the last ones."""
        while self._kept and self._kept[0][0] < time.monotonic() - _KEPT_SECONDS:
            self._kept.popleft()
        return {"num_rows": self._num_rows, "rows": [row for _, row in self._kept]}

    def _log(
        self, log: Method, data: Mapping[str, object], step: int | None = None, commit: bool | None = None
    ) -> None:
        is_passed = step is None and self._num_to_pass > 0
        if step is not None or commit is False:
            self._num_rows = None  # the user numbers them, and W&B itself skips those that it has
        elif self._num_rows is not None:
            self._num_rows += 1
            self._num_to_pass -= is_passed
            is_plain = all(type(value) in _PLAIN for value in data.values())
            self._kept.append((time.monotonic(), dict(data) if is_plain else None))
        if not is_passed:
            log(data, step, commit)


def _num_rows_of(run: Any) -> int | None:
    """Return the number of rows of a W&B run; ``None`` if it is not known."""
    try:
        return max(int(run.step), int(run.starting_step))  # the step is 0 until the first row of this process
    except Exception:  # noqa: BLE001 - a run that is shared by processes, or is switched off, does not count
        return None


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
            notes.append(
                f"MLflow does not have {lost.total()} of the {logged.total()} values that were logged before the "
                "autosave"
            )
        if self._changed_params:
            notes.append(f"MLflow keeps the earlier values of {', '.join(self._changed_params)}, which differ now")
        return notes

    def state_dict(self) -> dict[str, object]:
        """Return how many points each metric has so far, each point counted once."""
        return {"num_points": dict(self._num_points)}

    def _log_batch(
        self,
        log_batch: Method,
        run_id: str,
        metrics: Sequence[Any] = (),
        params: Sequence[object] = (),
        *args: object,
        **kwargs: object,
    ) -> object:
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
        timestamp: object = None,
        step: int | None = None,
        *args: object,
        **kwargs: object,
    ) -> object:
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
            _log.warning("MLflow has other values of %s after the autosave than this run logs: it keeps both.", key)
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

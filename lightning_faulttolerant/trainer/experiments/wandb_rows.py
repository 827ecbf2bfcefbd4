"""The rows of a W&B run: a resumed fit skips the rows that the run has, and logs the rows that a kill has lost.

Each call of ``log`` that names no step makes one row, and W&B numbers the rows. So their number is enough to know what
the run has: rows after the autosave come again in the same order, with the same values. W&B sends rows a few seconds
after they are logged, and a kill loses the rows that are not yet sent: the autosave keeps the last ones.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers import WandbLogger

from lightning_faulttolerant.trainer.experiments import compat
from lightning_faulttolerant.trainer.patches import Method, Patches

_OFFLINE = (
    "W&B is offline: `wandb sync` joins the parts of the run, with rows after the autosave twice where it was killed"
)
_NOT_COUNTED = "this version of W&B has no `_log`, so rows after the autosave may be in the run twice"
_NOT_NUMBERED = "rows after the autosave may be in the run twice, as not W&B alone has numbered them"

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
        self._kept: deque[tuple[float, dict[str, Any] | None]] = deque(maxlen=_MAX_KEPT)
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
            return [f"W&B has {self._num_found} of the {num_logged} rows that were logged by then"]
        for row in lost:
            self._original(row, None, None)
        self._num_rows += num_lost - self._num_to_pass
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return how many rows were logged so far, each counted once, and the last ones."""
        while self._kept and self._kept[0][0] < time.monotonic() - _KEPT_SECONDS:
            self._kept.popleft()
        return {"num_rows": self._num_rows, "rows": [row for _, row in self._kept]}

    def _log(self, log: Method, data: Mapping[str, Any], step: int | None = None, commit: bool | None = None) -> None:
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

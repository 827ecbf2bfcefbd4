"""A time when nothing can be saved, because a disk is full or a store can't be reached. Training continues.

The outage is logged once when it begins and once when it is over, and is noted in the history of the run.
"""

from __future__ import annotations

import logging
import time

from lightning_faulttolerant.trainer.position import TrainerPosition
from lightning_faulttolerant.trainer.run.history import HistoryWriter

_log = logging.getLogger(__name__)


def described(error: BaseException) -> str:
    """Return an error's type and message."""
    return f"{type(error).__name__}: {error}"


class Outage:
    """Counts consecutive saves that fail.

    Args:
        history: The history that notes the outage.
        speaks: Whether this rank logs it.
    """

    def __init__(self, history: HistoryWriter, *, speaks: bool) -> None:
        self._history = history
        self._speaks = speaks
        self._since = 0.0
        self._text = ""
        self.num_failures = 0
        """The number of saves that have failed since the last success."""

    def note(
        self, failure: str, position: TrainerPosition, saved: TrainerPosition | None, *, is_last: bool = False
    ) -> None:
        """Note that a save has failed.

        Args:
            failure: Why it failed.
            position: The position of the state that was to be saved.
            saved: The position of the last autosave.
            is_last: Whether the fit ends now. Other code then reports the failure.
        """
        self.num_failures += 1
        is_first = self.num_failures == 1
        self._text, self._since = failure, time.time() if is_first else self._since
        self._tell(None, self.num_failures)
        if is_first and self._speaks and not is_last:
            self._warn(failure, position, saved)

    def _warn(self, failure: str, position: TrainerPosition, saved: TrainerPosition | None) -> None:
        if saved is None:
            _log.warning(
                "The state %s could not be saved: %s. There is no autosave yet. The run continues, and each save that"
                " is due tries again.",
                position, failure,
            )  # fmt: skip
            return
        _log.warning(
            "The state %s could not be saved: %s. The last autosave, %s, stays. The run continues, and each save"
            " that is due tries again.",
            position, failure, saved,
        )  # fmt: skip

    def end(self) -> None:
        """Note that a save has succeeded. The thread that writes in the background calls this, too."""
        num_failures, self.num_failures = self.num_failures, 0
        if not num_failures:
            return
        until = time.time()
        if self._speaks:
            _log.warning(
                "Autosaves can be written again. For %.0f seconds nothing could be saved (%s).",
                until - self._since, _tries(num_failures),
            )  # fmt: skip
        self._tell(until, num_failures)

    def _tell(self, until: float | None, num_failures: int) -> None:
        self._history.unsaved(since=self._since, until=until, tries=num_failures, text=self._text)


def _tries(number: int) -> str:
    return "1 try" if number == 1 else f"{number} tries"

"""Which loaders can be resumed exactly, why others can't, and what happens when something can't be exact."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import final

from torch.utils.data import DataLoader, IterDataPipe, get_worker_info

from lightning_faulttolerant.advice import worded
from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.foreign import why_not_followed as why_foreign_not_followed
from lightning_faulttolerant.loader.hugging_face import why_drawn_by_the_clock
from lightning_faulttolerant.loader.own_state import starts_over, why_not_followed
from lightning_faulttolerant.loader.tracked_class import is_resumable, keeps_own_position

_log = logging.getLogger(__name__)


@final
class Exactness:
    """Collects why a fit or a loop is not exact. Everything that follows one of its loaders reports to this object.

    Args:
        strict: Whether a reason is an error; ``None`` if it is only collected, without a warning.
    """

    def __init__(self, *, strict: bool | None = True) -> None:
        self.strict = strict
        self.reasons: list[str] = []
        """Each reason once, in the order in which they were found."""

    def refuse(self, reason: str) -> None:
        """Raise if `strict`; otherwise collect `reason`, and warn of it once.

        Raises:
            NotExactError: If `strict`.
        """
        if self.strict:
            raise NotExactError(reason)
        self._collect(reason, warns=self.strict is not None)

    def admit(self, reason: str) -> None:
        """Collect `reason` and warn of it once, whether or not `strict`: it is too late for an error."""
        self._collect(reason, warns=True)

    def of_worker(self) -> Exactness:
        """Return the collector of a worker, as strict as this one. The main process admits the worker's reasons."""
        return Exactness(strict=self.strict)

    def _collect(self, reason: str, *, warns: bool) -> None:
        if reason in self.reasons:
            return
        self.reasons.append(reason)
        if warns and get_worker_info() is None:  # the main process warns of what its workers report
            _log.warning(worded(reason))


def lacks_generators(paths: list[str]) -> str:
    """Return the reason why a state can't be continued from if some of its generators no longer exist."""
    return (
        f"the generator {', '.join(paths)} does not exist, so its state can't be restored. Its draws would differ "
        "from the uninterrupted run. Create it before it is first used; or pass strict=False."
    )


def needs_no_position(loader: object) -> bool:
    """Return whether whole runs over `loader` can be repeated exactly, although a position in it can't be resumed.

    This holds if every run begins at the start again, in this process or in new workers.
    """
    if not isinstance(loader, DataLoader):
        return True
    keeps_workers = loader.persistent_workers or getattr(loader, "_iterator", None) is not None
    return not keeps_workers and getattr(loader, "in_order", True)


def why_not_exact(loader: object) -> str | None:
    """Return why `loader` can't be resumed exactly, or ``None`` if it can."""
    if not isinstance(loader, DataLoader):
        return f"its class {type(loader).__name__} is not a torch DataLoader"
    reason = why_not_drawn_again(loader)
    if reason is None and any(_is_torchs_iterator(held) for held in vars(loader).values()) and not starts_over(loader):
        return "it already has its own iterator (created before fit), so its workers can't be reached"
    return reason


def why_not_drawn_again(loader: DataLoader[object]) -> str | None:
    """Return why `loader`, created again, would not yield the same batches again, or ``None`` if it would."""
    if isinstance(loader.dataset, IterDataPipe):
        return "its data set is a data pipe, which is not supported"
    if (reason := why_foreign_not_followed(loader) or why_drawn_by_the_clock(loader.dataset)) is not None:
        return reason
    if keeps_own_position(loader):
        reason = why_not_followed(loader)
        if reason is not None:
            return reason
    elif is_resumable(loader):
        if getattr(loader, "state", None) is not None:
            return "a state was loaded into it before fit, so its first epoch would begin at an unknown position"
    elif hasattr(loader, "state_dict"):
        return f"a {type(loader).__name__} keeps its own state, which lacks the random states of its workers"
    if not getattr(loader, "in_order", True):
        return "with in_order=False, the order of its batches depends on the speed of its workers; set in_order=True"
    return None


def _is_torchs_iterator(value: object) -> bool:
    return isinstance(value, Iterator) and type(value).__module__.startswith(("torch.utils.data", "torchdata."))

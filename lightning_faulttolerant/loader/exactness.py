"""Which loaders can be resumed exactly, why others can't, and what happens when something can't be exact.

A loader, its data set, or its samplers may have a ``state_dict``. In manual mode, nothing is wrapped or replayed: the
states of these objects are saved and loaded back into them. A data set may belong to several loaders that all advance
its state.

torchdata's ``StatefulDataLoader`` is followed like any other loader. Its own state has the order only, without the
random states of its workers. It is not used: two positions would be restored.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from typing import Any, final

from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info

from lightning_faulttolerant.advice import worded
from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.foreign import refills_its_buffer, why_drawn_by_the_clock
from lightning_faulttolerant.loader.foreign import why_not_followed as why_foreign_not_followed
from lightning_faulttolerant.loader.samplers import has_state, has_state_methods, state_of, what_is_not_plain
from lightning_faulttolerant.loader.tracked_class import is_resumable, keeps_own_position


def why_not_followed(loader: DataLoader[object]) -> str | None:
    """Return why the ``StatefulDataLoader`` `loader` can't be followed, or ``None`` if it can."""
    for name in ("state_dict", "load_state_dict"):
        owner = next(base for base in type(loader).__mro__ if name in vars(base))
        if not owner.__module__.startswith("torchdata."):
            return f"{type(loader).__name__} has its own {name}, which would not be called"
    if vars(loader).get("_initial_iter_for_state_dict"):
        return "it already has its own iterator (created by its state_dict before fit)"
    dataset = stateful_dataset(loader)
    strange = None if dataset is None else what_is_not_plain(dataset.state_dict())
    return strange and f"the state_dict of its data set has {strange}; give it only plain values and tensors"


def was_given_position(loader: DataLoader[object]) -> bool:
    """Return whether the next iteration over `loader` begins at a position that was loaded before."""
    return bool(vars(loader).get("next_iter_state"))


def starts_over(loader: DataLoader[object]) -> bool:
    """Return whether the next iteration creates an iterator, although `loader` still holds the last one."""
    return keeps_own_position(loader) and not loader.persistent_workers


def forget_own_position(followed: DataLoader[object]) -> None:
    """Let the followed copy begin as a new loader."""
    if keeps_own_position(followed):
        vars(followed).update(next_iter_state=None, _iterator=None)


def stateful_dataset(loader: DataLoader[object]) -> Any | None:
    """Return the map-style data set of a ``StatefulDataLoader`` if it keeps a state, which torchdata restores."""
    dataset = loader.dataset
    if not keeps_own_position(loader) or isinstance(dataset, IterableDataset) or not has_state_methods(dataset):
        return None
    return dataset


_PARTS = ("dataset", "sampler", "batch_sampler")


class OwnState:
    """The objects of one loader that keep their own state.

    Args:
        loader: Any iterable; a torch ``DataLoader`` may keep its state in its data set and its samplers, too.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        parts = {"loader": loader} if has_state_methods(loader) else {}
        if not parts and isinstance(loader, DataLoader):
            parts = {name: getattr(loader, name, None) for name in _PARTS}
        self._parts = {name: part for name, part in parts.items() if has_state_methods(part)}

    def why_not_exact(self) -> str | None:
        """Return why the loader's own objects can't report its position, or ``None`` if they can."""
        if not self._parts:
            return "neither it nor its data set, sampler, or batch sampler has state_dict and load_state_dict"
        workers = getattr(self._loader, "num_workers", 0)
        if workers and "loader" not in self._parts:
            return (
                f"its {workers} workers have copies of the {' and the '.join(self._parts)}, and run ahead, so the "
                "state in this process does not belong to the consumed batches"
            )
        return None

    def state_dict(self) -> dict[str, object]:
        """Return a copy of each object's state, by the object's name: ``loader``, or ``dataset``, ``sampler``, ..."""
        return {name: state_of(part) for name, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load the states. The next iteration continues from there, if the objects do as they promise."""
        for name, part in self._parts.items():
            if name in state:
                part.load_state_dict(copy.deepcopy(state[name]))


def share_a_state(loader: DataLoader[object], other: DataLoader[object]) -> bool:
    """Return whether both loaders have one data set with a state that is part of their positions and changes here.

    Workers change copies. If both loaders have workers, each has its own states.
    """
    if loader.dataset is not other.dataset or (loader.num_workers and other.num_workers):
        return False
    if isinstance(loader.dataset, IterableDataset):
        return has_state(loader.dataset) and not refills_its_buffer(loader.dataset)
    return stateful_dataset(loader) is not None or stateful_dataset(other) is not None


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

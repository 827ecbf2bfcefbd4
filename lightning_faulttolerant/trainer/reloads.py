"""What the training loaders were made from, where they are made again in later epochs.

A data module may keep what its loaders follow from: a level, the indices that were labeled so far. A resumed run asks
for the loaders before its states are restored, so what there was when they were asked for last is restored for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer

from lightning_faulttolerant.state.objects.object_state import NODES, ObjectState
from lightning_faulttolerant.state.objects.walk import Rules
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.strategy import TRAIN


class Reloads:
    """Notes what there is when the training loaders are asked for, and restores it for a resumed run.

    Args:
        trainer: The trainer that runs the fit.
        roots: Returns the objects that the loaders may follow from, by name.
        roots_of_loaders: Returns those of some loaders, by place.
        rules: What is left out.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        roots: Callable[[], Mapping[str, Any]] = dict,
        roots_of_loaders: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda loaders: {},
        rules: Callable[[], Rules] = Rules,
    ) -> None:
        self._trainer = trainer
        self._roots, self._roots_of_loaders, self._rules = roots, roots_of_loaders, rules
        self._state: ObjectState | None = None
        self._num_asked = 0
        self._is_asked = self._is_resumed = False
        self.last: Mapping[str, Any] = {}
        """What had changed since the fit began when the loaders were asked for last."""

    @property
    def _every(self) -> int:
        num_epochs: int = self._trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]  # set in a helper
        return num_epochs

    @contextmanager
    def begun(self, *, is_training: bool) -> Iterator[None]:
        """Be told that loaders are asked for meanwhile, if they are due: those of training, or others."""
        self._is_asked = is_training and self._every > 0
        if self._is_asked:
            self._begin()
        try:
            yield
        finally:
            self._is_asked = False

    def _begin(self) -> None:
        self._num_asked = 0
        if self._state is None:
            self._state = ObjectState(self._roots(), self._rules())
            self._is_resumed = bool(self.last)
            if self._is_resumed:
                self._state.load_state_dict(self.last)  # what is missing is said when all is restored
            return
        self._is_resumed = False
        if self._trainer.current_epoch - compat.reload_epochs(self._trainer)[0] >= self._every:
            state = self._state.state_dict()
            self.last = state if state[NODES] else {}

    def follow(self, loader: Any) -> Any:
        """Look at what a loader consists of, too, and return it."""
        if self._state is None or not self._is_asked:
            return loader
        place = f"{TRAIN}/{self._num_asked}"
        self._num_asked += 1
        self._state.add(self._roots_of_loaders({place: loader}))
        if self._is_resumed:
            nodes = {path: node for path, node in self.last[NODES].items() if path.startswith(f"{place}.")}
            self._state.load_state_dict({**self.last, NODES: nodes})
        return loader

"""The state that the training loaders were created from, if later epochs create them again.

A data module may keep the state that determines its loaders: a level, or the indices labeled so far. A resumed run
requests the loaders before it restores its states. So this module first restores the state of the last request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer

from lightning_faulttolerant.state.objects.object_state import NODES, ObjectState
from lightning_faulttolerant.state.objects.walk import Rules
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.loaders.loaders import TRAIN


class Reloads:
    """Notes the state when the training loaders are requested, and restores it for a resumed run.

    Args:
        trainer: The trainer that runs the fit.
        roots: Returns the objects that the loaders may depend on, by name.
        roots_of_loaders: Returns the objects of some loaders, by place.
        rules: Returns the rules for what is left out.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        roots: Callable[[], Mapping[str, object]] = dict,
        roots_of_loaders: Callable[[Mapping[str, object]], Mapping[str, object]] = lambda loaders: {},
        rules: Callable[[], Rules] = Rules,
    ) -> None:
        self._trainer = trainer
        self._roots, self._roots_of_loaders, self._rules = roots, roots_of_loaders, rules
        self._state: ObjectState | None = None
        self._num_asked = 0
        self._is_asked = self._is_resumed = False
        self.last: Mapping[str, Any] = {}
        """The changes between the start of the fit and the last request for the loaders."""

    @property
    def _every(self) -> int:
        num_epochs: int = self._trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]  # set by helper
        return num_epochs

    @contextmanager
    def begun(self, *, is_training: bool) -> Iterator[None]:
        """Note that loaders are requested inside this context, if they are due: training loaders or others."""
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
                self._state.load_state_dict(self.last)  # missing parts are reported when everything is restored
            return
        self._is_resumed = False
        if self._trainer.current_epoch - compat.reload_epochs(self._trainer)[0] >= self._every:
            state = self._state.state_dict()
            self.last = state if state[NODES] else {}

    def follow(self, loader: object) -> object:
        """Follow the objects of a loader, too, and return the loader."""
        if self._state is None or not self._is_asked:
            return loader
        place = f"{TRAIN}/{self._num_asked}"
        self._num_asked += 1
        self._state.add(self._roots_of_loaders({place: loader}))
        if self._is_resumed:
            nodes = {path: node for path, node in self.last[NODES].items() if path.startswith(f"{place}.")}
            self._state.load_state_dict({**self.last, NODES: nodes})
        return loader

"""The state that the loaders were created from.

A hook that creates loaders may read the trainer (its epoch, its metrics, its learning rate) and, if later epochs create
them again, attributes of its own (a level, the indices labeled so far). A resumed run requests the loaders once, in the
middle of the run. So it repeats each loader's last request: under the trainer's values, and with the objects, of then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_faulttolerant.state.objects.object_state import NODES, ObjectState
from lightning_faulttolerant.state.objects.walk import Rules
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.loaders.loaders import TRAIN, VALIDATION

_PLAIN = (int, float, bool, str, type(None))


class Reloads:
    """Notes the state when loaders are requested, and restores it for a resumed run.

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
        self._changes: Mapping[str, Any] = {}
        self._stage: str | None = None
        self._repeated: Mapping[str, Any] | None = None
        self._to_repeat: dict[str, Mapping[str, Any]] = {}
        self.last: dict[str, Mapping[str, Any]] = {}
        """The last request of each stage, in their order: the trainer's values then, and the changes to the objects."""

    @property
    def _every(self) -> int:
        num_epochs: int = self._trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]  # set by helper
        return num_epochs

    def resume_from(self, last: Mapping[str, Any]) -> None:
        """Repeat these requests, the value of `last` in a checkpoint, when the loaders are requested next."""
        self.last, self._to_repeat = dict(last), dict(last)

    @contextmanager
    def begun(self, stage: str) -> Iterator[None]:
        """Note that the loaders of a stage are requested inside this context, if they are due."""
        is_in_order = stage == TRAIN and self._every > 0
        if is_in_order and next(iter(self._to_repeat), TRAIN) == VALIDATION:
            compat.set_up_validation(self._trainer)
        self._stage, self._num_asked = stage, 0
        self._repeated = self._to_repeat.pop(stage, None)
        if self._every > 0:
            self._begin(stage)
        try:
            with self._trainers_values_of(self._repeated):
                yield
        finally:
            self._stage = None
        if is_in_order and VALIDATION in self._to_repeat:
            compat.set_up_validation(self._trainer)

    def _begin(self, stage: str) -> None:
        if self._state is None:
            self._state = ObjectState(self._roots(), self._rules())
        if self._repeated is not None:
            self._changes = self._repeated["objects"]
            if self._changes:
                self._state.load_state_dict(self._changes)  # missing parts are reported when everything is restored
        elif self._trainer.current_epoch - compat.reload_epochs(self._trainer)[stage == VALIDATION] >= self._every:
            changes = self._state.state_dict()
            self._changes = changes if changes[NODES] else {}

    @contextmanager
    def _trainers_values_of(self, request: Mapping[str, Any] | None) -> Iterator[None]:
        """Let the trainer show the values of an earlier request, if there is one."""
        values: Mapping[str, Mapping[str, Any]] = {} if request is None else request["trainer"]
        live = {path: one for path, one in compat.live_values(self._trainer).items() if path in values}
        before = {path: {name: one[name] for name in values[path] if name in one} for path, one in live.items()}
        for path, one in live.items():
            one.update(values[path])
        try:
            yield
        finally:
            for path, one in live.items():
                for name in values[path].keys() - before[path].keys():
                    one.pop(name, None)
                one.update(before[path])

    def follow(self, loader: object) -> object:
        """Follow the objects of a requested loader, too, and return the loader."""
        stage = self._stage
        if stage is None:
            return loader
        if self._num_asked == 0:
            self.last.pop(stage, None)
            is_hook_asked = compat.is_hook_asked(self._trainer, for_training=stage == TRAIN)
            values = self._trainers_values() if is_hook_asked else {}
            self.last[stage] = self._repeated or {"trainer": values, "objects": self._changes}
        place = f"{stage}/{self._num_asked}"
        self._num_asked += 1
        if self._state is not None:
            self._state.add(self._roots_of_loaders({place: loader}))
            if self._repeated is not None and self._changes:
                nodes = {path: node for path, node in self._changes[NODES].items() if path.startswith(f"{place}.")}
                self._state.load_state_dict({**self._changes, NODES: nodes})
        return loader

    def _trainers_values(self) -> dict[str, dict[str, object]]:
        live = compat.live_values(self._trainer).items()
        return {path: {name: _copied(value) for name, value in one.items() if _is_plain(value)} for path, one in live}


def _is_plain(value: object) -> bool:
    if type(value) in (list, tuple):
        return all(type(element) in _PLAIN for element in value)  # type: ignore[attr-defined]  # it is one of the two
    return isinstance(value, Tensor) or type(value) in _PLAIN


def _copied(value: Any) -> object:
    return value.detach().clone() if isinstance(value, Tensor) else list(value) if type(value) is list else value

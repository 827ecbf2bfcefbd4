"""The state that the loaders were created from.

A hook that creates loaders may read the trainer (its epoch, its metrics, its learning rate), weights (the losses of all
samples) and, if later epochs create them again, attributes of its own (a level, the indices labeled so far). A resumed
run requests the loaders once, in the middle of the run. So it repeats each loader's last request: under the trainer's
values, and with the weights and objects, of then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_faulttolerant.state.generators import HeldGenerators
from lightning_faulttolerant.state.objects.object_state import ObjectState
from lightning_faulttolerant.state.objects.saved import NODES, parts_of
from lightning_faulttolerant.state.objects.walk import Rules
from lightning_faulttolerant.state.rng import rng_state, set_rng_state
from lightning_faulttolerant.state.tensors import buffers_of, load_buffers, shard_of, weights_of
from lightning_faulttolerant.state.twister import lengthened, shortened
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.loaders.loaders import TRAIN, VALIDATION

_PLAIN = (int, float, bool, str, type(None))


@dataclass(kw_only=True, slots=True)
class _Request:
    """A request of the loaders of a stage, while it lasts.

    Args:
        stage: The stage.
        repeated: The request of an earlier process that this one repeats.
        changes: The changes to the objects until then.
        num_asked: The number of loaders so far.
        before: What a repeated request has changed: the values before, the last ones last.
    """

    stage: str
    repeated: Mapping[str, Any] | None
    changes: Mapping[str, Any] = field(default_factory=dict)
    num_asked: int = 0
    before: list[Mapping[str, Any]] = field(default_factory=list)


class Reloads:
    """Notes the state when loaders are requested, and restores it for a resumed run.

    Args:
        trainer: The trainer that runs the fit.
        held: The generators that objects hold.
        roots: Returns the objects that the loaders may depend on, by name.
        roots_of_loaders: Returns the objects of some loaders, by place.
        rules: Returns the rules for what is left out.
    """

    def __init__(
        self,
        trainer: Trainer,
        held: HeldGenerators | None = None,
        *,
        roots: Callable[[], Mapping[str, object]] = dict,
        roots_of_loaders: Callable[[Mapping[str, object]], Mapping[str, object]] = lambda loaders: {},
        rules: Callable[[], Rules] = Rules,
    ) -> None:
        self._trainer = trainer
        self._inputs = _Inputs(trainer, held or HeldGenerators({}))
        self._roots, self._roots_of_loaders, self._rules = roots, roots_of_loaders, rules
        self._state: ObjectState | None = None
        self._request: _Request | None = None
        self._to_repeat: dict[str, Mapping[str, Any]] = {}
        self._repeated: Mapping[str, Any] = {}
        self.last: dict[str, Mapping[str, Any]] = {}
        """The last request of each stage, in their order: the trainer's values then, and the changes to the objects."""
        self.changed: dict[str, set[str]] = {}
        """The parts of objects that a repeated request would change, by path."""

    @property
    def _every(self) -> int:
        return self._trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined, no-any-return]

    def resume_from(self, last: Mapping[str, Any]) -> None:
        """Repeat these requests, the value of `last` in a checkpoint, when the loaders are requested next."""
        self.last, self._to_repeat = dict(last), dict(last)

    @contextmanager
    def begun(self, stage: str) -> Iterator[None]:
        """Note that the loaders of a stage are requested inside this context, if they are due."""
        is_in_order = stage == TRAIN and self._every > 0
        if is_in_order and next(iter(self._to_repeat), TRAIN) == VALIDATION:
            compat.set_up_validation(self._trainer)
        request = self._request = _Request(stage=stage, repeated=self._to_repeat.pop(stage, None))
        if self._every > 0 or compat.finders(self._trainer):
            self._begin(request)
        try:
            with self._inputs.as_in(request.repeated):
                yield
        finally:
            self._request = None
            while self._state is not None and request.before:
                self._state.load_state_dict(request.before.pop())
        if is_in_order and VALIDATION in self._to_repeat:
            compat.set_up_validation(self._trainer)

    def _begin(self, request: _Request) -> None:
        if self._state is None:
            self._state = ObjectState(self._roots(), self._rules())
        if request.repeated is not None:
            request.changes = request.repeated["objects"]
            self._load(request, request.changes)
            self._repeated = request.changes if request.stage == TRAIN else self._repeated
        elif compat.are_due(self._trainer, for_training=request.stage == TRAIN):
            changes = self._state.state_dict()
            request.changes = changes if changes[NODES] else {}
        for path, content in request.changes.get(NODES, {}).items():
            self.changed.setdefault(path, set()).update(parts_of(content))

    def apply_again(self) -> None:
        """Put back the changes that the training loaders were requested with: they may share lists with other objects.

        Call it before these loaders are iterated over, and before all objects are restored.
        """
        if self._state is not None and self._repeated.get(NODES):
            self._state.load_state_dict(self._repeated)

    def follow(self, loader: object) -> object:
        """Follow the objects of a requested loader, too, and return the loader."""
        request = self._request
        if request is None:
            return loader
        if request.num_asked == 0:
            inputs = self._inputs.noted()
            self.last.pop(request.stage, None)
            is_hook_asked = compat.is_hook_asked(self._trainer, for_training=request.stage == TRAIN)
            inputs = inputs if is_hook_asked else {"trainer": {}}
            self.last[request.stage] = {"objects": request.changes, **inputs}
        place = f"{request.stage}/{request.num_asked}"
        request.num_asked += 1
        if self._state is not None:
            self._state.add(self._roots_of_loaders({place: loader}))
            if request.repeated is not None and request.changes:
                nodes = {path: one for path, one in request.changes[NODES].items() if path.startswith(f"{place}.")}
                self._load(request, {**request.changes, NODES: nodes})
        return loader

    def _load(self, request: _Request, changes: Mapping[str, Any]) -> None:
        if self._state is not None and changes.get(NODES):
            request.before.append(self._state.values_of(changes))
            self._state.load_state_dict(changes)  # missing parts are reported when everything is restored

    def state_dict(self) -> dict[str, Mapping[str, Any]]:
        """Return the last request of each stage, without weights that have not changed since."""
        now, read = _tensors_of(self._trainer.lightning_module), {}
        for stage, request in self.last.items():
            weights = request.get("weights", {}).items()
            read[stage] = {name: one for name, one in weights if name not in now or not one.equal(now[name].cpu())}
        return {stage: {**request, "weights": read[stage]} for stage, request in self.last.items()}


class _Inputs:
    """What a hook that creates loaders may read or draw from, besides its own attributes.

    Args:
        trainer: The trainer that runs the fit.
        held: The generators that objects hold.
    """

    def __init__(self, trainer: Trainer, held: HeldGenerators) -> None:
        self._trainer, self._held = trainer, held
        self._last: dict[str, Any] = {}
        self._reading = ExitStack()

    @contextmanager
    def as_in(self, request: Mapping[str, Any] | None) -> Iterator[None]:
        """Let a hook find what it found in an earlier request, if there is one, and note it."""
        weights, live = _tensors_of(self._trainer.lightning_module), compat.live_values(self._trainer)
        plain = {
            path: {name: _copied(one) for name, one in own.items() if _is_plain(one)} for path, own in live.items()
        }
        now = {**self._generators(), "trainer": plain}
        then: Mapping[str, Any] = {**now, "weights": {}, **(request or {})}
        values = {path: {**one} for path, one in live.items()}
        changed = {name: weights[name].detach().cpu().clone() for name in weights.keys() & then["weights"].keys()}
        if request is not None:
            self._load(then, {path: {**one, **then["trainer"].get(path, {})} for path, one in values.items()})
        self._last = {**self._generators(), "trainer": then["trainer"]}
        try:
            with self._reading:
                self._last["weights"] = self._reading.enter_context(_Reading(weights)).read
                yield
        finally:
            if request is not None:
                self._load({**now, "weights": changed}, values)

    def noted(self) -> dict[str, Any]:
        """Return what the hook, which has just returned, has read; of the generators, those that it has drawn from."""
        self._reading.close()  # what follows is our own look at the loaders
        now, then = self._generators(), self._last
        drawn = {name: shortened(one) for name, one in then["random"].items() if now["random"].get(name) != one}
        return {**then, "random": drawn, "held": {} if now["held"] == then["held"] else then["held"]}

    def _generators(self) -> dict[str, Any]:
        return {"random": rng_state(), "held": self._held.state_dict()}

    def _load(self, inputs: Mapping[str, Any], values: Mapping[str, Mapping[str, Any]]) -> None:
        for path, one in compat.live_values(self._trainer).items():
            one.clear()
            one.update(values[path])
        load_buffers(self._trainer.lightning_module, inputs["weights"])
        if inputs["held"]:
            self._held.load_state_dict(inputs["held"])
        set_rng_state({name: lengthened(one) for name, one in inputs["random"].items()})


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: shard_of(one) for name, one in {**weights_of(module), **buffers_of(module)}.items()}


class _Reading(TorchFunctionMode):
    """Notes which of some tensors code reads, as they are before.

    Args:
        tensors: The tensors, by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self.read: dict[str, Tensor] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the tensors among the arguments, and call a function of torch."""
        for one in tree_leaves((args, kwargs)):
            name = self._names.get(id(one))
            if name is not None and name not in self.read:
                self.read[name] = one.detach().cpu().clone()
        return function(*args, **(kwargs or {}))


def _is_plain(value: object) -> bool:
    if type(value) in (list, tuple):
        return all(type(element) in _PLAIN for element in value)  # type: ignore[attr-defined]  # it is one of the two
    return isinstance(value, Tensor) or type(value) in _PLAIN


def _copied(value: Any) -> object:
    return value.detach().clone() if isinstance(value, Tensor) else list(value) if type(value) is list else value

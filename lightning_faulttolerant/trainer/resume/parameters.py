"""Parameters at a resume: the precision that their weights are loaded in, and their groups in optimizers.

An optimizer's state numbers its groups, so it can only be loaded into equal groups. If a hook changed the groups in an
epoch that is over, as gradual unfreezing does, it isn't called again. So this module restores them, before Lightning
loads the optimizers. A load replaces the groups, and the states of parameters. Other objects may hold them, such as an
optimizer that wraps another one: the load changes them in place.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Final, final

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision

from lightning_faulttolerant.errors import NotExactError


def convert_module(trainer: Trainer) -> None:
    """Convert the weights before they are loaded, if the trainer converts them afterwards.

    Lightning loads a checkpoint before it sets up the strategy, and converts the module during that setup. With
    ``precision="64-true"``, weights of 64 bits would pass through 32 bits. With ``"bf16-true"``, no weight would be as
    it was loaded.
    """
    plugin = trainer.precision_plugin
    if isinstance(plugin, (DoublePrecision, HalfPrecision)):
        plugin.convert_module(trainer.lightning_module)


GROUPS: Final = "param_groups"

NamesOfGroups = list[list[list[str]]]
"""The names of the parameters in each group of each optimizer."""


@final
class ParamGroups:
    """The groups of a fit's optimizers, compared with the groups at its start.

    Args:
        trainer: The trainer that runs the fit. Its optimizers are as they were created.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._first = held_by_groups(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the parameters of all groups, in order, and whether the groups are others than at the start."""
        held = held_by_groups(self._trainer)
        return {"names": self._names(held), "is_changed": held != self._first}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restore the optimizers' groups, if the state has them. Lightning loads the settings of each group.

        A set of parameters may have another order in each process.

        Returns:
            A line for each optimizer whose parameters this process had put into other groups.

        Raises:
            NotExactError: If a group had a tensor that is not a parameter of the module.
        """
        own, saved, lines = self._names(held_by_groups(self._trainer)), state.get("names", ()), list[str]()
        if len(saved) != len(own):
            return lines
        parameters = dict(self._trainer.lightning_module.named_parameters())
        for number, (optimizer, groups, now) in enumerate(zip(self._trainer.optimizers, saved, own, strict=True)):
            is_other = sorted(chain(*groups)) != sorted(chain(*now))
            if groups == now or (is_other and not state["is_changed"]):  # a callback has done it, or the script changed
                continue
            if not state["is_changed"] and list(map(sorted, groups)) != list(map(sorted, now)):
                lines.append(f"optimizer {number}: its parameters are in the groups in which they were saved")
            unknown = [name for group in groups for name in group if name not in parameters]
            if unknown:
                raise NotExactError(
                    f"Optimizer {number} ({type(optimizer).__name__}) can't be restored: while training, it was given "
                    f"{unknown[0] or 'a tensor'}, which is not a parameter of the module. Make it a parameter, or "
                    "give it to the optimizer in configure_optimizers."
                )
            del optimizer.param_groups[len(groups) :]
            for group, names in zip(optimizer.param_groups, groups, strict=False):
                group["params"][:] = [parameters[name] for name in names]
            for names in groups[len(optimizer.param_groups) :]:
                optimizer.add_param_group({"params": [parameters[name] for name in names]})
        return lines

    def _names(self, held: list[list[list[int]]]) -> NamesOfGroups:
        names = {id(parameter): name for name, parameter in self._trainer.lightning_module.named_parameters()}
        return [[[names.get(parameter, "") for parameter in group] for group in groups] for groups in held]


IN_PLACE: Final = ("state", "param_groups")
"""The attributes of an optimizer that a load replaces."""


def optimizers_of(trainer: Trainer) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a trainer, and those that they wrap."""
    found: list[torch.optim.Optimizer] = []

    def look(value: Any) -> None:
        if isinstance(value, (list, tuple, dict)):
            for one in value.values() if isinstance(value, dict) else value:
                look(one)
        elif isinstance(value, torch.optim.Optimizer) and all(value is not one for one in found):
            found.append(value)
            look({name: one for name, one in vars(value).items() if name not in IN_PLACE})

    look(trainer.optimizers)
    return found


@contextlib.contextmanager
def changed_in_place(trainer: Trainer) -> Iterator[None]:
    """Within the block, let a load of the optimizers change their groups and states in place."""
    owners = [vars(one) for one in reversed(optimizers_of(trainer))]  # the trainer's own come last, and win
    held = [(own, name, own[name]) for own in owners for name in IN_PLACE if name in own]
    yield
    loaded = [(own[name], before) for own, name, before in held if own[name] is not before]
    for now, before in loaded:
        _fill(before, now)
    for own in owners:
        for name, value in own.items():
            own[name] = next((before for now, before in loaded if value is now), value)


def _fill(before: Any, now: Any) -> None:
    if before is now:
        return
    if isinstance(before, dict):
        keys = [*now]
        if "params" in before.keys() & now.keys():  # torch's load puts the parameters of a group last
            keys.remove("params")
            keys.insert([*before].index("params"), "params")
        before.clear()
        before.update({key: now[key] for key in keys})
        return
    for one, loaded in zip(before, now, strict=False):
        _fill(one, loaded)
    before[:] = [*before[: len(now)], *now[len(before) :]]


def copied_groups(optimizer: torch.optim.Optimizer) -> list[Mapping[str, object]]:
    """Return a copy of an optimizer's groups without the parameters."""
    return [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def held_by_groups(trainer: Trainer) -> list[list[list[int]]]:
    """Return the IDs of the parameters in each group of each optimizer."""
    groups = (optimizer.param_groups for optimizer in trainer.optimizers)
    return [[[id(parameter) for parameter in group["params"]] for group in of_one] for of_one in groups]

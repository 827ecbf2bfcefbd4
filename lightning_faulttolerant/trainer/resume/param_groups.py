"""The parameters in each group of an optimizer, if training has changed the groups, as gradual unfreezing does.

An optimizer's state numbers its groups, so it can only be loaded into equal groups. If a hook changed the groups in an
epoch that is over, it isn't called again. So this module restores them, before Lightning loads the optimizers.
"""

from __future__ import annotations

from typing import Final, final

from lightning.pytorch import Trainer

from lightning_faulttolerant.errors import NotExactError

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

    def state_dict(self) -> NamesOfGroups | None:
        """Return the parameters of all groups, or ``None`` while the groups are as they were created."""
        if held_by_groups(self._trainer) == self._first:
            return None
        return self._names()

    def load_state_dict(self, state: NamesOfGroups | None) -> None:
        """Restore the optimizers' groups. Lightning loads the settings of each group.

        Raises:
            NotExactError: If a group had a tensor that is not a parameter of the module.
        """
        if state is None or len(state) != len(self._trainer.optimizers):
            return
        parameters = dict(self._trainer.lightning_module.named_parameters())
        for number, (optimizer, groups, now) in enumerate(
            zip(self._trainer.optimizers, state, self._names(), strict=True)
        ):
            if groups == now:  # a callback has done it, as Lightning's BaseFinetuning does
                continue
            unknown = [name for group in groups for name in group if name not in parameters]
            if unknown:
                raise NotExactError(
                    f"Optimizer {number} ({type(optimizer).__name__}) can't be restored: while training, it was given "
                    f"{unknown[0] or 'a tensor'}, which is not a parameter of the module. Make it a parameter, or "
                    "give it to the optimizer in configure_optimizers."
                )
            del optimizer.param_groups[len(groups) :]
            for group, names in zip(optimizer.param_groups, groups, strict=False):
                group["params"] = [parameters[name] for name in names]
            for names in groups[len(optimizer.param_groups) :]:
                optimizer.add_param_group({"params": [parameters[name] for name in names]})

    def _names(self) -> NamesOfGroups:
        names = {id(parameter): name for name, parameter in self._trainer.lightning_module.named_parameters()}
        held = held_by_groups(self._trainer)
        return [[[names.get(parameter, "") for parameter in group] for group in groups] for groups in held]


def held_by_groups(trainer: Trainer) -> list[list[list[int]]]:
    """Return the IDs of the parameters in each group of each optimizer."""
    groups = (optimizer.param_groups for optimizer in trainer.optimizers)
    return [[[id(parameter) for parameter in group["params"]] for group in of_one] for of_one in groups]

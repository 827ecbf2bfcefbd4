"""Which parameters each group of an optimizer holds, where training has changed that, as a gradual unfreezing does.

An optimizer's state has its groups by number only, so it can be loaded into equal groups alone. A hook that changed
them in an epoch that is over isn't called again: they are put back here, before Lightning loads the optimizers.
"""

from __future__ import annotations

from typing import final

from lightning.pytorch import Trainer

from lightning_faulttolerant.errors import NotExactError

GROUPS = "param_groups"

NamesOfGroups = list[list[list[str]]]
"""Of each optimizer, of each of its groups, the names of the parameters."""


@final
class ParamGroups:
    """The groups of a fit's optimizers, compared with those that it made at its start.

    Args:
        trainer: Whose fit it is; its optimizers are as they were made.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._first = held_by_groups(trainer)

    def state_dict(self) -> NamesOfGroups | None:
        """Return the parameters of all groups, or ``None`` while all are as they were made."""
        if held_by_groups(self._trainer) == self._first:
            return None
        return self._names()

    def load_state_dict(self, state: NamesOfGroups | None) -> None:
        """Give the optimizers the groups that they had; all that a group says of them is Lightning's to load.

        Raises:
            NotExactError: If a group had a tensor that is no parameter of the module.
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
                    f"Optimizer {number} ({type(optimizer).__name__}) can't be restored: while training, it was given"
                    f" {unknown[0] or 'a tensor'}, which is no parameter of the module. Make it one, or give it to the"
                    " optimizer in configure_optimizers."
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
    """Return of each optimizer, of each of its groups, the parameters by their identity."""
    groups = (optimizer.param_groups for optimizer in trainer.optimizers)
    return [[[id(parameter) for parameter in group["params"]] for group in of_one] for of_one in groups]

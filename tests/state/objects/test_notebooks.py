"""The globals of a notebook: the user's are read, and IPython's own among them are not."""

from __future__ import annotations

import types
from typing import Any

from lightning_faulttolerant.state.objects.kinds import Namespace
from lightning_faulttolerant.state.objects.object_state import LOST, NODES, ObjectState

OF_IPYTHON = ("In", "Out", "_", "__", "___", "_dh", "_ih", "_oh", "_i", "_ii", "_iii", "_i1", "_12")
OF_THE_USER = ("LOSSES", "_private", "_i_am", "_1st", "In_", "Output")


def names_of(is_notebook: bool, *names: str) -> set[str]:
    """Return the names of a module that are read."""
    module = types.ModuleType("main")
    vars(module).update({name: [name] for name in names})
    if is_notebook:
        vars(module)["get_ipython"] = lambda: None
    return set(Namespace(owner=module).attributes())


def test_names_of_ipython() -> None:
    """Typed cells and their results are not state; elsewhere the same names belong to the user."""
    assert names_of(True, *OF_IPYTHON, *OF_THE_USER) == set(OF_THE_USER)
    without_python = {name for name in OF_IPYTHON if not name.startswith("__")}
    assert names_of(False, *OF_IPYTHON) == without_python


def test_cells_that_are_executed_meanwhile() -> None:
    """Only the user's list is carried, and nothing is lost."""
    module: Any = types.ModuleType("main")
    module.get_ipython, module.In, module._ih, module.LOSSES = (lambda: None), [""], [""], []
    state = ObjectState({"main": Namespace(owner=module)})
    module.In.append("trainer.fit(model)")
    module._i1, module._2 = "x", iter(())
    module.LOSSES.append(0.5)
    found = state.state_dict()
    assert list(found[NODES]) == ["main.LOSSES"]
    assert found[LOST] == {}

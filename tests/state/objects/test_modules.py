"""The user's own modules are distinguished from installed ones."""

from __future__ import annotations

import importlib
import random
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from lightning_faulttolerant.state.objects.kinds import Namespace
from lightning_faulttolerant.state.objects.object_state import ObjectState
from lightning_faulttolerant.state.objects.walk import users_namespaces, users_variables
from lightning_faulttolerant.state.reachable import is_users, is_users_function, is_users_module

LOSSES: list[float] = []
STEP = 0


class Counter:
    count = 0


HERE = f"globals/{__name__}"


def test_globals_and_class_attributes() -> None:
    """Values of a user's module and of its classes are found; functions, classes, and modules are not."""
    namespaces = users_namespaces({})
    found = namespaces[HERE].attributes()
    assert {"LOSSES", "STEP"} <= found.keys()
    assert not {"Counter", "random", "test_globals_and_class_attributes", "__name__"} & found.keys()
    assert namespaces[f"{HERE}.Counter"].attributes() == {"count": 0}
    assert users_variables({})[HERE]["LOSSES"] is LOSSES


def test_installed_modules_are_left_alone() -> None:
    """Python's modules, installed packages, and this package have no user globals."""
    names = {name.removeprefix("globals/").partition(".")[0] for name in users_namespaces({})}
    assert "tests" in names
    assert not names & {"random", "torch", "lightning", "numpy", "pytest", "lightning_faulttolerant"}
    assert is_users(Counter)
    assert not is_users(random.Random)
    assert not is_users(ObjectState)


@pytest.mark.parametrize(
    ("directory", "record", "is_installed"),
    [
        ("overlay/lib/python3/site-packages", "", True),
        ("usr/lib/python3/dist-packages", "", True),
        ("target", "elsewhere/__init__.py,sha256=x,12\n", True),
        ("target", "elsewhere-1.0.dist-info/METADATA,,\n__editable__.elsewhere.pth,,\n", False),
        ("project", None, False),
    ],
    ids=["overlay", "Debian", "target", "editable", "project"],
)
def test_packages_installed_elsewhere(
    directory: str, record: str | None, is_installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that is installed outside of this interpreter is not the user's; a script next to it is."""
    root = tmp_path / directory
    (root / "elsewhere").mkdir(parents=True)
    (root / "elsewhere" / "__init__.py").write_text("VALUE = 1\n")
    (root / "elsewhere_script.py").write_text("VALUE = 1\n")
    if record:
        info = root / "elsewhere-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Name: elsewhere\nVersion: 1.0\n")
        (info / "RECORD").write_text(record)
    monkeypatch.syspath_prepend(root)
    for name, is_own in (("elsewhere", not is_installed), ("elsewhere_script", "-packages" not in directory)):
        module = importlib.import_module(name)
        del sys.modules[name]
        assert is_users_module(module) == is_own


@pytest.mark.parametrize("is_notebook", [True, False])
def test_names_of_ipython(is_notebook: bool) -> None:
    """In a notebook, typed cells and their results are not state; elsewhere the same names belong to the user."""
    of_the_user = {"LOSSES", "_private", "_i_am", "_1st", "In_", "Output"}
    of_ipython = {"In", "Out", "_", "_dh", "_ih", "_oh", "_i", "_ii", "_iii", "_i1", "_12"}
    module = types.ModuleType("main")
    vars(module).update({name: [name] for name in of_the_user | of_ipython})
    if is_notebook:
        vars(module)["get_ipython"] = lambda: None
    found = set(Namespace(owner=module).attributes())
    assert found == (of_the_user if is_notebook else of_the_user | of_ipython)


def detached(source: str, **variables: Any) -> dict[str, Any]:
    """Run a source in globals that belong to no module."""
    found: dict[str, Any] = {"__name__": "__main__", **variables}
    exec(source, found)
    return found


class TestDetached:
    """Globals that belong to no module, as cloudpickle and profilers create them."""

    SOURCE = "class Kind:\n    pass\nnumber = 1\ndef call(function):\n    return function()\n"

    @pytest.fixture(autouse=True)
    def launcher(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make `__main__` an installed file."""
        main = types.ModuleType("__main__")
        main.__file__ = pytest.__file__
        for name in ("__main__", "__mp_main__"):
            monkeypatch.setitem(sys.modules, name, main)

    def test_are_found_while_they_run(self) -> None:
        """They count as a module, and changes reach them; the second with the same name gets another name."""
        one, other = (detached(self.SOURCE, __file__=__file__) for _ in range(2))
        assert "globals/__main__" not in users_namespaces({})
        found = one["call"](lambda: other["call"](lambda: users_namespaces({})))
        assert found["globals/__main__"].attributes() == {"number": 1}
        assert "globals/__main__.Kind" in found
        found["globals/__main__"].owner.number = 2
        found["globals/__main__~2"].owner.number = 3
        assert (one["number"], other["number"]) == (2, 3)

    def test_of_given_objects_are_found(self) -> None:
        """The globals of class methods and of functions are found even if none of these is running."""
        source = "class Kind:\n    def method(self): ...\nnumber = 1"
        one, other = (detached(source, __file__=__file__) for _ in range(2))
        found = users_namespaces({"module": one["Kind"](), "callbacks": [other["Kind"]()], "none": None})
        assert [found[f"globals/__main__{copy}"].attributes() for copy in ("", "~2")] == [{"number": 1}] * 2
        function = detached("def function(): ...\nnumber = 3", __file__=__file__)["function"]
        assert users_namespaces({"function": function})["globals/__main__"].attributes() == {"number": 3}

    def test_of_a_notebook_are_and_of_packages_are_not(self) -> None:
        """Without a file, only `__main__` is the user's; the globals of an installed file are not."""
        for variables, is_found in (({}, True), ({"__file__": pytest.__file__}, False), ({"__name__": "made"}, False)):
            found = detached(self.SOURCE, **variables)["call"](lambda: users_namespaces({}))
            assert bool({"globals/__main__", "globals/made"} & found.keys()) == is_found

    def test_classes_and_functions_are_the_users(self) -> None:
        """Classes and functions that `__main__` does not have are the user's; those of a launcher are not."""
        found = detached(self.SOURCE, __file__=__file__)
        assert is_users(found["Kind"])
        assert is_users_function(found["call"])
        main = vars(sys.modules["__main__"])
        exec(self.SOURCE, main)
        assert not is_users(main["Kind"])
        assert not is_users_function(main["call"])

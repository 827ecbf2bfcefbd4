"""The names that parts of splits have in the script: in its modules, and in the running functions."""

from __future__ import annotations

import dis
import inspect
import sys
import types
from collections.abc import Mapping
from typing import Any

from lightning_faulttolerant.state.drawn.contents import is_part
from lightning_faulttolerant.state.objects.modules import users_namespaces
from lightning_faulttolerant.state.objects.users import is_users_frame

_FEW = 16
_NUM_REFERENCES = 3  # to a snapshot: the frame's, our variable's, and the argument of the counting function


def names_of_parts() -> dict[int, str]:
    """Return the names of the parts that are in variables of the user's modules or of running functions."""
    found: dict[int, str] = {}
    for module, namespace in users_namespaces({}).items():
        _note(found, module, namespace.attributes())
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if _has_variables(frame) and is_users_frame(frame):
            _note_variables(found, frame)
        frame = frame.f_back
    return found


def _has_variables(frame: types.FrameType) -> bool:
    """Return whether a frame has variables that can be read without changing what the script sees.

    Before Python 3.13, reading updates the one dict that `locals` returns, and a function may hold that dict.
    """
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED:  # a module's, or a class's: its namespace itself
        return True
    return bool(code.co_varnames or code.co_cellvars or code.co_freevars) and not _calls_locals(code)


def _calls_locals(code: types.CodeType) -> bool:
    if "locals" not in code.co_names:  # it may also be a method's: pytest's asserts call one
        return False
    return any(one.argval == "locals" and one.opname == "LOAD_GLOBAL" for one in dis.get_instructions(code))


def _note_variables(found: dict[int, str], frame: types.FrameType) -> None:
    variables = frame.f_locals
    _note(found, f"{frame.f_code.co_name}()", variables)
    is_snapshot = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED) and type(variables) is dict
    # Before Python 3.13 the frame keeps its snapshot, and so every object that the function deletes later. If the frame
    # is traced, the snapshot is written back into the variables.
    if is_snapshot and sys.getrefcount(variables) <= _NUM_REFERENCES and frame.f_trace is None:
        variables.clear()


def _note(found: dict[int, str], owner: str, variables: Mapping[str, Any]) -> None:
    for name, value in list(variables.items()):
        if is_part(value):
            found.setdefault(id(value), f"{owner}.{name}")
        elif type(value) in (list, tuple, dict) and len(value) <= _FEW:
            items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
            for key, item in items:
                if is_part(item):
                    found.setdefault(id(item), f"{owner}.{name}[{key!r}]")

"""Names the environment variable in messages to a user who can't pass an argument.

If the callback comes from ``PL_FAULT_TOLERANT_TRAINING``, no script contains ``FaultTolerance(strict=False)``. Then the
same advice reads ``PL_FAULT_TOLERANT_OPTIONS="strict=false"``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

OPTIONS_VARIABLE = "PL_FAULT_TOLERANT_OPTIONS"
SEPARATOR = "|"
"""Separates the elements of a list."""

_LITERAL = r"True|False|None|\.\.\.|\"[^\"]*\"|'[^']*'|\d+(?:\.\d+)?|\([^()]*\)"
_ADVICE = re.compile(
    r"(?:\b(?P<verb>[Pp]ass|[Uu]se|[Ww]ith) )?"
    rf"(?:FaultTolerance\((?P<name>\w+)=(?P<value>{_LITERAL})\)|\b(?P<bare>\w+)=(?P<bare_value>{_LITERAL}))"
    r"(?P<a> (?=an? ))?"
)
_VERBS = {"pass": "set", "Pass": "Set", "use": "set", "Use": "Set"}
_names: set[str] = set()


def speak_of_variable(names: Iterable[str]) -> None:
    """Let messages name the variable from now on, instead of these arguments.

    Args:
        names: The names of the callback's arguments; empty if the callback is the script's own.
    """
    _names.clear()
    _names.update(names)


def worded(text: str) -> str:
    """Return a message that tells the user to set something that this user can set.

    Args:
        text: With arguments as ``FaultTolerance(strict=False)``, or as ``strict=False`` after "pass", "use", or "with".
    """
    return _ADVICE.sub(_by_variable, text) if _names else text


def _by_variable(found: re.Match[str]) -> str:
    verb, is_bare = found["verb"], found["bare"] is not None
    name, value = (found["bare"], found["bare_value"]) if is_bare else (found["name"], found["value"])
    if name not in _names or (is_bare and verb is None):
        return found[0]
    before = "" if verb is None else f"{_VERBS.get(verb, verb)} "
    after = "" if found["a"] is None else " to " if before.lower() == "set " else " "
    return f'{before}{OPTIONS_VARIABLE}="{name}={_in_variable(ast.literal_eval(value))}"{after}'


def _in_variable(value: object) -> str:
    if value is Ellipsis:
        return "..."
    if isinstance(value, (tuple, list)):
        return SEPARATOR.join(map(_in_variable, value))
    return value if isinstance(value, str) else str(value).lower()

"""What users' hooks do at the start of a validation run. A run that continues does not call them again.

A hook that only sets attributes and resets results leaves nothing but state, which is carried. Any other code may
register a hook, open a file, or set a switch of the process. The new process would lack that without a sign of it.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer

from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.functions import stage_of
from lightning_faulttolerant.trainer.user_hooks import is_users_function, overridden

_STAGES = ("validation", "test", "predict")
_HOOKS = tuple(f"on_{stage}_{hook}" for stage in _STAGES for hook in ("model_eval", "start", "epoch_start"))
_METHODS = frozenset({*_HOOKS, "append", "clear", "eval", "extend", "increment", "log", "log_dict", "reset", "train"})
_NAMES = frozenset(
    {"Counter", "defaultdict", "deque", "dict", "float", "int", "len", "list", "print", "set", "super", "tuple"}
)
_LOADS_A_NAME = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")
_REFUSED = ("IMPORT_NAME", "MAKE_FUNCTION", "STORE_GLOBAL", "STORE_SUBSCR", "SETUP_WITH", "BEFORE_WITH", "DELETE_ATTR")


def leaves_only_state(trainer: Trainer) -> bool:
    """Return whether the hooks at the start of an evaluation only set attributes and reset results."""
    return all(_only_sets(function) for function in _functions(trainer))


def _functions(trainer: Trainer) -> Iterator[Any]:
    """Yield the hooks that are not Lightning's or ours."""
    stage = stage_of(trainer)
    for owner in (*compat.callbacks(trainer), trainer.lightning_module):
        for function in (overridden(owner, hook) for hook in _HOOKS if f"_{stage}_" in hook):
            if function is not None and is_users_function(function):
                yield function


def _only_sets(function: Any) -> bool:
    if not isinstance(function, types.FunctionType):
        return False
    for step in dis.get_instructions(function):
        name = str(step.argval)
        if step.opname in _REFUSED:
            return False
        if step.opname in _LOADS_A_NAME and name not in _NAMES and name != "__class__":
            return False
        if _calls_a_method(step) and name not in _METHODS:
            return False
    return True


def _calls_a_method(step: dis.Instruction) -> bool:
    # Before Python 3.12 a method has an instruction of its own; since then the lowest bit tells it from an attribute.
    is_either = step.opname in ("LOAD_ATTR", "LOAD_SUPER_ATTR") and "LOAD_METHOD" not in dis.opmap
    return step.opname == "LOAD_METHOD" or (is_either and bool((step.arg or 0) & 1))

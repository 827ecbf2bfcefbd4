"""Whether a script runs several fits, and to which trial of a study a fit belongs."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
from collections.abc import Iterator
from itertools import islice
from types import FrameType
from typing import Any

from lightning_faulttolerant.state.objects.users import file_of, is_users_file
from lightning_faulttolerant.trainer.identity import compat

_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")  # own frames before Python 3.12
_TRIED_AGAIN = "failed_trial"  # the key for the number of the first try, set by Optuna's callback
# Packages that call a user's function once for each trial.
_SWEEPS = ("ax", "hyperopt", "nevergrad", "optuna", "ray.tune", "skopt", "smac", "wandb.agents")


def trial_of() -> str | None:
    """Return the name of the Optuna trial that this is called in; for a retried trial, that of the first try.

    ``None`` outside a trial, and for a study in memory, which has the same trials at each start.
    """
    trial = _trial()
    return None if trial is None else f"{trial.study.study_name}/{_first_try(trial)}"


def _trial() -> Any:
    optuna = sys.modules.get("optuna")
    if optuna is None:
        return None
    in_memory = optuna.storages.InMemoryStorage
    # Variables of other functions are not read: before Python 3.13, reading keeps alive objects that they delete later.
    frames = (frame for frame in _frames() if _module_of(frame).startswith("optuna.") or _is_module(frame))
    trials = (value for frame in frames for value in frame.f_locals.values() if isinstance(value, optuna.Trial))
    return next((trial for trial in trials if not isinstance(compat.storage_of(trial.study), in_memory)), None)


def _first_try(trial: Any) -> int:
    """Return the number of the trial that this one retries, or its own number."""
    known = trial.study.get_trials(deepcopy=False)[trial.number]
    return int(known.system_attrs.get(_TRIED_AGAIN, trial.number))


def sweep() -> str | None:
    """Return the package that runs the trials of a sweep, if this is called in one of them; ``None`` otherwise."""
    modules = [_module_of(frame) for frame in _frames()]
    found = (name for name in _SWEEPS if any(module == name or module.startswith(f"{name}.") for module in modules))
    return next((name for name in found if name != "optuna" or _trial() is not None), None)


def runs_several() -> bool:
    """Return whether the script that runs this fit may run several fits."""
    return is_in_loop() or sweep() is not None


def is_in_loop() -> bool:
    """Return whether a `for` repeats a line of user code on the call stack: the script may run several fits.

    A `while` does not count: scripts retry that way.
    """
    return any(_is_in_loop_of(frame) for frame in _frames() if is_users_file(file_of(frame)))


def _frames() -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_module(frame: FrameType) -> bool:
    """Return whether the variables of a frame are those of a module."""
    return frame.f_code.co_name == "<module>"


def _is_in_loop_of(frame: FrameType) -> bool:
    if frame.f_code.co_name in _COMPREHENSIONS:
        return True
    source = "".join(linecache.getlines(file_of(frame), frame.f_globals))
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    first, place = frame.f_code.co_firstlineno, _place_of(frame)
    nodes = (node for node in ast.walk(tree) if getattr(node, "lineno", 0) >= first)
    return any(_is_between(place, *part) for node in nodes for part in _repeated(node))


def _place_of(frame: FrameType) -> tuple[int, int]:
    """Return the line and column of the call that a frame is in; the column is -1 if Python does not provide it."""
    positions = getattr(frame.f_code, "co_positions", None)
    found = None if positions is None else next(islice(positions(), frame.f_lasti // 2, None), None)
    line, column = (None, None) if found is None else (found[0], found[2])
    return (frame.f_lineno, -1) if line is None or column is None else (line, column)


def _repeated(node: ast.AST) -> list[tuple[ast.AST, ast.AST]]:
    """Return the first and the last node of each part that a loop repeats."""
    if isinstance(node, (ast.For, ast.AsyncFor)):
        return [(node.body[0], node.body[-1])]
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
        return [(node.elt, node.elt)]
    return [(node.key, node.key), (node.value, node.value)] if isinstance(node, ast.DictComp) else []


def _is_between(place: tuple[int, int], first: Any, last: Any) -> bool:
    line, column = place
    if column < 0:  # only for statements: comprehensions have their own frames then
        return isinstance(first, ast.stmt) and first.lineno <= line <= last.end_lineno
    return (first.lineno, first.col_offset) <= place <= (last.end_lineno, last.end_col_offset)

"""Whether a script runs several fits, and which trial of a study a fit is of."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_faulttolerant.trainer.runs import compat

# A `while` is how scripts try again.
_LOOPS = (ast.For, ast.AsyncFor, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_TRIED_AGAIN = "failed_trial"  # where Optuna's callback notes the number of the first try
# Packages that call a function of the user's once for each trial.
_SWEEPS = ("ax", "hyperopt", "nevergrad", "optuna", "ray.tune", "skopt", "smac", "wandb.agents")


def trial_of() -> str | None:
    """Return the name of Optuna's trial in which this is called: that of the first try, for one that is tried again.

    ``None`` where there is none, and for a study in memory, whose trials are the same ones at each start.
    """
    trial = _trial()
    return None if trial is None else f"{trial.study.study_name}/{_first_try(trial)}"


def _trial() -> Any:
    optuna = sys.modules.get("optuna")
    if optuna is None:
        return None
    in_memory = optuna.storages.InMemoryStorage
    # Variables of other functions are not read: before Python 3.13 that keeps alive what the function deletes later.
    frames = (frame for frame in _frames() if _module_of(frame).startswith("optuna.") or _is_module(frame))
    trials = (value for frame in frames for value in frame.f_locals.values() if isinstance(value, optuna.Trial))
    return next((trial for trial in trials if not isinstance(compat.storage_of(trial.study), in_memory)), None)


def _first_try(trial: Any) -> int:
    """Return the number of the trial that this one tries again, or its own."""
    known = trial.study.get_trials(deepcopy=False)[trial.number]
    return int(known.system_attrs.get(_TRIED_AGAIN, trial.number))


def sweep() -> str | None:
    """Return the name of the package that runs the trials of a sweep, of which one calls this; ``None`` outside."""
    modules = [_module_of(frame) for frame in _frames()]
    found = (name for name in _SWEEPS if any(module == name or module.startswith(f"{name}.") for module in modules))
    return next((name for name in found if name != "optuna" or _trial() is not None), None)


def runs_several() -> bool:
    """Return whether the script may run several fits, of which this is called in one."""
    return is_in_loop() or sweep() is not None


def is_in_loop() -> bool:
    """Return whether a line of the user's that leads here stands in a loop: the script may run several fits."""
    return any(_is_in_loop_of(frame) for frame in _frames() if _is_users(frame.f_code.co_filename))


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


def _is_users(path: str) -> bool:
    roots = (sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib"))
    return not any(Path(path).is_relative_to(root) for root in roots) and "lightning_faulttolerant" not in path


def _is_in_loop_of(frame: FrameType) -> bool:
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    first, line = frame.f_code.co_firstlineno, frame.f_lineno
    return any(
        first <= node.lineno and _body_of(node) <= line <= (node.end_lineno or 0)
        for node in ast.walk(tree)
        if isinstance(node, _LOOPS)
    )


def _body_of(loop: Any) -> int:
    """Return the line in which the body of a loop begins."""
    return int(loop.body[0].lineno if isinstance(loop, (ast.For, ast.AsyncFor)) else loop.lineno)

"""Values that a replay sets before its first step of interest: what would the step do with another value?"""

from __future__ import annotations

import ast
from collections.abc import MutableMapping, MutableSequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_faulttolerant.errors import ReplayError


def set_value(trainer: Trainer, key: str, text: str) -> None:
    """Set a value of a fit.

    Args:
        trainer: The trainer of the fit.
        key: Where it is: ``model``, ``datamodule``, ``optimizers``, or ``trainer``, and names of attributes, keys of
            dicts, or indices of lists, with dots between.
        text: The value, as in Python; anything else is a string. A tensor is filled with a number, or takes the numbers
            of a list of its shape.

    Raises:
        ReplayError: If there is no such value yet, or it can't be set.

    Example:
        `set_value(trainer, "optimizers.0.param_groups.0.lr", "1e-4")`
    """
    first, *names = key.split(".")
    roots = {
        "model": trainer.lightning_module,
        "datamodule": getattr(trainer, "datamodule", None),
        "optimizers": trainer.optimizers,
        "trainer": trainer,
    }
    if first not in roots or not names:
        raise ReplayError(f"--set {key}: a key begins with {', '.join(roots)}, and a dot, such as model.hparams.size.")
    owner, value = None, roots[first]
    for number, name in enumerate(names):
        owner = value
        try:
            value = _get(owner, name)
        except (AttributeError, LookupError, ValueError):
            place = ".".join([first, *names[:number]])
            raise ReplayError(f"--set {key}: {place}, a {type(owner).__name__}, has no {name}.") from None
    try:
        _set(owner, names[-1], value, _parsed(text))
    except (AttributeError, TypeError, RuntimeError, ValueError) as error:
        raise ReplayError(f"--set {key}: it can't be set to {text}: {error}") from error


def _get(owner: object, name: str) -> object:
    if isinstance(owner, MutableMapping) and name in owner:
        return owner[name]
    if isinstance(owner, MutableSequence):
        return owner[int(name)]
    return getattr(owner, name)


def _set(owner: object, name: str, before: object, value: Any) -> None:
    if isinstance(before, Tensor):
        with torch.no_grad():
            before.copy_(torch.as_tensor(value, dtype=before.dtype, device=before.device))
    elif isinstance(owner, MutableMapping) and name in owner:
        owner[name] = value
    elif isinstance(owner, MutableSequence):
        owner[int(name)] = value
    else:
        setattr(owner, name, value)


def _parsed(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text

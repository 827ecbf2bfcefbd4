"""The start fingerprint: what is known of a fit before it sets anything up, and which earlier fit it matches.

It tells the fits of one script apart, and whether the same script in another directory is the same run. A script may
run several fits: in a loop, or as trials of a study. What a resumed run must agree on is another matter: see
``trainer/run/fingerprint.py``.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import linecache
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from lightning_faulttolerant.records.runs import FitRecord
from lightning_faulttolerant.state.reachable import file_of, is_users_file, own_dict
from lightning_faulttolerant.trainer.compat import datamodule
from lightning_faulttolerant.trainer.identity import compat
from lightning_faulttolerant.trainer.position import FIT
from lightning_faulttolerant.trainer.run.changes import is_below, is_passing, leaves
from lightning_faulttolerant.trainer.run.fingerprint import differences, loader_fingerprint, module_fingerprint

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
    frames = (
        frame for frame in _frames() if _module_of(frame).startswith("optuna.") or frame.f_code.co_name == "<module>"
    )
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


def may_run_several() -> bool:
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


_SAMPLED_ELEMENTS = 64
_DIGEST_BYTES = 8
_SEED_VARIABLE = "PL_GLOBAL_SEED"
_NOT_OWN = ("training", "prepare_data_per_node", "allow_zero_length_dataloader_with_multiple_devices")


@dataclass(frozen=True, kw_only=True, slots=True)
class StartFingerprint:
    """What is known of a fit when it starts.

    Args:
        core: Classes, shapes, hyperparameters, numbers among the attributes, the seed, and the trial of a study. It is
            the same at each start, even if a script draws random numbers without a seed.
        data: The fingerprints of the loaders that were passed to ``fit``, by place.
        weights: A checksum of the initial weights.
        accepted: The names of differences that don't count, such as ``hyperparameters.start``.
    """

    core: Mapping[str, object] = field(default_factory=dict)
    data: Mapping[str, object] = field(default_factory=dict)
    weights: str = ""
    accepted: Sequence[str] = ()

    def state_dict(self) -> dict[str, object]:
        """Return the fingerprint in a form that JSON can hold."""
        return {"core": self.core, "data": self.data, "weights": self.weights, "accepted": self.accepted}

    def continuing(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return another fingerprint's `state_dict` with what this one accepts, too."""
        return {**saved, "accepted": sorted({*self.accepted, *saved.get("accepted", ())})}

    @property
    def is_told_apart(self) -> bool:
        """Whether it has a trial, or numbers that would differ in another trial of a sweep."""
        return "trial" in self.core or bool(self.core.get("values") or self.core.get("data values"))

    def has_function(self, saved: Mapping[str, Any]) -> bool:
        """Return whether another fingerprint is of the same function of the Trainer."""
        own, theirs = (core.get("function", FIT) for core in (self.core, saved.get("core", {})))
        return bool(own == theirs)

    @property
    def name(self) -> str:
        """A short name for `core`."""
        return hashlib.blake2b(repr(self.core).encode(), digest_size=4).hexdigest()

    def differs(self, saved: Mapping[str, object]) -> list[str]:
        """Return a line for each difference in `core` and `data` from another fingerprint's `state_dict`."""
        own = {"core": self.core, "data": self.data}
        return [str(one) for name in own for one in differences(saved.get(name, {}), own[name])]

    def has_core(self, saved: Mapping[str, Any]) -> bool:
        """Return whether another fingerprint has the same `core`."""
        accepted = [name.removeprefix("hyperparameters.") for name in self.continuing(saved)["accepted"]]
        return bool(_without(saved.get("core", {}), accepted) == _without(self.core, accepted))

    def has_data(self, saved: Mapping[str, object]) -> bool:
        """Return whether another fingerprint has the same `data`."""
        return bool(saved.get("data") == self.data)

    def has_weights(self, saved: Mapping[str, object]) -> bool:
        """Return whether another fingerprint has the same `weights`."""
        return bool(saved.get("weights") == self.weights)

    def is_alike(self, saved: Mapping[str, object]) -> bool:
        """Return whether another fingerprint is the same except for the weights, which vary without a seed."""
        return self.has_core(saved) and self.has_data(saved)

    def is_exactly(self, saved: Mapping[str, object]) -> bool:
        """Return whether another fingerprint is the same in everything."""
        return self.is_alike(saved) and self.has_weights(saved)


def start_fingerprint(
    trainer: Trainer, *, function: str = FIT, checkpoint: str | None = None, accepted: Sequence[str] = ()
) -> StartFingerprint:
    """Return the fingerprint of the fit or the evaluation that begins; no random numbers are drawn.

    Args:
        trainer: The trainer, before its callbacks are set up.
        function: The Trainer's function that begins.
        checkpoint: The checkpoint that an evaluation loads.
        accepted: The names of differences that don't count.
    """
    module, data_module = trainer.lightning_module, datamodule(trainer)
    core: dict[str, object] = {"module": _jsonable(module_fingerprint(module)), "values": _values_of(module)}
    if function != FIT:
        core = {**core, "function": function, "checkpoint": checkpoint, "limit": _limit_of(trainer, function)}
    if data_module is not None:
        core = {**core, "data module": type(data_module).__qualname__, "data values": _values_of(data_module)}
    if os.environ.get(_SEED_VARIABLE):
        core["seed"] = os.environ[_SEED_VARIABLE]
    trial = trial_of()
    if trial is not None:
        core["trial"] = trial
    data = {place: _data_of(loader) for place, loader in compat.given_loaders(trainer).items()}
    return StartFingerprint(core=core, data=data, weights=_weights(module), accepted=list(accepted))


def _limit_of(trainer: Trainer, function: str) -> object:
    """Return how many batches of each loader an evaluation is limited to."""
    limits = {"validate": "limit_val_batches", "test": "limit_test_batches", "predict": "limit_predict_batches"}
    return _jsonable(getattr(trainer, limits[function]))


def _data_of(loader: object) -> object:
    """Return what is known of a loader's data; how the loader batches it may change in an elastic resume."""
    try:
        found = loader_fingerprint(loader)
    except Exception:  # noqa: BLE001 - from a data set that can't be queried before it is set up
        return {"class": type(loader).__qualname__}
    return _jsonable(found.get("dataset", found))


def _values_of(owner: LightningModule | LightningDataModule) -> dict[str, object]:
    """Return numbers and flags of an object's attributes, and numbers, flags, and strings of its hyperparameters."""
    attributes = {name: value for name, value in (own_dict(owner) or {}).items() if not name.startswith("_")}
    for name in _NOT_OWN:
        attributes.pop(name, None)
    found: dict[str, object] = {
        name: value for name, value in attributes.items() if issubclass(type(value), (bool, int, float))
    }
    found |= {name: value for name, value in leaves(dict(owner.hparams)) if isinstance(value, (bool, int, float, str))}
    now = time.time()
    return {name: _jsonable(value) for name, value in found.items() if not is_passing(value, now=now)}


def _without(core: Mapping[str, Any], accepted: Collection[str]) -> dict[str, object]:
    """Return the core of a fingerprint without the values that may differ."""
    kinds = [kind for kind in ("values", "data values") if kind in core]
    return {**core, **{kind: {n: v for n, v in core[kind].items() if not is_below(n, accepted)} for kind in kinds}}


def _jsonable(value: object) -> object:
    """Return a value in the form in which JSON returns it."""
    if isinstance(value, Mapping):
        return {str(key): _jsonable(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(child) for child in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if value == value and abs(value) != float("inf") else str(float(value))
    return str(value)


def _weights(module: LightningModule) -> str:
    """Return a checksum of a sample of the initial weights."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name, tensor in _tensors(module):
        flat = tensor.detach().reshape(-1)
        stride = max(1, len(flat) // _SAMPLED_ELEMENTS)
        sample = flat[::stride]
        digest.update(f"{name}{list(tensor.shape)}{tensor.dtype}".encode())
        if not tensor.is_meta:
            digest.update(sample.to(torch.float64, copy=True).cpu().numpy().tobytes())
    return digest.hexdigest()


def _tensors(module: LightningModule) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in module.named_parameters():
        if (
            not torch.nn.parameter.is_lazy(parameter)
            and type(parameter.data) is torch.Tensor
            and not parameter.is_complex()
        ):
            yield name, parameter.data


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """The result of a search.

    Args:
        number: The number of the fit.
        passed_over: The unfinished fits that are not this one, each with its differences.
        is_guess: Whether nothing distinguishes one trial from another.
        is_finished: Whether that fit has finished.
    """

    number: int
    passed_over: Mapping[int, list[str]]
    is_guess: bool = False
    is_finished: bool = False


def match_fit(
    fits: Mapping[int, FitRecord | None],
    taken: Collection[int],
    start: StartFingerprint,
    *,
    runs_several: Callable[[], bool],
    is_sweep: bool = False,
) -> Match:
    """Return the number of the fit that begins. Its autosaves are kept under that number.

    Its start fingerprint takes precedence over its place in the order of the script's fits.

    Args:
        fits: The fits that have autosaves, by number; ``None`` if it is not known how one started.
        taken: The numbers of the fits that this script has already begun.
        start: How the fit that begins now starts.
        runs_several: Tells whether the script may run several fits, so one that matches none is a new one. Only called
            if it matters.
        is_sweep: Whether a later start may run other fits than an earlier one, or run them in another order.
    """
    place = len(taken) + 1
    same = {number for number, fit in fits.items() if start.has_function({} if fit is None else fit.start)}
    free = {number: fit for number, fit in sorted(fits.items()) if number in same and number not in taken}
    known = {number: fit for number, fit in free.items() if fit is not None and fit.start}
    unfinished = [number for number, fit in known.items() if not fit.is_finished]
    found = _first_match(known, unfinished, place, start, is_sweep=is_sweep)
    if found is None and not is_sweep and place in free and (place not in known or not runs_several()):
        found = place
    is_guess = is_sweep and found is None and any(start.has_core(known[number].start) for number in unfinished)
    if found is None:
        found = place if place not in fits and place not in taken else 1 + max((*fits, *taken), default=0)
    others = [number for number in unfinished if number != found]
    return Match(
        number=found,
        passed_over={number: start.differs(known[number].start) for number in others},
        is_guess=is_guess,
        is_finished=found in known and known[found].is_finished,
    )


def _first_match(
    known: Mapping[int, FitRecord], unfinished: list[int], place: int, start: StartFingerprint, *, is_sweep: bool
) -> int | None:
    candidates = unfinished if is_sweep else [*([place] if place in known else []), *unfinished]
    exact = [number for number in candidates if start.is_exactly(known[number].start)]
    if exact:
        return exact[0]
    alike = [number for number in candidates if start.has_core(known[number].start)]
    if is_sweep:
        # Without a seed, the weights differ. A fit without its own numbers can't be distinguished from another trial.
        alike = [number for number in alike if start.has_data(known[number].start) and start.is_told_apart]
        return alike[0] if alike else None
    for number in alike:
        saved = known[number].start
        is_by_place = number == place and not (start.has_weights(saved) and not start.has_data(saved))
        if is_by_place or start.has_data(saved):
            return number
    return None

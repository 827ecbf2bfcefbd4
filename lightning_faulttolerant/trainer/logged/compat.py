"""Private names of Lightning's logged values that this package uses, checked on 2.5.6 to 2.6.6."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torch import Tensor

from lightning_faulttolerant.state.tensors import plain_copy
from lightning_faulttolerant.trainer.functions import FIT, function_of, loop_of

SEAMS = {
    "trainer.fit_loop.epoch_loop._results": "means and sums logged over an epoch",
    "trainer._logger_connector._first_loop_iter": "means logged over an epoch, right after a resume",
    "trainer._logger_connector._current_fx": "means logged over an epoch, right after a resume",
    "trainer._logger_connector._callback_metrics": "EarlyStopping and ModelCheckpoint, right after a resume",
    "trainer._logger_connector._logged_metrics": "trainer.logged_metrics, right after a resume",
    "trainer._logger_connector._progress_bar_metrics": "the progress bar, right after a resume",
}

_CONNECTOR = {"callback": "_callback_metrics", "logged": "_logged_metrics", "progress_bar": "_progress_bar_metrics"}


def logger_connector_state(trainer: Trainer) -> dict[str, Any]:
    """Return what the logger connector keeps between batches."""
    connector = trainer._logger_connector
    metrics = {name: copied(getattr(connector, attribute)) for name, attribute in _CONNECTOR.items()}
    return {"metrics": metrics, "first_loop_iter": connector._first_loop_iter, "current_fx": connector._current_fx}


def load_logger_connector(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Restore a result of `logger_connector_state`."""
    connector = trainer._logger_connector
    for name, attribute in _CONNECTOR.items():
        setattr(connector, attribute, copied(state["metrics"][name]))
    connector._first_loop_iter = state["first_loop_iter"]
    connector._current_fx = state["current_fx"]


def copied(values: object) -> Any:
    """Return a copy of logged values: tensors, plain values, and mappings and lists of these."""
    if isinstance(values, Mapping):
        return {name: copied(value) for name, value in values.items()}
    if isinstance(values, list):
        return [copied(value) for value in values]
    return plain_copy(values) if isinstance(values, Tensor) else values


def result_collections(trainer: Trainer) -> dict[str, _ResultCollection]:
    """Return the collections of logged values of training and validation, or of the evaluation that runs."""
    function = function_of(trainer)
    if function == "predict":
        return {}
    if function != FIT:
        return {"validation": loop_of(trainer)._results}
    epoch_loop = trainer.fit_loop.epoch_loop
    return {"train": epoch_loop._results, "validation": epoch_loop.val_loop._results}


def metadata_state(item: _ResultMetric) -> dict[str, object]:
    """Return the arguments that a value was logged with, as plain values."""
    fields = (f.name for f in dataclasses.fields(item.meta) if f.name not in ("reduce_fx", "_sync"))
    sync = item.meta.sync
    return {
        "fields": {name: getattr(item.meta, name) for name in fields},
        "reduce_fx": item.meta.reduce_fx.__name__,
        "sync": {"should": sync.should, "rank_zero_only": sync.rank_zero_only, "adopts": _adopts(item.meta)},
        "is_tensor": item.is_tensor,
    }


class _AdoptingMetadata(_Metadata):
    """Arguments of a value that another number of ranks logged: the way to sync it comes from its next ``log``.

    Lightning does not record whether a single rank's value was to be synced, and treats a difference as an error.
    """

    def __ne__(self, other: object) -> bool:
        if not isinstance(other, _Metadata):
            return True
        self.sync = other.sync
        self.has_adopted = True
        fields = (f.name for f in dataclasses.fields(_Metadata))
        return any(getattr(self, name) != getattr(other, name) for name in fields)

    __eq__ = _Metadata.__eq__
    __hash__ = None  # type: ignore[assignment]  # as for a dataclass that can be changed


def _adopts(meta: _Metadata) -> bool:
    return isinstance(meta, _AdoptingMetadata) and not getattr(meta, "has_adopted", False)


def make_result(trainer: Trainer, state: Mapping[str, Any]) -> _ResultMetric:
    """Return a logged value with the arguments of `metadata_state`, and no value yet."""
    kind = _AdoptingMetadata if state["sync"].get("adopts") else _Metadata
    meta = kind(**state["fields"], reduce_fx=getattr(torch, state["reduce_fx"]))
    sync = state["sync"]
    meta.sync = _Sync(fn=trainer.strategy.reduce, _should=sync["should"], rank_zero_only=sync["rank_zero_only"])
    return _ResultMetric(meta, state["is_tensor"])


def reset_to_kind_of(item: _ResultMetric, name: str, value: Tensor) -> None:
    """Let a reset give the data type of `value`: it may have been logged while another default was set."""
    default = item._defaults[name]
    if isinstance(default, Tensor) and default.dtype != value.dtype:
        item._defaults[name] = default.to(value.dtype)


def result_cache(item: _ResultMetric) -> dict[str, Any]:
    """Return what a logged value keeps besides its sums: the last step's value, and how it was reset."""
    cache = item._forward_cache
    return {
        "forward": plain_copy(cache) if isinstance(cache, Tensor) else None,
        "has_reset": item.has_reset,
        "update_count": item.update_count,
    }


def load_result_cache(item: _ResultMetric, state: Mapping[str, Any]) -> None:
    """Restore a result of `result_cache`."""
    item._forward_cache = state["forward"]
    item.has_reset = state["has_reset"]
    item._update_count = state["update_count"]
    item._computed = None

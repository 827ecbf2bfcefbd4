"""Values that were logged in the epoch so far, as a state: sums, means, extremes, and logged metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_faulttolerant.state.metrics import named_metrics
from lightning_faulttolerant.state.tensors import plain_copy
from lightning_faulttolerant.trainer.logged import compat

_SUMS = ("value", "cumulated_batch_size")


def results_state(trainer: Trainer) -> dict[str, Any]:
    """Return a copy of all values that were logged and not yet passed to the loggers, and of those passed last."""
    collections = {
        name: {key: _item_state(item) for key, item in collection.items()}
        for name, collection in compat.result_collections(trainer).items()
    }
    return {"collections": collections, "connector": compat.logger_connector_state(trainer)}


def load_results(trainer: Trainer, state: Mapping[str, Any]) -> list[str]:
    """Restore the logged values; return the keys with a metric that the module does not have anymore."""
    missing = []
    for name, collection in compat.result_collections(trainer).items():
        collection.clear()
        for key, item_state in state["collections"][name].items():
            item = _make_item(trainer, item_state)
            if item is None:
                missing.append(key)
            else:
                collection[key] = item
    compat.load_logger_connector(trainer, state["connector"])
    return missing


def _item_state(item: Any) -> dict[str, Any]:
    sums = {name: getattr(item, name, None) for name in _SUMS}
    return {
        "meta": compat.metadata_state(item),
        "cache": compat.result_cache(item),
        "sums": {name: plain_copy(value) for name, value in sums.items() if isinstance(value, Tensor)},
    }


def _make_item(trainer: Trainer, state: Mapping[str, Any]) -> Any:
    item = compat.make_result(trainer, state["meta"])
    device = trainer.strategy.root_device
    if item.is_tensor:
        for name, value in state["sums"].items():
            setattr(item, name, value.detach().clone().to(device))
            compat.reset_to_kind_of(item, name, value)
    else:
        metric = named_metrics(trainer.lightning_module).get(item.meta.metric_attribute or "")
        if metric is None:
            return None
        item.value = metric
    compat.load_result_cache(item, state["cache"])
    return item

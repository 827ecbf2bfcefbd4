"""What Timer and LearningRateMonitor keep and don't save: elapsed time to the instant, and all rates so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, Timer

from lightning_faulttolerant.trainer.compat import callbacks
from lightning_faulttolerant.trainer.monitors.compat import load_timer, timer_state

_HISTORY, _LAST = "lrs", ("last_momentum_values", "last_weight_decay_values")


def monitors_state(trainer: Trainer) -> dict[str, Any]:
    """Return the states of all such callbacks, by kind and in their order."""
    return {
        kind.__name__: [read(callback) for callback in callbacks(trainer) if isinstance(callback, kind)]
        for kind, (read, _) in _KINDS.items()
    }


def load_monitors(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Put back what `monitors_state` gave; to be called behind ``on_train_start``, which begins them anew."""
    for kind, (_, load) in _KINDS.items():
        found = [callback for callback in callbacks(trainer) if isinstance(callback, kind)]
        for callback, part in zip(found, state[kind.__name__], strict=False):
            load(callback, part)


def _rates(monitor: LearningRateMonitor) -> dict[str, Any]:
    last = {name: dict(getattr(monitor, name)) for name in _LAST}
    return {_HISTORY: {name: list(rates) for name, rates in monitor.lrs.items()}, **last}


def _load_rates(monitor: LearningRateMonitor, state: Mapping[str, Any]) -> None:
    monitor.lrs = {name: list(rates) for name, rates in state[_HISTORY].items()}
    for name in _LAST:
        setattr(monitor, name, dict(state[name]))


_KINDS: dict[type[Any], tuple[Callable[[Any], dict[str, Any]], Callable[[Any, Mapping[str, Any]], None]]] = {
    Timer: (timer_state, load_timer),
    LearningRateMonitor: (_rates, _load_rates),
}

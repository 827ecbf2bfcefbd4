"""What a training does, event by event, written by a plain callback and a plain logger; and the law over it.

The recorder is not the package's own: a recorder must not judge itself. It has no state that training changes, and it
writes each event at once, so that a kill loses none.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import Logger

Event = dict[str, Any]

# What tells events of one kind apart. The rest of an event is its content.
_PLACE = ("kind", "stage", "epoch", "batch", "step", "loader")


class Broken(AssertionError):  # noqa: N818 - reads as a plain statement
    """A law does not hold."""


def digest(*values: Any) -> str:
    """Return a digest of all bits of these values: tensors, arrays, numbers, texts, and containers of them."""
    hashed = hashlib.blake2b(digest_size=8)
    for piece in _pieces(values):
        hashed.update(piece)
    return hashed.hexdigest()


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        value = value.to_local() if hasattr(value, "to_local") else value  # a rank's shard
        if value.layout is not torch.strided:
            value = value.detach().to_dense()
        whole = value.detach().cpu().contiguous()
        yield f"{whole.dtype}{tuple(whole.shape)}".encode()
        yield whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode()
        yield value.tobytes() if value.dtype != object else repr(value.tolist()).encode()
    elif isinstance(value, Mapping):
        for key in value:
            yield f"{key!r}:".encode()
            yield from _pieces(value[key])
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield f"[{len(value)}".encode()
        for each in sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value:
            yield from _pieces(each)
    elif isinstance(value, (float, np.floating)):
        yield float(value).hex().encode()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _pieces({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield type(value).__name__.encode()
        yield from _pieces(vars(value))
    else:
        yield repr(value).encode()


def in_order(state: Any) -> Any:
    """Return the state of an optimizer with the keys of its dictionaries in order: that of FSDP1's may differ."""
    return {key: in_order(state[key]) for key in sorted(state, key=repr)} if isinstance(state, dict) else state


def write(path: Path, kind: str, **content: Any) -> None:
    """Append one event to a file."""
    os.write(opened(path), json.dumps({"kind": kind, **content}).encode() + b"\n")


@functools.cache
def opened(path: Path) -> int:
    """Return a descriptor of a file, which stays open: a hook that opens a file has done something that matters."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


class Events(Callback):
    """Writes the events of a trainer: batches, results, shown values, weights, optimizers, and random states."""

    def __init__(self, path: Path) -> None:
        self.path = path
        opened(path)

    def write(self, kind: str, trainer: Trainer, **content: Any) -> None:
        """Write one event with its place, unless it belongs to the sanity check."""
        if not trainer.sanity_checking:
            place = {"stage": str(trainer.state.stage), "epoch": trainer.current_epoch, "step": trainer.global_step}
            write(self.path, kind, **place, **content)

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.write("epoch", trainer)

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.write("batch", trainer, batch=batch_idx, content=digest(batch))

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        optimizers = [in_order(optimizer.state_dict()) for optimizer in trainer.optimizers]
        self.write(
            "trained", trainer, batch=batch_idx, result=digest(outputs), **shown(trainer),
            weights=digest(dict(module.state_dict())), optimizers=digest(optimizers), random=random_states(),
        )  # fmt: skip

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.write("epoch end", trainer, **shown(trainer))

    def on_validation_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        content = {"content": digest(batch), "result": digest(outputs), "random": random_states()}
        self.write("evaluated", trainer, batch=batch_idx, loader=dataloader_idx, **content)

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.write("evaluation end", trainer, **shown(trainer))

    # No hook at the start of an evaluation: one that does more than set attributes has the evaluation repeated.
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
    on_test_end = on_predict_end = on_validation_end


def shown(trainer: Trainer) -> dict[str, Any]:
    """Return the values that a trainer shows, as texts that tell all bits."""
    metrics = {**trainer.callback_metrics, **trainer.logged_metrics, **trainer.progress_bar_metrics}
    return {"shown": {name: float(value).hex() for name, value in sorted(metrics.items())}}


def random_states() -> str:
    """Return a digest of the states of the global generators."""
    return digest(random.getstate(), np.random.get_state(), torch.get_rng_state())


def write_end(path: Path, trainer: Trainer, returned: Any) -> None:
    """Write the event of the end of a run: all that is left of it."""
    module, optimizers = trainer.lightning_module, [in_order(each.state_dict()) for each in trainer.optimizers]
    modes = [each.training for each in module.modules()]
    frozen = [parameter.requires_grad for parameter in module.parameters()]
    write(
        path, "end", epoch=trainer.current_epoch, step=trainer.global_step, stopped=trainer.should_stop,
        weights=digest(dict(module.state_dict())), optimizers=digest(optimizers), modes=digest(modes, frozen),
        random=random_states(), returned=digest(returned),
    )  # fmt: skip


class Logs(Logger):
    """Writes what a trainer logs."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    name = "logs"
    version = 0

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """They belong to a start, not to the run."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        values = {name: float(value).hex() for name, value in sorted(metrics.items())}
        write(self.path, "log", step=step, names=sorted(metrics), values=values)


def read(path: Path) -> list[Event]:
    """Return the events of a start; none if it has written none. A kill may leave half a line."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def place(event: Event) -> tuple[Any, ...]:
    """Return where in the run an event is."""
    return (*(event.get(name) for name in _PLACE), tuple(event.get("names", ())))


def slice_of(whole: list[Event], part: list[Event], *, whole_name: str, part_name: str) -> tuple[int, int]:
    """Return where in the events of a whole run those of a start begin and end.

    Raises:
        Broken: If they are no slice of it. It names the first difference.
    """
    if not part:
        return 0, 0
    begins = [i for i, event in enumerate(whole) if place(event) == place(part[0])]
    if not begins:
        raise Broken(f"{part_name} begins with an event that {whole_name} does not have: {part[0]}")
    found = [_common(whole[begin:], part) for begin in begins]
    begin, count = max(zip(begins, found, strict=True), key=lambda each: each[1])
    if count < len(part):
        here = f"{whole_name}: {whole[begin + count]}" if begin + count < len(whole) else f"{whole_name} has ended"
        before = f"after {place(part[count - 1])}" if count else "in its first event"
        names = ", ".join(sorted(different_names(whole[begin:], part))) or "none"
        raise Broken(
            f"{part_name} differs {before}:\n  {here}\n  {part_name}: {part[count]}\n  values that differ: {names}"
        )
    return begin, begin + count


def _common(one: list[Event], other: list[Event]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (left, right) in pairs if left != right), min(len(one), len(other)))


def different_names(one: list[Event], other: list[Event]) -> set[str]:
    """Return the names of shown and logged values, and of parts of events, that differ at the same places."""
    here = {place(event): event for event in one}
    names: set[str] = set()
    for event in other:
        match = here.get(place(event))
        if match is None:
            names.add(event["kind"])
            continue
        for key in event.keys() | match.keys():
            mine, its = event.get(key), match.get(key)
            if isinstance(mine, dict) and isinstance(its, dict):
                names.update(name for name in mine.keys() | its.keys() if mine.get(name) != its.get(name))
            elif mine != its:
                names.add(key)
    return names

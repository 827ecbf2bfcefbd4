"""What belongs to one step, for a look at it: its batch, the samples in it, its loss, gradients, and generators.

A step is a directory with two files for each rank: ``rank-<r>.pt``, which ``torch.load`` reads, with all tensors, and
``rank-<r>.json`` with what can be read at once: indices, worker, checksums, values that are not finite, loss, norms.
"""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_faulttolerant.loader.tracked import TrackedLoader
from lightning_faulttolerant.records.replay import StepPlace
from lightning_faulttolerant.state.rng import rng_state
from lightning_faulttolerant.trainer.compat import BEFORE_FETCH, fetches_ahead
from lightning_faulttolerant.trainer.ledger.compat import fetches_seen
from lightning_faulttolerant.trainer.ledger.digests import digest
from lightning_faulttolerant.trainer.ledger.ledger import LastBatchIndices
from lightning_faulttolerant.trainer.loaders.loaders import Loaders
from lightning_faulttolerant.trainer.patches import Method, Patches

_log = logging.getLogger(__name__)

_MAX_ROWS = 20


class StepDump:
    """Writes the steps of a replay, each when it is over.

    Args:
        trainer: The trainer that runs the fit.
        loaders: The fit's loaders.
        directory: The directory for the steps.
        patches: Applies the patches to the trainer.
    """

    def __init__(self, trainer: Trainer, loaders: Loaders, directory: str, patches: Patches) -> None:
        self._trainer = trainer
        self._loaders = loaders
        self._directory = directory
        self._order = LastBatchIndices(trainer, loaders)
        self._place: StepPlace | None = None
        self._known: dict[str, Any] = {}
        patches.around(trainer.fit_loop.epoch_loop, BEFORE_FETCH, self._around_before_fetch)
        patches.around(trainer.strategy, "training_step", self._around_step)
        patches.around(trainer.strategy, "backward", self._around_backward)

    def begin(self, place: StepPlace) -> None:
        """Note that a step begins."""
        self._place, self._known = place, {}

    def write(self) -> None:
        """Write the step in progress, as far as it has come."""
        place, known, self._place = self._place, self._known, None
        if place is None or not known:
            return
        folder = os.path.join(self._directory, f"step-{place.number:08d}")
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, f"rank-{self._trainer.global_rank}")
        norms = known.get("gradient_norms", [])
        step = {"step": place.number, "epoch": place.epoch, "batch": place.batch, "rank": self._trainer.global_rank}
        loss = known.get("loss")
        told = {
            **step,
            "loss": None if loss is None else _number(loss),
            "indices": known["indices"],
            "worker": known["worker"],
            "inputs": [_told(name, value, known["indices"]) for name, value in known["inputs"]],
            "gradient_norms": [{layer: _number(norm) for layer, norm in each.items()} for each in norms],
            "generators": {name: digest(state) for name, state in known["generators"].items()},
        }
        with open(f"{path}.json", "w", encoding="utf-8") as file:
            json.dump(told, file, indent=1, default=repr)
        tensors = {name: torch.frombuffer(bytearray(each), dtype=torch.uint8) for name, each in known["states"].items()}
        kept = {name: known.get(name) for name in ("fetched", "indices", "worker", "loss", "gradient_norms")}
        try:
            torch.save({**step, **kept, "generators": tensors}, f"{path}.pt")
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            _log.warning("The batch can't be pickled, and is left out of %s.pt: %s", path, error)
            torch.save({**step, **kept, "fetched": None, "generators": tensors}, f"{path}.pt")

    def _around_before_fetch(self, original: Method) -> None:
        self._order.before_fetch()
        original()

    def _around_step(self, original: Method, *args: object, **kwargs: object) -> object:
        if self._place is None:
            return original(*args, **kwargs)
        states, fetched = rng_state(), []
        with fetches_seen(self._trainer.fit_loop, lambda batch: fetched.append(_copied(batch))):
            if args and not hasattr(args[0], "__next__"):
                fetched.append(_copied(args[0]))
            # Noted before the step: an exception in it must not lose them.
            self._note(fetched, states)
            output = original(*args, **kwargs)
        self._note(fetched, states)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        self._known["loss"] = loss.detach().cpu().clone() if isinstance(loss, Tensor) else None
        return output

    def _note(self, fetched: list[object], states: Mapping[str, bytes]) -> None:
        indices = self._order.indices_of_batch()
        self._known |= {
            "fetched": fetched[0] if len(fetched) == 1 else list(fetched),
            "indices": None if indices is None else {place: _listed(each) for place, each in indices.items()},
            "worker": self._workers(indices),
            "inputs": [leaf for batch in fetched for leaf in leaves_of("", batch)],
            "states": dict(states),
            "generators": dict(states),
        }

    def _workers(self, indices: Mapping[str, object] | None) -> dict[str, int | None]:
        """Return the worker that made the batch, for each loader with indices in it; ``None`` for the main process.

        Of W workers, worker k mod W makes batch k of an epoch. Workers of an iterable data set may end before others,
        so theirs is not known.
        """
        found = {}
        for place in indices or ():
            tracker = self._loaders.trackers[place]
            if isinstance(tracker, TrackedLoader) and tracker.iteration is not None:
                number = tracker.iteration.num_out - 1 - fetches_ahead(self._trainer)
                found[place] = number % tracker.num_workers if tracker.num_workers else None
        return found

    def _around_backward(self, original: Method, *args: object, **kwargs: object) -> object:
        output = original(*args, **kwargs)
        if self._place is not None:
            self._known.setdefault("gradient_norms", []).append(_norms(self._trainer.lightning_module))
        return output


def _norms(module: torch.nn.Module) -> dict[str, float]:
    """Return the norm of the gradients of each layer: of the parameters that a submodule itself has."""
    norms = {}
    for layer, part in module.named_modules():
        squares = [
            float(parameter.grad.detach().to(torch.float64).square().sum())
            for parameter in part.parameters(recurse=False)
            if parameter.grad is not None and parameter.grad.layout is torch.strided
        ]
        if squares:
            norms[layer or type(module).__name__] = math.sqrt(sum(squares))
    return norms


def _copied(batch: object) -> object:
    """Return a batch with copies of its tensors on the CPU: the step may change them in place."""
    if isinstance(batch, Tensor):
        return batch.detach().cpu().clone()
    if isinstance(batch, Mapping):
        return {name: _copied(value) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [_copied(value) for value in batch]
    return batch


def leaves_of(name: str, batch: object) -> list[tuple[str, object]]:
    """Return the parts of a batch that are no containers, by their paths in it."""
    pairs = batch.items() if isinstance(batch, Mapping) else enumerate(batch) if isinstance(batch, list) else None
    if pairs is None:
        return [(name or "batch", batch)]
    return [leaf for key, value in pairs for leaf in leaves_of(f"{name}.{key}" if name else str(key), value)]


def _told(name: str, value: object, indices: Mapping[str, object] | None) -> dict[str, object]:
    told: dict[str, Any] = {"name": name, "checksum": digest(value)}
    if not isinstance(value, Tensor):
        return {**told, "type": type(value).__name__}
    told |= {"dtype": str(value.dtype), "shape": list(value.shape)}
    if not value.dtype.is_floating_point or not value.numel() or torch.isfinite(value).all():
        return told
    by_row = (~torch.isfinite(value)).reshape(value.shape[0] if value.dim() else 1, -1)
    rows = torch.nonzero(by_row.any(1)).flatten().tolist()
    lists = [] if indices is None else [each for each in indices.values() if isinstance(each, list)]
    samples = lists[0] if len(lists) == 1 and value.dim() and len(lists[0]) == value.shape[0] else None
    found = [{"row": row, "index": None if samples is None else samples[row]} for row in rows]
    return {**told, "num_not_finite": int(by_row.sum()), "not_finite": found[:_MAX_ROWS]}


def _listed(indices: object) -> object:
    if isinstance(indices, Tensor):
        return indices.tolist()
    return [_listed(each) for each in indices] if isinstance(indices, (list, tuple)) else indices


def _number(value: object) -> Any:
    """Return a number for JSON, which has no NaN, or the list of several."""
    found = value.tolist() if isinstance(value, Tensor) else value
    if isinstance(found, list):
        return [_number(each) for each in found]
    return found if not isinstance(found, float) or math.isfinite(found) else str(found)

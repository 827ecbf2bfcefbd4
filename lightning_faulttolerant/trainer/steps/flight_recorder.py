"""The flight recorder: it notices the step in which something goes wrong, before the optimizer has used it.

It draws no random numbers, and changes neither losses nor gradients. It looks after each backward pass, and after the
step: at the loss and the gradients, and at sums of the bits of all tensors.

A dump holds what belongs to one step, for a look at it: its batch, the samples in it, its loss, gradients, and
generators. It is a directory with two files for each rank: ``rank-<r>.pt``, which ``torch.load`` reads, with all
tensors, and ``rank-<r>.json`` with what can be read at once: indices, worker, checksums, values that are not finite,
loss, norms.
"""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_faulttolerant.errors import IncidentError, RanksLostError
from lightning_faulttolerant.loader.tracked import TrackedLoader
from lightning_faulttolerant.records.incidents import NUM_LOSSES, Incident, MeasuredStep, Rule, what_happened
from lightning_faulttolerant.records.requests import StepPlace
from lightning_faulttolerant.state.tensors import shard_of
from lightning_faulttolerant.trainer.compat import fetches_ahead, num_completed, num_completed_in_all
from lightning_faulttolerant.trainer.loaders.loaders import Loaders
from lightning_faulttolerant.trainer.patches import Method, Patches
from lightning_faulttolerant.trainer.steps.digests import digest, loss_of
from lightning_faulttolerant.trainer.steps.followed import WholeStep, WholeSteps
from lightning_faulttolerant.trainer.steps.incident_writer import IncidentWriter

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
        self._place: StepPlace | None = None
        self._known: dict[str, Any] = {}
        # Noted before the step, too: an exception in it must not lose it.
        WholeSteps(trainer, loaders, keep=self._keep, begun=self._note, done=self._note).take_seams(patches)
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
        tensors = {
            name: torch.frombuffer(bytearray(each), dtype=torch.uint8) for name, each in known["generators"].items()
        }
        kept = {name: known.get(name) for name in ("fetched", "indices", "worker", "loss", "gradient_norms")}
        try:
            torch.save({**step, **kept, "generators": tensors}, f"{path}.pt")
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            _log.warning("The batch can't be pickled, and is left out of %s.pt: %s", path, error)
            torch.save({**step, **kept, "fetched": None, "generators": tensors}, f"{path}.pt")

    def _keep(self, batch: object) -> object:
        return None if self._place is None else _copied(batch)

    def _note(self, step: WholeStep) -> None:
        if self._place is None or not step.is_training:
            return
        fetched, indices, loss = step.batches, step.indices, loss_of(step.output)
        self._known |= {
            "fetched": fetched[0] if len(fetched) == 1 else list(fetched),
            "indices": None if indices is None else {place: _listed(each) for place, each in indices.items()},
            "worker": self._workers(indices),
            "inputs": [leaf for batch in fetched for leaf in leaves_of("", batch)],
            "generators": dict(step.generators),
            "loss": loss.detach().cpu().clone() if isinstance(loss, torch.Tensor) else None,
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
    if isinstance(batch, torch.Tensor):
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
    if not isinstance(value, torch.Tensor):
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
    if isinstance(indices, torch.Tensor):
        return indices.tolist()
    return [_listed(each) for each in indices] if isinstance(indices, (list, tuple)) else indices


def _number(value: object) -> Any:
    """Return a number for JSON, which has no NaN, or the list of several."""
    found = value.tolist() if isinstance(value, torch.Tensor) else value
    if isinstance(found, list):
        return [_number(each) for each in found]
    return found if not isinstance(found, float) or math.isfinite(found) else str(found)


@dataclass(kw_only=True, slots=True)
class SeenStep:
    """A training step in progress.

    Args:
        loss: The loss that it returned. In manual optimization, until it has returned, that of the last backward pass.
    """

    loss: torch.Tensor | None = None


class StepSeams:
    """Follows the training steps of a fit.

    Args:
        trainer: The trainer that runs the fit.
        patches: Applies the patches to the trainer.
        after_backward: Called after each backward pass, before any optimizer's step that follows it.
        after_step: Called when ``training_step`` has returned. In automatic optimization, its backward pass is to come.
    """

    def __init__(
        self,
        trainer: Trainer,
        patches: Patches,
        *,
        after_backward: Callable[[SeenStep], None],
        after_step: Callable[[SeenStep], None] = lambda seen: None,
    ) -> None:
        self._trainer = trainer
        self._after_backward = after_backward
        self._after_step = after_step
        self._seen = SeenStep()
        patches.around(trainer.strategy, "training_step", self._around_step)
        patches.around(trainer.strategy, "backward", self._around_backward)

    def _around_step(self, original: Method, *args: object, **kwargs: object) -> object:
        seen = self._seen = SeenStep()
        output = original(*args, **kwargs)
        loss = loss_of(output)
        if isinstance(loss, torch.Tensor):
            seen.loss = loss.detach()
        self._after_step(seen)
        return output

    def _around_backward(self, original: Method, loss: object, *args: object, **kwargs: object) -> object:
        output = original(loss, *args, **kwargs)
        seen = self._seen
        if not self._trainer.lightning_module.automatic_optimization and isinstance(loss, torch.Tensor):
            seen.loss = loss.detach()
        self._after_backward(seen)
        return output


@torch.no_grad()
def loss_and_norm(loss: torch.Tensor | None, gradients: Iterable[torch.Tensor]) -> tuple[float | None, float]:
    """Return a loss, and the 2-norm of all gradients together, with one wait for the device.

    Args:
        loss: A tensor with one element; ``None`` if there is none.
        gradients: Gradients of any shapes.
    """
    by_kind: defaultdict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        values = shard_of(gradient).detach()
        values = values.coalesce().values() if values.layout is torch.sparse_coo else values
        if values.numel():
            by_kind[values.device, values.dtype].append(values)
    norms = [_wide(_norm(each)) for each in by_kind.values()]
    device = norms[0].device if norms else None
    scalars = [] if loss is None or loss.numel() != 1 else [_wide(loss.reshape(()))]
    found = [scalar.to(device or scalar.device) for scalar in (*scalars, *norms)]
    numbers: list[float] = torch.stack(found).tolist() if found else []
    return (numbers[0] if scalars else None), math.hypot(*numbers[len(scalars) :])


def _norm(values: list[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of tensors of one device and type together."""
    if hasattr(torch.nn.utils, "get_total_norm"):  # since torch 2.6: a few kernels for all of them
        return torch.nn.utils.get_total_norm(values)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in values]))
    return norm


def _wide(values: torch.Tensor) -> torch.Tensor:
    """Return values in a type in which a norm of theirs does not overflow, if their device has one."""
    return values.float() if values.device.type == "mps" else values.double()


def not_finite(module: LightningModule) -> tuple[str, ...]:
    """Return the names of the parameters with a gradient that is not finite."""
    grads = ((name, parameter.grad) for name, parameter in module.named_parameters())
    return tuple(name for name, grad in grads if grad is not None and not _is_finite(shard_of(grad)))


def _is_finite(values: torch.Tensor) -> bool:
    values = values.coalesce().values() if values.layout is torch.sparse_coo else values
    return bool(torch.isfinite(values).all())


_NONE = -2


class StepRecorder:
    """Follows the steps of one fit.

    Args:
        trainer: The trainer that runs the fit.
        rule: The name of the rule, or the user's own.
        writer: Writes incidents.
        stops: Whether an incident ends the fit.
    """

    def __init__(self, trainer: Trainer, rule: str | Rule, writer: IncidentWriter, *, stops: bool) -> None:
        self._trainer = trainer
        self._rule = rule
        self._writer = writer
        self._stops = stops
        self._losses: deque[float] = deque(maxlen=NUM_LOSSES)
        self._last = _NONE
        """The last step that was an incident."""

    def take_seams(self, patches: Patches) -> None:
        """Follow the steps from now on."""
        StepSeams(self._trainer, patches, after_backward=self._after_backward, after_step=self._after_step)

    def interrupt(self, exception: BaseException) -> None:
        """Record the exception that ends the fit, unless it is a stop, or only tells of another one."""
        if isinstance(exception, Exception) and not isinstance(exception, (IncidentError, RanksLostError)):
            where = " (in a validation run)" if self._trainer.validating else ""
            what = f"{type(exception).__name__}: {exception}{where}"
            self._writer.write(self._writer.make(what, is_exception=True), is_exception=True)

    def _after_backward(self, seen: SeenStep) -> None:
        if self._trainer.lightning_module.automatic_optimization:
            self._check(seen, self._rule)
        elif not callable(self._rule):  # losses of different kinds have no common scale
            self._check(seen, "nan")

    def _after_step(self, seen: SeenStep) -> None:
        if not self._trainer.lightning_module.automatic_optimization:
            self._check(seen, self._rule, closes=True)

    def _check(self, seen: SeenStep, rule: str | Rule, *, closes: bool = False) -> None:
        step = self._measured(seen)
        what = "" if self._last == step.step else what_happened(step, rule)
        is_one_of_several = not closes and not self._trainer.lightning_module.automatic_optimization
        if step.loss is not None and math.isfinite(step.loss) and not is_one_of_several:
            self._losses.append(step.loss)
        if what:
            self._note(seen, step, what)

    def _measured(self, seen: SeenStep) -> MeasuredStep:
        module = self._trainer.lightning_module
        # The precision has the gradient scaler, or the module, as in manual optimization.
        scalers = [one for one in vars(module).values() if isinstance(one, torch.amp.GradScaler) and one.is_enabled()]
        is_scaled = getattr(self._trainer.precision_plugin, "scaler", None) is not None or bool(scalers)
        gradients = [] if is_scaled else [p.grad for p in module.parameters() if isinstance(p.grad, torch.Tensor)]
        loss, norm = loss_and_norm(seen.loss, gradients)
        return MeasuredStep(
            step=num_completed_in_all(self._trainer),
            epoch=self._trainer.current_epoch,
            batch=num_completed(self._trainer),
            loss=loss,
            gradient_norm=None if is_scaled else norm,
            losses=tuple(self._losses),
            # A norm may overflow: only then it is worth a look at each gradient.
            not_finite=() if math.isfinite(norm) else not_finite(module),
        )

    def _note(self, seen: SeenStep, step: MeasuredStep, what: str) -> None:
        is_first, self._last = self._last != step.step - 1, step.step
        incident = self._writer.make(what)
        if is_first:
            incident = self._written(seen, step, incident)
        if self._stops:
            raise IncidentError(f"Incident in {incident.place}: {what}. To see it, type: {incident.replay}")

    def _written(self, seen: SeenStep, step: MeasuredStep, incident: Incident) -> Incident:
        loss = "" if step.loss is None else str(step.loss)
        incident = replace(incident, loss=loss, gradients=step.not_finite)
        return self._writer.write(incident) or incident

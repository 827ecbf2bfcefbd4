"""The fingerprint of a run: what its order of samples and its arithmetic depend on. A resume compares it.

It is taken before training, without a call into the data set: it draws nothing and reads no sample.

Compares a checkpoint's description of its run with the run that resumes from it.

The last bits of the arithmetic depend on versions, devices, and threads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import shlex
import sys
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, __version__  # type: ignore[attr-defined]  # it lists other names only
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.utils.data import ConcatDataset, DataLoader, Dataset, DistributedSampler, IterableDataset, Subset

from lightning_faulttolerant.checkpoint.schema import SavedFingerprint
from lightning_faulttolerant.errors import FingerprintMismatchError
from lightning_faulttolerant.loader.data_sets import drawn_orders, is_hugging_face
from lightning_faulttolerant.loader.samplers import inner_sampler, sampler_name
from lightning_faulttolerant.loader.tracked import TrackedLoader
from lightning_faulttolerant.state.reachable import own_dict
from lightning_faulttolerant.state.tensors import LAZY
from lightning_faulttolerant.streaming import is_stream
from lightning_faulttolerant.trainer.adapters.state import without_masks
from lightning_faulttolerant.trainer.identity.starts import start_of_process
from lightning_faulttolerant.trainer.loaders.trackers import Tracker
from lightning_faulttolerant.trainer.objects.drawn import SEED_THEM, Drawn, DrawnOutcome
from lightning_faulttolerant.trainer.run.changes import Hyperparameters, is_below, plain

_log = logging.getLogger(__name__)


def surroundings(trainer: Trainer) -> dict[str, object]:
    """Return the versions, the device and the threads that this process computes with."""
    numpy = sys.modules.get("numpy")
    device = trainer.strategy.root_device
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "lightning": str(__version__),
        "numpy": None if numpy is None else str(numpy.__version__),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,  # type: ignore[no-untyped-call]
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{device.type} {platform.machine()}",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }


def warn_late(lines: Iterable[str]) -> None:
    """Warn of differences that become known when the report of the resume is already printed."""
    for line in lines:
        _log.warning("NOT EXACT since the resume: %s", line)


class Comparison:
    """Compares one checkpoint with one run.

    Args:
        path: The checkpoint.
        strict: Whether a difference is an error.
        is_elastic: Whether a different number of workers is not an error.
        accepted: The names of differences that are never an error, with dots for nested ones.
    """

    def __init__(self, path: str, *, strict: bool, is_elastic: bool, accepted: Collection[str] = ()) -> None:
        self._path = path
        self._strict = strict
        self._is_elastic = is_elastic
        self._accepted = accepted
        self.not_exact: list[str] = []
        """The differences that are not an error."""
        self.notes: list[str] = []
        """The values that differed and were restored."""

    def compare(self, saved: Mapping[str, object], now: Mapping[str, object], names: tuple[str, ...]) -> None:
        """Compare some parts of two fingerprints.

        Raises:
            FingerprintMismatchError: If they differ, and a difference is an error.
        """
        self._take([line for name in names if name in saved for line in differences(saved[name], now.get(name), name)])

    def compare_hyperparameters(self, saved: Mapping[str, Any], now: Hyperparameters) -> list[str]:
        """Compare the hyperparameters with those of a saved fingerprint. Return a line for each text that differs.

        Raises:
            FingerprintMismatchError: If anything else differs, and a difference is an error.
        """
        refused, reported = now.compare(saved.get("hyperparameters", {}))
        self._take(refused)
        return reported

    def compare_loader(
        self,
        place: str,
        saved: Mapping[str, object],
        now: Mapping[str, object],
        *,
        tracker: Tracker | None,
        is_resized: bool,
        drawn: Drawn | None,
        saved_drawn: Mapping[str, object],
        restored: Collection[str] = (),
    ) -> None:
        """Compare the fingerprints of a loader, without the values that were drawn: `put_back_drawn` compares these.

        Args:
            place: The place of the loader.
            saved: The saved fingerprint.
            now: The fingerprint of the loader now.
            tracker: Follows the loader.
            is_resized: Whether the number of ranks has changed.
            drawn: The values that were drawn before this start.
            saved_drawn: The values that were drawn before the first start.
            restored: The paths of containers and arrays that training fed: the object state restores their contents.

        Raises:
            FingerprintMismatchError: As in `compare`.
        """
        if isinstance(tracker, TrackedLoader) and tracker.can_be_resized and (is_resized or self._is_elastic):
            carried = loader_as_carried_over(saved, now, is_resized=is_resized)
            lines = [line for name in saved for line in differences(saved[name], carried[name], f"{place}.{name}")]
            if not is_resized:
                self.not_exact += [
                    (f"{line}: the random generators of the workers are not carried over") for line in lines
                ]
            saved = carried
        lines = [line for line in differences(saved, now, place) if line.partition(": ")[0] not in restored]
        self._take([line for line in lines if drawn is None or not drawn.covers(saved_drawn, line)])

    def put_back_drawn(self, drawn: Drawn, saved: Mapping[str, object], *, restored: Collection[str] = ()) -> None:
        """Restore the values that were drawn before the first start, also in loaders that are set up later.

        The arguments are those of `Drawn.put_back`.

        Raises:
            FingerprintMismatchError: If they can't be restored, and that is an error. For a loader that is set up
                later, the error is raised then.
        """
        outcome = drawn.put_back(saved, self._take_late, restored=restored)
        self.notes = outcome.notes
        self._take(outcome.differences, remedy=SEED_THEM)

    def _take_late(self, outcome: DrawnOutcome) -> None:
        for note in outcome.notes:  # the report exists already
            _log.debug("After the resume, %s", note)
        self._take(outcome.differences, remedy=SEED_THEM)
        warn_late(outcome.differences)

    def _take(self, lines: list[str], remedy: str = "") -> None:
        refused = [line for line in lines if not is_below(line.partition(": ")[0], self._accepted)]
        if refused and self._strict:
            raise _mismatch(refused, path=self._path, remedy=remedy)
        self.not_exact += lines


_SEED = "sampler_seed"  # compared if both runs have one: a run of one rank has none
_SAMPLED_ELEMENTS = 1024
_DEPTH = 3
_FIRST_ITEMS = 16
_OF_ONE_PASS = ("RandomSampler", "SequentialSampler", "DistributedSampler")


class Fingerprint:
    """The fingerprint of one run, as far as it is known yet.

    Hyperparameters are read when it is created, before a LearningRateFinder sets them.

    Args:
        trainer: The trainer of the run.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._settings: dict[str, object] = {}
        self.hyperparameters = Hyperparameters(trainer.lightning_module)

    def state_dict(self, loaders: Mapping[str, object]) -> SavedFingerprint:
        """Return the whole fingerprint. `loaders` are the fingerprints of the loaders, by place."""
        return {**self.model(), **self.settings(), "loaders": dict(loaders)}  # type: ignore[typeddict-item]

    def model(self) -> dict[str, object]:
        """Return the part that is known before a checkpoint is loaded."""
        # FSDPStrategy leaves each rank with a different part of each parameter.
        has_shapes = not isinstance(self._trainer.strategy, FSDPStrategy)
        module = module_fingerprint(self._trainer.lightning_module, has_shapes=has_shapes)
        return {"module": module, "hyperparameters": self.hyperparameters.state_dict()}

    def settings(self) -> dict[str, Any]:
        """Return the part that is known when the fit begins."""
        if not self._settings:  # once: callbacks may change them while the fit continues
            optimizers = {str(i): optimizer_fingerprint(o) for i, o in enumerate(self._trainer.optimizers)}
            limits = {name: getattr(self._trainer, name) for name in ("max_epochs", "max_steps")}
            settings = trainer_fingerprint(self._trainer)
            self._settings = {"optimizers": optimizers, "trainer": settings, "limits": limits}
        return self._settings


def loader_fingerprint(loader: object, *, is_per_sample: bool = False) -> dict[str, object]:
    """Return what a loader's batches depend on. If each sample is seeded, that does not include the workers."""
    if not isinstance(loader, DataLoader):  # nothing is known of other loaders
        return {"class": type(loader).__qualname__}
    workers = {"num_workers": loader.num_workers, "persistent_workers": loader.persistent_workers}
    if is_per_sample and isinstance(loader.dataset, IterableDataset):  # its samples can't be seeded
        is_per_sample = False
        workers = {f"{name} of an iterable data set": value for name, value in workers.items()}
    return {
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
        **({"worker_rng": "per_sample"} if is_per_sample else workers),
        "sampler": sampler_name(loader),
        **_sampler_seed(loader),
        "dataset": _dataset(loader.dataset),
    }


def module_fingerprint(module: LightningModule, *, has_shapes: bool = True) -> dict[str, object]:
    """Return the names of the parameters as they are before pruning, with their shapes if `has_shapes`."""
    buffers = {name: None for name, _ in module.named_buffers() if name.endswith("_mask")}
    found = without_masks({**dict(module.named_parameters()), **buffers})
    shapes = {
        name: LAZY if torch.nn.parameter.is_lazy(value) else list(value.shape)
        for name, value in found.items()
        if value is not None
    }
    parameters = shapes if has_shapes else dict.fromkeys(shapes)
    return {"class": type(module).__qualname__, "parameters": parameters}


def trainer_fingerprint(trainer: Trainer) -> dict[str, object]:
    """Return the trainer's arguments that the order and grouping of batches depends on."""
    names = ("accumulate_grad_batches", "limit_train_batches", "gradient_clip_val", "gradient_clip_algorithm")
    arguments = {name: plain(getattr(trainer, name)) for name in names}
    cut = {} if tensor_parallel_size(trainer) == 1 else {"tensor_parallel_size": tensor_parallel_size(trainer)}
    return {**arguments, "world_size": trainer.world_size, "precision": str(trainer.precision), **cut}


def tensor_parallel_size(trainer: Trainer) -> int:
    """Return how many ranks each layer is split over. These ranks all see the same batches."""
    if not isinstance(trainer.strategy, ModelParallelStrategy):
        return 1
    return trainer.strategy.device_mesh["tensor_parallel"].size()


def optimizer_fingerprint(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return the class and the arguments of an optimizer."""
    # torch adds this default when it loads a state. A PostLocalSGDOptimizer has no defaults.
    defaults = {"differentiable": False, **getattr(optimizer, "defaults", {})}
    return {"class": type(optimizer).__qualname__, **{name: plain(value) for name, value in defaults.items()}}


def as_carried_over(saved: Mapping[str, object], now: Mapping[str, object]) -> dict[str, Any]:
    """Return a saved `trainer_fingerprint`, with the values of `now` where a different number of ranks may differ."""
    return {**saved, **{name: now[name] for name in ("world_size", "accumulate_grad_batches")}}


def loader_as_carried_over(
    saved: Mapping[str, object], now: Mapping[str, object], *, is_resized: bool
) -> dict[str, object]:
    """Return a saved `loader_fingerprint`, with the values of `now` where a run that continues may differ.

    Args:
        saved: The saved fingerprint.
        now: The fingerprint of the loader now.
        is_resized: Whether the number of ranks has changed. If not, the number of workers may have.
    """
    names = ["num_workers", "persistent_workers"]
    if is_resized:
        names.append("batch_size")
        samplers = [str(fingerprint.get("sampler")).rpartition(" over ")[2] for fingerprint in (saved, now)]
        if all(name in _OF_ONE_PASS for name in samplers) and set(samplers) != set(_OF_ONE_PASS[:2]):
            names.append("sampler")
    return {**saved, **{name: now[name] for name in names if name in saved and name in now}}


def differences(saved: object, now: object, path: str = "") -> Iterator[str]:
    """Yield a line for each value that differs, with both values."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for key in sorted({*saved, *now} - ({_SEED} - ({*saved} & {*now})), key=str):
            yield from differences(saved.get(key, "nothing"), now.get(key, "nothing"), f"{path}.{key}" if path else key)
    elif saved != now and LAZY not in (saved, now) and not (saved is not None and saved != saved and now != now):
        yield f"{path}: {saved!r} when it was saved, {now!r} now"


def _mismatch(lines: Sequence[str], *, path: str, remedy: str) -> FingerprintMismatchError:
    """Return the error for `lines` of `differences` from the run that saved `path`, with advice."""
    command = shlex.join(start_of_process(sys.argv, os.environ).command.words)
    names = " ".join(f"--accept {shlex.quote(line.partition(': ')[0])}" for line in lines)
    return FingerprintMismatchError(
        "\n".join(
            (
                f"{path} was saved by a run that differs from this one:",
                *(f"  - {line}" for line in lines),
                *([remedy] if remedy else []),
                "The result would belong to neither run. Start with the same settings. To continue all the same, type:",
                f"  lightning-faulttolerant run {names} -- {command}",
            )
        )
    )


def _sampler_seed(loader: DataLoader[object]) -> dict[str, int]:
    """Return the seed of a distributed sampler that shuffles. No generator's state holds it."""
    inner = inner_sampler(loader)
    return {_SEED: inner.seed} if isinstance(inner, DistributedSampler) and inner.shuffle else {}


def _dataset(dataset: Any, depth: int = 0) -> dict[str, object]:
    found: dict[str, object] = {"class": type(dataset).__qualname__}
    if not isinstance(dataset, IterableDataset):  # its length may run the data set's own code
        with contextlib.suppress(TypeError, NotImplementedError):
            found["length"] = len(dataset)
    if is_stream(dataset):
        state = dataset.state_at(0, 0)
        return {**found, "data": state["fingerprint"], "order": state["order"]}
    if isinstance(dataset, Subset):
        found["indices"] = _digest_list(dataset.indices)
    if isinstance(dataset, ConcatDataset):
        found["parts"] = {str(i): _dataset(part, depth + 1) for i, part in enumerate(dataset.datasets)}
    if is_hugging_face(dataset):
        return {**found, **{name: _digest_list(values) for name, values in drawn_orders(dataset).items()}}
    for name, value in sorted((own_dict(dataset) or {}).items()):
        with contextlib.suppress(Exception):  # an attribute may raise anything: what can't be read is left out
            part = _attribute(value, depth)
            found |= {} if part is None else {name: part}
    return found


def _attribute(value: Any, depth: int) -> object:
    """Return what is known of an attribute of a data set; ``None`` if it holds no data."""
    if isinstance(value, Dataset) and depth < _DEPTH:
        return _dataset(value, depth + 1)
    if _is_array(value):
        return _digest(value)
    if not isinstance(value, (list, tuple)):
        return None
    if value and all(_is_array(item) for item in value[:_FIRST_ITEMS]):
        return {str(i): _digest(item) for i, item in enumerate(value[:_FIRST_ITEMS])}
    return _file_names(value)


def _file_names(values: Sequence[object]) -> str | None:
    """Return a digest of a list of files, with or without labels; ``None`` for any other list.

    The names count without their directories: on another machine the data may be elsewhere, and in another order.
    """
    names = [item[0] if isinstance(item, tuple) and item else item for item in _sampled(values)]
    if not names or not all(isinstance(name, (str, PurePath)) for name in names):
        return None
    return f"[{len(values)}] crc {_crc([str(name).rpartition('/')[2] for name in names])}"


def _is_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    is_numpy = numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc"
    return is_numpy or (isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested)


def _digest(array: Any) -> str:
    # A masked array's own `flat` has no length.
    # NumPy's `flat` takes any array, even read-only, reversed, or of foreign byte order, and copies only the sample.
    flat = array.detach().reshape(-1) if isinstance(array, torch.Tensor) else sys.modules["numpy"].asarray(array).flat
    stride = max(1, len(flat) // _SAMPLED_ELEMENTS)
    return f"{list(array.shape)} {array.dtype} crc {_crc(flat[::stride].tolist())}"


def _digest_list(values: Sequence[object]) -> str:
    return f"[{len(values)}] crc {_crc([str(value) for value in _sampled(values)])}"


def _sampled(values: Sequence[object]) -> Iterator[object]:
    stride = max(1, len(values) // _SAMPLED_ELEMENTS)
    # Picked one by one: a user's sequence may not support slices, and millions of values need not become text.
    return (values[i] for i in range(0, len(values), stride))


def _crc(sample: list[object]) -> str:
    return f"{zlib.crc32(str(sample).encode()):08x}"

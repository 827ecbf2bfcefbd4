"""The fingerprint of a run: what its order of samples and its arithmetic depend on. A resume compares it.

It is taken before training, without a call into the data set: it draws nothing and reads no sample.

Compares a checkpoint's description of its run with the run that resumes from it.

The last bits of the arithmetic depend on versions, devices, and threads.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import platform
import shlex
import sys
import types
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import PurePath
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, __version__  # type: ignore[attr-defined]  # it lists other names only
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.utils.data import ConcatDataset, DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, Subset

from lightning_faulttolerant.checkpoint.schema import SavedFingerprint
from lightning_faulttolerant.errors import FingerprintMismatchError
from lightning_faulttolerant.loader.data_sets import drawn_orders, is_hugging_face
from lightning_faulttolerant.loader.samplers import inner_sampler, sampler_name
from lightning_faulttolerant.loader.tracked import TrackedLoader
from lightning_faulttolerant.state.objects import kinds
from lightning_faulttolerant.state.reachable import own_dict
from lightning_faulttolerant.state.tensors import LAZY
from lightning_faulttolerant.streaming import is_stream
from lightning_faulttolerant.trainer.adapters.state import without_masks
from lightning_faulttolerant.trainer.identity.starts import start_of_process
from lightning_faulttolerant.trainer.loaders.trackers import Tracker
from lightning_faulttolerant.trainer.run.changes import Hyperparameters, NamedDifference, is_below, plain

_log = logging.getLogger(__name__)

_SEED_IT = (
    "If the script draws data at random before fit, each start draws something else. Call seed_everything before the "
    "draw, or pass random_split a generator with a seed."
)


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
        return list(map(str, reported))

    def compare_loader(
        self,
        place: str,
        saved: Mapping[str, object],
        now: Mapping[str, object],
        *,
        tracker: Tracker | None,
        is_resized: bool,
        restored: Collection[str] = (),
    ) -> None:
        """Compare the fingerprints of a loader.

        Args:
            place: The place of the loader.
            saved: The saved fingerprint.
            now: The fingerprint of the loader now.
            tracker: Follows the loader.
            is_resized: Whether the number of ranks has changed.
            restored: The paths of containers and arrays that training fed: the object state restores their contents.

        Raises:
            FingerprintMismatchError: As in `compare`.
        """
        if isinstance(tracker, TrackedLoader) and tracker.can_be_resized and (is_resized or self._is_elastic):
            carried = loader_as_carried_over(saved, now, is_resized=is_resized)
            lines = [line for name in saved for line in differences(saved[name], carried[name], f"{place}.{name}")]
            if not is_resized:
                self.not_exact += [f"{one}: the random generators of the workers are not carried over" for one in lines]
            saved = carried
        lines = [line for line in differences(saved, now, place) if line.name not in restored]
        others = [name for name in {*saved, *now} if saved.get(name) != now.get(name)]
        is_of_data = any(name == "dataset" or "." in name for name in others)
        self._take(lines, remedy=_SEED_IT if is_of_data else "")

    def take_drawn(self, lines: list[NamedDifference]) -> None:
        """Take the differences of the parts of splits that can't be restored.

        Raises:
            FingerprintMismatchError: If there are any, and a difference is an error.
        """
        self._take(lines, remedy=_SEED_IT)

    def take_read_back(self, lines: list[NamedDifference]) -> list[NamedDifference]:
        """Take the differences that show when all is restored, or later. Return those that are an error."""
        refused = self._refused(lines)
        self._take([] if refused else lines)
        return refused

    def _take(self, lines: Sequence[NamedDifference], remedy: str = "") -> None:
        if refused := self._refused(lines):
            raise _mismatch(refused, path=self._path, remedy=remedy)
        self.not_exact += [text for text in map(str, lines) if text not in self.not_exact]

    def _refused(self, lines: Sequence[NamedDifference]) -> list[NamedDifference]:
        return [one for one in lines if self._strict and not is_below(one.name, self._accepted)]


_SEED = "sampler_seed"  # compared if both runs have one: a run of one rank has none
_SAMPLED_ELEMENTS = 1024
_DEPTH = 3
_FIRST_ITEMS = 16
_MAX_LEAVES = 65_536
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
        **_held_next_to(loader),
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


def differences(saved: object, now: object, path: str = "") -> Iterator[NamedDifference]:
    """Yield each value that differs."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for key in sorted({*saved, *now} - ({_SEED} - ({*saved} & {*now})), key=str):
            yield from differences(saved.get(key, "nothing"), now.get(key, "nothing"), f"{path}.{key}" if path else key)
    elif saved != now and LAZY not in (saved, now) and not (saved is not None and saved != saved and now != now):
        yield NamedDifference.of(path, repr(saved), repr(now))


def _mismatch(lines: Sequence[NamedDifference], *, path: str, remedy: str) -> FingerprintMismatchError:
    """Return the error for `lines` of `differences` from the run that saved `path`, with advice."""
    return FingerprintMismatchError(
        "\n".join(
            (
                f"{path} was saved by a run that differs from this one:",
                *(f"  - {line}" for line in lines),
                *([remedy] if remedy else []),
                "The result would belong to neither run. Start with the same settings. To continue all the same, type:",
                accepting([line.name for line in lines]),
            )
        )
    )


def accepting(names: Sequence[str]) -> str:
    """Return the command that accepts differences with these names."""
    command = shlex.join(start_of_process(sys.argv, os.environ).command.words)
    options = " ".join(f"--accept {shlex.quote(name)}" for name in names)
    return f"  lightning-faulttolerant run {options} -- {command}"


def _sampler_seed(loader: DataLoader[object]) -> dict[str, int]:
    """Return the seed of a distributed sampler that shuffles. No generator's state holds it."""
    inner = inner_sampler(loader)
    return {_SEED: inner.seed} if isinstance(inner, DistributedSampler) and inner.shuffle else {}


def _held_next_to(loader: DataLoader[object]) -> dict[str, object]:
    """Return what is known of the lists, mappings, and arrays that the loader's sampler and functions hold."""
    found, least = dict[str, object](), _length(loader.dataset) or 0
    for owner in ("sampler", "batch_sampler", "collate_fn", "worker_init_fn"):
        for name, value in _variables(getattr(loader, owner)).items():
            with contextlib.suppress(Exception):
                part = None if value is loader.dataset else _attribute(value, _DEPTH, least)
                found |= {} if part is None else {f"{owner}.{name}": part}
    return found


def _variables(value: Any) -> dict[str, object]:
    """Return what an object, or a function, keeps; Lightning's notes of how the object was created are left out."""
    if isinstance(value, functools.partial):
        return {"args": value.args, **value.keywords}
    found = {name: child for name, child in (own_dict(value) or {}).items() if not name.startswith("__")}
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        found |= {name: child for name, cell in cells for child in kinds.contents_of_cell(cell)}
    return found


def _length(dataset: Any) -> int | None:
    if not isinstance(dataset, IterableDataset):  # its length may run the data set's own code
        with contextlib.suppress(TypeError, NotImplementedError):
            return len(dataset)
    return None


def _dataset(dataset: Any, depth: int = 0, least: float = math.inf) -> dict[str, object]:
    found: dict[str, object] = {"class": type(dataset).__qualname__}
    length = _length(dataset)
    found |= {} if length is None else {"length": length}
    least = min(least, length or 0)
    if _is_collection(dataset):
        with contextlib.suppress(Exception):  # its samples may be any objects
            found["samples"] = _digest_items(dataset)
        return found
    if is_stream(dataset):
        state = dataset.state_at(0, 0)
        return {**found, "data": state["fingerprint"], "order": state["order"]}
    if isinstance(dataset, Subset):
        found["indices"] = digest_list(dataset.indices)
    if isinstance(dataset, ConcatDataset):
        found["parts"] = {str(i): _dataset(part, depth + 1, least) for i, part in enumerate(dataset.datasets)}
    if is_hugging_face(dataset):
        return {**found, **{name: digest_list(values) for name, values in drawn_orders(dataset).items()}}
    for name, value in sorted((own_dict(dataset) or {}).items()):
        with contextlib.suppress(Exception):  # an attribute may raise anything: what can't be read is left out
            part = _attribute(value, depth, least)
            found |= {} if part is None else {name: part}
    return found


def _attribute(value: Any, depth: int, least: float) -> object:
    """Return what is known of an attribute; ``None`` if it holds no data, or less than one value for each sample."""
    if isinstance(value, Dataset) and depth < _DEPTH:
        return _dataset(value, depth + 1, least)
    if isinstance(value, Sampler):
        return {name: part for name, child in _variables(value).items() if (part := _attribute(child, depth, least))}
    if _is_array(value):
        return _digest(value)
    if not _is_collection(value) or not value:
        return None
    if isinstance(value, (list, tuple)) and all(_is_array(item) for item in value[:_FIRST_ITEMS]):
        return {str(i): _digest(item) for i, item in enumerate(value[:_FIRST_ITEMS])}
    may_be_samples = len(value) >= least or _num_values(value) >= least or _are_names(value)
    return _digest_items(value) if may_be_samples else None


def _is_collection(value: object) -> bool:
    return isinstance(value, tuple) or kinds.is_plain_container(value)


def _num_values(value: Any) -> int:
    children = value.values() if isinstance(value, dict) else value
    return sum(len(child) if _is_collection(child) else 1 for child in children)


def _are_names(value: Any) -> bool:
    return not isinstance(value, dict) and all(isinstance(item, (str, PurePath)) for item in value)


def _digest_items(values: Any) -> str:
    """Return a digest of a list or a mapping. The common directory of file names does not count: data may move."""
    leaves = [*islice(_leaves(values), _MAX_LEAVES)]
    paths = [leaf for leaf in leaves if "/" in leaf]
    prefix = os.path.commonprefix(paths).rpartition("/")[0]  # noqa: RUF071 - it is cut at a slash
    return f"[{len(values)}] crc {_crc([leaf.removeprefix(prefix) for leaf in leaves])}"


def _leaves(value: Any) -> Iterator[str]:
    """Yield texts for the values inside a value, some of many.

    Raises:
        TypeError: If a text would not be the same in another process.
    """
    if isinstance(value, dict):
        value = tuple(value.items())
    if isinstance(value, (set, frozenset)):
        yield from sorted(leaf for child in value for leaf in _leaves(child))
    elif _is_collection(value):
        yield f"[{len(value)}]"
        for child in islice(value, 0, None, max(1, len(value) // _SAMPLED_ELEMENTS)):
            yield from _leaves(child)
    elif _is_array(value):
        yield _digest(value)
    elif kinds.is_leaf(value):
        yield str(zlib.crc32(value)) if isinstance(value, bytes) else str(value)
    elif kinds.is_walked(value) and not isinstance(value, (Dataset, torch.nn.Module)) and not callable(value):
        yield from _leaves(kinds.attributes(value))
    else:
        raise TypeError(f"a {type(value).__name__} has no such text")


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


def digest_list(values: Sequence[object]) -> str:
    """Return a digest of some elements of a list."""
    return f"[{len(values)}] crc {_crc([str(value) for value in _sampled(values)])}"


def _sampled(values: Sequence[object]) -> Iterator[object]:
    stride = max(1, len(values) // _SAMPLED_ELEMENTS)
    # Picked one by one: a user's sequence may not support slices, and millions of values need not become text.
    return (values[i] for i in range(0, len(values), stride))


def _crc(sample: list[object]) -> str:
    return f"{zlib.crc32(str(sample).encode()):08x}"

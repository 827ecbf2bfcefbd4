"""A ``DataLoader`` for Fabric or your own training loop that reports its position and continues exactly there."""

from __future__ import annotations

import functools
import inspect
import logging
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.exactness import RESUMABLE, TRACKER, why_not_exact
from lightning_faulttolerant.loader.per_sample import SampleSeeds, why_not_per_sample
from lightning_faulttolerant.loader.resumable_run import LoaderRun

_log = logging.getLogger(__name__)

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_METHODS = ("state_dict", "load_state_dict")
_ARGUMENTS = frozenset(inspect.signature(DataLoader.__init__).parameters)


class _OverridingMethod:
    """A method that takes precedence over the instance attribute of the same name. Other code reads the attribute."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.__doc__ = method.__doc__
        self._method = method

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self._method if instance is None else types.MethodType(self._method, instance)

    def __set__(self, instance: object, value: object) -> None:
        vars(instance)[self._method.__name__] = value


def _shown(method: F) -> F:
    return cast(F, _OverridingMethod(method))


class ResumableDataLoader(DataLoader[T]):
    """Load batches as ``torch.utils.data.DataLoader`` does, and resume in the middle of an epoch, bit for bit.

    The state holds the position in the epoch, the random states of the workers, and the generators that the data set,
    the sampler, and ``collate_fn`` hold. It also holds the random states of this process: those of Python, NumPy,
    torch, and its devices. Samplers, data sets, and the training all draw from them. `load_state_dict` restores the
    states of this process, and a resumed epoch restores them again right before its first batch. So load the state
    last, right before the loop.

    A batch counts as consumed when the loader has yielded it, so call `state_dict` after the batch's step. A state
    taken inside the loop, after the last batch of an epoch, has no batches left: a resumed loop over it ends
    immediately and does its end-of-epoch work, as the uninterrupted loop does. A state taken after the loop begins the
    next epoch. A loop left by ``break`` resumes after its last batch, unless `end_epoch` has ended the epoch.

    `epoch` counts the epochs that have ended, so ``for epoch in range(loader.epoch, num_epochs)`` is correct.
    With several ranks, each rank has its own state.

    Args:
        dataset: Map-style or iterable.
        *args: Further arguments of ``DataLoader``.
        worker_rng: ``"capture"`` saves the random states of the workers; ``"per_sample"`` seeds the generators before
            each sample of a map-style data set, so that its draws don't depend on the number of workers.
        seed: The seed of the samples with ``worker_rng="per_sample"``; by default the seed that torch has.
            Give two loaders two seeds, or they draw the same numbers.
        snapshot_every_n_steps: Accepted for code written for torchdata's ``StatefulDataLoader``; it has no effect.
        state: A state to continue from, as with `load_state_dict`.
        **kwargs: Further arguments of ``DataLoader``.

    Raises:
        NotExactError: If the loader can't be resumed exactly, with the reason.

    Example:
        >>> loader = ResumableDataLoader(list(range(6)), batch_size=2, shuffle=True)
        >>> batches = iter(loader)
        >>> first = next(batches)
        >>> state = loader.state_dict()
        >>> rest = [batch.tolist() for batch in batches]
        >>> resumed = ResumableDataLoader(list(range(6)), batch_size=2, shuffle=True)
        >>> resumed.load_state_dict(state)
        >>> [batch.tolist() for batch in resumed] == rest
        True
    """

    def __init__(
        self,
        dataset: Dataset[T],
        *args: Any,
        worker_rng: Literal["capture", "per_sample"] = "capture",
        seed: int | None = None,
        state: Mapping[str, object] | None = None,
        snapshot_every_n_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        if worker_rng not in ("capture", "per_sample"):
            raise ValueError(f'worker_rng must be "capture" or "per_sample", got {worker_rng!r}')
        super().__init__(dataset, *args, **kwargs)
        # Stored under the arguments' names: Fabric and Lightning read them when they recreate the loader for a sampler.
        self.worker_rng, self.seed = worker_rng, seed
        self.snapshot_every_n_steps = snapshot_every_n_steps
        if snapshot_every_n_steps is not None:
            _say_no_snapshots()
        self._seeds = self._made_seeds()
        self._run: LoaderRun | None = None
        self.state: Mapping[str, object] | None = None
        self._show_methods()
        reason = _why_not_resumable(self)
        if reason is not None:
            raise NotExactError(f"A ResumableDataLoader can't be resumed exactly: {reason}.")
        if state is not None:
            self.load_state_dict(state)

    def _made_seeds(self) -> SampleSeeds | None:
        if self.worker_rng == "capture":
            return None
        reason = why_not_per_sample(self)
        if reason is not None:
            raise NotExactError(f'worker_rng="per_sample" is not possible for this loader: {reason}.')
        return SampleSeeds(seed=(torch.initial_seed() if self.seed is None else self.seed) & (2**64 - 1))

    def _show_methods(self) -> None:
        # Fabric's wrapper exposes the attributes of the instance, not those of its class.
        vars(self).update({name: functools.partial(_called, name, weakref.ref(self)) for name in _METHODS})

    @property
    def _started_run(self) -> LoaderRun:
        if self._run is None:
            self._run = LoaderRun(self, seeds=self._seeds)
            if self.state is not None:
                self._run.load_state_dict(self.state, restores_rng=False)
        return self._run

    @property
    def epoch(self) -> int:
        """The number of epochs that have ended. It is also the index of the current epoch, or else of the next one."""
        return self._started_run.epoch

    def end_epoch(self) -> None:
        """End the current epoch before its last batch. A loop over it ends, and the next epoch follows."""
        self._started_run.end_epoch()

    @_shown
    def state_dict(self) -> dict[str, object]:
        """Return the position of the loop and the current random states.

        The state contains only types that JSON has, and ``torch.load`` reads it with ``weights_only=True``.

        Raises:
            NotExactError: If the position can't be determined exactly.
        """
        return self._started_run.state_dict()

    @_shown
    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Let the next iteration continue from a state, and restore the random states of this process.

        An iterator created earlier yields no more batches: its next call raises `NotExactError`.

        Args:
            state_dict: The state that `state_dict` returned on this rank.

        Raises:
            NotExactError: If the state is of another version, or can't be continued exactly.
            FingerprintMismatchError: If it is the state of another loader. If Fabric may still insert a distributed
                sampler, the error is raised when the iteration begins.
            ValueError: If it is not a state of a loader.
        """
        self._started_run.load_state_dict(state_dict)
        self.state = dict(state_dict)

    def __iter__(self) -> Any:
        if TRACKER in vars(self):  # a copy that a Trainer's callback follows
            return super().__iter__()
        batches = self._started_run.iterate()
        self.state = None
        return batches

    def __len__(self) -> int:
        length = super().__len__()
        if self._run is not None:
            len(self._run.followed)  # torch warns about too many samples only on a loader whose length was read
        return length

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        run: LoaderRun | None = vars(self).get("_run")
        if run is None or name not in _ARGUMENTS:
            return
        if run.has_iterated:
            raise ValueError(
                f"{name} of a ResumableDataLoader was set after its first iteration, which would change what its states"
                " mean. Set it before."
            )
        self._run = None  # it is created again, with the new value

    def __getstate__(self) -> dict[str, object]:
        # A copy is a loader that starts from the beginning, or from a loaded state that has not been used yet.
        return {name: value for name, value in vars(self).items() if name not in ("_run", *_METHODS)}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update({**state, "_run": None})
        self._show_methods()


def _called(name: str, reference: weakref.ref[ResumableDataLoader[Any]], *args: object) -> Any:
    """Call a method of a loader, which the reference doesn't keep alive."""
    loader = reference()
    if loader is None:
        raise ReferenceError("the loader whose state is requested no longer exists")
    return getattr(type(loader), name)(loader, *args)


@functools.cache
def _say_no_snapshots() -> None:
    _log.warning(
        "snapshot_every_n_steps has no effect in a ResumableDataLoader: each state belongs to the last batch, "
        "whatever the number. Leave it out."
    )


def _why_not_resumable(loader: ResumableDataLoader[Any]) -> str | None:
    plain = DataLoader.__new__(DataLoader)
    vars(plain).update(loader.__getstate__())
    return why_not_exact(plain)


setattr(ResumableDataLoader, RESUMABLE, True)

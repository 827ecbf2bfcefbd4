"""Autosaves of strategies that shard: each rank writes its own files into a directory, and rank 0 commits it.

The strategy saves and loads with ``torch.distributed.checkpoint``: this module writes no shards. Our part of the
checkpoint is in the file that Lightning writes for everything outside the shards.

Under FSDP2, torch makes optimizers that have no state yet take a step, to get a state to save or load. A step with zero
gradients and no learning rate still counts. It changes Adam's bias correction, and the momentum of a decayed weight, so
a run that only saves would differ from one that doesn't. torch leaves an optimizer alone if one of its parameters has a
gradient (``_init_optim_state``), so one of them gets a gradient for that time.

A checkpoint has parameters that several ranks hold alike only once, so a difference between them would be lost. Under
tensor parallelism, the gradients of parameters that are not sharded are not averaged over the ranks. These parameters
stay equal only as long as all ranks see the same batches and draw the same random numbers. Under DDP, a rank may change
weights by itself, or average them only now and then (``model_averaging_period``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar, final

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

from lightning_faulttolerant.checkpoint.contents import deal_files, list_files, sum_files
from lightning_faulttolerant.checkpoint.manifest import MANIFEST_NAME, FileEntry
from lightning_faulttolerant.checkpoint.ranks import Ranks
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.errors import CheckpointError, NotExactError
from lightning_faulttolerant.state.tensors import load_buffers, shard_of, sums_of_bits
from lightning_faulttolerant.storage.store import is_url, open_store
from lightning_faulttolerant.trainer.compat import put_checkpoint
from lightning_faulttolerant.trainer.files.run_files import part_of
from lightning_faulttolerant.trainer.position import TrainerPosition
from lightning_faulttolerant.trainer.ranks.compat import saves_shards
from lightning_faulttolerant.trainer.ranks.stored_shards import fetched, safely_unpickled, send_checkpoint
from lightning_faulttolerant.trainer.resume.choice import Choice
from lightning_faulttolerant.trainer.resume.parameters import changed_in_place
from lightning_faulttolerant.trainer.save.pace import described

_log = logging.getLogger(__name__)

WITHOUT_STATE: Final = "optimizers_without_state"
"""The numbers of these optimizers, in our part of a checkpoint."""


def without_state(trainer: Trainer) -> list[int]:
    """Return which optimizers have no state; none if the strategy leaves them alone anyway."""
    if not isinstance(trainer.strategy, ModelParallelStrategy):
        return []
    return [i for i, optimizer in enumerate(trainer.optimizers) if not optimizer.state]


@contextlib.contextmanager
def left_alone(trainer: Trainer, numbers: Sequence[int]) -> Iterator[None]:
    """Within the block, keep torch from giving a state to the optimizers with these numbers."""
    held = [parameter for i in numbers for parameter in _one_without_gradient(trainer.optimizers[i])]
    for parameter in held:
        parameter.grad = torch.zeros_like(parameter)
    try:
        yield
    finally:
        for parameter in held:
            parameter.grad = None


@contextlib.contextmanager
def loadable(trainer: Trainer, numbers: Sequence[int]) -> Iterator[None]:
    """Within the block, let a strategy load a checkpoint in which the optimizers with these numbers have no state.

    The other optimizers get a state first, while the parameters are not yet the checkpoint's. A step that should change
    nothing may turn a weight of -0.0 into 0.0, and a user's own optimizer may do more.
    """
    model = trainer.strategy.model
    if not isinstance(trainer.strategy, ModelParallelStrategy) or model is None:
        yield
        return
    from torch.distributed.checkpoint.state_dict import (  # noqa: PLC0415, RUF100 - takes a second to import
        get_optimizer_state_dict,
    )

    strategy, own = trainer.strategy, list(trainer.optimizers)
    stand_ins = {} if saves_shards(strategy) else {i: _stand_in(own[i]) for i in numbers}
    strategy.optimizers = [stand_ins.get(i, optimizer) for i, optimizer in enumerate(own)]
    try:
        with left_alone(trainer, [i for i in numbers if i not in stand_ins]):
            for i, optimizer in enumerate(strategy.optimizers):
                if i not in numbers or i in stand_ins:
                    get_optimizer_state_dict(model, optimizer)
            yield
    finally:
        strategy.optimizers = own
    for i, stand_in in stand_ins.items():
        for group, loaded in zip(own[i].param_groups, stand_in.param_groups, strict=True):
            group.update({name: value for name, value in loaded.items() if name in group and name != "params"})


def _stand_in(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer of the same parameters that has a state: torch can't load a file into one without."""
    groups = [{"params": group["params"]} for group in optimizer.param_groups]
    return torch.optim.SGD(groups, lr=0.0, momentum=0.9)


def make_loadable(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Give optimizers without a state an empty one for each parameter: otherwise the file would not load again."""
    if isinstance(trainer.strategy, ModelParallelStrategy) and not saves_shards(trainer.strategy):
        for state in checkpoint["optimizer_states"]:
            if state.get("state") == {}:
                state["state"] = {name: {} for group in state["param_groups"] for name in group["params"]}


def _one_without_gradient(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if optimizer.state or any(parameter.grad is not None for parameter in parameters):
        return []
    return [parameter for parameter in parameters if parameter.requires_grad][:1]


_Result = TypeVar("_Result")

IN_SHARDS = ("state_dict", "optimizer_states")
"""The parts of a checkpoint that the strategy takes out and writes as shards."""

_SEEN_WITHIN_SECONDS = 60.0
_TORCH_CAN_T_WRITE = re.compile(r"inline_container.*unexpected pos|PytorchStreamWriter failed writing")


@final
class ShardWriter:
    """Writes autosaves of several files; each method that writes is a collective.

    Args:
        trainer: The trainer with the strategy that shards.
        series: The series that the autosaves belong to; ``None`` on ranks other than 0.
        ranks: The ranks that write together.
    """

    def __init__(self, trainer: Trainer, series: AutosaveSeries | None, ranks: Ranks) -> None:
        self._trainer = trainer
        self._series = series
        self._ranks = ranks
        self._failure = ""

    def save(
        self,
        checkpoint: dict[str, object],
        position: TrainerPosition,
        *,
        flush: Callable[[], object] = lambda: None,
        raises: bool = True,
        keep: bool = False,
    ) -> tuple[str, str]:
        """Write an autosave; parts that are written as shards are taken out of `checkpoint`.

        Args:
            checkpoint: Lightning's checkpoint of this rank; on rank 0 it has our part.
            position: Where it was taken.
            flush: Called first, on each rank.
            raises: Whether it is an error if a disk or store can't be written to.
            keep: Whether the autosave is never removed.

        Returns:
            The path, and why the write failed: one of the two is empty, and both are the same on every rank.

        Raises:
            CheckpointError: On every rank, if a rank failed. On that rank its own exception is raised.
        """
        self._failure = ""
        try:
            return self._save(checkpoint, position, flush, keep=keep), ""
        except (Exception, _torchs_exception()):
            if raises or not self._failure:
                raise
            return "", self._failure

    def _save(
        self, checkpoint: dict[str, object], position: TrainerPosition, flush: Callable[[], object], *, keep: bool
    ) -> str:
        series = self._series
        self._together("flush", flush)
        directory = self._first(
            "begin", series, lambda own: own.begin_directory(epoch=position.epoch, batch=position.batch, keep=keep)
        )
        try:
            self._together("see", lambda: _wait_for(directory))
            summed = (self._sent if is_url(directory) else self._written)(checkpoint, directory)
            files = {name: entry for share in summed or () for name, entry in share.items()}
            return self._first("commit", series, lambda own: own.commit_directory(directory, files))
        except BaseException:
            if series is not None:
                with contextlib.suppress(
                    OSError
                ):  # the first error is the one to report, and the next save tries again
                    series.drop_directory(directory)
            raise

    def _written(self, checkpoint: dict[str, object], directory: str) -> list[dict[str, FileEntry]] | None:
        """Write the files of a directory, and return their entries in shares, on rank 0."""
        self._together("shards", lambda: self._trainer.strategy.save_checkpoint(checkpoint, directory))
        shares = self._first(
            "deal",
            self._series,
            lambda _: deal_files(directory, list_files(directory), num_shares=self._ranks.num_ranks),
        )
        return self._together("sum", lambda: sum_files(directory, shares[self._ranks.rank]))

    def _sent(self, checkpoint: dict[str, object], url: str) -> list[dict[str, FileEntry]] | None:
        """Send the files to an object store, and return their entries for each rank, on rank 0."""
        return self._together("shards", lambda: send_checkpoint(self._trainer.strategy, checkpoint, url))

    def _first(self, step: str, series: AutosaveSeries | None, work: Callable[[AutosaveSeries], _Result]) -> _Result:
        """Do something on rank 0, and return the result on each rank; if it fails, every rank raises."""
        results = self._together(step, lambda: None if series is None else work(series))
        result: _Result = self._ranks.from_first(step, None if results is None else results[0])
        return result

    def _together(self, step: str, work: Callable[[], _Result]) -> list[_Result] | None:
        """Do something on each rank, and return all results on rank 0; if it fails on one rank, every rank raises."""
        failure, result, own = "", None, None
        try:
            result = work()
        except (Exception, _torchs_exception()) as error:  # noqa: BLE001 - raised again below, once all ranks know
            failure, own = described(error), error
        can_wait = own is None or is_of_the_store(own)
        answers = self._ranks.to_first(step, (failure, can_wait, result))
        failures = "; ".join(f"rank {rank}: {text}" for rank, (text, *_) in enumerate(answers or ()) if text)
        all_can_wait = answers is not None and all(can for _, can, _ in answers)
        failures, all_can_wait = self._ranks.from_first(step, (failures, all_can_wait))
        if all_can_wait:
            self._failure = failures
        _raise_if(failures, own)
        return None if answers is None else [result for *_, result in answers]


def _torchs_exception() -> type[BaseException]:
    """Return what ``torch.distributed.checkpoint`` raises on each rank. It is not an `Exception`."""
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415, RUF100 - takes a second to import

    return CheckpointException


def is_of_the_store(error: BaseException) -> bool:
    """Return whether a save failed because the disk or store could not be written to: a later save may succeed.

    Args:
        error: The exception. That of ``torch.distributed.checkpoint`` holds the exception of each rank; for a full disk
            that is a RuntimeError from torch.
    """
    if isinstance(error, OSError):
        return True
    failures = getattr(error, "failures", None)
    if isinstance(error, _torchs_exception()) and isinstance(failures, dict):
        return bool(failures) and all(is_of_the_store(failure) for failure, _ in failures.values())
    return isinstance(error, RuntimeError) and _TORCH_CAN_T_WRITE.search(str(error)) is not None


def _raise_if(failure: str, own: BaseException | None) -> None:
    if own is not None:
        raise own
    if failure:
        raise CheckpointError(f"The ranks could not save together. The autosaves so far are kept. {failure}")


def _wait_for(directory: str) -> None:
    # On a network file system, a directory that another node created may become visible late.
    deadline, pause_seconds = time.monotonic() + _SEEN_WITHIN_SECONDS, 0.01
    manifest = open_store(directory) if is_url(directory) else None
    while not (os.path.isdir(directory) if manifest is None else MANIFEST_NAME in manifest.listing().files):
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"After {_SEEN_WITHIN_SECONDS:g} seconds, this rank does not see {directory}, which rank 0 has "
                "created. Each rank writes its shards there. Pass FaultTolerance(dirpath=...) a directory that all "
                "ranks see."
            )
        time.sleep(pause_seconds)
        pause_seconds = min(2 * pause_seconds, 0.5)


def writer_of(trainer: Trainer, series: AutosaveSeries | None, ranks: Ranks) -> ShardWriter | None:
    """Return the writer for the autosaves of a strategy that shards, or ``None`` for one that saves one file."""
    return ShardWriter(trainer, series, ranks) if saves_shards(trainer.strategy) else None


def without_shards(checkpoint: Mapping[str, object]) -> dict[str, object]:
    """Return the parts of a checkpoint that go into the file next to the shards."""
    return {key: value for key, value in checkpoint.items() if key not in IN_SHARDS}


def load_checkpoint(
    trainer: Trainer, choice: Choice, load: Callable[[object], None], *, why_not_trusted: Callable[[str], str | None]
) -> None:
    """Give Lightning the checkpoint that a fit continues from; some strategies load model and optimizers themselves.

    Args:
        trainer: The trainer of the fit.
        choice: The checkpoint that the fit continues from, if any.
        load: Lightning's own way, by path.
        why_not_trusted: Returns why an autosave is not trusted, or ``None`` if it is.

    Raises:
        UnsafeCheckpointError: If an autosave of shards that is not trusted holds what could run code.
    """
    loads_itself = trainer.strategy.restore_checkpoint_after_setup
    if choice.checkpoint is not None and not loads_itself:
        put_checkpoint(trainer, str(choice.path), choice.checkpoint)
        return
    part = (choice.part or part_of(choice.path)) if loads_itself else None
    without = [] if part is None else part.get(WITHOUT_STATE, [])
    with contextlib.ExitStack() as stack:
        if part is not None:
            stack.enter_context(_explained(str(choice.path)))
        if choice.path is not None:
            stack.enter_context(changed_in_place(trainer))
            stack.enter_context(loadable(trainer, without))
        if loads_itself and choice.path is not None and is_url(choice.path):
            stack.enter_context(fetched(trainer.strategy, choice.path))
        if loads_itself and choice.path is not None and (choice.is_autosave or choice.parent is not None):
            reason = why_not_trusted(choice.path)
            if reason is not None:
                stack.enter_context(safely_unpickled(choice.path, reason))
        load(choice.path)


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except (LookupError, _torchs_exception()) as error:
        raise CheckpointError(
            f"{path} can't be loaded: {error!r:.200}. This strategy needs the whole state, and a hook "
            "(on_save_checkpoint) or a state_dict may have left out a part. Resume from an autosave, which is complete."
        ) from error


def reshard(trainer: Trainer) -> None:
    """Let each sharded module hold only its shards again: after a forward without a backward pass it holds everything.

    The module would do so by itself before the next state dict or step; nothing is computed or sent.
    """
    if not isinstance(trainer.strategy, ModelParallelStrategy):
        return
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415, RUF100 - takes a second to import

    for child in trainer.lightning_module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def put_into(trainer: Trainer, instead: Mapping[str, Any]) -> None:
    """Restore the parts of a capture in a module and optimizers that a strategy has loaded by itself."""
    module = trainer.lightning_module
    load_buffers(module, instead["buffers"])
    if instead["extra"]:
        module.load_state_dict(instead["extra"], strict=False)
    for optimizer, groups in zip(trainer.optimizers, instead["param_groups"], strict=True):
        for group, kept in zip(optimizer.param_groups, groups, strict=True):
            group.update(kept)


_MAX_SHOWN = 5


@final
class Replicas:
    """Compares a module's parameters between the ranks that hold them.

    Args:
        trainer: The trainer of the module.
        ranks: The ranks that compare.
        strict: Whether a difference is an error rather than a warning.
    """

    def __init__(self, trainer: Trainer, ranks: Ranks, *, strict: bool) -> None:
        self._trainer = trainer
        self._ranks = ranks
        self._strict = strict
        self._has_warned = False

    def check(self) -> None:
        """Compare; a collective.

        Raises:
            NotExactError: If `strict`, and ranks hold different values of the same parameter.
        """
        reason = self._difference()
        if not reason:
            return
        if self._strict:
            raise NotExactError(f"{reason}; or pass FaultTolerance(strict=False).")
        if not self._has_warned and self._ranks.rank == 0:
            _log.warning("%s.", reason)
        self._has_warned = True

    def why_not_exact(self) -> tuple[str, ...]:
        """Return why a checkpoint that user code requests can't be exact, if weights are the reason; a collective.

        Compare only where nothing is sharded: it may be the middle of a batch.
        """
        if isinstance(self._trainer.strategy, ModelParallelStrategy):
            return ()
        reason = self._difference()
        return (reason,) if reason else ()

    def _difference(self) -> str:
        """Return a sentence about the parameters that differ between ranks, or an empty string; a collective."""
        if self._ranks.num_ranks == 1 or isinstance(self._trainer.strategy, FSDPStrategy):
            return ""  # FSDPStrategy gives each rank its own part
        reshard(self._trainer)
        sums = self._ranks.to_first("replicas", _sums(self._trainer.lightning_module))
        differing: list[str] = self._ranks.from_first("replicas differ", None if sums is None else _differing(sums))
        if not differing:
            return ""
        more = f" and {len(differing) - _MAX_SHOWN} more" if len(differing) > _MAX_SHOWN else ""
        return (
            f"The ranks hold different values of {', '.join(differing[:_MAX_SHOWN])}{more}. A checkpoint holds only"
            f" one copy of a parameter that is not in shards, so the run would not continue exactly. {self._advice()}"
        )

    def _advice(self) -> str:
        if isinstance(self._trainer.strategy, ModelParallelStrategy):
            return "Shard these too (fully_shard), or average their gradients in on_after_backward"
        return "Change weights in the same way on all ranks, and average them at each step"


def _sums(module: torch.nn.Module) -> dict[str, int]:
    """Return a sum of the bits of each piece of a parameter that another rank may hold too."""
    places = {name: (_place(parameter), parameter) for name, parameter in module.named_parameters()}
    found = {f"{name} {place}".rstrip(): p for name, (place, p) in places.items() if place is not None}
    return sums_of_bits(found)


def _place(parameter: Any) -> str | None:
    """Return which piece of a parameter this rank has, or ``None`` if no other rank has it too."""
    if shard_of(parameter) is parameter:
        return ""
    placements, coordinate = parameter.placements, parameter.device_mesh.get_coordinate() or ()
    if not any(placement.is_replicate() for placement in placements):
        return None
    pieces = [at for at, placement in zip(coordinate, placements, strict=False) if placement.is_shard()]
    return f"(piece {pieces})" if pieces else ""


def _differing(sums_of_ranks: Sequence[dict[str, int]]) -> list[str]:
    seen: dict[str, int] = {}
    differing: dict[str, None] = {}
    for sums in sums_of_ranks:
        for name, value in sums.items():
            if seen.setdefault(name, value) != value:
                differing[name] = None
    return list(differing)

"""Private names of Lightning's evaluation loops that this package uses, checked on 2.5.6 to 2.6.6."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper, _IndexBatchSamplerWrapper
from lightning.pytorch.utilities.combined_loader import _Sequential
from torch import Tensor
from torch.utils.data import BatchSampler, SequentialSampler

from lightning_faulttolerant.loader.remaining import ListedIndices
from lightning_faulttolerant.trainer.adapters.compat import copied
from lightning_faulttolerant.trainer.patches import Patches

SEAMS = {
    "trainer.fit_loop.epoch_loop.val_loop._logged_outputs": "values of the validation loaders that are done",
    "trainer.fit_loop.epoch_loop.val_loop._module_mode": "modules in training mode after a resumed validation run",
    "trainer.fit_loop.epoch_loop.val_loop._store_dataloader_outputs": "a resume in a later validation loader",
    "trainer.fit_loop.epoch_loop.val_loop._results": "values logged in validation",
    "trainer.test_loop._seen_batches_per_dataloader": "the step of values logged in an evaluation that continues",
    "trainer.predict_loop._predictions": "the predictions of a resumed predict",
    "trainer.predict_loop._predict_step": "the numbers of batches that a different number of ranks continues with",
    "trainer.predict_loop._store_data_for_prediction_writer": "the indices of these batches",
    "trainer.test_loop._print_results": "the table of results of a finished test",
    "trainer.test_loop._stage": "the table of results of a finished test",
    "trainer._logger_connector._first_loop_iter": "means logged over an epoch, after a validation run in its middle",
}


def num_batches_of(loop: Any) -> float:
    """Return how many batches an evaluation has on this rank; infinite if that is not known."""
    fetcher = loop._data_fetcher
    if fetcher.length is None:
        return float("inf")
    return float(loop.batch_progress.current.ready + fetcher.length - fetcher.fetched)


def is_predicting(loop: object) -> bool:
    """Return whether a loop is that of ``predict``, which logs nothing and returns predictions."""
    return isinstance(loop, _PredictionLoop)


def predictions_of(loop: Any) -> list[list[object]]:
    """Return the predictions that the loop keeps, by loader."""
    return cast(list[list[object]], loop._predictions)


def make_room_for_predictions(loop: Any) -> None:
    """Prepare a loop that does not run for the predictions of a finished one."""
    loop._predictions = [[] for _ in range(loop.num_dataloaders)]


def print_results(loop: Any, results: list[object]) -> None:
    """Print the table of results, as the loop does at its end."""
    if loop.verbose and loop.trainer.is_global_zero:
        loop._print_results(results, loop._stage.value)


def keeps_predictions(trainer: Trainer) -> bool:
    """Return whether ``predict`` keeps its predictions, to return them or for a writer at its end."""
    writers = [one for one in trainer.callbacks if isinstance(one, BasePredictionWriter)]  # type: ignore[attr-defined]
    return bool(trainer.predict_loop.return_predictions) or any(one.interval.on_epoch for one in writers)


def loaders_of(loop: Any) -> list[object]:
    """Return the loaders of an evaluation that is set up."""
    return [] if loop._combined_loader is None else list(loop._combined_loader.flattened)


def num_in_order(loader: object, *, rank: int, num_ranks: int) -> int | None:
    """Return how many samples all ranks together have, if Lightning's sampler of ``predict`` deals them in order.

    Args:
        loader: The loader that Lightning has made of the user's.
        rank: The number of this rank.
        num_ranks: The number of ranks.
    """
    found = getattr(loader, "batch_sampler", None)
    batches = found._batch_sampler if type(found) is _IndexBatchSamplerWrapper else None
    if type(batches) is not BatchSampler or batches.drop_last:
        return None
    sampler: object = batches.sampler
    if type(sampler) is UnrepeatedDistributedSamplerWrapper:
        if sampler.shuffle or (sampler.rank, sampler.num_replicas) != (rank, num_ranks):
            return None
        sampler = sampler.dataset._sampler  # type: ignore[attr-defined]  # Lightning's own class
    elif num_ranks > 1:
        return None
    return len(sampler) if type(sampler) is SequentialSampler else None


def batch_size_of(loader: Any) -> int:
    """Return the batch size of a loader that `num_in_order` knows."""
    return int(loader.batch_sampler._batch_sampler.batch_size)


def put_indices(loader: Any, indices: Tensor) -> None:
    """Let a loader that `num_in_order` knows yield only these samples."""
    wrapper = loader.batch_sampler
    wrapper._batch_sampler = BatchSampler(ListedIndices(indices), batch_size_of(loader), drop_last=False)


def set_num_batches(loop: Any, nums: list[int]) -> None:
    """Say how many batches each loader of ``predict`` has."""
    loop.max_batches = nums


def count_from(loop: object, first: list[int], patches: Patches) -> None:
    """Number the batches of each loader from `first` on. The loop itself counts from 0."""

    def wrap_step(original: Any) -> Any:
        return lambda batch, number, loader, *more: original(batch, number + first[loader], loader, *more)

    def wrap_store(original: Any) -> Any:
        return lambda number, loader: original(number - first[loader], loader)

    patches.wrap(loop, "_predict_step", wrap_step)
    patches.wrap(loop, "_store_data_for_prediction_writer", wrap_store)


def place_in_loaders(loop: Any) -> tuple[int, int]:
    """Return the number of the loader that ``predict`` is in, and how many batches of it are done."""
    iterator = loop._combined_loader._iterator
    return int(iterator._iterator_idx), int(iterator._idx)


def why_unknown(val_loop: Any) -> str | None:
    """Return why the place of a validation run can't be saved, or ``None`` if it can."""
    fetcher = val_loop._data_fetcher
    if not isinstance(fetcher, _PrefetchDataFetcher):
        return "its steps take batches from the iterator themselves"
    if fetcher.length is None and len(val_loop._combined_loader.flattened) > 1:
        return "one of its loaders has no length, so that batches of the next one may be fetched ahead"
    return None


def has_no_length(val_loop: Any) -> bool:
    """Return whether a loader has no length, so that each batch is fetched before the step of the previous one."""
    combined = val_loop._combined_loader
    return combined._iterator is not None and sized_len(combined) is None


def current_loader(val_loop: Any) -> int | None:
    """Return the number of the loader that a run takes its batches from; ``None`` if from all of them together."""
    iterator = val_loop._combined_loader._iterator
    return iterator._iterator_idx if isinstance(iterator, _Sequential) else None


def run_state(val_loop: Any) -> dict[str, object]:
    """Return what the loop of a validation run keeps between two batches, as plain values and tensors."""
    iterator, fetcher = val_loop._combined_loader._iterator, val_loop._data_fetcher
    state = {
        "loader": current_loader(val_loop),
        "index": iterator._idx,
        "fetched": fetcher.fetched,
        "progress": val_loop.batch_progress.state_dict(),
    }
    if is_predicting(val_loop):
        return {**state, "epoch_batch_indices": copy.deepcopy(val_loop.epoch_batch_indices)}
    return {
        **state,
        "logged": copied(val_loop._logged_outputs),
        "logged_by": val_loop._results.dataloader_idx,
        "seen_batches": dict(val_loop._seen_batches_per_dataloader),
    }


def load_run_state(val_loop: Any, state: Mapping[str, Any]) -> None:
    """Restore a result of `run_state` after the loop's ``reset``: begin to iterate over the loader that was current."""
    iterator, fetcher = val_loop._combined_loader._iterator, val_loop._data_fetcher
    if state["loader"]:
        iterator._iterator_idx = state["loader"]
        iterator._load_current_iterator()
    iterator._idx = state["index"]
    fetcher.fetched = state["fetched"]
    if fetcher.batches:  # fetched ahead, by an iterator that had begun to count at 0
        batch, _, loader = fetcher.batches[0]
        fetcher.batches[0] = batch, state["index"] - 1, loader
    if fetcher.length is not None:
        fetcher.done = fetcher.fetched >= fetcher.length
    val_loop.batch_progress.load_state_dict(dict(state["progress"]))
    val_loop._module_mode.mode = dict(state["training"])
    if is_predicting(val_loop):
        val_loop.epoch_batch_indices = copy.deepcopy(state["epoch_batch_indices"])
        return
    val_loop._seen_batches_per_dataloader.update(state.get("seen_batches", {}))
    val_loop._logged_outputs = copied(state["logged"])
    val_loop._results.dataloader_idx = state["logged_by"]


def store_once(val_loop: Any, patches: Patches, *, fetched_before: int, loader: int | None) -> None:
    """Keep the loop from storing the values of `loader` when its run continues inside it.

    The loop takes any first batch of another loader than the first one for a change of the loader.
    """
    if is_predicting(val_loop):
        return
    undecided = [bool(loader)]

    def wrap(original: Any) -> Any:
        def store() -> None:
            is_first, undecided[0] = undecided[0], False
            has_fetched = val_loop._data_fetcher.fetched > fetched_before
            if not (is_first and has_fetched and current_loader(val_loop) == loader):
                original()

        return store

    patches.wrap(val_loop, "_store_dataloader_outputs", wrap)


def first_loop_iter(trainer: Trainer) -> bool | None:
    """Return how far the logger connector is in its batch. The training loop keeps it during a validation run."""
    return trainer._logger_connector._first_loop_iter


def set_first_loop_iter(trainer: Trainer, value: bool | None) -> None:
    """Restore a value of `first_loop_iter`."""
    trainer._logger_connector._first_loop_iter = value


def forget_loader_of_bar(bar: Any) -> None:
    """Let a progress bar take the next validation batch for the first one of its loader."""
    bar._current_eval_dataloader_idx = None

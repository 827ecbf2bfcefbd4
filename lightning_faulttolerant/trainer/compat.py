"""Private names of Lightning's loops and Trainer, one small function per seam, checked on 2.5.6 to 2.6.6.

Only modules named `compat` may touch a name of Lightning that begins with an underscore. `SEAMS` lists the names for
the contract test, each with the feature that breaks without it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher, _PrefetchDataFetcher
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors import checkpoint_connector as connectors
from lightning.pytorch.utilities.combined_loader import _MaxSizeCycle

from lightning_faulttolerant.trainer.patches import Patches
from lightning_faulttolerant.trainer.position import loop_of

SEAMS = {
    "trainer._logger_connector._callback_metrics": "what a loader hook reads, when a resume calls it again",
    "trainer._logger_connector._logged_metrics": "the same",
    "trainer._logger_connector._progress_bar_metrics": "the same",
    "trainer.fit_loop._data_source.is_module": "which loaders come from a hook that may read the trainer",
    "trainer.fit_loop.epoch_loop.val_loop._data_source.is_module": "the same",
    "trainer.fit_loop.epoch_loop._on_before_fetch": "the boundary: autosaves, stops and captures",
    "trainer.fit_loop.epoch_loop.val_loop._on_before_fetch": "stops inside a validation run",
    "trainer.fit_loop._combined_loader": "leaving the user's loaders as they were",
    "trainer.fit_loop._data_fetcher": "finishing a batch that was saved before its validation run",
    "trainer.fit_loop.epoch_loop._batches_that_stepped": "the step that loggers receive",
    "trainer.fit_loop.epoch_loop.val_loop._seen_batches_per_dataloader": "the step of values logged in validation",
    "trainer.fit_loop._last_train_dl_reload_epoch": "reload_dataloaders_every_n_epochs after a resume",
    "trainer.fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch": "reload_dataloaders_every_n_epochs, likewise",
    "trainer._checkpoint_connector.resume_start": "choosing the autosave to resume from",
    "trainer._checkpoint_connector.restore_training_state": "resuming with a LearningRateFinder among the callbacks",
    "trainer._checkpoint_connector.dump_checkpoint": "autosaves",
    "trainer._checkpoint_connector._loaded_checkpoint": "resuming",
    "trainer._signal_connector.register_signal_handlers": "stop signals",
    "trainer._signal_connector._original_handlers": "calling the handlers that were there before",
}


# Access to the loops and the connectors.


def validation_loop(trainer: Trainer) -> Any:
    """Return the loop of validation runs inside ``fit``, or that of the evaluation that runs."""
    return loop_of(trainer)


def checkpoint_connector(trainer: Trainer) -> object:
    """Return the connector that restores checkpoints: ``resume_start`` and ``restore_training_state``."""
    return trainer._checkpoint_connector


def signal_connector(trainer: Trainer) -> object:
    """Return the connector that registers Lightning's signal handlers, right before the loops of the run begin."""
    return trainer._signal_connector


BEFORE_FETCH = "_on_before_fetch"
AFTER_FETCH = "_on_after_fetch"


def original_handlers(trainer: Trainer) -> Mapping[int, object]:
    """Return the signal handlers that were registered before Lightning's."""
    return trainer._signal_connector._original_handlers


def callbacks(trainer: Trainer) -> list[Callback]:
    """Return the trainer's callbacks; Lightning sets the attribute where type checkers don't see it."""
    return trainer.callbacks  # type: ignore[attr-defined, no-any-return]


def profiler(trainer: Trainer) -> object:
    """Return the profiler. Lightning enters its context around each hook."""
    return trainer.profiler  # type: ignore[attr-defined]


def datamodule(trainer: Trainer) -> LightningDataModule | None:
    """Return the trainer's data module."""
    return trainer.datamodule  # type: ignore[attr-defined, no-any-return]


def finders(trainer: Trainer) -> list[tuple[Callback, str]]:
    """Return the callbacks that train to find a setting, each with the name of the method that does it."""
    searches = {LearningRateFinder: "lr_find", BatchSizeFinder: "scale_batch_size"}
    return [(one, name) for one in callbacks(trainer) for kind, name in searches.items() if isinstance(one, kind)]


def is_nobodys_training(trainer: Trainer) -> bool:
    """Return whether this ``fit`` is a trial: a fast run, a barebones one, or a Tuner's, which ends before training."""
    is_tuning = any(getattr(finder, "_early_exit", False) for finder, _ in finders(trainer))
    return is_tuning or trainer.barebones or bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


# Checkpoints.


def is_newest_of_trainer(trainer: Trainer, path: str) -> bool:
    """Return whether `path` is a file that ``ckpt_path="last"`` or ``"hpc"`` stands for, rather than any other file."""
    last: set[str] = set()
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            last |= {os.path.realpath(p) for p in callback._find_last_checkpoints(trainer)}
        elif isinstance(callback, OnExceptionCheckpoint):  # with it, a missing ckpt_path means "last"
            last.add(os.path.realpath(callback.ckpt_path))
    return os.path.realpath(path) in last or os.path.basename(path).startswith("hpc_ckpt_")


def dump_checkpoint(trainer: Trainer) -> dict[str, object]:
    """Return Lightning's checkpoint of this instant. The callback's hook includes our own part."""
    patches = Patches()
    if "omegaconf" not in sys.modules:  # no hyperparameters can be its containers, and its import takes 0.3 s
        patches.replace(connectors, "_OMEGACONF_AVAILABLE", False)
    try:
        return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    finally:
        patches.undo()


def put_checkpoint(trainer: Trainer, path: str, checkpoint: dict[str, object]) -> None:
    """Let Lightning restore from `checkpoint` as if it had read it from `path`."""
    trainer._checkpoint_connector._ckpt_path = path
    trainer._checkpoint_connector._loaded_checkpoint = checkpoint


def put_checkpoint_path(trainer: Trainer, path: str | None) -> None:
    """Set ``trainer.ckpt_path`` to `path`."""
    trainer._checkpoint_connector._ckpt_path = path


def loaded_checkpoint(trainer: Trainer) -> dict[str, Any]:
    """Return the checkpoint that is being restored; empty if there is none."""
    return trainer._checkpoint_connector._loaded_checkpoint


def running_hook(trainer: Trainer) -> tuple[str, Callback | None]:
    """Return the running hook and its callback. The callback is ``None`` for a hook of the module, or a step.

    Both are read from the stack: Lightning notes the name of a hook, but not its callback.
    """
    frame = sys._getframe()
    while frame is not None:
        # Reading a frame's variables keeps them alive as long as the frame, so read only Lightning's own frame.
        if frame.f_globals.get("__name__") == "lightning.pytorch.trainer.call" and "hook_name" in frame.f_locals:
            is_callbacks = frame.f_code.co_name == "_call_callback_hooks"
            return frame.f_locals["hook_name"], frame.f_locals.get("callback") if is_callbacks else None
        frame = frame.f_back  # type: ignore[assignment]
    return "", None


def run_hooks(trainer: Trainer, hook: str, callbacks: list[Callback], *args: object, module: bool) -> None:
    """Call a hook of `callbacks`, and of the module if `module`, as Lightning does."""
    with only(trainer, hook, callbacks, module=module):
        call._call_callback_hooks(trainer, hook, *args)
        call._call_lightning_module_hook(trainer, hook, *args)


@contextlib.contextmanager
def only(trainer: Trainer, hook: str, callbacks: list[Callback], *, module: bool) -> Iterator[None]:
    """Inside the context, let Lightning call `hook` of `callbacks` only, and of the module only if `module`."""
    patches = Patches()
    kept = trainer.callbacks  # type: ignore[attr-defined]
    trainer.callbacks = callbacks  # type: ignore[attr-defined]
    if not module:
        patches.wrap(trainer.lightning_module, hook, lambda original: lambda *args: None)
    try:
        yield
    finally:
        patches.undo()
        trainer.callbacks = kept  # type: ignore[attr-defined]


# Loops.


def set_not_restarting(trainer: Trainer) -> None:
    """Take the loops out of their restarting mode: from here on they run as in an uninterrupted run.

    Lightning guesses from its counters where a checkpoint was taken. On a wrong guess it skips or repeats a validation
    run or the plateau schedulers.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    for loop in (trainer.fit_loop, epoch_loop, epoch_loop.val_loop):
        loop._restarting = False
        loop._loaded_from_state_dict = False
        loop._resuming_from_checkpoint = False
    epoch_loop.reset_restart_stage()
    epoch_loop.val_loop.reset_restart_stage()


def close_batch(trainer: Trainer) -> None:
    """Do Lightning's work between ``on_train_batch_end`` and the end of ``advance``: log, and count the batch."""
    connector = trainer._logger_connector
    connector.on_batch_end()
    connector.update_train_step_metrics()


def finish_batch(trainer: Trainer, *, validate: bool = True) -> None:
    """Run what the training epoch loop still owes after a batch: a validation run that is due, plateau schedulers.

    Args:
        trainer: The trainer that runs the fit.
        validate: Whether the validation run still has to be run, rather than being done already.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    epoch_loop._skip_next_val = not validate
    epoch_loop.on_advance_end(fetcher)


def end_validation(trainer: Trainer, callbacks: list[Callback], *, module: bool, before: Mapping[str, Any]) -> None:
    """Run what a validation run still owes from its ``on_validation_end`` on.

    Args:
        trainer: The trainer that runs the fit.
        callbacks: The callbacks with a hook that has not run.
        module: Whether the module's hook has not run.
        before: The return value of `before_validation`.
    """
    val_loop = validation_loop(trainer)
    trainer.validating = True
    with only(trainer, "on_validation_end", callbacks, module=module):
        val_loop._on_evaluation_end()
    val_loop._module_mode.mode = dict(before["training"])
    val_loop._on_evaluation_model_train()
    trainer.training = True
    trainer._logger_connector._first_loop_iter = before["first_loop_iter"]


def before_validation(trainer: Trainer, first_loop_iter: bool | None) -> dict[str, object]:
    """Return the values that Lightning restores after the validation run that is under way."""
    return {"training": dict(validation_loop(trainer)._module_mode.mode), "first_loop_iter": first_loop_iter}


def lift_step_limit(trainer: Trainer) -> Callable[[], None]:
    """Let a fit begin that has done its last step but still owes work. Return a function that restores the limit."""
    epoch_loop = trainer.fit_loop.epoch_loop
    max_steps = epoch_loop.max_steps
    if 0 <= max_steps <= trainer.global_step:
        epoch_loop.max_steps = -1

    def put_back() -> None:
        epoch_loop.max_steps = max_steps

    return put_back


def step_fetches(trainer: Trainer) -> bool:
    """Return whether the module's ``training_step`` takes the ``dataloader_iter`` and fetches by itself."""
    return isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher)


def num_completed(trainer: Trainer) -> int:
    """Return how many training batches of the epoch are done, or how many steps if these fetch by themselves."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.completed


def num_begun_in_all(trainer: Trainer) -> int:
    """Return how many training batches have begun, over all epochs."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


def num_completed_in_all(trainer: Trainer) -> int:
    """Return how many training batches are done, over all epochs: the number of the one in progress."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.completed


def set_num_batches_done(trainer: Trainer, number: int) -> None:
    """Set how many batches of the epoch are done. A batch that still has to be closed stays open."""
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    shift = number - current.ready
    current.increment_by(shift)


def fetches_at_the_boundary(trainer: Trainer) -> bool:
    """Return whether each batch is fetched right after its boundary, neither ahead of it nor inside a step."""
    return not fetches_ahead(trainer) and not step_fetches(trainer)


def end_fetching(trainer: Trainer) -> None:
    """End the iteration over the loaders of a failed fit, as the teardown would, but while the loaders are still ours.

    The teardown then has nothing to do. Otherwise, if an iterator could not be created, the error of the teardown would
    hide the reason.
    """
    for loop in (trainer.fit_loop, validation_loop(trainer)):
        if loop._combined_loader is not None:
            loop._combined_loader.reset()
            loop._data_fetcher = None


def renew_iterator(
    trainer: Trainer, state: Mapping[str, object] | None, skip: Callable[[list[Any], list[Any]], None]
) -> None:
    """Create the training loaders' iterators again, as at the beginning of an epoch, if any exist already.

    Args:
        trainer: The trainer that runs the fit.
        state: The return value of `combined_state`, restored before the fetcher fetches a batch ahead.
        skip: Called with the new iterators and their loaders, also before that fetch.
    """
    fetcher = trainer.fit_loop._data_fetcher
    if trainer.fit_loop._combined_loader is None or fetcher is None:
        return
    patches = Patches()

    def reset_and_load(reset: Callable[[], None]) -> None:
        reset()
        _load_combined(trainer, state)
        combined = trainer.fit_loop._combined_loader
        if combined is not None and combined._iterator is not None:
            skip(combined._iterator.iterators, combined.flattened)

    patches.around(fetcher, "reset", reset_and_load)
    try:
        iter(fetcher)
    finally:
        patches.undo()


def combined_state(trainer: Trainer) -> dict[str, object] | None:
    """Return the position of the iteration over all training loaders, without the place of each loader."""
    combined, fetcher = trainer.fit_loop._combined_loader, trainer.fit_loop._data_fetcher
    if combined is None or combined._iterator is None or fetcher is None:
        return None
    iterator = combined._iterator
    state = {"index": iterator._idx, "fetched": fetcher.fetched, "batch_index": getattr(fetcher, "_batch_idx", 0)}
    if isinstance(iterator, _MaxSizeCycle):
        state["used_up"] = list(iterator._consumed)
    return state


def _load_combined(trainer: Trainer, state: Mapping[str, Any] | None) -> None:
    assert trainer.fit_loop._combined_loader is not None
    iterator = trainer.fit_loop._combined_loader._iterator
    if iterator is None or state is None:
        return
    iterator._idx = state["index"]
    if isinstance(iterator, _MaxSizeCycle):
        iterator._consumed = list(state["used_up"])


def load_fetcher(trainer: Trainer, state: Mapping[str, Any] | None) -> None:
    """Set the count of a fetcher that steps draw from themselves: not one batch per step, as Lightning assumes."""
    fetcher = trainer.fit_loop._data_fetcher
    if state is None or not isinstance(fetcher, _DataLoaderIterDataFetcher):
        return
    fetcher.fetched, fetcher._batch_idx = state["fetched"], state["batch_index"]
    fetcher.done = fetcher.length is not None and fetcher.fetched >= fetcher.length


def fetches_ahead(trainer: Trainer) -> bool:
    """Return whether each training batch is fetched before the previous one is trained.

    Lightning does so if the loaders have no length, to know which batch is the last.
    """
    fetcher = trainer.fit_loop._data_fetcher
    return isinstance(fetcher, _PrefetchDataFetcher) and fetcher.length is None and fetcher.prefetch_batches > 0


def starts_over(trainer: Trainer) -> bool:
    """Return whether the epoch that starts will create its own iterators, rather than use those of the setup."""
    fit_loop = trainer.fit_loop
    return trainer.current_epoch > 0 and not fit_loop.is_resuming and not fit_loop.epoch_loop.restarting


def are_set_up(trainer: Trainer, *, for_training: bool) -> bool:
    """Return whether the loaders have been requested, and no finder has removed them since."""
    loop = trainer.fit_loop if for_training else trainer.fit_loop.epoch_loop.val_loop
    return loop._combined_loader is not None


def are_due(trainer: Trainer, *, for_training: bool) -> bool:
    """Return whether the loaders are requested before the next batch that needs them."""
    every = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
    num_epochs = trainer.current_epoch - reload_epochs(trainer)[not for_training]
    return 0 < every <= num_epochs or not are_set_up(trainer, for_training=for_training)


def set_up_validation(trainer: Trainer) -> None:
    """Request the validation loaders, as the sanity check does. A restart skips that check."""
    if not are_set_up(trainer, for_training=False):
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
        trainer.training = True


def reload_epochs(trainer: Trainer) -> list[float]:
    """Return the epochs in which the loaders of training and validation were last requested."""
    val_loop = trainer.fit_loop.epoch_loop.val_loop
    return [trainer.fit_loop._last_train_dl_reload_epoch, val_loop._last_val_dl_reload_epoch]


def set_reload_epochs(trainer: Trainer, epochs: list[float]) -> None:
    """Restore the value of `reload_epochs`, so that the loaders are requested again in the same epochs."""
    val_loop = trainer.fit_loop.epoch_loop.val_loop
    trainer.fit_loop._last_train_dl_reload_epoch, val_loop._last_val_dl_reload_epoch = epochs


def is_hook_asked(trainer: Trainer, *, for_training: bool) -> bool:
    """Return whether the loaders of a fit come from a hook, and were not passed to ``fit``. Checked on 2.6.6."""
    loop = trainer.fit_loop if for_training else trainer.fit_loop.epoch_loop.val_loop
    return bool(loop._data_source.is_module())


def live_values(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """Return the trainer's own dicts, by path, of what training changes and a hook can read from the trainer."""
    connector = trainer._logger_connector
    found: dict[str, dict[str, Any]] = {
        "callback_metrics": connector._callback_metrics,
        "logged_metrics": connector._logged_metrics,
        "progress_bar_metrics": connector._progress_bar_metrics,
    }
    for i, optimizer in enumerate(trainer.optimizers):
        found.update({f"optimizers[{i}][{j}]": group for j, group in enumerate(optimizer.param_groups)})
    found.update({f"schedulers[{i}]": vars(c.scheduler) for i, c in enumerate(trainer.lr_scheduler_configs)})
    _add_progress(found, "fit_loop", trainer.fit_loop)
    return found


def _add_progress(found: dict[str, dict[str, Any]], path: str, owner: object) -> None:
    for name, value in vars(owner).items():
        if isinstance(value, (_Loop, _BaseProgress)):
            _add_progress(found, f"{path}.{name}", value)
            if isinstance(value, _BaseProgress):
                found[f"{path}.{name}"] = vars(value)


def seen_validation_batches(trainer: Trainer) -> dict[int, int]:
    """Return how many validation batches were logged, by loader. The count is the step of values logged there."""
    return dict(trainer.fit_loop.epoch_loop.val_loop._seen_batches_per_dataloader)


def set_seen_validation_batches(trainer: Trainer, seen: Mapping[int, int]) -> None:
    """Restore the value of `seen_validation_batches`."""
    trainer.fit_loop.epoch_loop.val_loop._seen_batches_per_dataloader.update(seen)


def epoch_length(trainer: Trainer) -> int | None:
    """Return how many batches the epoch in progress has: its loaders may have had another length when it began."""
    fetcher = trainer.fit_loop._data_fetcher
    return None if fetcher is None else fetcher.length


def set_epoch_length(trainer: Trainer, length: int | None) -> None:
    """Restore the value of `epoch_length`."""
    fetcher = trainer.fit_loop._data_fetcher
    if fetcher is not None and length is not None and fetcher.length not in (None, length):
        fetcher.length, fetcher.done = length, fetcher.fetched >= length


def is_accumulating(trainer: Trainer) -> bool:
    """Return whether gradients of an unfinished accumulation window exist at this boundary."""
    epoch_loop = trainer.fit_loop.epoch_loop
    return epoch_loop.batch_progress.current.ready > 0 and epoch_loop._should_accumulate()


def combined_loaders(trainer: Trainer) -> list[Any]:
    """Return the CombinedLoaders of training, and of validation or an evaluation, as far as they are set up."""
    loops = (trainer.fit_loop, validation_loop(trainer))
    return [loop._combined_loader for loop in loops if loop._combined_loader is not None]


def user_loaders(trainer: Trainer) -> list[object]:
    """Return the loaders of training and validation, as far as they are set up."""
    return [loader for combined in combined_loaders(trainer) for loader in combined.flattened]

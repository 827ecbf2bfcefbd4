"""Loggers that write files: a run that resumes continues in the version that it had, after the values logged by then.

Only two things on a user's logger are changed for good: its version, and its directory if this start's differs from
the first start's.

Rows that were logged after the checkpoint are removed from the ``metrics.csv`` of a CSVLogger.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_faulttolerant.checkpoint.saving import atomic_write_bytes
from lightning_faulttolerant.trainer.files import compat
from lightning_faulttolerant.trainer.files.roots import Moves, absolute, real
from lightning_faulttolerant.trainer.patches import Method, Patches

FileLogger = compat.FileLogger


class _FileFollower(Protocol):
    """Knows how much a logger has logged so far, without reading its files."""

    def state_dict(self) -> dict[str, object]:
        """Return how much was logged."""

    def flush(self) -> None:
        """Make sure that all of it is in the files."""


class LoggerFiles:
    """The files of a trainer's loggers: those of CSVLogger and TensorBoardLogger; others are left alone.

    Args:
        trainer: The trainer of the loggers.
        patches: Removes our counting from the loggers later.
    """

    def __init__(self, trainer: Trainer, patches: Patches) -> None:
        self._trainer = trainer
        self._patches = patches
        self._followers: dict[int, tuple[dict[str, object], _FileFollower]] = {}
        self._undo = contextlib.ExitStack()
        self._is_starting = True
        self.notes: list[str] = []
        """What is lost or split, because a logger could not continue."""
        self.moved: list[str] = []
        """Where loggers continue that began somewhere else."""

    def resume(
        self, states: Sequence[Mapping[str, Any]], *, kept: Collection[str] | None = (), moves: Moves | None = None
    ) -> None:
        """Let each logger continue in its version. Call it before the loggers begin their files.

        Args:
            states: The result of `state_dict`.
            kept: Directories from which nothing logged since then is dropped; ``None`` for all.
            moves: The directories that differ from the first start's.
        """
        moves = moves or Moves()
        loggers = dict(self._keyed())
        for state in states:
            logger = loggers.get(state["key"])
            if logger is None:
                self.notes.append(f"{state['key']}, which logged to {state['log_dir']}, is missing now")
            elif self._continues(logger, state, moves):
                cuts = kept is not None and state["log_dir"] not in kept
                undo = _resume(logger, state, cuts=cuts, notes=self.notes)
                if state.get("purge_step", 0) > 0:  # from 0 on, TensorBoard drops hp_metric too
                    self._patches.around(logger, "log_hyperparams", self._without_hp_metric)
                if undo is not None:
                    self._undo.callback(undo)

    def settle(self) -> None:
        """Keep the changes: the run has resumed, and logs the dropped values again."""
        self._is_starting = False
        self._undo.pop_all()

    def put_back(self) -> None:
        """Put back the rows that were dropped if the run has not resumed: nothing would log them again."""
        self._undo.close()

    def _without_hp_metric(
        self, log_hyperparams: Method, params: object, metrics: object = None, *args: object, **kwargs: object
    ) -> None:
        is_there = metrics is None and self._is_starting  # the first start wrote the default one
        log_hyperparams(params, {} if is_there else metrics, *args, **kwargs)

    def _continues(self, logger: FileLogger, state: Mapping[str, Any], moves: Moves) -> bool:
        """Return whether the logger continues in its saved version; if so, give it that version again."""
        key, root = state["key"], absolute(logger.root_dir)
        save_dir = None if root == state["root_dir"] else _first_save_dir(logger, state, moves)
        if root != state["root_dir"] and save_dir is None:
            self.notes.append(f"{key} now logs to {root}; what was logged so far is in {state['log_dir']}")
            return False
        if not compat.takes_next_version(logger) and logger.version != state["version"]:
            self.notes.append(
                f"{key} was given version {logger.version!r}; what was logged so far is in {state['log_dir']}"
            )
            return False
        if not get_filesystem(state["log_dir"]).isdir(state["log_dir"]):
            self.notes.append(f"{key} begins new files: {state['log_dir']} does not exist anymore")
            return False
        if compat.has_begun(logger) and (save_dir is not None or logger.version != state["version"]):
            self.moved.append(f"{key} began {logger.log_dir} before the fit; it continues in {state['log_dir']}")
        if save_dir is not None:
            self.moved.append(
                f"{key} continues in {state['log_dir']}, where the first start of the run logged, not in {root}"
            )
            self._undo.callback(compat.set_save_dir(logger, save_dir))
        compat.set_version(logger, state["version"])
        return True

    def state_dict(self) -> list[dict[str, object]]:
        """Return how much each logger that has begun its files has logged so far."""
        states = []
        for key, logger in self._keyed():
            if not compat.has_begun(logger):
                continue
            if id(logger) not in self._followers:
                self._followers[id(logger)] = (_identity(key, logger), self._follow(logger))
            identity, follower = self._followers[id(logger)]
            states.append({**identity, **follower.state_dict()})
        return states

    def flush(self) -> None:
        """Write the values that loggers keep in memory: a resume needs everything logged before the autosave."""
        for _, follower in self._followers.values():
            follower.flush()

    def _follow(self, logger: FileLogger) -> _FileFollower:
        if isinstance(logger, CSVLogger):
            return _CSVRows(logger, self._patches)
        return _TensorBoardSteps(logger, self._patches, self._trainer)

    def _keyed(self) -> Iterator[tuple[str, FileLogger]]:
        """Yield the file loggers by class name and number within the class."""
        if not self._trainer.is_global_zero:
            return
        numbers: dict[str, int] = {}
        for logger in self._trainer.loggers:
            own = (
                CSVLogger.experiment,
                TensorBoardLogger.experiment,
            )  # a user's class may keep its files in another way
            if isinstance(logger, (CSVLogger, TensorBoardLogger)) and type(logger).experiment in own:
                name = type(logger).__qualname__
                yield f"{name}#{numbers.setdefault(name, 0)}", logger
                numbers[name] += 1


class _CSVRows:
    """Counts the rows that a CSVLogger has logged, and their columns."""

    def __init__(self, logger: CSVLogger, patches: Patches) -> None:
        self._logger = logger
        self._writer = logger.experiment
        file = MetricsFile(self._writer.metrics_file_path)
        self._num_rows = file.num_rows()
        self._columns = tuple(file.columns())
        for row in self._writer.metrics:
            self._add(row)
        patches.around(self._writer, "log_metrics", self._log_metrics)

    def _log_metrics(self, log_metrics: Method, *args: object, **kwargs: object) -> None:
        log_metrics(*args, **kwargs)
        self._add(self._writer.metrics[-1])

    def _add(self, row: Mapping[str, object]) -> None:
        self._num_rows += 1
        if not row.keys() <= set(self._columns):
            self._columns = tuple(sorted({*self._columns, *row}))

    def state_dict(self) -> dict[str, object]:
        return {"num_rows": self._num_rows, "columns": list(self._columns)}

    def flush(self) -> None:
        if self._writer.metrics:
            self._logger.save()


# By logger, across the fits of a process: a fit that shares its logger must not drop what an earlier one has logged.
_last_steps: weakref.WeakKeyDictionary[TensorBoardLogger, int] = weakref.WeakKeyDictionary()


class _TensorBoardSteps:
    """Knows the highest step that a TensorBoardLogger has logged, including users' pictures and histograms."""

    def __init__(self, logger: TensorBoardLogger, patches: Patches, trainer: Trainer) -> None:
        self._logger = logger
        self._trainer = trainer
        self._last_step = _last_steps.get(logger, -1)
        self._logged = True
        writer = getattr(logger.experiment, "file_writer", None)
        if writer is not None:
            patches.around(writer, "add_event", self._add_event)

    def _add_event(self, add_event: Method, event: object, step: int | None = None, walltime: object = None) -> None:
        add_event(event, step, walltime)
        self._logged = True
        if step is not None and step > self._last_step:
            self._last_step = _last_steps[self._logger] = int(step)

    def state_dict(self) -> dict[str, object]:
        # Values that an earlier run logged to the same directory, below the step where this run begins, stay too.
        return {"purge_step": max(self._last_step + 1, compat.logged_step(self._trainer))}

    def flush(self) -> None:
        if self._logged:
            self._logged = False
            self._logger.experiment.flush()


def _identity(key: str, logger: FileLogger) -> dict[str, object]:
    log_dir, root_dir = absolute(logger.log_dir), absolute(logger.root_dir)
    return {"key": key, "version": logger.version, "root_dir": root_dir, "log_dir": log_dir}


def _first_save_dir(logger: FileLogger, state: Mapping[str, Any], moves: Moves) -> str | None:
    """Return the directory below which a logger had its version at the first start, if it is below a moved root."""
    save_dir = moves.first(absolute(logger.save_dir))
    is_same = save_dir is not None and real(os.path.join(save_dir, logger.name)) == real(state["root_dir"])
    return save_dir if is_same else None


def _resume(logger: FileLogger, state: Mapping[str, Any], *, cuts: bool, notes: list[str]) -> Callable[[], None] | None:
    """Let a logger continue after the values in `state`; return a function that undoes it in its files, if possible."""
    if isinstance(logger, TensorBoardLogger):
        _last_steps[logger] = state["purge_step"] - 1
        compat.go_on_in_tensorboard(logger, state["purge_step"] if cuts else None)
        return None
    file = MetricsFile(os.path.join(logger.log_dir, "metrics.csv"))
    undo, num_rows = None, file.num_rows()
    if num_rows < state["num_rows"]:
        notes.append(
            f"{file.path} has {num_rows} rows, but {state['num_rows']} were logged before the autosave: it has been "
            "deleted or changed"
        )
    elif cuts and (num_rows > state["num_rows"] or file.columns() != state["columns"]):
        columns, rows = file.columns(), file.rows()

        def undo() -> None:
            file.put_back(columns, rows, num_kept=state["num_rows"])
            compat.set_columns(logger, file.columns())

        file.cut(state["num_rows"], state["columns"])
    compat.go_on_in_csv(logger, file.columns())
    return undo


class MetricsFile:
    """A file of rows and named columns, as Python's ``csv`` module writes it.

    Args:
        path: The path of the file, which may not exist yet; on any file system that Lightning can write to.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file_system = get_filesystem(path)

    def columns(self) -> list[str]:
        """Return the names in the first line; none if the file does not exist."""
        return next(self._lines(), [])

    def num_rows(self) -> int:
        """Return the number of rows."""
        return max(0, sum(1 for _ in self._lines()) - 1)

    def cut(self, num_rows: int, columns: Sequence[str]) -> None:
        """Keep only the first `num_rows` rows and the given `columns`; write nothing if that changes nothing.

        A process that is killed during this leaves the file as it was.
        """
        names = self.columns()
        if names == list(columns) and self.num_rows() == num_rows:
            return
        self._write_rows(columns, self.rows()[:num_rows])

    def rows(self) -> list[dict[str, str]]:
        """Return all rows, by column."""
        names, *rows = list(self._lines()) or [[]]
        return [dict(zip(names, row, strict=False)) for row in rows]

    def put_back(self, columns: Sequence[str], rows: Sequence[Mapping[str, str]], *, num_kept: int) -> None:
        """Undo `cut`: rows that were added after the `num_kept` rows stay, after all of `rows`.

        Args:
            columns: The columns before the cut.
            rows: The rows before the cut.
            num_kept: How many of the rows were kept.
        """
        added, now = self.rows()[num_kept:], self.columns()
        if added and not set(now) <= set(columns):
            columns = sorted({*columns, *now})
        self._write_rows(columns, [*rows, *added])

    def _write_rows(self, columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, fieldnames=columns, extrasaction="ignore")
        if rows:
            writer.writeheader()
            writer.writerows(rows)
        self._write(text.getvalue())

    def _write(self, text: str) -> None:
        if not text:
            self._file_system.rm_file(self.path)
        elif type(self._file_system).__name__ == "LocalFileSystem":
            atomic_write_bytes(text.encode(), self.path)
        else:
            atomic_write_bytes(text.encode(), self._file_system.unstrip_protocol(self.path))

    def _lines(self) -> Iterator[list[str]]:
        if self._file_system.isfile(self.path):
            with self._file_system.open(self.path, "r", newline="", encoding="utf-8") as file:
                yield from csv.reader(file)

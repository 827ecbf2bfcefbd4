"""Compares a checkpoint's description of its run with the run that resumes from it.

The last bits of the arithmetic depend on versions, devices, and threads.
"""

from __future__ import annotations

import logging
import platform
import sys
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer, __version__  # type: ignore[attr-defined]  # it lists other names only

from lightning_faulttolerant.loader.tracked import TrackedLoader
from lightning_faulttolerant.trainer.loaders.trackers import Tracker
from lightning_faulttolerant.trainer.log import tell
from lightning_faulttolerant.trainer.objects.drawn import SEED_THEM, Drawn, DrawnOutcome
from lightning_faulttolerant.trainer.run.fingerprint import differences, loader_as_carried_over, mismatch
from lightning_faulttolerant.trainer.run.hyperparameters import MAY_BE_IGNORED, Hyperparameters


def surroundings(trainer: Trainer) -> dict[str, Any]:
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


_log = logging.getLogger(__name__)


class Comparison:
    """Compares one checkpoint with one run.

    Args:
        path: The checkpoint.
        strict: Whether a difference is an error.
        is_elastic: Whether a different number of workers is not an error.
        warns: Whether a difference that is not an error is a warning.
    """

    def __init__(self, path: str, *, strict: bool, is_elastic: bool, warns: bool = True) -> None:
        self._path = path
        self._strict = strict
        self._is_elastic = is_elastic
        self._warns = warns
        self.not_exact: list[str] = []
        """The differences that are not an error."""
        self.notes: list[str] = []
        """The values that differed and were restored."""

    def compare(self, saved: Mapping[str, Any], now: Mapping[str, Any], names: tuple[str, ...]) -> None:
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
        self._take(refused, remedy=MAY_BE_IGNORED)
        return reported

    def compare_loader(
        self,
        place: str,
        saved: Mapping[str, Any],
        now: Mapping[str, Any],
        *,
        tracker: Tracker | None,
        is_resized: bool,
        drawn: Drawn | None,
        saved_drawn: Mapping[str, Any],
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

        Raises:
            FingerprintMismatchError: As in `compare`.
        """
        if isinstance(tracker, TrackedLoader) and tracker.can_be_resized and (is_resized or self._is_elastic):
            carried = loader_as_carried_over(saved, now, is_resized=is_resized)
            lines = [line for name in saved for line in differences(saved[name], carried[name], f"{place}.{name}")]
            if not is_resized:
                self.not_exact += [f"{line}: the workers' random generators are not carried over" for line in lines]
            saved = carried
        lines = list(differences(saved, now, place))
        self._take([line for line in lines if drawn is None or not drawn.covers(saved_drawn, line)])

    def put_back_drawn(self, drawn: Drawn, saved: Mapping[str, Any]) -> None:
        """Restore the values that were drawn before the first start, also in loaders that are set up later.

        Raises:
            FingerprintMismatchError: If they can't be restored, and that is an error. For a loader that is set up
                later, the error is raised then.
        """
        outcome = drawn.put_back(saved, self._take_late)
        self.notes = outcome.notes
        self._take(outcome.differences, remedy=SEED_THEM)

    def _take_late(self, outcome: DrawnOutcome) -> None:
        for note in outcome.notes:  # the report exists already
            tell(f"After the resume, {note}")
        self._take(outcome.differences, remedy=SEED_THEM)

    def _take(self, lines: list[str], remedy: str = "") -> None:
        if lines and self._strict:
            raise mismatch(lines, path=self._path, remedy=remedy)
        if self._warns:
            for line in lines:
                _log.warning("%s differs: %s", self._path, line)
        self.not_exact += lines

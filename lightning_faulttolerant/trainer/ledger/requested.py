"""The ledger that is requested, and the number that a fit or an evaluation has in it."""

from __future__ import annotations

import os

from lightning_faulttolerant.records.ledger import LEDGER_VARIABLE
from lightning_faulttolerant.records.replay import replay_requested
from lightning_faulttolerant.trainer import process
from lightning_faulttolerant.trainer.run.directory import Script
from lightning_faulttolerant.trainer.settings.options import Options, checked_ledger

_num_fits = process.num_fits


def path_of(options: Options) -> str | None:
    """Return the path of the ledger to write: that of the replay in one, else `own_path_of`."""
    request = replay_requested()
    return own_path_of(options) if request is None else request.ledger


def own_path_of(options: Options) -> str | None:
    """Return the path of the requested ledger: the callback's argument, else the environment's; ``None`` if neither.

    Raises:
        ValueError: If it is a URL.
    """
    return options.ledger or checked_ledger(os.environ.get(LEDGER_VARIABLE) or None)


def next_number(script: Script) -> int:
    """Return the number of a fit or an evaluation. A process that Lightning creates for it uses its script's count."""
    _num_fits[os.getpid()] = _num_fits.get(os.getpid(), 0) + 1
    return current_number(script)


def current_number(script: Script) -> int:
    """Return the number of the fit or evaluation that began last in this process.

    Args:
        script: The process that created the callback.
    """
    number = _num_fits.get(os.getpid(), 0)
    return max(number, script.num_begun()) if script.is_elsewhere else number

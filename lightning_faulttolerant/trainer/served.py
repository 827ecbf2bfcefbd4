"""The names that serve a Trainer of one of Lightning's packages, gathered for the classes that serve both packages."""

from __future__ import annotations

from lightning.fabric.plugins.io import TorchCheckpointIO

from lightning_faulttolerant.trainer import compat, recorded
from lightning_faulttolerant.trainer.evaluation.session import EvaluationSession
from lightning_faulttolerant.trainer.files.compat import HAS_WEIGHTS_ONLY, weights_only_argument
from lightning_faulttolerant.trainer.ledger.opened import OpenLedger, begins_while_off
from lightning_faulttolerant.trainer.ranks.process_group import can_be_evaluated, check_strategy
from lightning_faulttolerant.trainer.session import Session

__all__ = [
    "HAS_WEIGHTS_ONLY",
    "EvaluationSession",
    "OpenLedger",
    "Session",
    "TorchCheckpointIO",
    "begins_while_off",
    "can_be_evaluated",
    "check_strategy",
    "compat",
    "recorded",
    "weights_only_argument",
]

"""The command line ``lightning-faulttolerant``: list, verify and prune checkpoints without loading torch."""

from __future__ import annotations

from lightning_faulttolerant.cli.command import main

__all__ = ["main"]

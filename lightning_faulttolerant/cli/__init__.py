"""The command line ``lightning-faulttolerant``: look at checkpoints, verify and prune them, without loading torch."""

from __future__ import annotations

from lightning_faulttolerant.cli.command import main

__all__ = ["main"]

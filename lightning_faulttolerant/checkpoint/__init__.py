"""Checkpoints on disk: formats, the series of autosaves, verification, trust. Knows torch and files, not Lightning."""

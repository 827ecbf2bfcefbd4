"""Evaluation runs: their place, and how they continue there."""

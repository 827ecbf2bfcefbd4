"""Autosaves and captures: when they are due, what is in them, and what other checkpoints get from us."""

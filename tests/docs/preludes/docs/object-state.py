"""What docs/object-state.md takes for granted."""

from types import SimpleNamespace

simulator = SimpleNamespace(save=dict, load=print)

"""The names that docs/object-state.md assumes."""

from types import SimpleNamespace

simulator = SimpleNamespace(save=dict, load=print)

"""Branches: new runs that begin from a kept autosave of another one."""

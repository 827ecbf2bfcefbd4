"""Which run a fit belongs to: its command, how it starts, and where its autosaves are."""

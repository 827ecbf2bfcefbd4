"""The flight recorder: a step that went wrong is written down, with the state that it began with."""

"""Everything that knows Lightning: the callback, the boundary, and what is restored where in a Trainer's loops."""

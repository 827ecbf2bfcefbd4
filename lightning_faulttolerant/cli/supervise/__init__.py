"""``run``: start a script, and start it again after each failure, until it ends."""

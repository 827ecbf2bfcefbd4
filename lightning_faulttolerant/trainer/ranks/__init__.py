"""Several ranks: the messages between them, and how their states become one checkpoint and are split up again."""

"""Several ranks: what they tell one another, and how their states become one checkpoint and theirs again."""

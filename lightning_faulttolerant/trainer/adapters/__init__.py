"""State that Lightning's own callbacks keep and don't save or restore: one small adapter each."""

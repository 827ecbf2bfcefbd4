"""What Lightning's own callbacks keep and don't save or restore by themselves: one small adapter each."""

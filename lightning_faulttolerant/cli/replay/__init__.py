"""The command ``replay``: it runs any step of a run again."""

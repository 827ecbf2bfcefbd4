"""The command ``batch``: it shows which samples were in which batch of a run."""

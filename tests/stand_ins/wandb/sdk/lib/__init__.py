"""What stands for a run where W&B is switched off."""


class RunDisabled:
    """Does nothing."""

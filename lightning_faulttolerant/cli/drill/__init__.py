"""The drill: run the user's own script uninterrupted and with faults, and compare the two runs."""

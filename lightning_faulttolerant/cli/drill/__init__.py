"""The drill: run the user's own script uninterrupted and with faults, and compare what both have done."""

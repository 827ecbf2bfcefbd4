"""Single steps of a run: written to a ledger, noticed by the flight recorder, replayed, or left out."""

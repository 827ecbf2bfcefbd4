"""The ledger of a process: what it trained, batch by batch, to compare two runs."""

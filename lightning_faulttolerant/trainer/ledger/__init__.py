"""The ledger of a process: what it trained, batch by batch, for holding two runs against each other."""

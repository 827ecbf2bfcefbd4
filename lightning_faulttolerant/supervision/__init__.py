"""What a training process tells the process that supervises it, and how that one watches it. It imports no torch."""

"""What a fit or an evaluation tells the process that supervises it."""

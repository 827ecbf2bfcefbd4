"""Values that were logged, and what Lightning keeps of them."""

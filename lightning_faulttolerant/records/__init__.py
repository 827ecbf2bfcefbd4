"""The files that a run writes about itself, one JSON object per line. Reading them does not need torch."""

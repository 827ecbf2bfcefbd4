"""What a run writes about itself, one JSON object a line: read here, without torch, by whoever judges or draws it."""

"""``report``: the history of a run as text, JSON or a page, with its processes and its use of time."""

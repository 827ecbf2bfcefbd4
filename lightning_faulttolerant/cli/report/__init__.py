"""``report``: the history of a run, as text, JSON or a page: its processes, and where its time has gone."""

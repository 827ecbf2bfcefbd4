"""Callbacks of Lightning's that watch a run and change nothing in it: a resume lets them go on where they were."""

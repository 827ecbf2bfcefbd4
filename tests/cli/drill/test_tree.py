from __future__ import annotations

import os
import secrets
import sys
import time
from pathlib import Path

from lightning_faulttolerant.cli.drill.process import ProcessTree
from lightning_faulttolerant.processes import is_alive

# Starts a child in its own session, and that child another; each writes its process id.
PROGRAM = """
import os, subprocess, sys, time
depth, directory = int(sys.argv[1]), sys.argv[2]
open(os.path.join(directory, str(os.getpid())), "w").close()
if depth:
    subprocess.Popen([sys.executable, "-S", "-c", sys.argv[3], str(depth - 1), *sys.argv[2:]], start_new_session=True)
if depth == 1:
    sys.exit()
time.sleep(100)
"""


def test_all_that_a_process_has_started_is_killed(tmp_path: Path) -> None:
    """Children in their own sessions, and those with a dead parent, are killed too."""
    tree = ProcessTree(
        [sys.executable, "-S", "-c", PROGRAM, "2", str(tmp_path), PROGRAM],
        environment=os.environ,
        token=secrets.token_hex(4),
        output=tmp_path / "output",
    )
    tree.start()
    deadline = time.monotonic() + 60
    while len(found := [int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal()]) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert tree.exit_code is None
    tree.close()
    tree.close()
    assert tree.exit_code == -9
    assert not [process_id for process_id in found if is_alive(process_id) and not is_zombie(process_id)]


def is_zombie(process_id: int) -> bool:
    """Return whether a process is dead and its parent has not reaped it yet."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True

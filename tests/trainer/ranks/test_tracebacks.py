"""The traceback of an exception that ends one rank is printed once; other tracebacks are as Python prints them."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
from lightning_faulttolerant.trainer.ranks.watch import print_traceback

def fail():
    raise ZeroDivisionError("of the user")

try:
    fail()
except ZeroDivisionError as error:
    print_traceback(error, rank=1)
    if {again!r} == "same":
        raise
raise KeyError("another")
"""


@pytest.mark.parametrize(("again", "num_tracebacks"), [("same", 1), ("another", 2)])
def test_traceback_is_printed_once(again: str, num_tracebacks: int) -> None:
    """If the exception ends the process, Python adds one line; another exception keeps its own traceback."""
    script = SCRIPT.format(again=again)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback (most recent call last)") == num_tracebacks
    assert "[rank 1] FaultTolerance: an exception has ended this rank." in ended.stderr
    last = "[rank 1] Its traceback is printed above." if again == "same" else "KeyError: 'another'"
    assert ended.stderr.splitlines()[-1] == last

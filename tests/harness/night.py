"""The night: what takes longer than a submission may, in rotation by date, so that a week covers all of it.

``make night`` runs the pieces of today and notes their ends in ``tests/night.json``, which is committed. ``make night
PIECES="soak laws"`` runs some pieces on any day. The table of `main` says when each piece last ran, and which one has
not run for the longest time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
RESULTS = Path(__file__).parent.parent / "night.json"
NUM_NIGHTS = 7
_CLOSING_LINE = re.compile(r"^=== (.*) in [\d.]+s ===$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of the night.

    Args:
        commands: Arguments of ``make``, one command after the other; ``{seed}`` is the day's.
        nights: The nights of the rotation in which it runs, counted from 0; all of them if there are none.
        beside: Arguments of ``make`` for a command that runs again and again meanwhile.
    """

    commands: tuple[str, ...]
    nights: tuple[int, ...] = ()
    beside: str = ""


PIECES: Mapping[str, Piece] = {
    "laws": Piece(commands=("test LAWS_SEED={seed} PYTEST_ARGS=tests/laws",)),
    "soak": Piece(commands=("soak HOURS=1",)),
    **{f"slow {i + 1}": Piece(commands=(f"slow PART={i}/{NUM_NIGHTS}",), nights=(i,)) for i in range(NUM_NIGHTS)},
    **{f"oldest {i + 1}": Piece(commands=(f"oldest PART={i}/{NUM_NIGHTS}",), nights=(i,)) for i in range(NUM_NIGHTS)},
    "python3.10": Piece(commands=("versions VERSIONS=python3.10",), nights=(0, 3)),
    "python3.13": Piece(commands=("versions VERSIONS=python3.13",), nights=(1, 4)),
    "newest torch": Piece(commands=("versions VERSIONS=torch",), nights=(2, 5)),
    "docs and wheel": Piece(commands=("docs", "dist"), nights=(6,)),
    "three times": Piece(commands=("test", "test", "test"), nights=(6,), beside="test JOBS=2"),
}


def pieces_of(day: datetime.date) -> list[str]:
    """Return the names of the pieces of a day."""
    night = day.toordinal() % NUM_NIGHTS
    return [name for name, piece in PIECES.items() if not piece.nights or night in piece.nights]


def run(piece: Piece, day: datetime.date) -> tuple[bool, str]:
    """Run a piece; return whether it passed, and its closing lines."""
    beside = [_again_and_again(piece.beside) for _ in range(2 if piece.beside else 0)]
    passed, lines = True, []
    try:
        for command in piece.commands:
            words = command.format(seed=f"{day:%Y%m%d}").split()
            output = []
            with subprocess.Popen(
                ["make", *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            ) as process:
                for line in process.stdout or ():
                    print(line, end="", flush=True)
                    output.append(line)
            passed &= process.returncode == 0
            lines += _CLOSING_LINE.findall("".join(output)) or [f"make {words[0]}: exit code {process.returncode}"]
    finally:
        for each in beside:
            os.killpg(each.pid, signal.SIGKILL)
    return passed, "; ".join(lines)


def _again_and_again(command: str) -> subprocess.Popen[bytes]:
    """Start a suite that makes the machine busy, in a clone of its own."""
    script = f'set -e; cd "$(mktemp -d)"; git clone -q "{ROOT}" busy; cd busy; while :; do make {command} || :; done'
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(["bash", "-c", script], stdout=nowhere, stderr=nowhere, start_new_session=True)


def read() -> dict[str, dict[str, str]]:
    """Return the last result of each piece that has run."""
    found: dict[str, dict[str, str]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return {name: found[name] for name in PIECES if name in found}


def note(name: str, day: datetime.date, *, passed: bool, lines: str, seconds: float) -> None:
    """Note the result of a piece."""
    result = {
        "date": f"{day}",
        "outcome": "passed" if passed else "FAILED",
        "tests": lines,
        "minutes": f"{seconds / 60:.0f}",
    }
    RESULTS.write_text(json.dumps({**read(), name: result}, indent=1) + "\n")


def table(results: Mapping[str, Mapping[str, str]]) -> str:
    """Return when each piece last ran, and which one has not run for the longest time."""
    lines = [
        f"{name:16} {results[name]['date']}  {results[name]['outcome']}  {results[name]['tests']}"
        if name in results
        else f"{name:16} never"
        for name in PIECES
    ]
    oldest = min(PIECES, key=lambda name: results.get(name, {}).get("date", ""))
    when = results.get(oldest, {}).get("date", "never")
    return "\n".join([*lines, f"not run for the longest time: {oldest} ({when})"])


def main() -> int:
    """Run the pieces of today, or those that are named; return 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only print when each piece last ran")
    parser.add_argument("pieces", nargs="*", help=", ".join(PIECES))
    arguments = parser.parse_args()
    day, failed = datetime.date.today(), False
    for name in [] if arguments.table else arguments.pieces or pieces_of(day):
        began = time.monotonic()
        passed, lines = run(PIECES[name], day)
        note(name, day, passed=passed, lines=lines, seconds=time.monotonic() - began)
        failed |= not passed
    print(table(read()))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

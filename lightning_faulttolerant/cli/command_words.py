"""The command that a user gives to a command of ours, after its own options."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence


def add_command_words(parser: argparse.ArgumentParser) -> None:
    """Declare the command that starts the user's script.

    Args:
        parser: The parser of our command.
    """
    parser.add_argument(
        "words",
        metavar="COMMAND",
        nargs=argparse.PARSER,  # all words after the first belong to the script's command, even without --
        help="the command that starts your script, with its arguments; after --",
    )


def command_words(words: Sequence[str]) -> tuple[str, ...]:
    """Return the command. Before 3.12.5, Python leaves the ``--`` in front of it."""
    return tuple(words[1:] if words[0] == "--" else words)


def fault_of_command(program: str) -> str | None:
    """Return why a program can't be started, or ``None`` if it can."""
    if shutil.which(program) is not None:
        return None
    if not os.path.isfile(program):
        return f"{program}: no such command"
    may_be = f"python {program} may be meant" if program.endswith(".py") else f"chmod +x {program} makes it one"
    return f"{program}: a file, but no command; {may_be}"


def at_least_1(text: str) -> int:
    """Return a number of an option.

    Raises:
        argparse.ArgumentTypeError: If it is not a whole number from 1.
    """
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1")
    return number

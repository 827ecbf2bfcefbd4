"""The command line ``lightning-faulttolerant``: the table of commands and their exit statuses.

It lists, verifies, and prunes checkpoints without loading torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module, metadata

from lightning_faulttolerant.cli.text import reason_of, safe
from lightning_faulttolerant.early_signals import EARLY
from lightning_faulttolerant.errors import FaultToleranceError

_PROGRAM = "lightning-faulttolerant"
_ERROR = 2
_INTERRUPTED = 130
_BROKEN_PIPE = 141

# A command's module is loaded only when that command is requested, so no command waits for another one's imports.
_COMMANDS = {
    "list": ("listing", "list the runs of this directory, or the checkpoints below another one, verified or damaged"),
    "inspect": ("inspection", "show the contents of a checkpoint, without loading it"),
    "verify": ("verification", "verify checkpoints by their checksums, for scripts"),
    "discard": ("discarding", "let the next start of a run begin from the beginning"),
    "prune": ("pruning", "delete old autosaves"),
    "export": ("exporting", "make one plain file of an autosave that shares tensors with others"),
    "report": ("report", "show the history of a run, and where its time went"),
    "run": ("run", "run a script, and start it again after each failure, until it ends"),
    "drill": ("drill.command", "prove on your own script that an interrupted run equals an uninterrupted one"),
    "replay": ("replay", "run a step of a run again, exactly as it was"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; defaults to the arguments of the process.

    Returns:
        The exit status: 0 for success, 1 as each command documents, 2 for wrong usage or unreadable input, 130 if
        interrupted, 141 if the reader of the output has gone away.
    """
    EARLY.give_back()  # nothing is trained here
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # an odd file name must not cause a traceback
    try:
        words = sys.argv[1:] if argv is None else list(argv)
        arguments = _parser(words).parse_args(words)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else _ERROR
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more at exit and would report the same error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (OSError, FaultToleranceError) as error:
        print(f"{_PROGRAM}: {safe(reason_of(error))}", file=sys.stderr)
        return _ERROR
    return status


class _ShowVersion(argparse.Action):
    """An option that looks up the version only when requested: the lookup takes longer than everything else here."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(metadata.version(_PROGRAM))
        parser.exit()


def _asked_for(words: Sequence[str]) -> str | None:
    """Return the name of the command: the first word that is not an option, since no option before it takes a value."""
    first = next((word for word in words if not word.startswith("-")), None)
    return first if first in _COMMANDS else None


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser that lists all commands and declares the arguments of the requested one."""
    asked_for = _asked_for(words)
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description=(
            "Show, verify, and prune the checkpoints of a run, without loading them or running code in them. Drill a"
            " script: kill it, and compare it with an uninterrupted run."
        ),
        epilog=f"Help on a command: {_PROGRAM} COMMAND --help",
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (module, text) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name == asked_for:
            loaded = import_module(f"lightning_faulttolerant.cli.{module}")
            command.description, command.epilog = loaded.DESCRIPTION, loaded.EPILOG
            loaded.add_arguments(command)
            command.set_defaults(run=loaded.run)
    return parser


__all__ = ["main"]

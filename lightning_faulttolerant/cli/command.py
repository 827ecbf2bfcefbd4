"""The command line as a whole: which commands there are, and how each ends."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from lightning_faulttolerant.cli import inspection, listing, pruning, verification
from lightning_faulttolerant.cli.errors import reason_of
from lightning_faulttolerant.cli.text import safe
from lightning_faulttolerant.errors import FaultToleranceError

_PROGRAM = "lightning-faulttolerant"
_ERROR = 2
_INTERRUPTED = 130
_BROKEN_PIPE = 141

_COMMANDS = {
    "list": (listing, "list the checkpoints below a directory, verified or damaged"),
    "inspect": (inspection, "show what is in a checkpoint, without loading it"),
    "verify": (verification, "verify checkpoints by their checksums, for scripts"),
    "prune": (pruning, "delete old autosaves"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; those of the process if not given.

    Returns:
        The exit status: 0 done, 1 as each command says, 2 wrong usage or something that can't be read, 130 interrupted,
        141 nobody reads the output any more.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # no name of a file is worth a traceback
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else _ERROR
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more when it ends, and would report the same again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (OSError, FaultToleranceError) as error:
        print(f"{_PROGRAM}: {safe(reason_of(error))}", file=sys.stderr)
        return _ERROR
    return status


class _ShowVersion(argparse.Action):
    """Looks the version up when it is asked for: that takes longer than everything else here."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(metadata.version(_PROGRAM))
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Look at the checkpoints of a run, verify and prune them. None is loaded, no code in one is run.",
        epilog=f"Help on a command: {_PROGRAM} COMMAND --help",
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (module, text) in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=text,
            description=module.DESCRIPTION,
            epilog=module.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser

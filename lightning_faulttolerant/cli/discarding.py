"""``discard``: let the next start of a run begin from the beginning."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys

from lightning_faulttolerant.checkpoint.autosave_files import fit_folders, fit_number
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.cli.found import meant, registry_here
from lightning_faulttolerant.cli.text import reason_of, remote_errors, safe
from lightning_faulttolerant.errors import CheckpointError, RunInUseError
from lightning_faulttolerant.records.runs import FILE_NAME
from lightning_faulttolerant.storage.lock import open_lock
from lightning_faulttolerant.storage.store import Store, open_store

DESCRIPTION = """\
Let the next start of a run begin from the beginning. RUN is the name of the run, as "list" shows it in the directory
where the run was started, or the directory of the run.

The autosaves are not deleted. They are moved to a directory "superseded-..." in the directory of each fit. To use them
again, move them back.
"""
EPILOG = """\
Exit status: 0 done, 1 the run is in use, or has no autosaves, 2 the run does not exist, or can't be read.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``discard``.

    Args:
        parser: The parser of this command.
    """
    parser.add_argument("run_name", metavar="RUN", help="name of a run, its directory, or its URL")


def run(arguments: argparse.Namespace) -> int:
    """Set the autosaves aside, and print where they are.

    Args:
        arguments: The parsed arguments.

    Returns:
        The exit status.
    """
    store = open_store(meant(arguments.run_name))
    with remote_errors(store.url):
        store.listing()  # a lock must not create a directory that a typing error names
    try:
        with open_lock(store.url):
            aside = _set_aside(store)
    except RunInUseError as error:
        print(safe(reason_of(error)), file=sys.stderr)
        return 1
    registry_here().remove(store.url)
    if not aside:
        print(f"{safe(store.url)} has no autosaves.", file=sys.stderr)
        return 1
    for path in aside:
        print(f"set aside: {safe(path)}")
    print("The next start starts from scratch.")
    return 0


def _set_aside(store: Store) -> list[str]:
    folders = fit_folders(store.listing().folders)
    if fit_number(os.path.basename(store.url.rstrip("/"))) and not folders:
        raise CheckpointError(
            f"{store.url} is the directory of one fit. Pass the directory of the run, which is above it."
        )
    # The last fit comes first. If this process is killed, the first fits are left, and a run continues from those.
    series = [AutosaveSeries(store.path(name), keep_last=1) for name in reversed(folders)]
    aside = [path for one in series if (path := one.set_aside("discarded")) is not None]
    with contextlib.suppress(FileNotFoundError):
        store.delete(FILE_NAME)
    return aside

"""``export``: make one plain file of an autosave, which can be copied and loaded alone."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from typing import IO, cast

from lightning_faulttolerant.checkpoint.archive import find_damage
from lightning_faulttolerant.checkpoint.checked_file import CHUNK_BYTES
from lightning_faulttolerant.checkpoint.joined_file import find_whole_damage, opened_whole
from lightning_faulttolerant.checkpoint.manifest import describe_damage
from lightning_faulttolerant.cli.found import open_checkpoint
from lightning_faulttolerant.cli.text import reason_of, remote_errors, safe, size_text
from lightning_faulttolerant.errors import CheckpointError, DamagedCheckpointError
from lightning_faulttolerant.storage.store import is_url, local_path, open_file, open_store, split_path

DESCRIPTION = """\
Write an autosave to OUTPUT as one plain file, which torch.load reads without this package. An autosave of
FaultTolerance(incremental=True) refers to tensors in another file, its base, and can't be copied or loaded alone; the
plain file contains them. Any other autosave is copied.

All bytes are verified before OUTPUT appears. A Trainer continues from it with ckpt_path=OUTPUT.
"""
EPILOG = """\
Exit status: 0 written, 1 the autosave or its base is damaged, 2 it can't be read, or OUTPUT exists or can't be written.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``export``.

    Args:
        parser: The parser of this command.
    """
    parser.add_argument("autosave", metavar="AUTOSAVE", help="path or URL of an autosave, a file")
    parser.add_argument("output", metavar="OUTPUT", help="path or URL of the new file, which must not exist")


def run(arguments: argparse.Namespace) -> int:
    """Write the plain file, and print its size.

    Args:
        arguments: The parsed arguments.

    Returns:
        The exit status.
    """
    source, output = arguments.autosave, arguments.output
    directory, name = split_path(output)
    if not name:
        raise CheckpointError(f"{output} is a directory. Pass the path of a file.")
    _refuse_directory(source)
    with remote_errors(output):
        if name in open_store(directory).names():
            raise CheckpointError(f"{output} exists. Delete it first, or choose another name.")
    try:
        num_bytes = _export(source, directory, name)
    except DamagedCheckpointError as damage:
        print(safe(reason_of(damage)), file=sys.stderr)
        return 1
    print(f"{safe(output)}: {size_text(num_bytes)}")
    return 0


def _refuse_directory(source: str) -> None:
    if not is_url(source) and os.path.isdir(local_path(source)):
        raise CheckpointError(
            f"{source} is a directory of shards, which is never incremental. Pass an autosave that is one file."
        )


def _export(source: str, directory: str, name: str) -> int:
    with remote_errors(source), opened_whole(source, lambda path: open_checkpoint(path, whole=True)) as file:
        damage = find_whole_damage(file)
        if damage is not None:
            raise DamagedCheckpointError(describe_damage(source, damage))
        file.seek(0)
        store = open_store(directory)
        with store.writer(name) as copy:
            shutil.copyfileobj(file, copy, CHUNK_BYTES)
            num_bytes = copy.tell()
            if not is_url(directory):
                _verify(source, copy)
    return num_bytes


def _verify(source: str, copy: IO[bytes]) -> None:
    """Read the copy again: the autosave may have changed since it was verified."""
    copy.flush()
    with open_file(cast("str", copy.name)) as written:
        damage = find_damage(written)
    if damage is not None:
        raise DamagedCheckpointError(f"The copy of {source} does not read back as it was written: {damage}.")

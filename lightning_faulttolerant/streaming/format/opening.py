"""Opens a shard with the reader of its format."""

from __future__ import annotations

from lightning_faulttolerant.errors import UnsafeDataError
from lightning_faulttolerant.streaming.format.info import ShardInfo
from lightning_faulttolerant.streaming.format.layout import layout_of
from lightning_faulttolerant.streaming.format.mds_reader import MDSReader
from lightning_faulttolerant.streaming.format.shard import ShardReader
from lightning_faulttolerant.streaming.format.text_reader import JSONReader, XSVReader

_READERS: dict[str, type[ShardReader]] = {
    "mds": MDSReader,
    "json": JSONReader,
    "csv": XSVReader,
    "tsv": XSVReader,
    "xsv": XSVReader,
}


def open_shard(info: ShardInfo, directory: str, *, allow_unsafe_types: bool = False) -> ShardReader:
    """Open a shard with local, uncompressed files.

    Args:
        info: The shard's index entry.
        directory: The directory of the split.
        allow_unsafe_types: Whether to read pickled columns, too. They run any code that their bytes contain.

    Raises:
        UnsafeDataError: If a column is pickled and that is not allowed; none of its bytes has been read.
        MissingShardError: If a file is missing.
        DamagedShardError: If it doesn't match the index.
    """
    if not allow_unsafe_types:
        check_safe(info)
    return _READERS[info.format](info, directory)


def check_safe(info: ShardInfo) -> None:
    """Raise UnsafeDataError if reading a shard may run code from it."""
    name = layout_of(info.columns).unsafe_column() if info.format == "mds" else None
    if name is not None:
        raise UnsafeDataError(
            f"Column {name!r} of {info.files[0].basename} is pickled: whoever wrote the shard can run any code here "
            f"when it is read. If you trust the source, pass allow_unsafe_types=True."
        )

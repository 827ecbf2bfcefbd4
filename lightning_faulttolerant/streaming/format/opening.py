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
    """Open a shard whose files are here, uncompressed.

    Args:
        info: What the index says of it.
        directory: Of the split.
        allow_unsafe_types: Read pickled columns too. They run whatever code their bytes ask for.

    Raises:
        UnsafeDataError: If a column is pickled and that is not allowed; no byte of it has been read.
        MissingShardError: If a file is not there.
        DamagedShardError: If it is not what the index says.
    """
    if not allow_unsafe_types:
        check_safe(info)
    return _READERS[info.format](info, directory)


def check_safe(info: ShardInfo) -> None:
    """Raise UnsafeDataError if reading a shard may run code that is in it."""
    name = layout_of(info.columns).unsafe_column() if info.format == "mds" else None
    if name is not None:
        raise UnsafeDataError(
            f"Column {name!r} of {info.files[0].basename} is pickled: whoever wrote the shard can run any code here "
            f"when it is read. If you trust the source, pass allow_unsafe_types=True."
        )

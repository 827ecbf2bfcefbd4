import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from lightning_faulttolerant.errors import DamagedShardError
from lightning_faulttolerant.streaming.format.codecs import (
    COMPRESSIONS,
    compress,
    decompress_file,
    extension,
    is_known_compression,
)
from tests.foreign import mosaic

FAMILIES = ("br", "bz2", "gz", "snappy", "zstd")
# Half of it is noise, so no block can be stored as a run.
CONTENT = np.random.default_rng(0).integers(0, 256, 3000, np.uint8).tobytes() + b"text " * 600
# Levels are slow on much data, and little compressed data already exceeds the part size of one megabyte.
LONG = bytes(3 << 20)


def decompressed(data: bytes, algorithm: str, directory: Path, *, num_bytes: int) -> bytes:
    """Return the output of `decompress_file` for bytes."""
    (directory / "zipped").write_bytes(data)
    decompress_file(str(directory / "zipped"), str(directory / "raw"), algorithm, num_bytes=num_bytes)
    return (directory / "raw").read_bytes()


def test_the_algorithms_are_those_of_the_original() -> None:
    """Every algorithm, level, and extension of the original is known, and no other."""
    original = mosaic("streaming.base.compression")
    assert set(COMPRESSIONS) == original.get_compressions()
    assert all(extension(name) == original.get_compression_extension(name) for name in COMPRESSIONS)
    assert not any(map(is_known_compression, ("lz4", "zstd:0", "zstd:23", "br:12", "snappy:1", "gz:", "", None)))
    with pytest.raises(ValueError, match="compression 'lz4' is unknown"):
        extension("lz4")


@pytest.mark.parametrize("algorithm", COMPRESSIONS)
def test_each_library_reads_what_the_other_wrote(algorithm: str, tmp_path: Path) -> None:
    """Bytes compressed by us are decompressed by the original, and the reverse, at each level."""
    original = mosaic("streaming.base.compression")
    assert original.decompress(algorithm, compress(CONTENT, algorithm)) == CONTENT
    theirs = original.compress(algorithm, CONTENT)
    assert decompressed(theirs, algorithm, tmp_path, num_bytes=len(CONTENT)) == CONTENT


@pytest.mark.parametrize("family", FAMILIES)
def test_content_of_many_parts_comes_back(family: str, tmp_path: Path) -> None:
    """Content that is split into several parts comes back complete, and so does empty content."""
    assert decompressed(compress(LONG, family), family, tmp_path, num_bytes=len(LONG)) == LONG
    noise = np.random.default_rng(1).integers(0, 256, 2 << 20, np.uint8).tobytes()
    fast = family if family == "snappy" else f"{family}:1"
    assert decompressed(compress(noise, fast), family, tmp_path, num_bytes=len(noise)) == noise
    assert decompressed(compress(b"", family), family, tmp_path, num_bytes=0) == b""


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bytes_become_the_same_bytes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compressed bytes do not depend on the time of writing."""
    before = compress(CONTENT, family)
    monkeypatch.setattr("time.time", lambda: 1e9)
    assert compress(CONTENT, family) == before


@pytest.mark.parametrize("family", ["gz", "bz2", "zstd"])
def test_files_of_several_frames_come_back(family: str, tmp_path: Path) -> None:
    """Several compressed frames, one after the other, are one content."""
    both = compress(CONTENT, family) + compress(LONG, family)
    assert decompressed(both, family, tmp_path, num_bytes=len(CONTENT + LONG)) == CONTENT + LONG


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("difference", [-1, 1])
def test_content_of_another_size_is_refused(family: str, difference: int, tmp_path: Path) -> None:
    """Content shorter or longer than the index says is an error, and no file is left."""
    with pytest.raises(DamagedShardError, match="the index says"):
        decompressed(compress(CONTENT, family), family, tmp_path, num_bytes=len(CONTENT) + difference)
    assert not (tmp_path / "raw").exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_truncated_and_foreign_bytes_are_refused(family: str, tmp_path: Path) -> None:
    """A compressed file that is cut, empty, or of another kind is an error that says so."""
    data = compress(CONTENT, family)
    with pytest.raises(DamagedShardError):
        decompressed(b"", family, tmp_path, num_bytes=0)
    for cut in {0, 1, 2, 5, 9, len(data) // 2, len(data) - 1}:
        with pytest.raises(DamagedShardError):
            decompressed(data[:cut], family, tmp_path, num_bytes=len(CONTENT))
    for other in (b"\xff" * 100, b"no such thing", data[1:]):
        with pytest.raises(DamagedShardError):
            decompressed(other, family, tmp_path, num_bytes=len(CONTENT))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_flipped_byte_gives_content_of_another_size(family: str, tmp_path: Path) -> None:
    """A damaged file is refused or gives the expected size (a hash finds those); no other error is raised."""
    data = bytearray(compress(CONTENT, family))
    for at in range(0, len(data), 61):
        data[at] ^= 0x55
        try:
            assert len(decompressed(bytes(data), family, tmp_path, num_bytes=len(CONTENT))) == len(CONTENT)
        except DamagedShardError:
            assert not (tmp_path / "raw").exists()
        data[at] ^= 0x55


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bomb_is_not_decompressed(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file that expands to much more than the index says takes neither memory nor disk."""
    bomb = compress(bytes(32 << 20), family if family == "snappy" else f"{family}:1")
    left: list[int] = []
    monkeypatch.setattr("os.unlink", lambda path: left.append(Path(path).stat().st_size))
    tracemalloc.start()
    try:
        with pytest.raises(DamagedShardError):
            decompressed(bomb, family, tmp_path, num_bytes=1000)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert left[0] <= 1000


def test_a_missing_package_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error for a missing optional package names it, its purpose, and how to install it."""
    monkeypatch.setitem(__import__("sys").modules, "zstd", None)
    with pytest.raises(ImportError, match=r"zstd is needed .* pip install lightning-faulttolerant\[streaming\]"):
        compress(CONTENT, "zstd:3")

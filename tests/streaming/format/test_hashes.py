import hashlib
from pathlib import Path

import pytest

from lightning_faulttolerant.streaming.format.index import digest, digest_of, is_known_hash
from tests.foreign import mosaic

NAMES = sorted(mosaic("streaming.base.hashing").get_hashes())


@pytest.mark.parametrize("name", NAMES)
def test_digests_are_those_of_the_original(name: str, tmp_path: Path) -> None:
    """The digests of bytes and of a file read in parts are the original's, for each of its algorithms."""
    data = bytes(range(256)) * 5000
    (tmp_path / "file").write_bytes(data)
    expected = mosaic("streaming.base.hashing").get_hash(name, data)
    assert is_known_hash(name)
    assert digest_of(data, name) == digest(str(tmp_path / "file"), name) == expected


def test_the_algorithms_are_those_of_the_original() -> None:
    """No other algorithm is known, in particular none with a digest of variable length."""
    others = {"shake_128", "crc32", "", *hashlib.algorithms_available, None} - set(NAMES)
    assert len(NAMES) > 15
    assert not any(map(is_known_hash, others))
    with pytest.raises(ValueError, match="hash 'crc32' is unknown"):
        digest_of(b"", "crc32")


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without xxhash, its algorithms say what to install; those of Python work."""
    monkeypatch.setitem(__import__("sys").modules, "xxhash", None)
    with pytest.raises(ImportError, match=r"xxhash is needed for the hash xxh64 .*pip install"):
        digest_of(b"", "xxh64")
    assert digest_of(b"", "md5") == hashlib.md5(b"").hexdigest()

import json
import threading
import warnings
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lightning_faulttolerant.errors import IndexFileError
from lightning_faulttolerant.streaming import CSVWriter, MDSWriter, merge_index
from lightning_faulttolerant.streaming.format.output import LocalPlace
from tests.foreign import mosaic
from tests.streaming.format.shards import files, infos, read, write


def part(out: Path, first: int, *, writer_class: Any = MDSWriter, **options: Any) -> Path:
    """Write a data set of four samples in several shards."""
    return write(writer_class, out, {"i": "int"}, [{"i": first + i} for i in range(4)], size_limit=280, **options)


def numbers(directory: Path) -> list[int]:
    """Return the samples of a data set, in order."""
    return [sample["i"] for sample in read(directory)]


def test_all_below_a_directory_are_one_in_the_order_of_their_names(tmp_path: Path) -> None:
    """The merged index is that of the original, and it yields all samples, once."""
    for root in ("ours", "theirs"):
        for first, name in enumerate(("b", "10", "9", "a")):
            part(tmp_path / root / name, 10 * first, compression="gz" if name == "a" else None, hashes=["md5"])
        part(tmp_path / root / "text", 40, writer_class=CSVWriter)
    merge_index(str(tmp_path / "ours"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves each index open
        mosaic("streaming.base.util").merge_index(str(tmp_path / "theirs"))
    assert files(tmp_path / "ours")["index.json"] == files(tmp_path / "theirs")["index.json"]
    assert numbers(tmp_path / "ours") == [10, 11, 12, 13, 20, 21, 22, 23, 30, 31, 32, 33, 0, 1, 2, 3, 40, 41, 42, 43]


def test_listed_indexes_are_merged_in_their_order_each_once(tmp_path: Path) -> None:
    """Indexes are named by path or by their directory, and those that are not listed stay out."""
    for first, name in enumerate("abc"):
        part(tmp_path / name, 10 * first)
    listed = [str(tmp_path / "c" / "index.json"), str(tmp_path / "a/"), str(tmp_path / "c" / "index.json")]
    merge_index(listed, str(tmp_path))
    assert numbers(tmp_path) == [20, 21, 22, 23, 0, 1, 2, 3]
    merge_index(index_file_urls=listed[:1], out=str(tmp_path))
    assert numbers(tmp_path) == [20, 21, 22, 23]


def test_folders_in_folders_keep_their_whole_path_and_merged_ones_count_once(tmp_path: Path) -> None:
    """A data set two levels below is found by its path, and one that was merged before is not counted twice."""
    for first, name in enumerate(("x/1", "x/2", "y/1", "z")):
        part(tmp_path / name, 10 * first)
    merge_index(str(tmp_path / "x"))
    merge_index(str(tmp_path))
    merge_index(str(tmp_path))
    assert numbers(tmp_path) == [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23, 30, 31, 32, 33]
    assert {Path(info.files[0].basename).parent.as_posix() for info in infos(tmp_path)} == {"x/1", "x/2", "y/1", "z"}


def test_below_an_address_and_in_a_pair(tmp_path: Path) -> None:
    """Indexes are read from an address, and the merged one is written there; for a pair, to both or to the address."""
    remote = fsspec.filesystem("memory")
    for first, name in enumerate("ab"):
        part(tmp_path / name, 10 * first)
        remote.put(str(tmp_path / name), f"/merged/{name}", recursive=True)
    merge_index("memory://merged")
    expected = remote.cat_file("/merged/index.json")
    remote.rm_file("/merged/index.json")
    merge_index((str(tmp_path), "memory://merged"), keep_local=False)
    assert remote.cat_file("/merged/index.json") == expected
    assert not (tmp_path / "index.json").exists()
    pairs = [(str(tmp_path / name / "index.json"), f"memory://merged/{name}/index.json") for name in "ab"]
    (tmp_path / "b" / "index.json").unlink()
    merge_index(pairs, (str(tmp_path), "memory://merged"))
    assert (tmp_path / "index.json").read_bytes() == expected
    assert numbers(tmp_path)[-1] == 13
    remote.rm("/merged", recursive=True)


def test_what_can_not_be_merged_is_refused(tmp_path: Path) -> None:
    """An index that is missing, elsewhere, or damaged is an error, and no merged index is written or changed."""
    with pytest.raises(FileNotFoundError, match="nothing can be merged"):
        merge_index(str(tmp_path / "empty"))
    part(tmp_path / "elsewhere", 0)
    part(tmp_path / "root" / "a", 0)
    root = str(tmp_path / "root")
    with pytest.raises(ValueError, match="is not below"):
        merge_index([str(tmp_path / "elsewhere" / "index.json")], root)
    with pytest.raises(FileNotFoundError, match=r"No b/index\.json exists"):
        merge_index([str(tmp_path / "root" / "b" / "index.json")], root)
    index = tmp_path / "root" / "a" / "index.json"
    index.write_text(json.dumps(json.loads(index.read_text())).replace("shard.00000.mds", "../x"))
    with pytest.raises(IndexFileError, match="a/index"):
        merge_index(root)
    assert not (tmp_path / "root" / "index.json").exists()


def test_an_index_that_is_not_read_in_time_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A remote that does not answer does not hang the merge."""
    part(tmp_path / "a", 0)
    answer = threading.Event()
    monkeypatch.setattr(LocalPlace, "read", lambda self, name: answer.wait(20) and b"")
    with pytest.raises(TimeoutError, match=r"Not all indexes below .* were read within 0.01 s"):
        merge_index(str(tmp_path), download_timeout=0.01)
    answer.set()

"""A damaged file is refused, what can't be verified is said to be so, and a refusal to unpickle is not damage."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import re
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from hypothesis import given, settings, strategies as st
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant.checkpoint.contents import write_manifest
from lightning_faulttolerant.checkpoint.ranks import RankReader
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.verify import load_file, unsafe_paths, verify_file, verify_path
from lightning_faulttolerant.errors import CheckpointError, DamagedCheckpointError, UnsafeCheckpointError
from tests.damage import Payload
from tests.messages import plain

CONTENT = {"weights": torch.arange(5), "name": "x", "nested": {"losses": [1, 2.5]}}
LARGE = 100_000


def bytes_of(value: object) -> bytes:
    """Return a saved file."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


SOUND = bytes_of(CONTENT)
needs_the_switch = pytest.mark.skipif(
    not hasattr(torch.serialization, "set_crc32_options"), reason="torch < 2.6 always writes CRCs"
)


@contextlib.contextmanager
def no_checksums() -> Iterator[None]:
    """Let torch write no checksums."""
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(True)


@pytest.mark.parametrize("name", ["über.ckpt", "no suffix", "epoch=0-step=3.ckpt", "a.b.c.ckpt"])
def test_sound_file_verifies_and_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    """A file of torch verifies by buffer and by any name, which torch writes into it, and loads without a warning."""
    (tmp_path / "buffer").write_bytes(SOUND)
    torch.save(CONTENT, tmp_path / name)
    for path in (tmp_path / "buffer", tmp_path / name):
        verify_file(path)
        for place in (path, f"file://{path}"):
            assert verify_path(place).has_checksums
            assert load_file(place)["nested"] == CONTENT["nested"]
    assert not caplog.records


def test_url_gives_the_same_answers(tmp_path: Path) -> None:
    """In a store: sound, damaged, missing."""
    root = f"memory://{tmp_path.name}"
    fs = fsspec.filesystem("memory")
    fs.pipe_file(f"{root}/a.ckpt", SOUND)
    fs.pipe_file(f"{root}/bad.ckpt", SOUND[:-1])
    assert verify_path(f"{root}/a.ckpt").has_checksums
    assert load_file(f"{root}/a.ckpt")["nested"] == CONTENT["nested"]
    for name in ("bad.ckpt", "missing.ckpt"):
        for read in (verify_path, verify_file, load_file):
            with pytest.raises(DamagedCheckpointError, match=name):
                read(f"{root}/{name}")


def _foreign_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("folder/readme.txt", "hello")


def _lost_checksum(path: Path) -> None:
    """Make the checksum of one record 0, in both places."""
    with zipfile.ZipFile(io.BytesIO(SOUND)) as archive:
        crc = max(archive.infolist(), key=lambda record: record.file_size).CRC.to_bytes(4, "little")
    assert SOUND.count(crc) == 2
    path.write_bytes(SOUND.replace(crc, bytes(4)))


def _large_flipped(path: Path) -> None:
    """Flip a bit in the last part of a large record."""
    num_bytes = 17 << 20
    torch.save({"weights": torch.zeros(num_bytes, dtype=torch.uint8)}, path)
    with path.open("r+b") as file:
        file.seek(num_bytes)
        file.write(b"\1")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "a directory": lambda path: path.mkdir(),
    "text": lambda path: path.write_text("not a checkpoint"),
    "cut": lambda path: path.write_bytes(SOUND[: len(SOUND) // 2]),
    "of something else": _foreign_zip,
    "a lost checksum": _lost_checksum,
    "large, with a flipped bit": _large_flipped,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_message_names_the_path_and_the_reason(
    tmp_path: Path, snapshot: SnapshotAssertion, damage: Callable[[Path], object]
) -> None:
    """The error of verifying and of loading says which file it is about, and what is wrong with the file."""
    damage(tmp_path / "a.ckpt")
    said = set()
    for read in (verify_file, load_file):
        with pytest.raises(DamagedCheckpointError) as caught:
            read(tmp_path / "a.ckpt")
        said.add(re.sub(r"\b[0-9a-f]{8}\b", "CRC", plain(str(caught.value), DIR=tmp_path)))
    assert said == snapshot


@pytest.mark.parametrize("is_damage", [False, True])
def test_missing_permission_is_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_damage: bool) -> None:
    """A file that can't be read does not count as damaged, or it would be set aside; a bad disk is damage."""
    (tmp_path / "a.ckpt").write_bytes(SOUND)

    def fail(*args: object, **options: object) -> None:
        raise OSError(errno.EIO, "bad disk") if is_damage else PermissionError(errno.EACCES, "not yours")

    monkeypatch.setattr("builtins.open", fail)
    with pytest.raises(DamagedCheckpointError if is_damage else PermissionError, match=r"bad disk|not yours"):
        verify_file(tmp_path / "a.ckpt")


def test_file_without_checksums_is_said_to_be_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, snapshot: SnapshotAssertion
) -> None:
    """It is not damaged; it loads with one warning, in a series too, and the answer says in words what is missing."""
    files = [tmp_path / name for name in ("a.ckpt", "b.ckpt", "old.ckpt")]
    series = AutosaveSeries(tmp_path / "series")
    newest = ""
    for number in range(2):
        newest = series.save({"number": number}, epoch=0, batch=number, global_step=number)
    with no_checksums():
        for path in files[:2]:
            torch.save({**CONTENT, "large": torch.arange(LARGE)}, path)
        torch.save({"number": 1}, newest)
    torch.save(CONTENT, files[2], _use_new_zipfile_serialization=False)
    for path in files:
        verification = verify_path(path)
        assert not verification.has_checksums
        assert verification.num_bytes == path.stat().st_size
        for _ in range(2):
            assert load_file(path)["nested"] == CONTENT["nested"]
    assert str(AutosaveSeries(tmp_path / "series").newest()) == newest
    assert load_file(newest) == {"number": 1}
    assert [sum(str(path) in record.getMessage() for record in caplog.records) for path in (*files, newest)] == [1] * 4
    said = [str(verify_path(path)) for path in files]
    assert plain("\n".join([*said, caplog.messages[0]]), DIR=tmp_path) == snapshot


@needs_the_switch
def test_file_without_checksums_is_refused_where_its_layout_is_damaged(tmp_path: Path) -> None:
    """Truncation is detected without any checksum; in the old format, a failure to load claims nothing of damage."""
    path = tmp_path / "a.ckpt"
    with no_checksums():
        torch.save(CONTENT, path)
    data = path.read_bytes()
    for size in range(0, len(data), 5):
        path.write_bytes(data[:size])
        with pytest.raises(DamagedCheckpointError):
            verify_file(path)
    torch.save(CONTENT, path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    for size in range(len(data) // 2, len(data), 16):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"a\.ckpt") as caught:
            load_file(path)
        assert not isinstance(caught.value, DamagedCheckpointError)


LOADS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "file": load_file,
    "rank": lambda path: RankReader(rank=0, num_ranks=1).load(path, verifies_all=True),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("at", [0, 0.5, 1])
@pytest.mark.parametrize("key", ["a", "b"])
def test_a_flipped_bit_in_a_large_tensor_is_found(tmp_path: Path, load: Any, at: float, key: str) -> None:
    """The values of a tensor are compared as torch reads them, also of one that several share; views still share."""
    path = tmp_path / "a.ckpt"
    large = {"a": torch.arange(LARGE), "b": torch.rand(LARGE)}
    torch.save({**large, "view": large["a"][5:]}, path)
    loaded = load(path)
    assert torch.equal(loaded["a"], large["a"])
    assert loaded["view"].untyped_storage().data_ptr() == loaded["a"].untyped_storage().data_ptr()
    data, content = bytearray(path.read_bytes()), large[key].numpy().tobytes()
    data[data.index(content) + int(at * (len(content) - 1))] ^= 4
    path.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match=r"record a/data/\d has CRC32 \w+, but was written with"):
        load(path)


def test_damage_comes_before_a_refusal(tmp_path: Path) -> None:
    """A file with an object that torch refuses is damaged first: an older one may be sound."""
    path = tmp_path / "a.ckpt"
    torch.save({"large": torch.zeros(LARGE), "own": Payload(tmp_path / "made")}, path)
    with pytest.raises(UnsafeCheckpointError):
        load_file(path)
    data = bytearray(path.read_bytes())
    data[data.index(bytes(4 * LARGE)) + 9] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedCheckpointError):
        load_file(path)


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_disk_error_in_a_large_tensor_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Any) -> None:
    """A file is read about once; an error in its middle is damage, whatever torch makes of it."""
    path, num_read, fails = tmp_path / "a.ckpt", 0, False
    torch.save({"a": torch.arange(LARGE), "b": torch.rand(LARGE)}, path)
    real = open

    class Bad(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            nonlocal num_read
            num_read += (got := super().readinto(buffer) or 0)
            if fails and self.tell() > 10 * LARGE:
                raise OSError(errno.EIO, "Input/output error")
            return got

    def bad_open(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        return Bad(file) if os.fspath(file) == str(path) else real(file, mode, *args, **options)

    monkeypatch.setattr("builtins.open", bad_open)
    load(path)
    assert 0 < num_read < 1.1 * path.stat().st_size
    fails = True
    with pytest.raises(DamagedCheckpointError, match="Input/output error"):
        load(path)


@pytest.mark.parametrize("legacy", [False, True])
def test_refusal_to_unpickle_is_not_damage(tmp_path: Path, legacy: bool) -> None:
    """A file with code in it verifies, runs nothing in any of our readers, and is refused as unsafe, not damaged."""
    path = tmp_path / "checkpoint" / "a.ckpt"
    path.parent.mkdir()
    torch.save({"callbacks": Payload(tmp_path / "made")}, path, _use_new_zipfile_serialization=not legacy)
    verify_file(path)
    write_manifest(path.parent)
    verify_path(path.parent)
    with pytest.raises(UnsafeCheckpointError, match="can't be verified" if legacy else "is not damaged") as caught:
        load_file(path)
    assert caught.value.__cause__ is not None
    assert not (tmp_path / "made").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "made").exists(), "this file runs nothing: the test could not have failed"


@pytest.mark.filterwarnings("ignore:'torch.load' received a zip file that looks like a TorchScript:UserWarning")
def test_code_in_other_records_does_not_run(tmp_path: Path) -> None:
    """If any record of a valid zip with right checksums holds a pickle, our readers do not run it."""
    evil = pickle.dumps(Payload(tmp_path / "made"), protocol=2)
    with zipfile.ZipFile(io.BytesIO(SOUND)) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    for replaced in [*contents, "archive/constants.pkl", "archive/attributes.pkl"]:
        writer = torch._C.PyTorchFileWriter(str(tmp_path / "archive"))
        for name, content in {**contents, replaced: evil}.items():
            record = name.split("/", 1)[1]
            if record not in ("version", ".data/serialization_id"):  # it writes these itself
                writer.write_record(record, content, len(content))
        writer.write_end_of_file()
        verify_path(tmp_path / "archive")
        with contextlib.suppress(CheckpointError, RuntimeError, ValueError):
            load_file(tmp_path / "archive")
        assert not (tmp_path / "made").exists(), replaced


def test_content_that_is_no_dict_is_refused(tmp_path: Path) -> None:
    """A file whose content is not a checkpoint is refused with the type that was found."""
    torch.save([1, 2], tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="holds a list"):
        load_file(tmp_path / "a.ckpt")


class Color(Enum):
    """A class that torch refuses."""

    RED = 1


def _tensor_with_attribute() -> torch.Tensor:
    tensor = torch.zeros(2)
    tensor.source = Path("/data")  # type: ignore[attr-defined]
    return tensor


def _state_dict_with_metadata(value: object) -> OrderedDict[str, Any]:
    state: OrderedDict[str, Any] = torch.nn.Linear(1, 1).state_dict()
    state._metadata["extra"] = value  # type: ignore[attr-defined]
    return state


def _cycle() -> list[Any]:
    shared: list[Any] = [Path("/a")]
    shared.append(shared)
    return shared


SHARED = _cycle()


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [
        ({"epoch": 3, "name": "x", "loss": 0.5, "done": True, "none": None, "raw": b"\x00\xff"}, []),
        ({"state_dict": torch.nn.Linear(2, 2).state_dict(), "parameter": torch.nn.Parameter(torch.zeros(2))}, []),
        ({"sizes": torch.Size([2]), "dtype": torch.float16, "order": OrderedDict(a=1)}, []),
        ({"raw": b"", "large": 2**3000, "small": -(2**70)}, ["raw", "large"]),
        ({"callbacks": {"MyCallback": {"config": Path("/a"), "best": 0.1}}}, ["callbacks/MyCallback/config"]),
        ({"optimizer_states": [{"state": {0: {"step": Path("/a")}}}]}, ["optimizer_states/0/state/0/step"]),
        ({"pair": (1, Color.RED), "function": print, "lambda": lambda: 0}, ["pair/1", "function", "lambda"]),
        ({"table": {Color.RED: 1}}, ["table/key <Color.RED: 1>"]),
        ({"groups": defaultdict(list)}, ["groups"]),
        ({"tensor": _tensor_with_attribute()}, ["tensor"]),
        ({"model": _state_dict_with_metadata(Path("/a"))}, ["model/_metadata/extra"]),
        ({"model": _state_dict_with_metadata(1)}, []),
        ({"first": SHARED, "second": SHARED}, ["first/0"]),
    ],
)
def test_unsafe_paths_names_what_would_not_load(checkpoint: dict[str, Any], expected: list[str]) -> None:
    """The answer is the places that torch.load(weights_only=True) refuses, each once, even in a cycle."""
    assert unsafe_paths(checkpoint) == expected
    if not expected:
        torch.load(io.BytesIO(bytes_of(checkpoint)), weights_only=True)


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.integers(-(2**80), 2**80),
    st.just(2**3000),
    st.text(),
    st.binary(),
    st.builds(torch.zeros, st.integers(0, 3)),
    st.sampled_from([torch.float32, Path("/a"), Color.RED]),
)
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(database=None, max_examples=50)
@given(checkpoint=st.dictionaries(st.text() | st.integers() | st.binary(max_size=2), NESTED, max_size=4))
def test_unsafe_paths_is_empty_exactly_where_the_whole_loads(checkpoint: dict[Any, Any]) -> None:
    """The walk agrees with torch about any nesting of values."""
    try:
        torch.load(io.BytesIO(bytes_of(checkpoint)), weights_only=True)
    except pickle.UnpicklingError:
        assert unsafe_paths(checkpoint) != []
    else:
        assert unsafe_paths(checkpoint) == []


def test_unsafe_paths_does_not_write_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check does not copy a model's tensors."""
    saved: list[object] = []
    monkeypatch.setattr(torch, "save", lambda value, buffer: saved.append(value))
    unsafe_paths({"state_dict": torch.nn.Linear(2, 2).state_dict(), "loops": [torch.zeros(2)]})
    assert saved == []

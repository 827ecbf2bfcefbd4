"""A changed byte is detected or harmless, and a refusal to unpickle is not damage."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict, defaultdict
from enum import Enum
from pathlib import Path

import fsspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from lightning_faulttolerant.checkpoint.archive import find_damage
from lightning_faulttolerant.checkpoint.checked_file import CHUNK_BYTES
from lightning_faulttolerant.checkpoint.contents import write_manifest
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.verify import load_file, unsafe_paths, verify_file, verify_path
from lightning_faulttolerant.errors import CheckpointError, DamagedCheckpointError, UnsafeCheckpointError

CONTENT = {"weights": torch.arange(5), "name": "x", "nested": {"losses": [1, 2.5]}}


def _bytes_of(obj: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getvalue()


SOUND = _bytes_of(CONTENT)


def _is_detected_or_harmless(path: Path, data: bytes) -> bool:
    path.write_bytes(data)
    try:
        verify_file(path)
    except DamagedCheckpointError:
        return True
    loaded = torch.load(path, weights_only=True)
    same = torch.equal(loaded["weights"], CONTENT["weights"]) and loaded["weights"].dtype == torch.int64
    return same and {**loaded, "weights": None} == {**CONTENT, "weights": None}


def test_sound_file_verifies_and_loads(tmp_path):
    """A file that torch.save wrote must verify, by buffer and by name, and load as it was."""
    (tmp_path / "buffer.ckpt").write_bytes(SOUND)
    torch.save(CONTENT, tmp_path / "name.ckpt")
    for path in tmp_path.iterdir():
        verify_file(path)
        assert load_file(path)["nested"] == CONTENT["nested"]


@pytest.mark.parametrize("name", ["über.ckpt", "no suffix", "epoch=0-step=3.ckpt", "a.b.c.ckpt"])
def test_any_file_name_verifies(tmp_path, name):
    """The file's name, which torch writes into its records, must not matter."""
    torch.save(CONTENT, tmp_path / name)
    verify_file(tmp_path / name)


@settings(database=None, deadline=None, max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, len(SOUND) - 1), flip=st.integers(1, 255))
def test_any_changed_byte_is_detected_or_harmless(tmp_path, position, flip):
    """Wherever a byte changes, the file must be refused or load exactly as before."""
    data = bytearray(SOUND)
    data[position] ^= flip
    assert _is_detected_or_harmless(tmp_path / "a.ckpt", bytes(data))


@pytest.mark.parametrize("flip", [0x01, 0xFF])
def test_each_changed_byte_is_detected_or_harmless(tmp_path, flip):
    """Each position in the file must be tried."""
    missed = []
    for position in range(len(SOUND)):
        data = bytearray(SOUND)
        data[position] ^= flip
        if not _is_detected_or_harmless(tmp_path / "a.ckpt", bytes(data)):
            missed.append(position)
    assert missed == []


def _without_meaning() -> set[int]:
    """Return the bytes that may change: torch's padding between header and content, and the notes on zip versions."""
    positions: set[int] = set()
    with zipfile.ZipFile(io.BytesIO(SOUND)) as archive:
        for record in archive.infolist():
            num_name_bytes, num_padding_bytes = struct.unpack_from("<2H", SOUND, record.header_offset + 26)
            padding = record.header_offset + 30 + num_name_bytes
            positions |= set(range(padding, padding + num_padding_bytes))
    end = SOUND.rindex(b"PK\x06\x06")
    return positions | set(range(end + 12, end + 16))


def test_only_bytes_without_meaning_may_change_undetected():
    """Changed bytes must be noticed wherever possible, even where torch would not look."""
    undetected = set()
    for position in range(len(SOUND)):
        data = bytearray(SOUND)
        data[position] ^= 0x40
        if find_damage(io.BytesIO(data)) is None:
            undetected.add(position)
    assert undetected
    assert undetected <= _without_meaning()


def test_each_truncation_and_extension_is_detected():
    """A file that ends anywhere before its end, or after it, must be refused."""
    assert find_damage(io.BytesIO(SOUND)) is None
    assert [size for size in range(len(SOUND)) if find_damage(io.BytesIO(SOUND[:size])) is None] == []
    assert find_damage(io.BytesIO(SOUND + b"\0")) is not None


def test_flip_in_the_last_chunk_of_a_large_record_is_detected(tmp_path):
    """The whole of a record must be read, not only its first chunks."""
    num_bytes = 2 * CHUNK_BYTES + 1024 * 1024
    torch.save({"weights": torch.zeros(num_bytes, dtype=torch.uint8)}, tmp_path / "a.ckpt")
    verify_file(tmp_path / "a.ckpt")
    with open(tmp_path / "a.ckpt", "r+b") as file:
        file.seek(num_bytes)
        file.write(b"\x01")
    with pytest.raises(DamagedCheckpointError, match=r"record a/data/0 has CRC32"):
        verify_file(tmp_path / "a.ckpt")


def test_message_names_the_path_and_the_reason(tmp_path):
    """The error must say which file it is about and what is wrong with the file."""
    (tmp_path / "text.ckpt").write_text("not a checkpoint")
    (tmp_path / "folder.ckpt").mkdir()
    with pytest.raises(DamagedCheckpointError, match=r"missing\.ckpt is damaged: No such file"):
        verify_file(tmp_path / "missing.ckpt")
    with pytest.raises(DamagedCheckpointError, match=r"folder\.ckpt is damaged: Is a directory"):
        verify_file(tmp_path / "folder.ckpt")
    with pytest.raises(DamagedCheckpointError, match=r"text\.ckpt is damaged: it is not a complete zip file"):
        verify_file(tmp_path / "text.ckpt")


def test_missing_permission_is_not_damage(tmp_path, monkeypatch):
    """A file that can't be read must not count as damaged, or it would be set aside; a bad disk is damage."""
    (tmp_path / "a.ckpt").write_bytes(SOUND)
    monkeypatch.setattr("builtins.open", _raising(PermissionError(errno.EACCES, "not yours")))
    with pytest.raises(PermissionError):
        verify_file(tmp_path / "a.ckpt")
    monkeypatch.setattr("builtins.open", _raising(OSError(errno.EIO, "bad disk")))
    with pytest.raises(DamagedCheckpointError, match="bad disk"):
        verify_file(tmp_path / "a.ckpt")


def _raising(error: OSError):
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    return fail


def _save_without_checksums(obj: object, path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(obj, path)
    finally:
        torch.serialization.set_crc32_options(True)


needs_the_switch = pytest.mark.skipif(
    not hasattr(torch.serialization, "set_crc32_options"), reason="torch < 2.6 always writes CRCs"
)


@needs_the_switch
def test_file_without_checksums_is_said_to_be_so(tmp_path):
    """A file saved with torch's CRC32 switched off is not damaged; the answer must also say so in words."""
    _save_without_checksums(CONTENT, tmp_path / "a.ckpt")
    verification = verify_path(tmp_path / "a.ckpt")
    assert not verification.has_checksums
    assert "set_crc32_options(False)" in verification.reason
    assert "was written without checksums" in str(verification)
    assert verification.num_bytes == (tmp_path / "a.ckpt").stat().st_size


@needs_the_switch
def test_file_without_checksums_is_refused_where_its_layout_is_damaged(tmp_path):
    """Truncation and a changed size must be detected without any checksum."""
    _save_without_checksums(CONTENT, tmp_path / "a.ckpt")
    data = (tmp_path / "a.ckpt").read_bytes()
    assert find_damage(io.BytesIO(data)) is None
    assert [size for size in range(len(data)) if find_damage(io.BytesIO(data[:size])) is None] == []


def test_one_missing_checksum_among_right_ones_is_damage(tmp_path):
    """A CRC32 that has become 0, in both places, must not pass for one that was never written."""
    with zipfile.ZipFile(io.BytesIO(SOUND)) as archive:
        record = max(archive.infolist(), key=lambda record: record.file_size)
    crc = struct.pack("<I", record.CRC)
    data = SOUND.replace(b"PK\x07\x08" + crc, b"PK\x07\x08" + b"\0\0\0\0")
    directory = data.index(b"PK\x01\x02")
    data = data[:directory] + data[directory:].replace(crc, b"\0\0\0\0")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.getinfo(record.filename).CRC == 0
    (tmp_path / "a.ckpt").write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match="but was written with 00000000"):
        verify_path(tmp_path / "a.ckpt")


def test_legacy_file_is_said_to_be_without_checksums(tmp_path, caplog):
    """A file in torch's format from before 1.6 has no checksums: it is not damaged, and must load with a warning."""
    for protocol in (4, 2):
        torch.save(CONTENT, tmp_path / "a.ckpt", _use_new_zipfile_serialization=False, pickle_protocol=protocol)
        verification = verify_path(tmp_path / "a.ckpt")
        assert not verification.has_checksums
        assert "before 1.6" in verification.reason
    assert load_file(tmp_path / "a.ckpt")["nested"] == CONTENT["nested"]
    assert "could not verify" in caplog.text


@needs_the_switch
def test_loading_without_checksums_warns_once(tmp_path, caplog):
    """Loading a file that could not be verified must warn once for each file."""
    for name in ("a.ckpt", "b.ckpt"):
        _save_without_checksums(CONTENT, tmp_path / name)
        load_file(tmp_path / name)
        load_file(tmp_path / name)
    warned = [record.getMessage() for record in caplog.records]
    assert [str(tmp_path / name) in message for name, message in zip(("a.ckpt", "b.ckpt"), warned, strict=True)]
    assert all("could not verify" in message for message in warned)


@needs_the_switch
def test_autosave_without_checksums_is_taken_with_a_warning(tmp_path, caplog):
    """A series must not set aside an autosave that can't be verified: it is the newest, and loads with a warning."""
    series = AutosaveSeries(tmp_path)
    series.save({"number": 0}, epoch=0, batch=0, global_step=0)
    newest = series.save({"number": 1}, epoch=0, batch=1, global_step=1)
    _save_without_checksums({"number": 1}, newest)
    assert str(series.newest()) == str(newest)
    assert load_file(newest) == {"number": 1}
    assert "could not verify" in caplog.text


def test_sound_file_loads_without_a_warning(tmp_path, caplog):
    """A verified file must load without a warning."""
    torch.save(CONTENT, tmp_path / "a.ckpt")
    assert verify_path(tmp_path / "a.ckpt").has_checksums
    load_file(tmp_path / "a.ckpt")
    assert not caplog.records


def test_cut_file_without_checksums_is_not_called_damaged_when_it_does_not_load(tmp_path):
    """If nothing can be verified, a failure to load must name the file and claim nothing about damage."""
    torch.save(CONTENT, tmp_path / "a.ckpt", _use_new_zipfile_serialization=False)
    data = (tmp_path / "a.ckpt").read_bytes()
    for size in range(len(data) // 2, len(data), 16):
        (tmp_path / "a.ckpt").write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"a\.ckpt") as caught:
            load_file(tmp_path / "a.ckpt")
        assert not isinstance(caught.value, DamagedCheckpointError)


def test_files_are_verified_and_loaded_by_url():
    """A URL must give the same answers as a path: sound, damaged, missing."""
    with fsspec.open("memory://verify/a.ckpt", "wb") as file:
        file.write(SOUND)
    with fsspec.open("memory://verify/bad.ckpt", "wb") as file:
        file.write(SOUND[:-1])
    assert verify_path("memory://verify/a.ckpt").has_checksums
    assert load_file("memory://verify/a.ckpt")["nested"] == CONTENT["nested"]
    for name in ("bad.ckpt", "missing.ckpt"):
        for read in (verify_path, verify_file, load_file):
            with pytest.raises(DamagedCheckpointError, match=name):
                read(f"memory://verify/{name}")


def test_local_url_is_the_path(tmp_path):
    """A URL with file:// must lead to the file and to the directory of that path."""
    torch.save(CONTENT, tmp_path / "a.ckpt")
    write_manifest(tmp_path)
    assert verify_path(f"file://{tmp_path}/a.ckpt").has_checksums
    assert verify_path(f"file://{tmp_path}").num_files == 1


def test_foreign_zip_is_refused(tmp_path):
    """A sound zip file that torch.save did not write must be refused, with its records named."""
    with zipfile.ZipFile(tmp_path / "a.ckpt", "w") as archive:
        archive.writestr("folder/readme.txt", "hello")
    with pytest.raises(DamagedCheckpointError, match=r"not written by torch\.save: its records are \['readme\.txt'\]"):
        verify_file(tmp_path / "a.ckpt")


class _MakesDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("legacy", [False, True])
def test_refusal_to_unpickle_is_not_damage(tmp_path, legacy):
    """A file with code in it must verify, run nothing in any of our readers, and be refused as unsafe, not damaged."""
    path = tmp_path / "checkpoint" / "a.ckpt"
    path.parent.mkdir()
    torch.save({"callbacks": _MakesDirectory(tmp_path / "made")}, path, _use_new_zipfile_serialization=not legacy)
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
def test_code_in_other_records_does_not_run(tmp_path):
    """If any record of a valid zip with right checksums holds a pickle, our readers must not run it."""
    evil = pickle.dumps(_MakesDirectory(tmp_path / "made"), protocol=2)
    with zipfile.ZipFile(io.BytesIO(SOUND)) as archive:
        names = archive.namelist()
        contents = {name: archive.read(name) for name in names}
    for replaced in [*names, "archive/constants.pkl", "archive/attributes.pkl"]:
        writer = torch._C.PyTorchFileWriter(str(tmp_path / "archive"))
        for name, content in {**contents, replaced: evil}.items():
            record = name.split("/", 1)[1]
            if record not in ("version", ".data/serialization_id"):  # it writes these itself
                data = evil if name == replaced else content
                writer.write_record(record, data, len(data))
        writer.write_end_of_file()
        verify_path(tmp_path / "archive")
        with contextlib.suppress(CheckpointError, RuntimeError, ValueError):
            load_file(tmp_path / "archive")
        assert not (tmp_path / "made").exists(), replaced


def test_content_that_is_no_dict_is_refused(tmp_path):
    """A file whose content is not a checkpoint must be refused with the type that was found."""
    torch.save([1, 2], tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="holds a list"):
        load_file(tmp_path / "a.ckpt")


class _Color(Enum):
    RED = 1


def _tensor_with_attribute() -> torch.Tensor:
    tensor = torch.zeros(2)
    tensor.source = Path("/data")
    return tensor


def _state_dict_with_metadata(value: object) -> OrderedDict:
    state = torch.nn.Linear(1, 1).state_dict()
    state._metadata["extra"] = value
    return state


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [
        ({"epoch": 3, "name": "x", "loss": 0.5, "done": True, "none": None, "raw": b"\x00\xff"}, []),
        ({"state_dict": torch.nn.Linear(2, 2).state_dict(), "parameter": torch.nn.Parameter(torch.zeros(2))}, []),
        ({"sizes": torch.Size([2]), "dtype": torch.float16, "order": OrderedDict(a=1)}, []),
        ({"raw": b"", "large": 2**3000, "small": -(2**70)}, ["raw", "large"]),
        ({"callbacks": {"MyCallback": {"config": Path("/a"), "best": 0.1}}}, ["callbacks/MyCallback/config"]),
        ({"optimizer_states": [{"state": {0: {"step": Path("/a")}}}]}, ["optimizer_states/0/state/0/step"]),
        ({"pair": (1, _Color.RED), "function": print, "lambda": lambda: 0}, ["pair/1", "function", "lambda"]),
        ({"table": {_Color.RED: 1}}, ["table/key <_Color.RED: 1>"]),
        ({"groups": defaultdict(list)}, ["groups"]),
        ({"tensor": _tensor_with_attribute()}, ["tensor"]),
        ({"model": _state_dict_with_metadata(Path("/a"))}, ["model/_metadata/extra"]),
        ({"model": _state_dict_with_metadata(1)}, []),
    ],
)
def test_unsafe_paths_names_what_would_not_load(checkpoint, expected):
    """The answer must be the places that torch.load(weights_only=True) refuses, and be empty if the whole loads."""
    assert unsafe_paths(checkpoint) == expected
    if not expected:
        torch.load(io.BytesIO(_bytes_of(checkpoint)), weights_only=True)


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.integers(-(2**80), 2**80),
    st.just(2**3000),
    st.text(),
    st.binary(),
    st.builds(torch.zeros, st.integers(0, 3)),
    st.just(torch.float32),
    st.just(Path("/a")),
    st.just(_Color.RED),
)
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(database=None, deadline=None, max_examples=150)
@given(checkpoint=st.dictionaries(st.text() | st.integers() | st.binary(max_size=2), NESTED, max_size=4))
def test_unsafe_paths_is_empty_exactly_where_the_whole_loads(checkpoint):
    """The walk must agree with torch about any nesting of values."""
    try:
        torch.load(io.BytesIO(_bytes_of(checkpoint)), weights_only=True)
    except pickle.UnpicklingError:
        assert unsafe_paths(checkpoint) != []
    else:
        assert unsafe_paths(checkpoint) == []


def test_unsafe_paths_ends_for_lists_that_hold_themselves():
    """A cycle must not be walked forever, and a shared object must be named once."""
    shared = [Path("/a")]
    shared.append(shared)
    assert unsafe_paths({"first": shared, "second": shared}) == ["first/0"]


def test_unsafe_paths_does_not_write_tensors(monkeypatch):
    """The check must not copy a model's tensors."""
    saved = []
    monkeypatch.setattr(torch, "save", lambda obj, buffer: saved.append(obj))
    unsafe_paths({"state_dict": torch.nn.Linear(2, 2).state_dict(), "loops": [torch.zeros(2)]})
    assert saved == []

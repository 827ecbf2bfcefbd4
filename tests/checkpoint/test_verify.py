"""A damaged file is refused, what can't be verified is said to be so, and a refusal to unpickle is not damage."""

from __future__ import annotations

import contextlib
import errno
import io
import pickle
import re
import zipfile
from collections import OrderedDict, defaultdict
from enum import Enum
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from hypothesis import given, settings, strategies as st

from lightning_faulttolerant.checkpoint.ranks import RankReader
from lightning_faulttolerant.checkpoint.verify import load_file, unsafe_paths, verify_file, verify_path
from lightning_faulttolerant.errors import CheckpointError, DamagedCheckpointError, UnsafeCheckpointError
from tests.checkpoint.writers import write_manifest
from tests.damage import Payload, bytes_of, change_a_weight
from tests.messages import error_of, plain

CONTENT = {"weights": torch.arange(5), "name": "x", "nested": {"losses": [1, 2.5]}}
LARGE = 100_000
PATH = Path("/a")


SOUND = bytes_of(CONTENT)


def test_sound_file_verifies_and_loads(tmp_path, caplog):
    """A file of torch verifies by buffer and by any name, which torch writes into it, and loads without a warning."""
    root = f"memory://{tmp_path.name}"
    (tmp_path / "buffer").write_bytes(SOUND)
    names = ["über.ckpt", "no suffix", "epoch=0-step=3.ckpt"]
    for name in names:
        torch.save(CONTENT, tmp_path / name)
    fsspec.filesystem("memory").pipe_file(f"{root}/a.ckpt", SOUND)
    fsspec.filesystem("memory").pipe_file(f"{root}/bad.ckpt", SOUND[:-1])
    for path in (*(tmp_path / name for name in ("buffer", *names)), f"file://{tmp_path}/buffer", f"{root}/a.ckpt"):
        assert verify_file(path).has_checksums
        assert verify_path(path).has_checksums
        assert load_file(path)["nested"] == CONTENT["nested"]
    for name in ("bad.ckpt", "missing.ckpt"):
        for read in (verify_path, verify_file, load_file):
            assert name in error_of(DamagedCheckpointError, lambda read=read, name=name: read(f"{root}/{name}"))
    assert not caplog.records


def _foreign_zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("folder/readme.txt", "hello")


def _lost_checksum(path):
    """Make the checksum of one record 0, in both places."""
    with zipfile.ZipFile(io.BytesIO(SOUND)) as archive:
        crc = max(archive.infolist(), key=lambda record: record.file_size).CRC.to_bytes(4, "little")
    assert SOUND.count(crc) == 2
    path.write_bytes(SOUND.replace(crc, bytes(4)))


DAMAGES = {
    "missing": lambda path: None,
    "a directory": lambda path: path.mkdir(),
    "text": lambda path: path.write_text("not a checkpoint"),
    "cut": lambda path: path.write_bytes(SOUND[: len(SOUND) // 2]),
    "of something else": _foreign_zip,
    "a lost checksum": _lost_checksum,
    "a list": lambda path: path.write_bytes(bytes_of([1, 2])),
}


def test_messages(tmp_path, snapshot):
    """The error of verifying and of loading says which file it is about, and what is wrong with the file."""
    said = []
    for name, damage in DAMAGES.items():
        path = tmp_path / name
        damage(path)
        said.append(error_of(CheckpointError, lambda path=path: load_file(path)))
        assert name == "a list" or error_of(DamagedCheckpointError, lambda path=path: verify_file(path)) == said[-1]
    assert re.sub(r"\b[0-9a-f]{8}\b", "CRC", plain("\n".join(said), DIR=tmp_path)) == snapshot


@pytest.mark.parametrize("verify", [verify_file, load_file, verify_path])
@pytest.mark.parametrize(
    ("error", "kind"), [(OSError(errno.EIO, "bad disk"), DamagedCheckpointError), (PermissionError(), PermissionError)]
)
def test_missing_permission_is_not_damage(tmp_path, monkeypatch, verify, error, kind):
    """A file that can't be read does not count as damaged, or it would be set aside; a bad disk is damage."""
    path = tmp_path / "a.ckpt" if verify is not verify_path else tmp_path
    (tmp_path / "a.ckpt").write_bytes(SOUND)
    write_manifest(tmp_path)
    real = open

    def fail(file, *args, **options):
        if str(file).endswith(".ckpt"):
            raise error
        return real(file, *args, **options)

    monkeypatch.setattr("builtins.open", fail)
    error_of(kind, lambda: verify(path))


@pytest.mark.skipif(not hasattr(torch.serialization, "set_crc32_options"), reason="torch < 2.6 always writes CRCs")
def test_file_without_checksums_is_said_to_be_so(tmp_path, caplog, snapshot):
    """It is not damaged; it loads with one warning, and the answer says what is missing. Its layout is checked."""
    new, old = tmp_path / "a.ckpt", tmp_path / "old.ckpt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({**CONTENT, "large": torch.arange(LARGE)}, new)
        small = bytes_of(CONTENT)
    finally:
        torch.serialization.set_crc32_options(True)
    torch.save(CONTENT, old, _use_new_zipfile_serialization=False)
    for path in (new, old):
        verification = verify_path(path)
        assert (verification.has_checksums, verification.num_bytes) == (False, path.stat().st_size)
        for _ in range(2):
            assert load_file(path)["nested"] == CONTENT["nested"]
    said = [str(verify_path(path)) for path in (new, old)]
    assert plain("\n".join([*said, *caplog.messages]), DIR=tmp_path) == snapshot
    for size in range(0, len(small), 25):
        new.write_bytes(small[:size])
        error_of(DamagedCheckpointError, lambda: verify_file(new))
    old.write_bytes(old.read_bytes()[:-16])  # a failure to load the old format claims nothing of damage
    with pytest.raises(CheckpointError, match=r"old\.ckpt") as caught:
        load_file(old)
    assert not isinstance(caught.value, DamagedCheckpointError)


@pytest.mark.parametrize("is_of_rank", [False, True])
def test_damage_in_a_large_tensor_is_found(tmp_path, is_of_rank):
    """The values of a tensor are compared as torch reads them; views share."""

    def load():
        return RankReader(rank=0, num_ranks=1).load(path, verifies_all=True) if is_of_rank else load_file(path)

    path = tmp_path / "a.ckpt"
    large = {"a": torch.arange(LARGE), "b": torch.rand(LARGE)}
    torch.save({**large, "view": large["a"][5:]}, path)
    sound = path.read_bytes()
    for tensor in large.values():
        content = tensor.numpy().tobytes()
        for at in (0, len(content) // 2, len(content) - 1):
            data = bytearray(sound)
            data[data.index(content) + at] ^= 4
            path.write_bytes(data)
            assert re.search(r"record a/data/\d has CRC32 \w+, but was", error_of(DamagedCheckpointError, load))
    path.write_bytes(sound)
    loaded = load()
    assert torch.equal(loaded["a"], large["a"])
    assert loaded["view"].untyped_storage().data_ptr() == loaded["a"].untyped_storage().data_ptr()


@pytest.mark.parametrize("legacy", [False, True])
def test_refusal_to_unpickle_is_not_damage(tmp_path, legacy):
    """A file with code in it verifies, runs nothing in any of our readers, and is refused as unsafe, not damaged."""
    path = tmp_path / "checkpoint" / "a.ckpt"
    path.parent.mkdir()
    content = {"callbacks": Payload(tmp_path / "made"), "large": torch.zeros(LARGE)}
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    verify_file(path)
    write_manifest(path.parent)
    verify_path(path.parent)
    with pytest.raises(UnsafeCheckpointError, match="can't be verified" if legacy else "is not damaged") as caught:
        load_file(path)
    assert caught.value.__cause__ is not None
    assert not (tmp_path / "made").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "made").exists(), "this file runs nothing: the test could not have failed"
    if not legacy:  # damage comes before a refusal: an older one may be sound
        change_a_weight(path)
        error_of(DamagedCheckpointError, lambda: load_file(path))


@pytest.mark.filterwarnings("ignore:'torch.load' received a zip file that looks like a TorchScript:UserWarning")
def test_code_in_other_records_does_not_run(tmp_path):
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


class Color(Enum):
    """A class that torch refuses."""

    RED = 1


TENSOR = torch.zeros(2)
TENSOR.source = PATH  # type: ignore[attr-defined]
STATES: list[Any] = [torch.nn.Linear(1, 1).state_dict() for _ in range(2)]
STATES[0]._metadata["extra"] = PATH
STATES[1]._metadata["extra"] = 1
SHARED: list[Any] = [PATH]
SHARED.append(SHARED)
UNSAFE: list[tuple[dict[str, Any], list[str]]] = [
    ({"state_dict": STATES[1], "parameter": torch.nn.Parameter(torch.zeros(2))}, []),
    ({"sizes": torch.Size([2]), "dtype": torch.float16, "order": OrderedDict(a=1)}, []),
    ({"raw": b"", "large": 2**3000, "small": -(2**70)}, ["raw", "large"]),
    ({"optimizer_states": [{"state": {0: {"step": PATH}}}]}, ["optimizer_states/0/state/0/step"]),
    ({"pair": (1, Color.RED), "function": print, "lambda": lambda: 0}, ["pair/1", "function", "lambda"]),
    ({"table": {Color.RED: 1}}, ["table/key <Color.RED: 1>"]),
    ({"groups": defaultdict(list)}, ["groups"]),
    ({"tensor": TENSOR}, ["tensor"]),
    ({"model": STATES[0]}, ["model/_metadata/extra"]),
    ({"first": SHARED, "second": SHARED}, ["first/0"]),
]


@pytest.mark.parametrize(("checkpoint", "expected"), UNSAFE)
def test_unsafe_paths_names_what_would_not_load(checkpoint, expected):
    """The answer is the places that torch.load(weights_only=True) refuses, each once, even in a cycle."""
    assert unsafe_paths(checkpoint) == expected
    if not expected:
        torch.load(io.BytesIO(bytes_of(checkpoint)), weights_only=True)


LEAVES = st.one_of(
    *(st.none(), st.booleans(), st.floats(), st.integers(-(2**80), 2**80), st.just(2**3000), st.text(), st.binary()),
    *(st.builds(torch.zeros, st.integers(0, 3)), st.sampled_from([torch.float32, PATH, Color.RED])),
)
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(database=None, max_examples=50)
@given(checkpoint=st.dictionaries(st.text() | st.integers() | st.binary(max_size=2), NESTED, max_size=4))
def test_unsafe_paths_is_empty_exactly_where_the_whole_loads(checkpoint):
    """The walk agrees with torch about any nesting of values."""
    try:
        torch.load(io.BytesIO(bytes_of(checkpoint)), weights_only=True)
    except pickle.UnpicklingError:
        assert unsafe_paths(checkpoint) != []
    else:
        assert unsafe_paths(checkpoint) == []

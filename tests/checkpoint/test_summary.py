"""A checkpoint's content is described without running any of it, and without reading its tensors."""

from __future__ import annotations

import collections
import contextlib
import io
import os
import pathlib
import pickle
import struct
import sys
import tracemalloc
import zipfile

import hypothesis
import pytest
import torch
from hypothesis import strategies

from lightning_faulttolerant.checkpoint.schema import read_summary
from lightning_faulttolerant.errors import CheckpointError, DamagedCheckpointError
from tests.damage import bytes_of


def describe(data):
    """Return the description of a checkpoint that has these bytes for a pickle."""
    with zipfile.ZipFile(buffer := io.BytesIO(), "w") as archive:
        archive.writestr("archive/data.pkl", data)
    return read_summary(buffer, name="the file").content


plain_values = strategies.recursive(
    strategies.none()
    | strategies.booleans()
    | strategies.integers(-(2**63), 2**63 - 1)
    | strategies.floats(allow_nan=False)
    | strategies.text()
    | strategies.binary(),
    lambda inner: (
        strategies.lists(inner) | strategies.tuples(inner, inner) | strategies.dictionaries(strategies.text(), inner)
    ),
)


@hypothesis.settings(database=None, max_examples=60)
@hypothesis.given(value=plain_values, protocol=strategies.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_values_come_out_as_they_are(value, protocol):
    """Numbers, texts, bytes, lists, tuples and dicts are described by themselves, in each protocol."""
    assert describe(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_collections_come_out_as_their_items(protocol):
    """Sets are lists of their items, ordered and default dicts are dicts; objects and classes have their names."""
    ordered = collections.OrderedDict(b=1, a=2)
    ordered._metadata = {"version": 1}
    value = {"set": {1}, "frozen": frozenset([2]), "ordered": ordered, "default": collections.defaultdict(list, a=[3])}
    expected = {"set": [1], "frozen": [2], "ordered": {"b": 1, "a": 2}, "default": {"a": [3]}}
    assert describe(pickle.dumps(value, protocol)) == expected
    path, kind = describe(pickle.dumps([pathlib.PurePosixPath("/data"), collections.Counter], protocol))
    assert kind.name == "collections.Counter"
    assert protocol < 2 or path.name.rpartition(".")[2] == "PurePosixPath"
    ring = []
    ring.append(ring)
    found = describe(pickle.dumps(ring, protocol))
    assert found[0] is found


ran = []


def strike(*_):
    """Stand for a function that a hostile pickle would call."""
    ran.append("called")
    return "struck"


class Struck:
    """A class that notices every operation on it."""

    attribute = "untouched"

    def __new__(cls, *_):
        ran.append("made")
        return super().__new__(cls)

    __setstate__ = append = __setitem__ = strike


def name(what):
    """Return the opcode that pushes a class or function of this module."""
    return f"c{what.__module__}\n{what.__qualname__}\n".encode()


REDUCE = name(strike) + b"(S'x'\ntR."
REAL_ATTACKS = {
    "REDUCE": REDUCE,
    "INST": f"(S'x'\ni{__name__}\nStruck\n.".encode(),
    "OBJ": b"(" + name(Struck) + b"o.",
    "NEWOBJ": name(Struck) + b")\x81.",
    "BUILD of an object": name(Struck) + b")\x81}b.",
    "APPEND": name(Struck) + b")\x81Na.",
    "SETITEM": name(Struck) + b")\x81NNs.",
}
ATTACKS = REAL_ATTACKS | {
    "REDUCE of os.system": b"cos\nsystem\n(S'touch struck'\ntR.",
    "REDUCE of eval": b"c__builtin__\neval\n(S'ran.append(1)'\ntR.",
    "a class called": name(Struck) + b")R.",
    "NEWOBJ_EX": name(Struck) + b")}\x92.",
    "BUILD of a class": name(Struck) + b"(N}S'attribute'\nS'changed'\nstb.",
    "STACK_GLOBAL": b"\x8c" + bytes([len(__name__)]) + __name__.encode() + b"\x8c\x06strike)\x93)R.",
    "APPENDS": name(Struck) + b")\x81(Ne.",
    "SETITEMS": name(Struck) + b")\x81(NNu.",
    "an attribute of a module": b"cos\nenviron\n(S'PATH'\nS''\nu.",
    "a persistent id": b"(" + name(strike) + b"tQ.",
    "a key's hash": b"}" + name(Struck) + b")\x81Ns.",
    "inside of a tensor": b"ctorch._utils\n_rebuild_tensor_v2\n(" + REDUCE[:-1] + b"tR.",
    "a type's rebuild function": b"ctorch._tensor\n_rebuild_from_type_v2\n(" + name(strike) + b"N)NtR.",
    "an extension": b"\x82\x01)R.",
}


def test_nothing_of_a_hostile_pickle_is_run(monkeypatch, tmp_path):
    """Whatever a pickle would import, call, create, build or change, none of it happens, and no other error comes."""
    monkeypatch.chdir(tmp_path)
    for attack in REAL_ATTACKS.values():
        ran.clear()
        pickle.loads(attack)
        assert ran, "the test can't fail"
    ran.clear()
    path = os.environ["PATH"]
    for attack in ATTACKS.values():
        with contextlib.suppress(CheckpointError):
            describe(attack)
    monkeypatch.setitem(sys.modules, "antigravity", None)  # a class of a module that is not loaded is only named
    assert describe(b"cantigravity\nfly\n)R.").name == "antigravity.fly"
    assert ran == []
    assert (Struck.attribute, os.environ["PATH"], os.listdir(tmp_path)) == ("untouched", path, [])


DEPTH = 100_000
REBUILD = b"ctorch._tensor\n_rebuild_from_type_v2\n"
HUGE = {
    "lists": b"]" * DEPTH + b"a" * (DEPTH - 1) + b".",
    "a deep tuple as a key": b"})" + b"\x85" * DEPTH + b"Ns.",
    "a deep frozen set as a key": b"}(" + b")" + b"\x85" * DEPTH + b"\x91Ns.",
    "objects": name(strike) * DEPTH + b"N" + b"\x85R" * DEPTH + b".",
    "a chain of rebuild functions": REBUILD + (b"(" + REBUILD + b"N") * DEPTH + b")" + b"Nt" * DEPTH + b"R.",
}
LARGE_CLAIMS = [
    b"\x8d" + struct.pack("<Q", 2**63),
    b"\x8b" + struct.pack("<i", 2**31 - 1),
    b"T" + struct.pack("<i", -5),
    b"Nr" + struct.pack("<I", 2**31),
    b"\x95" + struct.pack("<Q", 2**60),
    b"V" + b"a" * 100_000,
    b"I" + b"9" * 60_000 + b"\n",
]


@pytest.mark.parametrize("data", HUGE.values(), ids=HUGE)
def test_deep_nesting_neither_crashes_nor_hangs(data):
    """Structures 100,000 deep are described or refused, and the interpreter's stack does not overflow."""
    with contextlib.suppress(CheckpointError):
        describe(data)


def test_a_small_file_can_not_take_much_memory():
    """Lengths that a file claims but does not have are refused, and take no memory."""
    tracemalloc.start()
    try:
        for data in LARGE_CLAIMS:
            with pytest.raises(DamagedCheckpointError):
                describe(data)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("make", [lambda: "x" * 10_000_000, lambda: b"x" * 10_000_000, lambda: 1 << 80_000_000])
def test_long_data_is_passed_over(make):
    """A text, bytes or a number of 10 MB is described by its length and not read; the rest is read."""
    summary = read_summary(io.BytesIO(bytes_of([make(), "after"], pickle_protocol=4)), name="the file")
    long, after = summary.content
    assert after == "after"
    assert 9_900_000 < summary.size_of(long).num_bytes < 10_100_000
    assert summary.num_bytes_read < 200_000


@pytest.mark.parametrize(
    ("shape", "is_tensor"), [(b"(K\x03K\x04t", True), (b"N", False), (b"(K\xffJ\xff\xff\xff\xfft", False)]
)
def test_a_tensor_of_an_impossible_shape_is_an_object(shape, is_tensor: bool):
    """A pickle may claim any shape: it is described as a tensor only if it could be one."""
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x0ctQ"
    found = describe(b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00" + shape + b")\x89NtR.")
    assert (getattr(found, "shape", None) == (3, 4)) == is_tensor


def test_a_damaged_file_is_described_or_refused():
    """Cut anywhere, it is refused; with any byte changed, nothing else is raised, and nothing is run."""
    data = bytes_of({"step": 3, "weights": torch.zeros(10)})
    for length in range(0, len(data), 7):
        with pytest.raises(DamagedCheckpointError):
            read_summary(io.BytesIO(data[:length]), name="the file")
    for place in range(0, len(data), 3):
        changed = data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]
        with contextlib.suppress(CheckpointError):
            summary = read_summary(io.BytesIO(changed), name="the file")
            summary.size_of(summary.content)

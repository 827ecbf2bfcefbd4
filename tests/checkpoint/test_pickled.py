from __future__ import annotations

import collections
import contextlib
import io
import os
import pathlib
import pickle
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies

from lightning_faulttolerant.checkpoint import pickled
from lightning_faulttolerant.checkpoint.pickled import (
    LongData,
    Made,
    Named,
    Storage,
    TensorInfo,
    TooLargePickleError,
    UnreadablePickleError,
    describe_pickle,
)

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
each_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)

ran: list[str] = []


def strike(*_: Any) -> str:
    """Stand for a function that a hostile pickle would call."""
    ran.append("called")
    return "struck"


class Struck:
    """A class that notices every operation on it."""

    attribute = "untouched"

    def __new__(cls, *_: Any) -> Struck:
        ran.append("made")
        return super().__new__(cls)

    def __setstate__(self, _: Any) -> None:
        ran.append("built")

    def append(self, _: Any) -> None:
        ran.append("appended")

    def __setitem__(self, *_: Any) -> None:
        ran.append("set")


def describe(data: bytes) -> Any:
    """Return the description of a whole pickle."""
    return describe_pickle(io.BytesIO(data), begin=0, num_bytes=len(data))


def name(what: Any) -> bytes:
    """Return the opcode that pushes a class or function of this module."""
    return f"c{what.__module__}\n{what.__qualname__}\n".encode()


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


@hypothesis.given(value=plain_values, protocol=strategies.sampled_from(PROTOCOLS))
def test_plain_values_come_out_as_they_are(value: Any, protocol: int) -> None:
    """Numbers, texts, bytes, lists, tuples and dicts are described by themselves, in each protocol."""
    assert describe(pickle.dumps(value, protocol)) == value


@each_protocol
def test_collections_come_out_as_their_items(protocol: int) -> None:
    """Sets are lists of their items, ordered and default dicts are dicts; attributes of a dict are left out."""
    ordered = collections.OrderedDict(b=1, a=2)
    ordered._metadata = {"version": 1}  # type: ignore[attr-defined]
    value = {"set": {1}, "frozen": frozenset([2]), "ordered": ordered, "default": collections.defaultdict(list, a=[3])}
    assert describe(pickle.dumps(value, protocol)) == {
        "set": [1],
        "frozen": [2],
        "ordered": {"b": 1, "a": 2},
        "default": {"a": [3]},
    }


@each_protocol
def test_an_object_is_described_by_its_name(protocol: int) -> None:
    """Classes and objects of unknown classes are named, and their content can be examined."""
    value = describe(pickle.dumps([pathlib.PurePosixPath("/data"), collections.Counter], protocol))
    path, kind = value
    assert isinstance(path, Made)
    assert isinstance(kind, Named)
    assert (path.name.rpartition(".")[2], kind.name) in (
        ("PurePosixPath", "collections.Counter"),
        ("_reconstructor", "collections.Counter"),  # protocols 0 and 1
    )


REDUCE = name(strike) + b"(S'x'\ntR."
ATTACKS = {
    "REDUCE": REDUCE,
    "REDUCE of os.system": b"cos\nsystem\n(S'touch struck'\ntR.",
    "REDUCE of eval": b"c__builtin__\neval\n(S'ran.append(1)'\ntR.",
    "a class called": name(Struck) + b")R.",
    "INST": f"(S'x'\ni{__name__}\nStruck\n.".encode(),
    "OBJ": b"(" + name(Struck) + b"o.",
    "NEWOBJ": name(Struck) + b")\x81.",
    "NEWOBJ_EX": name(Struck) + b")}\x92.",
    "BUILD of an object": name(Struck) + b")\x81}b.",
    "BUILD of a class": name(Struck) + b"(N}S'attribute'\nS'changed'\nstb.",
    "STACK_GLOBAL": b"\x8c" + bytes([len(__name__)]) + __name__.encode() + b"\x8c\x06strike)\x93)R.",
    "APPEND": name(Struck) + b")\x81Na.",
    "APPENDS": name(Struck) + b")\x81(Ne.",
    "SETITEM": name(Struck) + b")\x81NNs.",
    "SETITEMS": name(Struck) + b")\x81(NNu.",
    "an attribute of a module": b"cos\nenviron\n(S'PATH'\nS''\nu.",
    "a persistent id": b"(" + name(strike) + b"tQ.",
    "a key's hash": b"}" + name(Struck) + b")\x81Ns.",
    "inside of a tensor": b"ctorch._utils\n_rebuild_tensor_v2\n(" + REDUCE[:-1] + b"tR.",
    "a type's rebuild function": b"ctorch._tensor\n_rebuild_from_type_v2\n(" + name(strike) + b"N)NtR.",
    "an extension": b"\x82\x01)R.",
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_nothing_of_a_hostile_pickle_is_run(attack: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever a pickle would import, call, create, build or change, none of it happens."""
    ran.clear()
    monkeypatch.chdir(tmp_path)
    path = os.environ["PATH"]
    with contextlib.suppress(UnreadablePickleError):
        describe(attack)
    assert ran == []
    assert Struck.attribute == "untouched"
    assert os.environ["PATH"] == path
    assert os.listdir(tmp_path) == []


def test_the_attacks_are_real() -> None:
    """Python's own unpickler runs the content of these pickles: the test above could fail."""
    for attack in ("REDUCE", "INST", "OBJ", "NEWOBJ", "BUILD of an object", "APPEND", "SETITEM"):
        ran.clear()
        pickle.loads(ATTACKS[attack])
        assert ran, attack


def test_no_module_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of a module that is not loaded is named without loading the module."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("something is imported")

    monkeypatch.setattr("builtins.__import__", refuse)
    found = describe(b"cantigravity\nfly\n)R.")
    monkeypatch.undo()
    assert (type(found), found.name) == (Made, "antigravity.fly")


def nested(opening: bytes, closing: bytes, depth: int = 300_000) -> bytes:
    """Return a pickle that nests this many containers."""
    return opening * depth + closing * depth


REBUILD = b"ctorch._tensor\n_rebuild_from_type_v2\n"
HUGE = {
    "lists": nested(b"]", b"a")[:-1] + b".",
    "dicts": b"}" + b"N}" * 300_000 + b"s" * 300_000 + b".",
    "tuples": b")" + b"\x85" * 300_000 + b".",
    "a deep tuple as a key": b"})" + b"\x85" * 300_000 + b"Ns.",
    "a deep frozen set as a key": b"}(" + b")" + b"\x85" * 300_000 + b"\x91Ns.",
    "objects": name(strike) * 100_000 + b"N" + b"\x85R" * 100_000 + b".",
    "marks": b"(" * 300_000 + b"N.",
    "a chain of rebuild functions": REBUILD + (b"(" + REBUILD + b"N") * 50_000 + b")" + b"Nt" * 50_000 + b"R.",
}


@pytest.mark.parametrize("data", HUGE.values(), ids=HUGE)
def test_deep_nesting_neither_crashes_nor_hangs(data: bytes) -> None:
    """Structures 300,000 deep are described or refused, and the interpreter's stack does not overflow."""
    began = time.monotonic()
    with contextlib.suppress(UnreadablePickleError):
        describe(data)
    assert time.monotonic() - began < 20


LARGE_CLAIMS = {
    "text": b"X" + struct.pack("<I", 2**32 - 1),
    "text of 8 bytes' length": b"\x8d" + struct.pack("<Q", 2**63),
    "bytes": b"B" + struct.pack("<I", 2**32 - 1),
    "bytearray": b"\x96" + struct.pack("<Q", 2**62),
    "integer": b"\x8b" + struct.pack("<i", 2**31 - 1),
    "negative length": b"T" + struct.pack("<i", -5),
    "memo": b"Nr" + struct.pack("<I", 2**31),
    "frame": b"\x95" + struct.pack("<Q", 2**60),
    "line": b"V" + b"a" * 100_000,
    "digits": b"I" + b"9" * 60_000 + b"\n",
}


@pytest.mark.parametrize("data", LARGE_CLAIMS.values(), ids=LARGE_CLAIMS)
def test_a_small_file_can_not_take_much_memory(data: bytes) -> None:
    """Lengths that a file claims but does not have take no memory."""
    tracemalloc.start()
    try:
        with pytest.raises(UnreadablePickleError):
            describe(data)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


@hypothesis.given(data=strategies.binary(max_size=300), value=plain_values, cut=strategies.integers(0, 300))
def test_garbage_is_refused_by_one_kind_of_error(data: bytes, value: Any, cut: int) -> None:
    """Any bytes, and any pickle with garbage in it, are described or refused, and raise no other error."""
    whole = pickle.dumps(value)
    for garbage in (data, whole[:cut] + data, whole[:cut]):
        with contextlib.suppress(UnreadablePickleError):
            describe(garbage)


def test_too_many_operations_are_an_error_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle with too many operations to wait for is given up, and not called damaged."""
    monkeypatch.setattr(pickled, "_MAX_OPERATIONS", 1000)
    with pytest.raises(TooLargePickleError, match="1,000 operations"):
        describe(pickle.dumps(list(range(1000))))


class CountingFile(io.BytesIO):
    num_read = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.num_read += len(data)
        return data


@pytest.mark.parametrize(
    ("make", "kind"),
    [(lambda: "x" * 10_000_000, "text"), (lambda: b"x" * 10_000_000, "bytes"), (lambda: 1 << 80_000_000, "integer")],
    ids=["text", "bytes", "integer"],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_long_data_is_passed_over(make: Callable[[], Any], kind: str, protocol: int) -> None:
    """A text, bytes or a number of 10 MB is described by its length and not read; the rest is read."""
    data = pickle.dumps([make(), "after"], protocol)
    file = CountingFile(data)
    long, after = describe_pickle(file, begin=0, num_bytes=len(data))
    assert isinstance(long, LongData)
    assert (long.kind, after) == (kind, "after")
    assert 9_900_000 < long.num_bytes < 10_100_000
    assert file.num_read < 200_000


def test_only_its_part_of_the_file_is_read() -> None:
    """A pickle between other bytes is read from its beginning, and not past its end."""
    data = pickle.dumps({"step": 3})
    file = io.BytesIO(b"before" + data + b"after")
    assert describe_pickle(file, begin=6, num_bytes=len(data)) == {"step": 3}
    with pytest.raises(UnreadablePickleError, match="ends too early"):
        describe_pickle(file, begin=6, num_bytes=len(data) - 1)


def test_values_that_hold_themselves_are_described() -> None:
    """A list in itself is described as a list in itself."""
    value: list[Any] = []
    value.append(value)
    found = describe(pickle.dumps(value))
    assert found[0] is found


def tensor_pickle(shape: bytes) -> bytes:
    """Return the pickle of a tensor of 12 floats with the shape that the given opcodes push."""
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x0ctQ"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00" + shape + b")\x89NtR."


def test_a_tensor_is_its_type_and_shape() -> None:
    """A tensor is described by dtype, shape and storage; one with an impossible shape is shown as an object."""
    found = describe(tensor_pickle(b"(K\x03K\x04t"))
    assert isinstance(found, TensorInfo)
    assert (found.dtype, found.shape, found.num_values) == ("float32", (3, 4), 12)
    assert isinstance(found.storage, Storage)
    assert (found.storage.key, found.storage.num_bytes) == ("0", 48)
    for shape in (b"N", b"(J\xff\xff\xff\xfft", b"(" + b"K\x02" * 100 + b"t"):
        assert isinstance(describe(tensor_pickle(shape)), Made)

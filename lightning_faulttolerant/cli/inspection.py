"""``inspect``: print the contents of one checkpoint in readable form, without loading it.

The description of a checkpoint becomes JSON, however large, deep, or strange it is.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import IO, Any

from lightning_faulttolerant.checkpoint.joined_file import references_in
from lightning_faulttolerant.checkpoint.manifest import describe_damage
from lightning_faulttolerant.checkpoint.pickled import LongData, Made, Named, Storage, TensorInfo
from lightning_faulttolerant.checkpoint.schema import Summary, read_state_summaries, read_summary, walk
from lightning_faulttolerant.cli.found import (
    find_meant,
    mapping,
    open_checkpoint,
    part_of,
    real,
    run_directory,
    whole_number,
)
from lightning_faulttolerant.cli.text import remote_errors, safe, size_text, table
from lightning_faulttolerant.errors import DamagedCheckpointError
from lightning_faulttolerant.records.incidents import Incident, read_incident, step_of_incident
from lightning_faulttolerant.records.ledger import ENDS, IN_EVALUATION
from lightning_faulttolerant.records.lines import MAX_BYTES
from lightning_faulttolerant.storage.store import open_file, split_path

BLOBS = "blobs"
_REFERENCE = "blob"
# These parts are shown under their own names; the others are shown only with their sizes.
_SHOWN = (
    *("version", "world_size", "position", "run", "origin", "inexact", "pending", "not_exact", "remarks"),
    *("surroundings", "fingerprint"),
)
_SIZED = ("ranks", "states", "opaque", "pickled")


def describe(summary: Summary, *, path: str, states: Mapping[int, Summary]) -> dict[str, object]:
    """Return the description of a checkpoint.

    Args:
        summary: Summary of the file.
        path: Its path or URL.
        states: Summaries of the states that it keeps as bytes, by the number of the rank.
    """
    content, part = summary.content, part_of(summary.content)
    return {
        "path": path,
        "num_bytes": summary.num_bytes,
        "num_bytes_read": summary.num_bytes_read + sum(state.num_bytes_read for state in states.values()),
        "lightning": plain(mapping(content).get("pytorch-lightning_version")),
        "epoch": plain(mapping(content).get("epoch")),
        "global_step": plain(mapping(content).get("global_step")),
        "num_parameters": _num_parameters(part),
        "keys": {str(plain(key)): _size(summary, value) for key, value in mapping(content).items()},
        "kind": "dict"
        if isinstance(content, dict)
        else str("list" if isinstance(content, (list, tuple)) else plain(content)),
        "fault_tolerance": None if part is None else _describe_part(summary, part, states),
    }


def _describe_part(summary: Summary, part: Mapping[object, object], states: Mapping[int, Summary]) -> dict[str, object]:
    kept = part.get("ranks")
    return {
        **{name: plain(part.get(name)) for name in _SHOWN},
        "ranks": [
            _rank(states[rank], states[rank].content) if rank in states else _rank(summary, state)
            for rank, state in enumerate(kept if isinstance(kept, list) else [])
        ],
        "opaque": {str(name): _size(summary, value)["num_bytes"] for name, value in mapping(part, "opaque").items()},
        "pickled": _pickled(summary, part),
        "others": {
            str(plain(name)): _size(summary, value)["num_bytes"]
            for name, value in part.items()
            if name not in _SHOWN + _SIZED
        },
    }


def _pickled(summary: Summary, part: Mapping[object, object]) -> dict[str, dict[str, object]]:
    """Return the class and the size of each object that only a trusted resume unpickles."""
    return {
        str(plain(place)): {
            "class": str(plain(mapping(part, "pickled", place).get("class"))),
            "num_bytes": _size(summary, entry)["num_bytes"],
        }
        for place, entry in mapping(part, "pickled").items()
    }


def _rank(summary: Summary, state: object) -> dict[str, int]:
    """Return the size of each part of a rank's state, including the bytes in the common pool."""
    lengths = mapping(state, BLOBS).get("lengths")
    lengths = lengths if isinstance(lengths, list) else []
    return {
        str(plain(name)): summary.size_of(value).num_bytes + _pooled(value, lengths)
        for name, value in mapping(state).items()
        if name != BLOBS
    }


def _pooled(value: object, lengths: list[object]) -> int:
    references = (
        inner[_REFERENCE] for inner in walk([value]) if isinstance(inner, dict) and set(inner) == {_REFERENCE}
    )
    numbers = {number for number in references if type(number) is int and 0 <= number < len(lengths)}
    return sum(whole_number(lengths[number]) or 0 for number in numbers)


def _num_parameters(part: Mapping[object, object] | None) -> int | None:
    shapes = mapping(part, "fingerprint", "module").get("parameters")
    if not isinstance(shapes, dict) or None in shapes.values():
        return None
    return sum(_product(shape) for shape in shapes.values())


def _product(shape: Sequence[int]) -> int:
    is_shape = isinstance(shape, list) and len(shape) <= 64 and all(whole_number(n) is not None for n in shape)
    return math.prod(shape) if is_shape else 0


def _size(summary: Summary, value: object) -> dict[str, int]:
    return asdict(summary.size_of(value))


_MAX_DEPTH = 24
_MAX_VALUES = 100_000
_LEFT_OUT = "..."


def plain(value: object) -> object:
    """Return a value as dicts with string keys, lists, strings, finite numbers, booleans and None.

    Values nested more than 24 deep and values after the first 100,000 are left out.

    Args:
        value: A value of a described checkpoint.

    Example:
        >>> plain({1: (float("inf"), b"abc"), "seen": {True, }})
        {'1': ['inf', '3 bytes'], 'seen': 'a set'}
    """
    return _Plain().of(value, depth=0)


class _Plain:
    def __init__(self) -> None:
        self._num_left = _MAX_VALUES

    def of(self, value: object, *, depth: int) -> object:
        self._num_left -= 1
        if depth > _MAX_DEPTH or self._num_left < 0:
            return _LEFT_OUT
        if isinstance(value, dict):
            return self._mapping(value, depth=depth + 1)
        if isinstance(value, (list, tuple)):
            items = [self.of(item, depth=depth + 1) for item in value[: max(self._num_left, 0)]]
            return items if len(items) == len(value) else [*items, _LEFT_OUT]
        return one(value)

    def _mapping(self, value: dict[object, object], *, depth: int) -> dict[str, object]:
        made: dict[str, object] = {}
        for key, child in value.items():
            if self._num_left < 0:
                made[_LEFT_OUT] = _LEFT_OUT
                break
            made[key if isinstance(key, str) else str(self.of(key, depth=depth))] = self.of(child, depth=depth)
        return made


def one(value: object) -> object:
    """Return a single value, or a description of it.

    Args:
        value: A value of a described checkpoint, other than a dict, list or tuple.
    """
    match value:
        case None | bool() | str():
            return value
        case int():
            return value if value.bit_length() <= 64 else f"an integer of {value.bit_length()} bits"
        case float():
            return value if math.isfinite(value) else str(value)
        case bytes():
            return f"{len(value)} bytes"
        case LongData(kind, num_bytes):
            return f"{kind} of {num_bytes} bytes"
        case TensorInfo(dtype, shape):
            return f"tensor of {dtype} {list(shape)}"
        case Storage(_, dtype, num_bytes):
            return f"storage of {dtype}, {num_bytes} bytes"
        case Named(name) | Made(name):
            return f"<{name}>"
    return f"a {type(value).__name__}"


DESCRIPTION = """\
Show the contents of a checkpoint: its run and the position in it, the parts of the state that each rank holds, the
fingerprint of the run, versions and device, Lightning's keys and their sizes. For the checkpoint of an incident, its
report is shown, too.

Nothing is loaded, and no code in the file runs. Only its table of contents and its pickle are read, not the
tensors. So it is fast on large files, and transfers little from a URL. To check the tensors, use "verify".
"""
EPILOG = """\
Exit status: 0 shown, 2 the file is not a checkpoint, is too damaged, or can't be read.
"""

_MAX_KEYS = 40
_MAX_ENTRIES = 12
_MAX_TEXT = 200
_MAX_LEVEL = 6
_LABEL_WIDTH = 15
_MAX_WIDTH = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``inspect``.

    Args:
        parser: The parser of this command.
    """
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help="checkpoint, run, directory, or URL; by default the runs of this directory. Of a run or a directory, the"
        " newest checkpoint is shown; of a directory of shards, the part outside the shards",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with nothing left out for brevity")


def run(arguments: argparse.Namespace) -> int:
    """Print the contents of the checkpoint.

    Args:
        arguments: The parsed arguments.

    Returns:
        The exit status.
    """
    what = find_meant(arguments.file)
    what.print_problems()
    newest = what.newest()
    others = [run for run in what.newest_of_runs() if run != real(run_directory(newest.folder))]
    path = newest.content_path
    with remote_errors(path), open_checkpoint(path) as file:
        summary = read_summary(file, name=path)
        found = describe(summary, path=path, states=read_state_summaries(file, summary, name=path))
        found["base"] = _base(file, path)
    incident = _incident(path)
    if arguments.json:
        more = {"incident": None if incident is None else asdict(incident), "other_runs": others}
        print(json.dumps({**found, **more}, indent=2))
    else:
        for line in chain(_lines(found), _incident_lines(incident), _other_lines(others)):
            print(line)
    return 0


def _base(file: IO[bytes], path: str) -> dict[str, object] | None:
    """Return the base that an autosave refers to, and the number and the size of its tensors there."""
    try:
        references = references_in(file)
    except ValueError as error:
        raise DamagedCheckpointError(describe_damage(path, str(error))) from error
    if references is None:
        return None
    sizes = [place.num_bytes for place in references.records.values()]
    return {"name": references.base, "num_tensors": len(sizes), "num_bytes": sum(sizes)}


def _incident(path: str) -> Incident | None:
    """Return the report next to the checkpoint of an incident."""
    if step_of_incident(split_path(path)[1]) is None:
        return None
    beside = f"{path.removesuffix('ckpt')}json"
    try:
        with remote_errors(beside), open_file(beside) as file:
            return read_incident(file.read(MAX_BYTES + 1))
    except OSError:
        return None


def _incident_lines(incident: Incident | None) -> Iterator[str]:
    if incident is not None:
        yield ""
        yield from map(safe, incident.lines())
        yield safe(f"To see it, type: {incident.replay}")


def _other_lines(runs: Sequence[str]) -> Iterator[str]:
    if runs:
        yield ""
        yield safe(
            f"Other runs: {', '.join(runs)}. To see one, type: lightning-faulttolerant inspect {shlex.quote(runs[0])}"
        )


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield safe(found["path"])
    yield _line("size", f"{size_text(found['num_bytes'])}, of which {size_text(found['num_bytes_read'])} were read")
    if found["base"] is not None:
        base = found["base"]
        yield _line(
            "base", f"{base['name']}, with {base['num_tensors']} of its tensors, {size_text(base['num_bytes'])}"
        )
    if found["lightning"] is not None:
        place = f"epoch {found['epoch']}, step {found['global_step']}"
        yield _line("Lightning", f"{found['lightning']}; {place}")
    if found["num_parameters"] is not None:
        yield _line("parameters", f"{found['num_parameters']:,}")
    part = found["fault_tolerance"]
    if part is None:
        yield _line("fault tolerance", "none: it was saved without this package. A resume restores what Lightning does")
    else:
        yield from _part_lines(part)
    yield ""
    yield from _key_lines(found["keys"])


def _place(position: Mapping[str, object]) -> str:
    where, evaluated = position.get("where"), position.get("validation_batch")
    if where in (*IN_EVALUATION, *ENDS[1:]):
        return f"{where}: batch {evaluated}"
    batch = f"batch {position.get('batch')}" + (f", validation batch {evaluated}" if evaluated else "")
    hook = f", in {position['hook']}" if position.get("hook") else ""
    return f"{where}: epoch {position.get('epoch')}, {batch}, step {position.get('global_step')}{hook}"


def _part_lines(part: Mapping[str, Any]) -> Iterator[str]:
    position = part["position"] if isinstance(part["position"], dict) else {}
    yield _line("saved at", _place(position))
    yield _line("run", part["run"])
    yield _line("started from", part["origin"] or "the beginning")
    yield _line("ranks", part["world_size"])
    yield _line("layout version", part["version"])
    for reason in (*_items(part["not_exact"]), *_items(part["inexact"])):
        yield _line("not exact", reason)
    for text, label in mapping(part["remarks"]).items():
        yield _line(label, text)
    for hook in _items(part["pending"]):
        yield _line("hooks to run", hook)
    for name, num_bytes in part["opaque"].items():
        yield _line("kept as bytes", f"{name}, {size_text(num_bytes)}")
    for place, found in part["pickled"].items():
        yield _line("object", f"{place}, {found['class']}, {size_text(found['num_bytes'])}; unpickled if trusted")
    for name, num_bytes in part["others"].items():
        if num_bytes:
            yield _line("besides", f"{name}, {size_text(num_bytes)}")
    yield ""
    yield "State of the ranks"
    yield from _rank_lines(part["ranks"])
    for title, name in (("Surroundings", "surroundings"), ("Fingerprint", "fingerprint")):
        if isinstance(part[name], dict):
            yield ""
            yield title
            yield from _nested_lines(part[name], level=1)


def _items(value: object) -> list[object]:
    """Return the items of a value that should be a list but may be anything."""
    if isinstance(value, list):
        return value
    return [] if value is None else [value]


def _rank_lines(ranks: list[dict[str, int]]) -> list[str]:
    names = dict.fromkeys(name for rank in ranks for name in rank)
    rows = []
    for name in names:
        sizes = [rank[name] for rank in ranks if name in rank]
        rows.append([name, str(len(sizes)), size_text(sum(sizes))])
    return table(("PART", "STATES", "SIZE"), rows, right=("STATES", "SIZE"), indent=2)


def _key_lines(keys: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    rows = [
        [name, str(size["num_tensors"]), f"{size['num_values']:,}", size_text(size["num_bytes"])]
        for name, size in keys.items()
    ]
    if not rows:
        yield "It holds no dict of keys."
        return
    yield from table(("KEY", "TENSORS", "VALUES", "SIZE"), rows[:_MAX_KEYS], right=("TENSORS", "VALUES", "SIZE"))
    if len(rows) > _MAX_KEYS:
        yield f"and {len(rows) - _MAX_KEYS} more; --json shows all"


def _nested_lines(value: Mapping[str, object], *, level: int) -> Iterator[str]:
    width = min(_MAX_WIDTH, max((len(safe(name)) for name in value), default=0))
    for name, child in value.items():
        if isinstance(child, dict) and 0 < len(child) <= _MAX_ENTRIES and level < _MAX_LEVEL:
            yield f"{'  ' * level}{safe(name)}"
            yield from _nested_lines(child, level=level + 1)
        else:
            yield _line(name, child, level=level, width=width)


def _brief(value: object) -> str:
    if isinstance(value, dict) and value:
        return f"{len(value)} entries; --json shows them"
    text = str(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."


def _line(label: object, value: object, *, level: int = 0, width: int = _LABEL_WIDTH) -> str:
    return f"{'  ' * level}{safe(label):{width}}  {safe(_brief(value))}".rstrip()

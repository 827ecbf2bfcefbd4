"""``inspect``: print the contents of one checkpoint in readable form, without loading it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import chain
from typing import IO, Any

from lightning_faulttolerant.checkpoint.joined_file import references_in
from lightning_faulttolerant.checkpoint.manifest import describe_damage
from lightning_faulttolerant.checkpoint.state_summaries import read_state_summaries
from lightning_faulttolerant.checkpoint.summary import read_summary
from lightning_faulttolerant.cli.contents import describe
from lightning_faulttolerant.cli.errors import remote_errors
from lightning_faulttolerant.cli.found import content_path, open_checkpoint
from lightning_faulttolerant.cli.part import mapping
from lightning_faulttolerant.cli.text import safe, size_text, table
from lightning_faulttolerant.errors import DamagedCheckpointError
from lightning_faulttolerant.records.incidents import Incident, read_incident, step_of_incident
from lightning_faulttolerant.storage.store import open_file, split_path

DESCRIPTION = """\
Show the contents of a checkpoint: its run and the position in it, the parts of the state that each rank holds, the
fingerprint of the run, versions and device, Lightning's keys and their sizes. For the checkpoint of an incident, its
report is shown, too.

Nothing is loaded, and no code in the file runs. Only the directory of the file and its pickle are read, not the
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
        help="path or URL of a checkpoint; for a directory of shards, the part outside the shards is shown",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with nothing left out for brevity")


def run(arguments: argparse.Namespace) -> int:
    """Print the contents of the checkpoint.

    Args:
        arguments: The parsed arguments.

    Returns:
        The exit status.
    """
    path = content_path(arguments.file)
    with remote_errors(path), open_checkpoint(path) as file:
        summary = read_summary(file, name=path)
        found = describe(summary, path=path, states=read_state_summaries(file, summary, name=path))
        found["base"] = _base(file, path)
    incident = _incident(path)
    if arguments.json:
        print(json.dumps({**found, "incident": None if incident is None else asdict(incident)}, indent=2))
    else:
        for line in chain(_lines(found), _incident_lines(incident)):
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
    directory, name = split_path(path)
    step = step_of_incident(name)
    if step is None:
        return None
    beside = f"{directory}/{name.removesuffix('ckpt')}json" if directory else f"{name.removesuffix('ckpt')}json"
    try:
        with remote_errors(beside), open_file(beside) as file:
            return read_incident(file.read())
    except OSError:
        return None


def _incident_lines(incident: Incident | None) -> Iterator[str]:
    if incident is not None:
        yield ""
        yield from map(safe, incident.lines())
        yield safe(f"To see it, type: {incident.replay}")


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
    where, evaluated = str(position.get("where")), position.get("validation_batch")
    if where.rpartition(" ")[2] in ("validate", "test", "predict"):
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
    for word, name in (("left out", "done"), ("to leave out", "wanted")):
        for place in _items(mapping(part["skipped"]).get(name)):
            if name == "done" or place not in _items(mapping(part["skipped"]).get("done")):
                yield _line(word, _batch(place))
    for reason in _items(part["inexact"]):
        yield _line("not exact", reason)
    for path, reason in part["lost"].items():
        yield _line("without", f"{path}: {reason}")
    for hook in _items(part["behind"]):
        yield _line("hooks to come", hook)
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


def _batch(place: object) -> str:
    numbers = _items(place)
    return f"batch {numbers[1]} of epoch {numbers[0]}" if len(numbers) == 2 else str(place)


def _items(value: object) -> list[Any]:
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

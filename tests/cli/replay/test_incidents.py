"""The line of an incident's message replays its step."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from lightning_faulttolerant.records.incidents import Incident, read_incident
from tests.cli.replay.replays import Replayed, content, replay, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OPTIONS = "FlightRecorder.rule=nan"


def recorded(where: Path, *arguments: str, options: str = OPTIONS, **variables: str) -> tuple[Replayed, Incident]:
    """Train with a flight recorder, and return its only incident."""
    ended = train(where, *arguments, PL_FAULT_TOLERANT_OPTIONS=options, **variables)
    [path] = where.rglob("incidents/*.json")
    incident = read_incident(path.read_text())
    assert incident is not None
    return ended, incident


def test_a_spoilt_sample_is_replayed(tmp_path: Path) -> None:
    """The line of the message replays the step from its file, with two workers, and equals the ledger of the run."""
    ended, incident = recorded(tmp_path, "--spoilt", "--workers=2")
    assert ended.exit_code == 0, ended.output
    assert incident.replay in ended.output
    before = content(tmp_path)
    words = shlex.split(incident.replay)
    assert words[:3] == ["lightning-faulttolerant", "replay", "--until"]
    found = replay(tmp_path, *words[2 : words.index("--")], arguments=("--spoilt", "--workers=2"))
    assert found.exit_code == 0, found.output
    assert f"from step {incident.step} (" in found.lines()[0]
    assert found.lines()[0].endswith(f"incidents/{incident.checkpoint})")
    assert f"  1 step equals {tmp_path}/out/ledger.jsonl, bit for bit" in found.lines()
    assert content(tmp_path) == before


def test_an_exception_that_comes_again(tmp_path: Path) -> None:
    """The line of the message replays the step that raised, from its file."""
    ended, incident = recorded(tmp_path, "--raises-at=12")
    assert ended.exit_code == 1
    assert (incident.step, incident.what) == (12, "ValueError: planted at step 12")
    words = shlex.split(incident.replay)
    found = replay(tmp_path, *words[2 : words.index("--")], arguments=("--raises-at=12",))
    assert found.exit_code == 0, found.output
    assert f"from step 12 ({tmp_path}" in found.lines()[0]

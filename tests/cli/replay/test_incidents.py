"""The step of an incident runs a second time, in its own process, and the line of its message replays it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from lightning_faulttolerant.records.incidents import Incident, read_incident
from tests.cli.replay.replays import Replayed, content, replay, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OPTIONS = "record=nan, attribute=true"


def recorded(where: Path, *arguments: str, options: str = OPTIONS, **variables: str) -> tuple[Replayed, Incident]:
    """Train with a flight recorder, and return its only incident."""
    ended = train(where, *arguments, PL_FAULT_TOLERANT_OPTIONS=options, **variables)
    [path] = where.rglob("incidents/*.json")
    incident = read_incident(path.read_text())
    assert incident is not None
    return ended, incident


def test_a_spoilt_sample_points_to_the_data(tmp_path: Path) -> None:
    """The second run equals the first, with two workers; the line of the message replays the step from its file."""
    ended, incident = recorded(tmp_path, "--spoilt", "--workers=2")
    assert ended.exit_code == 0, ended.output
    assert incident.second_run == "equals it, bit for bit: the cause is in the data or the model"
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


def test_a_step_that_differs_points_to_the_hardware(tmp_path: Path) -> None:
    """What only the first run has, as a flipped bit, makes the second differ, and the first such tensor is named."""
    ended, incident = recorded(tmp_path, FLIPPED_AT="5")
    assert ended.exit_code == 0, ended.output
    assert incident.step == 5
    first = re.match(
        r"differs, first in: (.+?) and \d+ more; its loss is [\d.]+: the cause is the hardware", incident.second_run
    )
    assert first is not None, incident.second_run
    assert first[1] == "loss"


def test_a_flipped_gradient_is_named(tmp_path: Path) -> None:
    """If the loss is equal, the gradient that differs is named."""
    _, incident = recorded(tmp_path, FLIPPED_GRADIENT_AT="5")
    assert incident.second_run.startswith("differs, first in: gradient of layers.0.weight; its loss is ")
    assert incident.gradients == ("layers.0.weight",)


def test_an_exception_that_comes_again(tmp_path: Path) -> None:
    """A second run that raises it, too, points to the data or the model; one that does not, to the hardware."""
    ended, incident = recorded(tmp_path, "--raises-at=12")
    assert ended.exit_code == 1
    assert (incident.step, incident.what) == (12, "ValueError: planted at step 12")
    assert incident.second_run == "raises it, too: the cause is in the data or the model"
    words = shlex.split(incident.replay)
    found = replay(tmp_path, *words[2 : words.index("--")], arguments=("--raises-at=12",))
    assert found.exit_code == 0, found.output
    assert f"from step 12 ({tmp_path}" in found.lines()[0]


def test_an_exception_that_does_not_come_again(tmp_path: Path) -> None:
    """What the first run alone has raised."""
    ended, incident = recorded(tmp_path, "--raises-at=12", IS_CALM_AGAIN="1")
    assert ended.exit_code == 1
    assert incident.second_run.startswith("does not raise it: the cause is the hardware")

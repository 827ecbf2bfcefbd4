"""A replay does the steps of the run again, bit for bit, and touches nothing of it."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant.records.ledger import BATCH
from lightning_faulttolerant.trainer.steps.digests import digest
from tests.cli.checkpoints import flip
from tests.cli.replay.replays import LAUNCHER, content, replay, train
from tests.cli.replay.training import SPOILT
from tests.ledgers import read_ledger
from tests.messages import plain

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run: two epochs of 8 steps, with kept autosaves at each third."""
    where = tmp_path_factory.mktemp("finished")
    ended = train(where)
    assert ended.exit_code == 0, ended.output
    return where


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two workers that an exception ended in step 12."""
    where = tmp_path_factory.mktemp("failed")
    ended = train(where, "--workers=2", "--raises-at=12")
    assert ended.exit_code == 1, ended.output
    return where


RAISING = {"arguments": ("--workers=2", "--raises-at=12")}
SETTING = ("--from", "1:2", "--until", "1:3", "--set")
# The run, the options of the replay, more about it, and its exit code.
REPLAYS: dict[str, tuple[str, tuple[str, ...], dict[str, Any], int]] = {
    "one step": ("finished", ("--until", "10"), {}, 0),
    "before the first autosave": ("finished", ("--from", "1", "--until", "1"), {}, 0),
    "without a batch": ("finished", ("--until", "1:3", "--without", "1:1"), {}, 0),
    "without a batch, from before": ("finished", ("--from", "7", "--until", "1:2", "--without", "1:1"), {}, 0),
    "with values set": (
        "finished",
        (*SETTING, "model.factor=0", "--set", "optimizers.0.param_groups.0.lr=1"),
        {},
        0,
    ),
    "with a parameter set": ("finished", (*SETTING, "model.layers.0.bias=1"), {}, 0),
    "with a value that does not exist": ("finished", ("--until", "10", "--set", "model.layers.7.p=0"), {}, 2),
    "a planted difference": ("finished", ("--until", "10"), {"FACTOR": "1.5"}, 1),
    "a step after the end": ("finished", ("--until", "16"), {}, 2),
    "a batch after the end of the epoch": ("finished", ("--until", "0:8"), {}, 2),
    "left by the debugger": ("finished", ("--until", "10", "--pdb"), {}, 0),  # it reads the end of the input
    "the exception": ("failed", ("--at-exception",), RAISING, 0),
    "no exception comes": ("failed", ("--at-exception",), {**RAISING, "IS_CALM": "1"}, 1),
    "to the end of a run that failed": ("failed", ("--until", "99"), {**RAISING, "IS_CALM": "1"}, 2),
}


@pytest.mark.parametrize("case", REPLAYS)
def test_a_replay_says_what_it_did_and_touches_nothing(
    case: str, finished: Path, failed: Path, snapshot: SnapshotAssertion
) -> None:
    """It begins at the newest autosave before the step; what it prints is known, and no file of the run changes."""
    name, options, more, exit_code = REPLAYS[case]
    where = {"finished": finished, "failed": failed}[name]
    before = content(where)
    found = replay(where, *options, **more)
    assert found.exit_code == exit_code, found.output
    said = plain("\n".join(line for line in found.lines() if line.startswith(("Replay", "  "))), RUN=where)
    assert re.sub(r"\d\.\d{6,}(e-\d+)?", "LOSS", said) == snapshot
    assert content(where) == before
    assert ("in training_step" in found.output) == (case == "the exception")
    assert "what was logged so far" not in found.output  # the loggers of the run are not continued


def test_without_an_exception_there_is_none_to_replay(finished: Path) -> None:
    """The history of a run that finished tells of none, and the message says what to give instead."""
    before = content(finished)
    found = replay(finished, "--at-exception")
    assert found.exit_code == 2
    assert "did not end with an exception: its history says 'finished'" in found.output
    assert content(finished) == before


def test_epoch_and_batch_name_the_same_steps(finished: Path, tmp_path: Path) -> None:
    """EPOCH:BATCH stands for the number over all epochs. --output keeps ledger and logs, and no autosave is written."""
    found = replay(finished, "--from", "1:2", "--until", "1:5", "--output", str(tmp_path))
    assert found.lines()[1] == "  stopped after step 13 (batch 5 of epoch 1)"
    [fit] = read_ledger(tmp_path / "ledger.jsonl").fits
    assert [line["batch"] for line in fit.of(BATCH)] == [1, 2, 3, 4, 5]
    assert len((tmp_path / "logs/0/csv/version_1/metrics.csv").read_text().splitlines()) == 6
    assert list(tmp_path.rglob("autosave-*")) == []


def test_a_script_without_the_callback_is_replayed(tmp_path: Path) -> None:
    """The variables that protected the run are those of the replay, which switches the callback on by itself."""
    options = {
        "PL_FAULT_TOLERANT_OPTIONS": "FlightRecorder.rule=none, FlightRecorder.keep_every=3",
        "PL_FAULT_TOLERANT_LEDGER": f"{tmp_path}/out/mine.jsonl",
    }
    ended = train(tmp_path, "--bare", **options, PL_FAULT_TOLERANT_TRAINING="1")
    assert ended.exit_code == 0, ended.output
    before = content(tmp_path)
    found = replay(tmp_path, "--until", "7", arguments=("--bare",), **options)
    assert found.exit_code == 0, found.output
    assert "from step 6 (" in found.lines()[0]
    assert f"  2 steps equal {tmp_path}/out/mine.jsonl, bit for bit" in found.lines()
    assert content(tmp_path) == before


def test_a_dump_holds_what_the_step_used(finished: Path, tmp_path: Path) -> None:
    """Batch, indices, and generators have the digests of the run's ledger; loss and gradients are there."""
    found = replay(finished, "--from", "10", "--until", "11", "--dump", str(tmp_path / "dump"))
    assert found.exit_code == 0, found.output
    [fit] = read_ledger(finished / "out" / "ledger.jsonl").fits
    for number in (10, 11):
        folder = tmp_path / "dump" / f"step-{number:08d}"
        step, told = torch.load(folder / "rank-0.pt"), json.loads((folder / "rank-0.json").read_text())
        line = fit.of(BATCH)[number]
        assert digest(step["fetched"]) == line["content"]
        assert digest(told["indices"]) == line["order"]
        assert float(step["loss"]) == told["loss"] == float.fromhex(line["loss"])
        states = {name: state.numpy().tobytes() for name, state in step["generators"].items()}
        assert digest(states) == line["rng"]
        assert sorted(told["gradient_norms"][0]) == ["layers.0", "layers.2"]
    assert (told["step"], told["epoch"], told["batch"], told["worker"]) == (11, 1, 3, {"train/0": None})


def test_the_debugger_opens_in_the_step(finished: Path) -> None:
    """It stops at the first line of the first step's training_step, once, and the replay goes on as before."""
    (finished / ".pdbrc").write_text("p 'found', batch_idx, self.global_step\ncontinue\n")
    before = content(finished)
    found = replay(finished, "--from", "10", "--until", "11", "--pdb")
    (finished / ".pdbrc").unlink()
    assert found.exit_code == 0, found.output
    assert found.output.count("('found', 2, 10)") == 1
    assert found.output.count("('found'") == 1
    assert f"  3 steps equal {finished}/out/ledger.jsonl, bit for bit" in found.lines()
    before.pop(".pdbrc")
    assert content(finished) == before


def test_a_run_of_several_processes_is_one_run(tmp_path: Path) -> None:
    """After an exception and a resume, steps of both processes are replayed, and equal the ledger of both."""
    arguments = ("--workers=2", "--raises-at=12")
    train(tmp_path, *arguments)
    assert train(tmp_path, *arguments, IS_CALM="1").exit_code == 0
    before = content(tmp_path)
    found = replay(tmp_path, "--until", "14", "--from", "8", arguments=arguments, IS_CALM="1")
    assert found.exit_code == 0, found.output
    assert f"  9 steps equal {tmp_path}/out/ledger.jsonl, bit for bit" in found.lines()
    assert content(tmp_path) == before


def test_a_damaged_autosave_is_passed_over_and_left(tmp_path: Path) -> None:
    """An older one is taken; the damaged one keeps its name, since the files are the run's."""
    train(tmp_path)
    [damaged] = (tmp_path / "out").rglob("*epoch=1-batch=1-kept.ckpt")
    flip(damaged)
    before = content(tmp_path)
    found = replay(tmp_path, "--until", "10")
    assert found.exit_code == 0, found.output
    assert "from step 6 (" in found.lines()[0]
    assert content(tmp_path) == before


def test_the_sample_that_spoils_a_run_is_found(tmp_path: Path) -> None:
    """The first loss that is not finite, the sample in the batch, and the operation are named, each by one command."""
    arguments = ("--workers=2", "--spoilt")
    train(tmp_path, *arguments)
    before = content(tmp_path)
    [first] = [
        line for line in replay(tmp_path, "--from=0", "--until=7", arguments=arguments).lines() if "first" in line
    ]
    batch = first.split("batch ")[1].split()[0]
    [fit] = read_ledger(tmp_path / "out" / "ledger.jsonl").fits
    assert next(line["batch"] for line in fit.of(BATCH) if line["loss"] == "nan") == int(batch)
    found = replay(tmp_path, f"--until={batch}", "--dump", str(tmp_path / "dump"), arguments=arguments)
    assert found.exit_code == 0, found.output
    [named] = [line for line in found.lines() if "not finite, in row" in line]
    assert named.endswith(f"(sample {SPOILT})")
    assert f"made by worker {int(batch) % 2}, samples [" in found.output
    assert any("gradients that are not finite: layers.0, layers.2" in line for line in found.lines())
    anomaly = replay(tmp_path, f"--until={batch}", "--anomaly", arguments=arguments)
    assert "returned nan values in its 0th output" in anomaly.output
    assert "raised in step " in anomaly.lines()[1]
    after = content(tmp_path)
    assert {name: each for name, each in after.items() if not name.startswith("dump")} == before


def test_finite_steps_name_no_sample(finished: Path, tmp_path: Path) -> None:
    """Where all is finite, nothing is reported as not finite, and --anomaly raises nothing."""
    found = replay(finished, "--until", "10", "--anomaly", "--dump", str(tmp_path / "dump"))
    assert found.exit_code == 0, found.output
    assert not any("not finite" in line for line in found.lines())


def test_a_later_fit_of_a_script_is_replayed(tmp_path: Path) -> None:
    """The fits before it end as they did, and a fit that the script does not have is reported."""
    train(tmp_path, "--fits=2")
    before = content(tmp_path)
    found = replay(tmp_path, "--until", "5", "--fit", "2", arguments=("--fits=2",))
    assert found.exit_code == 0, found.output
    assert "Replay of fit 2, from step 3 (" in found.lines()[0]
    assert f"  3 steps equal {tmp_path}/out/ledger.jsonl, bit for bit" in found.lines()
    assert content(tmp_path) == before
    missing = replay(tmp_path, "--until", "5", "--fit", "3", arguments=("--fits=2",))
    assert missing.exit_code == 2
    assert "fit 3 was not replayed: the script has no such fit" in missing.output


@pytest.mark.parametrize("launcher", [LAUNCHER, ()], ids=["torchrun", "Lightning"])
def test_two_ranks_are_replayed(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    """Both ranks begin at the same autosave, stop together, equal their ledgers, and touch nothing."""
    arguments = ("--devices=2", "--workers=1")
    ended = train(tmp_path, *arguments, launcher=launcher)
    assert ended.exit_code == 0, ended.output
    while (tmp_path / "out" / "ended").read_text().count("ended") < 2:  # Lightning does not wait for the other rank
        time.sleep(0.01)
    before = content(tmp_path)
    options = ("--from", "5", "--until", "6", "--dump", str(tmp_path / "dump"))
    found = replay(tmp_path, *options, arguments=arguments, launcher=launcher)
    assert found.exit_code == 0, found.output
    assert "from step 3 (" in found.lines()[0]
    assert f"  4 steps equal {tmp_path}/out/ledger.jsonl, bit for bit" in found.lines()
    dumped = sorted((tmp_path / "dump").rglob("*.json"))
    assert len(dumped) == 4
    indices = [json.loads(path.read_text())["indices"]["train/0"] for path in dumped[2:]]
    assert not {*indices[0]} & {*indices[1]}
    other = replay(tmp_path, "--until", "6", arguments=arguments, launcher=launcher, FACTOR="1.5")
    assert other.exit_code == 1, other.output
    after = {name: each for name, each in content(tmp_path).items() if not name.startswith("dump")}
    assert after == before

"""A replay does the steps of the run again, bit for bit, and touches nothing of it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from lightning_faulttolerant.records.ledger import BATCH
from lightning_faulttolerant.trainer.steps.digests import digest
from tests.cli.checkpoints import flip
from tests.cli.replay.replays import LAUNCHER, content, replay, train
from tests.cli.replay.training import SPOILT
from tests.ledgers import read_ledger

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


def test_a_replay_equals_the_run_and_touches_nothing(finished: Path) -> None:
    """It begins at the newest autosave before the step, does the step, and leaves every file as it was."""
    before = content(finished)
    found = replay(finished, "--until", "10")
    assert found.exit_code == 0, found.output
    assert content(finished) == before
    lines = found.lines()
    assert "from step 9 (" in lines[0]
    assert lines[1] == "  stopped after step 10 (batch 2 of epoch 1)"
    assert lines[-1] == f"  2 steps equal {finished}/out/ledger.jsonl, bit for bit"
    assert "what was logged so far" not in found.output  # the loggers of the run are not continued


def test_epoch_and_batch_name_the_same_steps(finished: Path, tmp_path: Path) -> None:
    """EPOCH:BATCH stands for the number over all epochs. --output keeps ledger and logs, and no autosave is written."""
    found = replay(finished, "--from", "1:2", "--until", "1:5", "--output", str(tmp_path))
    assert found.exit_code == 0, found.output
    assert found.lines()[1] == "  stopped after step 13 (batch 5 of epoch 1)"
    [fit] = read_ledger(tmp_path / "ledger.jsonl").fits
    assert [line["batch"] for line in fit.of(BATCH)] == [1, 2, 3, 4, 5]
    assert len((tmp_path / "logs/0/csv/version_1/metrics.csv").read_text().splitlines()) == 6
    assert list(tmp_path.rglob("autosave-*")) == []


def test_a_replay_without_a_batch_differs_only_after_it(finished: Path) -> None:
    """It begins before that batch, equals the run up to it, leaves it out, and touches nothing."""
    before = content(finished)
    found = replay(finished, "--until", "1:3", "--without", "1:1")
    assert found.exit_code == 0, found.output
    assert content(finished) == before
    lines = found.lines()
    assert "from step 9 (" in lines[0]
    assert "Batch 1 of epoch 1 is left out" in found.output
    assert "  left out: batch 1 of epoch 1. Later steps are not compared with the run" in lines
    assert f"  no step of the replay is in {finished}/out/ledger.jsonl" in lines
    earlier = replay(finished, "--from", "7", "--until", "1:2", "--without", "1:1")
    assert f"  3 of 4 steps equal {finished}/out/ledger.jsonl, bit for bit" in earlier.lines(), earlier.output


def test_a_value_is_set_before_the_first_step_of_interest(finished: Path) -> None:
    """Steps before it equal the run, later ones use the value, and nothing is touched."""
    before = content(finished)
    steps = ("--from", "1:2", "--until", "1:3", "--set", "model.factor=0", "--set", "optimizers.0.param_groups.0.lr=1")
    found = replay(finished, *steps)
    assert found.exit_code == 0, found.output
    assert content(finished) == before
    lines = found.lines()
    assert "  loss of batch 3 of epoch 1: 0.0" in lines
    named = "model.factor=0, optimizers.0.param_groups.0.lr=1"
    assert f"  set before step 10 (batch 2 of epoch 1): {named}. This step and later ones are not compared" in lines
    earlier = replay(finished, "--from", "1:2", "--until", "1:3", "--set", "model.layers.0.bias=1")
    assert "set before step 10 (batch 2 of epoch 1): model.layers.0.bias=1" in earlier.output, earlier.output
    assert f"  1 of 3 steps equal {finished}/out/ledger.jsonl, bit for bit" in earlier.lines(), earlier.output


def test_a_value_that_does_not_exist_is_an_error(finished: Path) -> None:
    """It names the part of the key that was found."""
    found = replay(finished, "--until", "10", "--set", "model.layers.7.p=0")
    assert found.exit_code == 2, found.output
    [line] = [line for line in found.lines() if "raised in step 10" in line]
    assert line.endswith("ReplayError: --set model.layers.7.p: model.layers, a Sequential, has no 7.")


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


def test_a_planted_difference_is_named(finished: Path) -> None:
    """A loss that differs from the run's ledger is named with both values, at the first such step."""
    before = content(finished)
    found = replay(finished, "--until", "10", FACTOR="1.5")
    assert found.exit_code == 1, found.output
    assert content(finished) == before
    [place, loss] = [line for line in found.lines() if "DIFFERS" in line or "    loss: " in line]
    assert place.endswith("first at batch 1 of epoch 1 (rank 0):")
    assert " in the run, " in loss


def test_steps_before_the_first_autosave_begin_at_the_beginning(finished: Path) -> None:
    """Without an autosave before the step, the fit begins; its script has a seed, so that is exact, too."""
    found = replay(finished, "--from", "1", "--until", "1")
    assert found.exit_code == 0, found.output
    assert "from the beginning of the fit" in found.lines()[0]
    assert f"  2 steps equal {finished}/out/ledger.jsonl, bit for bit" in found.lines()


@pytest.mark.parametrize(
    ("step", "end"),
    [
        ("16", "the fit ended after step 15 (batch 7 of epoch 1), before step 16"),
        ("0:8", "there is no batch 8 of epoch 0: stopped before step 8 (batch 0 of epoch 1)"),
    ],
)
def test_a_step_that_does_not_exist_is_not_reached(finished: Path, step: str, end: str) -> None:
    """A step after the end of the fit, or of its epoch, is no success, and still nothing is touched."""
    before = content(finished)
    found = replay(finished, "--until", step)
    assert found.exit_code == 2, found.output
    assert found.lines()[1] == f"  {end}"
    assert content(finished) == before


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


def test_leaving_the_debugger_ends_the_replay(finished: Path) -> None:
    """A user who quits the debugger ends the process, without a traceback, and touches nothing."""
    before = content(finished)
    found = replay(finished, "--until", "10", "--pdb")  # there is no terminal: it reads the end of the input
    assert found.lines()[1] == "  left in step 10 (batch 2 of epoch 1), by the debugger"
    assert "Traceback" not in found.output
    assert content(finished) == before


def test_the_exception_of_a_run_is_raised_again(failed: Path) -> None:
    """It comes in the same step, with its traceback; callbacks that save on an exception save nothing."""
    before = content(failed)
    assert any(name.endswith("on_exception.ckpt") for name in before)
    found = replay(failed, "--at-exception", arguments=("--workers=2", "--raises-at=12"))
    assert found.exit_code == 0, found.output
    assert found.lines()[1] == "  raised in step 12 (batch 4 of epoch 1): ValueError: planted at step 12"
    assert "in training_step" in found.output
    assert content(failed) == before


def test_an_exception_that_does_not_come_again_is_a_difference(failed: Path) -> None:
    """If the step ends well, the replay stops after it, and says so."""
    found = replay(failed, "--at-exception", arguments=("--workers=2", "--raises-at=12"), IS_CALM="1")
    assert found.exit_code == 1, found.output
    assert found.lines()[1] == "  no exception came"


def test_a_fit_that_continues_to_its_end_touches_nothing(failed: Path) -> None:
    """Checkpoints of the steps after the run's end are not written, older ones not removed, links not moved."""
    before = content(failed)
    assert "out/checkpoints/1/epoch=0-step=8.ckpt" in before
    found = replay(failed, "--until", "99", arguments=("--workers=2", "--raises-at=12"), IS_CALM="1")
    assert found.exit_code == 2, found.output
    assert "the fit ended after step 15" in found.lines()[1]
    assert content(failed) == before


def test_without_an_exception_there_is_none_to_replay(finished: Path) -> None:
    """The history of a run that finished tells of none, and the message says what to give instead."""
    before = content(finished)
    found = replay(finished, "--at-exception")
    assert found.exit_code == 2
    assert "did not end with an exception: its history says 'finished'" in found.output
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
    deadline = time.monotonic() + 60
    while (tmp_path / "out" / "ended").read_text().count("ended") < 2:  # Lightning does not wait for the other rank
        assert time.monotonic() < deadline
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

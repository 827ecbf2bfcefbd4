"""A replay does the steps of the run again, bit for bit, and touches nothing of it."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant.records.ledger import BATCH
from lightning_faulttolerant.trainer.steps.digests import digest
from tests.cli.trained import TORCHRUN, Ended, content, on_training, train
from tests.damage import change_a_weight
from tests.ledgers import read_ledger
from tests.messages import plain

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
FAILED = ("--workers=2", "--raises-at=12")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that returns a run with these arguments: two epochs of 8 steps, each third autosave kept."""
    known: dict[Any, Path] = {}

    def run(*arguments: str) -> Path:
        if arguments not in known:
            known[arguments] = tmp_path_factory.mktemp("run")
            ended = train(known[arguments], *arguments)
            assert ended.exit_code == ("--raises-at=12" in arguments), ended.output
        return known[arguments]

    return run


def replay(where: Path, *options: str, code: int = 0, **more: Any) -> Ended:
    """Replay the run in a directory, and check that no file of it changes."""
    before = content(where)
    found = on_training(where, "replay", *options, **more)
    assert found.exit_code == code, found.output
    assert content(where) == before
    return found


def equals(where: Path, number: int, name: str = "ledger") -> str:
    """Return the line of a replay whose steps equal the run's."""
    return f"  {number} step{'s equal' if number > 1 else ' equals'} {where}/out/{name}.jsonl, bit for bit"


SETTING = ("--from", "1:2", "--until", "1:3", "--set")
# The arguments of the script, the options of the replay, its exit code, and variables.
REPLAYS: dict[str, tuple[tuple[str, ...], tuple[str, ...], int, dict[str, str]]] = {
    "one step": ((), ("--until", "10"), 0, {}),
    "before the first autosave": ((), ("--from", "1", "--until", "1"), 0, {}),
    "without a batch, from before": ((), ("--from", "7", "--until", "1:2", "--without", "1:1"), 0, {}),
    "with values set": ((), (*SETTING, "model.factor=0", "--set", "optimizers.0.param_groups.0.lr=1"), 0, {}),
    "with a parameter set": ((), (*SETTING, "model.layers.0.bias=1"), 0, {}),
    "with a value that does not exist": ((), ("--until", "10", "--set", "model.layers.7.p=0"), 2, {}),
    "a planted difference": ((), ("--until", "10"), 1, {"FACTOR": "1.5"}),
    "a batch after the end of the epoch": ((), ("--until", "0:8"), 2, {}),
    "left by the debugger": ((), ("--until", "10", "--pdb"), 0, {}),  # it reads the end of the input
    "the exception": (FAILED, ("--at-exception",), 0, {}),
    "no exception comes": (FAILED, ("--at-exception",), 1, {"IS_CALM": "1"}),
    "a later fit": (("--fits=2",), ("--until", "5", "--fit", "2"), 0, {}),
}


@pytest.mark.parametrize("case", REPLAYS)
def test_a_replay_says_what_it_did(case: str, ran: Callable[..., Path], snapshot: SnapshotAssertion) -> None:
    """It begins at the newest autosave before the step; what it prints is known."""
    arguments, options, code, variables = REPLAYS[case]
    where = ran(*arguments)
    found = replay(where, *options, code=code, arguments=arguments, **variables)
    said = plain("\n".join(line for line in found.lines() if line.startswith(("Replay", "  "))), RUN=where)
    assert re.sub(r"\d\.\d{6,}(e-\d+)?", "LOSS", said) == snapshot
    assert ("in training_step" in found.output) == (case == "the exception")
    assert "what was logged so far" not in found.output  # the loggers of the run are not continued


def test_what_is_not_there_can_not_be_replayed(ran: Callable[..., Path]) -> None:
    """A run that finished has no exception, and a script with two fits has no third one."""
    found = replay(ran(), "--at-exception", code=2)
    assert "did not end with an exception: its history says 'finished'" in found.output
    # The script comes to its end.
    found = on_training(ran("--fits=2"), "replay", "--until", "5", "--fit", "3", arguments=("--fits=2",))
    assert (found.exit_code, "fit 3 was not replayed: the script has no such fit" in found.output) == (2, True)


def test_epoch_and_batch_name_the_same_steps(ran: Callable[..., Path], tmp_path: Path) -> None:
    """EPOCH:BATCH stands for the number over all epochs. --output keeps ledger and logs, and no autosave is written."""
    found = replay(ran(), "--from", "1:2", "--until", "1:5", "--output", str(tmp_path))
    assert found.lines()[1] == "  stopped after step 13 (batch 5 of epoch 1)"
    [fit] = read_ledger(tmp_path / "ledger.jsonl")
    assert [line["batch"] for line in fit.of(BATCH)] == [1, 2, 3, 4, 5]
    assert len((tmp_path / "logs/0/csv/version_1/metrics.csv").read_text().splitlines()) == 6
    assert list(tmp_path.rglob("autosave-*")) == []


def test_a_script_without_the_callback_is_replayed(tmp_path: Path) -> None:
    """The variables that protected the run are those of the replay, which switches the callback on by itself."""
    options = {"PL_FAULT_TOLERANT_OPTIONS": "FlightRecorder.rule=none, FlightRecorder.keep_every=3"}
    options["PL_FAULT_TOLERANT_LEDGER"] = f"{tmp_path}/out/mine.jsonl"
    assert train(tmp_path, "--bare", **options, PL_FAULT_TOLERANT_TRAINING="1").exit_code == 0
    found = replay(tmp_path, "--until", "7", arguments=("--bare",), **options)
    assert "from step 6 (" in found.lines()[0]
    assert equals(tmp_path, 2, "mine") in found.lines()


def test_a_dump_holds_what_the_step_used(ran: Callable[..., Path], tmp_path: Path) -> None:
    """Batch, indices, and generators have the digests of the run's ledger; loss and gradients are there."""
    replay(ran(), "--from", "10", "--until", "11", "--dump", str(tmp_path / "dump"))
    [fit] = read_ledger(ran() / "out" / "ledger.jsonl")
    for number in (10, 11):
        folder = tmp_path / "dump" / f"step-{number:08d}"
        step, told = torch.load(folder / "rank-0.pt"), json.loads((folder / "rank-0.json").read_text())
        line = fit.of(BATCH)[number]
        assert digest(step["fetched"]) == line["content"]
        assert digest(told["indices"]) == line["order"]
        assert float(step["loss"]) == told["loss"] == float.fromhex(line["loss"])
        assert digest({name: state.numpy().tobytes() for name, state in step["generators"].items()}) == line["rng"]
        assert sorted(told["gradient_norms"][0]) == ["layers.0", "layers.2"]
    assert (told["step"], told["epoch"], told["batch"], told["worker"]) == (11, 1, 3, {"train/0": None})


def test_the_debugger_opens_in_the_step(tmp_path: Path) -> None:
    """It stops at the first line of the first step's training_step, once, and the replay goes on as before."""
    train(tmp_path)
    (tmp_path / ".pdbrc").write_text("p 'found', batch_idx, self.global_step\ncontinue\n")
    found = replay(tmp_path, "--from", "10", "--until", "11", "--pdb")
    assert re.findall(r"\('found'.*\)", found.output) == ["('found', 2, 10)"]
    assert equals(tmp_path, 3) in found.lines()


def test_a_run_of_several_processes_is_one_run(tmp_path: Path) -> None:
    """After an exception and a resume, steps of both are replayed; a damaged autosave is passed over and left."""
    train(tmp_path, *FAILED)
    assert train(tmp_path, *FAILED, IS_CALM="1").exit_code == 0
    found = replay(tmp_path, "--until", "14", "--from", "8", arguments=FAILED, IS_CALM="1")
    assert equals(tmp_path, 9) in found.lines()
    [damaged] = (tmp_path / "out").rglob("*epoch=1-batch=1-kept.ckpt")
    change_a_weight(damaged)
    assert "from step 6 (" in replay(tmp_path, "--until", "10", arguments=FAILED, IS_CALM="1").lines()[0]


def test_the_sample_that_spoils_a_run_is_found(tmp_path: Path) -> None:
    """The first loss that is not finite, the sample in the batch, and the operation are named, each by one command."""
    where, arguments = tmp_path / "run", ("--workers=2", "--spoilt")
    where.mkdir()
    train(where, *arguments)
    lines = replay(where, "--from=0", "--until=7", arguments=arguments).lines()
    [first] = [line for line in lines if "first" in line]
    batch = first.split("batch ")[1].split()[0]
    [fit] = read_ledger(where / "out" / "ledger.jsonl")
    assert next(line["batch"] for line in fit.of(BATCH) if line["loss"] == "nan") == int(batch)
    found = replay(where, f"--until={batch}", "--dump", str(tmp_path / "dump"), arguments=arguments)
    [named] = [line for line in found.lines() if "not finite, in row" in line]
    assert named.endswith("(sample 13)")
    assert f"made by worker {int(batch) % 2}, samples [" in found.output
    assert any("gradients that are not finite: layers.0, layers.2" in line for line in found.lines())
    anomaly = on_training(where, "replay", f"--until={batch}", "--anomaly", arguments=arguments)
    assert "returned nan values in its 0th output" in anomaly.output
    assert "raised in step " in anomaly.lines()[1]


@pytest.mark.parametrize("launcher", [TORCHRUN, ()], ids=["torchrun", "Lightning"])
def test_two_ranks_are_replayed(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    """Both ranks begin at the same autosave, stop together, equal their ledgers, and touch nothing."""
    where = tmp_path / "run"
    where.mkdir()
    more: dict[str, Any] = {"arguments": ("--devices=2", "--workers=1"), "launcher": launcher}
    ended = train(where, *more["arguments"], launcher=launcher)
    assert ended.exit_code == 0, ended.output
    while (where / "out" / "ended").read_text().count("ended") < 2:  # Lightning does not wait for the other rank
        time.sleep(0.01)
    found = replay(where, "--from", "5", "--until", "6", "--dump", str(tmp_path / "dump"), **more)
    assert "from step 3 (" in found.lines()[0]
    assert equals(where, 4) in found.lines()
    dumped = sorted((tmp_path / "dump").rglob("*.json"))
    assert len(dumped) == 4
    indices = [json.loads(path.read_text())["indices"]["train/0"] for path in dumped[2:]]
    assert not {*indices[0]} & {*indices[1]}
    replay(where, "--until", "6", code=1, FACTOR="1.5", **more)


def test_the_line_of_an_incident_replays_its_step(tmp_path: Path) -> None:
    """The line of the message replays the step from its own file, and equals the ledger of the run."""
    ended = train(tmp_path, "--spoilt", "--workers=2", RULE="nan")
    [path] = tmp_path.rglob("incidents/*.json")
    line = json.loads(path.read_text())["replay"]
    assert line in ended.output
    options = shlex.split(line.partition(" replay ")[2].partition(" -- ")[0])
    found = replay(tmp_path, *options, arguments=("--spoilt", "--workers=2"), RULE="nan")
    assert "/incidents/" in found.lines()[0]
    assert equals(tmp_path, 1) in found.lines()

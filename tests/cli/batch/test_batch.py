"""``batch``: it names the samples that a batch really had, and neither trains, reads, nor writes anything."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cli.checkpoints import call
from tests.cli.replay.replays import LAUNCHER, Replayed, _start, content

TRAINING = Path(__file__).with_name("training.py")
pytestmark = pytest.mark.timeout(300)


def train(where: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> Replayed:
    """Run the training."""
    return _start(where, *launcher, str(TRAINING), str(where / "out"), *arguments)


def batch(where: Path, *options: str, arguments: tuple[str, ...] = (), launcher: tuple[str, ...] = ()) -> Replayed:
    """Run the command; the data set must not be read, and nothing may change."""
    (where / "out" / "read").unlink(missing_ok=True)
    before = {name: value for name, value in content(where).items() if name != "out/process"}
    command = (sys.executable, *launcher, str(TRAINING), str(where / "out"), *arguments)
    found = _start(where, "-m", "lightning_faulttolerant", "batch", *options, "--", *command)
    after = {name: value for name, value in content(where).items() if name != "out/process"}
    assert after == before
    return found


def seen(where: Path, rank: int = 0) -> dict[tuple[int, int], list[int]]:
    """Return the samples of each batch."""
    lines = map(json.loads, (where / "out" / f"seen-{rank}.jsonl").read_text().splitlines())
    return {(epoch, number): samples for epoch, number, samples in lines}


def listed(samples: list[int]) -> str:
    """Return samples as the command lists them."""
    return ", ".join(map(str, samples))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with shuffled data, whose order depends on the draws of each step."""
    where = tmp_path_factory.mktemp("finished")
    ended = train(where, "--workers=2")
    assert ended.exit_code == 0, ended.output
    return where


@pytest.mark.parametrize("place", [(2, 3), (1, 9)])
def test_the_samples_of_a_batch(finished: Path, place: tuple[int, int]) -> None:
    """Each batch of each epoch of a finished run is known, also the last one, which is not full."""
    found = batch(finished, "--epoch", str(place[0]), "--batch", str(place[1]), arguments=("--workers=2",))
    assert found.exit_code == 0, found.output
    assert f"Batch {place[1]} of epoch {place[0]} of fit 1 (" in found.output
    assert f"  train/0: {listed(seen(finished)[place])}\n" in found.output


@pytest.mark.slow
def test_the_batches_of_a_sample(finished: Path) -> None:
    """Each epoch has the sample once."""
    found = batch(finished, "--sample", "11", arguments=("--workers=2",))
    assert found.exit_code == 0, found.output
    places = {place: samples.index(11) for place, samples in seen(finished).items() if 11 in samples}
    assert len(places) == 3
    for (epoch, number), row in places.items():
        assert f"  batch {number} of epoch {epoch}, row {row}\n" in found.output
    missing = batch(finished, "--sample", "99", arguments=("--workers=2",))
    assert missing.exit_code == 1
    assert "in no batch of the epochs that are known" in missing.output


@pytest.mark.slow
def test_there_is_no_such_batch(finished: Path) -> None:
    """A batch after the last one, and an epoch that never came, are told apart."""
    beyond = batch(finished, "--epoch", "0", "--batch", "10", arguments=("--workers=2",))
    assert beyond.exit_code == 1
    assert "Epoch 0 of fit 1 has no batch 10." in beyond.output
    later = batch(finished, "--epoch", "5", "--batch", "0", arguments=("--workers=2",))
    assert later.exit_code == 2
    assert "the order of epoch 5 is not known" in later.output
    assert "Known epochs: 0, 1, 2." in later.output.replace("\n", " ")


@pytest.mark.slow
@pytest.mark.parametrize("own", [(), ("--own",)], ids=["global", "own-generator"])
def test_an_epoch_that_an_exception_has_ended(tmp_path: Path, own: tuple[str, ...]) -> None:
    """Its order is known to its end, from the history or from an autosave, also after the run was continued."""
    arguments = ("--raises-at=14", *own)
    ended = train(tmp_path, *arguments)
    assert ended.exit_code == 1
    found = batch(tmp_path, "--epoch", "1", "--batch", "4", arguments=arguments)
    assert found.exit_code == 0, found.output
    assert f"  train/0: {listed(seen(tmp_path)[1, 4])}\n" in found.output
    later = batch(tmp_path, "--epoch", "1", "--batch", "8", arguments=arguments)
    (tmp_path / "out" / "again").touch()
    continued = train(tmp_path, *arguments)
    assert continued.exit_code == 0, continued.output
    assert f"  train/0: {listed(seen(tmp_path)[1, 8])}\n" in later.output


@pytest.mark.slow
def test_each_rank_has_its_samples(tmp_path: Path) -> None:
    """With two ranks, the samples of both are listed, and a sample is found with its rank."""
    ended = train(tmp_path, "--devices=2", launcher=LAUNCHER)
    assert ended.exit_code == 0, ended.output
    found = batch(tmp_path, "--epoch", "1", "--batch", "2", arguments=("--devices=2",), launcher=LAUNCHER)
    assert found.exit_code == 0, found.output
    for rank in range(2):
        assert f"  rank {rank}, train/0: {listed(seen(tmp_path, rank)[1, 2])}\n" in found.output
    sample = seen(tmp_path, 1)[2, 1][3]
    places = batch(tmp_path, "--sample", str(sample), arguments=("--devices=2",), launcher=LAUNCHER)
    assert "  batch 1 of epoch 2, rank 1, row 3\n" in places.output


@pytest.mark.slow
def test_a_stream_has_no_indices(tmp_path: Path) -> None:
    """The answer says so, and names the command that shows the batch."""
    ended = train(tmp_path, "--stream")
    assert ended.exit_code == 0, ended.output
    found = batch(tmp_path, "--epoch", "1", "--batch", "1", arguments=("--stream",))
    assert found.exit_code == 2
    assert "  train/0: its samples are not known: its data set is iterable" in found.output
    assert "replay --until 1:1 --dump step -- " in found.output


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ((), "which batch? Give --epoch and --batch, or --sample"),
        (("--epoch", "1"), "which batch? Give --epoch and --batch, or --sample"),
        (("--sample", "1", "--batch", "1"), "--sample excludes --epoch and --batch"),
        (("--sample", "1", "--epoch", "0"), "--sample excludes --epoch and --batch"),
        (("--sample", "x"), "x is not a number from 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script is not started."""
    found = call(capsys, "batch", *options, "--", sys.executable, "-c", "exit(9)")
    assert found.status == 2
    assert problem in found.err


def test_a_command_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script that trains nothing has none."""
    found = call(capsys, "batch", "--sample", "1", "--", sys.executable, "-c", "exit(3)")
    assert found.status == 2
    assert "no run of this command was found: it begins no fit or evaluation (exit code 3)" in found.err

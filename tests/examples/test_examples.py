"""The examples do what their first lines say: killed and run again, they end as a run that nothing has interrupted."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch

import lightning_faulttolerant
from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.testing import processes
from tests.cli.trained import TORCHRUN, start
from tests.harness import python
from tests.processes import Ended, Script

EXAMPLES = Path(__file__).parents[2] / "examples"
# The line of its end that must be the same, and the signal that stops it.
WITH_A_TRAINER = {
    "minimal.py": ("digest", signal.SIGINT),
    "iterable/train.py": ("digest", signal.SIGINT),
    "lightning_cli/train.py": ("weights", signal.SIGTERM),
    "streaming/train.py": ("weights", signal.SIGTERM),
}
CONFIGURED = (
    "fit",
    f"--config={EXAMPLES / 'lightning_cli' / 'config.yaml'}",
    "--trainer.max_epochs=12",
    "--trainer.enable_progress_bar=false",
    # As the last of its kind, the callback of the configuration gets the argument.
    "--trainer.callbacks.train_time_interval=0:00:00.1",
)


class ShortTrainer(lightning.pytorch.Trainer):
    """Trains for a few epochs only, and draws nothing."""

    num_epochs = 0

    def __init__(self, **arguments: Any) -> None:
        own = {"max_epochs": self.num_epochs, "enable_progress_bar": False, "enable_model_summary": False}
        super().__init__(**{**arguments, **own})


def example(name: str, directory: Path, *arguments: str, num_epochs: int | None = 6) -> Callable[[], None]:
    """Return the example at `name` as a function that runs in `directory`, for `num_epochs` epochs unless ``None``."""

    def main() -> None:
        torch.set_num_threads(1)
        os.chdir(directory)
        sys.argv = [name, *arguments]
        if num_epochs is not None:
            ShortTrainer.num_epochs = num_epochs
            # Only in this process. The cost of a save would allow one a second, which is most of the run.
            lightning.pytorch.Trainer = ShortTrainer
            lightning_faulttolerant.FaultTolerance = functools.partial(FaultTolerance, every_n_train_steps=15)
        names = runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        if "trainer" in names and names["trainer"].is_global_zero:
            weights = [value.numpy().tobytes() for value in names["trainer"].model.state_dict().values()]
            print(f"digest {hashlib.sha256(b''.join(weights)).hexdigest()}")

    return main


def autosaves(directory: Path) -> set[str]:
    """Return the names of the existing autosaves."""
    return {path.name for path in directory.glob("**/fit-1/autosave-*.ckpt")}


def strike_after_saves(script: Script, directory: Path, signum: int = signal.SIGKILL) -> Ended:
    """Send a signal to an example and its workers after it has written two more autosaves."""
    before = autosaves(directory)
    seen: set[str] = set()
    while len(seen) < 2 and script.is_running():
        seen |= autosaves(directory) - before
        time.sleep(0.002)
    with suppress(ProcessLookupError):
        os.killpg(script.process_id, signum)
    return script.wait()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists and is not empty:UserWarning")
@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined:UserWarning")
@pytest.mark.parametrize("name", WITH_A_TRAINER)
def test_an_example_with_a_trainer(name: str, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed, continued, stopped by a signal, and continued again, the weights are the uninterrupted run's."""
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")

    def run(directory: Path) -> Callable[[], None]:
        if name.startswith("lightning_cli"):
            return example(name, directory, *CONFIGURED, num_epochs=None)
        if name.startswith("streaming"):  # it writes the bucket once, and continues in the middle of an epoch
            return example(name, directory, f"{s3}/{directory.name}", num_epochs=3)
        return example(name, directory)

    line, signum = WITH_A_TRAINER[name]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    ended = [Script(run(whole)).wait()]
    assert strike_after_saves(Script(run(cut)), cut).exit_code == -signal.SIGKILL
    stopped = strike_after_saves(Script(run(cut), seed=2), cut, signum)
    assert stopped.exit_code == 128 + signum, stopped.output
    ended.append(Script(run(cut), seed=3).wait())
    for each in (stopped, ended[1]):
        assert "Resumed exactly before batch" in each.output
        assert "before batch 0 of epoch 0" not in each.output
    assert [each.exit_code for each in ended] == [0, 0], ended[1].output
    found = [re.findall(f"^{line} .*", each.output, re.MULTILINE) for each in ended]
    assert found[0] == found[1] != []


def die_when(has_come: Callable[[], object]) -> None:
    """Kill this process at a moment."""

    def watch() -> None:
        while not has_come():
            time.sleep(0.0005)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def run_ranks(num_ranks: int, directory: Path, main: Callable[[], Any], dies: Callable[[], object] | None) -> str:
    """Run an example on ranks of which each may die at a moment, and return its output."""

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        os.chdir(directory)
        if dies is not None:
            die_when(dies)
        main()

    outputs = [directory.parent / f"{directory.name}-{rank}.txt" for rank in range(num_ranks)]
    code = processes.run_ranks(run, outputs=outputs, seed=1, timeout_seconds=60)
    output = "\n".join(path.read_text() for path in outputs)
    assert (code == 0) == (dies is None), output
    return output


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [("plain_loop", 1), *(pytest.param("fabric", number, marks=pytest.mark.slow) for number in (1, 2))],
)
def test_an_example_without_a_trainer(name: str, num_ranks: int, tmp_path: Path) -> None:
    """After a kill of all ranks and a restart, the last line with the weights' sum is the uninterrupted run's."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    saved: set[object] = set()

    def has_saved() -> bool:
        with suppress(FileNotFoundError):
            saved.update({path.name for path in cut.glob("checkpoints/*_checkpoint_*") if path.name[-1].isdigit()})
            saved.update({path.stat().st_mtime_ns for path in cut.glob("checkpoint.pt")})
        return len(saved) > 3

    def main() -> None:
        sys.argv = ["train.py", *([] if num_ranks == 1 else [str(num_ranks)])]
        runpy.run_path(str(EXAMPLES / name / "train.py"), run_name="__main__")

    whole.mkdir(), cut.mkdir()
    expected = run_ranks(num_ranks, whole, main, None)
    run_ranks(num_ranks, cut, main, has_saved)
    last = run_ranks(num_ranks, cut, main, None)
    assert "Resumed after step" in last
    assert re.findall("^done: .*", last, re.MULTILINE) == re.findall("^done: .*", expected, re.MULTILINE) != []


@pytest.mark.slow
def test_the_elastic_example(tmp_path: Path) -> None:
    """With two ranks, one, and two again, killed in the middle of two epochs, each epoch uses each image once."""
    run = tmp_path / "run"
    run.mkdir()
    outputs = []
    for num_ranks, name in ((2, "epoch=0-batch=40"), (1, "epoch=1-batch=44"), (2, "")):
        dies = (lambda name=name: list(run.rglob(f"autosave-*-{name}.ckpt"))) if name else None
        outputs.append(run_ranks(num_ranks, run, example("elastic/train.py", run, num_epochs=3), dies))
    assert ["Resumed" in output for output in outputs] == [False, True, True]
    assert "before batch 0 of epoch 0" not in outputs[1]
    assert "of epoch 1" in outputs[2]
    ends = re.findall(r"^epoch (\d): (.*)$", "".join(outputs), flags=re.MULTILINE)
    assert set(ends) == {(str(epoch), "1792 images, each once: True") for epoch in range(3)}


def done(where: Path, *words: str) -> str:
    """Run a Python command to its end, and return its output."""
    where.mkdir(exist_ok=True)
    ended = start(where, *words)
    assert ended.exit_code == 0, ended.output
    return ended.output


@pytest.mark.slow
def test_the_example_for_torchrun(tmp_path: Path) -> None:
    """Torchrun restarts all, they resume from one autosave, and the trained weights are the uninterrupted run's."""
    words = (*TORCHRUN, "--max-restarts=3", str(EXAMPLES / "torchrun" / "train.py"))
    outputs = [done(tmp_path / "whole", *words), done(tmp_path / "cut", *words, "--kill-rank", "0")]
    assert outputs[1].count("Resumed exactly before batch 2 of epoch 2") == 1
    found = [re.findall(r"^weights \w{16}$", output, flags=re.MULTILINE) for output in outputs]
    assert found[0] == found[1] != []


@pytest.mark.slow
def test_the_story_of_the_guide_to_branches(tmp_path: Path) -> None:
    """A NaN is found with three commands, and a branch trains without it, with the numbers of the page."""
    pytest.importorskip("sklearn")
    page = (EXAMPLES.parent / "docs" / "guides" / "branches.md").read_text()
    here = tmp_path / "here"
    here.mkdir()
    [script] = re.findall(r"```python[^\n]*\n(.*?)```", page, re.DOTALL)
    (here / "train.py").write_text(script)
    assert "loss nan" in done(here, "train.py")
    for words, told in (
        (("--from", "0", "--until", "60"), r"  (the first loss that is not finite: .*)"),
        (("--until", "0:43", "--dump", "step"), r"    (input 0: 1 value is not finite, in row \d+ \(sample \d+\))"),
    ):
        [said] = re.findall(told, page)
        assert said in done(here, "-m", "lightning_faulttolerant", "replay", *words, "--", sys.executable, "train.py")
    (here / "train.py").write_text(script.replace('= float("nan")  # the mistake', "= 0.0"))
    [options] = re.findall(r"^lightning-faulttolerant (run .* --) python train.py", page, re.MULTILINE)
    branch = done(here, "-m", "lightning_faulttolerant", *options.split(), sys.executable, "train.py")
    assert "This run is a branch of" in branch
    assert branch.count("is left out, as") == 1
    assert float(re.findall(r"^loss (.*)$", branch, re.MULTILINE)[0]) < 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_shows_that_all_is_the_same(tmp_path: Path) -> None:
    """The whole demonstration has two kills, two resumes, identical results, and a figure; its processes are forked."""
    words = [sys.executable, str(EXAMPLES / "demo" / "run.py"), "--output", str(tmp_path / "made")]
    command = python.Command(words=words, directory=os.getcwd(), environment=dict(os.environ))
    exit_code, output = python.run(command, scratch=tmp_path / "scratch")
    assert exit_code == 0, output
    assert [output.count(text) for text in ("SIGKILL in batch", "resumed before batch", "DIFFERENT")] == [2, 2, 0]
    assert (tmp_path / "made" / "losses.png").read_bytes().startswith(b"\x89PNG")


# The job script for SLURM, with programs in place of SLURM's


def install(directory: Path, name: str) -> None:
    """Put a substitute for a SLURM program into `directory`, which records its calls."""
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(
        f'#!/bin/sh\n[ "$2" != show ] || exit 0\necho "$@" "in $RUN_DIRECTORY" >> {directory}/{name}.txt\n'
    )
    (directory / name).chmod(0o755)


def test_the_job_script_starts_the_training(tmp_path: Path) -> None:
    """The script creates the directory of the run where the job was submitted, and srun starts the file beside it."""
    install(tmp_path / "bin", "srun")
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)}
    job = EXAMPLES / "slurm" / "train.sbatch"
    subprocess.run(["bash", job], env=environment, check=True)
    assert (tmp_path / "run").is_dir()
    [line] = (tmp_path / "bin" / "srun.txt").read_text().splitlines()
    assert line == f"--kill-on-bad-exit=0 python train.py in {tmp_path}/run"
    options = re.findall(r"^#SBATCH --([a-z-]+)", job.read_text(), flags=re.MULTILINE)
    assert {"requeue", "signal", "open-mode", "nodes", "ntasks-per-node"} <= set(options)
    assert (EXAMPLES / "slurm" / "train.py").is_file()


ARRAY = {"SLURM_JOB_ID": "13", "SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.mark.parametrize(
    ("code", "job", "queued"),
    [(138, {}, "requeue 12"), (138, ARRAY, "requeue 10_3"), (0, {}, ""), (76, {}, ""), (143, {}, "")],
)
def test_the_job_script_queues_itself_again_where_the_signal_came_too_early(
    code: int, job: dict[str, str], queued: str, tmp_path: Path
) -> None:
    """If SIGUSR1 has ended Python, the script calls scontrol itself, and its own exit code stays srun's."""
    install(tmp_path / "bin", "scontrol")
    # A task that the signal ends while Python starts: no handler exists yet.
    ends = "kill -USR1 $$" if code == 138 else f"exit {code}"
    (tmp_path / "bin" / "srun").write_text(f"#!/bin/bash\nbash -c '{ends}'\nexit $?\n")
    (tmp_path / "bin" / "srun").chmod(0o755)
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)}
    environment |= {"SLURM_JOB_ID": "12", **job}
    ended = subprocess.run(["bash", EXAMPLES / "slurm" / "train.sbatch"], env=environment, check=False)
    assert ended.returncode == code
    called = tmp_path / "bin" / "scontrol.txt"
    assert (called.read_text().split(" in ")[0] if called.exists() else "") == queued

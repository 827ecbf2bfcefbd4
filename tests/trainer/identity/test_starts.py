"""How a process was started: the script, its arguments, and the directory, also under a launcher."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_faulttolerant.trainer.identity.starts import ProcessStart, start_of_process


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes `__main__` another file, or none."""

    def set_file(path: Any) -> None:
        if path is None:
            monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
        else:
            monkeypatch.setattr(sys.modules["__main__"], "__file__", str(path), raising=False)

    return set_file


def test_script(main: Any, tmp_path: Path) -> None:
    """The script and its arguments are those of the process."""
    main(tmp_path / "train.py")
    start = start_of_process(["train.py", "--lr", "1"], {})
    assert (start.command.script, start.command.arguments) == (str(tmp_path / "train.py"), ("--lr", "1"))
    assert not start.is_one_of_many


@pytest.mark.parametrize("launcher", ["cProfile", "pdb", "debugpy"])
def test_launcher_that_runs_a_script(launcher: str, main: Any, tmp_path: Path) -> None:
    """Under a debugger or a profiler, the script is the one that it runs."""
    main(pytest.importorskip(launcher).__file__)
    script = tmp_path / "train.py"
    script.touch()
    start = start_of_process([str(script), "--lr", "1"], {})
    assert (start.command.script, start.command.arguments) == (str(script), ("--lr", "1"))


@pytest.mark.parametrize("launcher", ["ray", "submitit"])
def test_launcher_that_runs_a_function(launcher: str, main: Any) -> None:
    """A worker of Ray or submitit is one of many, with the script of its function and the launcher's name."""
    main(pytest.importorskip(launcher).__file__)
    start = start_of_process(["worker.py"], {})
    assert start.is_one_of_many
    assert start.command.arguments[0] == launcher
    assert os.path.isabs(start.command.script)  # the file of the function's code
    assert start.is_killed_at_end is (launcher == "ray")


@pytest.mark.parametrize(
    ("names", "variables", "expected"),
    [
        ({"get_ipython": 1}, {"JPY_SESSION_NAME": "/work/a.ipynb"}, ("/work/a.ipynb", False)),
        ({"get_ipython": 1, "__vsc_ipynb_file__": "/work/b.ipynb"}, {}, ("/work/b.ipynb", False)),
        ({"get_ipython": 1}, {}, ("notebook", True)),
        ({}, {"JPY_SESSION_NAME": "/work/a.ipynb"}, ("interactive", False)),
    ],
)
def test_notebooks(
    names: dict[str, Any],
    variables: dict[str, str],
    expected: tuple[str, bool],
    main: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Notebooks are distinguished by name, if the kernel knows it."""
    main(None)
    for name, value in names.items():
        monkeypatch.setattr(sys.modules["__main__"], name, value, raising=False)
    start = start_of_process(["kernel.json"], variables)
    assert (start.command.script, start.is_one_of_many) == expected


def _in_child(queue: Any) -> None:
    queue.put(start_of_process(["train.py"], {}))


def test_child_of_multiprocessing() -> None:
    """Several processes like this may train at the same time."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue,))
    child.start()
    start: ProcessStart = queue.get(timeout=30)
    child.join()
    assert start.is_one_of_many
    assert not start.is_killed_at_end


def test_hydra(main: Any, tmp_path: Path) -> None:
    """The overrides of the job are the arguments, but options of Hydra itself are not; Hydra knows the directory."""
    hydra = pytest.importorskip("hydra")
    from hydra.core.hydra_config import HydraConfig

    main(tmp_path / "train.py")
    before = HydraConfig.instance().cfg
    with hydra.initialize_config_dir(str(tmp_path), version_base=None):
        (tmp_path / "config.yaml").write_text("lr: 1\n")
        overrides = ["lr=2", "hydra.run.dir=/x", f"hydra.runtime.output_dir={tmp_path}", "hydra.job.num=0"]
        config = hydra.compose("config", overrides=overrides, return_hydra_config=True)
        config.hydra.runtime.cwd = "/started/here"
    try:
        HydraConfig.instance().set_config(config)
        start = start_of_process(["train.py", "lr=2", "hydra.run.dir=/x"], dict(os.environ))
    finally:
        HydraConfig.instance().cfg = before
    assert start.command.arguments == ("config", "lr=2")
    assert start.command.directory == "/started/here"

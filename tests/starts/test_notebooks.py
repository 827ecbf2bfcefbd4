"""Notebooks that are executed again after their kernel was killed or stopped."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.starts.started import (
    NUM_BATCHES,
    Project,
    Started,
    assert_interrupted,
    assert_same_fit,
    assert_starts_over,
    continues,
    plain,
)

FIT = "lr=0.1"
pytestmark = pytest.mark.slow
EXECUTE = ("-c", "from nbclient.cli import main; main()")


def _cell(number: int, source: str) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "id": f"cell-{number}",
        "source": source,
        "metadata": {},
        "outputs": [],
        "execution_count": None,
    }


class Notebooks:
    """Notebooks in one directory, with one way to know their names.

    Args:
        project: The directory.
        named_by: The source that gives a kernel the name of its notebook.
    """

    def __init__(self, project: Project, named_by: str) -> None:
        self.project = project
        self._named_by = named_by

    def write(self, name: str, *, rate: float = 0.1) -> Path:
        """Write a notebook."""
        path = self.project.directory / f"{name}.ipynb"
        source = (self.project.directory / "notebook.py").read_text().replace("LR = 0.1", f"LR = {rate}")
        cells = [cell.partition("\n")[2].strip() for cell in source.split("# %%")[1:]]
        if self._named_by == "__vsc_ipynb_file__":  # VS Code executes this in the kernel
            cells.insert(0, f"__vsc_ipynb_file__ = {str(path)!r}")
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        notebook = {
            "nbformat": 4,
            "nbformat_minor": 5,
            "metadata": {"kernelspec": kernel},
            "cells": [_cell(number, source) for number, source in enumerate(cells)],
        }
        path.write_text(json.dumps(notebook))
        return path

    def execute(self, path: Path, *, interrupt: str = "", sleep: float = 0, protected: bool = True) -> Started:
        """Execute a notebook in a new kernel."""
        more = {"JPY_SESSION_NAME": str(path)} if self._named_by == "JPY_SESSION_NAME" else {}
        return self.project.start(*EXECUTE, path.name, interrupt=interrupt, sleep=sleep, protected=protected, **more)


@pytest.fixture
def notebooks(request: pytest.FixtureRequest, tmp_path: Path) -> Notebooks:
    """Return a directory for notebooks, for each way to know their names."""
    return Notebooks(Project(tmp_path / "project"), request.param)


@pytest.mark.parametrize("name", ["no name", "JPY_SESSION_NAME"])
def test_stopped_twice(name: str, tmp_path: Path) -> None:
    """A notebook with a stopped training continues when all its cells are executed again; one case has no forks."""
    notebooks = Notebooks(Project(tmp_path / "project", forks=name != "no name"), name)
    path = notebooks.write("train")
    starts = [notebooks.execute(path, interrupt=f"TERM@{step}") for step in (4, 9)]
    assert_interrupted(starts[0], 4, FIT)
    assert_interrupted(starts[1], 5, FIT)
    starts.append(notebooks.execute(path))
    assert starts[-1].exit_code == 0, starts[-1].output
    for before, after in itertools.pairwise(starts):
        continues(before, after, FIT)
    assert starts[-1].num_batches() == NUM_BATCHES - 9
    assert starts[-1].weights() == plain("notebook.py").started.weights()


@pytest.mark.parametrize("notebooks", ["__vsc_ipynb_file__"], indirect=True)
def test_killed(notebooks: Notebooks) -> None:
    """A notebook with a killed kernel continues from the last autosave."""
    path = notebooks.write("train")
    killed = notebooks.execute(path, interrupt="KILL@6", sleep=0.5)
    assert_interrupted(killed, range(6, NUM_BATCHES), FIT)
    ended = notebooks.execute(path)
    assert ended.exit_code == 0, ended.output
    assert_same_fit(plain("notebook.py"), [killed, ended], FIT)


@pytest.mark.parametrize(
    ("signal", "notebooks"), [("TERM", "JPY_SESSION_NAME"), ("KILL", "no name")], indirect=["notebooks"]
)
def test_another_notebook_in_the_directory(signal: str, notebooks: Notebooks) -> None:
    """Another notebook starts from the beginning, without an error, and leaves the interrupted one as it is."""
    path, other = notebooks.write("train"), notebooks.write("other", rate=0.2)
    first = notebooks.execute(path, interrupt=f"{signal}@6", sleep=0.5 if signal == "KILL" else 0)
    assert_interrupted(first, range(6, NUM_BATCHES), FIT)
    assert_starts_over(notebooks.execute(other), name="lr=0.2")
    third = notebooks.execute(path)
    assert third.exit_code == 0, third.output
    continues(first, third, FIT)


@pytest.mark.parametrize("name", ["JPY_SESSION_NAME"])
def test_a_copy_of_the_notebook(name: str, tmp_path: Path) -> None:
    """If the kernel knows the name, a copy of the notebook with another name is another run."""
    notebooks = Notebooks(Project(tmp_path / "project"), name)
    path, copy = notebooks.write("train"), notebooks.write("copy")
    assert_interrupted(notebooks.execute(path, interrupt="TERM@4"), 4, FIT)
    assert_starts_over(notebooks.execute(copy), name=FIT)


@pytest.mark.parametrize("notebooks", ["no name"], indirect=True)
def test_a_notebook_that_ended_normally_is_a_new_run(notebooks: Notebooks) -> None:
    """After a normal end of the kernel, the same notebook trains everything again."""
    path = notebooks.write("train")
    assert_interrupted(notebooks.execute(path, interrupt="TERM@4"), 4, FIT)
    assert notebooks.execute(path).exit_code == 0
    assert_starts_over(notebooks.execute(path), name=FIT)

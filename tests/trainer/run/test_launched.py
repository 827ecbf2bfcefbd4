"""The knowledge of a script's process about fits that ran in other processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_faulttolerant.trainer.run.directory import Script, open_run
from tests.processes import in_child, run


@pytest.fixture
def script() -> Iterator[Script]:
    """Return the script of a process that does not exist."""
    found = Script(-1, f"test-{os.getpid()}")
    yield found
    found.forget()


@pytest.mark.parametrize("ends", [True, False], ids=["all-end", "one-fails"])
@pytest.mark.parametrize("trains_itself", [True, False], ids=["own-fit", "no-own-fit"])
def test_autosaves_go_when_the_script_ends(ends: bool, trains_itself: bool, tmp_path: Path) -> None:
    """Fits of one script, in its own process and in others, share their numbers, and all are removed if all ended."""

    def fit(script: Script, *, comes_to_its_end: bool = True) -> None:
        own = open_run(tmp_path, "run", script)
        series = own.begin_fit(keep_last=1)
        series.save({"at": own.fit}, epoch=0, batch=0, global_step=0)
        if comes_to_its_end:
            own.end_fit()
            own.leave()

    def main() -> None:
        script = this_script_of_a_callback()
        if trains_itself:
            fit(script)
        assert in_child(lambda: fit(script)) == 0
        assert in_child(lambda: fit(script, comes_to_its_end=ends)) == 0
        if trains_itself:
            fit(script)
        print([folder.name for folder in sorted((tmp_path / "run").glob("fit-*"))])

    ended = run(main)
    assert ended.exit_code == 0, ended.output
    num_fits = 4 if trains_itself else 2
    assert str([f"fit-{number + 1}" for number in range(num_fits)]) in ended.output
    assert len(list(tmp_path.glob("run/fit-*"))) == (0 if ends else num_fits)


def this_script_of_a_callback() -> Script:
    """Return the script of this process, as a callback has it."""
    from lightning_faulttolerant import FaultTolerance

    return FaultTolerance()._options.script

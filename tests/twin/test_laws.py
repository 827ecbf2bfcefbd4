"""The shortest law of each part of a run's state, with a Trainer of ``pytorch_lightning``."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

import pytest

from tests.twin.translated import PACKAGE, first_case

LAWS = [
    "laws.test_files.test_files_of_an_interrupted_run",
    "laws.test_saving.test_what_an_end_costs",
    "laws.test_evaluation.test_scripts_of_several_functions",
]
SLOW = [
    "laws.test_lightning_cli.test_autosave_as_ckpt_path",
    "laws.test_saves_in_hooks.test_saved_in_a_hook",
    "laws.test_files.test_files_stay_with_the_first_start",
    "laws.test_files.test_start_from_its_own_file",
    "laws.test_ranks.test_ranks_continue",
    "laws.test_ranks.test_stop_of_one_rank",
]
_resume: Any = importlib.import_module(f"{PACKAGE}.laws.test_resume")
GROUPS = _resume.groups_of()[:12]


@pytest.fixture(autouse=True)
def _lightnings_own_affairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore a warning: Lightning calls jsonargparse by names that newer versions deprecate."""
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


def found(law: str) -> Any:
    """Return the test of a law."""
    module, _, name = law.rpartition(".")
    return getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)


def case(law: str, *marks: Any) -> Any:
    """Return a law with the warnings that its module and the law itself expect."""
    test = found(law)
    own = getattr(sys.modules[test.__module__], "pytestmark", [])
    all_of_them = [*(own if isinstance(own, list) else [own]), *getattr(test, "pytestmark", [])]
    return pytest.param(law, marks=[*marks, *(mark for mark in all_of_them if mark.name == "filterwarnings")])


@pytest.mark.parametrize("law", [*map(case, LAWS), *(case(law, pytest.mark.slow) for law in SLOW)])
def test_law(law: str, request: pytest.FixtureRequest) -> None:
    """A run of the other package that is killed, stopped, or saved in a hook continues exactly."""
    test = found(law)
    arguments = first_case(test)
    fixtures = [one for one in inspect.signature(test).parameters if one not in arguments]
    test(**arguments, **{one: request.getfixturevalue(one) for one in fixtures})


@pytest.mark.parametrize(
    "group", [GROUPS[0], *(pytest.param(group, marks=pytest.mark.slow) for group in GROUPS[1:])], ids=str
)
def test_rows_resume(group: Any) -> None:
    """Groups of rows of the other package continue exactly."""
    _resume.check(group, _resume.resumes)

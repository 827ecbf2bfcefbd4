"""The shortest law of each part of a run's state, with a Trainer of ``pytorch_lightning``."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

import pytest

from tests.twin.translated import PACKAGE, first_case

LAWS = [
    "test_model.test_accumulation",
    "test_model.test_metrics",
    "test_model.test_logging",
    "test_generators.test_held_by_the_data_set",
    "test_object_state.test_outputs_of_an_epoch",
    "test_lightning_callbacks.test_lambda_callback",
    "test_hook_saves.test_saved_by_a_callback",
    "test_faults.test_stop_signal_costs_no_batch",
    "test_loggers.test_csv_continues",
    "test_evaluations.test_a_whole_script",
    "test_lightning_cli.test_killed_and_resumed_equals_uninterrupted",
]
SLOW = [
    "test_model.test_dropout_batch_norm_adam_and_a_scheduler_per_step",
    "test_model.test_killed_in_validation",
    "test_model.test_buffers_outside_the_state_dict",
    "test_model.test_frozen_parameters_and_modules_in_evaluation_mode",
    "test_model.test_callback_with_a_state",
    "test_model.test_early_stopping",
    "test_object_state.test_list_of_module_and_callback",
    "test_lightning_callbacks.test_unfreezing",
    "test_stochastic_weight_averaging.test_stochastic_weight_averaging",
    "test_weight_averaging.test_exponential_average",
    "test_hook_saves.test_hooks_after_the_saving_one_are_named_and_refused",
    "test_faults.test_exception_in_a_hook_costs_no_finished_batch",
    "test_loggers.test_tensorboard_continues",
    "test_model_checkpoint.test_default_callback_of_the_trainer",
    "test_model_checkpoint.test_stopped_by_a_signal",
    "test_ledger.test_joined_ledgers_are_the_uninterrupted_one",
    "test_nothing_is_lost.test_run_that_a_killed_one_starts_from_keeps_its_files",
    "test_negative.test_run_without_a_part_is_not_the_same",
    "test_ranks.test_two_ranks_continue",
    "test_rank_stops.test_ranks_that_are_asked_to_stop_in_training",
]


@pytest.fixture(autouse=True)
def _lightnings_own_affairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore a warning: Lightning calls jsonargparse by names that newer versions deprecate."""
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


def found(law: str) -> Any:
    """Return the test of a law."""
    module, name = law.split(".")
    return getattr(importlib.import_module(f"{PACKAGE}.law.{module}"), name)


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

"""Advice names what its reader can set: an argument in a script, or the variable if that one adds the callback."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from lightning_faulttolerant import FaultTolerance, FaultToleranceError
from lightning_faulttolerant.errors import OPTIONS_VARIABLE, speak_of_variable, worded
from lightning_faulttolerant.trainer.settings import EXAMPLE, option_names
from tests.docs.sources import messages

NAMES = option_names(FaultTolerance.__init__)
# About a setting that the user wrote, or about another object's argument of that name.
NOT_ADVICE = (
    'worker_rng="per_sample" seeds the samples of loaders, and PL_FAULT_TOLERANT_TRAINING=manual',
    'worker_rng="per_sample" is not possible for this loader',  # of ResumableDataLoader
    "async_save=True has no effect with a strategy that shards: training waits for its autosaves.",
    "incremental=True has no effect with a strategy that shards: its autosaves are written whole",
    "every_n_train_steps=\n\n counts finished batches",
    "strict=False lets a run continue like that.",  # the drill, which doesn't know what adds the callback
    "load_state_dict(..., strict=False)",
    'FaultTolerance(run_id=f"trial-',
)


@pytest.fixture
def variable() -> Iterator[None]:
    """Let messages name the variable."""
    speak_of_variable(NAMES)
    yield
    speak_of_variable(())


WORDINGS = [
    ("Leave it out, or pass strict=False.", 'Leave it out, or set {}="strict=false".'),
    (
        "Change it, or pass FaultTolerance(strict=False) to continue.",
        'Change it, or set {}="strict=false" to continue.',
    ),
    ("Start once with FaultTolerance(auto_resume=False), so", 'Start once with {}="auto_resume=false", so'),
    (
        "Pass FaultTolerance(dirpath=...) a directory that all see.",
        'Set {}="dirpath=..." to a directory that all see.',
    ),
    ('With worker_rng="per_sample" it is', 'With {}="worker_rng=per_sample" it is'),
    ("pass FaultTolerance(stop_signals=('a', 'b.c')).", 'set {}="stop_signals=a|b.c".'),
    ("FaultTolerance(stop_signals=(...)).", '{}="stop_signals=...".'),
    ("pass FaultTolerance(elastic=True) or FaultTolerance(keep_last=3)", 'set {}="elastic=true" or {}="keep_last=3"'),
    # Another object's argument, and the user's values.
    ("Pass persistent_workers=False.", "Pass persistent_workers=False."),
    ("Some differ: run_id='7', strict=False.", "Some differ: run_id='7', strict=False."),
]


@pytest.mark.usefixtures("variable")
@pytest.mark.parametrize(("text", "expected"), WORDINGS)
def test_advice_names_the_variable(text: str, expected: str) -> None:
    """Advice to pass an argument becomes advice to set the variable, with the value in its syntax, and only once."""
    assert worded(text) == expected.replace("{}", OPTIONS_VARIABLE)
    assert worded(worded(text)) == worded(text)
    assert str(FaultToleranceError(text)) == worded(text)


@pytest.mark.parametrize("text", [text for text, _ in WORDINGS])
def test_advice_names_the_argument(text: str) -> None:
    """In a script that adds the callback, the text stays as it is."""
    assert worded(text) == text
    assert str(FaultToleranceError(text)) == text


def advice() -> list[str]:
    """Return the package's texts that name an argument of the callback with a value."""
    named = re.compile(rf"\b(?:{'|'.join(NAMES)})=")
    texts = {text for text in messages() if named.search(text) and not any(own in text for own in NOT_ADVICE)}
    return sorted(text.replace("\n\n", "...") for text in texts - {EXAMPLE})


@pytest.mark.usefixtures("variable")
@pytest.mark.parametrize("text", advice())
def test_each_text_of_the_package_is_understood(text: str) -> None:
    """No advice of the package names an argument where only the variable can be set."""
    left = re.sub(rf'{OPTIONS_VARIABLE}="[^"]*"', "", worded(text))
    assert not re.search(rf"\b(?:{'|'.join(NAMES)})=", left), worded(text)

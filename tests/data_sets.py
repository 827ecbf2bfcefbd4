"""Another name of `tests.laws.data_sets`, for tests that are not rows yet."""

from tests.laws.data_sets import *  # noqa: F403 - it is a name for the same module

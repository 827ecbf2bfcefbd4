from tests.twin import translated

globals().update(translated.tests_of("trainer.runs.test_compat"))

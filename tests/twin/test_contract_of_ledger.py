from tests.twin import translated

globals().update(translated.tests_of("trainer.steps.test_compat"))

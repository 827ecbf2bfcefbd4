from tests.twin import translated

globals().update(translated.tests_of("trainer.identity.test_compat"))

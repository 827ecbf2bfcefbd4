from tests.twin import translated

globals().update(translated.tests_of("trainer.adapters.test_result_compat"))

from tests.twin import translated

globals().update(translated.tests_of("trainer.files.test_compat"))

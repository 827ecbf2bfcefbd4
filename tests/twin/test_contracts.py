from tests.twin import translated

globals().update(translated.tests_of("trainer.test_contracts"))

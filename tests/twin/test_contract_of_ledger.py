from tests.twin import translated

globals().update(translated.tests_of("trainer.ledger.test_compat"))

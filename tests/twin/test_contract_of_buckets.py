from tests.twin import translated

globals().update(translated.tests_of("trainer.ddp.test_compat"))

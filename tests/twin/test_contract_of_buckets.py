from tests.twin import translated

globals().update(translated.tests_of("trainer.adapters.test_ddp_compat"))

from tests.twin import translated

globals().update(translated.tests_of("trainer.ranks.test_ddp_compat"))

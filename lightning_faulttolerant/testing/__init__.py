"""For your own tests: `assert_resumes_exactly`."""

from lightning_faulttolerant.testing.exactness import Interruption, KillAt, NotTheSame, assert_resumes_exactly

__all__ = ["Interruption", "KillAt", "NotTheSame", "assert_resumes_exactly"]

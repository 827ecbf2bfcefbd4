"""For your own tests: `assert_resumes_exactly`, and `leave_out` for their negative controls."""

from lightning_faulttolerant.testing.exactness import (
    Interruption,
    KillAt,
    NotTheSame,
    assert_resumes_exactly,
    leave_out,
)

__all__ = ["Interruption", "KillAt", "NotTheSame", "assert_resumes_exactly", "leave_out"]

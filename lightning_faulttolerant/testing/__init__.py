"""For your own tests: `assert_resumes_exactly`, and `leave_out_part` for their negative controls."""

from lightning_faulttolerant.testing.exactness import (
    Interruption,
    KillAt,
    NotTheSame,
    assert_resumes_exactly,
    leave_out_part,
)

__all__ = ["Interruption", "KillAt", "NotTheSame", "assert_resumes_exactly", "leave_out_part"]

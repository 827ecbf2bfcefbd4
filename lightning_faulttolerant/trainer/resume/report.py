"""The report of what a resume restored: a dataclass, and a readable text."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_faulttolerant.checkpoint.ranks import Ranks

LIGHTNINGS_PARTS = ("weights", "optimizers", "schedulers", "loop counters", "callbacks")
NO_PART = (
    "the checkpoint was saved without lightning_faulttolerant: order of samples, random generators, metrics, and "
    "logged values of the epoch start again, as with Lightning alone"
)
"""The reason that a report gives for a checkpoint that this package did not write."""


def of_all(ranks: Ranks, *reasons: Collection[str]) -> list[tuple[str, ...]]:
    """Return reasons of each kind: on rank 0 those of all ranks, on the others their own; a collective."""
    gathered = ranks.to_first("reasons", reasons) or [reasons]
    return [tuple(dict.fromkeys(one for kind in kinds for one in kind)) for kinds in zip(*gathered, strict=True)]


_NOTHING = "no batch to compare"


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """What a resume has proved on the live objects.

    Args:
        num_read_back: How many values of the checkpoint were read again from the live objects, and are, bit by bit, as
            they were saved. Texts, and what depends on the process or the clock, are not compared.
        has_workers: Whether data-loading workers have restored generators. They compare them by themselves, before
            their first batch.
        num_to_repeat: How many batches an earlier process has run from here on; ``None`` if that is not known, because
            it was another machine or another number of ranks.
        num_repeated: How many of them this process has run, too, with the same samples and results.
    """

    num_read_back: int = 0
    has_workers: bool = False
    num_to_repeat: int | None = None
    num_repeated: int = 0

    def __str__(self) -> str:
        if not self.num_read_back:
            return ""
        batches = f"{self.num_to_repeat} batch{'es' * (self.num_to_repeat != 1)}"
        workers = "; workers confirm with their first batch" * self.has_workers
        proving = f"proving on {batches}" if self.num_to_repeat else _NOTHING
        return f"{self.num_read_back} parts read back{workers}; {proving}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeReport:
    """What was restored when a fit or an evaluation resumed.

    Args:
        path: The checkpoint that the fit resumed from.
        position: Where the checkpoint was taken, in words.
        epoch: The epoch that the fit continues in.
        batch: How many batches of it had been consumed.
        global_step: Optimizer steps so far.
        where: The kind of place, such as ``boundary`` or ``in validation``; empty if it is not known.
        restored: The parts that were restored, exactly but for what `not_exact` and `objects` name.
        num_validated: How many batches of a validation run, or of an evaluation, had been consumed; ``None`` outside.
        not_exact: The parts that do not, each with the reason.
        objects: The object state that does not, each with the reason.
        inherited: Why the run has not been exact since an earlier resume.
        notes: Lines that are worth knowing: another machine, other versions.
        seconds: From the choice of the checkpoint until the first batch can be fetched.
        proof: What was proved on the live objects.
    """

    path: str
    position: str
    epoch: int
    batch: int
    global_step: int
    restored: tuple[str, ...]
    where: str = ""
    num_validated: int | None = None
    not_exact: tuple[str, ...] = ()
    objects: tuple[str, ...] = ()
    inherited: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    seconds: float = 0.0
    proof: Proof = Proof()

    @property
    def is_exact(self) -> bool:
        """Return whether everything continues exactly, and did so at each earlier resume of the run."""
        return not self.all_not_exact

    @property
    def all_not_exact(self) -> tuple[str, ...]:
        """Everything that does not continue exactly, including object state."""
        return (*self.inherited, *self._own)

    @property
    def _own(self) -> tuple[str, ...]:
        return (*self.not_exact, *(f"without {line}" for line in self.objects))

    @property
    def to_inherit(self) -> list[str]:
        """Why later resumes of the run are not exact. A run may begin with a checkpoint that has no part of ours."""
        own = (line for line in self._own if line != NO_PART)
        return [*self.inherited, *(f"since it resumed {self.position}: {line}" for line in own)]

    @classmethod
    def load(cls, fields: Mapping[str, object] | None) -> ResumeReport | None:
        """Return the report that another process has passed on, with its lists as tuples again."""
        if fields is None:
            return None
        own: dict[str, Any] = {name: tuple(told) if isinstance(told, list) else told for name, told in fields.items()}
        return cls(**{**own, "proof": Proof(**own.get("proof", {}))})

    @property
    def title(self) -> str:
        """Whether the fit continues exactly, and where."""
        verdict = "exactly" if self.is_exact else "NOT EXACTLY"
        return f"Resumed {verdict} {self.position}, global step {self.global_step}"

    def __str__(self) -> str:
        lines = [
            f"{self.title}, in {self.seconds:.2f} s",
            f"  from      {self.path}",
            f"  restored  {', '.join(self.restored)}",
            *([f"  proof     {self.proof}"] if str(self.proof) else []),
        ]
        lines += [f"  NOT EXACT {line}" for line in (*self.inherited, *self.not_exact)]
        lines += [f"  WITHOUT   {line}" for line in self.objects]
        lines += [f"  note      {line}" for line in self.notes]
        return "\n".join(lines)

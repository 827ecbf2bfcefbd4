"""Histories as runs write them, created without a run."""

from __future__ import annotations

from typing import Any

from lightning_faulttolerant.records.history import ALIVE, AUTOSAVE, BEGIN, DONE, END, START, VALIDATION
from lightning_faulttolerant.records.lines import Line

BATCHES_PER_EPOCH = 100


class Story:
    """Writes the lines of a run with a clock that advances on request."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = self.did_last = now
        self.lines: list[Line] = []
        self.fit = 1
        self.batch = self.evaluated = self.num_autosaves = self.num_processes = 0
        self.function = "fit"
        self.inside: dict[str, Any] | None = None
        self.waited = self.seconds_evaluated = 0.0
        self.seconds_of_data: float | None = None

    def wait(self, seconds: float) -> Story:
        self.now += seconds
        return self

    def train(self, seconds: float, batches: int = 1) -> Story:
        """Let time pass while batches are trained."""
        self.batch += batches
        return self.wait(seconds)

    def begin(
        self,
        *,
        since: float = 0.0,
        same: bool = False,
        fit: int = 1,
        function: str = "fit",
        hang: tuple[float, float] | None = None,
    ) -> Story:
        """Begin a fit or an evaluation, in a new process that was started `since` seconds ago, or in the same one."""
        self.num_processes += not same
        self.fit, self.function, self.inside = fit, function, None
        self.seconds_of_data = None
        more: dict[str, Any] = {} if function == "fit" else {"function": function}
        more |= {} if hang is None else {"hang": {"since": hang[0], "until": hang[1]}}
        process = {"process": f"process-{self.num_processes}", "pid": self.num_processes, "host": "here"}
        return self._add(BEGIN, **process, process_began=self.now - since, **more)

    def start(
        self,
        *,
        resumed: float | None = None,
        name: str = "",
        batch: int = 0,
        continues: bool = True,
        evaluated: int | None = None,
        repeats: int | None = None,
    ) -> Story:
        """Let the fit start, at a batch, resumed from an autosave (the newest by default) within a number of seconds.

        With `evaluated`, this many batches of the evaluation, or of the validation run after that batch, are done.
        """
        self.batch, self.evaluated = batch, evaluated or 0
        told: dict[str, Any] | None = None
        if resumed is not None:
            path = f"/runs/run/fit-{self.fit}/{name or self.newest}"
            told = {"path": path, "position": "somewhere", "seconds": resumed, "restored": ["weights"]}
            told |= {"not_exact": [], "notes": [], "repeats": repeats}
        place = self.place if evaluated is None else {**self.place, "num_validated": evaluated}
        return self._add(START, **place, num_ranks=1, continues=continues and told is not None, resumed=told)

    def data(self, seconds: float) -> Story:
        """Let time pass while training waits for data."""
        self.seconds_of_data = (self.seconds_of_data or 0.0) + seconds
        return self.wait(seconds)

    def validate(self, seconds: float, batches: int = 1, *, first: int = 0, ends: bool = True) -> Story:
        """Let time pass in a validation run that begins or continues here, or in the evaluation itself."""
        self.seconds_evaluated += seconds
        if self.function != "fit":
            self.evaluated += batches
            return self.wait(seconds)
        if self.inside is None:
            self.evaluated, self.inside, self.waited = first, {"since": self.now, "first": first}, 0.0
        self.evaluated += batches
        self.wait(seconds)
        if ends:
            run, self.inside = self.inside, None
            done = {"until": self.now, "number": 1, "num_batches": self.evaluated - run["first"]}
            self._add(VALIDATION, **self.place, **run, **done, seconds=self.now - run["since"] - self.waited)
        return self

    def autosave(self, *, seconds: float = 0.0, written_in: float = 0.0, num_bytes: int = 100, **more: Any) -> Story:
        """Let training wait for an autosave, or write it in the background for a number of seconds more."""
        taken, place = self.now, self.place
        self.wait(seconds + written_in)
        if self.inside is not None:
            self.waited += seconds
            place = {**place, "validation": {**self.inside, "waited": self.waited}}
        if self.inside is not None or self.function != "fit":
            self.seconds_evaluated += written_in
        self.num_autosaves += 1
        waited = {"taken": taken, "seconds": seconds, "in_background": written_in > 0, "bytes": num_bytes}
        return self._add(AUTOSAVE, **{**place, **waited, "name": self.newest, **more})

    def alive(self) -> Story:
        return self._add(ALIVE, **self.place)

    def end(self, reason: str = "finished", *, saved: dict[str, Any] | None = None) -> Story:
        by = reason.partition("stopped by ")[2]
        return self._add(END, **self.place, reason=reason, by=by, text="", saved=saved)

    def done(self) -> Story:
        self.lines.append({"event": DONE, "time": self.now})
        return self

    @property
    def newest(self) -> str:
        return f"autosave-{self.num_autosaves:08d}.ckpt"

    @property
    def place(self) -> dict[str, Any]:
        epoch, batch = divmod(self.batch, BATCHES_PER_EPOCH)
        place: dict[str, Any] = {"epoch": epoch, "batch": batch, "global_step": self.batch}
        if self.function != "fit":
            place["num_validated"] = self.evaluated
        elif self.inside is not None:
            place |= {"num_validated": self.evaluated, "validation": {**self.inside, "waited": self.waited}}
        return place

    def _add(self, event: str, **more: Any) -> Story:
        if self.seconds_of_data is not None and event in (AUTOSAVE, ALIVE, END):
            more = {"data": self.seconds_of_data, **more}
        self.lines.append({"event": event, "fit": self.fit, "time": self.now, **more})
        self.did_last = self.did_last if event == END else self.now
        return self

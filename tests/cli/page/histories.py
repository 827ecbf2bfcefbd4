"""Histories of runs, written line by line by an imaginary run, and read like any other."""

import random

from lightning_faulttolerant.records.accounting import report_of
from lightning_faulttolerant.records.history_parser import history_of

BEGAN = 1795327200.0


class ImaginedRun:
    """Writes what a run would: steps of a second, regular autosaves, and an occasional kill."""

    def __init__(self, *, seed=0, save_every=60.0, step_seconds=0.5, num_batches=500, host="gpu-node-17"):
        self.lines = []
        self.now = BEGAN
        self.step = 0
        self.saved = None
        self._drawn = random.Random(seed)
        self._save_every = save_every
        self._step_seconds = step_seconds
        self._num_batches = num_batches
        self._host = host
        self._num_processes = 0

    def add(self, event, **values):
        """Write one line."""
        self.lines.append({"event": event, "fit": 1, "time": self.now, **values})

    def place(self, step=None):
        """Return where a step is."""
        step = self.step if step is None else step
        return {"epoch": step // self._num_batches, "batch": step % self._num_batches, "global_step": step}

    def begin(self, *, notes=(), not_exact=()):
        """Start a process that resumes from the last autosave."""
        self._num_processes += 1
        began, pid = self.now, 4000 + 13 * self._num_processes
        self.now += self._drawn.uniform(6, 11)
        self.add("begin", process=f"{self._host}:{pid}", pid=pid, host=self._host, process_began=began)
        self.now += self._drawn.uniform(1, 3)
        resumed = None
        if self.saved is not None:
            self.step = self.saved
            seconds = self._drawn.uniform(0.8, 2.4)
            self.now += seconds
            resumed = {
                "path": f"/runs/demo/fit-1/{self.saved}.ckpt",
                "position": f"batch {self.place()['batch']} of epoch {self.place()['epoch']}",
                "seconds": seconds,
                "restored": ["order of the samples", "augmentation", "main RNG", "weights", "metrics"],
                "not_exact": list(not_exact),
                "notes": list(notes),
            }
        self.add("start", num_ranks=1, continues=resumed is not None, resumed=resumed, **self.place())

    def train(self, seconds):
        """Train for a number of seconds, with the autosaves that fall due."""
        until = self.now + seconds
        next_save = self.now
        while self.now < until:
            if self.now >= next_save:
                self._save()
                next_save = self.now + self._save_every
            stretch = min(next_save, until) - self.now
            while stretch > 0:
                part = min(stretch, 10.0)
                self.now += part
                stretch -= part
                self.step += max(int(part / self._step_seconds), 1)
                if part == 10.0:
                    self.add("alive", **self.place())

    def validate(self, num_batches, *, seconds, until=None, first=0, saves_at=None):
        """Run the validation batches from `first` on, each of some seconds, to the end or to where it is killed."""
        since = self.now
        waited = 0.0
        inside = {"validation": {"since": since, "first": first, "waited": waited}}
        for batch in range(first, num_batches if until is None else until):
            if batch == saves_at:
                self._save(num_validated=batch, **inside)
                waited = self.lines[-1]["seconds"]
                inside = {"validation": {"since": since, "first": first, "waited": waited}}
            self.now += seconds
            if batch % 10 == 9:
                self.add("alive", num_validated=batch + 1, **inside, **self.place())
        if until is None:
            done = {"until": self.now, "num_batches": num_batches - first, "first": first, "number": 1}
            self.add("validation", since=since, seconds=self.now - since - waited, **done, **self.place())

    def evaluate(self, function, num_batches, *, seconds, number, first=0, until=None, saves_at=None):
        """Run an evaluation, from its begin line to its end or to where it is killed."""
        begun = {"process": f"{self._host}:{4000 + 13 * self._num_processes}", "host": self._host}
        self.add("begin", **begun, fit=number, function=function, process_began=self.now)
        self.now += 2
        path = {
            "path": f"/runs/{function}-{number}/{function}{first}.ckpt",
            "position": f"before batch {first} of {function}",
        }
        lists = {"seconds": 0.4, "restored": ["metrics"], "not_exact": [], "notes": []}
        resumed = {**path, **lists} if first else None
        self.add("start", fit=number, continues=bool(first), resumed=resumed, num_validated=first, **self.place())
        for batch in range(first, num_batches if until is None else until):
            if batch == saves_at:
                more = {"name": f"{function}{batch}.ckpt", "taken": self.now, "seconds": 0.05, "bytes": 90_000}
                self.add("autosave", fit=number, num_validated=batch, behind=False, **more, **self.place())
            self.now += seconds
            if batch % 10 == 9:
                self.add("alive", fit=number, num_validated=batch + 1, **self.place())
        if until is None:
            self.add("end", fit=number, reason="finished", num_validated=num_batches, text="", **self.place())

    def _save(self, **inside):
        taken, seconds = self.now, self._drawn.gauss(0.9, 0.15) + (self._drawn.random() < 0.04) * 3
        self.now += max(seconds, 0.1)
        name = f"{self.step}.ckpt"
        size = 48_300_000 + self.step
        self.add(
            "autosave",
            name=name,
            taken=taken,
            seconds=max(seconds, 0.1),
            bytes=size,
            behind=False,
            **inside,
            **self.place(),
        )
        self.saved = self.step

    def wait(self, seconds):
        """Let time go by without a process."""
        self.now += seconds

    def end(self, reason="finished", text=""):
        """End the fit, with a reason."""
        self.add("end", reason=reason, text=text, saved=self.place(self.saved), **self.place())


def faulty(*, num_faults=4, hours=2.0, save_every=60.0, seed=1, down=180.0, run_id="resnet-50-imagenet"):
    """Return the report of a run with faults, some of which it could record."""
    drawn = random.Random(seed)
    run = ImaginedRun(seed=seed, save_every=save_every)
    for number in range(num_faults):
        run.begin(notes=("torch 2.12.1 before, 2.13.0 now: the last bits of sums may differ.",) if number == 2 else ())
        run.train(drawn.uniform(0.5, 1.5) * hours * 3600 / (num_faults + 1))
        if number % 3 == 1:
            run.end("stopped by SIGTERM", "SIGTERM came; an autosave was written within 25 seconds.")
        run.wait(drawn.expovariate(1 / down) + 4)
    run.begin()
    run.train(hours * 3600 / (num_faults + 1))
    run.end()
    return made_of(run.lines, run_id=run_id)


def evaluated(*, step_seconds=0.5):
    """Return the report of a run that validates, is killed in a validation run and in its test, and predicts."""
    run = ImaginedRun(save_every=90.0, step_seconds=step_seconds)
    run.begin()
    for _ in range(3):
        run.train(600)
        run.validate(120, seconds=1.0)
    run.train(600)
    run.validate(120, seconds=1.0, saves_at=40, until=75)
    run.wait(150)
    run.begin()
    run.lines[-1] |= {"num_validated": 40}
    run.validate(120, seconds=1.0, first=40)
    run.train(600)
    run._save()
    run.end()
    run.evaluate("test", 600, seconds=1.0, number=2, saves_at=300, until=340)
    run.wait(200)
    run.begin()
    run.end()
    run.evaluate("test", 600, seconds=1.0, number=2, first=300)
    run.evaluate("predict", 200, seconds=0.5, number=3)
    run.add("done")
    return made_of(run.lines, run_id="evaluated")


def calm(*, hours=1.0):
    """Return the report of an undisturbed run."""
    run = ImaginedRun(save_every=120.0)
    run.begin()
    run.train(hours * 3600)
    run.end()
    return made_of(run.lines, run_id="calm")


def made_of(lines, *, run_id="run", is_whole=True, made=BEGAN + 1e6):
    """Return the report of lines."""
    return report_of(history_of(lines), run_id=run_id, path=f"/mnt/runs/{run_id}", made=made, is_whole=is_whole)


def only_tested():
    """Return the report of a script that tests, and is killed once."""
    run = ImaginedRun()
    run._num_processes = 1
    run.now += 8
    run.evaluate("test", 600, seconds=1.0, number=1, saves_at=300, until=340)
    run.wait(60)
    run._num_processes = 2
    run.evaluate("test", 600, seconds=1.0, number=1, first=300)
    return made_of(run.lines, run_id="only-tested")

"""A script that writes a ledger, saves, and resumes, without torch, since it is started often: a stand-in.

Its training is a sum of random numbers; so are its validation batches (`--validation`) and the evaluations that follow
the fits (`--test`, `--predict`). It saves and waits where the drill asks for it. `--change` falsifies what it writes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("directory")
for name, default in {"fits": 1, "epochs": 2, "batches": 4, "validation": 0, "test": 0, "predict": 0}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
parser.add_argument("--run-id", default=os.environ.get("PL_FAULT_TOLERANT_RUN_ID", ""))
parser.add_argument("--change", action="append", default=[], help="EVENT and JSON: other values after a restart")
parser.add_argument("--always", action="store_true", help="change also before a restart, in all runs but the first one")
parser.add_argument("--seconds", type=float, default=0)
parser.add_argument("--stops-with", type=int, default=143)
for name in ("silent", "deaf", "catches", "launcher", "fails", "fails-again", "is-refused", "begins-again"):
    parser.add_argument(f"--{name}", action="store_true")
options = parser.parse_args()
run = Path(options.directory) / options.run_id
is_restart = any(run.glob("*.json"))
is_changed = is_restart or (options.always and "uninterrupted" not in options.run_id)
changes = [change.split(" ", 1) for change in options.change]
stops: list[int] = []


def digest(value: Any) -> str:
    """Return a digest of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


class Loop:
    """A fit, or an evaluation after the fits."""

    def __init__(self, number: int, function: str) -> None:
        self.number, self.function = number, function
        self.path = run / f"{number}.json"
        self.rng = random.Random(number)
        self.state: dict[str, Any] = {"epoch": 0, "batch": 0, "weight": 1.0, "outputs": [], "finished": False}
        self.state["validating"] = function != "fit"

    @property
    def place(self) -> dict[str, int]:
        """Where it is."""
        place = {"epoch": self.state["epoch"], "batch": self.state["batch"]}
        return {**place, "validation_batch": len(self.state["outputs"])} if self.state["validating"] else place

    def run(self) -> None:
        """Run it from where it was left."""
        sizes = {"num_batches": options.batches, "max_epochs": options.epochs} if self.function == "fit" else {}
        surroundings = {"torch": "2.13", "threads": 2}
        self.write(
            "fit", function=self.function, pid=os.getpid(), rank=0, num_ranks=1, surroundings=surroundings, **sizes
        )
        if not self.path.exists():
            self.save()
        elif not options.begins_again:
            self.resume()
        while self.function == "fit" and self.state["epoch"] < options.epochs and not self.state["finished"]:
            if not self.state["validating"]:
                self.train()
            if self.state["batch"] == options.batches:
                self.validate()
            self.boundary()
        if self.function != "fit" and not self.state["finished"]:
            self.evaluate(getattr(options, self.function))
        self.state |= {"finished": True, "validating": False}
        self.save()
        ends = {"weights": digest(self.state["weight"]), "optimizers": "none"}
        returned = {"returned": {"sum": sum(self.state["outputs"]).hex() if self.state["outputs"] else None}}
        self.write("end", metrics={}, rng="none", **(ends if self.function == "fit" else returned))

    def resume(self) -> None:
        """Resume from the autosave."""
        self.state |= json.loads(self.path.read_text())
        version, numbers, gauss = self.state.pop("rng")
        self.rng.setstate((version, tuple(numbers), gauss))
        text = f"before batch {self.state['batch']} of epoch {self.state['epoch']}"
        text = f"after the end of the {self.function}" if self.state["finished"] else text
        where = "finished" if self.state["finished"] else "boundary"
        self.write("resumed", **self.place, where=where, text=text, exact=True, not_exact=[], path=str(self.path))

    def train(self) -> None:
        """Train one batch."""
        state = self.state
        number = state["epoch"] * options.batches + state["batch"]
        before = digest(self.rng.getstate())
        if os.environ.get("PL_FAULT_TOLERANT_FAULT", "").startswith(
            f"{self.number}:{state['epoch']}:{state['batch']}:"
        ):
            print("DrillFault: asked for")
            if not options.catches:
                sys.exit(1 if options.stops_with else 0)
            state["weight"] += 1
        state["weight"] = state["weight"] * 0.9 + 0.01 * number + self.rng.random()
        time.sleep(options.seconds)
        values = {"order": digest(number), "content": digest(-number), "rng": before, "loss": state["weight"].hex()}
        self.write("batch", **self.place, **values, learning_rates=[[(0.1).hex()]])
        state["batch"] += 1
        metrics = {"loss": state["weight"].hex(), "seconds": "0x0p+0"}
        self.write("log", **self.place, step=number, metrics=metrics)

    def boundary(self) -> None:
        """Save and wait where the drill requests it, and stop if requested, as the package does."""
        place = ":".join(map(str, (self.number, *self.place.values())))
        if place in os.environ.get("PL_FAULT_TOLERANT_SAVE_AT", "").split(",") and not options.deaf:
            self.save()
        hold = os.environ.get("PL_FAULT_TOLERANT_HOLD_AT")
        while place == hold and not stops and not options.deaf:
            time.sleep(0.001)
        if stops and (hold in (None, place) or options.deaf):  # always at the same place, however early it comes
            self.save()
            sys.exit(options.stops_with)

    def validate(self) -> None:
        """Run the validation at the end of an epoch."""
        self.evaluate(options.validation)
        place = {"epoch": self.state["epoch"], "batch": self.state["batch"]}
        self.write("validated", **place, metrics={"accuracy": sum(self.state["outputs"], 0.0).hex()})
        self.state |= {"validating": False, "outputs": [], "epoch": self.state["epoch"] + 1, "batch": 0}

    def evaluate(self, num_batches: int) -> None:
        """Evaluate the batches that are left."""
        self.state["validating"] = True
        while len(self.state["outputs"]) < num_batches:
            self.boundary()
            number = len(self.state["outputs"])
            place = ":".join(map(str, (self.number, *self.place.values())))
            if os.environ.get("PL_FAULT_TOLERANT_FAULT", "").startswith(f"{place}:"):
                sys.exit(1)
            before, output = digest(self.rng.getstate()), number + self.rng.random()
            self.state["outputs"].append(output)
            self.write("evaluated", **self.place, content=digest(number), rng=before, output=output.hex())

    def save(self) -> None:
        """Write an autosave."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps({**self.state, "rng": self.rng.getstate()}))
        temporary.replace(self.path)
        where = "finished" if self.state["finished"] else "boundary"
        self.write("autosave", **self.place, where=where, path=str(self.path))

    def write(self, event: str, **values: Any) -> None:
        """Add a line to the ledger, with the values that `--change` asks for; null leaves the line out."""
        line: dict[str, Any] = {"event": event, "fit": self.number, "time": time.time(), **values}
        for changed, text in changes:
            new = json.loads(text)
            if changed == event and is_changed and new is None:
                return
            if changed == event and is_changed and line.get("batch", 0) >= new.pop("since", 0):
                known = {key: value for key, value in new.items() if key in line}
                line |= {key: {**line[key], **new} if isinstance(new, dict) else new for key, new in known.items()}
        path = os.environ.get("PL_FAULT_TOLERANT_LEDGER")
        if path is not None and not options.silent:
            with open(path, "ab", buffering=0) as file:
                file.write(json.dumps(line).encode() + b"\n")


def main() -> None:
    """Run the script."""
    if options.launcher:
        words = [word for word in sys.argv if word != "--launcher"]
        sys.exit(next((0 for _ in range(9) if subprocess.call([sys.executable, "-S", *words]) == 0), 1))
    if options.fails or (options.fails_again and is_restart):
        sys.exit("reading data\ntraining\nValueError: it fails")
    if options.is_refused and is_restart:
        sys.exit(
            "lightning_faulttolerant.errors.FingerprintMismatchError: Not the run that saved:\n  - batch_size: 4, 8"
        )
    signal.signal(signal.SIGTERM, lambda *_: stops.append(1))
    functions = ["fit"] * options.fits + [name for name in ("test", "predict") if getattr(options, name)]
    for number, function in enumerate(functions, 1):
        Loop(number, function).run()
    for path in run.glob("*"):
        path.unlink()


if __name__ == "__main__":
    main()

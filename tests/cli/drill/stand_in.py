"""A script that writes a ledger, saves, and resumes, without torch: a stand-in for a training in the drill.

It imports nothing slow, since it is started often. Its training is a sum of random numbers; so are its validation
batches (`--validation`) and the evaluations that follow the fits (`--test`, `--predict`). `--flaw` makes a part of
its state restart in each process. It continues when the drill has seen its last batch, so a strike hits at its place
however busy the machine is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Run the script with the arguments of the process."""
    arguments = _arguments()
    if arguments.fails and (arguments.fails == "always" or _run_directory(arguments).exists()):
        print("reading data\ntraining\nValueError: it fails")
        sys.exit(3)
    signal.signal(signal.SIGTERM, lambda *_: arguments.stop.append(arguments.stops_with))
    for fit in range(1, arguments.fits + 1):
        Training(arguments, fit).run()
    for number, function in enumerate(name for name in ("test", "predict") if getattr(arguments, name)):
        Evaluation(arguments, arguments.fits + 1 + number, function).run()
    for path in sorted(_run_directory(arguments).glob("*")):
        path.unlink()
    print("done")


class Training:
    """One fit."""

    function = "fit"

    def __init__(self, arguments: argparse.Namespace, fit: int) -> None:
        self.arguments = arguments
        self.fit = fit
        self.path = _run_directory(arguments) / f"fit-{fit}.json"
        self.rng = random.Random(os.getpid() if "no seed" in arguments.flaw else fit)
        self.state: dict[str, Any] = {"epoch": 0, "batch": 0, "weight": 1.0, "rng": None, "finished": False}
        self.state |= {"outputs": [], "validating": False}
        self.plain = 0

    def run(self) -> None:
        """Run the fit from where it was left."""
        arguments = self.arguments
        surroundings = {"torch": "2.13", "threads": 2}
        if "threads" in arguments.flaw and self.path.exists():
            surroundings["threads"] = 4
        self.write(
            "fit",
            function=self.function,
            pid=os.getpid(),
            rank=0,
            num_ranks=1,
            num_batches=arguments.batches,
            max_epochs=arguments.epochs,
            surroundings=surroundings,
        )
        self.resume()
        if not self.path.exists():
            self.save()
        while self.state["epoch"] < arguments.epochs and not self.state["finished"]:
            if not self.state["validating"]:
                self.batch()
            if self.state["batch"] == arguments.batches:
                self.validate()
            self.boundary()
        self.state["finished"] = True
        self.save()
        self.write("end", weights=digest(self.state["weight"]), optimizers="none", metrics={}, rng="none")

    def resume(self) -> None:
        """Resume from the autosave, if one exists."""
        if not self.path.exists() or "begins again" in self.arguments.flaw:
            return
        self.state |= json.loads(self.path.read_text())
        if "main RNG" not in self.arguments.flaw:
            version, numbers, gauss = self.state["rng"]
            self.rng.setstate((version, tuple(numbers), gauss))
        if "weights" in self.arguments.flaw:
            self.state["weight"] += 1e-9
        epoch, batch = self.state["epoch"], self.state["batch"]
        text = f"before batch {batch} of epoch {epoch}"
        if self.state["finished"]:
            text = f"after the end of the {self.function}"
        place = {"epoch": epoch, "batch": batch, **self.evaluated}
        if "position lost" in self.arguments.flaw:
            self.state["outputs"] = []
        if "metrics doubled" in self.arguments.flaw:
            self.state["outputs"] = [2 * output for output in self.state["outputs"]]
        if "prediction lost" in self.arguments.flaw:
            self.state["lost"] = 1
        exact = "not exact" not in self.arguments.flaw
        why = [] if exact else ["the sampler draws from a generator that was not found"]
        self.write("resumed", **place, text=text, exact=exact, not_exact=why, path=str(self.path))

    @property
    def evaluated(self) -> dict[str, int]:
        """Return the place in an evaluation, if one is in progress."""
        return {"validation_batch": len(self.state["outputs"])} if self.state["validating"] else {}

    def batch(self) -> None:
        """Train one batch."""
        arguments, state = self.arguments, self.state
        order = [(state["epoch"] * 7 + state["batch"] * 3 + i) % 50 for i in range(4)]
        if "data order" in arguments.flaw:
            order = [index + self.plain // 4 for index in order]
        content = [float(index) for index in order]
        if "augmentation" in arguments.flaw:
            content = [value + self.plain for value in content]
        self.plain += 1
        before = digest(self.rng.getstate())
        fault = os.environ.get("PL_FAULT_TOLERANT_FAULT", "")
        if fault.startswith(f"{self.fit}:{state['epoch']}:{state['batch']}:"):
            print("DrillFault: asked for")
            sys.exit(1 if self.arguments.stops_with else 0)
        state["weight"] = state["weight"] * 0.9 + 0.01 * sum(content) + self.rng.random()
        time.sleep(arguments.seconds)
        self.write(
            "batch",
            epoch=state["epoch"],
            batch=state["batch"],
            order=digest(order),
            content=digest(content),
            rng=before,
            loss=state["weight"].hex(),
            learning_rates=[[(0.1).hex()]],
        )
        metrics = {"loss": state["weight"].hex()}
        if "clock" in arguments.flaw:
            metrics["seconds"] = time.time().hex()
        if "logged values" in arguments.flaw:
            metrics["seen"] = self.plain
        self.write("log", step=state["epoch"] * arguments.batches + state["batch"], metrics=metrics)
        state["batch"] += 1

    def boundary(self) -> None:
        """Save if it is time, and stop if requested."""
        self.heed(":".join(map(str, (self.fit, self.state["epoch"], self.state["batch"], *self.evaluated.values()))))
        num_done = self.state["epoch"] * self.arguments.batches + self.state["batch"]
        if self.arguments.stop or (self.arguments.every and num_done % self.arguments.every == 0):
            self.save()
        self.wait_to_be_seen(num_done + (self.fit - 1) * self.arguments.epochs * self.arguments.batches)
        if self.arguments.stop:
            sys.exit(self.arguments.stop[0])

    def heed(self, place: str) -> None:
        """Save and wait where the drill requests it, as the package does."""
        if not self.arguments.heeds:
            return
        if place in os.environ.get("PL_FAULT_TOLERANT_SAVE_AT", "").split(","):
            self.save()
        if place == os.environ.get("PL_FAULT_TOLERANT_HOLD_AT"):
            while not self.arguments.stop:
                time.sleep(0.001)

    def wait_to_be_seen(self, num_done: int) -> None:
        """Wait until the drill knows that this number of batches is done."""
        if self.arguments.heeds:
            return  # it runs as fast as it can
        seen = Path(self.arguments.directory).parent / "seen"
        while seen.exists() and not self.arguments.stop and not self.arguments.silent:
            number = seen.read_text()
            if number and int(number) >= num_done:
                return
            time.sleep(0.001)

    def validate(self) -> None:
        """Run the validation at the end of an epoch."""
        metric = 0 if "metrics" not in self.arguments.flaw else min(self.plain, 20)
        place = {"epoch": self.state["epoch"], "batch": self.state["batch"]}
        self.evaluate(self.arguments.validation)
        metrics = {"accuracy": metric, "sum": sum(self.state["outputs"]).hex() if self.state["outputs"] else None}
        self.state |= {"validating": False, "outputs": []}
        self.write("validated", **place, metrics=metrics)
        self.state["epoch"] += 1
        self.state["batch"] = 0

    def evaluate(self, num_batches: int) -> None:
        """Evaluate the batches that are left."""
        self.state["validating"] = True
        while len(self.state["outputs"]) < num_batches:
            self.boundary()
            number = len(self.state["outputs"])
            place = f"{self.fit}:{self.state['epoch']}:{self.state['batch']}:{number}:"
            if os.environ.get("PL_FAULT_TOLERANT_FAULT", "").startswith(place):
                sys.exit(1)
            before = digest(self.rng.getstate())
            output = number + self.rng.random()
            time.sleep(self.arguments.seconds)
            self.state["outputs"].append(output)
            place = {"epoch": self.state["epoch"], "batch": self.state["batch"], **self.evaluated}
            self.write("evaluated", **place, content=digest(number), rng=before, output=output.hex())

    def save(self) -> None:
        """Write an autosave."""
        self.state["rng"] = self.rng.getstate()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(self.state))
        temporary.replace(self.path)
        text = f"after the end of the {self.function}" if self.state["finished"] else "before a batch"
        place = {"epoch": self.state["epoch"], "batch": self.state["batch"], **self.evaluated}
        self.write("autosave", **place, text=text, path=str(self.path))

    def write(self, event: str, **values: Any) -> None:
        """Add a line to the ledger."""
        path = os.environ.get("PL_FAULT_TOLERANT_LEDGER")
        if path is not None and not self.arguments.silent:
            with open(path, "ab", buffering=0) as file:
                file.write(
                    json.dumps({"event": event, "fit": self.fit, "time": time.time(), **values}).encode() + b"\n"
                )


class Evaluation(Training):
    """One evaluation after the fits."""

    def __init__(self, arguments: argparse.Namespace, fit: int, function: str) -> None:
        super().__init__(arguments, fit)
        self.function = function
        self.state["validating"] = True

    def run(self) -> None:
        """Run the evaluation from where it was left."""
        surroundings = {"torch": "2.13", "threads": 2}
        self.write("fit", function=self.function, pid=os.getpid(), rank=0, num_ranks=1, surroundings=surroundings)
        self.resume()
        if not self.path.exists():
            self.save()
        if not self.state["finished"]:
            self.evaluate(getattr(self.arguments, self.function))
        self.state |= {"finished": True, "validating": False}
        self.save()
        returned = {"sum": sum(self.state["outputs"]).hex()}
        if self.function == "predict":
            number = len(self.state["outputs"]) - self.state.get("lost", 0)
            returned = {"number of predictions": number, "predictions": digest(self.state["outputs"][:number])}
        self.write("end", returned=returned, metrics={}, rng=digest(self.rng.getstate()))


def digest(value: Any) -> str:
    """Return a digest of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _run_directory(arguments: argparse.Namespace) -> Path:
    run_id = arguments.run_id or os.environ["PL_FAULT_TOLERANT_RUN_ID"]
    return Path(arguments.directory) / run_id


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--run-id", default="")
    parser.add_argument("--fits", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--validation", type=int, default=0)
    parser.add_argument("--test", type=int, default=0)
    parser.add_argument("--predict", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.001)
    parser.add_argument("--flaw", action="append", default=[])
    parser.add_argument("--heeds", action="store_true")
    parser.add_argument("--fails", default="")
    parser.add_argument("--stops-with", type=int, default=143)
    parser.add_argument("--silent", action="store_true")
    arguments = parser.parse_args()
    arguments.stop = []
    return arguments


if __name__ == "__main__":
    main()

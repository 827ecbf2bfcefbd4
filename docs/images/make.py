"""Create the pictures of the pages again, from a real drill and a real run with faults: ten minutes, needs Chromium.

.venv/bin/python -m docs.images.make [drill] [run]      (from the root of the repository; `make browser` gets Chromium)
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

from lightning_faulttolerant.cli import main
from tests.cli.page.browser import Browser

HERE = Path(__file__).parent
TRAIN = [sys.executable, str(HERE / "train.py")]
WIDTH = 1120
HEIGHTS = {"drill": 905, "run": 1045}
MAX_BYTES = 150_000

LIVES = ((95, 25), (140, 60), (45, 12))
"""For each fault of the run: how many seconds its process lives, and how many there is none after it."""


def drill(directory: Path) -> Path:
    """Drill the training, and return the page."""
    path = directory / "drill.html"
    status = main(["drill", "--kills", "5", "--seed", "5", "--html", str(path), "--", *TRAIN, "60", "70"])
    assert status == 0, "the drill was not exact"
    return path


def run(directory: Path) -> Path:
    """Train with faults, and return the page of the run."""
    environment = os.environ | {"PL_FAULT_TOLERANT_RUN_ID": "digits"}
    for lives, gone in (*LIVES, (None, 0)):
        with subprocess.Popen([*TRAIN, "520", "400", "--evaluate"], cwd=directory, env=environment) as process:
            try:
                process.wait(lives)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
        time.sleep(gone)
    path = directory / "run.html"
    assert main(["report", str(directory / "fault_tolerance"), "--html", str(path)]) == 0
    return path


def picture(page: Path, name: str) -> None:
    """Write a picture of the top of a page."""
    path = HERE / f"{name}.png"
    with tempfile.TemporaryDirectory() as directory:
        browser = Browser(directory)
        try:
            browser.open(page, width=WIDTH, scale=1.5)
            browser.picture(path, width=WIDTH, height=HEIGHTS[name])
        finally:
            browser.close()
    with Image.open(path) as full:
        full.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    assert path.stat().st_size < MAX_BYTES, f"{path} takes {path.stat().st_size} bytes"


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    for name in sys.argv[1:] or ["drill", "run"]:
        with tempfile.TemporaryDirectory() as directory:
            before = os.getcwd()
            os.chdir(directory)
            try:
                picture({"drill": drill, "run": run}[name](Path(directory)), name)
            finally:
                os.chdir(before)

"""Create the pictures of the documentation again, from a real drill and real runs with faults: fifteen minutes.

.venv/bin/python -m docs.images.make [drill] [run] [goodput] [replay]      (from the root of the repository)

Those of pages need Chromium (`make browser`).
"""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

from lightning_faulttolerant.cli import main
from lightning_faulttolerant.supervision.heartbeats import PREFIX, read_heartbeats, shared_memory
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


STRIKES = ((30, signal.SIGKILL), (25, signal.SIGSTOP), (40, signal.SIGKILL))
"""For each fault of the supervised run: after how many seconds of training it comes, and its signal."""


def goodput(directory: Path) -> None:
    """Train under supervision with faults, one of them a hang, and write a picture of the printed report."""
    options = {"PL_FAULT_TOLERANT_OPTIONS": "HangWatch.timeout=30"}
    environment = os.environ | options | {"PL_FAULT_TOLERANT_RUN_ID": "digits"}
    words = [sys.executable, "-m", "lightning_faulttolerant", "run", "--", *TRAIN, "300", "100"]
    with subprocess.Popen(words, cwd=directory, env=environment) as supervisor:
        for seconds, signum in STRIKES:
            strike(directory, seconds, signum)
        assert supervisor.wait() == 0
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["report", "fault_tolerance"]) == 0
    command = "$ lightning-faulttolerant report fault_tolerance"
    terminal([command, *printed.getvalue().splitlines()], HERE / "goodput.png")


GUIDE = HERE.parent / "guides" / "replay.md"
TYPED = ("n", "images[22].isnan().nonzero()")
"""What the user types in the debugger."""


def replay(directory: Path) -> None:
    """Run the script and the three commands of the guide to replays, and write a picture of what they print."""
    guide = GUIDE.read_text()
    script, *_ = re.findall(r"```python[^\n]*\n(.*?)```", guide, re.DOTALL)
    (directory / "train.py").write_text(script)
    environment = os.environ | {"HOME": str(directory)}
    subprocess.run([sys.executable, "train.py"], cwd=directory, env=environment, check=True)
    lines: list[str] = []
    for command in re.findall(r"^\$ lightning-faulttolerant (replay .*)$", guide, re.MULTILINE)[:3]:
        words = [sys.executable, "-m", "lightning_faulttolerant", *command.split()]
        words[words.index("python")] = sys.executable
        given = "".join(f"{line}\n" for line in (*TYPED, "q"))
        ended = subprocess.run(words, cwd=directory, env=environment, input=given, capture_output=True, text=True)
        printed = ended.stdout.replace(str(directory), "/home/me")
        lines += [f"$ lightning-faulttolerant {command}", "...", *_shown(printed, is_debugged="--pdb" in command), ""]
    terminal(lines[:-1], HERE / "replay.png")


def _shown(printed: str, *, is_debugged: bool) -> list[str]:
    """Return the lines of a replay itself, shortened; of the debugger, what it prints, and what is typed."""
    if is_debugged:
        first, *answers = printed[printed.index("> /home/me") :].split("(Pdb) ")
        typed = zip(TYPED, answers, strict=False)
        printed = first + "".join(f"(Pdb) {line}\n{answer}" for line, answer in typed)
    else:
        printed = printed[printed.index("Replay of fit") :]
        printed = re.sub(r"\(/.*(/kept/)", r"(...\1", printed)
        printed = re.sub(r"(samples \[(?:\d+, ){5}).*\]", r"\1...]", printed)
    return printed.splitlines()


def strike(directory: Path, seconds: float, signum: int) -> None:
    """Send a signal to the training process, some time after it has begun its batches."""
    trained, last = 0.0, -1
    while trained < seconds:
        time.sleep(0.5)
        found = [
            beat
            for folder in shared_memory().glob(f"{PREFIX}*")
            for beat in read_heartbeats(folder)
            if beat.directory.startswith(str(directory))
        ]
        if found and found[0].batch + 1000 * found[0].epoch != last:
            trained, last = trained + 0.5, found[0].batch + 1000 * found[0].epoch
    os.kill(found[0].process_id, signum)


INK, PAPER, FONT_SIZE = "#e6e6e6", "#1e1e1e", 26


def terminal(lines: list[str], path: Path) -> None:
    """Write a picture of lines as a terminal shows them."""
    font = ImageFont.truetype(font_manager.findfont("DejaVu Sans Mono"), FONT_SIZE)
    height, width = round(1.35 * FONT_SIZE), font.getlength("m")
    size = round(width * max(map(len, lines))) + 2 * height, height * (len(lines) + 2)
    image = Image.new("RGB", size, PAPER)
    drawing = ImageDraw.Draw(image)
    for number, line in enumerate(lines, start=1):
        drawing.text((height, number * height), line, INK, font)
    image.quantize(32, dither=Image.Dither.NONE).save(path, optimize=True)
    assert path.stat().st_size < MAX_BYTES, f"{path} takes {path.stat().st_size} bytes"


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
    for name in sys.argv[1:] or ["drill", "run", "goodput", "replay"]:
        with tempfile.TemporaryDirectory() as directory:
            before = os.getcwd()
            os.chdir(directory)
            try:
                if name in ("goodput", "replay"):
                    {"goodput": goodput, "replay": replay}[name](Path(directory))
                else:
                    picture({"drill": drill, "run": run}[name](Path(directory)), name)
            finally:
                os.chdir(before)

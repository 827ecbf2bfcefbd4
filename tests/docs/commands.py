"""Checks the command lines of a page against the programs that they call: does each command, option, and file exist?"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator

from lightning_faulttolerant.cli import _parser
from tests.docs.pages import ROOT, Block

# Programs of others and of the shell; their options are unknown here.
OTHERS = {
    "aws", "break", "cd", "cp", "curl", "do", "docker", "done", "echo", "exec", "export", "fi", "gcloud", "gsutil",
    "if", "kill", "kubectl", "ls", "mkdir", "rm", "sacct", "sbatch", "scontrol", "sleep", "squeue", "sudo",
    "tensorboard", "test", "timeout", "trap", "ulimit", "until", "wait", "while", "zip",
}  # fmt: skip
# Names of a reader's own training script.
READERS_SCRIPTS = {"train.py", "main.py", "my_train.py"}

_SUBSTITUTED = re.compile(r"^\s*\w+=\$\((.*)\)\s*$")  # name=$(command ...)


def fault_of(block: Block) -> str:
    """Return the error in a block of commands, or an empty string."""
    script = session_input(block.code) if block.language == "console" else block.code
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    if checked.returncode:
        return checked.stderr
    return "\n".join(filter(None, map(_fault_of_line, _commands(script))))


def session_input(code: str) -> str:
    """Return the input of a session: the lines after ``$``."""
    return "\n".join(line.removeprefix("$ ") for line in code.splitlines() if line.startswith("$ "))


def _commands(script: str) -> Iterator[list[str]]:
    """Yield the words of each command, without variables that are set for it alone."""
    script = re.sub(r"\\\n\s*", " ", script)
    for line in script.splitlines():
        try:
            words = shlex.split(_SUBSTITUTED.sub(r"\1", line), comments=True)
        except ValueError:  # quotes over several lines
            continue
        own = itertools.dropwhile(lambda word: "=" in word and not word.startswith("-"), words)
        words = list(itertools.takewhile(lambda word: word not in {"|", "&&", "||", ";", "&", ">", ">>"}, own))
        if words:
            yield words


def _fault_of_line(words: list[str]) -> str:
    program, *arguments = words
    if program in OTHERS:
        return ""
    check = _PROGRAMS.get(program)
    if check is None:
        return f"{program}: not a program that the pages may call; see tests/docs/commands.py"
    fault = check(arguments)
    return f"{shlex.join(words)}: {fault}" if fault else ""


def _said_by(parser: argparse.ArgumentParser, arguments: list[str]) -> str:
    """Return the complaint of a parser."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            parser.parse_args(arguments)
    except SystemExit as stop:
        return said.getvalue() if stop.code else ""
    return ""


def _make(arguments: list[str]) -> str:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return ", ".join(word for word in arguments if "=" not in word and word not in targets)


def _python(arguments: list[str]) -> str:
    match arguments:
        case ["-m", "lightning_faulttolerant", *rest]:
            return _said_by(_parser(rest), rest)
        case ["-m", "pip", *rest]:
            return _pip(rest)
        case ["-c", *_] | ["-m", "http.server", *_]:
            return ""
        case [script, *_] if script in READERS_SCRIPTS or (ROOT / script).is_file():
            return ""
    return "no such script"


def _pip(arguments: list[str]) -> str:
    """Check that the extras exist."""
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = re.findall(r"^(\w+) = \[", pyproject.partition("[project.optional-dependencies]")[2], re.MULTILINE)
    asked = re.findall(r"(?:^|\s)(?:\.|lightning-faulttolerant)\[([\w,-]+)\]", " ".join(arguments))
    return ", ".join(extra for part in asked for extra in part.split(",") if extra not in extras)


def _torchrun(arguments: list[str]) -> str:
    """Check with torchrun's own parser, then check the script."""
    from torch.distributed.run import get_args_parser  # takes a second

    fault = _said_by(get_args_parser(), arguments)
    return fault or _python([get_args_parser().parse_args(arguments).training_script])


def _srun(arguments: list[str]) -> str:
    """Check the command after the options of `srun`."""
    return _fault_of_line(list(itertools.dropwhile(lambda word: word.startswith("-"), arguments)))


_PROGRAMS: dict[str, Callable[[list[str]], str]] = {
    "lightning-faulttolerant": lambda arguments: _said_by(_parser(arguments), arguments),
    "make": _make,
    "pip": _pip,
    "python": _python,
    "srun": _srun,
    "torchrun": _torchrun,
}

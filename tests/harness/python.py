"""Run Python commands in processes forked from this one, which has imported torch and Lightning.

A start takes a tenth of a second instead of five. Only `/proc` shows the arguments and environment of this process for
such a process. What it starts itself, by `subprocess` or `multiprocessing`, starts as usual.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import functools
import gc
import logging
import os
import queue
import random
import runpy
import secrets
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

_HIGH = 600  # no script of the tests has this many descriptors
_MARK = "TESTS_MARK"
_NO_MATTER = ("-B", "-u")
"""Options of Python that can be ignored: all output is flushed line by line anyway."""
_KEPT: list[Any] = []
"""Objects that would close a descriptor when they are deleted."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """The arguments of `execve`, and the directory."""

    words: Sequence[str]
    """As typed: the interpreter, its options, and the script with its arguments."""
    directory: str
    environment: Mapping[str, str]


class Popen:
    """The equivalent of `subprocess.Popen` for a forked process, which is the leader of its own session.

    Args:
        command: The Python command.
        output: A file for all output of the process.
        mark: A file by which `marked` finds the process and all that it starts.
    """

    def __init__(self, command: Command, *, output: Path, mark: Path) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        started: queue.Queue[int] = queue.Queue()
        prepare = functools.partial(_fork, started, command, output, mark)
        names = {"__name__": "runpy", "prepare": prepare, "end": functools.partial(_end, os.getpid())}
        # In a thread with an empty stack: code that inspects the stack there finds no test.
        _thread.start_new_thread(exec, (_OUTERMOST, names))
        self.pid = started.get()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if done else None
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        """Wait for the end of the process. Only what is to find hangs gives a limit, in seconds."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a script", timeout)
            time.sleep(0.005)
        return code


def run(command: Command, *, scratch: Path) -> tuple[int, str]:
    """Run a command to its end, and kill what it leaves behind; return its exit code and its output.

    Args:
        command: As for `Popen`.
        scratch: Directory for two files of this function; created if it does not exist.
    """
    scratch.mkdir(exist_ok=True)
    output, mark = scratch / "output.txt", scratch / "open"
    process = Popen(command, output=output, mark=mark)
    try:
        exit_code = process.wait()
    finally:
        while left := marked(mark):
            for process_id in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)
            time.sleep(0.01)
        process.wait()
    return exit_code, output.read_text()


def marked(mark: Path) -> list[int]:
    """Return the processes with this mark: forked ones keep the file open, others have it in their environment."""
    found, variable = [], os.fsencode(f"{_MARK}={mark}")
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_open = any(_target(each) == os.fsencode(mark) for each in (path / "fd").iterdir())
            if is_open or variable in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
    return found


def _target(link: Path) -> bytes:
    try:
        return os.readlink(os.fsencode(link))
    except OSError:  # the process has closed the file since, which says nothing about its others
        return b""


_OUTERMOST = compile(
    """
error = None
try:
    function, *arguments = prepare()
    function(*arguments)
except BaseException as raised:
    error = raised
end(error)
""",
    "<frozen runpy>",  # the name that is below a module run by Python
    "exec",
)


def _fork(started: queue.Queue[int], command: Command, output: Path, mark: Path) -> tuple[Callable[..., object], Any]:
    """Fork the process; return the call for that process, and a call without effect in this one."""
    output.touch()
    process_id = os.fork()
    if process_id:
        started.put(process_id)
        return bool, None
    os.setsid()
    os.closerange(0, os.sysconf("SC_OPEN_MAX"))
    for file, flags, number in ((os.devnull, os.O_RDONLY, 0), (output, os.O_WRONLY | os.O_APPEND, 1)):
        assert os.open(file, flags) == number
        os.set_inheritable(number, True)
    os.dup2(1, 2)
    os.dup2(os.open(mark, os.O_RDONLY | os.O_CREAT), _HIGH, inheritable=False)
    os.close(3)
    _forget()
    os.environ.clear()
    os.environ.update({**command.environment, _MARK: str(mark)})
    os.chdir(command.directory)
    torch.set_num_threads(int(command.environment.get("OMP_NUM_THREADS", torch.get_num_threads())))
    return _called(command.words[1:])


def _forget() -> None:
    """Make this process look as if it had just been started."""
    gc.freeze()  # a finalizer may wait for a thread that was not forked
    atexit._clear()
    warnings.resetwarnings()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL if signum != signal.SIGINT else signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _KEPT.extend([sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__])
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    loggers = [logging.root, *map(logging.getLogger, logging.root.manager.loggerDict)]
    for logger in loggers:
        for handler in list(logger.handlers):
            if logger is logging.root or type(handler).__module__.startswith("_pytest."):
                logger.removeHandler(handler)  # one has a file whose number now belongs to another file
                _KEPT.append(handler)
            elif type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)  # of a failed test
    random.seed()
    torch.manual_seed(secrets.randbits(63))
    np.random.seed(secrets.randbits(31))


def _called(words: Sequence[str]) -> tuple[Any, ...]:
    """Return the call that runs a script, a module, or a text as `__main__`."""
    sys.orig_argv[:] = [sys.executable, *words]
    while words[0] in _NO_MATTER:
        words = words[1:]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        sys.path.insert(0, os.getcwd())
        return runpy._run_module_as_main, words[1]
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        return exec, compile(words[1], "<string>", "exec"), vars(main)
    path = os.path.join(os.getcwd(), words[0])
    sys.argv = list(words)
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    main.__file__ = path
    return exec, compile(Path(path).read_bytes(), path, "exec"), vars(main)


def _end(here: int, error: BaseException | None) -> None:
    """End this process as Python does, unless it is the process with the tests."""
    if os.getpid() == here:
        return
    code = 70
    try:
        code = _tell(error)
        threading._shutdown()
        atexit._run_exitfuncs()
        vars(sys.modules["__main__"]).clear()  # finalizes the objects that the script has left
        gc.collect()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    finally:
        os._exit(code)


def _tell(error: BaseException | None) -> int:
    """Print the exception that ended a script; return its exit code."""
    if error is None:
        return 0
    if not isinstance(error, SystemExit):
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1

"""Run Python commands in processes forked from this one, which has imported torch and Lightning.

A start takes a tenth of a second instead of five. Such a process may itself start `sys.executable` by `subprocess`,
`multiprocessing`, or loky. These processes are forked as well, but from a spare process: the starting process has run
the script by then. The spare was forked before, has imported the same, and has run nothing. The new processes have the
parent, group, session, descriptors, directory, arguments, and environment that they would have otherwise. Only `/proc`
shows the arguments and environment of this process for them.
"""

from __future__ import annotations

import _posixsubprocess
import _thread
import array
import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import logging
import os
import pickle
import queue
import random
import runpy
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_HIGH = 600  # no script of the tests has this many descriptors
_DEATH_SIGNAL, _ADOPTS = 1, 36  # options of prctl: PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER
_NO_MATTER = ("-B", "-u")
"""Options of Python that can be ignored: all output is flushed line by line anyway."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_FORK_EXEC = _posixsubprocess.fork_exec
_KEPT: list[Any] = []
"""Objects that would close a descriptor when they are deleted."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """The arguments of `execve`, and the steps before it."""

    words: Sequence[str]
    """As typed: the interpreter, its options, and the script with its arguments."""
    directory: str
    environment: Mapping[str, str]
    has_own_session: bool = False
    group: int = 0
    targets: Sequence[int] = field(default=(0, 1, 2))
    """The numbers of its descriptors."""


def start(command: Command, *, output: Path, mark: Path) -> int:
    """Start a process as the leader of its own session; return its id.

    Args:
        command: The Python command.
        output: A file for all output of the process.
        mark: A file that the process and all its forked children keep open: see `marked`.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    started: queue.Queue[int] = queue.Queue()
    # In a thread with an empty stack: code that inspects the stack there finds no test.
    _thread.start_new_thread(exec, (_OUTERMOST, _names(functools.partial(_first, started, command, output, mark))))
    return started.get()


class Popen:
    """The equivalent of `subprocess.Popen` for a process that `start` has forked.

    Args:
        command: As for `start`.
        output: As for `start`.
        mark: As for `start`.
    """

    def __init__(self, command: Command, *, output: Path, mark: Path) -> None:
        self.pid = start(command, output=output, mark=mark)
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
        command: As for `start`.
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


def _names(prepare: Callable[[], Any]) -> dict[str, Any]:
    return {"__name__": "runpy", "prepare": prepare, "end": functools.partial(_end, os.getpid())}


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


def _first(started: queue.Queue[int], command: Command, output: Path, mark: Path) -> Any:
    """Fork the process that a test starts; return the call for that process, and a call without effect in this one."""
    opened = [os.open(os.devnull, os.O_RDONLY), os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)]
    kept = _place([os.open(mark, os.O_RDONLY | os.O_CREAT)], ())[0]
    process_id = os.fork()
    if process_id:
        for descriptor in (*opened, kept):
            os.close(descriptor)
        started.put(process_id)
        return (bool,)
    os.setsid()
    _place([opened[0], opened[1], opened[1]], (0, 1, 2))
    _close_all_but({0, 1, 2, kept})
    return _prepare(command, kept)


def marked(mark: Path) -> list[int]:
    """Return the processes that keep a file open."""
    found = []
    wanted = os.fsencode(mark)
    for path in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            if any(_target(each) == wanted for each in path.iterdir()):
                found.append(int(path.parent.name))
    return found


def _target(link: Path) -> bytes:
    try:
        return os.readlink(os.fsencode(link))
    except OSError:  # the process has closed the file since, which says nothing about its others
        return b""


def _place(descriptors: Sequence[int], targets: Sequence[int]) -> list[int]:
    """Move descriptors to these numbers, or to high numbers if none are given; return the numbers."""
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _HIGH) for descriptor in descriptors]
    for descriptor in {*descriptors}:
        os.close(descriptor)
    if not targets:
        return copies
    for copy, target in zip(copies, targets, strict=True):
        os.dup2(copy, target)
        os.close(copy)
    return list(targets)


def _prepare(command: Command, mark: int) -> Any:
    """Turn this process into a new Python process; return the function to call in it."""
    while True:
        _forget(command)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        if os.fork():
            theirs.close()
            _Spare(_high(ours)).stand_in()
            return _what(command.words[1:])
        ours.close()
        command = _wait_for_command(_high(theirs), parent, mark)  # returns in a process that has to run it


def _high(connection: socket.socket) -> Any:
    """Return a connection under a number that the script does not use."""
    number = fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    connection.close()
    _KEPT.append(socket.socket(fileno=number))
    return _KEPT[-1]


def _forget(command: Command) -> None:
    """Make this process look as if it had just been started."""
    gc.freeze()  # a finalizer may wait for a thread that was not forked
    atexit._clear()
    warnings.resetwarnings()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL if signum != signal.SIGINT else signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.environ.clear()
    os.environ.update(command.environment)
    os.chdir(command.directory)
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
    if threads := command.environment.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    random.seed()
    torch.manual_seed(secrets.randbits(63))
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(secrets.randbits(31))


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
    if isinstance(error, SystemExit):
        return _exit_code(error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    sys.excepthook(type(error), error, error.__traceback__)
    return 1


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _what(words: Sequence[str]) -> tuple[Any, ...]:
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


class _Spare:
    """The spare process that forks the children of this process.

    Args:
        connection: The connection to the spare process.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._session = os.getsid(0)
        self._parent = os.getpid()
        self._lock = threading.Lock()

    def stand_in(self) -> None:
        """Make `subprocess`, `multiprocessing`, and loky start Python through the spare process."""
        _posixsubprocess.fork_exec = subprocess._fork_exec = self._fork_exec  # type: ignore[attr-defined]

    def _fork_exec(self, *arguments: Any) -> int:
        """Stand in for `_posixsubprocess.fork_exec`."""
        words = [os.fsdecode(word) for word in arguments[0]]
        if not self._can_fork(words, arguments):
            return _FORK_EXEC(*arguments)
        keep, directory, variables = arguments[3:6]
        pairs = dict(os.environb if variables is None else (each.split(b"=", 1) for each in variables))
        ends = (arguments[6], arguments[9], arguments[11])  # the ends of its pipes, or -1
        standard = [given if given >= 0 else number for number, given in enumerate(ends)]
        others = [number for number in keep if number > 2 and number != arguments[13]]
        group = arguments[16] if sys.version_info >= (3, 11) and arguments[16] >= 0 else os.getpgrp()
        command = Command(
            words=words,
            directory=os.path.join(os.getcwd(), os.fsdecode(directory or ".")),
            environment={os.fsdecode(name): os.fsdecode(value) for name, value in pairs.items()},
            has_own_session=bool(arguments[15]),
            group=group,
            targets=[0, 1, 2, *others],
        )
        try:
            with self._lock:
                return self._ask(command, [*standard, *others])
        except OSError:  # it was killed, with its whole group or with all children of this process
            return _FORK_EXEC(*arguments)

    def _can_fork(self, words: list[str], arguments: tuple[Any, ...]) -> bool:
        """Return whether the command is Python, started in a way that a fork can replace."""
        executable = [os.fsdecode(each) for each in arguments[1]] == [sys.executable]
        preexec = arguments[-2 if sys.version_info >= (3, 11) and sys.version_info < (3, 14) else -1]
        what = [word for word in words[1:] if word not in _NO_MATTER][:1]
        where = os.path.join(os.getcwd(), os.fsdecode(arguments[4] or "."))
        is_known = bool(what) and (what[0] in ("-m", "-c") or os.path.isfile(os.path.join(where, what[0])))
        is_here = os.getpid() == self._parent and os.getsid(0) == self._session
        return executable and bool(arguments[2]) and preexec is None and is_known and is_here

    def _ask(self, command: Command, descriptors: list[int]) -> int:
        _LIBC.prctl(_ADOPTS, 1, 0, 0, 0)
        try:
            content = pickle.dumps(command)
            self._connection.send(str(len(content)).encode())
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            self._connection.sendmsg([b"descriptors"], ancillary)
            for begin in range(0, len(content), 1 << 15):
                self._connection.send(content[begin : begin + (1 << 15)])
            answer = self._connection.recv(100)
            if not answer:
                raise BrokenPipeError("The process that forks is gone.")
            return int(answer)
        finally:
            _LIBC.prctl(_ADOPTS, 0, 0, 0, 0)


def _wait_for_command(connection: socket.socket, parent: int, mark: int) -> Command:
    """Fork a process for each command, as a child of the process that sends it, until that process is gone.

    Returns:
        The command, in each process that was forked for one.
    """
    _LIBC.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    os.setpgid(0, 0)  # signals to the script's group are not for this process
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    _close_all_but({0, 1, 2, connection.fileno(), mark})
    while os.getppid() == parent and (length := connection.recv(100)):
        _, ancillary, *_ = connection.recvmsg(100, socket.CMSG_SPACE(4 * 200))
        descriptors = array.array("i")
        for _, _, data in ancillary:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        content = b""
        while len(content) < int(length):
            content += connection.recv(1 << 16)
        process_id = _fork_for_parent()
        if process_id == 0:
            command: Command = pickle.loads(content)
            _become(command, list(descriptors), mark)
            return command
        connection.send(str(process_id).encode())
        for descriptor in descriptors:
            os.close(descriptor)
    os._exit(0)


def _fork_for_parent() -> int:
    """Fork a process as a child of this process's parent. The parent adopts it when the process between them ends."""
    read, write = os.pipe()
    between = os.fork()
    if between == 0:
        process_id = os.fork()
        if process_id == 0:
            return 0
        os.write(write, str(process_id).encode())
        os._exit(0)
    os.close(write)
    process_id = int(os.read(read, 100))
    os.close(read)
    os.waitpid(between, 0)
    return process_id


def _become(command: Command, descriptors: list[int], mark: int) -> None:
    """Take the session or group and the descriptors that a command requires."""
    if command.has_own_session:
        os.setsid()
    else:
        os.setpgid(0, command.group)
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _HIGH) for descriptor in descriptors]
    _close_all_but({mark, *copies})
    for copy, target in zip(copies, command.targets, strict=True):
        os.dup2(copy, target)
        os.close(copy)


def _close_all_but(kept: set[int]) -> None:
    for number in sorted(int(name) for name in os.listdir("/proc/self/fd")):
        if number not in kept:
            with contextlib.suppress(OSError):
                os.close(number)

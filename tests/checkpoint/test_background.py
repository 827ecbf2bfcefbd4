"""Background jobs run one at a time, keep their errors, and do not exist in a process that is forked during one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from lightning_faulttolerant.checkpoint.saving import BackgroundWriter


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """An event that a job waits for; it is set at the end of the test at the latest."""
    event = threading.Event()
    yield event
    event.set()


def test_job_runs_in_background(gate: threading.Event) -> None:
    """`start` returns before the job is done, and `wait` afterwards; the thread is gone then."""
    writer = BackgroundWriter("writer of the test")
    done = []
    writer.start(lambda: (gate.wait(), done.append(threading.current_thread())))
    assert writer.is_busy
    assert not done
    gate.set()
    writer.wait()
    assert not writer.is_busy
    [thread] = done
    assert thread.name == "writer of the test"
    thread.join(5)
    assert not thread.is_alive()


def test_one_job_at_a_time(gate: threading.Event) -> None:
    """A second job is refused while the first is under way, and begins after it."""
    writer = BackgroundWriter("autosave")
    writer.start(gate.wait)
    with pytest.raises(RuntimeError, match="already has a job"):
        writer.start(gate.wait)
    gate.set()
    writer.wait()
    writer.start(gate.wait)
    writer.wait()


@pytest.mark.parametrize("is_begun", [False, True])
def test_thread_that_does_not_start_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, is_begun: bool) -> None:
    """If its thread can't start, or its start is interrupted, the job is done or given up, once."""
    done = []
    start = threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        if is_begun:
            start(thread)
            thread.join()
        raise RuntimeError("can't start new thread")

    writer = BackgroundWriter("autosave")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            writer.start(lambda: done.append(1))
    assert not writer.is_busy
    writer.wait()
    assert done == [1] * is_begun
    writer.start(lambda: done.append(2))
    writer.wait()
    assert done[-1] == 2


def test_error_is_given_once_as_it_was() -> None:
    """The same exception comes back, with the place where it was raised, and is then forgotten."""
    error = OSError(28, "No space left on device")

    def fails() -> None:
        raise error

    writer = BackgroundWriter("autosave")
    writer.start(fails)
    writer.wait()
    taken = writer.take_error()
    assert taken is error
    assert taken.__traceback__ is not None
    assert taken.__traceback__.tb_next is not None
    assert taken.__traceback__.tb_next.tb_frame.f_code.co_name == "fails"
    assert writer.take_error() is None


def test_what_was_written_is_let_go() -> None:
    """Nothing keeps the copy of a checkpoint alive once it is written."""

    class Copy:
        gone = False

        def write(self) -> None:
            pass

        def __del__(self) -> None:
            Copy.gone = True

    writer = BackgroundWriter("autosave")
    writer.start(Copy().write)
    writer.wait()
    deadline = time.monotonic() + 5
    while not Copy.gone and time.monotonic() < deadline:
        time.sleep(0.001)
    assert Copy.gone


def test_forked_process_has_no_writer(gate: threading.Event) -> None:
    """A child that is forked during a job neither waits for it nor sees it as under way, and can begin its own."""
    writer = BackgroundWriter("autosave")
    writer.start(gate.wait)
    process_id = os.fork()
    if process_id == 0:
        code = 1
        try:
            signal.alarm(20)
            assert not writer.is_busy
            writer.wait()
            done: list[int] = []
            writer.start(lambda: done.append(1))
            writer.wait()
            code = 0 if done else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(process_id, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert writer.is_busy


def test_signal_handler_breaks_the_wait_and_not_the_job(gate: threading.Event) -> None:
    """A handler that raises, as at a second Ctrl-C, is not held up by a disk that hangs."""

    class Interrupted(Exception):  # noqa: N818 - it is not an error
        pass

    def handler(*_: object) -> None:
        raise Interrupted

    writer = BackgroundWriter("autosave")
    writer.start(gate.wait)

    def wait() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        writer.wait()

    previous = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(Interrupted):
            wait()
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert writer.is_busy


def test_interpreter_waits_for_a_job() -> None:
    """A script that ends without waiting leaves no half-written file."""
    script = (
        "import time\n"
        "from lightning_faulttolerant.checkpoint.saving import BackgroundWriter\n"
        "BackgroundWriter('autosave').start(lambda: (time.sleep(0.3), print('written')))\n"
        "print('ended')\n"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.split() == ["ended", "written"]

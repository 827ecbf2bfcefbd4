"""An asynchronous save: a staged copy is the checkpoint of its instant, and one job at a time writes it."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from lightning_faulttolerant.checkpoint.saving import BackgroundWriter, Staging
from lightning_faulttolerant.processes import call_at_end
from lightning_faulttolerant.state.rng import rng_state
from tests.processes import in_child


class Holder:
    """An object with a tensor."""

    def __init__(self, tensor):
        self.tensor = tensor


def saved(checkpoint, directory):
    """Return the bytes of a checkpoint's file; the file's name is part of them."""
    directory.mkdir(exist_ok=True)
    torch.save(checkpoint, directory / "a.ckpt")
    return (directory / "a.ckpt").read_bytes()


def trained():
    """Return a model with tied weights, and a checkpoint of it and its optimizer with something of every kind."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False))
    module[2].weight = module[0].weight
    optimizer = torch.optim.Adam(module.parameters(), amsgrad=True)
    module(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    base = torch.arange(24.0)
    loops = {"batches": [1, 2, (3, [4])], "counts": Counter("aab"), "none": None}
    return {
        "state_dict": module.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "views": [base[2:8], base.reshape(4, 6).t(), base[::3], base.reshape(2, 3, 4)[:, 1]],
        "kinds": [torch.tensor(3), torch.empty(0), torch.zeros(2, 0), torch.ones(2, dtype=torch.bfloat16), base > 3],
        "complex": torch.tensor([1 + 2j]),
        "sparse": torch.eye(3).to_sparse(),
        "parameter": nn.Parameter(torch.ones(2), requires_grad=False),
        "with_grad": torch.ones(2, requires_grad=True),
        "not a leaf": torch.ones(2, requires_grad=True) * 2,
        "loops": loops,
        "the same": loops["batches"],
    }


@pytest.mark.parametrize("is_reserved", [False, True])
def test_file_of_a_copy_is_that_of_the_original(tmp_path, is_reserved):
    """Values, views, sharing, attributes: torch.save writes the same file for the copy, whatever training changes."""
    checkpoint, staging = trained(), Staging()
    assert checkpoint["state_dict"]._metadata
    before = saved(checkpoint, tmp_path / "before")
    if is_reserved:
        staging.reserve(checkpoint)()
    for _ in range(2):
        assert saved(staging.copy(checkpoint), tmp_path / "copy") == before
    staging.clear()
    copy = staging.copy(checkpoint)
    with torch.no_grad():
        views = [*checkpoint["views"], checkpoint["kinds"][0], checkpoint["parameter"], checkpoint["with_grad"]]
        states = [value for state in checkpoint["optimizer_states"][0]["state"].values() for value in state.values()]
        for tensor in (*checkpoint["state_dict"].values(), *views, *states):
            tensor.add_(1)
    checkpoint["loops"]["batches"][2][1].append(5)
    checkpoint["loops"]["counts"]["a"] += 1
    checkpoint["state_dict"]._metadata[""]["version"] = 9
    checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] = 0.5
    assert saved(copy, tmp_path / "after") == before
    assert saved(checkpoint, tmp_path / "changed") != before


@pytest.mark.filterwarnings("ignore:.*(beta state|prototype stage)")
def test_layouts_that_deepcopy_does_not_know_are_copied():
    """Compressed sparse, nested, conjugated and negated tensors keep their values, and their originals."""
    compressed, numbers = torch.eye(3).to_sparse_csr(), torch.tensor([1 + 2j])
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    kinds = {"numbers": numbers, "conjugated": numbers.conj(), "negative": numbers.conj().imag}
    copied = Staging().copy({"compressed": compressed, "nested": nested, **kinds})
    for changed in (compressed.values(), nested):
        changed.add_(1)
    assert copied["compressed"].layout is torch.sparse_csr
    assert torch.equal(copied["compressed"].to_dense(), torch.eye(3))
    assert [part.tolist() for part in copied["nested"].unbind()] == [[1, 1], [1, 1, 1]]
    assert [copied[name].tolist() for name in kinds] == [[1 + 2j], [1 - 2j], [-2]]


def test_memory_is_shared_as_it_was_and_used_again():
    """Tied weights and views share in the copy, even within other objects; the next copy uses the same memory."""
    weight, staging = torch.arange(6.0), Staging()
    copy = staging.copy({"weight": weight, "tied": weight, "view": weight[2:4], "held": Holder(weight[1:])})
    assert copy["tied"] is copy["weight"]
    copy["weight"][3] = -1
    assert (copy["view"].tolist(), copy["held"].tensor.tolist()) == ([2, -1], [1, 2, -1, 4, 5])
    assert weight.tolist() == list(range(6))
    tensors, staging = [torch.zeros(1000), torch.zeros(1000), torch.zeros(50)], Staging()
    first, second = ({tensor.data_ptr() for tensor in staging.copy(tensors)} for _ in range(2))
    assert first == second
    assert len(first) == 3
    for holds in ([torch.ones(1)], {0: torch.ones(1)}):
        holds.append(holds) if isinstance(holds, list) else holds.update({1: holds})
        copied = staging.copy({"it": holds})["it"]
        assert copied[1] is copied is not holds


def test_copying_draws_no_random_number_and_leaves_torch_as_it_is():
    """Neither the generators nor torch's settings change, and the copy is in main memory, whatever the device is."""
    checkpoint = trained()
    torch.set_default_dtype(torch.float64)
    try:
        before = (rng_state(), random.getstate(), torch.get_num_threads(), torch.is_grad_enabled())
        with torch.device("meta"):
            copy = Staging().copy(OrderedDict(checkpoint, weight=torch.ones(3, device="cpu")))
        assert (rng_state(), random.getstate(), torch.get_num_threads(), torch.is_grad_enabled()) == before
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert copy["weight"].tolist() == [1, 1, 1]


@pytest.fixture
def gate():
    """An event that a job waits for; it is set at the end of the test at the latest."""
    event = threading.Event()
    yield event
    event.set()


def test_jobs_run_in_background_one_at_a_time(gate):
    """`start` returns before the job is done, a second one is refused until then, and `wait` returns afterwards."""
    writer, done = BackgroundWriter("writer of the test"), []
    writer.start(lambda: (gate.wait(), done.append(threading.current_thread())))
    assert writer.is_busy
    assert not done
    with pytest.raises(RuntimeError, match="already has a job"):
        writer.start(gate.wait)
    gate.set()
    writer.wait()
    assert not writer.is_busy
    assert [thread.name for thread in done] == ["writer of the test"]
    done[0].join()
    writer.start(gate.wait)
    writer.wait()


@pytest.mark.parametrize("is_begun", [False, True])
def test_thread_that_does_not_start_is_not_waited_for(monkeypatch, is_begun):
    """If its thread can't start, or its start is interrupted, the job is done or given up, once."""
    writer, done, start = BackgroundWriter("autosave"), [], threading.Thread.start

    def fails(thread):
        if is_begun:
            start(thread)
            thread.join()
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            writer.start(lambda: done.append(1))
    assert not writer.is_busy
    writer.start(lambda: done.append(2))
    writer.wait()
    assert done == [1] * is_begun + [2]


class Copy:
    """A copy that notes that it is gone."""

    gone = threading.Event()

    def fail(self) -> None:
        """Fail in the background."""
        raise OSError(28, "No space left on device")

    def __del__(self) -> None:
        self.gone.set()


def test_error_is_given_once_and_what_was_written_is_let_go():
    """The same exception comes back, with its place, and is then forgotten, as is the copy of the checkpoint."""
    writer = BackgroundWriter("autosave")
    writer.start(Copy().fail)
    writer.wait()
    taken: Any = writer.take_error()
    assert isinstance(taken, OSError)
    assert taken.__traceback__.tb_next.tb_frame.f_code.co_name == "fail"
    assert writer.take_error() is None
    del taken
    Copy.gone.wait()


def test_forked_process_has_no_writer(gate):
    """A child that is forked during a job neither waits for it nor sees it as under way, and can begin its own."""
    writer, done = BackgroundWriter("autosave"), []
    writer.start(gate.wait)

    def main():
        assert not writer.is_busy
        writer.wait()
        writer.start(lambda: done.append(1))
        writer.wait()
        assert done

    assert in_child(main) == 0
    assert writer.is_busy


def test_signal_handler_breaks_the_wait_and_not_the_job(gate):
    """A handler that raises, as at a second Ctrl-C, is not held up by a disk that hangs."""

    def handler(*_):
        raise InterruptedError

    writer = BackgroundWriter("autosave")
    writer.start(gate.wait)
    previous = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(InterruptedError):
            signal.setitimer(signal.ITIMER_REAL, 0.05), writer.wait()
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert writer.is_busy


SCRIPT = """
import time
from lightning_faulttolerant.checkpoint.saving import BackgroundWriter
BackgroundWriter('autosave').start(lambda: (time.sleep(0.3), print('written', flush=True)))
print('ended', flush=True)
"""


@pytest.mark.slow
def test_interpreter_waits_for_a_job():
    """A script that ends without waiting leaves no half-written file."""
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["ended", "written"]


@pytest.mark.parametrize("is_remote", [False, True])
def test_process_of_multiprocessing_calls_what_is_to_be_called_at_its_end(is_remote):
    """Such a process calls no functions of atexit, but it calls ours, and waits for its job."""
    reader, output = os.pipe()

    def main():
        call_at_end(functools.partial(os.write, output, b"ended "), is_remote=is_remote)
        BackgroundWriter("autosave").start(lambda: (threading.Event().wait(0.1), os.write(output, b"written ")))

    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    process.join()
    os.close(output)
    with open(reader, "rb") as answers:
        assert sorted(answers.read().split()) == [b"ended", b"written"]

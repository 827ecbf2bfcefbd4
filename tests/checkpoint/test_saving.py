"""An asynchronous save: a staged copy is the checkpoint of its instant, and one job at a time writes it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_faulttolerant.checkpoint.saving import BackgroundWriter, Staging
from lightning_faulttolerant.state.rng import rng_state
from tests.processes import in_child


def saved(checkpoint: Any, directory: Path) -> bytes:
    """Return the bytes of a checkpoint's file; the file's name is part of them."""
    directory.mkdir(exist_ok=True)
    torch.save(checkpoint, directory / "a.ckpt")
    return (directory / "a.ckpt").read_bytes()


def trained() -> tuple[nn.Module, dict[str, Any]]:
    """Return a model with tied weights, and a checkpoint of it and its optimizer with something of every kind."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False))
    module[2].weight = module[0].weight
    optimizer = torch.optim.Adam(module.parameters(), amsgrad=True)
    module(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    base = torch.arange(24.0)
    loops = {"batches": [1, 2, (3, [4])], "counts": Counter("aab"), "none": None}
    checkpoint = {
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
    return module, checkpoint


@pytest.mark.parametrize("is_reserved", [False, True])
def test_file_of_a_copy_is_that_of_the_original(tmp_path: Path, is_reserved: bool) -> None:
    """Values, views, sharing, attributes: torch.save writes the same file for the copy as for the original."""
    _, checkpoint = trained()
    assert checkpoint["state_dict"]._metadata
    staging = Staging()
    if is_reserved:
        staging.reserve(checkpoint)()
    for _ in range(2):
        assert saved(staging.copy(checkpoint), tmp_path / "copy") == saved(checkpoint, tmp_path / "original")
    staging.clear()
    assert saved(staging.copy(checkpoint), tmp_path / "copy") == saved(checkpoint, tmp_path / "original")


def test_nothing_that_training_changes_reaches_the_copy(tmp_path: Path) -> None:
    """Tensors, buffers, lists and dicts keep changing; the copy stays as it was."""
    module, checkpoint = trained()
    before = saved(checkpoint, tmp_path / "before")
    copy = Staging().copy(checkpoint)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.add_(1)
        for view in (*checkpoint["views"], *checkpoint["kinds"][:1], checkpoint["parameter"], checkpoint["with_grad"]):
            view.add_(1)
        for state in checkpoint["optimizer_states"][0]["state"].values():
            for value in state.values():
                value.add_(1)
    checkpoint["loops"]["batches"][2][1].append(5)
    checkpoint["loops"]["counts"]["a"] += 1
    checkpoint["state_dict"]._metadata[""]["version"] = 9
    checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] = 0.5
    assert saved(copy, tmp_path / "after") == before
    assert saved(checkpoint, tmp_path / "changed") != before


@pytest.mark.filterwarnings("ignore:.*(beta state|prototype stage)")
def test_layouts_that_deepcopy_does_not_know_are_copied() -> None:
    """Compressed sparse, nested, conjugated and negated tensors keep their values, and their originals."""
    compressed = torch.eye(3).to_sparse_csr()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    numbers = torch.tensor([1 + 2j])
    conjugated = {"conjugated": numbers.conj(), "negative": numbers.conj().imag}
    copied = Staging().copy({"compressed": compressed, "nested": nested, "numbers": numbers, **conjugated})
    for changed in (compressed.values(), nested):
        changed.add_(1)
    assert copied["compressed"].layout is torch.sparse_csr
    assert torch.equal(copied["compressed"].to_dense(), torch.eye(3))
    assert [part.tolist() for part in copied["nested"].unbind()] == [[1, 1], [1, 1, 1]]
    found = [copied[name].tolist() for name in ("numbers", "conjugated", "negative")]
    assert found == [[1 + 2j], [1 - 2j], [-2]]


class Holder:
    """An object with a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_shared_storages_are_copied_once() -> None:
    """Tied weights and views of one tensor still share their memory in the copy, even within other objects."""
    weight = torch.arange(6.0)
    copy = Staging().copy({"weight": weight, "tied": weight, "view": weight[2:4], "held": Holder(weight[1:])})
    assert copy["tied"] is copy["weight"]
    copy["weight"][3] = -1
    assert copy["view"].tolist() == [2, -1]
    assert copy["held"].tensor.tolist() == [1, 2, -1, 4, 5]
    assert weight.tolist() == list(range(6))


def test_memory_is_used_again() -> None:
    """The next copy uses the memory of the one before."""
    staging = Staging()
    tensors = {"a": torch.zeros(1000), "b": torch.zeros(1000), "c": torch.zeros(50)}
    places = [
        sorted(tensor.data_ptr() for tensor in copy.values()) for copy in (staging.copy(tensors), staging.copy(tensors))
    ]
    assert places[0] == places[1]
    assert len(set(places[0])) == 3


@pytest.mark.parametrize("kind", [list, dict])
def test_container_that_holds_itself(kind: type) -> None:
    """It is copied as it is, without an endless loop."""
    holds: Any = [torch.ones(1)] if kind is list else {"tensor": torch.ones(1)}
    holds.append(holds) if kind is list else holds.update(itself=holds)
    copy = Staging().copy({"it": holds})["it"]
    assert copy is not holds
    assert (copy[1] if kind is list else copy["itself"]) is copy


def test_copying_draws_no_random_number_and_leaves_torch_as_it_is() -> None:
    """Neither the generators nor torch's settings change, and the copy is in main memory, whatever the device is."""
    _, checkpoint = trained()
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
def gate() -> Iterator[threading.Event]:
    """An event that a job waits for; it is set at the end of the test at the latest."""
    event = threading.Event()
    yield event
    event.set()


def test_jobs_run_in_background_one_at_a_time(gate: threading.Event) -> None:
    """`start` returns before the job is done, a second one is refused until then, and `wait` returns afterwards."""
    writer = BackgroundWriter("writer of the test")
    done: list[threading.Thread] = []
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


class Copy:
    """A copy that notes that it is gone."""

    gone = threading.Event()

    def fail(self) -> None:
        raise OSError(28, "No space left on device")

    def __del__(self) -> None:
        self.gone.set()


def test_error_is_given_once_and_what_was_written_is_let_go() -> None:
    """The same exception comes back, with its place, and is then forgotten, as is the copy of the checkpoint."""
    writer = BackgroundWriter("autosave")
    writer.start(Copy().fail)
    writer.wait()
    taken = writer.take_error()
    assert isinstance(taken, OSError)
    assert taken.__traceback__ is not None
    assert taken.__traceback__.tb_next is not None
    assert taken.__traceback__.tb_next.tb_frame.f_code.co_name == "fail"
    assert writer.take_error() is None
    del taken
    Copy.gone.wait()


def test_forked_process_has_no_writer(gate: threading.Event) -> None:
    """A child that is forked during a job neither waits for it nor sees it as under way, and can begin its own."""
    writer = BackgroundWriter("autosave")
    writer.start(gate.wait)

    def main() -> None:
        assert not writer.is_busy
        writer.wait()
        done: list[int] = []
        writer.start(lambda: done.append(1))
        writer.wait()
        assert done

    assert in_child(main) == 0
    assert writer.is_busy


def test_signal_handler_breaks_the_wait_and_not_the_job(gate: threading.Event) -> None:
    """A handler that raises, as at a second Ctrl-C, is not held up by a disk that hangs."""

    def handler(*_: object) -> None:
        raise InterruptedError

    def wait() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        writer.wait()

    writer = BackgroundWriter("autosave")
    writer.start(gate.wait)
    previous = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(InterruptedError):
            wait()
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert writer.is_busy


@pytest.mark.parametrize("script", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_interpreter_waits_for_a_job(script: bool) -> None:
    """A script that ends without waiting leaves no half-written file."""
    code = (
        "import time\n"
        "from lightning_faulttolerant.checkpoint.saving import BackgroundWriter\n"
        "BackgroundWriter('autosave').start(lambda: (time.sleep(0.3), print('written', flush=True)))\n"
        "print('ended', flush=True)\n"
    )
    if script:
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert found.stdout.split() == ["ended", "written"]
        return
    reader, output = os.pipe()

    def main() -> None:
        BackgroundWriter("autosave").start(lambda: (time.sleep(0.1), os.write(output, b"written")))
        threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does at its end

    assert in_child(main) == 0
    assert os.read(reader, 100) == b"written"
    os.close(reader)
    os.close(output)

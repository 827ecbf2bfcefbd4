"""An asynchronous save: a staged copy is the checkpoint of its instant, and one job at a time writes it."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch
from torch import nn

from lightning_faulttolerant.checkpoint.saving import BackgroundWriter, Staging
from tests.processes import in_child


class Holder:
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


def test_file_of_a_copy_is_that_of_the_original(tmp_path):
    """Values, views, sharing, attributes: torch.save writes the same file for the copy, whatever training changes."""
    checkpoint, staging = trained(), Staging()
    assert checkpoint["state_dict"]._metadata
    before = saved(checkpoint, tmp_path / "before")
    staging.reserve(checkpoint)()
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
    ring = [torch.ones(1)]
    ring.append(ring)
    copied = staging.copy({"it": ring})["it"]
    assert copied[1] is copied is not ring


@pytest.fixture
def gate():
    """An event that a job waits for; it is set at the end of the test at the latest."""
    event = threading.Event()
    yield event
    event.set()


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

"""A staged copy is the checkpoint of its instant, with the same bytes in its file, in memory that is reused."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_faulttolerant.checkpoint import saving
from lightning_faulttolerant.checkpoint.saving import Staging
from lightning_faulttolerant.state.rng import rng_state


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


def test_file_of_a_copy_is_that_of_the_original(tmp_path: Path) -> None:
    """Values, views, sharing, attributes: torch.save writes the same file for the copy as for the original."""
    _, checkpoint = trained()
    assert checkpoint["state_dict"]._metadata
    staging = Staging()
    for _ in range(2):
        assert saved(staging.copy(checkpoint), tmp_path / "copy") == saved(checkpoint, tmp_path / "original")


@pytest.mark.filterwarnings("ignore:.*(beta state|prototype stage)")
def test_layouts_that_deepcopy_does_not_know_are_copied() -> None:
    """Compressed sparse and nested tensors, which torch.save can write, are copied too."""
    compressed = torch.eye(3).to_sparse_csr()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    copied = Staging().copy({"compressed": compressed, "nested": nested})
    compressed.values().add_(1)
    nested.add_(1)
    assert copied["compressed"].layout is torch.sparse_csr
    assert torch.equal(copied["compressed"].to_dense(), torch.eye(3))
    assert [part.tolist() for part in copied["nested"].unbind()] == [[1, 1], [1, 1, 1]]


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


def test_shared_storages_are_copied_once() -> None:
    """Tied weights and views of one tensor still share their memory in the copy, even within other objects."""

    class Holder:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    weight = torch.arange(6.0)
    copy = Staging().copy({"weight": weight, "tied": weight, "view": weight[2:4], "held": Holder(weight[1:])})
    assert copy["tied"] is copy["weight"]
    copy["weight"][3] = -1
    assert copy["view"].tolist() == [2, -1]
    assert copy["held"].tensor.tolist() == [1, 2, -1, 4, 5]
    assert weight.tolist() == list(range(6))


def pointers(checkpoint: Any) -> list[int]:
    """Return the memory addresses of the tensors of a flat dict."""
    return [tensor.data_ptr() for tensor in checkpoint.values()]


def test_memory_is_used_again() -> None:
    """The next copy uses the memory of the one before; memory that is no longer needed is freed."""
    staging = Staging()
    tensors = {"a": torch.zeros(1000), "b": torch.zeros(1000), "c": torch.zeros(50)}
    first = staging.copy(tensors)
    places = pointers(first)
    second = staging.copy(tensors)
    assert sorted(pointers(second)) == sorted(places)
    assert len(set(places)) == 3
    staging.copy({"a": tensors["a"]})
    assert sum(len(memory) for memory in staging._free.values()) == 1
    staging.clear()
    assert not staging._free


def test_reserved_memory_is_what_the_first_copy_takes() -> None:
    """The memory that `reserve` has allocated is enough, and all of it is used."""
    _, checkpoint = trained()
    staging = Staging()
    staging.reserve(checkpoint)()
    reserved = sorted(memory.untyped_storage().data_ptr() for free in staging._free.values() for memory in free)
    copy = staging.copy(checkpoint)
    taken = [memory.untyped_storage().data_ptr() for free in staging._free.values() for memory in free]
    assert sorted(taken) == reserved
    assert copy["views"][0].untyped_storage().data_ptr() in reserved


def test_conjugated_view_keeps_its_value() -> None:
    """Torch's own copy resolves it: the values are right, and the tensor behind the view is unchanged."""
    numbers = torch.tensor([1 + 2j])
    copy = Staging().copy({"numbers": numbers, "conjugated": numbers.conj(), "negative": numbers.conj().imag})
    assert copy["numbers"].tolist() == [1 + 2j]
    assert copy["conjugated"].tolist() == [1 - 2j]
    assert copy["negative"].tolist() == [-2]


@pytest.mark.parametrize("kind", [list, dict])
def test_container_that_holds_itself(kind: type) -> None:
    """It is copied as it is, without an endless loop."""
    holds: Any = [torch.ones(1)] if kind is list else {"tensor": torch.ones(1)}
    holds.append(holds) if kind is list else holds.update(itself=holds)
    copy = Staging().copy({"it": holds})["it"]
    assert copy is not holds
    assert (copy[1] if kind is list else copy["itself"]) is copy


def test_copying_draws_no_random_number_and_leaves_torch_as_it_is() -> None:
    """Neither the generators nor torch's global settings change."""
    _, checkpoint = trained()
    torch.set_default_dtype(torch.float64)
    try:
        before = (rng_state(), random.getstate(), torch.get_num_threads(), torch.is_grad_enabled())
        Staging().copy(checkpoint)
        assert (rng_state(), random.getstate(), torch.get_num_threads(), torch.is_grad_enabled()) == before
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_default_device_is_not_where_the_copy_goes() -> None:
    """The copy is in main memory, whatever the default device is."""
    with torch.device("meta"):
        copy = Staging().copy(OrderedDict(weight=torch.ones(3, device="cpu")))
    assert copy["weight"].tolist() == [1, 1, 1]


def test_memory_that_cannot_be_reserved_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reserving only saves time: if it fails, nothing is raised, and a copy still works."""

    def fails(layout: object) -> Tensor:
        raise RuntimeError("can't allocate memory")

    staging = Staging()
    with monkeypatch.context() as patch:
        patch.setattr(saving, "_make", fails)
        staging.reserve({"weight": torch.ones(2)})()
    assert staging.copy({"weight": torch.ones(2)})["weight"].tolist() == [1, 1]

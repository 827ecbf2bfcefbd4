"""Incremental autosaves: what is written, what is referred to, and what is left when either file is gone or damaged."""

import os
import shutil
import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_faulttolerant.checkpoint.archive import RecordWriter
from lightning_faulttolerant.checkpoint.autosave_files import AUTOSAVE_NAME, base_name, bases_in, remove_unused
from lightning_faulttolerant.checkpoint.increments import bytes_of
from lightning_faulttolerant.checkpoint.joined_file import Place, References
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.verify import load_file, verify_file, verify_path
from lightning_faulttolerant.errors import DamagedCheckpointError
from tests.faulty_files import PowerLoss
from tests.messages import error_of

NUM_VALUES = 2000


class Quantized(Tensor):
    """A tensor of a library's own class, which pickles in its own way."""

    def __reduce_ex__(self, protocol):
        return _quantized, (self.as_subclass(Tensor),)


def _quantized(values):
    return values.as_subclass(Quantized)


def frozen():
    """Return tensors of all kinds that share memory, or are parts of it."""
    whole = torch.arange(3.0 * NUM_VALUES)
    return {
        "whole": whole,
        "again": whole,
        "view": whole[NUM_VALUES : 2 * NUM_VALUES].view(20, -1).t(),
        "half": torch.linspace(-1, 1, NUM_VALUES, dtype=torch.bfloat16),
        "transposed": torch.arange(NUM_VALUES).view(50, -1).t(),
        "empty": torch.empty(0, 3),
        "nan": torch.full((NUM_VALUES,), torch.nan),
        "scalar": torch.tensor(3),
        "parameter": torch.nn.Parameter(torch.ones(NUM_VALUES), requires_grad=False),
    }


def save(series, step, state=None, *, head=None, keep=False, **more):
    """Save a checkpoint with a tensor that differs from step to step."""
    state = {"head": torch.full((NUM_VALUES,), float(step if head is None else head)), **(state or frozen())}
    content = {"state_dict": state, "global_step": step, **more}
    return series.save(content, epoch=0, batch=step, global_step=step, keep=keep)


def bases(directory):
    """Return the names of the bases in a directory."""
    return bases_in(os.listdir(directory))


def base_of(path):
    """Return the base that an autosave refers to."""
    return Path(path).with_name(base_name(AUTOSAVE_NAME.fullmatch(os.path.basename(path))["base"]))


def described(state):
    """Return what must come back of tensors: type, layout, the bytes of the memory, and who shares it."""
    places = {}
    for tensor in state.values():
        places.setdefault(tensor.untyped_storage().data_ptr() if tensor.numel() else 0, len(places))
    return {
        name: (
            *(type(tensor), tensor.dtype, tensor.shape, tensor.stride(), b"".join(bytes_of(tensor.untyped_storage()))),
            places[tensor.untyped_storage().data_ptr() if tensor.numel() else 0],
        )
        for name, tensor in state.items()
    }


@pytest.fixture
def series(tmp_path):
    """Return an incremental series."""
    return AutosaveSeries(tmp_path / "fit-1", keep_last=2, incremental=True)


@pytest.fixture
def directory(series):
    """Return the directory of the series."""
    return Path(series.directory)


def test_only_what_changed_is_written(series, directory):
    """The first autosave and the later ones load as they were saved, and contain one tensor of seven."""
    state = frozen()
    for step in range(4):
        path = save(series, step, state)
        loaded = load_file(path)
        assert loaded["global_step"] == step
        assert torch.equal(loaded["state_dict"].pop("head"), torch.full((NUM_VALUES,), float(step)))
        assert described(loaded["state_dict"]) == described(state)
        assert verify_file(path).has_checksums
        num_bytes = os.path.getsize(path)
        assert num_bytes < 4 * NUM_VALUES * (step > 0) + 4000
        assert series.num_bytes[path] == num_bytes + (os.path.getsize(base_of(path)) if step < 2 else 0)
    assert len(bases(directory)) == 2


CHANGES = {
    "NumPy": lambda tensor: tensor.detach().numpy().__setitem__(7, 1),
    "the sign of nothing": lambda tensor: tensor.data[0].fill_(-0.0),
    "the last byte": lambda tensor: tensor.data.view(torch.uint8)[-1].fill_(1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_torch_does_not_count_is_saved(series, change):
    """Each byte counts, whoever writes it, even if the values compare as equal."""
    quiet = torch.nn.Parameter(torch.zeros(NUM_VALUES), requires_grad=False)
    save(series, 0, {"quiet": quiet})
    version = quiet._version
    CHANGES[change](quiet)
    assert quiet._version == version
    loaded = load_file(save(series, 1, {"quiet": quiet}))["state_dict"]
    assert described({"quiet": loaded["quiet"]}) == described({"quiet": quiet})


@pytest.mark.parametrize("num_values", [NUM_VALUES - 1, NUM_VALUES + 1, 0])
def test_a_tensor_of_another_size_is_saved(series, num_values):
    """Also if it begins as the one before, which it replaces."""
    save(series, 0, {"cache": torch.ones(NUM_VALUES)})
    loaded = load_file(save(series, 1, {"cache": torch.ones(num_values)}))["state_dict"]["cache"]
    assert torch.equal(loaded, torch.ones(num_values))


def test_what_stops_changing_comes_into_a_new_base(series, directory):
    """A new base is written once the repeated bytes add up to it, and the old one goes with its last autosave."""
    state, sizes = {"half": frozen()["half"]}, []
    save(series, 0, state)
    [old] = bases(directory)
    for step in range(1, 12):
        path = save(series, step, state, head=min(step, 3))
        sizes.append(os.path.getsize(path))
        assert load_file(path)["state_dict"]["head"].unique().tolist() == [min(step, 3)]
    assert max(sizes[-3:]) < min(sizes[:4]) - 3 * NUM_VALUES
    assert len(bases(directory)) == 2
    assert old not in bases(directory)


def test_what_is_in_no_base(series):
    """Optimizer states change at each step; our part may contain what a trusted resume unpickles, from one file."""
    moments, part = torch.ones(50 * NUM_VALUES), torch.ones(150 * NUM_VALUES, dtype=torch.uint8)
    states = {"optimizer_states": [{"state": {0: {"exp_avg": moments}}}]}
    for step in range(3):
        path = save(series, step, lightning_faulttolerant={"pickled": part}, **(states if step == 0 else {}))
        assert os.path.getsize(path) > part.nbytes + moments.nbytes * (step == 0)
        assert step or os.path.getsize(base_of(path)) < moments.nbytes


def test_a_tensor_of_a_librarys_own_class(series):
    """It comes back in its class; it is in the base until it changes."""
    own = torch.ones(100 * NUM_VALUES).as_subclass(Quantized)
    for step in range(4):
        if step == 3:
            own.as_subclass(Tensor).data[5] = 2
        path = save(series, step, own=[own])
        assert step not in (1, 2) or os.path.getsize(path) < own.nbytes
        loaded = load_file(path, weights_only=False)["own"][0]
        assert type(loaded) is Quantized
        assert torch.equal(loaded.as_subclass(Tensor), own.as_subclass(Tensor))


@pytest.mark.parametrize("what", ["deleted", "replaced"])
def test_a_base_that_somebody_touched_is_not_referred_to_again(directory, what):
    """Each save looks at it, and writes another one."""
    series = AutosaveSeries(directory, keep_last=9, incremental=True)
    first = save(series, 0)
    base = base_of(first)
    data = base.read_bytes()
    base.unlink()
    if what == "replaced":
        base.write_bytes(b"\0" * len(data))
    for step in (1, 2):
        path = save(series, step)
        assert verify_file(path).has_checksums
        assert base_of(path) != base
    with pytest.raises(DamagedCheckpointError, match=base.name if what == "deleted" else "CRC32"):
        verify_file(first)


def test_a_copy_without_its_base_is_refused_with_its_name(series, tmp_path):
    """The error names the base, and what to do; with the base next to it or above, the copy loads."""
    path = save(series, 0)
    base, copy = base_of(path), tmp_path / "elsewhere" / "deep" / "mine.ckpt"
    base = base if base.exists() else base.with_name(bases(base.parent)[0])
    copy.parent.mkdir(parents=True)
    shutil.copy(path, copy)
    with pytest.raises(
        DamagedCheckpointError, match=rf"refers to tensors in {base.name}.*lightning-faulttolerant export"
    ):
        load_file(copy)
    for place in (copy.parent, copy.parent.parent):
        shutil.copy(base, place)
        assert load_file(copy)["global_step"] == 0
        (place / base.name).unlink()


def test_kept_and_superseded_autosaves_hold_their_base(series, directory):
    """Whatever is deleted, moved, or removed at the end, the autosaves that stay still load."""
    for step in range(4):
        save(series, step, keep=step == 0)
    [kept] = (directory / "kept").iterdir()
    assert load_file(kept)["global_step"] == 0
    series.set_aside("label")
    aside = list(directory.glob("superseded-*/autosave-*"))
    assert len(aside) == 3
    assert all(verify_path(path).has_checksums for path in aside)
    second = AutosaveSeries(directory, keep_last=1, incremental=True)
    save(second, 4)
    second.remove_all()
    [left] = directory.rglob("autosave-*")
    assert load_file(left)["global_step"] == 0
    left.unlink()
    remove_unused(series.store)
    assert bases(directory) == []


@pytest.mark.parametrize("keeps", ["synced", "names", "removals"])
def test_power_lost_at_each_step_of_removing(series, directory, tmp_path, keeps):
    """A base must not be gone while an autosave that refers to it comes back: the next start would refuse."""
    for step in (0, 1):
        save(series, step)
    shutil.copytree(directory, tmp_path / "original")
    for at in range(1, 60):
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(tmp_path / "original", directory)
        with PowerLoss(tmp_path, at=at, keeps=keeps) as loss:
            AutosaveSeries(directory).remove_all()
        AutosaveSeries(directory).load_newest()
        if not loss.has_lost:
            return
    raise AssertionError("it does not end")


BASE = "base-0a1b2c3d.tensors"
TWICE = {f"data/{n}": Place(offset=0, num_bytes=1 << 20, crc32=zlib.crc32(bytes(1 << 20))) for n in range(2)}
REFERENCES = [
    *(
        b"[]",
        b"{",
        b"[" * 200_000,
        b'{"version": 2}',
        b'{"version": 1, "base": "../%b", "records": {}}' % BASE.encode(),
    ),
    *(
        b'{"version": 1, "base": "%b", "records": {"data/0": %b}}' % (BASE.encode(), place)
        for place in (b"[0]", b"[-1, 2, 3]", b"[9223372036854775807, 2, 3]", b"[1048577, 2, 3]")
    ),
    # Many records on the same bytes, which would be read for hours, and a long text.
    *(References(base=BASE, records=TWICE).encoded() + b" " * padding for padding in (0, 1 << 26)),
]


@pytest.mark.parametrize("references", REFERENCES, ids=lambda references: references[:60].decode())
def test_references_of_another_form_are_damage(tmp_path, references):
    """A file may contain anything: a path out of the directory, places before the base, or absurd sizes are refused."""
    path = tmp_path / "inner" / "a.ckpt"
    path.parent.mkdir()
    for folder in (tmp_path, path.parent):
        (folder / BASE).write_bytes(bytes(1 << 20))
    with open(path, "wb") as file:
        writer = RecordWriter(file)
        for name, content in (("data.pkl", b"\x80\x02K\x03."), ("base.json", references)):
            writer.add(name, [memoryview(content)])
        writer.end()
    error_of(DamagedCheckpointError, lambda: verify_file(path))

"""Incremental autosaves: what is written, what is referred to, and what is left when either file is gone or damaged."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_faulttolerant.checkpoint.archive import VERSION_RECORD, RecordWriter
from lightning_faulttolerant.checkpoint.autosave_files import AUTOSAVE_NAME, base_name, bases_in, remove_unused
from lightning_faulttolerant.checkpoint.increments import bytes_of
from lightning_faulttolerant.checkpoint.joined_file import (
    Place,
    References,
    find_whole_damage,
    opened_whole,
)
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.verify import load_file, verify_file, verify_path
from lightning_faulttolerant.errors import DamagedCheckpointError, NoValidCheckpointError
from tests.faulty_files import PowerLoss

NUM_VALUES = 2000


def frozen() -> dict[str, Tensor]:
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


def checkpoint(step: int = 0, **state: Tensor) -> dict[str, Any]:
    """Return a checkpoint with a tensor that differs from step to step."""
    return {"state_dict": {"head": torch.full((NUM_VALUES,), float(step)), **state}, "global_step": step}


def save(series: AutosaveSeries, content: dict[str, Any], *, keep: bool = False) -> Path:
    """Save a checkpoint."""
    step = content["global_step"]
    return Path(series.save(content, epoch=0, batch=step, global_step=step, keep=keep))


def bases(directory: Path) -> list[str]:
    """Return the names of the bases in a directory."""
    return bases_in(os.listdir(directory))


def base_of(path: Path) -> Path:
    """Return the base that an autosave refers to."""
    match = AUTOSAVE_NAME.fullmatch(path.name)
    assert match is not None
    return path.with_name(base_name(match["base"]))


def content_of(tensor: Tensor) -> bytes:
    """Return the bytes of the memory that a tensor is in."""
    return b"".join(bytes_of(tensor.untyped_storage()))


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare tensors, bit for bit, and which of them share memory."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        own = found[name]
        assert (own.dtype, own.shape, own.stride(), type(own)) == (
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            type(tensor),
        )
        assert content_of(own) == content_of(tensor)
    places = {name: tensor.untyped_storage().data_ptr() for name, tensor in found.items() if tensor.numel()}
    assert places["whole"] == places["again"] == places["view"]
    assert len(set(places.values())) == len(places) - 2


@pytest.fixture
def series(tmp_path: Path) -> AutosaveSeries:
    """Return an incremental series."""
    return AutosaveSeries(tmp_path / "fit-1", keep_last=2, incremental=True)


def test_only_what_changed_is_written(series: AutosaveSeries) -> None:
    """The first autosave and the later ones load as they were saved, and contain one tensor of seven."""
    state = frozen()
    for step in range(4):
        path = save(series, checkpoint(step, **state))
        loaded = load_file(path)
        assert loaded["global_step"] == step
        assert torch.equal(loaded["state_dict"].pop("head"), torch.full((NUM_VALUES,), float(step)))
        assert_equal(loaded["state_dict"], state)
        assert verify_file(path).has_checksums
        num_bytes, base = os.path.getsize(path), base_of(path)
        assert num_bytes < 4 * NUM_VALUES * (step > 0) + 4000
        assert series.num_bytes[str(path)] == num_bytes + (os.path.getsize(base) if step < 2 else 0)
    assert len(bases(path.parent)) == 2


def _through_data(tensor: Tensor) -> None:
    tensor.data[7] += 1


def _through_numpy(tensor: Tensor) -> None:
    tensor.detach().numpy()[7] += 1


def _through_dlpack(tensor: Tensor) -> None:
    torch.from_dlpack(tensor.detach())[7] += 1


def _sign_of_nothing(tensor: Tensor) -> None:
    tensor.data[0] = -0.0


def _last_byte(tensor: Tensor) -> None:
    tensor.data.view(torch.uint8)[-1] = 1


@pytest.mark.parametrize("change", [_through_data, _through_numpy, _through_dlpack, _sign_of_nothing, _last_byte])
def test_a_change_that_torch_does_not_count_is_saved(series: AutosaveSeries, change: Callable[[Tensor], None]) -> None:
    """Each byte counts, whoever writes it, even if the values compare as equal."""
    quiet = torch.nn.Parameter(torch.zeros(NUM_VALUES), requires_grad=False)
    save(series, checkpoint(0, quiet=quiet))
    version = quiet._version
    change(quiet)
    if change is not _through_dlpack:
        assert quiet._version == version
    loaded = load_file(save(series, checkpoint(1, quiet=quiet)))["state_dict"]["quiet"]
    assert content_of(loaded) == content_of(quiet)


@pytest.mark.parametrize("num_values", [NUM_VALUES - 1, NUM_VALUES + 1, 300, 0])
def test_a_tensor_of_another_size_is_saved(series: AutosaveSeries, num_values: int) -> None:
    """Also if it begins as the one before, which it replaces."""
    save(series, checkpoint(0, cache=torch.ones(NUM_VALUES)))
    loaded = load_file(save(series, checkpoint(1, cache=torch.ones(num_values))))["state_dict"]["cache"]
    assert torch.equal(loaded, torch.ones(num_values))


def test_what_stops_changing_comes_into_a_new_base(series: AutosaveSeries) -> None:
    """A new base is written once the repeated bytes add up to it, and the old one goes with its last autosave."""
    state, sizes = {"half": frozen()["half"]}, []
    first = save(series, checkpoint(0, **state))
    [old] = bases(first.parent)
    for step in range(1, 12):
        content = checkpoint(min(step, 3), **state)
        path = save(series, {**content, "global_step": step})
        sizes.append(os.path.getsize(path))
        assert torch.equal(load_file(path)["state_dict"]["head"], content["state_dict"]["head"])
    assert max(sizes[-3:]) < min(sizes[:4]) - 3 * NUM_VALUES
    assert len(bases(first.parent)) == 2
    assert old not in bases(first.parent)


def test_optimizer_states_are_not_in_the_first_base(series: AutosaveSeries) -> None:
    """They change at each step, so that they would be written twice."""
    moments = torch.ones(50 * NUM_VALUES)
    path = save(series, {**checkpoint(0, **frozen()), "optimizer_states": [{"state": {0: {"exp_avg": moments}}}]})
    assert os.path.getsize(path.with_name(bases(path.parent)[0])) < moments.nbytes < os.path.getsize(path)


def test_our_part_is_never_in_a_base(series: AutosaveSeries) -> None:
    """It may contain bytes that a trusted resume unpickles: they must be in the file whose permissions were checked."""
    part = {"pickled": torch.ones(50 * NUM_VALUES, dtype=torch.uint8)}
    for step in range(9):
        path = save(series, {**checkpoint(step, **frozen()), "lightning_faulttolerant": part})
        assert os.path.getsize(path) > part["pickled"].nbytes


class Quantized(Tensor):
    """A tensor of a library's own class, which pickles in its own way."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _quantized, (self.as_subclass(Tensor),)


def _quantized(values: Tensor) -> Tensor:
    return values.as_subclass(Quantized)


def test_tensors_of_a_librarys_own_class(series: AutosaveSeries) -> None:
    """They are in the base, too, and are saved if they change."""
    own = torch.ones(50 * NUM_VALUES).as_subclass(Quantized)
    for step in range(4):
        if step == 3:
            own.as_subclass(Tensor).data[5] = 2
        path = save(series, {**checkpoint(step, **frozen()), "own": [own]})
        assert (os.path.getsize(path) > own.nbytes) == (step == 3)
        loaded = load_file(path, weights_only=False)["own"][0]
        assert type(loaded) is Quantized
        assert torch.equal(loaded.as_subclass(Tensor), own.as_subclass(Tensor))


def test_a_new_process_writes_its_own_base(series: AutosaveSeries) -> None:
    """It has no copies of what the earlier one contains; the old base goes with the last autosave that refers to it."""
    save(series, checkpoint(0, **frozen()))
    directory = Path(series.directory)
    [old] = bases(directory)
    os.utime(directory / old, (0, 0))
    later = AutosaveSeries(directory, keep_last=2, incremental=True)
    save(later, checkpoint(1, **frozen()))
    assert len(bases(directory)) == 2
    save(later, checkpoint(2, **frozen()))
    assert len(bases(directory)) == 2
    assert old not in bases(directory)


def test_a_base_of_a_killed_process_goes_after_a_minute(series: AutosaveSeries) -> None:
    """Within this time it may be that of a process that is about to write its autosave."""
    directory = Path(series.directory)
    directory.mkdir()
    orphan = directory / "base-0a1b2c3d.tensors"
    orphan.write_bytes(b"x")
    save(series, checkpoint(0, **frozen()))
    assert orphan.exists()
    os.utime(orphan, (0, 0))
    save(series, checkpoint(1, **frozen()))
    assert not orphan.exists()


@pytest.mark.parametrize("what", ["deleted", "replaced"])
def test_a_base_that_somebody_touched_is_not_referred_to_again(series: AutosaveSeries, what: str) -> None:
    """Each save looks at it, and writes another one."""
    directory = Path(series.directory)
    series = AutosaveSeries(directory, keep_last=9, incremental=True)
    first = save(series, checkpoint(0, **frozen()))
    [name] = bases(directory)
    data = (directory / name).read_bytes()
    (directory / name).unlink()
    if what == "replaced":
        (directory / name).write_bytes(b"\0" * len(data))
    for step in (1, 2):
        path = save(series, checkpoint(step, **frozen()))
        assert verify_file(path).has_checksums
        assert base_of(path).name != name
    with pytest.raises(DamagedCheckpointError, match=name if what == "deleted" else "CRC32"):
        verify_file(first)


def test_a_bad_base_costs_one_autosave(series: AutosaveSeries) -> None:
    """An autosave with a damaged or missing base counts as damaged, and the one before has another base."""
    directory = Path(series.directory)
    paths = [save(series, checkpoint(step, **frozen())) for step in range(4)]
    newest, before = base_of(paths[3]), base_of(paths[2])
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    found = AutosaveSeries(directory).load_newest()
    assert found is not None
    assert found[1]["global_step"] == 2
    assert newest.exists()  # a file that was set aside still refers to it
    before.unlink()
    with pytest.raises(NoValidCheckpointError):
        AutosaveSeries(directory).newest()


def test_a_copy_without_its_base_is_refused_with_its_name(series: AutosaveSeries, tmp_path: Path) -> None:
    """The error names the base, and what to do; with the base next to it or above, the copy loads."""
    path = save(series, checkpoint(0, **frozen()))
    base = path.with_name(bases(path.parent)[0])
    copy = tmp_path / "elsewhere" / "deep" / "mine.ckpt"
    copy.parent.mkdir(parents=True)
    shutil.copy(path, copy)
    with pytest.raises(
        DamagedCheckpointError, match=rf"refers to tensors in {base.name}.*lightning-faulttolerant export"
    ):
        load_file(copy)
    with pytest.raises(RuntimeError, match="file not found"):  # torch alone does not load it wrongly
        torch.load(copy, weights_only=True)
    for place in (copy.parent, copy.parent.parent):
        shutil.copy(base, place)
        assert load_file(copy)["global_step"] == 0
        (place / base.name).unlink()


def test_flipped_bytes_are_detected(series: AutosaveSeries) -> None:
    """A changed byte of the autosave, or one of the base that it uses, must be detected or change nothing."""
    path = save(series, {"small": torch.arange(130), "global_step": 0})
    for file in (path, path.with_name(bases(path.parent)[0])):
        sound = file.read_bytes()
        missed = []
        for position in range(0, len(sound), 3):
            damaged = bytearray(sound)
            damaged[position] ^= 1 << position // 3 % 8
            file.write_bytes(damaged)
            try:
                verify_file(path)
            except DamagedCheckpointError:
                continue
            missed.append(position)
            assert torch.equal(load_file(path)["small"], torch.arange(130))
        file.write_bytes(sound)
        assert len(missed) < len(sound) / 6


def test_kept_and_superseded_autosaves_hold_their_base(series: AutosaveSeries) -> None:
    """Whatever is deleted, moved, or removed at the end, the autosaves that stay still load."""
    directory = Path(series.directory)
    save(series, checkpoint(0, **frozen()), keep=True)
    for step in (1, 2, 3):
        save(series, checkpoint(step, **frozen()))
    [kept] = (directory / "kept").iterdir()
    assert load_file(kept)["global_step"] == 0
    series.set_aside("label")
    aside = list(directory.glob("superseded-*/autosave-*"))
    assert len(aside) == 3
    assert all(verify_path(path).has_checksums for path in aside)
    second = AutosaveSeries(directory, keep_last=1, incremental=True)
    save(second, checkpoint(4, **frozen()))
    second.remove_all()
    [left] = directory.rglob("autosave-*")
    assert "-kept" in left.name
    assert load_file(left)["global_step"] == 0
    left.unlink()
    remove_unused(series.store)
    assert bases(directory) == []


@pytest.mark.parametrize("keeps", ["synced", "names", "removals"])
def test_power_lost_at_each_step_of_removing(series: AutosaveSeries, tmp_path: Path, keeps: str) -> None:
    """A base must not be gone while an autosave that refers to it comes back: the next start would refuse."""
    for step in (0, 1):
        save(series, checkpoint(step, **frozen()))
    root, original = Path(series.directory), tmp_path / "original"
    shutil.copytree(root, original)
    for at in range(1, 60):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(original, root)
        with PowerLoss(tmp_path, at=at, keeps=keeps) as loss:
            AutosaveSeries(root).remove_all()
        AutosaveSeries(root).load_newest()
        if not loss.has_lost:
            return
    raise AssertionError("it does not end")


def test_a_url(tmp_path: Path) -> None:
    """Everything holds for a store, too."""
    url = f"memory://increments-{tmp_path.name}"
    series = AutosaveSeries(url, keep_last=2, incremental=True)
    for step in range(4):
        path = series.save(checkpoint(step, **frozen()), epoch=0, batch=step, global_step=step, keep=step == 0)
        assert load_file(path)["global_step"] == step
    names = series.store.tree()
    assert sum(name.endswith(".tensors") for name in names) == 2
    kept = next(name for name in names if name.startswith("kept/"))
    assert load_file(series.store.path(kept))["global_step"] == 0
    for base in bases_in(series.store.names()):
        series.store.delete(base)
    with pytest.raises(DamagedCheckpointError, match="refers to tensors in base-"):
        load_file(path)
    series.remove_all()


@pytest.mark.parametrize(
    "records",
    [
        b"[]",
        b"{",
        b"[" * 200_000,
        b'{"version": 2}',
        b'{"version": 1, "base": "../base-0a1b2c3d.tensors", "records": {}}',
    ]
    + [
        b'{"version": 1, "base": "base-0a1b2c3d.tensors", "records": {"data/0": %b}}' % p
        for p in (b"[0]", b"[-1, 2, 3]", b"[9223372036854775807, 2, 3]", b"[99, 2, 3]")
    ],
    ids=lambda records: records[:60].decode(),
)
def test_references_of_another_form_are_damage(tmp_path: Path, records: bytes) -> None:
    """A file may contain anything: a path out of the directory, or places before the base, are refused."""
    path = tmp_path / "inner" / "a.ckpt"
    path.parent.mkdir()
    for folder in (tmp_path, path.parent):
        (folder / "base-0a1b2c3d.tensors").write_bytes(b"x" * 100)
    _write_with_references(path, records)
    with pytest.raises(DamagedCheckpointError):
        verify_file(path)


def _write_with_references(path: Path, records: bytes) -> None:
    with open(path, "wb") as file:
        writer = RecordWriter(file)
        for name, content in (("data.pkl", b"\x80\x02K\x03."), ("base.json", records), VERSION_RECORD):
            writer.add(name, [memoryview(content)])
        writer.end()


@pytest.mark.parametrize("padding", [0, 1 << 26])
def test_references_of_absurd_size_are_damage(tmp_path: Path, padding: int) -> None:
    """Many records on the same bytes, which would be read for hours, and a long text are refused at once."""
    base = tmp_path / "base-0a1b2c3d.tensors"
    base.write_bytes(bytes(1 << 20))
    places = {
        f"data/{number}": Place(offset=0, num_bytes=1 << 20, crc32=zlib.crc32(bytes(1 << 20))) for number in range(2)
    }
    records = References(base=base.name, records=places).encoded()
    _write_with_references(tmp_path / "a.ckpt", records + b" " * padding)
    with pytest.raises(DamagedCheckpointError, match="more than" if padding else "share bytes"):
        verify_file(tmp_path / "a.ckpt")


def test_the_joined_file_is_a_plain_one(series: AutosaveSeries, tmp_path: Path) -> None:
    """Its bytes, written to a file, are a checkpoint that torch maps without this package."""
    state = frozen()
    path = save(series, checkpoint(1, **state))
    plain = tmp_path / "plain.ckpt"
    with opened_whole(path) as file:
        assert find_whole_damage(file) is None
        file.seek(0)
        plain.write_bytes(file.read())
        for begin in range(0, 5000, 700):
            file.seek(begin)
            assert file.read(333) == plain.read_bytes()[begin : begin + 333]
    loaded = torch.load(plain, weights_only=True, mmap=True)["state_dict"]
    del loaded["head"]
    assert {name: tensor.tolist() for name, tensor in loaded.items() if name != "nan"} == {
        name: tensor.tolist() for name, tensor in state.items() if name != "nan"
    }

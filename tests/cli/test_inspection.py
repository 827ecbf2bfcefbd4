from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.checkpoint.ranks import as_bytes, joined
from lightning_faulttolerant.checkpoint.schema import KEY
from lightning_faulttolerant.cli import found as finding, inspection
from lightning_faulttolerant.cli.inspection import plain
from lightning_faulttolerant.state.packing import difference, digests_of, pack_blobs
from tests.cli.checkpoints import HYPER_PARAMETERS, call, checkpoint, foreign, save
from tests.runs import Net, RaiseAt, fit_net

Capture = pytest.CaptureFixture[str]


class Configured(Net):
    """Has hyperparameters that don't load with ``weights_only=True``."""

    def __init__(self, folder: Path = Path("/data")) -> None:
        super().__init__()
        self.save_hyperparameters()


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run cut by an exception in its second epoch: an autosave, and a file of the user."""
    directory = tmp_path_factory.mktemp("run")
    callbacks = [
        FaultTolerance(directory, run_id="mine", every_n_train_steps=1, keep_last=1),
        ModelCheckpoint(dirpath=directory / "best", filename="three", every_n_train_steps=3),
        RaiseAt("on_train_epoch_end", 1),
    ]
    with pytest.raises(ZeroDivisionError):
        fit_net(callbacks, directory, module=Configured(), enable_checkpointing=True)
    return directory


def test_what_a_real_run_has_saved_is_shown(run_directory: Path, capsys: Capture) -> None:
    """For an autosave of a real run, the JSON gives all its parts, as loading would."""
    [path] = (run_directory / "mine" / "fit-1").iterdir()
    found = call(capsys, "inspect", path, "--json")
    assert (found.status, found.err) == (0, "")
    shown = json.loads(found.out)
    loaded = torch.load(path, weights_only=True)
    ours = loaded["lightning_faulttolerant"]
    mine = shown["fault_tolerance"]
    for name in ("version", "world_size", "position", "run", "origin", "surroundings", "fingerprint"):
        assert mine[name] == json.loads(json.dumps(ours[name])), name
    assert list(mine["ranks"][0]) == [name for name in ours["ranks"][0] if name != "blobs"]
    assert mine["ranks"][0]["rng"] > 10_000
    assert mine["opaque"] == {"hyper_parameters": ours["opaque"]["hyper_parameters"].numel()}
    assert shown["num_parameters"] == sum(p.numel() for p in Net().parameters())
    assert list(shown["keys"]) == list(loaded)
    assert (shown["lightning"], shown["global_step"]) == (loaded["pytorch-lightning_version"], loaded["global_step"])
    assert shown["num_bytes"] == os.path.getsize(path)


def test_a_file_of_the_user_says_in_which_hook_it_was_saved(run_directory: Path, capsys: Capture) -> None:
    """Our part of a file that ModelCheckpoint saved shows the hook, with the place in the run."""
    found = call(capsys, "inspect", run_directory / "best" / "three.ckpt")
    [line] = [line for line in found.lines if line.startswith("saved at")]
    assert "batch end: epoch 1, batch 4, step 9, in on_train_batch_end" in line


def test_the_text_says_what_the_file_holds(tmp_path: Path, capsys: Capture) -> None:
    """The text gives position, run, ranks, parts with sizes, surroundings, fingerprint, and keys."""
    path = save(tmp_path / "a.ckpt", checkpoint(step=12, epoch=1, batch=4, world_size=2, origin="/pretrained.ckpt"))
    found = call(capsys, "inspect", path)
    assert found.status == 0
    lines = [" ".join(line.split()) for line in found.lines]
    for expected in (
        "saved at boundary: epoch 1, batch 4, step 12",
        "run the-mark",
        "started from /pretrained.ckpt",
        "ranks 2",
        "parameters 36",
        f"kept as bytes hyper_parameters, {len(HYPER_PARAMETERS)} B",
        "rng 1 185 B",
        "device cpu",
        "weight [4, 8]",
        "state_dict 2 36 154 B",
    ):
        assert expected in lines, expected
    assert not any("not exact" in line for line in lines)


def test_what_can_not_be_exact_is_shown(tmp_path: Path, capsys: Capture) -> None:
    """Notes on what a resume from the file would lack are in the text and in the JSON."""
    lost = {"objects": {"lost": {"module.turns": "an iterator"}}}
    more = {"objects": {"lost": {"module.turns": "an iterator", "module.rows": "a generator"}}}
    new = {"objects": {"lost": {"module.file": "a file"}}}
    others = [difference(more, digests_of(lost)), difference(new, digests_of({}))]
    behind = ["Mine.on_train_batch_end"]
    path = save(tmp_path / "a.ckpt", checkpoint(inexact=["the hook of Other"], behind=behind, ranks=[lost, *others]))
    lines = [" ".join(line.split()) for line in call(capsys, "inspect", path).lines]
    assert "not exact the hook of Other" in lines
    assert lines.count("without module.turns: an iterator") == 1
    assert "hooks to run Mine.on_train_batch_end" in lines
    shown = json.loads(call(capsys, "inspect", path, "--json").out)["fault_tolerance"]
    assert (shown["inexact"], shown["behind"]) == (["the hook of Other"], behind)
    assert shown["lost"] == {"module.turns": "an iterator", "module.rows": "a generator", "module.file": "a file"}


def test_a_file_without_our_part_says_so_and_shows_the_rest(tmp_path: Path, capsys: Capture) -> None:
    """A checkpoint of Lightning's own is shown, with what a resume from it means."""
    path = save(tmp_path / "a.ckpt")
    found = call(capsys, "inspect", path)
    assert found.status == 0
    assert any("saved without this package" in line for line in found.lines)
    assert any(line.startswith("state_dict") for line in found.lines)
    assert json.loads(call(capsys, "inspect", path, "--json").out)["fault_tolerance"] is None


def test_each_rank_is_counted(tmp_path: Path, capsys: Capture) -> None:
    """The text sums each part over the states of the ranks, and the JSON gives each of them."""
    [rank] = checkpoint()["lightning_faulttolerant"]["ranks"]
    path = save(tmp_path / "a.ckpt", checkpoint(world_size=2, ranks=[rank, {**rank, "more": torch.zeros(10)}]))
    lines = [" ".join(line.split()) for line in call(capsys, "inspect", path).lines]
    assert "rng 2 370 B" in lines
    assert "more 1 40 B" in lines
    ranks = json.loads(call(capsys, "inspect", path, "--json").out)["fault_tolerance"]["ranks"]
    assert [sorted(state) for state in ranks] == [["flags", "metrics", "rng"], ["flags", "metrics", "more", "rng"]]


def test_states_that_are_kept_as_bytes_are_shown_like_others(tmp_path: Path, capsys: Capture) -> None:
    """The sizes and losses of ranks are those of a file that keeps the states as they are."""
    [first] = checkpoint()["lightning_faulttolerant"]["ranks"]
    more = {"objects": {"lost": {"module.rows": "a generator"}}, "tensor": torch.zeros(10)}
    packed = [first, *(pack_blobs(difference({**more, "number": n}, digests_of({}))) for n in range(2))]
    shown = []
    for name, states in (("a", {"ranks": packed}), ("b", joined([first, *map(as_bytes, packed[1:])]))):
        whole = checkpoint(world_size=3)
        whole["lightning_faulttolerant"].update(states)
        path = save(tmp_path / f"{name}.ckpt", whole)
        shown.append(json.loads(call(capsys, "inspect", path, "--json").out)["fault_tolerance"])
    assert shown[0] == shown[1]
    assert shown[1]["lost"] == {"module.rows": "a generator"}


class Striking:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.path,)


def test_code_in_a_file_is_not_run(tmp_path: Path, capsys: Capture) -> None:
    """A file with an object that would run code when loaded is shown, and runs nothing."""
    struck = tmp_path / "struck"
    path = tmp_path / "a.ckpt"
    torch.save(checkpoint(run=Striking(str(struck))), path)
    found = call(capsys, "inspect", path)
    assert found.status == 0
    assert not struck.exists()
    assert any("posix.mkdir" in line for line in found.lines)
    torch.load(path, weights_only=False)
    assert struck.exists()


def test_text_in_a_file_can_not_speak_to_the_terminal(tmp_path: Path, capsys: Capture) -> None:
    """Control characters in names and values are shown as escapes."""
    path = save(tmp_path / "a.ckpt", {**checkpoint(run="\x1b[2Jgone\n"), "key\x07": 1})
    found = call(capsys, "inspect", path)
    assert "\\x1b[2Jgone\\n" in found.out
    assert "key\\x07" in found.out
    assert not {"\x1b", "\x07"} & set(found.out)


STRANGE = {
    "a list": [1, 2],
    "a tensor": torch.zeros(3),
    "keys of all kinds": {1: 2, (3, 4): 5, None: float("nan"), "part": float("inf")},
    "numbers that JSON has not": checkpoint(run=float("nan"), origin=float("-inf")),
    "our part is a list": {"lightning_faulttolerant": [1]},
    "our part is empty": {"lightning_faulttolerant": {}},
    "ranks are numbers": checkpoint(ranks=[1, 2], position=3, opaque="x", fingerprint=[], inexact="no", behind=7),
    "large numbers": checkpoint(run=1 << 5000, version=-(1 << 70)),
    "blobs out of range": checkpoint(
        ranks=[{"rng": {"blob": 99}, "held": {"blob": -1}, "blobs": {"lengths": ["x", 10**30]}}]
    ),
    "many keys": {f"key {number}": number for number in range(1000)},
}


@pytest.mark.parametrize("content", STRANGE.values(), ids=STRANGE)
def test_strange_files_are_shown_all_the_same(tmp_path: Path, capsys: Capture, content: object) -> None:
    """Any content of a file is shown as text and as valid JSON, without a traceback."""
    path = tmp_path / "a.ckpt"
    torch.save(content, path)
    assert call(capsys, "inspect", path).status == 0
    found = call(capsys, "inspect", path, "--json")
    assert found.status == 0

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    json.loads(found.out, parse_constant=refuse)


def test_a_structure_that_unfolds_without_an_end_is_cut(tmp_path: Path, capsys: Capture) -> None:
    """Values that contain themselves, and lists of lists that would unfold to billions, are cut early enough."""
    bomb: list[object] = ["x"]
    for _ in range(60):
        bomb = [bomb, bomb]
    circle: list[object] = []
    circle.append(circle)
    assert _num_values(plain(bomb)) <= 100_100
    assert _num_values(plain(circle)) < 100
    path = tmp_path / "a.ckpt"
    torch.save(checkpoint(fingerprint={"circle": circle}, run=bomb), path)
    assert call(capsys, "inspect", path).status == 0


def _num_values(value: object) -> int:
    return 1 + sum(map(_num_values, value)) if isinstance(value, list) else 1


def test_what_is_no_checkpoint_is_an_error(tmp_path: Path, capsys: Capture) -> None:
    """A missing file, a directory, a text, and a cut file give status 2, no output, and a message with the name."""
    text, cut = tmp_path / "text", save(tmp_path / "cut.ckpt", foreign())
    text.write_text("hello")
    os.truncate(cut, 1000)
    for path in (tmp_path / "missing", tmp_path, text, cut):
        found = call(capsys, "inspect", path)
        assert (found.status, found.out) == (2, ""), path
        assert str(path) in found.err
        assert "Traceback" not in found.err


def test_names_in_the_file_are_those_of_the_part_that_writes_it() -> None:
    """The command line looks for the keys that a run writes."""
    from lightning_faulttolerant.state import packing

    assert finding.KEY == KEY
    assert inspection.BLOBS == packing.POOL


def test_a_directory_without_checkpoints_is_refused(tmp_path: Path, capsys: Capture) -> None:
    """There is no newest one to show."""
    found = call(capsys, "inspect", tmp_path)
    assert found.status == 2
    assert found.err == f"lightning-faulttolerant: {tmp_path}: No checkpoints are there\n"

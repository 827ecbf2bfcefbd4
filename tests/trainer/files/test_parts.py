"""Our part of a file that may be damaged: it exists, or it does not."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from lightning_faulttolerant.checkpoint.schema import KEY
from lightning_faulttolerant.trainer.files.run_files import part_of
from lightning_faulttolerant.trainer.position import TrainerPosition


@pytest.mark.filterwarnings("ignore")  # a garbled pickle may name things that torch has deprecated
def test_damaged_file_has_no_part(tmp_path: Path) -> None:
    """Reading raises nothing, whichever byte of the pickle changes."""
    path = tmp_path / "a.ckpt"
    position = TrainerPosition(where="boundary", epoch=0, batch=1, global_step=1).state_dict()
    part = {"version": 1, "world_size": 1, "position": position, "ranks": [{}], "origin": None, "surroundings": {}}
    part["fingerprint"] = {"loaders": {}}
    torch.save({KEY: part, "weight": torch.zeros(2)}, path)
    assert part_of(str(path)) == part
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        pickled = next(record for record in archive.infolist() if record.filename.endswith("data.pkl"))
    begin = pickled.header_offset + 64
    num_unreadable = 0
    for position in range(begin, begin + pickled.file_size):
        path.write_bytes(content[:position] + b"\xff" + content[position + 1 :])
        num_unreadable += part_of(str(path)) is None
    assert num_unreadable > pickled.file_size / 4

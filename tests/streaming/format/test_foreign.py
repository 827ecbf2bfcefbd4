import json
from pathlib import Path

import numpy as np
import pytest

from lightning_faulttolerant.streaming import MDSWriter, merge_index
from tests.foreign import mosaic
from tests.processes import run
from tests.streaming.format.shards import write

COLUMNS = {"i": "int", "x": "ndarray:int32:3", "t": "str"}


def sample(number: int) -> dict[str, object]:
    """Return one sample of a data set."""
    return {"i": number, "x": np.full(3, number, np.int32), "t": f"{number}"}


@pytest.mark.parametrize("compression", [None, "zstd:3"])
def test_the_original_streams_what_we_write(compression: str | None, tmp_path: Path) -> None:
    """The original streams our data from a remote, merged of two, with checked hashes: each sample once, in order."""
    for part, first in (("a", 0), ("b", 60)):
        samples = [sample(first + number) for number in range(60)]
        write(
            MDSWriter,
            tmp_path / "remote" / part,
            COLUMNS,
            samples,
            size_limit="1kb",
            compression=compression,
            hashes=["sha1", "xxh64"],
        )
    merge_index(str(tmp_path / "remote"))
    streaming = mosaic()

    def stream() -> None:
        data = streaming.StreamingDataset(
            local=str(tmp_path / "local"),
            remote=str(tmp_path / "remote"),
            batch_size=1,
            shuffle=False,
            num_canonical_nodes=1,
            validate_hash="sha1",
        )
        found = [[found["i"], found["x"].tolist(), found["t"]] for found in data]
        (tmp_path / "found.json").write_text(json.dumps(found))

    # Run as a script: its shared memory is released when its process ends.
    ended = run(stream)
    assert ended.exit_code == 0, ended.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == [[number, [number] * 3, f"{number}"] for number in range(120)]

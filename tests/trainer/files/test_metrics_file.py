"""Cutting the metrics.csv of a CSVLogger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from lightning_faulttolerant.trainer.files.loggers import MetricsFile

_NAMES = ("a", "b,c", 'd"e', "f\ng", "h")
rows = st.lists(st.dictionaries(st.sampled_from(_NAMES), st.floats(), max_size=4), max_size=8)


def written(directory: Path, logged: list[dict[str, float]], *, every: int) -> tuple[bytes, list[str]]:
    """Return the file that Lightning's writer makes of the rows, flushed every `every` rows, and its final columns."""
    writer = ExperimentWriter(str(directory))
    for number, row in enumerate(logged):
        writer.log_metrics(row, number)
        if number % every == 0:
            writer.save()
    writer.save()
    path = Path(writer.metrics_file_path)
    return path.read_bytes() if path.exists() else b"", writer.metrics_keys


@given(before=rows, after=rows, every=st.integers(1, 5))
@pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists and is not empty:UserWarning")
def test_cut_file_is_the_one_that_was(
    tmp_path_factory: pytest.TempPathFactory, before: list[Any], after: list[Any], every: int
) -> None:
    """Rows and columns that came after the cut leave no trace, whatever they hold and whenever they were written."""
    directory = tmp_path_factory.mktemp("cut")
    expected, columns = written(directory / "one", before, every=every)
    written(directory / "other", before + after, every=every)
    file = MetricsFile(str(directory / "other/metrics.csv"))
    assert file.num_rows() == len(before + after)
    file.cut(len(before), columns)
    path = Path(file.path)
    assert (path.read_bytes() if path.exists() else b"") == expected
    assert (file.num_rows(), file.columns()) == (len(before), columns)


def test_row_that_was_torn_is_cut(tmp_path: Path) -> None:
    """A process that is killed while it writes leaves half a row, which is after the cut."""
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"a,step\r\n1.0,0\r\n2.0,1\r\n3.")
    MetricsFile(str(path)).cut(2, ["a", "step"])
    assert path.read_bytes() == b"a,step\r\n1.0,0\r\n2.0,1\r\n"

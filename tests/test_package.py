"""What users see of the installed package before they run anything: metadata, typing marker, public names."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

import lightning_faulttolerant

DISTRIBUTION = "lightning-faulttolerant"


def test_the_version_stands_in_one_place() -> None:
    """Only pyproject.toml states the version; `__version__`, the metadata, and the changelog agree with it."""
    version = metadata.version(DISTRIBUTION)
    assert lightning_faulttolerant.__version__ == version
    root = Path(__file__).parents[1]
    declared = re.findall(r'^version = "(.*?)"', (root / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert declared == [version]
    sources = "".join(path.read_text() for path in (root / "lightning_faulttolerant").rglob("*.py"))
    assert version not in sources
    newest = re.search(r"^## \[(.*?)\]", (root / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest is not None
    assert newest[1] == ("Unreleased" if ".dev" in version else version)


def test_the_metadata_is_what_an_installer_needs() -> None:
    """The package requires both Lightning packages in a supported version, torch, torchmetrics, fsspec, and no more.

    There are extras for development, the demo, the drill, each kind of object store, and streaming; it is typed.
    """
    required = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or []]
    assert {r.name: str(r.specifier) for r in required if r.marker is None} == {
        "lightning": "!=2.6.2,!=2.6.3,>=2.5.6",
        "pytorch-lightning": "!=2.6.2,!=2.6.3,>=2.5.6",
        "torch": ">=2.4",
        "torchmetrics": "",
        "fsspec": "",
    }
    found = metadata.metadata(DISTRIBUTION)
    assert set(found.get_all("Provides-Extra", [])) == {"az", "dev", "demo", "drill", "gs", "s3", "streaming"}
    assert (found["Requires-Python"], found["License-Expression"]) == (">=3.10", "Apache-2.0")
    assert "Typing :: Typed" in found.get_all("Classifier", [])
    assert resources.files(lightning_faulttolerant).joinpath("py.typed").is_file()
    assert (found["Description-Content-Type"], bool(found["Summary"])) == ("text/markdown", True)


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_the_entry_point_is_a_function(package: str) -> None:
    """Each package of Lightning finds the factory under the name of its group, and can load it."""
    points = metadata.entry_points(group=f"{package}.callbacks_factory")
    [point] = [each for each in points if "faulttolerant" in each.name]
    factory = "lightning_faulttolerant.trainer.switch:callbacks_from_environment"
    assert (point.name, point.value) == ("lightning_faulttolerant", factory)
    assert callable(point.load())


def test_the_public_list_is_what_is_visible() -> None:
    """`dir()` shows exactly the names of `__all__` plus submodules, and the list has no name twice."""
    listed = lightning_faulttolerant.__all__
    assert all(getattr(lightning_faulttolerant, name) is not None for name in listed)
    assert len(set(listed)) == len(listed)
    visible = {
        name
        for name in dir(lightning_faulttolerant)
        if not name.startswith("_") and not isinstance(getattr(lightning_faulttolerant, name), ModuleType)
    }
    assert visible == {name for name in listed if not name.startswith("_")}


PARTS = ("", ".checkpoint", ".loader", ".samplers", ".state", ".testing.exactness", ".twin")


def test_the_parts_load_without_lightning() -> None:
    """The package, each part for custom loops, and what both Lightning packages share load without Lightning."""
    program = (
        "import importlib, sys\n"
        f"for part in {PARTS}: importlib.import_module('lightning_faulttolerant' + part)\n"
        "sys.exit('lightning' in sys.modules or 'pytorch_lightning' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_first_screen_of_the_readme_fits_a_terminal() -> None:
    """The purpose, the callback, the variable, and the proof fit in 24 lines of 80 columns, without badges."""
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    screen = text.splitlines()[:24]
    assert max(map(len, screen)) <= 80
    told = "\n".join(screen)
    for what in ("FaultTolerance()", "PL_FAULT_TOLERANT_TRAINING=1", "lightning-faulttolerant drill"):
        assert what in told
    assert "![" not in told


def test_a_stop_can_be_sent_to_another_process() -> None:
    """A pool can pass a stop to its script, which would wait forever otherwise."""
    stop = lightning_faulttolerant.TrainingStopped(143, "Stopped by SIGTERM")
    arrived = pickle.loads(pickle.dumps(stop))
    assert (type(arrived), arrived.code, str(arrived)) == (type(stop), 143, str(stop))

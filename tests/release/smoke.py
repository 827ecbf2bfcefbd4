"""Tests the package as installed: run it with the Python of an environment with the package and its dependencies.

    cd $(mktemp -d) && python -I smoke.py

It trains, kills, and resumes a script that does not mention the package, by the environment variable. It
uses `pytorch_lightning` if that is the only one installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

LIGHTNING = "lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning"
SCRIPT = """
import glob, os, signal, time
import torch
from LIGHTNING import Callback, Trainer, seed_everything
from LIGHTNING.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

class Kill(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if "KILL" in os.environ and trainer.global_step > 11:
            # Until there is an autosave after the first batch: on a slow disk that may be minutes.
            time.sleep(0.01 if trainer.global_step < 200 else 0.5)
            if len(glob.glob("fault_tolerance/*/fit-1/*.ckpt")) > 1:
                os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(0)
loader = DataLoader(RandomDataset(32, 64), batch_size=8, shuffle=True)
seed_everything(int(os.environ["SEED"]))
model = BoringModel()
trainer = Trainer(
    max_epochs=100,
    limit_val_batches=0,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    callbacks=[Kill()],
)
trainer.fit(model, loader)
print("weights", model.layer.weight.double().sum().item().hex())
""".replace("LIGHTNING", LIGHTNING)


def run_script(directory: Path, *, seed: int = 1, kill: bool = False, is_on: bool = True) -> tuple[int, str]:
    """Run the script in `directory`, and return its exit code and output."""
    environment = {**os.environ, "SEED": str(seed), "OMP_NUM_THREADS": "1"}
    environment |= {"KILL": "1"} if kill else {}
    environment |= {"PL_FAULT_TOLERANT_TRAINING": "1"} if is_on else {}
    directory.mkdir(exist_ok=True)
    (directory / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-I", "train.py"]
    done = subprocess.run(command, cwd=directory, env=environment, check=False, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def try_the_environment_variable(directory: Path) -> None:
    """Check that a killed script resumes by the entry point alone, and ends with the uninterrupted run's weights."""
    code, whole = run_script(directory / "whole", is_on=False)
    assert code == 0, whole
    code, killed = run_script(directory / "cut", kill=True)
    assert code == -signal.SIGKILL, killed
    code, resumed = run_script(directory / "cut", seed=2)
    assert code == 0, resumed
    assert "Resumed exactly" in resumed, resumed
    assert "before batch 0 of epoch 0" not in resumed, resumed
    weights = [line for line in whole.splitlines() if line.startswith("weights")]
    assert weights, whole
    assert weights[0] in resumed, whole + resumed


def main() -> None:
    """Run all checks, and print the result."""
    package = importlib.import_module("lightning_faulttolerant")
    assert Path(package.__file__ or "").is_relative_to(sys.prefix), f"{package.__file__} is not what was installed"
    version = metadata.version("lightning-faulttolerant")
    assert package.__version__ == version
    for name in package.__all__:
        getattr(package, name)
    program = Path(sys.executable).with_name("lightning-faulttolerant")
    for command in ([program], [sys.executable, "-I", "-m", "lightning_faulttolerant"]):
        found = subprocess.run([*command, "--version"], check=True, capture_output=True, text=True).stdout
        assert found.strip() == version, found
    with tempfile.TemporaryDirectory() as directory:
        try_the_environment_variable(Path(directory))
    used = f"{LIGHTNING} {importlib.import_module(LIGHTNING).__version__}"
    print(f"lightning-faulttolerant {version} works with {used} as it was installed into {sys.prefix}")


if __name__ == "__main__":
    main()

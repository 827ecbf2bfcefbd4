"""A checkpoint of Lightning 1.9's fault tolerance: the parts that Lightning reads continue, the rest is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from lightning_faulttolerant import FaultTolerance
from tests.laws.rows import Net
from tests.runs import SavesAfter, fit_net

NUM_STEPS = 3
_MOVED = {  # the places in 1.9 of what 2.x keeps in its loops
    "epoch_loop.automatic_optimization.state_dict": "epoch_loop.batch_loop.optimizer_loop.state_dict",
    "epoch_loop.automatic_optimization.optim_progress": "epoch_loop.batch_loop.optimizer_loop.optim_progress",
    "epoch_loop.manual_optimization.state_dict": "epoch_loop.batch_loop.manual_loop.state_dict",
    "epoch_loop.manual_optimization.optim_step_progress": "epoch_loop.batch_loop.manual_loop.optim_step_progress",
    "epoch_loop.val_loop.state_dict": "epoch_loop.val_loop.epoch_loop.state_dict",
    "epoch_loop.val_loop.batch_progress": "epoch_loop.val_loop.epoch_loop.batch_progress",
}

pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")


def old_checkpoint(directory: Path) -> tuple[Path, dict[str, Any]]:
    """Write a checkpoint from the middle of an epoch in the layout of 1.9; return its path and its content."""
    path = directory / ".pl_auto_save.ckpt"
    fit_net([SavesAfter(NUM_STEPS, path)], directory, limit_val_batches=0, max_epochs=1)
    checkpoint: dict[str, Any] = torch.load(path)
    checkpoint["pytorch-lightning_version"] = "1.9.5"
    loop = {_MOVED.get(name, name): value for name, value in checkpoint["loops"]["fit_loop"].items()}
    loop["epoch_loop.batch_loop.state_dict"] = {}
    loop["epoch_loop.batch_loop.optimizer_loop.optim_progress"]["optimizer_position"] = 1
    nothing = {"ready": 0, "completed": 0}
    loop["epoch_loop.val_loop.dataloader_progress"] = {"total": nothing, "current": nothing}
    rng_states = {"torch": torch.get_rng_state(), "python": [3, list(range(625)), None]}
    worker = {"dataset_state": {0: {"rng_states": rng_states}}, "num_workers": 0, "num_batches_fetched": NUM_STEPS}
    worker["sampler_state"] = {0: {"current_iteration": 12}}
    state = {"state": {0: worker}, "latest_worker_id": 0, "represent_map_dataset": True}
    loop["epoch_loop.state_dict"]["dataloader_state_dict"] = {0: state}
    loop["epoch_loop._results"] = {"training": True, "batch": None, "batch_size": 4, "device": "cpu", "items": {}}
    checkpoint["loops"]["fit_loop"] = loop
    torch.save(checkpoint, path)
    return path, checkpoint


class Look(Callback):
    """Keeps the weights that training continues from."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.weights = {name: value.clone() for name, value in pl_module.state_dict().items()}
        self.step = trainer.global_step


def test_continues_as_lightning_takes_it(tmp_path: Path) -> None:
    """Weights, optimizer and counters come from the file; the report says that the rest begins again."""
    path, checkpoint = old_checkpoint(tmp_path)
    callback, look = FaultTolerance(run_id="old"), Look()
    module = Net()
    trainer = fit_net([callback, look], tmp_path, module=module, ckpt_path=path, limit_val_batches=0, max_epochs=2)
    assert look.step == NUM_STEPS
    assert all(torch.equal(value, checkpoint["state_dict"][name]) for name, value in look.weights.items())
    assert trainer.optimizers[0].state_dict()["state"][0]["step"] == trainer.global_step
    report = callback.resume_report
    assert report is not None
    assert not report.is_exact
    assert "order of samples, random generators, metrics" in str(report)

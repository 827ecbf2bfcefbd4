"""The law on a GPU: generators, scaled gradients, page-locked batches, compiled modules, strategies over NCCL."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor
from torchmetrics import MeanMetric

from tests.laws.cuts import Cut
from tests.laws.ranks import FOR_RANKS, Apart, InShards, Slowly, batches, fsdp2
from tests.laws.rows import Group, Net, Row, rows_of
from tests.laws.runs import Training, assert_continues, whole_run

NUM_GPUS = torch.cuda.device_count()  # without a call into CUDA, after which a fork could not use it
pytestmark = [
    *FOR_RANKS,
    pytest.mark.gpu,
    pytest.mark.skipif(not NUM_GPUS, reason="needs a GPU"),
    pytest.mark.timeout(300),  # a process takes time to start CUDA
]


class OnGpu(Net):
    """Draws on the GPU from its global generator and from the module's own; updates a metric on the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.held: torch.Generator | None = None

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        if self.held is None:
            self.held = torch.Generator(batch.device).manual_seed(0)
        noise = torch.randn(batch.shape, dtype=batch.dtype, device=batch.device, generator=self.held)
        return batch + 0.1 * torch.randn_like(batch) + 0.1 * noise

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert batch.is_cuda
        self.mean.update(batch)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


class Compiled(OnGpu):
    """Has kernels that draw for dropout, in CUDA graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.compile(self.layers, mode="reduce-overhead")


class Scales(Callback):
    """Has a scale that doubles every second step until gradients overflow and steps are skipped."""

    def setup(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        trainer.precision_plugin.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**22, growth_interval=2)


ON_GPU = Row(name="on gpu", trainer={"accelerator": "gpu", "devices": 1})
PINNED = {"num_workers": 2, "persistent_workers": True, "pin_memory": True}
ROWS = [
    *(
        Row(name=precision, module=OnGpu, trainer={"precision": precision})
        for precision in ("32-true", "16-mixed", "bf16-true")
    ),
    Row(
        name="moving scale",
        module=OnGpu,
        callbacks=Scales,
        trainer={"precision": "16-mixed", "accumulate_grad_batches": 3, "gradient_clip_val": 0.5},
        repeats=3,
    ),
    Row(name="compiled", module=Compiled),
    Row(name="page-locked", module=OnGpu, train=rows_of(24, **PINNED), validation=rows_of(8, shuffle=False, **PINNED)),
]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")  # a step is skipped
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # from torch
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_resume_on_a_gpu(row: Row, tmp_path: Path) -> None:
    """What a run has on a GPU continues."""
    group = Group(rows=(ON_GPU, row))
    cuts = [Cut(at=(0, 2)), Cut(at=(0, 5), hook="validation"), Cut(at=(1, 0), by=signal.SIGTERM), Cut(at=(1, 4))]
    assert_continues(whole_run(group, tmp_path), Training(group=group, root=tmp_path / "cut"), cuts)


STRATEGIES: dict[str, Any] = {
    "ddp": {"module": Apart, "trainer": {"strategy": "ddp", "sync_batchnorm": True}},
    "fsdp2": {"module": InShards, "trainer": {"strategy": fsdp2(NUM_GPUS)}},
    "fsdp1": {"module": Apart, "trainer": {"strategy": FSDPStrategy(state_dict_type="sharded")}},
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_ranks_on_gpus(name: str, tmp_path: Path) -> None:
    """Ranks over NCCL continue, with batch norm statistics that they share, and in shards."""
    more = {**STRATEGIES[name]["trainer"], "accelerator": "gpu", "devices": NUM_GPUS}
    group = Group(rows=(Row(name=name, module=STRATEGIES[name]["module"], trainer=more), batches(NUM_GPUS)))
    whole = whole_run(group, tmp_path, num_ranks=NUM_GPUS)
    training = Training(group=group, root=tmp_path / "cut", num_ranks=NUM_GPUS, more=lambda: [Slowly()])
    assert_continues(whole, training, [Cut(at=(0, 2), rank=0), Cut(at=(1, 2), rank=NUM_GPUS - 1)])


def test_run_of_a_gpu_does_not_continue_without_one(tmp_path: Path) -> None:
    """A GPU run is refused on a machine without one, with an error that says so, and its files stay."""
    training = Training(group=Group(rows=(ON_GPU,)), root=tmp_path)
    training.ended(Cut(at=(0, 2)), run_id="gpu")
    training.group = Group(rows=(Row(name="cpu", trainer={"accelerator": "cpu", "devices": 1}),))
    training.before = lambda: os.environ.update(CUDA_VISIBLE_DEVICES="")
    refused = training.ended(code=1, run_id="gpu")
    assert "device 'cuda', which this process does not have" in refused.output
    training.group, training.before = Group(rows=(ON_GPU,)), None
    assert "Resumed exactly" in training.start(run_id="gpu").output

"""The law on a GPU: generators, scaled gradients, page-locked batches, compiled modules, strategies over NCCL."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.data_sets import NoisyDataset
from tests.faults import KillWhenWritten
from tests.gpus import needs_gpu
from tests.modules import FrozenNet
from tests.processes import run
from tests.rank_runs import assert_ranks_continue, for_ranks
from tests.runs import (
    FIRST_EPOCH,
    LATER_EPOCH,
    Cut,
    Net,
    RaiseAt,
    assert_continues,
    assert_exact,
    each_cut,
    each_short_cut,
    eight_batches,
    fit_eight,
)
from tests.sharded import ShardedNet, fsdp2

# A process takes time to start CUDA.
pytestmark = [*needs_gpu, *for_ranks, pytest.mark.timeout(300)]

ON_GPU: dict[str, Any] = {"accelerator": "gpu", "devices": 1}


class GpuNet(Net):
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


class ConvNet(LightningModule):
    """Uses cuDNN convolutions in their preferred memory format, and an optimizer that stays on the GPU."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout2d(0.2), nn.Conv2d(16, 8, 3))
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 1)).to(memory_format=torch.channels_last)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        images = batch.repeat(1, 48).reshape(-1, 3, 8, 8).to(memory_format=torch.channels_last)
        loss = self.layers(images + torch.rand_like(images)).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


class CapturableNet(GpuNet):
    """Counts the steps of its optimizer on the GPU."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01, capturable=True, amsgrad=True)


@each_short_cut
@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed", "bf16-true", "16-true"])
def test_each_precision_continues(precision: Any, cut: Cut) -> None:
    """Dropout, augmentation, and metrics on the GPU continue, and so does the gradient scale with 16 bits."""
    assert_continues(cut, module=GpuNet, precision=precision, **ON_GPU)


@each_cut
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")  # a step is skipped
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_scale_that_moves_continues(accumulate: int, cut: Cut) -> None:
    """A scale continues that doubles every second step until gradients overflow and steps are skipped."""

    def fit(callbacks: list[Callback], directory: Path) -> Any:
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**22, growth_interval=2)
        precision = MixedPrecision("16-mixed", "cuda", scaler=scaler)
        arguments = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
        return fit_eight(callbacks, directory, module=GpuNet(), plugins=[precision], **arguments, **ON_GPU)

    [cost] = assert_resumes_exactly(fit, [KillAt(cut.kill)], options={"every_n_train_steps": 1})
    assert cost.exit_code == -signal.SIGKILL


@each_short_cut
@pytest.mark.parametrize("module", [ConvNet, CapturableNet])
def test_each_kind_of_module_continues(module: Callable[[], LightningModule], cut: Cut) -> None:
    """Convolutions, and fused and capturable optimizers, continue."""
    assert_continues(cut, module=module, deterministic=True, **ON_GPU)


@each_cut
@pytest.mark.parametrize("num_workers", [0, 2])
def test_page_locked_batches_continue(num_workers: int, cut: Cut) -> None:
    """Batches continue that a thread copies into page-locked memory ahead of training, from persistent workers."""

    def loader(length: int, **more: Any) -> DataLoader[Any]:
        more |= {"num_workers": num_workers, "persistent_workers": num_workers > 0, "pin_memory": True}
        return DataLoader(NoisyDataset(length), batch_size=4, **more)

    train = lambda: loader(32, shuffle=True)  # noqa: E731
    assert_continues(cut, train=train, validation=lambda: loader(8), module=GpuNet, **ON_GPU)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # from torch
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_module_continues(mode: str) -> None:
    """A compiled module continues, although its kernels draw for dropout, with CUDA graphs or without."""

    def fit(callbacks: list[Callback], directory: Path) -> Any:
        module = GpuNet()
        module.layers = torch.compile(module.layers, mode=mode)
        return fit_eight(callbacks, directory, module=module, **ON_GPU)

    [cost] = assert_resumes_exactly(fit, [KillAt(11)], options={"every_n_train_steps": 1})
    assert (cost.epoch, cost.batch) == (1, 3)


@pytest.mark.parametrize("fault", [KillAt(3, signum=signal.SIGTERM), KillAt(11, hook="validation", signum=2)])
def test_stopped_by_a_signal(fault: KillAt) -> None:
    """A stop saves the current state of the GPU."""
    more = {"train": eight_batches(), "val_check_interval": 4}
    [cost] = assert_exact(list, fault, module=GpuNet, options={}, **more, **ON_GPU)
    assert cost.exit_code in {128 + 15, 128 + 2}


def test_stopped_by_an_exception() -> None:
    """An error in the script saves the state of the GPU, too."""
    options = {"overhead_budget": 1.0, "every_n_train_steps": 1}
    [cost] = assert_exact(list, RaiseAt("on_train_epoch_end", 0), module=GpuNet, options=options, **ON_GPU)
    assert (cost.exit_code, cost.epoch) == (1, 0)


@pytest.mark.parametrize("batch", [5, 11])
def test_written_in_background(batch: int) -> None:
    """State that is copied off the GPU during training is that of the requested moment."""
    options = {"every_n_train_steps": 1, "async_save": True}
    more = {"train": eight_batches(), **ON_GPU}
    [cost] = assert_exact(list, KillWhenWritten(batch), module=GpuNet, options=options, **more)
    assert cost.exit_code == -signal.SIGKILL


@pytest.mark.parametrize("options", [{}, {"async_save": True}], ids=str)
def test_incremental_autosaves(options: dict[str, Any]) -> None:
    """Tensors on the GPU are compared with what the bases hold, and those that change unnoticed are saved."""
    options = {"every_n_train_steps": 1, "incremental": True, **options}
    [cost] = assert_exact(list, KillAt(4), module=FrozenNet, options=options, **ON_GPU)
    assert cost.exit_code == -signal.SIGKILL


@pytest.mark.filterwarnings("ignore:SWA is currently only supported every epoch:UserWarning")
@pytest.mark.parametrize("kill", [9, 19])
def test_callbacks_continue(kill: int) -> None:
    """Averages on the CPU and the user's checkpoints continue."""

    def users() -> list[Callback]:
        return [StochasticWeightAveraging(0.05, swa_epoch_start=1), ModelCheckpoint(monitor="val_loss", save_last=True)]

    more = {"enable_checkpointing": True, "max_epochs": 4, "train": eight_batches()}
    [cost] = assert_exact(users, KillAt(kill), module=GpuNet, **more, **ON_GPU)
    assert (cost.epoch, cost.batch) == divmod(kill, 8)


@each_cut
def test_ddp_over_nccl_continues(cut: Cut) -> None:
    """DDP continues, with batch norm statistics that all ranks share."""
    arguments = {"strategy": "ddp", "sync_batchnorm": True, "accelerator": "gpu"}
    assert_ranks_continue(cut, num_ranks=torch.cuda.device_count(), **arguments)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_fsdp2_on_gpus_continues(whole: bool) -> None:
    """FSDP2 continues exactly, from a directory and from one file."""
    num_ranks = torch.cuda.device_count()
    strategy = fsdp2(num_ranks, save_distributed_checkpoint=not whole)
    assert_ranks_continue(LATER_EPOCH, num_ranks=num_ranks, module=ShardedNet, strategy=strategy, accelerator="gpu")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("state_dict_type", ["sharded", "full"])
def test_fsdp1_on_gpus_continues(state_dict_type: str) -> None:
    """FSDP1 continues exactly, from a directory and from one file."""
    strategy = FSDPStrategy(state_dict_type=state_dict_type)
    assert_ranks_continue(FIRST_EPOCH, num_ranks=torch.cuda.device_count(), strategy=strategy, accelerator="gpu")


def test_a_run_of_a_gpu_does_not_continue_without_one(tmp_path: Path) -> None:
    """A GPU run is refused on a machine without one, with an error that says so, and its files stay."""

    def fit(*callbacks: Callback, accelerator: str = "gpu") -> None:
        random.seed(1)
        ours = FaultTolerance(tmp_path / "saves", run_id="gpu", every_n_train_steps=1)
        fit_eight([ours, *callbacks], tmp_path, module=Net(), accelerator=accelerator, devices=1)

    def without() -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        fit(accelerator="cpu")

    assert run(lambda: fit(KillAt(3))).exit_code == -signal.SIGKILL
    refused = run(without)
    assert refused.exit_code == 1
    assert "device 'cuda', which this process does not have" in refused.output, refused.output
    assert "Resumed exactly" in run(fit).output

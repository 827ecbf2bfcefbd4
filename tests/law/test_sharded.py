"""Strategies that shard: a killed run continues exactly, from a directory to which each rank wrote its part."""

from __future__ import annotations

import copy
import re
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.testing import Interruption, KillAt, NotTheSame, assert_resumes_exactly
from tests.data_sets import NoisyDataset
from tests.groups import run_group
from tests.hook_saves import assert_continues_from, saver
from tests.kills import StopInValidation
from tests.law import elastic_runs
from tests.rank_runs import (
    SECONDS,
    RankNet,
    assert_ranks_continue,
    assert_ranks_resume,
    for_ranks,
    rank_fit,
    shuffled,
)
from tests.runs import FIRST_EPOCH, LATER_EPOCH, Cut, fit_net
from tests.sharded import (
    Fsdp1OnCpu,
    Fsdp1WholeOnCpu,
    LeavesOut,
    PartlyShardedNet,
    ShardedLeavesOut,
    ShardedNet,
    Swaps,
    TensorParallelNet,
    TwoOptimizersNet,
    fsdp2,
    tensor_parallel,
)

pytestmark = for_ranks


def same_rows() -> DataLoader[Any]:
    """Return a loader without noise: ranks that share a model get the same batches."""
    return DataLoader(NoisyDataset().rows, batch_size=4, shuffle=True)


def test_fsdp2_continues() -> None:
    """With one rank of FSDP2 killed, both resume exactly, with batch norms of their own and what hooks leave out."""
    cut = Cut(kill=2, every=1, continues_at=(0, 2))
    limits = {"max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 1}
    assert_ranks_continue(cut, rank=0, module=ShardedLeavesOut, strategy=fsdp2(), **limits)


@pytest.mark.slow
@pytest.mark.parametrize("is_sharded", [True, False], ids=["directory", "file"])
@pytest.mark.parametrize("module", [ShardedLeavesOut, Swaps])
def test_what_users_leave_out_of_fsdp2_continues(module: type[ShardedNet], is_sharded: bool) -> None:
    """Weights that a hook or a ``state_dict`` drops or changes continue, and so does a base that is only compared."""
    strategy = fsdp2(save_distributed_checkpoint=is_sharded)
    assert_ranks_continue(FIRST_EPOCH, rank=1, module=module, strategy=strategy, max_epochs=1)


@pytest.mark.slow
def test_fsdp2_continues_in_a_later_epoch() -> None:
    """The same holds in a later epoch, with workers."""
    assert_ranks_continue(LATER_EPOCH, rank=1, module=ShardedNet, strategy=fsdp2(), train=lambda: shuffled(2))


@pytest.mark.slow
@pytest.mark.parametrize("is_sharded", [True, False], ids=["directory", "file"])
def test_optimizers_that_have_made_no_step(is_sharded: bool) -> None:
    """An optimizer that waits for its first step, and accumulates gradients, is saved and restored unchanged.

    The save comes right after a validation run, when FSDP2 holds the whole module.
    """
    strategy = fsdp2(save_distributed_checkpoint=is_sharded)
    limits = {"max_epochs": 1, "val_check_interval": 3}
    assert_ranks_continue(FIRST_EPOCH, rank=1, module=TwoOptimizersNet, strategy=strategy, **limits)


@pytest.mark.slow
def test_fsdp2_with_one_file_continues(s3: str) -> None:
    """With ``save_distributed_checkpoint=False`` rank 0 writes one file, from which all resume exactly.

    Here it is an object in a store. The other cases with one file have it in a directory.
    """
    strategy = fsdp2(save_distributed_checkpoint=False)
    assert_ranks_continue(FIRST_EPOCH, rank=0, url=s3, module=ShardedNet, strategy=strategy, max_epochs=1)


@pytest.mark.slow
def test_fsdp2_with_accumulation_and_validation_continues() -> None:
    """With accumulation, and after a validation run, when FSDP2 holds the whole module, all resume exactly."""
    cut = Cut(kill=6, every=2, continues_at=(0, 6))
    arguments = {"accumulate_grad_batches": 3, "val_check_interval": 2}
    assert_ranks_continue(cut, rank=1, module=ShardedNet, strategy=fsdp2(), **arguments)


def costs_of_stops_in_validation(*signums: int, **arguments: Any) -> list[Interruption]:
    """Check the law for signals in validation runs, in batch 9 after each start."""
    limits = {"val_check_interval": 4, "max_epochs": 1}
    fit = rank_fit(2, validation=lambda: DataLoader(NoisyDataset(120), batch_size=4), **limits, **arguments)
    faults = [StopInValidation(9, signum) for signum in signums]
    options = {"train_time_interval": timedelta(microseconds=1)}
    costs = assert_resumes_exactly(fit, faults, options=options, num_ranks=2, timeout_seconds=SECONDS)
    assert [cost.num_batches_twice for cost in costs] == [0] * len(signums)
    return costs


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["directory", "file", "tensor parallel"])
def test_stopped_in_validation(kind: str) -> None:
    """A validation run continues at its batch, with an accumulation window open around it."""
    kinds: dict[str, dict[str, Any]] = {
        "directory": {"module": ShardedNet, "strategy": fsdp2()},
        "file": {"module": ShardedNet, "strategy": fsdp2(save_distributed_checkpoint=False)},
        "tensor parallel": {"module": TensorParallelNet, "strategy": tensor_parallel(), "train": same_rows},
    }
    costs = costs_of_stops_in_validation(signal.SIGTERM, signal.SIGKILL, accumulate_grad_batches=3, **kinds[kind])
    assert all(cost.num_validation_batches_twice <= 1 for cost in costs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # Lightning calls functions that torch has deprecated
@pytest.mark.filterwarnings("ignore:Multiple backends are registered with this ProcessGroup:UserWarning")
@pytest.mark.filterwarnings("ignore:`_get_pg_default_device` will be deprecated:UserWarning")
def test_fsdp1_stopped_in_validation() -> None:
    """FSDP1 has its gradients in another form in a validation run, which is finished or repeated, exactly."""
    costs_of_stops_in_validation(signal.SIGTERM, strategy=Fsdp1OnCpu(state_dict_type="sharded"))


@pytest.mark.slow
def test_tensor_parallel_continues() -> None:
    """With one rank of a module that is split over ranks killed, both resume exactly."""
    arguments: dict[str, Any] = {"train": same_rows, "limit_val_batches": 0, "max_epochs": 1}
    assert_ranks_continue(FIRST_EPOCH, rank=1, module=TensorParallelNet, strategy=tensor_parallel(), **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("is_sharded", [True, False], ids=["directory", "file"])
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_start"])
def test_checkpoints_that_others_ask_for_continue(hook: str, is_sharded: bool) -> None:
    """A checkpoint that a callback saves in a hook, after a batch or before a validation run, resumes exactly, too."""
    assert_continues_from(
        hook,
        users=lambda: [saver(hook, 1)],
        module=ShardedNet,
        train=shuffled,
        num_ranks=2,
        devices=2,
        strategy=fsdp2(save_distributed_checkpoint=is_sharded),
    )


@pytest.mark.slow
def test_replicas_that_differ_are_refused() -> None:
    """A parameter that is not sharded, and that differs between ranks, is an error that names it."""
    fit = rank_fit(2, module=PartlyShardedNet, strategy=fsdp2())
    with pytest.raises(NotTheSame, match=r"NotExactError: The ranks hold different values of layers\.3\.weight"):
        assert_ranks_resume(fit, [KillAt(3)])


class CutNet(elastic_runs.Net):
    """Splits its linear layers over ranks that get the same batches."""

    def configure_model(self) -> None:
        plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
        parallelize_module(self.layers, self.device_mesh["tensor_parallel"], plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "error"), [(1, "tensor_parallel_size: 2 when it was saved"), (3, "under tensor parallelism")]
)
def test_tensor_parallel_is_not_for_other_ranks(size: int, error: str) -> None:
    """Results of ranks with the same batches can't be divided among others: an error, even between two epochs."""
    plan = elastic_runs.Plan(options={"elastic": True}, make_module=CutNet, arguments={"limit_val_batches": 0})
    two, other = ({"num_ranks": n, "arguments": {"strategy": tensor_parallel(n)}} for n in (2, size))
    elastic_runs.run(plan, elastic_runs.Leg(**two, save=(1, "start")), elastic_runs.Leg(**other), error=error)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # Lightning calls functions that torch has deprecated
@pytest.mark.filterwarnings("ignore:Multiple backends are registered with this ProcessGroup:UserWarning")
@pytest.mark.filterwarnings("ignore:`_get_pg_default_device` will be deprecated:UserWarning")
@pytest.mark.parametrize("is_whole", [False, True], ids=["directory", "file"])
def test_fsdp1_continues(s3: str, is_whole: bool) -> None:
    """With one rank of FSDP1 killed, both resume exactly, from a directory in an object store and from one file.

    FSDP1 saves what the module's own ``state_dict`` leaves out; hooks drop other weights and all states.
    """
    strategy = Fsdp1WholeOnCpu() if is_whole else Fsdp1OnCpu(state_dict_type="sharded")
    url = None if is_whole else s3
    assert_ranks_continue(FIRST_EPOCH, rank=1, url=url, strategy=strategy, module=LeavesOut, max_epochs=1)


@pytest.mark.slow
def test_fsdp2_continues_from_an_object_store(s3: str) -> None:
    """Autosaves below a URL are sets of objects, from which both ranks resume exactly."""
    cut = Cut(kill=2, every=1, continues_at=(0, 2))
    limits = {"max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 1}
    assert_ranks_continue(cut, rank=0, url=s3, module=ShardedNet, strategy=fsdp2(), **limits)


class SavesOwn(RankNet):
    """Saves checkpoints of its own, and changes each of them in another way."""

    change = ""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = super().state_dict(*args, **kwargs)
        if self.change == "override":
            found.update({name: one.detach() / 2 for name, one in found.items() if name.endswith("layers.0.weight")})
        return found

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        if self.change == "hook":
            checkpoint["state_dict"] = weights = copy.deepcopy(checkpoint["state_dict"])
            for shard in getattr(weights["layers.0.weight"], "local_shards", list)():
                shard.tensor.zero_()
            if hasattr(weights["layers.0.weight"], "to_local"):
                weights["layers.0.weight"].to_local().zero_()
        elif self.change == "settings":
            groups = [[{**group, "eps": 0.5} for group in state["param_groups"]] for state in states]
            checkpoint["optimizer_states"] = [{**one, "param_groups": g} for one, g in zip(states, groups, strict=True)]
        elif self.change == "dropped":
            checkpoint["optimizer_states"] = []

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        for self.change in ("same", "override", "hook", "settings", "dropped"):
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/{self.change}.ckpt")
        self.change = ""


class ShardedSavesOwn(SavesOwn, ShardedNet):
    """The same in shards of FSDP2."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # Lightning calls functions that torch has deprecated
@pytest.mark.filterwarnings("ignore:Multiple backends are registered with this ProcessGroup:UserWarning")
@pytest.mark.filterwarnings("ignore:`_get_pg_default_device` will be deprecated:UserWarning")
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_a_users_directory_that_hooks_change_is_refused(kind: str, tmp_path: Path) -> None:
    """What a hook or a ``state_dict`` changes or drops there is named, or it continues; nothing is exact silently."""

    def fit(name: str, ckpt_path: Path | None = None, **options: Any) -> str:
        def main(rank: int) -> None:
            limits = {"max_epochs": 1, "limit_train_batches": 3, "limit_val_batches": 0, "num_sanity_val_steps": 0}
            if kind == "fsdp1":
                users = {"module": SavesOwn(), "strategy": Fsdp1OnCpu(state_dict_type="sharded")}
            else:
                users = {"module": ShardedSavesOwn(), "strategy": fsdp2()}
            ours = FaultTolerance(tmp_path / name, run_id=name, **options)
            fit_net([ours], tmp_path, train=shuffled(), devices=2, ckpt_path=ckpt_path, **users, **limits)

        return run_group(main, num_ranks=2, directory=tmp_path)[1]

    fit("first")
    weight, optimizer = (
        r"exactly: layers\.0\.weight: a hook .* or a state_dict has changed it",
        "settings of optimizer 0: ",
    )
    lines = {
        "same": "Resumed exactly",
        "override": weight if kind == "fsdp1" else "Resumed exactly",
        "hook": weight,
        "settings": optimizer,
        "dropped": r"CheckpointError: .*dropped\.ckpt can't be loaded: .*optimizer_0.* This strategy needs the whole",
    }
    for name, line in lines.items():
        output = fit(name, tmp_path / f"{name}.ckpt")
        assert re.search(line, output), output
        assert ("Resumed exactly" in output) == (line == "Resumed exactly"), output
    output, _, _ = fit("lax", tmp_path / "settings.ckpt", strict=False).partition("--- rank 1")
    assert re.search(f"Resumed NOT EXACTLY .*\n +NOT EXACT {optimizer}", output), output

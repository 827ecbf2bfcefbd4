"""A run resumes with a different number of ranks: each sample comes once, and an epoch's values cover all samples."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.distributed.fsdp import fully_shard
from torch.utils.data import WeightedRandomSampler

from tests.law.elastic_runs import Entries, Leg, Net, Plan, Rows, consumed, run
from tests.sharded import fsdp2

PER_SAMPLE = Plan(options={"worker_rng": "per_sample"})


def assert_every_sample_once(done: list[Entries], expected: list[int], *, epoch: int, num_ranks: int) -> None:
    """Check that the legs consumed all samples in order, and only some of the first ones again as padding."""
    found, length = consumed(done, epoch), len(set(expected))
    assert sorted(expected[:length]) == list(range(length))
    assert found[:length] == expected[:length]
    assert found[length:] == expected[: len(found) - length]
    assert len(found) - length < num_ranks


def assert_values_of(done: list[Entries], epoch: int) -> None:
    """Check that the values logged and computed at the end of an epoch are those of all samples consumed in it."""
    values = torch.tensor(consumed(done, epoch), dtype=torch.float64)
    expected = {"mean": values.mean(), "sum": values.sum(), "max": values.max(), "min": values.min()}
    for entries in done[-1].ranks:
        (found,) = [entry for entry in entries if entry["what"] == "values" and entry["epoch"] == epoch]
        logged, computed = found["values"], found["computed"]
        for kind, value in expected.items():
            assert logged[kind] == pytest.approx(value.item(), rel=1e-6), kind
            if kind != "mean":  # Lightning has reset it
                assert computed[kind] == pytest.approx(value.item(), rel=1e-6), kind
        assert logged["metric_mean"] == pytest.approx(expected["mean"].item(), rel=1e-6)
        assert computed["cat"] == sorted(values.tolist())


def test_two_ranks_become_one() -> None:
    """One rank finishes the epoch of two, sample by sample, and its values are those of all samples."""
    uninterrupted = run(PER_SAMPLE, Leg(num_ranks=2))
    done = run(PER_SAMPLE, Leg(num_ranks=2, kill=(0, 3)), Leg(num_ranks=1))
    assert_every_sample_once(done, consumed(uninterrupted, 0), epoch=0, num_ranks=1)
    assert_values_of(done, 0)
    assert done[1].of("values")[0]["values"]["unsynced"] == pytest.approx(12.5)
    assert done[1].of("report")[0]["batch"] == 6
    assert [entry["batch"] for entry in done[1].of("validation")] == [13, 13]
    assert any("2 ranks when it was saved, one rank now" in line for line in done[1].of("report")[0]["not_exact"])


def draws(samples: list[tuple[int, list[float]]]) -> torch.Tensor:
    """Return the noise of each sample."""
    rows = Rows(26).rows
    return torch.stack([torch.tensor(noisy) - rows[index] for index, noisy in samples])


WAYS: dict[str, list[Leg]] = {
    "1 to 2": [Leg(num_ranks=1, num_workers=2, kill=(0, 3)), Leg(num_ranks=2, num_workers=3)],
    "2 to 3": [Leg(num_ranks=2, kill=(1, 2)), Leg(num_ranks=3, num_workers=2)],
    "3 to 2": [Leg(num_ranks=3, num_workers=2, kill=(0, 1)), Leg(num_ranks=2)],
    "2 to 3 to 1": [Leg(num_ranks=2, kill=(1, 1)), Leg(num_ranks=3, kill=(1, 2)), Leg(num_ranks=1, num_workers=2)],
    "1 to 3 to 2": [Leg(num_ranks=1, kill=(0, 2)), Leg(num_ranks=3, num_workers=2, kill=(0, 3)), Leg(num_ranks=2)],
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_sample_once_in_order(way: str) -> None:
    """However the numbers of ranks and workers change, each epoch has each sample once, with the same augmentation."""
    legs = WAYS[way]
    assert legs[0].kill is not None
    epoch = legs[0].kill[0]
    uninterrupted = run(PER_SAMPLE, Leg(num_ranks=legs[0].num_ranks))
    done = run(PER_SAMPLE, *legs)
    for number in range(2):
        expected = consumed(uninterrupted if number <= epoch else done[-1:], number)
        assert_every_sample_once(done, expected, epoch=number, num_ranks=max(leg.num_ranks for leg in legs))
    assert_values_of(done, epoch)
    found = [sample for entries in done for sample in entries.samples(epoch)]
    assert found[:26] == uninterrupted[0].samples(epoch)[:26]
    if epoch == 0 and legs[-1].num_ranks > 1:
        fresh = run(PER_SAMPLE, Leg(num_ranks=legs[-1].num_ranks))
        assert done[-1].samples(1) == fresh[0].samples(1)


def losses(done: list[Entries], epoch: int) -> list[float]:
    """Return the mean loss of all samples of each step."""
    found = []
    for entries in done:
        for batch in entries.batches(epoch):
            weights = [len(entry["index"]) for entry in batch]
            found.append(sum(e["loss"] * w for e, w in zip(batch, weights, strict=True)) / sum(weights))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("way", [(2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("accumulated", [1, 2])
def test_an_equal_global_batch_gives_the_same_losses(way: tuple[int, int], accumulated: int) -> None:
    """With as many samples in each step as before, losses and weights equal the uninterrupted run's."""
    plan = Plan(options=PER_SAMPLE.options, arguments={"accumulate_grad_batches": accumulated}, length=24)
    sizes = {1: 4, 2: 2}
    uninterrupted = run(plan, Leg(num_ranks=way[0], batch_size=sizes[way[0]]))
    first = Leg(num_ranks=way[0], batch_size=sizes[way[0]], save=(0, 2))
    done = run(plan, first, Leg(num_ranks=way[1], batch_size=sizes[way[1]]))
    assert losses(done, 0) == pytest.approx(losses(uninterrupted, 0), rel=1e-5)
    expected, found = (torch.tensor(entries[-1].batches(0)[-1][0]["weights"]) for entries in (uninterrupted, done))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert done[1].of("report")[0]["batch"] == 3


@pytest.mark.slow
def test_accumulation_may_make_up_for_ranks() -> None:
    """Half as many ranks with twice the accumulation take the same steps, including an open window's gradients."""
    plan = Plan(options=PER_SAMPLE.options, length=24)
    uninterrupted = run(plan, Leg(num_ranks=2, arguments={"accumulate_grad_batches": 2}))
    legs = [
        Leg(num_ranks=2, arguments={"accumulate_grad_batches": 2}, save=(0, 2)),
        Leg(num_ranks=1, arguments={"accumulate_grad_batches": 4}),
    ]
    done = run(plan, *legs)
    expected, found = (torch.tensor(entries[-1].batches(0)[-1][0]["weights"]) for entries in (uninterrupted, done))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_a_window_that_does_not_fit_is_refused() -> None:
    """An open window that the new ranks can't have is an error, or is reported if the user allows it."""
    plan = Plan(options=PER_SAMPLE.options, arguments={"accumulate_grad_batches": 2})
    first = Leg(num_ranks=2, save=(0, 2))
    run(plan, first, Leg(num_ranks=1), error="they cover 4 samples, but with these ranks they would cover 0")
    done = run(plan, first, Leg(num_ranks=1, options={"elastic": True}))
    assert any("accumulation window" in line for line in done[1].of("report")[0]["not_exact"])


@pytest.mark.slow
def test_random_generators_are_an_error_unless_allowed() -> None:
    """With captured states a different number of ranks is refused; if the user allows it, the report lists losses."""
    first = Leg(num_ranks=2, kill=(0, 3), num_workers=0)
    run(Plan(), first, Leg(num_ranks=1), error="pass FaultTolerance(elastic=True)")
    done = run(Plan(), first, Leg(num_ranks=1, options={"elastic": True}))
    assert sorted(consumed(done, 0)) == list(range(26))
    assert any("random generators of the ranks" in line for line in done[1].of("report")[0]["not_exact"])


class ManualNet(Net):
    """Steps manually after every fourth batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss / 4)
        if batch_idx % 4 == 3:
            self.optimizers().step()
            self.optimizers().zero_grad()
        return {"loss": loss.detach()}


@pytest.mark.slow
def test_gradients_that_the_module_keeps_itself() -> None:
    """The module's own gradients continue with an equal global batch; else an error says their weight is unknown."""
    plan = Plan(options=PER_SAMPLE.options, length=32, make_module=ManualNet, max_epochs=1)
    uninterrupted = run(plan, Leg(num_ranks=2))
    done = run(plan, Leg(num_ranks=2, save=(0, 1)), Leg(num_ranks=1, batch_size=4))
    expected, found = (torch.tensor(entries[-1].batches(0)[-1][0]["weights"]) for entries in (uninterrupted, done))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    run(plan, Leg(num_ranks=2, save=(0, 1)), Leg(num_ranks=1), error="the number of their batches is not known")


class NetInShards(Net):
    """Its layers are in shards."""

    def configure_model(self) -> None:
        for layer in (self.layers[0], self.layers[3], self.layers):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("is_sharded", [True, False], ids=["directory", "file"])
def test_shards_are_cut_again(is_sharded: bool, request: pytest.FixtureRequest) -> None:
    """From two ranks of FSDP2 to one and back, an equal global batch takes the same steps; shards are in a store."""
    plan = Plan(options=PER_SAMPLE.options, length=48, max_epochs=1, make_module=NetInShards)
    two, one = (
        {
            "num_ranks": n,
            "batch_size": 4 // n,
            "arguments": {"strategy": fsdp2(n, save_distributed_checkpoint=is_sharded)},
        }
        for n in (2, 1)
    )
    uninterrupted = run(plan, Leg(**two))
    if is_sharded:
        plan = replace(plan, options={**plan.options, "dirpath": request.getfixturevalue("s3")})
    done = run(plan, Leg(**two, kill=(0, 3)), Leg(**one, kill=(0, 7)), Leg(**two))
    assert consumed(done, 0) == consumed(uninterrupted, 0)
    expected, found = (torch.tensor(entries[-1].batches(0)[-1][0]["weights"]) for entries in (uninterrupted, done))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_open_windows_of_shards_are_refused() -> None:
    """Gradients in shards can't be split again, so resuming inside an accumulation window is an error."""
    arguments = {"accumulate_grad_batches": 2, "limit_val_batches": 0}
    plan = Plan(options={**PER_SAMPLE.options, "elastic": True}, make_module=NetInShards)
    two, one = ({"num_ranks": n, "arguments": {**arguments, "strategy": fsdp2(n)}} for n in (2, 1))
    run(plan, Leg(**two, save=(0, 2)), Leg(**one), error="inside an open accumulation window")


class ApartNet(Net):
    """Adds up the samples of its rank in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch[0].sum()
        return super().training_step(batch, batch_idx)


class Sum(Callback):
    """Adds up the samples of its rank."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen += int(batch[0].sum())


class SummedNet(ApartNet):
    """Adds its callback to the trainer."""

    def configure_callbacks(self) -> list[Callback]:
        return [Sum()]


@pytest.mark.slow
def test_what_ranks_had_apart_is_reported() -> None:
    """Buffers and callback states that differed between ranks continue as rank 0's, and the report names them."""
    plan = Plan(options=PER_SAMPLE.options, make_module=SummedNet, max_epochs=1)
    done = run(plan, Leg(num_ranks=2, kill=(0, 3)), Leg(num_ranks=1))
    (line,) = [line for line in done[1].of("report")[0]["not_exact"] if "now come from rank 0" in line]
    assert line.endswith("now come from rank 0: buffers.seen, callbacks.Sum, callbacks['Sum#0'].seen")


@pytest.mark.slow
def test_new_ranks_draw_numbers_of_their_own() -> None:
    """With captured states no two samples of an epoch get the same noise, on any rank, worker, or leg."""
    plan = Plan(options={"elastic": True})
    for num_workers in (0, 2):
        legs = [Leg(num_ranks=1, num_workers=num_workers, kill=(0, 3)), Leg(num_ranks=3, num_workers=num_workers)]
        done = run(plan, *legs)
        drawn = [tuple(round(x, 4) for x in draw.tolist()) for e in done for draw in draws(e.samples(0))]
        assert len(set(drawn)) == len(drawn)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [(0, 2), (2, 0)], ids=str)
def test_other_workers_are_refused_unless_allowed(num_workers: tuple[int, int]) -> None:
    """Other workers lose their random states, which is an error unless allowed and reported; each sample comes once."""
    first = Leg(num_ranks=1, num_workers=num_workers[0], kill=(0, 3))
    run(Plan(), first, Leg(num_ranks=1, num_workers=num_workers[1]), error="num_workers")
    done = run(Plan(), first, Leg(num_ranks=1, num_workers=num_workers[1], options={"elastic": True}))
    assert sorted(consumed(done, 0)) == list(range(26))
    assert any("num_workers" in line for line in done[1].of("report")[0]["not_exact"])


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_an_epoch_that_others_began_resumes_exactly(num_ranks: int) -> None:
    """Killed again in an epoch that other ranks began, a run continues as if it had not been."""
    first = Leg(num_ranks=2, kill=(0, 2))
    expected = run(PER_SAMPLE, first, Leg(num_ranks=num_ranks))
    batch = 6 if num_ranks == 1 else 3
    done = run(PER_SAMPLE, first, Leg(num_ranks=num_ranks, kill=(0, batch)), Leg(num_ranks=num_ranks))
    found = [batch for entries in done[1:] for batch in entries.batches(0)]
    assert found == expected[1].batches(0)
    assert done[2].batches(1) == expected[1].batches(1)
    assert done[2].of("report")[0]["not_exact"] == []
    assert_values_of(done, 0)


@pytest.mark.slow
@pytest.mark.parametrize("where", [3, 6, "validation", "end"])
@pytest.mark.parametrize("way", [(2, 1), (1, 2)], ids=str)
def test_what_a_batch_still_owed_is_done_once(way: tuple[int, int], where: int | str) -> None:
    """From a checkpoint after a batch, in validation, or at an epoch's end, each validation runs once."""
    plan = Plan(options=PER_SAMPLE.options, length=24, arguments={"val_check_interval": 0.5})
    place = where if isinstance(where, str) else where * 2 // way[0] - 1
    done = run(plan, Leg(num_ranks=way[0], save=(0, place)), Leg(num_ranks=way[1]))
    uninterrupted = run(plan, Leg(num_ranks=way[0]))
    assert_every_sample_once(done, consumed(uninterrupted, 0), epoch=0, num_ranks=1)
    ran = [[(e["epoch"], e["batch"]) for e in entries.of("validation")] for entries in done]
    half, last = ([(0, n * batches // 2) for batches in (12 // way[0], 12 // way[1])] for n in (1, 2))
    expected = {
        3: ([], [half[1], last[1]]),
        6: ([half[0]], [last[1]]),
        "validation": ([half[0]], [last[1]]),
        "end": ([half[0], last[0]], []),
    }[where]
    assert ran[0] == expected[0]
    assert ran[1] == [*expected[1], (1, half[1][1]), (1, last[1][1])]


@pytest.mark.slow
def test_a_finished_fit_trains_on_with_other_ranks() -> None:
    """A finished fit continues for another epoch with a different number of ranks, from the start of that epoch."""
    legs = [Leg(num_ranks=2, arguments={"max_epochs": 1}), Leg(num_ranks=3, arguments={"max_epochs": 2})]
    done = run(PER_SAMPLE, *legs)
    assert consumed(done[1:], 0) == []
    assert done[1].samples(1) == run(PER_SAMPLE, Leg(num_ranks=3))[0].samples(1)


@pytest.mark.slow
def test_limited_epochs_end_with_the_same_sample() -> None:
    """An epoch that is limited to a share of its batches ends at the same sample with other ranks."""
    plan = Plan(options=PER_SAMPLE.options, length=24, arguments={"limit_train_batches": 0.5})
    done = run(plan, Leg(num_ranks=2, kill=(0, 1)), Leg(num_ranks=1))
    assert consumed(done, 0) == consumed(run(plan, Leg(num_ranks=2)), 0)
    counted = Plan(options=PER_SAMPLE.options, length=24, arguments={"limit_train_batches": 3})
    run(counted, Leg(num_ranks=2, kill=(0, 1)), Leg(num_ranks=1), error="it counts the batches of one rank")


@pytest.mark.slow
def test_an_order_that_is_not_known_is_refused() -> None:
    """A user's own sampler can't be divided among other ranks, with any options."""
    weights = {"shuffle": None, "sampler": WeightedRandomSampler([1.0] * 26, 26)}
    plan = Plan(options={"elastic": True, "strict": False}, arguments={"use_distributed_sampler": False})
    run(
        plan,
        Leg(num_ranks=2, kill=(0, 1), loader=weights),
        Leg(num_ranks=1, loader=weights),
        error="its sampler is not",
    )


@pytest.mark.slow
def test_a_validation_run_that_was_due_is_run() -> None:
    """A validation run that was due at the checkpoint's batch is run, even if it is not due there for the new ranks."""
    plan = Plan(options=PER_SAMPLE.options, length=24, arguments={"val_check_interval": 3, "max_epochs": 1})
    done = run(plan, Leg(num_ranks=1, save=(0, 2)), Leg(num_ranks=2))
    assert [entry["batch"] for entry in done[1].of("validation")] == [1, 3, 6]


class RowsOfRank(Rows):
    """Has other rows on each rank."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.rows += int(os.environ.get("RANK", "0"))


@pytest.mark.slow
def test_data_of_one_rank_are_not_dealt_to_others() -> None:
    """If each rank has its own data, the samples that another rank consumed are not carried over: an error."""
    plan = Plan(options={"elastic": True}, make_dataset=RowsOfRank)
    run(plan, Leg(num_ranks=2, kill=(0, 1)), Leg(num_ranks=1), error="had another data set on rank 1 than on rank 0")


@pytest.mark.slow
def test_augmentation_does_not_depend_on_ranks_that_nobody_has_seeded() -> None:
    """Ranks with different seeds draw the same numbers for the samples as one rank."""
    plan = Plan(options=PER_SAMPLE.options, seed=None, max_epochs=1)
    one, two = (draws(run(plan, Leg(num_ranks=n))[0].samples(0)) for n in (1, 2))
    torch.testing.assert_close(one, two)


@pytest.mark.slow
@pytest.mark.parametrize("way", [(2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("epoch", [0, 1])
def test_an_epoch_that_only_starts_is_of_the_new_ranks(way: tuple[int, int], epoch: int) -> None:
    """From a checkpoint at an epoch's start, that epoch and the next one have each sample once."""
    done = run(Plan(options=PER_SAMPLE.options), Leg(num_ranks=way[0], save=(epoch, "start")), Leg(num_ranks=way[1]))
    for number in range(epoch, 2):
        assert sorted(consumed(done[1:], number)) == list(range(26))
    assert len(done[1].batches(1)) == {1: 13, 2: 7}[way[1]]

"""Loaders that need no states of earlier workers: those that seed each sample, and those with other ranks or workers.

A loader that continues with a different number of ranks or workers resumes its order exactly. The saved random states
belong to workers that no longer exist, so new workers begin with their own. A loader that seeds each sample has no such
states, and loses nothing. Its resumed iteration begins with the next batch directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch.utils.data import DataLoader

from lightning_faulttolerant.errors import FingerprintMismatchError, NotExactError
from lightning_faulttolerant.loader.index_record import (
    IndexPlan,
    IndexRecord,
    RandomStates,
    plan_from_state,
    record_state,
)
from lightning_faulttolerant.loader.index_side import IndexSide
from lightning_faulttolerant.loader.per_sample import PerSampleDataset, SampleSeeds
from lightning_faulttolerant.loader.remaining import GlobalOrder, RankShare, RemainingBatches
from lightning_faulttolerant.state.generators import fresh_torch_state

DEAL = "deal"


def state_for_others(states: Sequence[Mapping[str, Any]], *, num_left: float | None) -> dict[str, object]:
    """Return one state, for each of any number of ranks, from the states of all ranks of a training loader.

    Args:
        states: The state of `TrackedLoader.state_dict` on each rank.
        num_left: The number of batches that each rank still had to run; ``None`` if they were not limited.

    Raises:
        NotExactError: If the loader's order can't be derived from those states.
    """
    first = states[0]
    if "record" not in first:
        raise NotExactError("it keeps its own position, which belongs to one rank")
    if "iterable" in first and not is_dealt_stream(first):
        raise NotExactError("an iterable data set decides on each rank which samples come next")
    if DEAL in first:  # nothing was consumed since another resume
        return dict(first)
    if "dataset" in first:
        raise NotExactError("its data set keeps its own state, which belongs to one rank")
    record = first["record"]
    if first["consumed"] is None or record is None or record["first"] is None:
        return between(first)
    if record.get("share") is None or record.get("order") is None:
        raise NotExactError(
            "its sampler is not torch's RandomSampler, SequentialSampler, or DistributedSampler in one pass over the "
            "data set, so the order of all ranks together is not known"
        )
    if len({state["consumed"] for state in states}) > 1:
        raise NotExactError(f"its ranks have not all consumed as many batches: {[one['consumed'] for one in states]}")
    seeded = {"per_sample": first["per_sample"]} if "per_sample" in first else {}
    rest = _rest(record, first["consumed"], num_left, begin=_begin_of(first))
    if "iterable" in first:
        if rest["begin"] >= rest["end"]:
            raise NotExactError("nothing is left of the epoch in progress of its StreamingDataset")
        [place] = first["streams"]
        return {**between(first), "streams": [{**place, "sample": rest["begin"]}], DEAL: rest}
    return {"consumed": None, "drop": 0, "record": None, "workers": None, **seeded, DEAL: rest}


def is_dealt_stream(state: Mapping[str, Any]) -> bool:
    """Return whether a state is of this package's streaming data set and can continue on any number of ranks."""
    return len(state.get("streams", ())) == 1 and state.get("is_dealt", False)


def _begin_of(state: Mapping[str, Any]) -> int:
    """Return the number of samples of the epoch that were consumed before its iteration began."""
    streams = state.get("streams") or [{"sample": 0}]
    sample: int = streams[0]["sample"]
    return sample


def _rest(record: Mapping[str, Any], consumed: int, num_left: float | None, *, begin: int) -> dict[str, Any]:
    order, share = GlobalOrder(**record["order"]), RankShare(**record["share"])
    if record.get(DEAL) is None:
        end, num_of_loader = order.length, share.num_batches(order.length - begin) - consumed
        begin = min(end, begin + consumed * share.samples_at_once)
    else:
        deal = RemainingBatches.from_state_dict(record[DEAL])
        begin, end = deal.consumed_before(consumed), deal.end
        num_of_loader = deal.first_batch + deal.num_batches - consumed
    if num_left is not None and num_left < num_of_loader:
        end = min(end, begin + int(num_left) * share.samples_at_once)
    return {"order": asdict(order), "begin": begin, "end": end}


def between(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state from which any number of ranks begin the next iteration, or one that has not begun."""
    found = {"consumed": None, "drop": 0, "record": None, "workers": None}
    if "iterable" in state:
        kept = {name: state[name] for name in ("streams", "is_dealt")}
        return {**found, **kept, "iterable": {"epoch": state["iterable"]["epoch"], "position": None}}
    if "per_sample" not in state:
        return found
    is_in_iteration = state["consumed"] is not None
    per_sample = state["per_sample"]
    return {**found, "per_sample": {**per_sample, "num_begun": per_sample["num_begun"] - is_in_iteration}}


def planned(state: Mapping[str, Any], side: IndexSide, loader: DataLoader[object]) -> IndexPlan:
    """Return the plan to continue from a state of `state_for_others`.

    Raises:
        NotExactError: If the order can't be dealt to this loader's sampler.
        FingerprintMismatchError: If the state is of another data set.
    """
    order = GlobalOrder(**state["order"])
    share, rank, num_ranks = side.current_share(), side.rank_place.rank, side.rank_place.num_replicas
    if share is None:
        raise NotExactError(
            f"A different number of ranks began this epoch, and a {type(side.own_sampler).__name__} does not say which "
            f"samples belong to rank {rank} of {num_ranks}. Some would come twice, others never. Let "
            "Lightning insert its own distributed sampler (use_distributed_sampler=True, without your own sampler), "
            "or continue with as many ranks as before."
        )
    # torch's samplers need its length
    now = len(loader.dataset) if side.streamed is None else side.streamed.order().length  # type: ignore[arg-type]
    if now != order.length:
        raise FingerprintMismatchError(
            f"This epoch has {order.length} samples, but the data set now has {now}. The rest can't be dealt. "
            "Continue with the same data."
        )
    deal = RemainingBatches(order=order, begin=state["begin"], end=state["end"], share=share)
    moment = fresh_moment(order, deal.begin, rank, num_ranks, loader=loader)
    first = deal.first_batch
    return IndexPlan(birth=moment, start=moment, first=moment, position=first, handed_out=first, deal=deal)


def with_other_workers(state: Mapping[str, Any], loader: DataLoader[object], *, rank: int) -> dict[str, object]:
    """Return a state with as many workers as `loader` has, and no worker state to resume from."""
    if "iterable" in state:
        return state_for_others([state], num_left=None)
    state = {**state, "num_workers": loader.num_workers}
    if state["consumed"] is None or state["record"] is None:
        return {**state, "record": None, "workers": None}
    moment = fresh_moment(state["record"]["first"], state["consumed"], rank, loader.num_workers, loader=loader)
    return {**state, "record": {**state["record"], "birth": moment.state_dict()}, "drop": 0, "workers": None}


def fresh_moment(*names: object, loader: DataLoader[object]) -> RandomStates:
    """Return random states to create new workers from. The workers must not repeat draws that others have made."""
    own = loader.generator is not None and loader.generator.device.type == "cpu"
    held = {"generator": b"torch:cpu\n" + fresh_torch_state(*names, "own")} if own else {}
    return RandomStates(rng={"torch": fresh_torch_state(*names)}, held=held, sampler_epochs=[])


class SeededSamples:
    """Seeds the samples of one loader through its iterations.

    Args:
        loader: The user's loader.
        seeds: The source of the seeds.
    """

    def __init__(self, loader: DataLoader[object], seeds: SampleSeeds) -> None:
        self._seeds = seeds
        self._is_batched = loader.batch_sampler is not None
        self._num_workers = loader.num_workers
        self._had_workers = [loader.num_workers]  # of this process and the earlier ones, each number once
        self.dataset = PerSampleDataset(loader.dataset, loader.collate_fn, is_batched=self._is_batched)

    @property
    def has_other_workers(self) -> bool:
        """Whether the run had a different number of workers before a resume."""
        return len(self._had_workers) > 1

    def begin(self, *, is_resumed: bool) -> int:
        """Note that an iteration begins; return the number of earlier ones.

        Args:
            is_resumed: Whether it is the rest of an iteration, or not one of those that are counted.
        """
        return self._seeds.begin(is_resumed=is_resumed)

    def make(
        self, loader: DataLoader[object], index_side: IndexSide, make_iterator: Callable[[], Iterator[object]]
    ) -> Iterator[object]:
        """Create torch's iterator over a data set that seeds before each sample. The loader's attributes stay."""
        others = {} if self._num_workers else {"collate_fn": self.dataset.collate}
        with index_side.opened_before(), self.dataset.stand_in(loader, **others):
            self._seeds.seed_workers(loader.generator)
            return make_iterator()

    def state_dict(self, record: IndexRecord | None = None, consumed: int | None = None) -> dict[str, object]:
        """Return the position of the loader: in the iteration of `record`, or between iterations."""
        num_begun = self._seeds.num_begun if record is None else record.epoch + 1
        return {
            "consumed": consumed,
            "drop": 0,
            "record": None if record is None else record_state(record),
            "workers": None,
            "per_sample": {**self._seeds.state_dict(num_begun=num_begun), "had_workers": list(self._had_workers)},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with the seeds in `state_dict`. A state of a loader without seeded samples has none."""
        state = state_dict.get("per_sample")
        if state is not None:
            self._seeds.load_state_dict(state)
            self._had_workers = [self._num_workers, *(n for n in state["had_workers"] if n != self._num_workers)]

    def plan(self, record: Mapping[str, object], consumed: int) -> IndexPlan:
        """Return the plan to continue after `consumed` batches of `record`.

        If the run never had workers, the sampler draws a batch again that was fetched ahead.
        """
        return plan_from_state(record, consumed, draws_again=not any(self._had_workers), is_batched=self._is_batched)

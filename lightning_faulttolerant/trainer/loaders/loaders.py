"""The loaders of a fit: each is replaced by a copy that can be followed, and put back when the fit is over."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_faulttolerant.checkpoint.ranks import Ranks
from lightning_faulttolerant.loader.exactness import (
    Exactness,
    OwnState,
    keeps_own_position,
    needs_no_position,
    share_a_state,
    stateful_dataset,
    was_given_position,
    why_not_exact,
)
from lightning_faulttolerant.loader.iteration import IterationOwner
from lightning_faulttolerant.loader.other_loaders import is_replayed, keeps_own_state
from lightning_faulttolerant.loader.per_sample import LoaderSeeds, SampleSeeds, why_not_per_sample
from lightning_faulttolerant.loader.remaining import RankShare, RemainingBatches
from lightning_faulttolerant.loader.tracked import TrackedLoader
from lightning_faulttolerant.samplers.order import RankPlace
from lightning_faulttolerant.state.rng import look, set_rng_state
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.loaders.trackers import (
    Continued,
    KnownLoaders,
    OfWholeLoader,
    PrefetchState,
    PrefetchStates,
    ResumedPlaces,
    Tracker,
    TrainersIterations,
    default_worker_init,
    place_or_none,
    skip_consumed,
    track,
    user_loader,
    why_not_whole,
)
from lightning_faulttolerant.trainer.log import tell
from lightning_faulttolerant.trainer.patches import Patches
from lightning_faulttolerant.trainer.run.fingerprint import loader_fingerprint

_log = logging.getLogger(__name__)

TRAIN, VALIDATION = "train", "validation"


class Loaders:
    """Every loader that Lightning processes during a fit, by its place: ``train/0``, ``validation/0``, ...

    Args:
        trainer: The trainer that runs the fit.
        exactness: Collects what can't be resumed exactly.
        manual: Whether the user's own objects keep the positions, and no loader is replaced.
        is_per_sample: Whether the generators are seeded before each sample.

    Raises:
        ValueError: If both `manual` and `is_per_sample` are set.
    """

    def __init__(
        self, trainer: Trainer, exactness: Exactness, *, manual: bool = False, is_per_sample: bool = False
    ) -> None:
        if manual and is_per_sample:
            raise ValueError(
                'worker_rng="per_sample" seeds the samples of loaders, and PL_FAULT_TOLERANT_TRAINING=manual does not '
                "touch loaders. Their samples would not be seeded. Drop one of the two."
            )
        self._seeds = LoaderSeeds() if is_per_sample else None
        self._trainer = trainer
        self.exactness = exactness
        self._manual = manual
        self._next_place = TRAIN, 0
        self._iterations = TrainersIterations()
        self.prefetches = PrefetchStates()
        """Where the training loaders were when batches were fetched ahead of their use."""
        self._continued = Continued()
        self._known = KnownLoaders()
        self._patches = Patches()
        self.guards_samples = False
        """Whether loaders that are processed from now on count a batch that can't be loaded."""

    @property
    def trackers(self) -> dict[str, Tracker]:
        """The trackers of the loaders that are followed, by place."""
        return self._known.trackers

    @property
    def fingerprints(self) -> dict[str, Any]:
        """The fingerprints of the loaders, by place."""
        return self._known.fingerprints

    @property
    def untracked(self) -> dict[str, object]:
        """The loaders that run as they are, by place. The state still includes what their objects hold."""
        return self._known.untracked

    @contextlib.contextmanager
    def iterated_by_trainer(self, *, stage: str = TRAIN) -> Iterator[None]:
        """Count iterations that begin inside this context as the trainer's own. All others are a callback's."""
        self._iterations.is_now = (
            stage == TRAIN or self._iterations.is_held_back
        )  # the setup of validation only tries its loaders
        try:
            yield
        finally:
            self.end_fetch()
            # A user's CombinedLoader may be used again by a reload. It holds our copies until they are put back.
            self._known.combined.update(compat.combined_loaders(self._trainer))

    def count_failed_fetch(self) -> bool:
        """Count a training batch that its loader has moved past, but could not return.

        Returns:
            Whether it is known which loader that was, and that it can return the next batch.
        """
        training = list(self._training().values())
        tracker = training[0] if len(training) == 1 and not self.untracked else None
        if not isinstance(tracker, TrackedLoader) or tracker.iterable is not None or tracker.iteration is None:
            return False
        tracker.iteration.count()
        return True

    def begin_fetch(self) -> None:
        """Count later iterations as the trainer's: of several validation loaders, all but the first begin late."""
        self._iterations.is_now = True

    def end_fetch(self) -> None:
        """End what `begin_fetch` began."""
        self._iterations.is_now = self.prefetches.is_in_fetch = False

    def begin(self, stage: str) -> None:
        """Prepare for the loaders of a stage to be processed again."""
        self._next_place = stage, 0

    def note_prefetching(self) -> None:
        """Note whether each training batch is fetched before the previous one is trained."""
        self.prefetches.is_on = compat.fetches_ahead(self._trainer)

    def note_checkpoint(self, *, has_places: bool = False, lightning_restores: bool = False) -> None:
        """Note what is in the checkpoint that this fit continues from.

        Args:
            has_places: Whether it has the loaders' places.
            lightning_restores: Whether it is not of this package, and Lightning restores the loaders' own states.
        """
        self._continued.has_places, self._continued.lightning_restores = has_places, lightning_restores

    def hold_back(self) -> None:
        """Let new training iterations be empty: `renew` begins them again in the right place."""
        self._iterations.is_held_back = True

    def stop_holding_back(self) -> None:
        """End what `hold_back` began."""
        self._iterations.is_held_back = False

    def resume_from(self, states: Mapping[str, Any]) -> None:
        """Let every loader, including those processed later, continue from its place in `states`, a `state_dict`."""
        resumed = self._continued.resumed = ResumedPlaces.from_state_dict(states)
        self.load_own(resumed.own)
        if self._seeds is not None:
            self._seeds.resume_from(resumed.states)
        for place in self._that_stay(self.trackers):
            self._resume(place, self.trackers[place])

    def _that_stay(self, places: Iterable[str]) -> list[str]:
        """Return the places of loaders that are not requested again first: ``configure_optimizers`` may request one."""
        is_due = compat.are_due(self._trainer, for_training=True)
        return [place for place in places if not (is_due and place.startswith(f"{TRAIN}/"))]

    def expect(self, check: Callable[[str, Any], None]) -> None:
        """Call `check` with the place and the fingerprint of each loader, including those processed later."""
        self._continued.check = check
        for place in self._that_stay(self.fingerprints):
            tracker = self.trackers[place]
            if isinstance(tracker, TrackedLoader):  # the indices of its split may have been restored
                self.fingerprints[place] = self._fingerprint(tracker.user_loader)
            check(place, self.fingerprints[place])

    def resumed(self) -> None:
        """Let loaders that are processed from now on begin at their beginning: they may be different ones."""
        self._continued.check = Continued().check
        self._continued.resumed = ResumedPlaces()

    def process(self, loader: Any) -> object:
        """Return the replacement for a loader that Lightning has processed."""
        loader = user_loader(loader)  # a user's CombinedLoader that is used again still holds our copies
        stage, index = self._next_place
        self._next_place = stage, index + 1
        place = f"{stage}/{index}"
        if self._manual:
            return self._leave(stage, place, loader)
        is_whole = keeps_own_state(loader) or is_replayed(loader)
        reason = self._why_not_followed(loader, stage)
        if reason is not None:
            self.untracked[place] = loader
            # A sample that is not seeded itself would depend on the number of workers.
            is_seeded = self._seeds is not None and isinstance(loader, DataLoader)
            if stage == TRAIN or is_seeded or not needs_no_position(loader):
                self._refuse(place, reason)
            return loader
        if place in self._continued.resumed.left:
            self._refuse(place, "the checkpoint holds no position of it, because none could be determined then")
        follow = self._follow_own if is_whole else self._follow
        tracker, followed = follow(place, loader, self._owner_of(stage))
        if stage == TRAIN and isinstance(tracker, TrackedLoader):
            self._known.index_sides[place] = tracker.index_side
        self.trackers[place] = tracker
        self.fingerprints[place] = self._fingerprint(loader)
        self._continued.check(place, self.fingerprints[place])
        self._resume(place, tracker)
        return followed

    def _fingerprint(self, loader: object) -> dict[str, object]:
        return loader_fingerprint(loader, is_per_sample=self._seeds is not None)

    def _why_not_followed(self, loader: Any, stage: str) -> str | None:
        if keeps_own_state(loader) or is_replayed(loader):
            return why_not_whole(loader)
        reason = why_not_exact(loader)
        if reason is not None or not keeps_own_position(loader):
            return reason
        if stage == TRAIN and self._continued.lightning_restores:
            return "the checkpoint was saved without FaultTolerance and holds a state that the loader would load itself"
        if was_given_position(loader) and not self._continued.has_places:
            return "a state was loaded into it before fit, so its first epoch would begin at an unknown position"
        if self._seeds is not None and stateful_dataset(loader) is not None:
            return 'its data set keeps a state, which is not saved with worker_rng="per_sample"'
        return None

    def _owner_of(self, stage: str) -> IterationOwner:
        """Return what says which iterations of a stage are the trainer's."""
        if stage != TRAIN:
            return self._iterations.owner()
        return self._iterations.training_owner(self._before_first_batch)

    def _follow(
        self, place: str, loader: DataLoader[object], owner: IterationOwner
    ) -> tuple[TrackedLoader, DataLoader[object]]:
        known = self.trackers.get(place)
        if isinstance(known, TrackedLoader) and known.is_kept_for(loader):  # used again when loaders are reloaded
            return known, known.loader
        for other, tracker in self.trackers.items():
            if other != place and isinstance(tracker, TrackedLoader) and share_a_state(loader, tracker.user_loader):
                self._refuse(place, f"{other} reads the same data set, which keeps one state for both")
        seeds = self._seeds_of(place, loader)
        init, before = default_worker_init(self._trainer), known.objects if isinstance(known, TrackedLoader) else None
        tracker = TrackedLoader(
            loader,
            exactness=self.exactness,
            owner=owner,
            rank_place=RankPlace(rank=self._trainer.global_rank, num_replicas=self._trainer.world_size),
            default_worker_init=init,
            seeds=seeds,
            known=before,
            is_guarded=self.guards_samples and place.startswith(TRAIN),
        )
        tracked = tracker.copy_of(loader)
        if keeps_own_position(loader):
            # A data module may call these on the loader that it holds, which never leaves its beginning.
            self._patches.replace(loader, "state_dict", tracked.state_dict)  # type: ignore[attr-defined]
            self._patches.replace(loader, "load_state_dict", tracked.load_state_dict)  # type: ignore[attr-defined]
        return tracker, tracked

    def _follow_own(self, place: str, loader: object, owner: IterationOwner) -> tuple[OfWholeLoader, object]:
        others = [tracker for tracker in self._known.whole if tracker.loader is loader]
        has_state = keeps_own_state(loader)
        if has_state and any(tracker.place != place for tracker in others):
            self._refuse(place, f"the same object is also {others[0].place}, and it has one state for both")
        for tracker in others:
            if has_state or tracker.place == place:  # loaders are reloaded, and this one is the same
                if place.startswith(TRAIN):
                    tracker.give_to(owner)
                return tracker, tracker.followed
        tracker = track(loader, exactness=self.exactness, owner=owner, place=place, older=self._known.whole)
        tracker.follow()
        self._known.whole.append(tracker)
        return tracker, tracker.followed

    def _seeds_of(self, place: str, loader: DataLoader[object]) -> SampleSeeds | None:
        if self._seeds is None:
            return None
        reason = why_not_per_sample(loader)
        if reason is None:
            return self._seeds.of(place)
        tell(f"Loader {place} needs the same number of workers at each resume: {reason}.")
        return None

    def _leave(self, stage: str, place: str, loader: object) -> object:
        own = self._known.own[place] = OwnState(loader)
        self.untracked[place] = loader
        if isinstance(loader, DataLoader):
            self.fingerprints[place] = loader_fingerprint(loader)
            self._continued.check(place, self.fingerprints[place])
        reason = own.why_not_exact()
        if reason is not None and (stage == TRAIN or not needs_no_position(loader)):
            self._refuse(place, reason)
        self.load_own(self._continued.resumed.own, place)
        return loader

    def load_own(self, states: Mapping[str, Any], only: str | None = None) -> None:
        """Restore the states of the user's objects. Call this right before they are iterated over."""
        for place, state in states.items():
            if place in self._known.own and only in (None, place):
                self._known.own[place].load_state_dict(state)

    def _resume(self, place: str, tracker: Tracker) -> None:
        if place in self._continued.resumed.states:
            tracker.load_state_dict(self._continued.resumed.states[place])

    def _refuse(self, place: str, reason: str) -> None:
        remedy = " Change the loader, or pass FaultTolerance(strict=False) to train without it."
        shown = remedy if self.exactness.strict else ""
        self.exactness.refuse(f"Loader {place} can't be resumed exactly: {reason}.{shown}")

    def renew(self, state: Mapping[str, Any]) -> None:
        """Begin the trainer's iteration over the training loaders again, at the place of `state`.

        If batches are fetched ahead, this fetches the next one, under the same random states as before. The caller
        then restores the random states of the boundary.
        """
        self.stop_holding_back()
        ahead = state.get("ahead")
        if ahead is not None:
            self.load_held(ahead["held"])
            set_rng_state(ahead["rng"])
        num_ahead = 1 if ahead is None and compat.fetches_ahead(self._trainer) else 0
        skip = functools.partial(skip_consumed, state=state, stage=TRAIN, num_ahead=num_ahead)
        with self.iterated_by_trainer():
            compat.renew_iterator(self._trainer, state.get("combined"), skip)

    def end_resumed(self) -> None:
        """End the training iterations that were resumed, when their epoch is over."""
        for tracker in self._training().values():
            if isinstance(tracker, TrackedLoader):
                tracker.end_resumed()

    def mark(self) -> None:
        """Note where the training loaders are, right before a batch is fetched ahead of its use."""
        iterations, held = {}, {}
        for place, tracker in self._known.trackers.items():  # this runs at each batch: `_training` would cost too much
            if place.startswith(TRAIN) and not tracker.is_gone:
                iteration = tracker.iteration
                iterations[place] = (iteration, iteration.num_out if iteration else 0)
                if tracker.held.paths:
                    held[place] = tracker.held.state_dict()
        own = self._own_states() if self._known.own else {}
        content = iterations, compat.combined_state(self._trainer), look(), held, own
        self.prefetches.note(tuple.__new__(PrefetchState, content))

    def _before_first_batch(self) -> None:
        # The very first batch is fetched while the loaders are set up, before any seam could mark it.
        if not self.prefetches.is_in_fetch and compat.fetches_ahead(self._trainer):
            self.mark()

    def _training(self) -> dict[str, Tracker]:
        followed = self.trackers.items()
        return {place: tracker for place, tracker in followed if place.startswith(TRAIN) and not tracker.is_gone}

    def state_dict(self, *, in_epoch: bool, validated: Mapping[str, int] = {}, strict: bool = False) -> dict[str, Any]:
        """Return the position of each loader.

        Args:
            in_epoch: Whether a training epoch is in progress. If not, its loaders are to begin again.
            validated: How many batches are consumed of the validation loader in use, by its place.
            strict: Whether a training loader that can't report its place is an error.
        """
        mark = self.prefetches.last if in_epoch and compat.fetches_ahead(self._trainer) else None
        places: dict[str, object] = {
            place: tracker.state_dict(validated.get(place))
            for place, tracker in self.trackers.items()
            if not place.startswith(TRAIN) and not tracker.is_gone
        }
        for place, tracker in self._training().items():
            iteration: Any = tracker.iteration if mark is None else mark.iterations.get(place, (None, 0))[0]
            num_out = None if iteration is None else iteration.num_out if mark is None else mark.iterations[place][1]
            state_of = functools.partial(tracker.state_dict, num_out if in_epoch else None, iteration)
            # A validation run can be repeated instead.
            places[place] = state_of() if validated else place_or_none(place, state_of, self.exactness, strict=strict)
        lost = [place for place, found in places.items() if found is None]
        combined = compat.combined_state(self._trainer) if mark is None else mark.combined
        own = self._own_states()
        if mark is not None:
            own.update({place: state for place, state in mark.own.items() if place.startswith(TRAIN)})
        return {
            "places": {place: found for place, found in places.items() if found is not None},
            "left": [*lost, *(place for place in self.untracked if place.startswith(TRAIN))],
            "own": own,
            "combined": combined if in_epoch else None,
            "ahead": None if mark is None else {"rng": dict(mark.rng), "held": mark.held},
        }

    def _own_states(self) -> dict[str, object]:
        return {place: own.state_dict() for place, own in self._known.own.items()}

    def held_state(self) -> dict[str, dict[str, bytes]]:
        """Return the states of the generators that the loaders' objects hold."""
        return {place: tracker.held.state_dict() for place, tracker in self.trackers.items()}

    def load_held(self, state: Mapping[str, Mapping[str, bytes]]) -> list[str]:
        """Restore those generators. Return the paths that no longer exist."""
        missing = []
        for place, held in state.items():
            if place in self.trackers:
                missing += [f"{place}: {name}" for name in self.trackers[place].held.load_state_dict(held)]
        return missing

    def share_seeds(self, ranks: Ranks) -> None:
        """Seed the samples of all ranks from rank 0's seed; a collective."""
        if self._seeds is not None:
            self._seeds.seed = ranks.from_first("the seed of samples", self._seeds.seed)

    def deal(self) -> RemainingBatches | None:
        """Return this rank's share of the rest of an epoch that other ranks began, until that rest begins."""
        return next((t.deal for t in self._training().values() if isinstance(t, TrackedLoader)), None)

    def share(self) -> RankShare | None:
        """Return how the samples of the training loader are split among the ranks, if that is known."""
        return next((side.current_share() for side in self._known.index_sides.values()), None)

    def has_workers(self) -> bool:
        """Return whether training batches come from worker processes."""
        return any(t.num_workers for place, t in self.trackers.items() if place.startswith(TRAIN))

    def num_handed_out(self) -> int:
        """Return how many index batches of the training epoch have been drawn so far."""
        num = 0
        for (
            side
        ) in self._known.index_sides.values():  # this runs at each boundary: a generator would cost more than the rest
            num += side.record.handed_out
        return num

    def replayed(self) -> list[object]:
        """Return the loaders that are resumed by a replay, and the iterators that they keep."""
        return [one for tracker in self._known.whole for one in tracker.replayed()]

    def close_workers(self) -> None:
        """End all workers immediately, including stuck ones."""
        for tracker in self.trackers.values():
            tracker.close_workers()

    def release_workers(self) -> None:
        """Let the remaining workers react to a termination again."""
        for tracker in self.trackers.values():
            tracker.release_workers()

    def put_back(self) -> None:
        """Replace our copies by the loaders that Lightning would have without us."""
        with contextlib.ExitStack() as leaving:
            leaving.callback(self._known.clear)
            leaving.callback(self._patches.undo)
            for tracker in self._known.whole:
                leaving.callback(tracker.leave)
            for combined in {*self._known.combined, *compat.combined_loaders(self._trainer)}:
                combined.flattened = [user_loader(loader) for loader in combined.flattened]

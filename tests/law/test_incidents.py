"""The flight recorder: the state before a step that goes wrong is written, and equals an autosave of that moment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from lightning_faulttolerant import FaultTolerance, FlightRecorder, MeasuredStep
from lightning_faulttolerant.checkpoint.verify import load_path
from lightning_faulttolerant.cli import main as command_line
from lightning_faulttolerant.records.incidents import Incident, read_incident
from lightning_faulttolerant.testing import assert_resumes_exactly
from lightning_faulttolerant.trainer.recorder import KillAt
from lightning_faulttolerant.trainer.steps import incident_writer
from lightning_faulttolerant.trainer.steps.digests import digest
from tests.groups import run_group
from tests.processes import Ended, run
from tests.rank_runs import shuffled
from tests.runs import Net, fit_net
from tests.scripts import autosaves, protection, tell, told, weights

STEP = 7
"""The step of most incidents: batch 2 of the second epoch."""


class Spoilt(Net):
    """The loss of these steps is NaN."""

    def __init__(self, *steps: int) -> None:
        super().__init__()
        self.steps = steps

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        number = self.trainer.fit_loop.epoch_loop.batch_progress.total.completed
        return loss * torch.nan if number in self.steps else loss


class Raises(Callback):
    """Raises an exception in a hook of one batch."""

    def __init__(self, hook: str, step: int) -> None:
        setattr(self, hook, self._raise)
        self.step = step

    def _raise(self, trainer: Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.total.completed == self.step:
            raise ValueError("planted")


def at_step(step: MeasuredStep) -> bool:
    """Call a step an incident in which nothing is wrong."""
    return step.step == STEP


def incidents(directory: Path) -> dict[str, Incident]:
    """Return the reports of incidents that are not set aside, by the names of their files."""
    found = {path.name: read_incident(path.read_text()) for path in sorted(directory.rglob("incidents/*.json"))}
    return {name: one for name, one in found.items() if one is not None}


def the_checkpoint(directory: Path) -> Path:
    """Return the path of the only checkpoint of an incident."""
    [path] = directory.rglob("incidents/*.ckpt")
    return path


def trained(
    directory: Path,
    options: dict[str, Any] | None,
    *callbacks: Callback,
    seed: int = 1,
    ckpt: Path | None = None,
    **arguments: Any,
) -> Ended:
    """Train for two epochs of 5 steps, and record the final weights; with the callback if there are options for it."""
    directory.mkdir(exist_ok=True)

    def main() -> None:
        own = [] if options is None else protection(**options)
        trainer = fit_net([*own, *callbacks], directory, ckpt_path=ckpt, **{"max_epochs": 2, **arguments})
        tell(directory, "weights", weights(trainer))

    return run(main, seed=seed)


def parts(path: Path) -> dict[str, str]:
    """Return the digest of each part of a checkpoint, by its name."""

    def flat(name: str, value: Any) -> dict[str, str]:
        if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
            return {k: v for key in value for k, v in flat(f"{name}.{key}", value[key]).items()}
        return {name: digest(value)}

    return flat("", load_path(str(path)))


@pytest.mark.parametrize(
    "arguments", [pytest.param({}, marks=pytest.mark.slow), {"accumulate_grad_batches": 3}], ids=str
)
def test_the_file_equals_an_autosave_and_continues_exactly(tmp_path: Path, arguments: dict[str, Any]) -> None:
    """The recorder changes no weight; the state before the step is that of an autosave there, and ends as the run."""
    plain, recorded, again = tmp_path / "plain", tmp_path / "recorded", tmp_path / "again"
    # 3 batches make a window: step 7 is the second batch of the second window of its epoch.
    assert trained(plain, None, **arguments).exit_code == 0
    ended = trained(recorded, {"rule": at_step, "overhead_budget": 1e-9}, **arguments)
    assert ended.exit_code == 0, ended.output
    assert told(plain, "weights") == told(recorded, "weights")
    [incident] = incidents(recorded).values()
    assert (incident.step, incident.epoch, incident.batch, incident.checkpoint) == (
        STEP,
        1,
        2,
        "incident-00000007.ckpt",
    )
    continued = trained(again, {}, seed=99, ckpt=the_checkpoint(recorded), **arguments)
    assert "Resumed exactly before batch 2 of epoch 1" in continued.output
    assert told(again, "weights") == told(plain, "weights")


def test_the_file_equals_an_autosave_of_that_boundary(tmp_path: Path) -> None:
    """Each part of both is equal; the autosave of the next boundary differs."""
    own = {"rule": at_step, "keep_every": 1}
    ended = trained(tmp_path, own)
    assert ended.exit_code == 0, ended.output
    written, saved = (
        parts(the_checkpoint(tmp_path)),
        {path.name.split("epoch=")[1]: path for path in autosaves(tmp_path)},
    )
    assert written == parts(saved["1-batch=2-kept.ckpt"])
    assert written != parts(saved["1-batch=3-kept.ckpt"])
    assert len(written) > 50


def test_a_nan_is_recorded_once_for_a_series(tmp_path: Path) -> None:
    """After the optimizer has used a NaN, each later step has one: the first of them is written, and no other."""
    ended = trained(tmp_path, {"rule": "nan"}, module=Spoilt(STEP))
    assert ended.exit_code == 0, ended.output
    [incident] = incidents(tmp_path).values()
    assert (incident.step, incident.loss) == (STEP, "nan")
    assert "layers.0.weight" in incident.gradients
    assert ended.output.count("Incident in step") == 1
    line = ended.output.split("To see it, type: ")[1].splitlines()[0]
    assert line == incident.replay
    assert line.startswith(f"lightning-faulttolerant replay --until {STEP} -- ")
    # The weights in the file are those from before.
    assert all(
        bool(value.isfinite().all()) for value in load_path(str(the_checkpoint(tmp_path)))["state_dict"].values()
    )


@pytest.mark.parametrize("options", [{}, {"rule": "spike"}], ids=str)
def test_a_sound_run_has_no_incident(tmp_path: Path, options: dict[str, Any]) -> None:
    """Without a rule nothing is recorded, whatever happens; with one, only what it names."""
    spoilt = Spoilt(STEP) if not options else Net()
    ended = trained(tmp_path, options, module=spoilt)
    assert ended.exit_code == 0, ended.output
    assert not incidents(tmp_path)
    assert "Incident" not in ended.output


def test_there_are_at_most_five(tmp_path: Path) -> None:
    """A rule that names every second step has five files in the end, and the log tells of the others."""
    ended = trained(tmp_path, {"rule": lambda step: step.step % 2 == 0}, max_epochs=3)
    assert ended.exit_code == 0, ended.output
    assert [one.step for one in incidents(tmp_path).values()] == [0, 2, 4, 6, 8]
    assert ended.output.count("It is not recorded: there are 5 in") == 3


def test_a_stop_leaves_the_state_before_the_step(tmp_path: Path) -> None:
    """The run ends with the line to type, before the optimizer. A second start does the same, and keeps the file."""
    own = {"rule": "nan", "stop": True}
    for _ in range(2):
        ended = trained(tmp_path, own, module=Spoilt(STEP))
        assert ended.exit_code == 1
        [incident] = incidents(tmp_path).values()
        last = ended.output.strip().splitlines()[-1]
        assert last.startswith(
            f"lightning_faulttolerant.errors.IncidentError: Incident in step {STEP} (batch 2 of epoch 1)"
        )
        assert last.endswith(incident.replay)
    assert "Resumed exactly before batch 2 of epoch 1" in ended.output
    assert not told(tmp_path, "weights")


def test_an_exception_is_recorded_with_the_state_before_its_step(tmp_path: Path) -> None:
    """The step raises before the optimizer: its state is there, whatever the budget for captures."""
    own = {"rule": "nan", "overhead_budget": 1e-9}
    ended = trained(tmp_path, own, Raises("on_before_backward", STEP))
    assert ended.exit_code == 1
    [incident] = incidents(tmp_path).values()
    assert (incident.step, incident.what) == (STEP, "ValueError: planted")
    assert "replay --at-exception -- " in incident.replay
    plain = trained(tmp_path / "plain", None)
    assert plain.exit_code == 0
    again = trained(tmp_path / "again", {}, seed=99, ckpt=the_checkpoint(tmp_path))
    assert again.exit_code == 0, again.output
    assert told(tmp_path / "again", "weights") == told(tmp_path / "plain", "weights")


@pytest.mark.parametrize(("every", "number"), [(3, 2), (1, 1)])
def test_an_exception_after_the_optimizer_names_the_last_autosave(tmp_path: Path, every: int, number: int) -> None:
    """The weights have moved: no state is written, but how many batches a replay runs from which autosave."""
    own = {"rule": "nan", "every_n_train_steps": every}
    ended = trained(tmp_path, own, Raises("on_train_batch_end", STEP))
    assert ended.exit_code == 1
    [incident] = incidents(tmp_path).values()
    assert (incident.step, incident.checkpoint, incident.num_batches) == (STEP, "", number)
    assert incident.autosave == f"before batch {3 - number} of epoch 1"
    assert incident.without == "parameters or optimizer states have changed since"
    assert not list(tmp_path.rglob("incident-*.ckpt"))


class Manual(Net):
    """Two backward passes a step, each with its optimizer step; one of the losses is NaN in one step."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.which = which

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        number = self.trainer.fit_loop.epoch_loop.batch_progress.total.completed
        for which in range(2):
            loss = self.layers(batch).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss * torch.nan if (number, which) == (STEP, self.which) else loss)
            optimizer.step()


@pytest.mark.parametrize("which", [0, 1])
def test_manual_optimization(tmp_path: Path, which: int) -> None:
    """A NaN before the first step of the batch's optimizers has its state; one after it names the last autosave."""
    ended = trained(tmp_path, {"rule": "nan", "every_n_train_steps": 4}, module=Manual(which))
    assert ended.exit_code == 0, ended.output
    [incident] = incidents(tmp_path).values()
    assert (incident.step, bool(incident.checkpoint)) == (STEP, which == 0)
    assert bool(incident.without) == (which == 1)


class Scales(Net):
    """Scales its losses by itself. In one step, the loss is finite, and its gradients are not, as in an overflow."""

    def __init__(self, *, is_enabled: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.scaler = torch.amp.GradScaler("cpu", enabled=is_enabled)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        number = self.trainer.fit_loop.epoch_loop.batch_progress.total.completed
        output = self.layers(batch)
        loss = output.square().mean() + ((output * 0).square().sum().sqrt() if number == STEP else 0)
        optimizer.zero_grad()
        self.manual_backward(self.scaler.scale(loss))
        self.scaler.step(optimizer)
        self.scaler.update()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_scaler_of_a_module_may_meet_an_overflow(tmp_path: Path, is_enabled: bool) -> None:
    """It is the scaler's way to find the scale, as with Lightning's own; a scaler that is off finds none."""
    ended = trained(tmp_path, {"rule": "nan"}, module=Scales(is_enabled=is_enabled))
    assert ended.exit_code == 0, ended.output
    assert [one.step for one in incidents(tmp_path).values()] == ([] if is_enabled else [STEP])


class AddsToCheckpoints(Spoilt):
    """Adds to a checkpoint what it is now."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["now"] = 1


def test_a_hook_that_adds_values_of_now(tmp_path: Path) -> None:
    """It would add those of the middle of the step, so no state is written."""
    ended = trained(tmp_path, {"rule": "nan"}, module=AddsToCheckpoints(STEP))
    assert ended.exit_code == 0, ended.output
    [incident] = incidents(tmp_path).values()
    assert incident.without.startswith("on_save_checkpoint")


def test_incidents_stay_when_autosaves_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They stay after the end and `prune`, no rerun resumes from them, and those of a rerun are not mixed with them."""
    own = {"rule": "nan"}
    assert trained(tmp_path, own, module=Spoilt(STEP)).exit_code == 0
    assert not autosaves(tmp_path)
    assert command_line(["prune", str(tmp_path), "--keep-last", "1", "--superseded", "--damaged"]) == 0
    path = the_checkpoint(tmp_path)
    assert command_line(["list", str(tmp_path)]) == 0
    assert "incident, verified" in capsys.readouterr().out
    assert command_line(["inspect", str(path)]) == 0
    assert f"Incident in step {STEP} (batch 2 of epoch 1), rank 0: the loss is nan." in capsys.readouterr().out
    assert command_line(["report", str(tmp_path)]) == 0
    report = " ".join(capsys.readouterr().out.split())
    assert f"recorded an incident in step {STEP}: the loss is nan (incident-00000007.ckpt)" in report
    again = trained(tmp_path, own, module=Spoilt(3))
    assert "Resumed" not in again.output
    assert [one.step for one in incidents(tmp_path).values()] == [3]
    assert [one.name for one in tmp_path.rglob("superseded-0001-earlier-run/*.ckpt")] == [path.name]


def test_nothing_stays_on_the_trainer(tmp_path: Path) -> None:
    """After the fit, the strategy has its own methods again."""

    def main() -> None:
        trainer = fit_net(protection(rule="nan"), tmp_path, max_epochs=1)
        assert not {"training_step", "backward"} & vars(trainer.strategy).keys()

    ended = run(main)
    assert ended.exit_code == 0, ended.output


@pytest.mark.slow
def test_a_recorded_run_resumes_exactly() -> None:
    """The law holds with the recorder, also for a kill right after an incident."""

    def fit(callbacks: list[Callback], directory: Path) -> Any:
        recorder = [FlightRecorder(at_step)] if any(isinstance(each, FaultTolerance) for each in callbacks) else []
        return fit_net([*recorder, *callbacks], directory, max_epochs=2)

    assert_resumes_exactly(fit, [KillAt(8)], options={"every_n_train_steps": 1})


class SpoiltOnOne(Net):
    """Only the second rank has a NaN, in one step."""

    def __init__(self, *, is_spoilt: bool = True) -> None:
        super().__init__()
        self.is_spoilt = is_spoilt

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layers(batch).square().mean()
        is_here = self.is_spoilt and (self.trainer.global_rank, batch_idx) == (1, 3)
        return loss * torch.nan if is_here else loss


def trained_on_two(
    directory: Path, *, is_spoilt: bool = True, ckpt: Path | None = None, seed: int = 1, **arguments: Any
) -> str:
    """Train one epoch of 5 steps on two ranks with a recorder, and record the final weights; return what is printed."""
    directory.mkdir(exist_ok=True)

    def main(rank: int) -> None:
        torch.manual_seed(seed + rank)
        trainer = fit_net(
            protection(rule="nan", every_n_train_steps=2), directory, train=shuffled(num_batches=5),
            module=SpoiltOnOne(is_spoilt=is_spoilt), max_epochs=1, devices=2, strategy="ddp", limit_val_batches=0,
            ckpt_path=ckpt, **arguments,
        )  # fmt: skip
        if rank == 0:
            tell(directory, "weights", weights(trainer))

    codes, output = run_group(main, num_ranks=2, directory=directory)
    assert codes == [0, 0], output
    return output


def test_two_ranks_write_the_state_of_both(tmp_path: Path) -> None:
    """A NaN on one rank: its report names the loss, the other's the gradient that came from it. Both name the state.

    A run that continues from it, without the NaN, equals one that never had it.
    """
    spoilt, plain, again = tmp_path / "spoilt", tmp_path / "plain", tmp_path / "again"
    trained_on_two(spoilt)
    found = incidents(spoilt)
    assert sorted(found) == ["incident-00000003-rank-1.json", "incident-00000003.json"]
    first, second = found["incident-00000003.json"], found["incident-00000003-rank-1.json"]
    assert "gradient" in first.what
    assert second.what == "the loss is nan"
    for one in (first, second):
        assert one.checkpoint == "incident-00000003.ckpt", one.without
    path = the_checkpoint(spoilt)
    assert {each.name for each in path.parent.iterdir()} == {path.name, *found}
    trained_on_two(plain, is_spoilt=False)
    printed = trained_on_two(again, is_spoilt=False, ckpt=path, seed=99)
    assert "Resumed exactly before batch 3 of epoch 0" in printed
    assert told(again, "weights") == told(plain, "weights") != told(spoilt, "weights")


@pytest.mark.slow
def test_a_rank_that_does_not_notice_is_not_waited_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report of the others names the last autosave, training continues, and no file is left."""
    monkeypatch.setattr(incident_writer, "WAIT_SECONDS", 0.5)
    monkeypatch.setattr(incident_writer, "all_notice", lambda trainer: trainer.global_rank == 0)
    trained_on_two(tmp_path)
    first, second = (incidents(tmp_path)[f"incident-00000003{rank}.json"] for rank in ("", "-rank-1"))
    assert "the state of rank 1 did not come within 0.5 seconds" in first.without
    assert "the others may not have noticed it" in second.without
    assert (first.num_batches, first.autosave) == (2, "before batch 2 of epoch 0")
    assert sorted(path.name for path in tmp_path.rglob("incidents/*")) == sorted(incidents(tmp_path))


@pytest.mark.slow
def test_gradients_that_are_not_exchanged_are_of_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of an accumulation window, only the rank with the NaN reports it. The other one does later."""
    monkeypatch.setattr(incident_writer, "WAIT_SECONDS", 0.5)
    trained_on_two(tmp_path, accumulate_grad_batches=5)
    found = incidents(tmp_path)
    assert sorted(found) == ["incident-00000003-rank-1.json", "incident-00000004.json"]
    assert "the others may not have noticed it" in found["incident-00000003-rank-1.json"].without
    assert "did not come within" in found["incident-00000004.json"].without


@pytest.mark.parametrize(
    ("kind", "options"), [(FlightRecorder, {"rule": "inf"}), (FlightRecorder, {"rule": None, "stop": True})]
)
def test_options_that_can_have_no_effect_are_refused(kind: Any, options: dict[str, Any]) -> None:
    """A rule that does not exist, and options of the recorder without one."""
    with pytest.raises(ValueError, match="rule"):
        FlightRecorder(**options)

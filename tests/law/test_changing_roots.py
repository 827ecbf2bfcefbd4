"""Each start has another directory for its files; the run's files stay together in the first start's directory."""

from __future__ import annotations

import csv
import json
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.kills import files_below
from tests.loggers import scalars
from tests.model_checkpoints import known
from tests.processes import run
from tests.rank_runs import rank_fit
from tests.runs import fit_eight
from tests.trainer.ranks.stopped_ranks import RankProcesses

pytestmark = [
    pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists and is not empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning"),
]

Fit = Callable[[list[Callback], Path], Trainer]


def places(trainer: Trainer) -> dict[str, Any]:
    """Return the paths to which a trainer writes, and which of the named files exist."""
    saving = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    return {
        "log_dir": trainer.log_dir,
        "default_root_dir": trainer.default_root_dir,
        "loggers": [logger.log_dir for logger in trainer.loggers],
        "dirpaths": [str(callback.dirpath) for callback in saving],
        "are_there": [Path(path).exists() for c in saving for path in (c.best_model_path, c.last_model_path) if path],
        "known": [known(callback, Path(trainer.default_root_dir).absolute()) for callback in saving],
    }


class Places(Callback):
    """Records during the fit where the trainer writes."""

    def __init__(self, note: Path) -> None:
        self.note = note

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        self.note.write_text(trainer.log_dir or "")


@dataclass(frozen=True, kw_only=True)
class Starts:
    """The files of the uninterrupted run and of the killed one, and the directory of each start of the latter."""

    whole: Path
    roots: Sequence[Path]
    places: dict[str, dict[str, Any]]
    output: str

    @property
    def first(self) -> Path:
        """The directory of the first start."""
        return self.roots[0]


def run_in_changing_roots(fit: Fit, tmp_path: Path, kills: Sequence[int] = (6, 5)) -> Starts:
    """Run `fit` without our callback; then with it, killed and restarted in a new directory each time."""
    whole, roots = tmp_path / "whole", [tmp_path / "runs" / f"start-{n}" for n in range(len(kills) + 1)]
    protected = {"every_n_train_steps": 2, "dirpath": tmp_path / "autosaves"}

    def main(callbacks: list[Callback], root: Path) -> None:
        trainer = fit([*callbacks, Places(tmp_path / f"{root.name}.during")], root)
        (tmp_path / f"{root.name}.places").write_text(json.dumps(places(trainer)))

    ended = run(lambda: main([], whole))
    assert ended.exit_code == 0, ended.output
    for number, kill in enumerate(kills):
        ended = run(lambda k=kill, n=number: main([FaultTolerance(**protected), KillAt(k)], roots[n]), seed=1 + number)
        assert ended.exit_code == -signal.SIGKILL, ended.output
    ended = run(lambda: main([FaultTolerance(**protected)], roots[-1]), seed=99)
    assert ended.exit_code == 0, ended.output
    assert "Resumed exactly" in ended.output
    found = {name: json.loads((tmp_path / f"{name}.places").read_text()) for name in ("whole", roots[-1].name)}
    during = (tmp_path / f"{roots[-1].name}.during").read_text()
    assert during == found[roots[-1].name]["log_dir"]
    return Starts(whole=whole, roots=roots, places=found, output=ended.output)


def rows(log_dir: str) -> list[dict[str, str]]:
    """Return what a script reads after its fit."""
    with open(Path(log_dir) / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Loggers and ModelCheckpoints, built for a directory."""

    logger: Callable[[Path], Any] = lambda root: CSVLogger(root)
    saving: Callable[[Path], list[ModelCheckpoint]] = lambda root: []
    arguments: dict[str, Any] = field(default_factory=dict)

    def fit(self, callbacks: list[Callback], root: Path) -> Trainer:
        """Fit with these loggers and ModelCheckpoints."""
        arguments = {"enable_checkpointing": True, "val_check_interval": 2, **self.arguments}
        return fit_eight([*self.saving(root), *callbacks], root, logger=self.logger(root), **arguments)


def best(dirpath: Path | None = None, **arguments: Any) -> ModelCheckpoint:
    """Return a ModelCheckpoint that keeps the best two and the last."""
    return ModelCheckpoint(
        dirpath, **{"monitor": "val_loss", "save_top_k": 2, "every_n_train_steps": 2, "save_last": True, **arguments}
    )


CASES = {
    "csv": Case(saving=lambda root: [best()]),
    "csv below": Case(logger=lambda root: CSVLogger(root / "logs", name="mine", version=3), saving=lambda r: [best()]),
    "default": Case(logger=lambda root: True),
    "tensorboard": Case(
        logger=lambda root: TensorBoardLogger(root, name="mine", sub_dir="sub"), saving=lambda root: [best()]
    ),
    "both": Case(logger=lambda root: [TensorBoardLogger(root), CSVLogger(root, name="csv")], saving=lambda r: [best()]),
    "none": Case(logger=lambda root: False, saving=lambda root: [best()]),
    "directory below": Case(
        saving=lambda root: [
            best(root / "checkpoints", save_last="link"),
            ModelCheckpoint(root / "all", save_top_k=-1, every_n_train_steps=3),
        ]
    ),
}


@pytest.mark.usefixtures("whole_reports")
@pytest.mark.parametrize("case", CASES)
def test_files_stay_with_the_first_start(case: str, tmp_path: Path) -> None:
    """A run that is killed twice leaves the uninterrupted run's files in its first directory, and none elsewhere."""
    starts = run_in_changing_roots(CASES[case].fit, tmp_path)
    names = files_below(starts.whole)
    assert sorted(set(files_below(starts.first))) == names
    assert [files_below(root) for root in starts.roots[1:]] == [[], []]
    for name in names:
        if name.endswith("metrics.csv"):
            assert (starts.first / name).read_bytes() == (starts.whole / name).read_bytes()
        if "tfevents" in name:
            assert scalars((starts.first / name).parent) == scalars((starts.whole / name).parent)
    whole, killed = starts.places["whole"], starts.places[starts.roots[-1].name]
    assert json.loads(json.dumps(whole).replace(str(starts.whole), str(starts.first))) == killed
    assert all(killed["are_there"])
    for path in [*killed["loggers"], *killed["dirpaths"]]:
        assert f"continues in {path}" in starts.output


def test_script_reads_all_rows_in_one_file(tmp_path: Path) -> None:
    """``Path(trainer.logger.log_dir) / "metrics.csv"`` contains each row of the run once."""
    starts = run_in_changing_roots(CASES["csv"].fit, tmp_path, kills=(3, 1, 6))
    found = rows(starts.places[starts.roots[-1].name]["log_dir"])
    assert [row["step"] for row in found if row["loss_step"]] == [str(step) for step in range(16)]
    assert found == rows(starts.places["whole"]["log_dir"])


@pytest.mark.usefixtures("whole_reports")
def test_paths_outside_are_left_alone(tmp_path: Path) -> None:
    """Paths that are the same at each start are kept; others are new, and the report says so."""
    outside = tmp_path / "outside"

    def fit(callbacks: list[Callback], root: Path) -> Trainer:
        where = outside / ("whole" if root.name == "whole" else "killed")
        loggers = [CSVLogger(where / "logs"), CSVLogger(outside / f"new-{root.name}")]
        saving = [best(where / "checkpoints"), ModelCheckpoint(outside / f"saved-{root.name}", every_n_train_steps=4)]
        return Case(logger=lambda _: loggers, saving=lambda _: saving).fit(callbacks, root)  # type: ignore[arg-type]

    starts = run_in_changing_roots(fit, tmp_path)
    assert files_below(outside / "killed") == files_below(outside / "whole")
    log = "logs/lightning_logs/version_0/metrics.csv"
    assert (outside / "killed" / log).read_bytes() == (outside / "whole" / log).read_bytes()
    assert f"now logs to {outside}/new-start-2/lightning_logs; what was logged so far is in" in starts.output
    assert f"now saves to {outside}/saved-start-2; earlier files are in {outside}/saved-start-1" in starts.output
    last = starts.places["start-2"]
    assert last["loggers"][1].startswith(f"{outside}/new-start-2/")
    assert last["dirpaths"] == [f"{outside}/killed/checkpoints", f"{outside}/saved-start-2"]
    assert all(last["are_there"])


class Refused(Callback):
    """Ends the fit before the run restores anything."""

    def on_fit_start(self, trainer: Trainer, *_: Any) -> None:
        raise ZeroDivisionError


@pytest.mark.parametrize("logger", [CSVLogger, TensorBoardLogger])
@pytest.mark.parametrize("has_begun", [False, True])
def test_fit_that_fails_before_it_resumes_changes_nothing(logger: Any, has_begun: bool, tmp_path: Path) -> None:
    """If a fit fails before it resumes, user objects write to their own paths and the run's rows stay as they were."""
    first, second = tmp_path / "first", tmp_path / "second"
    protected = {"every_n_train_steps": 2, "dirpath": tmp_path / "autosaves"}

    def fit(root: Path, callbacks: list[Callback]) -> None:
        made, saving = logger(root), [best(root / "checkpoints"), ModelCheckpoint(every_n_train_steps=3)]
        if has_begun and root == second:
            made.log_metrics({"before": 1.0}, step=0)
        try:
            Case(logger=lambda _: made, saving=lambda _: saving).fit(callbacks, root)
        finally:
            (tmp_path / "after").write_text(
                json.dumps([made.log_dir, made.root_dir, str(saving[0].dirpath), str(saving[1].dirpath)])
            )
            made.log_metrics({"after": 1.0}, step=1)
            made.save()
            made.finalize("success")

    run(lambda: fit(first, [FaultTolerance(**protected), KillAt(7)]))
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file() and path.name != "hparams.yaml"}
    ended = run(lambda: fit(second, [FaultTolerance(**protected), Refused()]), seed=99)
    assert "ZeroDivisionError" in ended.output
    root_dir = f"{second}/lightning_logs"
    assert json.loads((tmp_path / "after").read_text()) == [
        f"{root_dir}/version_0",
        root_dir,
        f"{second}/checkpoints",
        "None",
    ]
    assert {path: path.read_bytes() for path in before} == before
    assert list((second / "lightning_logs").rglob("metrics.csv" if logger is CSVLogger else "*tfevents*"))


def test_trainer_has_its_directory_again_if_the_fit_fails(tmp_path: Path) -> None:
    """If a fit fails, the Trainer gets its ``default_root_dir`` back; only a run that resumes changes it."""
    note = tmp_path / "note"

    class Note(Callback):
        def on_exception(self, trainer: Trainer, *_: Any) -> None:
            self.trainer = trainer

    def fit(root: Path, *callbacks: Callback) -> None:
        noted = Note()
        protected = FaultTolerance(every_n_train_steps=2, dirpath=tmp_path / "autosaves")
        try:
            Case(logger=lambda _: False).fit([noted, protected, *callbacks], root)
        finally:
            note.write_text(noted.trainer.default_root_dir)

    run(lambda: fit(tmp_path / "first", KillAt(7)))
    run(lambda: fit(tmp_path / "second", Refused()), seed=99)
    assert note.read_text() == str(tmp_path / "second")


def test_copied_directory_is_written_to(tmp_path: Path) -> None:
    """A copy of a run, autosaves included, continues in its own directory; the original stays unchanged."""

    def fit(root: Path, *callbacks: Callback) -> None:
        Case(saving=lambda root: [best(root / "checkpoints")]).fit(
            [FaultTolerance(every_n_train_steps=2), *callbacks], root
        )

    run(lambda: fit(tmp_path / "first", KillAt(7)))
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    before = {path: path.read_bytes() for path in (tmp_path / "first").rglob("*") if path.is_file()}
    ended = run(lambda: fit(tmp_path / "copy"), seed=99)
    assert "Resumed exactly" in ended.output
    assert f"now logs to {tmp_path}/copy/lightning_logs" in ended.output
    assert {path: path.read_bytes() for path in (tmp_path / "first").rglob("*") if path.is_file()} == before


def test_removed_directory_is_not_made_again(tmp_path: Path) -> None:
    """If the first start's directory is gone, the run uses the new one."""

    def fit(root: Path, *callbacks: Callback) -> None:
        Case().fit([FaultTolerance(every_n_train_steps=2, dirpath=tmp_path / "autosaves"), *callbacks], root)

    run(lambda: fit(tmp_path / "first", KillAt(7)))
    shutil.rmtree(tmp_path / "first")
    ended = run(lambda: fit(tmp_path / "second"), seed=99)
    assert "Resumed exactly" in ended.output
    assert not (tmp_path / "first").exists()
    assert list((tmp_path / "second").rglob("metrics.csv"))


LOGGING_IN_HYDRA = {
    "chdir": lambda output_dir: (".", "logs"),
    "no chdir": lambda output_dir: (str(Path(output_dir).parent), output_dir),
    "default_root_dir": lambda output_dir: (output_dir, output_dir),
}


@pytest.mark.parametrize("kind", LOGGING_IN_HYDRA)
def test_hydra(kind: str, tmp_path: Path) -> None:
    """Hydra's output directory counts, as working directory, as named path, or as the Trainer's root."""

    def main(name: str, kill: int | None) -> None:
        import hydra
        from hydra.core.hydra_config import HydraConfig

        @hydra.main(version_base=None, config_path=str(tmp_path))
        def app(_: Any) -> None:
            default_root_dir, save_dir = LOGGING_IN_HYDRA[kind](HydraConfig.get().runtime.output_dir)
            protected = FaultTolerance(every_n_train_steps=4, dirpath=tmp_path / "autosaves", run_id="run")
            callbacks = [protected] if kill is None else [protected, KillAt(kill)]
            case = Case(logger=lambda _: CSVLogger(save_dir), saving=lambda _: [best()])
            trainer = case.fit(callbacks if name != "whole" else [], Path(default_root_dir))
            (tmp_path / f"{name}.places").write_text(json.dumps(places(trainer)))

        app()

    def start(name: str, kill: int | None = None) -> Any:
        chdir = f"hydra.job.chdir={kind == 'chdir'}"
        arguments = (f"hydra.run.dir={tmp_path}/{name}", "hydra.output_subdir=null", chdir)
        return run(lambda: main(name, kill), arguments=arguments)

    def files(name: str) -> list[str]:
        return [path for path in files_below(tmp_path / name) if not path.endswith(".log")]

    assert start("whole").exit_code == 0
    for name, kill in (("a", 7), ("b", 7)):
        assert start(name, kill).exit_code == -signal.SIGKILL
    ended = start("c")
    assert ended.exit_code == 0, ended.output
    assert files("a") == files("whole")
    assert [files("b"), files("c")] == [[], []]
    found = json.loads((tmp_path / "c.places").read_text())
    assert found["loggers"][0].startswith(f"{tmp_path}/a/")
    assert found["dirpaths"] == [f"{found['loggers'][0]}/checkpoints"]
    assert found["are_there"] == [True, True]
    whole = tmp_path / "whole" / Path(found["loggers"][0]).relative_to(tmp_path / "a")
    assert rows(found["loggers"][0]) == rows(str(whole))


@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log:UserWarning")
@pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders:UserWarning")
def test_two_ranks(tmp_path: Path) -> None:
    """Each rank's Trainer and ModelCheckpoints name the first start's directory."""

    def main(name: str, *callbacks: Callback) -> Callable[[int], None]:
        def on_rank(rank: int) -> None:
            root = tmp_path / name
            saving = [best(save_last="link"), best(root / "all", save_top_k=-1, monitor=None)]
            fit = rank_fit(2, users=lambda: [*saving, *callbacks], enable_checkpointing=True)
            trainer = fit([FaultTolerance(every_n_train_steps=2, dirpath=tmp_path / "autosaves")], root)
            (tmp_path / f"{rank}.json").write_text(json.dumps(places(trainer)))

        return on_rank

    with RankProcesses(main("first", KillAt(5))) as ranks:
        ranks.wait(seconds=60)
    with RankProcesses(main("second")) as ranks:
        ended = ranks.wait(seconds=60)
    assert [each.exit_code for each in ended] == [0, 0], ended[0].output
    assert "Resumed exactly" in ended[0].output
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["default_root_dir"] == found["log_dir"] == f"{tmp_path}/first"
        assert found["dirpaths"] == [f"{tmp_path}/first/checkpoints", f"{tmp_path}/first/all"]
        assert all(found["are_there"])
    assert files_below(tmp_path / "second") == []

"""``validate``, ``test``, and ``predict``: killed at any batch and started again, they return the same results."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter, BatchSizeFinder, ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.testing.processes import run_ranks
from lightning_faulttolerant.trainer.evaluation.evaluation_resume import EvaluationState
from lightning_faulttolerant.trainer.evaluation.validation import ValidationRun
from lightning_faulttolerant.trainer.loaders.trackers import user_loader
from lightning_faulttolerant.trainer.resume import choice
from tests.data_sets import NoisyDataset
from tests.processes import run
from tests.runs import Net, make_trainer
from tests.sharded import ShardedNet, fsdp2

pytestmark = [
    pytest.mark.filterwarnings("ignore:Your `(val|test|predict)_dataloader`'s sampler has shuffling enabled"),
    pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders"),
    pytest.mark.filterwarnings("ignore:It is recommended to use .self.log"),
]

EVALUATIONS = ("validate", "test", "predict")
ALWAYS = {"train_time_interval": timedelta(microseconds=1)}
"""An autosave before each batch."""


class Strike(Callback):
    """Sends a signal in a batch of one function, counted over all of its batches: a resume restores the count."""

    def __init__(self, function: str, batch: int, signum: int = signal.SIGTERM) -> None:
        self.function, self.batch, self.signum = function, batch, signum
        self.seen = -1

    def on_test_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.state.fn == self.function:
            self.seen += 1
            if self.seen == self.batch:
                os.kill(os.getpid(), self.signum)

    on_validation_batch_start = on_predict_batch_start = on_train_batch_start = on_test_batch_start


class Judge(Net):
    """Draws in each step; keeps its results in a list, a metric, and logged values. Counts the calls of its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()
        self.outputs: list[float] = []
        self.calls: list[str] = []

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        value = self.layers(batch).square().mean() + torch.rand(())
        self.outputs.append(value.item())
        self.metric.update(value)
        self.log("loss of a batch", value, on_step=True, on_epoch=True)
        self.log("metric", self.metric)

    validation_step = test_step

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        return {"value": self.layers(batch).flatten() + torch.rand(()), "batch": (batch_idx, dataloader_idx)}

    def on_test_start(self) -> None:
        self.calls.append("start")

    def on_test_epoch_end(self) -> None:
        self.log("listed", sum(self.outputs) / max(len(self.outputs), 1))
        self.log("starts", float(self.calls.count("start")))

    on_validation_start = on_predict_start = on_test_start
    on_validation_epoch_end = on_test_epoch_end


def loader(num_workers: int = 0, *, size: int = 20, **arguments: Any) -> DataLoader[Tensor]:
    """Return a loader of 5 noisy batches."""
    return DataLoader(NoisyDataset(size), batch_size=4, num_workers=num_workers, **arguments)


def two_loaders(num_workers: int = 0) -> list[DataLoader[Tensor]]:
    """Return a loader of 5 batches and one of 3, which shuffles."""
    return [loader(num_workers), loader(num_workers, size=12, shuffle=True)]


Main = Callable[[list[Callback], Path], object]


def evaluation(
    function: str,
    *,
    loaders: Callable[[], Any] = two_loaders,
    module: Callable[[], LightningModule] = Judge,
    users: Callable[[], list[Callback]] = list,
    **arguments: Any,
) -> Main:
    """Return a script that evaluates, and returns what the Trainer returns and everything that it has left."""

    def main(callbacks: list[Callback], directory: Path) -> object:
        logger = CSVLogger(directory, flush_logs_every_n_steps=1)
        trainer = make_trainer([*users(), *callbacks], directory, logger=logger, **arguments)
        one = module()
        results = getattr(trainer, function)(one, loaders())
        return results, left_by(trainer, one)

    return main


def left_by(trainer: Trainer, module: LightningModule) -> object:
    """Return the state of the process and of the module after an evaluation."""
    metrics = [dict(values) for values in (trainer.callback_metrics, trainer.logged_metrics)]
    return torch.rand(3), module.state_dict(), getattr(module, "outputs", None), metrics, module.training


def ended(main: Main, directory: Path, callbacks: Callable[[], list[Callback]] = list) -> tuple[int, str]:
    """Run a script in its own process. Return its exit code and its output; its result is in a file."""
    directory.mkdir(exist_ok=True)
    result = run(lambda: torch.save(main(callbacks(), directory), directory / "result.pt"))
    return result.exit_code, result.output


def assert_continues(
    main: Main, tmp_path: Path, *strikes: Strike, resumes: bool = True, finishes: bool = True, **options: Any
) -> list[str]:
    """Check that a script that is struck returns what it returns without us, and logs the same. Return the outputs."""
    whole, struck = tmp_path / "whole", tmp_path / "struck"
    code, output = ended(main, whole)
    assert code == 0, output
    options = {**ALWAYS, "dirpath": tmp_path / "autosaves", **options}
    outputs = []
    for number, strike in enumerate((*strikes, None)):
        own = [] if strike is None else [strike]
        code, output = ended(main, struck, lambda own=own: [FaultTolerance(**options), *own])  # type: ignore[misc]
        outputs.append(output)
        expected = 0 if strike is None else -signal.SIGKILL if strike.signum == signal.SIGKILL else 128 + strike.signum
        assert code == expected, output
        assert not number or ("Resumed exactly" in output) == resumes, output
        assert "NOT EXACT" not in output
    expected_result, result = (torch.load(path / "result.pt", weights_only=False) for path in (whole, struck))
    torch.testing.assert_close(result, expected_result, rtol=0, atol=0, equal_nan=True)
    logs = [{str(log.relative_to(run)): log.read_text() for log in run.rglob("metrics.csv")} for run in (whole, struck)]
    assert logs[1] == logs[0]
    left = [name for suffix in ("ckpt", "pt") for name in (tmp_path / "autosaves").rglob(f"*.{suffix}")]
    assert bool(left) != finishes
    return outputs


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("batches", [(0, 4, 7), (3, 5)], ids=str)
@pytest.mark.parametrize("function", EVALUATIONS)
def test_struck(function: str, batches: tuple[int, ...], signum: int, tmp_path: Path) -> None:
    """Results, metrics, lists, draws, and logged rows are those of the uninterrupted script."""
    assert_continues(evaluation(function), tmp_path, *(Strike(function, batch, signum) for batch in batches))


@pytest.mark.parametrize("function", EVALUATIONS)
@pytest.mark.parametrize(
    "loaders",
    [lambda: loader(2), lambda: loader(2, shuffle=True, persistent_workers=True), lambda: two_loaders(2)],
    ids=["workers", "persistent", "two"],
)
def test_workers(function: str, loaders: Callable[[], Any], tmp_path: Path) -> None:
    """Workers continue with their random states."""
    assert_continues(evaluation(function, loaders=loaders), tmp_path, Strike(function, 2), Strike(function, 4))


@pytest.mark.parametrize("function", EVALUATIONS)
def test_struck_again(function: str, tmp_path: Path) -> None:
    """An evaluation that continues can be struck again, also before it has done a batch."""
    strikes = [Strike(function, batch, signum) for batch, signum in ((1, 15), (2, 9), (2, 15), (4, 9))]
    assert_continues(evaluation(function), tmp_path, *strikes)


def test_limited_and_interrupted(tmp_path: Path) -> None:
    """``limit_test_batches`` and Ctrl-C."""
    main = evaluation("test", loaders=loader, limit_test_batches=4)
    assert_continues(main, tmp_path, Strike("test", 1, signal.SIGINT))


def test_bars(tmp_path: Path) -> None:
    """A bar starts without the hook at the start of the evaluation."""
    for users in (list, lambda: [RichProgressBar()]):
        directory = tmp_path / f"{len(users())}"
        directory.mkdir()
        main = evaluation("test", users=users, enable_progress_bar=True)
        assert_continues(main, directory, Strike("test", 6))


def fit_test_predict(callbacks: list[Callback], directory: Path) -> object:
    """Fit, validate, test, and predict with one trainer."""
    trainer = make_trainer(callbacks, directory, logger=CSVLogger(directory))
    module = Judge()
    trainer.fit(module, loader(shuffle=True), loader())
    results = [trainer.validate(module, loader()), trainer.test(module, two_loaders())]
    return [*results, trainer.predict(module, two_loaders()), left_by(trainer, module)]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("struck", ["fit", *EVALUATIONS])
def test_a_whole_script(struck: str, signum: int, tmp_path: Path) -> None:
    """A script that fits, validates, tests, and predicts resumes in the one that was struck."""
    outputs = assert_continues(fit_test_predict, tmp_path, Strike(struck, 2, signum))
    finished = ["fit", *EVALUATIONS].index(struck)
    assert outputs[-1].count("Resumed exactly after the end of") == finished


def test_finished_before_another_is_struck(tmp_path: Path) -> None:
    """A finished evaluation is not run again: its results come from its autosave."""

    def main(callbacks: list[Callback], directory: Path) -> object:
        trainer, module = make_trainer(callbacks, directory, logger=CSVLogger(directory)), Judge()
        found = [trainer.test(module, two_loaders()), trainer.predict(module, loader()), trainer.test(module, loader())]
        return found, left_by(trainer, module)

    strikes = [Strike("predict", 1, signal.SIGKILL), Strike("test", 1)]
    outputs = assert_continues(main, tmp_path, *strikes)
    assert outputs[-1].count("Resumed exactly after the end of test") == 1
    assert outputs[-1].count("Resumed exactly after the end of predict") == 1


class OpensAFile(Judge):
    """Does more than set attributes at its start."""

    def on_test_start(self) -> None:
        self.file = open(os.devnull, "w")  # noqa: SIM115
        self.calls.append("start")


class StrikeAtEnd(Strike):
    """Kills the process after the last batch, once."""

    def on_test_end(self, *_: Any) -> None:
        os.kill(os.getpid(), self.signum)


@pytest.mark.parametrize("module", [Judge, OpensAFile], ids=["continues", "is repeated"])
def test_rows_after_the_last_autosave(module: type[Judge], tmp_path: Path) -> None:
    """Rows that loggers have written since the autosave, or since the start, come once."""
    resumes = module is Judge
    assert_continues(
        evaluation("test", module=module), tmp_path, StrikeAtEnd("test", 99, signal.SIGKILL), resumes=resumes
    )


def kill_here(callbacks: list[Callback]) -> None:
    """Kill the process between two functions of the Trainer, if a callback says so."""
    for one in callbacks:
        if isinstance(one, Strike) and one.function == "between":
            os.kill(os.getpid(), one.signum)


class Fails(Judge):
    """Raises in a batch of a test."""

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().test_step(batch, batch_idx, dataloader_idx)
        if batch_idx == 3:
            raise ValueError("no such sample")


class LogsTheFailure(Callback):
    """Logs a row after an exception."""

    def on_exception(self, trainer: Trainer, module: Any, exception: BaseException) -> None:
        if isinstance(exception, ValueError):
            assert trainer.logger is not None
            trainer.logger.log_metrics({"failed": 1.0}, step=99)
            trainer.logger.save()


@pytest.mark.parametrize("strike", [("between", 0), ("predict", 2)], ids=str)
def test_an_exception_that_the_script_catches(strike: tuple[str, int], tmp_path: Path) -> None:
    """The next start enters that test again, where it raises again; its rows come once. Its autosaves stay."""

    def main(callbacks: list[Callback], directory: Path) -> object:
        logger = CSVLogger(directory, flush_logs_every_n_steps=1)
        trainer, module = make_trainer([LogsTheFailure(), *callbacks], directory, logger=logger), Fails()
        with contextlib.suppress(ValueError):
            trainer.test(module, loader())
        kill_here(callbacks)
        return trainer.predict(module, loader()), left_by(trainer, module)

    assert_continues(main, tmp_path, Strike(*strike, signal.SIGKILL), finishes=False)


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_fit_after_a_finished_one(evaluates: bool, tmp_path: Path) -> None:
    """A second fit of the same Trainer begins as after a first one that ran: with a sanity check."""

    def main(callbacks: list[Callback], directory: Path) -> object:
        trainer, module = make_trainer(callbacks, directory, max_epochs=1), Judge()
        trainer.fit(module, loader(shuffle=True), loader())
        if evaluates:
            trainer.validate(module, loader())
        kill_here(callbacks)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, loader(shuffle=True), loader())
        return left_by(trainer, module)

    assert_continues(main, tmp_path, Strike("between", 0, signal.SIGKILL))


def test_a_best_checkpoint_that_is_gone(tmp_path: Path) -> None:
    """A finished test of a checkpoint that a later fit has replaced is restored without it."""

    def main(callbacks: list[Callback], directory: Path) -> object:
        kept = ModelCheckpoint(dirpath=directory / "kept")
        trainer = make_trainer([*callbacks, kept], directory, max_epochs=1, enable_checkpointing=True)
        module, results = Judge(), []
        for epochs in (1, 2):
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(module, loader(shuffle=True), loader())
            results.append(trainer.test(module, loader(), ckpt_path="best"))
        return results, left_by(trainer, module)

    assert_continues(main, tmp_path, Strike("test", 7, signal.SIGKILL))


class MakesABuffer(Judge):
    """Has a buffer that each test step replaces, in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().test_step(batch, batch_idx, dataloader_idx)
        self.mean = 0.9 * self.mean + 0.1 * batch.mean()


def test_tensors_of_inference_mode(tmp_path: Path) -> None:
    """A test may begin with tensors that an earlier one has made in inference mode."""

    def main(callbacks: list[Callback], directory: Path) -> object:
        trainer, module = make_trainer(callbacks, directory), MakesABuffer()
        results = [trainer.test(module, loader()) for _ in range(2)]
        return results, left_by(trainer, module)

    assert_continues(main, tmp_path, Strike("test", 2), Strike("test", 8, signal.SIGKILL))


@pytest.mark.parametrize("changed", ["limit_test_batches", "scale"])
def test_another_start_starts_over(changed: str, tmp_path: Path) -> None:
    """A test of another limit, or of a module with another number, is another one."""

    def main(value: float) -> Main:
        def with_value(callbacks: list[Callback], directory: Path) -> object:
            limit = value if changed == "limit_test_batches" else 1.0
            module = Judge()
            module.scale = value  # type: ignore[assignment]
            return make_trainer(callbacks, directory, limit_test_batches=limit).test(module, loader())

        return with_value

    options = {**ALWAYS, "dirpath": tmp_path / "autosaves", "run_id": "run"}
    assert ended(main(1.0), tmp_path, lambda: [FaultTolerance(**options), Strike("test", 2)])[0] == 143
    code, output = ended(main(0.6), tmp_path, lambda: [FaultTolerance(**options)])
    assert code == 0, output
    assert "This test starts over: " in output
    assert "Resumed" not in output
    result = torch.load(tmp_path / "result.pt")
    assert ended(main(0.6), tmp_path / "alone")[0] == 0
    assert result == torch.load(tmp_path / "alone" / "result.pt")


class Writer(BasePredictionWriter):
    """Writes one file for each batch, and one at the end."""

    def __init__(self, directory: Path, interval: str) -> None:
        super().__init__(interval)  # type: ignore[arg-type]
        self.directory = directory

    def write_on_batch_end(
        self, trainer: Trainer, module: Any, prediction: Any, batch_indices: Any, batch: Any, batch_idx: int,
        dataloader_idx: int,
    ) -> None:  # fmt: skip
        path = self.directory / f"{dataloader_idx}-{batch_idx}.pt"
        number = 1 + torch.load(path)[0] if path.exists() else 1
        torch.save((number, prediction, list(batch_indices)), path)

    def write_on_epoch_end(self, trainer: Trainer, module: Any, predictions: Any, batch_indices: Any) -> None:
        torch.save((predictions, list(batch_indices)), self.directory / "all.pt")


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("interval", ["batch", "epoch", "batch_and_epoch"])
def test_prediction_writers(interval: str, num_workers: int, tmp_path: Path) -> None:
    """A writer is called once for each batch, with its indices, and at the end with all predictions."""

    def main(callbacks: list[Callback], directory: Path) -> object:
        trainer = make_trainer([*callbacks, Writer(directory, interval)], directory)
        trainer.predict(Judge(), two_loaders(num_workers), return_predictions=False)
        return {path.name: torch.load(path) for path in sorted(directory.glob("*.pt")) if path.name != "result.pt"}

    assert_continues(main, tmp_path, Strike("predict", 2), Strike("predict", 6))


class BatchNormTest(Judge):
    """Adapts its batch norms to the test data."""

    def on_test_model_eval(self) -> None:
        self.train()


def test_weights_that_change(tmp_path: Path) -> None:
    """Buffers that a test changes, and dropout that stays on."""
    assert_continues(evaluation("test", module=BatchNormTest), tmp_path, Strike("test", 4, signal.SIGKILL))


def test_repeated(tmp_path: Path) -> None:
    """A test whose start a new process would lack is run from its start; nothing is saved inside it."""
    outputs = assert_continues(
        evaluation("test", module=OpensAFile), tmp_path, Strike("test", 4), Strike("test", 4, signal.SIGKILL),
        resumes=False,
    )  # fmt: skip
    assert "The next start repeats all of it: a hook at its start may have done" in outputs[0]


class Rows:
    """An iterable that is no DataLoader: its place is not known."""

    def __iter__(self) -> Any:
        yield from torch.arange(20.0).reshape(5, 1, 4)


@pytest.mark.parametrize("is_finished", [False, True], ids=["interrupted", "finished"])
def test_other_data_start_over(is_finished: bool, tmp_path: Path) -> None:
    """A test of other batches is another one. It is not refused, whether it was interrupted or finished."""

    def main(batch_size: int) -> Main:
        def of_size(callbacks: list[Callback], directory: Path) -> object:
            results = make_trainer(callbacks, directory).test(
                Judge(), DataLoader(NoisyDataset(20), batch_size=batch_size)
            )
            if is_finished and batch_size == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            return results

        return of_size

    options = {**ALWAYS, "dirpath": tmp_path / "autosaves", "run_id": "run"}
    first, expected = ([], -9) if is_finished else ([Strike("test", 2)], 143)
    assert ended(main(4), tmp_path, lambda: [FaultTolerance(**options), *first])[0] == expected
    code, output = ended(main(2), tmp_path, lambda: [FaultTolerance(**options)])
    assert code == 0, output
    assert "This test starts over: " in output
    assert "test/0.batch_size: 4 when it was saved, 2 now" in output
    result = torch.load(tmp_path / "result.pt")
    assert ended(main(2), tmp_path / "alone")[0] == 0
    assert result == torch.load(tmp_path / "alone" / "result.pt")


def test_a_loader_that_cannot_be_followed(tmp_path: Path) -> None:
    """Such a loader is not refused, as in a fit. The evaluation runs as it is, and from its start."""
    outputs = assert_continues(evaluation("predict", loaders=Rows), tmp_path, Strike("predict", 2), resumes=False)
    assert "can't be resumed exactly" not in outputs[0]
    assert "The next start repeats all of it: the position of a loader can't be saved" in outputs[0]


class Unsized(IterableDataset[Tensor]):
    """Has no length, and draws for each row."""

    def __iter__(self) -> Any:
        for row in range(20):
            yield torch.full((4,), row / 20) + 0.1 * torch.randn(4)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("function", ["test", "predict"])
def test_without_a_length(function: str, num_workers: int, tmp_path: Path) -> None:
    """The batch that Lightning has fetched ahead is fetched again."""
    main = evaluation(function, loaders=lambda: DataLoader(Unsized(), batch_size=4, num_workers=num_workers))
    assert_continues(main, tmp_path, Strike(function, 0), Strike(function, 2, signal.SIGKILL), Strike(function, 4))


def test_other_weights_start_over(tmp_path: Path) -> None:
    """An evaluation of other weights is another one: the autosaves are set aside."""

    def main(weight: float) -> Main:
        def of_weight(callbacks: list[Callback], directory: Path) -> object:
            module = Judge()
            module.layers[0].bias.data[0] = weight
            return make_trainer(callbacks, directory).test(module, loader())

        return of_weight

    options = {**ALWAYS, "dirpath": tmp_path / "autosaves", "run_id": "run"}
    assert ended(main(1.0), tmp_path, lambda: [FaultTolerance(**options), Strike("test", 2)])[0] == 143
    code, output = ended(main(2.0), tmp_path, lambda: [FaultTolerance(**options)])
    assert code == 0, output
    assert "This test starts over: it begins with different weights." in output
    result = torch.load(tmp_path / "result.pt")
    assert ended(main(2.0), tmp_path / "alone")[0] == 0
    assert result == torch.load(tmp_path / "alone" / "result.pt")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_directory_that_cannot_be_written(num_ranks: int, tmp_path: Path) -> None:
    """An evaluation that can't be saved runs as it is, and says so."""
    (tmp_path / "file").touch()
    outputs = [tmp_path / f"rank-{rank}.txt" for rank in range(num_ranks)]

    def of_rank(rank: int) -> None:
        ranks: dict[str, Any] = {"devices": num_ranks, "strategy": "ddp"} if num_ranks > 1 else {}
        trainer = make_trainer([FaultTolerance(dirpath=tmp_path / "file" / "autosaves")], tmp_path, **ranks)
        for function in ("test", "predict"):
            getattr(trainer, function)(Judge(), loader())

    assert run_ranks(of_rank, outputs=outputs, seed=1, timeout_seconds=60) == 0, outputs[0].read_text()
    assert "This test can't be resumed if it is interrupted" in outputs[0].read_text()


@pytest.mark.slow
def test_a_look_at_the_autosaves_that_fails_on_one_rank(tmp_path: Path) -> None:
    """An evaluation whose autosave a rank can't read runs as it is, on all ranks, and says so."""
    outputs = [tmp_path / f"rank-{rank}.txt" for rank in range(2)]

    def start(*callbacks: Callback, readable: bool = True) -> int:
        def of_rank(rank: int) -> None:
            with pytest.MonkeyPatch.context() as patch:
                if rank == 1 and not readable:
                    patch.setattr(choice.RankReader, "load", lambda *_, **__: Path("/no/such/file").read_bytes())
                own = FaultTolerance(dirpath=tmp_path / "autosaves", run_id="run", overhead_budget=1.0)
                trainer = make_trainer([own, *callbacks], tmp_path, devices=2, strategy="ddp")
                trainer.test(Judge(), loader())

        return run_ranks(of_rank, outputs=outputs, seed=1, timeout_seconds=120)

    assert start(Strike("test", 2)) == 143, outputs[0].read_text()
    assert start(readable=False) == 0, outputs[0].read_text()
    assert "This test can't be resumed if it is interrupted" in outputs[0].read_text()
    assert "rank 1: FileNotFoundError" in outputs[0].read_text()


class Sized(LightningDataModule):
    """Has a batch size that a finder may set."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def test_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(NoisyDataset(20), batch_size=self.batch_size)


class KilledOnce(Judge):
    """Kills its process after the finder, in the third batch, once."""

    def __init__(self, mark: Path | None) -> None:
        super().__init__()
        self.mark = mark

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().test_step(batch, batch_idx, dataloader_idx)
        if self.mark is not None and batch_idx == 2 and not self.mark.exists():  # trials have one batch
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_batch_size_finder(tmp_path: Path) -> None:
    """A finder runs the loop several times before the evaluation: nothing is saved, and the results are the same."""

    def main(callbacks: list[Callback], directory: Path) -> object:
        finder = BatchSizeFinder(mode="power", max_trials=2, steps_per_trial=1)
        trainer, data = make_trainer([*callbacks, finder], directory), Sized()
        module = KilledOnce(directory / "killed" if callbacks else None)
        return trainer.test(module, data), data.batch_size

    def ours() -> list[Callback]:
        return [FaultTolerance(dirpath=tmp_path / "autosaves", **ALWAYS)]  # type: ignore[arg-type]

    whole, struck = tmp_path / "whole", tmp_path / "struck"
    assert ended(main, whole)[0] == 0
    assert ended(main, struck, ours)[0] == -signal.SIGKILL
    code, output = ended(main, struck, ours)
    assert code == 0, output
    assert torch.load(struck / "result.pt") == torch.load(whole / "result.pt")
    assert not (tmp_path / "autosaves").exists()


@dataclass
class Prediction:
    """A user's own kind of prediction."""

    value: Tensor


class PredictsObjects(Judge):
    """Returns objects, which autosaves keep as bytes."""

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return Prediction(self.layers(batch).flatten() + torch.rand(()))


def test_predictions_that_are_objects(tmp_path: Path) -> None:
    """They come back from files that hold them as bytes, if the directory is trusted; if not, nothing is saved."""

    def main(callbacks: list[Callback], directory: Path) -> object:
        found = make_trainer(callbacks, directory).predict(PredictsObjects(), loader())
        return [one.value for one in found if isinstance(one, Prediction)]

    assert_continues(main, tmp_path, Strike("predict", 3, signal.SIGKILL))
    directory = tmp_path / "other"
    directory.mkdir()
    code, output = ended(main, directory, lambda: [FaultTolerance(**ALWAYS, trust_autosaves=False)])  # type: ignore[arg-type]
    assert code == 0, output
    assert "could not be saved: UnsafeCheckpointError" in output


class Slow(Judge):
    """Gives the ranks time to agree on a batch."""

    def on_test_batch_start(self, *_: Any) -> None:
        time.sleep(0.01)

    on_validation_batch_start = on_predict_batch_start = on_test_batch_start


def assert_ranks_continue(
    function: str,
    make: Callable[[list[Callback], Path], Trainer],
    tmp_path: Path,
    signum: int,
    module: Callable[[], LightningModule] = Slow,
) -> None:
    """Check that an evaluation of two ranks continues after a signal to both, in batch 6."""

    def evaluate(callbacks: list[Callback], directory: Path) -> object:
        trainer, one = make(callbacks, directory), module()
        return getattr(trainer, function)(one, loader(size=240)), left_by(trainer, one)

    strike = Strike(function, 6, signum)
    told = assert_equal_on_ranks(evaluate, tmp_path, strike)
    assert "Resumed exactly before batch" in told


def assert_equal_on_ranks(evaluate: Main, tmp_path: Path, strike: Strike) -> str:
    """Check that two ranks that are struck return what they return without us. Return rank 0's last output."""
    outputs = [tmp_path / f"rank-{rank}.txt" for rank in range(2)]

    def start(directory: Path, callbacks: Callable[[], list[Callback]]) -> int:
        def of_rank(rank: int) -> None:
            torch.save(evaluate(callbacks(), directory), directory / f"result-{rank}.pt")

        directory.mkdir(exist_ok=True)
        return run_ranks(of_rank, outputs=outputs, seed=1, timeout_seconds=60)

    whole, struck = tmp_path / "whole", tmp_path / "struck"
    options = {**ALWAYS, "dirpath": tmp_path / "autosaves"}
    assert start(whole, list) == 0, outputs[0].read_text()
    code = start(struck, lambda: [FaultTolerance(**options), strike])
    assert code == (143 if strike.signum == signal.SIGTERM else -strike.signum), outputs[0].read_text()
    assert start(struck, lambda: [FaultTolerance(**options)]) == 0, outputs[0].read_text()
    for name in ("result-0.pt", "result-1.pt"):
        found, expected = (torch.load(path / name, weights_only=False) for path in (struck, whole))
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    return outputs[0].read_text()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("function", EVALUATIONS)
def test_two_ranks(function: str, signum: int, tmp_path: Path) -> None:
    """Both ranks stop before the same batch, or save before common ones, and each continues with its own state."""

    def make(callbacks: list[Callback], directory: Path) -> Trainer:
        return make_trainer(callbacks, directory, devices=2, strategy="ddp")

    assert_ranks_continue(function, make, tmp_path, signum)


class OfOneRank(Judge):
    """Logs a value of its rank, which nothing averages."""

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().test_step(batch, batch_idx, dataloader_idx)
        self.log("of this rank", float(self.global_rank) + batch_idx)


def test_ranks_with_different_numbers_of_batches(tmp_path: Path) -> None:
    """One rank is done earlier; the results of a finished test are those of each rank."""

    def evaluate(callbacks: list[Callback], directory: Path) -> object:
        arguments: dict[str, Any] = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
        trainer, module = make_trainer(callbacks, directory, **arguments), OfOneRank()
        size = 8 + 12 * trainer.global_rank
        results = [trainer.test(module, loader(size=size)), trainer.predict(module, loader(size=20))]
        return results, left_by(trainer, module)

    told = assert_equal_on_ranks(evaluate, tmp_path, Strike("predict", 2, signal.SIGKILL))
    assert "Resumed exactly after the end of test" in told


class ShardedJudge(ShardedNet, Judge):  # type: ignore[misc]
    """Its weights are in shards."""


@pytest.mark.parametrize("function", ["test", "predict"])
def test_sharded(function: str, tmp_path: Path) -> None:
    """A model in shards (FSDP2): its weights need not be saved."""

    def make(callbacks: list[Callback], directory: Path) -> Trainer:
        return make_trainer(callbacks, directory, devices=2, strategy=fsdp2())

    assert_ranks_continue(function, make, tmp_path, signal.SIGTERM, module=ShardedJudge)


class Adapts(ShardedJudge):
    """Changes a weight while it tests."""

    def on_test_batch_end(self, *_: Any) -> None:
        time.sleep(0.01)
        with torch.no_grad():
            self.layers[0].bias.mul_(0.99)


def test_weights_in_shards_that_change(tmp_path: Path) -> None:
    """Changed weights in shards are not saved: the test continues from the last autosave before the change."""
    output = tmp_path / "rank-0.txt"

    def of_rank(rank: int) -> None:
        ours = [FaultTolerance(dirpath=tmp_path / "autosaves", **ALWAYS), Strike("test", 6)]  # type: ignore[arg-type]
        make_trainer(ours, tmp_path, devices=2, strategy=fsdp2()).test(Adapts(), loader(size=240))

    assert run_ranks(of_rank, outputs=[output, tmp_path / "rank-1.txt"], seed=1, timeout_seconds=60) == 143
    assert (
        "The next start repeats the batches since its last autosave: it has changed weights that are in shards"
        in output.read_text()
    )
    assert "The state before batch 0 of test is saved in" in output.read_text()


WITHOUT = {"rng": "test", "metrics": "test", "results": "test", "loaders": "predict", "objects": "test", "held": ""}


@pytest.mark.parametrize("part", [name for name, function in WITHOUT.items() if function])
def test_without_a_part(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: without a part of the state, the results differ."""
    load = EvaluationState.load_state_dict
    monkeypatch.setattr(
        EvaluationState,
        "load_state_dict",
        lambda self, state: load(self, {name: value for name, value in state.items() if name != part}),
    )
    if part == "loaders":
        monkeypatch.setattr(ValidationRun, "num_consumed", lambda self: {})
    with pytest.raises(AssertionError):
        assert_continues(evaluation(WITHOUT[part]), tmp_path, Strike(WITHOUT[part], 6, signal.SIGKILL))


@pytest.mark.parametrize("function", EVALUATIONS)
def test_nothing_stays_after_a_resume(function: str, tmp_path: Path) -> None:
    """After an evaluation that continued, the loop has no method but its own."""

    def main(callbacks: list[Callback], directory: Path) -> object:
        trainer = make_trainer(callbacks, directory)
        getattr(trainer, function)(Judge(), two_loaders())
        loop = getattr(trainer, f"{function}_loop")
        return {name: 1 for name, value in vars(loop).items() if isinstance(value, types.FunctionType)}

    assert_continues(main, tmp_path, Strike(function, 6))


def test_nothing_stays(tmp_path: Path) -> None:
    """After an evaluation, the loops, the loaders, and the signals are as they were."""
    before, given = signal.getsignal(signal.SIGTERM), two_loaders()
    trainer = make_trainer([FaultTolerance(dirpath=tmp_path / "autosaves")], tmp_path)
    for function in EVALUATIONS:
        getattr(trainer, function)(Judge(), given)
        loop = getattr(trainer, f"{function}_loop")
        assert not {"run", "reset", "setup_data", "on_run_start"} & vars(loop).keys()
        assert all(type(one) is DataLoader and user_loader(one) is one for one in loop._combined_loader.flattened)
    assert signal.getsignal(signal.SIGTERM) == before

"""The law for library objects as users hold them: they have state, and no ``state_dict``."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from ema_pytorch import EMA
from lightning.pytorch import Callback, LightningModule
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroSample
from pytorch_metric_learning import losses, samplers
from scipy import sparse, stats
from scipy.stats import qmc
from torch import Tensor, nn
from torch.quasirandom import SobolEngine
from torch.utils.data import DataLoader
from torch_ema import ExponentialMovingAverage
from torchmetrics import MeanMetric, MetricTracker

from tests.data_sets import NoisyDataset
from tests.object_states import EDGE, FIRST_EPOCH, LATER_EPOCH, STOPPED, Own, assert_carried, slowly
from tests.runs import Net

each_cut = pytest.mark.parametrize("fault", [LATER_EPOCH, *map(slowly, (FIRST_EPOCH, EDGE, STOPPED))])
each_cut_slowly = pytest.mark.parametrize("fault", list(map(slowly, (FIRST_EPOCH, LATER_EPOCH, EDGE, STOPPED))))
each_num_workers = pytest.mark.parametrize("num_workers", [0, slowly(pytest.param(2, id="2"))])


class Metric(Net):
    """Compares its embeddings with those of earlier batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 8)
        self.contrast = losses.CrossBatchMemory(losses.ContrastiveLoss(), embedding_size=8, memory_size=16)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.contrast(self.net(batch), torch.arange(len(batch)) % 2)
        self.log("loss", loss)
        self.log("place", float(self.contrast.queue_idx))
        return loss


@each_cut
def test_memory_of_embeddings(fault: Callback) -> None:
    """A queue of pytorch-metric-learning continues with its embeddings and its position."""
    assert_carried(fault, module=Metric)


@each_num_workers
@each_cut_slowly
def test_sampler_that_shuffles_in_place(fault: Callback, num_workers: int) -> None:
    """The arrays that a sampler of pytorch-metric-learning shuffles in place keep their order."""

    def train() -> DataLoader:
        sampler = samplers.MPerClassSampler(np.arange(20) % 5, m=2, batch_size=4, length_before_new_iter=20)
        return DataLoader(NoisyDataset(20), batch_size=4, sampler=sampler, num_workers=num_workers)

    assert_carried(fault, train=train)


class Averages(Own):
    """Validates with an average of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.average = ExponentialMovingAverage(self.layers.parameters(), decay=0.9)

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update()

    def on_validation_epoch_start(self) -> None:
        self.average.store()
        self.average.copy_to()

    def on_validation_epoch_end(self) -> None:
        self.average.restore()


class AveragesBeside(Callback):
    """Does the same with an average outside the module."""

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.average = ExponentialMovingAverage(pl_module.parameters(), decay=0.9)

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update()

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        with self.average.average_parameters():
            pl_module.log("sum", sum(p.sum() for p in pl_module.parameters()))


@each_cut
def test_average_of_weights(fault: Callback) -> None:
    """An average of torch_ema in the module continues."""
    assert_carried(fault, module=Averages)


@each_cut_slowly
def test_average_of_weights_in_a_callback(fault: Callback) -> None:
    """An average of torch_ema that a callback creates at the start continues."""
    assert_carried(fault, users=lambda: [AveragesBeside()])


class Follows(Own):
    """Is scaled by an average of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.average = EMA(self.layers, beta=0.9, update_after_step=2, update_every=2, include_online_model=False)

    def factor(self, loss: Tensor) -> float:
        return 1 + float(self.average.ema_model[0].weight.sum()) if self.average.initted else 1.0

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update()


@each_cut_slowly
def test_average_that_is_a_module(fault: Callback) -> None:
    """The average and the counters of ema_pytorch continue."""
    assert_carried(fault, module=Follows)


class Engines(Own):
    """Draws from SciPy's and torch's sequences and distributions."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = stats.norm(loc=1.0, scale=0.1)
        self.noise.random_state = np.random.default_rng(0)
        self.sobol, self.halton = qmc.Sobol(2, seed=0), qmc.Halton(2, seed=0)
        self.engine = SobolEngine(2, scramble=True, seed=3)

    def factor(self, loss: Tensor) -> float:
        drawn = float(self.noise.rvs() + self.sobol.random(2).sum() + self.halton.random(3).sum())
        return drawn + float(self.engine.draw(2).sum())


class EngineSet(NoisyDataset):
    """Draws from them for each sample."""

    def __init__(self) -> None:
        super().__init__(20)
        self.sobol, self.halton = qmc.Sobol(4, seed=0), qmc.Halton(4, seed=0)
        self.noise = stats.norm(0, 1)
        self.noise.random_state = np.random.default_rng(1)

    def __getitem__(self, index: int) -> Tensor:
        drawn = self.sobol.random(1)[0] + self.halton.random(1)[0] + self.noise.rvs()
        return super().__getitem__(index) + torch.tensor(drawn, dtype=torch.float32)


_HALTON = qmc.Halton(1, seed=0)


class FromGlobal(Own):
    """Draws from an engine at the top of its file."""

    def factor(self, loss: Tensor) -> float:
        return 1 + float(_HALTON.random(1).sum())


@each_cut
def test_engines(fault: Callback) -> None:
    """Sequences and frozen distributions that a module holds continue."""
    assert_carried(fault, module=Engines)


@each_cut_slowly
def test_engine_at_the_top_of_a_file(fault: Callback) -> None:
    """A sequence that is a global of the user's file continues."""
    assert_carried(fault, module=FromGlobal)


@each_num_workers
@each_cut_slowly
def test_engines_of_a_data_set(fault: Callback, num_workers: int) -> None:
    """The sequences of a data set continue in each worker."""
    loader: Callable[[], DataLoader] = lambda: DataLoader(  # noqa: E731
        EngineSet(), batch_size=4, shuffle=True, num_workers=num_workers
    )
    assert_carried(fault, train=loader)


class Matrices(Own):
    """Counts in sparse matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.by_row, self.by_key = sparse.lil_matrix((4, 4)), sparse.dok_matrix((4, 4))
        self.sum = sparse.csr_matrix((4, 4))

    def factor(self, loss: Tensor) -> float:
        place = int(loss.item() * 97) % 4
        self.by_row[place, 0] += 1
        self.by_key[place, 0] += 1
        self.sum = self.sum + sparse.eye(4).tocsr()
        return 1 + float(self.by_row[0, 0] + self.by_key[1, 0] + self.sum[0, 0])


@each_cut_slowly
def test_sparse_matrices(fault: Callback) -> None:
    """SciPy's sparse matrices that change in place, or are created again, continue; one holds lists in an array."""
    assert_carried(fault, module=Matrices)


class FirstUse(NoisyDataset):
    """Creates its generators on first use."""

    def __init__(self) -> None:
        super().__init__(20)
        self.generators: defaultdict[int, Any] = defaultdict(lambda: np.random.default_rng(0))
        self.others: defaultdict[int, random.Random] = defaultdict(lambda: random.Random(0))

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + float(self.generators[index % 3].normal()) + self.others[index % 2].random()


class FirstUseInSteps(Own):
    """Creates generators on first use in a module, one of them in a later epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.generators: defaultdict[int, Any] = defaultdict(lambda: np.random.default_rng(0))

    def factor(self, loss: Tensor) -> float:
        return 1 + abs(float(self.generators[self.global_step // 3].normal()))


@each_num_workers
@each_cut_slowly
def test_generators_on_first_use_in_a_data_set(fault: Callback, num_workers: int) -> None:
    """Generators that a ``defaultdict`` creates in a data set continue."""
    assert_carried(fault, train=lambda: DataLoader(FirstUse(), batch_size=4, shuffle=True, num_workers=num_workers))


@each_cut_slowly
def test_generators_on_first_use_in_a_module(fault: Callback) -> None:
    """Generators that a ``defaultdict`` creates in a module continue."""
    assert_carried(fault, module=FirstUseInSteps)


class Best(Callback):
    """Tracks its best epoch."""

    def __init__(self) -> None:
        self.tracker = MetricTracker(MeanMetric(), maximize=False)

    def on_train_epoch_start(self, *_: Any) -> None:
        self.tracker.increment()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.tracker.update(outputs["loss"].detach())

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        pl_module.log("best", float(self.tracker.best_metric()))
        pl_module.log("count", float(self.tracker.n_steps))


@each_cut_slowly
def test_tracker_in_a_callback(fault: Callback) -> None:
    """A ``MetricTracker`` that holds a copy of its metric for each epoch continues."""
    assert_carried(fault, users=lambda: [Best()], max_epochs=3)


class Variational(Own):
    """Trains the parameters in Pyro's global store with Pyro's own optimizers, one for each parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        pyro.clear_param_store()
        self.svi = SVI(self.model, self.guide, pyro.optim.Adam({"lr": 0.05}), loss=Trace_ELBO())

    def model(self, rows: Tensor) -> None:
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(rows)):
            pyro.sample("observed", dist.Normal(mean, 1.0), obs=rows.mean(1))

    def guide(self, rows: Tensor) -> None:
        place = pyro.param("place", lambda: torch.randn(()))
        scale = pyro.param("scale", torch.tensor(0.5), constraint=dist.constraints.positive)
        pyro.sample("mean", dist.Normal(place, scale))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        self.log("elbo", self.svi.step(batch))
        self.log("place", pyro.param("place").item())


class VariationalByTorch(Variational):
    """Trains the store with a torch optimizer."""

    def setup(self, stage: str) -> None:
        with torch.no_grad():
            Trace_ELBO().differentiable_loss(self.model, self.guide, torch.zeros(4, 4))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = Trace_ELBO().differentiable_loss(self.model, self.guide, batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("elbo", loss)
        self.log("place", pyro.param("place").item())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for _, p in pyro.get_param_store().named_parameters()], lr=0.05)


@each_cut
def test_variational_inference(fault: Callback) -> None:
    """Pyro's parameters continue, and so does the optimizer of each parameter."""
    assert_carried(fault, module=Variational)


@each_cut_slowly
def test_variational_inference_by_an_optimizer_of_torch(fault: Callback) -> None:
    """Pyro's parameters remain the ones that an optimizer trains."""
    assert_carried(fault, module=VariationalByTorch)


class Regression(PyroModule):
    """Draws its weights from a prior whose mean is one number, expanded to many."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = PyroModule[nn.Linear](4, 1)
        self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 4]).to_event(2))
        self.linear.bias = nn.Parameter(torch.zeros(1))

    def forward(self, rows: Tensor) -> Any:
        mean = self.linear(rows).squeeze(-1)
        with pyro.plate("data", len(rows)):
            return pyro.sample("observed", dist.Normal(mean, 1.0), obs=rows.sum(1))


class Guided(Own):
    """Trains a guide that Pyro creates."""

    def __init__(self) -> None:
        super().__init__()
        model = Regression()
        self.elbo = Trace_ELBO()(model, AutoNormal(model))
        self.elbo(torch.zeros(4, 4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.elbo(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, *_: Any) -> None:
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.elbo.parameters(), lr=0.05)


@each_cut_slowly
def test_guide(fault: Callback) -> None:
    """A prior's tensor that repeats one number, and equals a parameter, still allows a resume."""
    assert_carried(fault, module=Guided)

"""Objects of libraries as users hold them: they have state, and no ``state_dict``."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from ema_pytorch import EMA
from lightning.pytorch import LightningDataModule
from pyro.infer import SVI, Trace_ELBO
from pytorch_metric_learning import losses, samplers
from scipy import sparse, stats
from scipy.stats import qmc
from torch import Tensor, nn
from torch.quasirandom import SobolEngine
from torch.utils.data import DataLoader, IterableDataset
from torch_ema import ExponentialMovingAverage

from tests.data_sets import NoisyDataset
from tests.laws.rows import Factor, Net, carried, row, rows_of


@row("module", part="objects", shows="place_in_memory")
class MemoryOfEmbeddings(Net):
    """Compares its embeddings with those of earlier batches, in a queue of pytorch-metric-learning."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.contrast = losses.CrossBatchMemory(losses.ContrastiveLoss(), embedding_size=8, memory_size=100)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.contrast(self.embed(batch[:4]), torch.arange(len(batch[:4])) % 2)
        self.log("place_in_memory", float(self.contrast.queue_idx))
        return super().training_step(batch, batch_idx) + loss


@row("train", part="loaders", shows="content")
def sampler_of_classes() -> DataLoader:
    """A sampler of pytorch-metric-learning shuffles its arrays in place."""
    sampler = samplers.MPerClassSampler(np.arange(24) % 6, m=2, batch_size=4, length_before_new_iter=24)
    return DataLoader(NoisyDataset(24), batch_size=4, sampler=sampler)


@row("module", part="objects", shows="sum_of_average", takes="layers")
class AverageOfWeights(Net):
    """Validates with an average of torch_ema, and swaps it in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.average = ExponentialMovingAverage(self.layers.parameters(), decay=0.9)

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        self.average.update()
        self.log("sum_of_average", sum(float(each.sum()) for each in self.average.shadow_params))

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self.average.store()
        self.average.copy_to()

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.average.restore()


@row("module", takes="layers")
class AverageThatIsAModule(Net):
    """Is scaled by an average of itself, of ema_pytorch, with counters."""

    def __init__(self) -> None:
        super().__init__()
        self.ema = EMA(self.layers, beta=0.9, update_after_step=2, update_every=2, include_online_model=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        scale = self.ema.ema_model[0].weight.sum().tanh() if self.ema.initted else 0.0
        return super().training_step(batch, batch_idx) * (1 + scale)

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        self.ema.update()


HALTON = qmc.Halton(1, seed=0)


@row("module", part="objects", shows=("drawn_by_scipy", "drawn_by_engine"))
class Engines(Net):
    """Sequences and frozen distributions of SciPy and torch, in a module and at the top of a file."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen_noise = stats.norm(loc=1.0, scale=0.1)
        self.frozen_noise.random_state = np.random.default_rng(0)
        self.sobol, self.engine = qmc.Sobol(2, seed=0), SobolEngine(2, scramble=True, seed=3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        drawn = float(self.frozen_noise.rvs() + self.sobol.random(2).sum() + HALTON.random(1).sum())
        self.log_dict({"drawn_by_scipy": drawn, "drawn_by_engine": self.engine.draw(2).sum()})
        return super().training_step(batch + 0.1 * drawn, batch_idx)


class EngineSet(NoisyDataset):
    """Draws from sequences, and from generators that a ``defaultdict`` creates on first use, for each sample."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.halton, self.noise = qmc.Halton(4, seed=0), stats.norm(0, 1)
        self.noise.random_state = np.random.default_rng(1)
        self.on_first_use: defaultdict[int, Any] = defaultdict(lambda: random.Random(0))

    def __getitem__(self, index: int) -> Tensor:
        drawn = self.halton.random(1)[0] + self.noise.rvs() + self.on_first_use[index % 3].random()
        return super().__getitem__(index) + torch.tensor(drawn, dtype=torch.float32)


@row("train", part="objects", shows="content")
def engines_in_a_data_set() -> DataLoader:
    """A data set holds sequences of SciPy."""
    return DataLoader(EngineSet(24), batch_size=4, shuffle=True)


@row("train", part="loaders", shows="content")
def engines_in_workers() -> DataLoader:
    """Two workers hold sequences of SciPy."""
    return DataLoader(EngineSet(32), batch_size=4, shuffle=True, num_workers=2)


@carried
class SparseMatrices(Factor):
    """SciPy's sparse matrices that change in place, or are created again; one holds lists in an array."""

    def __init__(self) -> None:
        super().__init__()
        self.by_row, self.by_key = sparse.lil_matrix((4, 4)), sparse.dok_matrix((4, 4))
        self.sum_of_eyes = sparse.csr_matrix((4, 4))

    def factor(self, loss: Tensor) -> float:
        place = int(loss.item() * 97) % 4
        self.by_row[place, 0] += 1
        self.by_key[place, 0] += 1
        self.sum_of_eyes = self.sum_of_eyes + sparse.eye(4).tocsr()
        return 1 + float(self.by_row[0, 0] + self.by_key[1, 0] + self.sum_of_eyes[0, 0]) / 20


@row("module", part="objects", shows=("elbo", "place_of_guide"), takes="pyro")
class Variational(Net):
    """Trains the parameters in Pyro's global store with Pyro's own optimizers, one for each parameter."""

    def __init__(self) -> None:
        super().__init__()
        pyro.clear_param_store()
        self.svi = SVI(self.model_of_pyro, self.guide_of_pyro, pyro.optim.Adam({"lr": 0.05}), loss=Trace_ELBO())

    def model_of_pyro(self, rows: Tensor) -> None:
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(rows)):
            pyro.sample("observed", dist.Normal(mean, 1.0), obs=rows.mean(1))

    def guide_of_pyro(self, rows: Tensor) -> None:
        place = pyro.param("place", lambda: torch.randn(()))
        scale = pyro.param("scale", torch.tensor(0.5), constraint=dist.constraints.positive)
        pyro.sample("mean", dist.Normal(place, scale))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log_dict({"elbo": self.svi.step(batch), "place_of_guide": pyro.param("place").item()})
        return super().training_step(batch, batch_idx)


class Step(NamedTuple):
    """One step in the environment."""

    observation: np.ndarray[Any, Any]
    action: int
    reward: float


class Replayed(IterableDataset[Any]):
    """Draws steps from a buffer that training fills."""

    def __init__(self, steps: deque[Step]) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[Any]:
        for index in np.random.choice(len(self.steps), 24, replace=False):
            yield self.steps[index].observation


class Play(LightningDataModule):
    """Draws from the buffer of the module."""

    def train_dataloader(self) -> Any:
        return DataLoader(Replayed(self.trainer.lightning_module.played), batch_size=4)

    def val_dataloader(self) -> Any:
        return rows_of(8, shuffle=False)()


@row("module", part="objects", shows="reward_of_episode", data=Play)
class Plays(Net):
    """Plays CartPole of gymnasium in its step, and trains on a buffer of its play, which its loader draws from."""

    def __init__(self) -> None:
        super().__init__()
        self.environment = gymnasium.make("CartPole-v1")
        self.environment.action_space.seed(3)
        self.played: deque[Step] = deque(maxlen=60)
        self.observation, _ = self.environment.reset(seed=1)
        self.episode_reward = 0.0
        for _ in range(40):
            self.play()

    def play(self) -> None:
        action = int(self.environment.action_space.sample())
        new, reward, is_terminated, is_truncated, _ = self.environment.step(action)
        self.played.append(Step(self.observation, action, float(reward)))
        self.episode_reward += float(reward)
        if is_terminated or is_truncated:
            new, self.episode_reward = self.environment.reset()[0], 0.0
        self.observation = new

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.play()
        self.log("reward_of_episode", self.episode_reward + sum(float(step.observation.sum()) for step in self.played))
        return super().training_step(batch, batch_idx)

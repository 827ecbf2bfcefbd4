"""Objects of libraries as users hold them: they have state, and no ``state_dict``."""

from __future__ import annotations

from collections import deque

import gymnasium
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from scipy import stats
from scipy.stats import qmc
from torch import Tensor
from torch.quasirandom import SobolEngine

from tests.laws.rows import Net, row

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


@row("module", part="objects", shows="reward_of_episode")
class Plays(Net):
    """Plays CartPole of gymnasium in its step, and keeps what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.environment = gymnasium.make("CartPole-v1")
        self.observation, _ = self.environment.reset(seed=1)
        self.played, self.episode_reward = deque([self.observation], maxlen=20), 0.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.observation, reward, *ended, _ = self.environment.step(int(np.random.randint(2)))
        self.episode_reward += float(reward)
        self.played.append(self.observation)
        if any(ended):
            self.observation, self.episode_reward = self.environment.reset()[0], 0.0
        self.log("reward_of_episode", self.episode_reward + sum(float(each.sum()) for each in self.played))
        return super().training_step(batch + 0.1 * torch.from_numpy(self.observation), batch_idx)

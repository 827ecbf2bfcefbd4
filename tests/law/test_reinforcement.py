"""Reinforcement learning with gymnasium's CartPole, in the two ways of Lightning's examples.

The data set of each is the agent's play during training: from a replay buffer that every step fills (off policy), or
from episodes that are played under the current weights (on policy).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.faults import EVERY_STEP
from tests.object_states import EDGE, FIRST_EPOCH, LATER_EPOCH, RAISED, RAISED_BEHIND, STOPPED, slowly
from tests.runs import make_trainer


class Step(NamedTuple):
    """One step in the environment."""

    observation: np.ndarray[Any, Any]
    action: int
    reward: float
    is_done: bool
    next_observation: np.ndarray[Any, Any]


class ReplayBuffer:
    """Keeps the latest steps."""

    def __init__(self, capacity: int) -> None:
        self.steps: deque[Step] = deque(maxlen=capacity)

    def sample(self, num: int) -> tuple[np.ndarray[Any, Any], ...]:
        """Draw steps, and return their parts."""
        indices = np.random.choice(len(self.steps), num, replace=False)
        observations, actions, rewards, are_done, next_observations = zip(
            *(self.steps[i] for i in indices), strict=True
        )
        return (
            np.array(observations),
            np.array(actions),
            np.array(rewards, dtype=np.float32),
            np.array(are_done),
            np.array(next_observations),
        )


class Replayed(IterableDataset[Any]):
    """Yields the parts of one sample from the buffer."""

    def __init__(self, buffer: ReplayBuffer, num: int) -> None:
        self.buffer, self.num = buffer, num

    def __iter__(self) -> Iterator[Any]:
        yield from zip(*self.buffer.sample(self.num), strict=True)


class Agent:
    """Plays, and puts its steps into a buffer."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        self.environment = gymnasium.make("CartPole-v1")
        self.environment.action_space.seed(3)
        self.buffer = buffer
        self.state, _ = self.environment.reset(seed=1)

    @torch.no_grad()
    def play(self, network: nn.Module, epsilon: float) -> tuple[float, bool]:
        """Take one step: a random one, or the best known one."""
        if np.random.random() < epsilon:
            action = int(self.environment.action_space.sample())
        else:
            action = int(network(torch.from_numpy(self.state)).argmax())
        state, reward, is_terminated, is_truncated, _ = self.environment.step(action)
        is_done = is_terminated or is_truncated
        self.buffer.steps.append(Step(self.state, action, float(reward), is_done, state))
        self.state = self.environment.reset()[0] if is_done else state
        return float(reward), is_done


def network_of(num_outputs: int) -> nn.Sequential:
    """Return a small network over CartPole's four numbers."""
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, num_outputs))


class DeepQ(LightningModule):
    """Learns the values of actions from a replay buffer; a target network follows at intervals."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.target = network_of(2), network_of(2)
        self.buffer = ReplayBuffer(60)
        self.agent = Agent(self.buffer)
        self.total_reward = self.episode_reward = 0.0
        for _ in range(40):
            self.agent.play(self.network, epsilon=1.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        observations, actions, rewards, are_done, next_observations = batch
        reward, is_done = self.agent.play(self.network, max(0.1, 1.0 - self.global_step / 10))
        self.episode_reward += reward
        values = self.network(observations).gather(1, actions.long().unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            best = self.target(next_observations).max(1)[0]
            best[are_done] = 0.0
        loss = nn.functional.mse_loss(values, rewards + 0.99 * best)
        if is_done:
            self.total_reward, self.episode_reward = self.episode_reward, 0.0
        if self.global_step % 4 == 0:
            self.target.load_state_dict(self.network.state_dict())
        self.log_dict({"total_reward": self.total_reward, "episode_reward": self.episode_reward, "loss": loss})
        return loss

    def train_dataloader(self) -> Any:
        return DataLoader(Replayed(self.buffer, 20), batch_size=4)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.network.parameters(), lr=0.01)


class Played(IterableDataset[Any]):
    """Yields the samples of a function."""

    def __init__(self, generate: Callable[[], Iterator[Any]]) -> None:
        self.generate = generate

    def __iter__(self) -> Iterator[Any]:
        return self.generate()


class PolicyGradient(LightningModule):
    """Plays 20 steps under its policy, and trains actor and critic on them, each with its own optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.actor, self.critic = network_of(2), network_of(1)
        self.environment = gymnasium.make("CartPole-v1")
        self.state, _ = self.environment.reset(seed=2)
        self.rewards: list[float] = []
        self.episode: list[float] = []
        self.average = 0.0

    @torch.no_grad()
    def generate(self) -> Iterator[Any]:
        """Play, and yield each step with its advantage."""
        steps = []
        for _ in range(20):
            state = torch.from_numpy(self.state)
            policy = torch.distributions.Categorical(logits=self.actor(state))
            action = policy.sample()
            self.state, reward, is_terminated, is_truncated, _ = self.environment.step(action.item())
            self.episode.append(float(reward))
            steps.append((state, action, policy.log_prob(action)))
            if is_terminated or is_truncated:
                self.rewards.append(sum(self.episode))
                self.episode.clear()
                self.state = self.environment.reset()[0]
        values = [self.critic(state)[0] for state, *_ in steps]  # computed now: the critic is trained during the yields
        for i, (step, value) in enumerate(zip(steps, values, strict=True)):
            yield (*step, len(steps) - i - value)
        self.average = sum(self.rewards) / max(1, len(self.rewards))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        states, actions, old, advantages = batch
        self.log("average", self.average, prog_bar=True)
        actor, critic = self.optimizers()  # type: ignore[misc]
        new = torch.distributions.Categorical(logits=self.actor(states)).log_prob(actions)
        ratio = (new - old).exp()
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        actor.zero_grad()
        self.manual_backward(loss)
        actor.step()
        critic.zero_grad()
        self.manual_backward((self.critic(states).squeeze(-1) - advantages).square().mean())
        critic.step()
        self.log("loss", loss)

    def train_dataloader(self) -> Any:
        return DataLoader(Played(self.generate), batch_size=4)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.actor, self.critic)]


def fit(module: type[LightningModule], callbacks: list[Callback], directory: Path) -> Trainer:
    """Fit a module on its play."""
    trainer = make_trainer(callbacks, directory, max_epochs=3)
    trainer.fit(module())
    return trainer


@pytest.mark.parametrize("module", [DeepQ, PolicyGradient])
@pytest.mark.parametrize("fault", [LATER_EPOCH, *map(slowly, (FIRST_EPOCH, EDGE, STOPPED, RAISED, RAISED_BEHIND))])
def test_continues_where_it_played(fault: Callback, module: type[LightningModule]) -> None:
    """The environment, the buffer, and the policy that played are restored, wherever the run is cut."""
    assert_resumes_exactly(lambda callbacks, directory: fit(module, callbacks, directory), [fault], options=EVERY_STEP)


class Memory(IterableDataset[Tensor]):
    """Draws rows of a memory that training fills when an iteration begins."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def draw(self) -> Any:
        return self.rows[np.random.randint(len(self.rows))]

    def __iter__(self) -> Iterator[Any]:
        yield from [self.draw() for _ in range(20)]


class MapStyle(Dataset[Any]):
    """Likewise, for indices that say nothing."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return self.memory.draw()


class Drawn:
    """A loader that is only an iterable."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.stack([torch.as_tensor(self.memory.draw()) for _ in range(4)]) for _ in range(5)])


LOADERS: dict[str, Callable[[Memory], Any]] = {
    "iterable": lambda memory: DataLoader(memory, batch_size=4),
    "worker": lambda memory: DataLoader(memory, batch_size=4, num_workers=1),
    "map-style": lambda memory: DataLoader(MapStyle(memory), batch_size=4),
    "plain": Drawn,
}


class Learner(LightningModule):
    """Fills its memory at random before the fit, and replaces a row of it in each step."""

    def __init__(self, rows: Any, loader: str) -> None:
        super().__init__()
        self.rows, self.loader = rows, loader
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        row = np.random.randn(4).astype(np.float32)
        if isinstance(self.rows, deque):
            self.rows.append(torch.from_numpy(row))
        else:
            self.rows[self.global_step % len(self.rows)] = row
        return self.layer(batch).square().mean()

    def train_dataloader(self) -> Any:
        return LOADERS[self.loader](Memory(self.rows))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


SLOW = [("deque", "worker"), ("deque", "map-style"), ("deque", "plain"), ("array", "iterable")]


@pytest.mark.parametrize(
    ("kind", "loader"), [("deque", "iterable"), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_memory_that_each_start_fills_differently(kind: str, loader: str) -> None:
    """A memory that training feeds is restored whole, with the rows from before the fit, and is not compared."""

    def fit_memory(callbacks: list[Callback], directory: Path) -> Trainer:
        rows = np.random.randn(40, 4).astype(np.float32)
        memory = deque(torch.from_numpy(rows.copy()), maxlen=44) if kind == "deque" else rows
        trainer = make_trainer(callbacks, directory, max_epochs=3)
        trainer.fit(Learner(memory, loader))
        return trainer

    assert_resumes_exactly(fit_memory, [KillAt(7), KillAt(2)], options=EVERY_STEP)

"""Small jobs to share a device, and the plain loop that each of them is alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from hocket import JobContext
from tests.run.device.support.emulated import sleep_until


@dataclass(slots=True)
class Trained:
    """The models that jobs have made, by name, to compare their weights."""

    models: dict[str, nn.Module] = field(default_factory=dict)

    def weights(self, name: str) -> list[Tensor]:
        """A model's weights and buffers."""
        return list(self.models[name].state_dict().values())


def classifier(name: str, trained: Trained, width: int = 32) -> Callable[..., Any]:
    """A perceptron with dropout, batch norm and a part that is recomputed."""

    def make(job: JobContext) -> tuple[Any, Any]:
        first = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
        second = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.3))
        model = nn.Sequential(first, second, nn.Linear(width, 4))
        trained.models[name] = model
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        data = TensorDataset(torch.randn(96, width), torch.randint(0, 4, (96,)))

        def step(batch: Any) -> Tensor:
            x, y = batch
            optimizer.zero_grad()
            with job.forward():
                x = first(x) + 0.1 * torch.randn_like(x)
                x = checkpoint(second, x, use_reentrant=False)
                loss = F.cross_entropy(model[2](x), y)
            with job.backward():
                loss.backward()
            optimizer.step()
            return loss.detach()

        return step, endless(DataLoader(data, batch_size=16, shuffle=True))

    return make


def gan(name: str, trained: Trained, width: int = 16) -> Callable[..., Any]:
    """Two optimizers, two forwards and backwards an iteration, noise in each."""

    def make(job: JobContext) -> tuple[Any, Any]:
        torch.manual_seed(11)  # what makes it may seed, as if it were alone
        first = nn.Sequential(nn.Linear(4, width), nn.ReLU())
        generator = nn.Sequential(first, nn.Linear(width, 8))
        critic = nn.Sequential(
            nn.Linear(8, width), nn.Dropout(0.1), nn.Linear(width, 1)
        )
        trained.models[name] = nn.ModuleList([generator, critic])
        optimizers = [
            torch.optim.SGD(x.parameters(), 0.05) for x in (critic, generator)
        ]
        memory = torch.zeros(8)

        def step(real: Tensor) -> float:
            for optimizer in optimizers:
                optimizer.zero_grad()
            with job.forward():
                fake = generator(torch.randn(len(real), 4))
                loss = critic(fake.detach()).mean() - critic(real + memory).mean()
            with job.backward():
                loss.backward()
            optimizers[0].step()
            with job.forward():
                own = -critic(fake).mean()
            with job.backward():
                own.backward()
            optimizers[1].step()
            memory.mul_(0.9).add_(fake.detach().mean(0), alpha=0.1)
            return loss.item() + own.item()

        return step, (torch.randn(8, 8) for _ in range(1000))

    return make


def endless(loader: Any) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader


def sleeping(
    forward_s: float,
    backward_s: float,
    num_bytes: int,
    num_iterations: int,
    num_blocks: int = 4,
) -> Callable[..., Any]:
    """An emulated job: it sleeps, and holds memory that it never touches."""

    def make(job: JobContext) -> tuple[Any, Any]:
        def step(batch: Any) -> None:
            begin_s = perf_counter()
            with job.forward():
                kept = []
                for i in range(num_blocks):
                    kept.append(torch.empty(num_bytes // num_blocks, dtype=torch.uint8))
                    sleep_until(begin_s + forward_s * (i + 1) / num_blocks)
            begin_s = perf_counter()
            with job.backward():
                for i in range(num_blocks):
                    sleep_until(begin_s + backward_s * (i + 1) / num_blocks)
                    kept.pop()

        return step, range(num_iterations)

    return make


class Alone(JobContext):
    """Marks nothing: the job is a plain loop."""

    name = "alone"
    device = torch.device("cpu")

    def forward(self) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self) -> AbstractContextManager[None]:
        return nullcontext()


def train_alone(
    make: Callable[..., Any], num_iterations: int, seed: int
) -> list[float]:
    """The losses of a job in a loop of its own."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        step, batches = make(Alone())
        own = iter(batches)
        return [float(step(next(own))) for _ in range(num_iterations)]

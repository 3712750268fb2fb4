"""Six models as jobs: perceptron, transformer, ResNet, LSTM, GAN, autoencoder.

Each takes a size: how wide it is, and how many samples a batch has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from bench.models import resnet, transformer
from tests.run.device.support.emulated import sleep_until

Make: TypeAlias = Callable[[hocket.JobContext], tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class Size:
    """How large the models are."""

    width: int
    num_samples: int


SMALL = Size(16, 4)
MIDDLE = Size(96, 16)  # on a CPU: some 10 ms each
LARGE = Size(512, 64)  # on a GPU: kernels that do not fill it


class Recurrent(nn.Module):
    """An LSTM whose last output is classified."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of each sequence."""
        out: Tensor = self.head(self.lstm(x)[0][:, -1])
        return out


def batches(shape: tuple[int, ...], device: torch.device) -> Iterator[Any]:
    """The same batch again and again, from the job's own random numbers."""
    batch = torch.randn(shape, device=device), torch.zeros(shape[0], device=device)
    while True:
        yield batch


def trained(
    make_model: Callable[[Size], nn.Module],
    shape_of: Callable[[Size], tuple[int, ...]],
    size: Size,
) -> Make:
    """A job with one model, AdamW, and the mean square of its output as the loss."""

    def make(job: hocket.JobContext) -> tuple[Any, Any]:
        model = make_model(size).to(job.device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

        def step(batch: Any) -> Tensor:
            optimizer.zero_grad()
            with job.forward():
                loss = model(batch[0]).square().mean()
            with job.backward():
                loss.backward()
            optimizer.step()
            return loss.detach()

        return step, batches(shape_of(size), job.device)

    return make


def gan(size: Size) -> Make:
    """A small DCGAN: two optimizers, noise from the job's generator."""

    def make(job: hocket.JobContext) -> tuple[Any, Any]:
        width = size.width
        generator = nn.Sequential(
            nn.ConvTranspose2d(16, width, 4),
            nn.ReLU(),
            nn.ConvTranspose2d(width, width, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1),
        ).to(job.device)
        critic = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 1, 4),
        ).to(job.device)
        optimizers = [torch.optim.Adam(x.parameters()) for x in (critic, generator)]

        def step(batch: Any) -> Tensor:
            for optimizer in optimizers:
                optimizer.zero_grad()
            with job.forward():
                noise = torch.randn(len(batch[0]), 16, 1, 1, device=job.device)
                fake = generator(noise)
                loss = F.softplus(critic(fake.detach())).mean()
                loss = loss + F.softplus(-critic(batch[0])).mean()
            with job.backward():
                loss.backward()
            optimizers[0].step()
            with job.forward():
                own = F.softplus(-critic(fake)).mean()
            with job.backward():
                own.backward()
            optimizers[1].step()
            return own.detach()

        return step, batches((size.num_samples, 3, 16, 16), job.device)

    return make


def perceptron(size: Size) -> nn.Module:
    """Eight layers with dropout."""
    width = 4 * size.width
    layers = [
        nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1))
        for _ in range(8)
    ]
    return nn.Sequential(*layers)


def autoencoder(size: Size) -> nn.Module:
    """Convolutions down and up again."""
    width = size.width
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(width, width, 4, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(width, 3, 4, 2, 1),
    )


def job_makers(size: Size) -> dict[str, Make]:
    """The six jobs, by name."""

    def images(size: Size) -> tuple[int, ...]:
        return size.num_samples, 3, 32, 32

    def tokens(size: Size) -> tuple[int, ...]:
        return size.num_samples, 32, size.width

    return {
        "perceptron": trained(perceptron, lambda s: (s.num_samples, 4 * s.width), size),
        "transformer": trained(lambda s: transformer(s.width), tokens, size),
        "resnet": trained(lambda _: resnet(), images, size),
        "lstm": trained(lambda s: Recurrent(s.width), tokens, size),
        "gan": gan(size),
        "autoencoder": trained(autoencoder, images, size),
    }


class PlainLoop(hocket.JobContext):
    """Marks nothing: a job alone."""

    def __init__(self, device: torch.device) -> None:
        self.name, self.device = "alone", device

    def forward(self) -> Any:
        """See `JobContext.forward`."""
        return nullcontext()

    def backward(self) -> Any:
        """See `JobContext.backward`."""
        return nullcontext()


class MadeJob(hocket.JobContext):
    """A job that is made once, and trained in several runs, each with its context."""

    def __init__(self, make: Make) -> None:
        self.name, self.device = "made", torch.device("cpu")
        self._context: hocket.JobContext = self
        self._made = make(self)
        self._batches = iter(self._made[1])

    def remake(self, context: hocket.JobContext) -> tuple[Any, Any]:
        """The job as the run of this context sees it."""
        self._context = context
        return self._made[0], self._batches

    def forward(self) -> Any:
        """See `JobContext.forward`."""
        return self._context.forward()

    def backward(self) -> Any:
        """See `JobContext.backward`."""
        return self._context.backward()


def sleeping(forward_s: float, backward_s: float, num_bytes: int) -> Make:
    """An emulated job: sleeps, and holds memory that it never touches."""

    def make(job: hocket.JobContext) -> tuple[Any, Any]:
        def step(batch: Any) -> None:
            begin_s = perf_counter()
            with job.forward():
                kept = []
                for i in range(8):
                    kept.append(torch.empty(num_bytes // 8, dtype=torch.uint8))
                    sleep_until(begin_s + forward_s * (i + 1) / 8)
            with job.backward():
                begin_s = perf_counter()
                for i in range(8):
                    sleep_until(begin_s + backward_s * (i + 1) / 8)
                    kept.pop()

        return step, range(1 << 30)

    return make

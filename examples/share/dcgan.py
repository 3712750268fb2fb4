"""DCGAN: two nets, two optimizers, losses that alternate. Twice on one device.

    python -m examples.share.dcgan cifar-10-batches-py

Source: Radford et al., arXiv:1511.06434; sizes of pytorch/examples/dcgan (64 x 64).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import hocket
from examples.share.dcgan_nets import NOISE, SIDE, critic, generator
from examples.share.loop import Loop


def images(folder: str | None, batch_size: int) -> Iterator[Tensor]:
    """Batches of CIFAR-10, or without a folder of noise."""
    if folder is None:
        while True:
            yield torch.rand(batch_size, 3, SIDE, SIDE) * 2 - 1
    from examples.zoo.cifar import cifar10  # needs torchvision

    samples, _ = cifar10(folder, side=SIDE)
    while True:
        rows = torch.randint(samples.num_samples, (batch_size,))
        yield samples.inputs(rows, None).tanh()


def make(
    folder: str | None,
    width: int,
    batch_size: int,
    amp: bool,
    batch_chunk: int,
    job: Any,
) -> Any:
    """The job: the critic learns from real and made images, then the generator."""
    nets = [net(width).to(job.device) for net in (generator, critic)]
    adam = partial(torch.optim.Adam, lr=2e-4, betas=(0.5, 0.999))
    loops = [Loop(job, adam(net.parameters()), amp=amp) for net in nets]

    def step(real_B: Tensor) -> Tensor:
        noise = torch.randn(len(real_B), NOISE, 1, 1)
        both = (x.to(job.device).chunk(batch_chunk) for x in (real_B, noise))
        chunks = list(zip(*both, strict=True))
        sizes = [len(real) for real, _ in chunks]

        def judge(chunk: Any) -> Tensor:
            real, made = nets[1](chunk[0]), nets[1](nets[0](chunk[1]).detach())
            return bce(real, torch.ones_like(real)) + bce(made, torch.zeros_like(made))

        def make_better(chunk: Any) -> Tensor:
            made = nets[1](nets[0](chunk[1]))
            return bce(made, torch.ones_like(made))

        judged = loops[1].update(chunks, sizes, judge)
        return judged + loops[0].update(chunks, sizes, make_better)

    return step, images(folder, batch_size)


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else None
    make_one = partial(make, folder, 64, 32, False, 1)
    jobs = [hocket.Job(f"dcgan-{seed}", make_one, seed=seed) for seed in (0, 1)]
    print(hocket.share(jobs, num_iterations=100))

"""Evaluation, early stop and checkpoints, around a pipeline of one's own.

python examples/train_and_save.py                             one worker
torchrun --nproc-per-node 2 examples/train_and_save.py        two

Started again, it goes on from the newest checkpoint in the folder `run`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hocket
from hocket.run.weights.settings import Parameters


def make_optimizer(parameters: Parameters) -> torch.optim.Optimizer:
    """Two groups: biases do not decay. Each stage gets an optimizer of its own."""
    biases = [p for name, p in parameters.named() if name.endswith("bias")]
    others = [p for name, p in parameters.named() if not name.endswith("bias")]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": biases}]
    groups[1]["weight_decay"] = 0.0
    return torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.01)


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """The mean over the microbatch's samples."""
    return nn.functional.mse_loss(output, targets)


def main() -> None:
    """Train until nothing gets better, for 40 epochs at most."""
    torch.manual_seed(0)  # the same model and data on every worker
    x = torch.rand(1000, 10)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    test = [(x[:200], x[:200].sum(1, keepdim=True))]
    sampler = hocket.ResumableSampler(len(data), 100, seed=1, num_batches=400)
    layers = [nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
    with hocket.Pipeline(
        nn.Sequential(*layers, nn.Linear(64, 1)),
        loss,
        optimizer=make_optimizer,
        example=test[0],
        num_microbatches=4,
        clip_norm=1.0,
        ema_decay=0.9,
    ) as pipeline:
        if hocket.checkpoint.newest("run") is not None:
            sampler.load_state_dict(pipeline.load("run"))

        best, num_worse = math.inf, 0
        loader = sampler.counted(DataLoader(data, batch_sampler=sampler))
        for result in pipeline.train(loader, drain_every=50):
            if (result.step + 1) % 50:
                continue
            found = pipeline.evaluate(test, use_ema=True).loss
            pipeline.save("run", data=sampler.state_dict(), keep=2)
            if pipeline.is_main:
                print(f"step {result.step}: {found:.5f}")
            num_worse = 0 if found < best else num_worse + 1
            best = min(best, found)
            if num_worse == 2:
                break


if __name__ == "__main__":
    main()

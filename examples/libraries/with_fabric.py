"""The same training in Lightning Fabric's loop and in a pipeline, with its logger.

Run it with python, or with torchrun --nproc-per-node 2.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.loggers.csv_logs import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hocket


def make_model() -> nn.Module:
    """The same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))


def make_loader() -> DataLoader[tuple[Tensor, ...]]:
    """Ten numbers and their sum; the last of seven batches is smaller."""
    draw = torch.Generator().manual_seed(1)  # alike on every worker
    x = torch.rand(100, 10, generator=draw)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    return DataLoader(data, batch_size=16, shuffle=True, generator=draw)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Of the model, or of one stage."""
    return torch.optim.AdamW(parameters, lr=1e-2)


def in_fabric() -> None:
    """On one device."""
    logger = CSVLogger("fabric")
    fabric = Fabric(accelerator="cpu", devices=1, loggers=logger)
    model = make_model()
    model, optimizer = fabric.setup(model, make_optimizer(list(model.parameters())))
    for step, (x, y) in enumerate(fabric.setup_dataloaders(make_loader())):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        fabric.log_dict({"loss": loss.item()}, step)
    logger.save()


def in_pipeline() -> None:
    """On as many workers as there are."""
    with hocket.Pipeline(
        make_model(),
        nn.functional.mse_loss,
        optimizer=make_optimizer,
        clip_norm=1.0,
        example=next(iter(make_loader())),
        num_microbatches=4,
    ) as pipeline:
        logger = CSVLogger("pipeline")  # writes on rank 0 alone
        for result in pipeline.train(make_loader()):
            logger.log_metrics({"loss": result.loss}, result.step)
        logger.save()


if __name__ == "__main__":
    in_fabric()
    in_pipeline()

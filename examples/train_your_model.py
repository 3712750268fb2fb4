"""Your own module, data, loss and optimizer, in a pipeline.

python examples/train_your_model.py                             one worker
torchrun --nproc-per-node 2 examples/train_your_model.py        two
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hocket


def make_model() -> nn.Module:
    """Any module will do; this one learns to sum digits."""
    layers: list[nn.Module] = [nn.Linear(10, 64)]
    for _ in range(4):
        layers += [nn.ReLU(), nn.Linear(64, 64)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(64, 1))


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """The mean over the microbatch's samples."""
    return nn.functional.mse_loss(output, targets)


def main() -> None:
    """Train for three epochs; the last batch of each is smaller."""
    torch.manual_seed(0)  # the same model and data on every worker
    x = torch.rand(1000, 10)
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    loader = DataLoader(dataset, batch_size=64, shuffle=True, generator=_seeded())
    with hocket.Pipeline(
        make_model(),
        loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        example=(x[:64], x[:64].sum(1, keepdim=True)),
        schedule="1f1b",
        num_microbatches=8,
    ) as pipeline:
        for epoch in range(3):
            for result in pipeline.train(loader):
                last = result
            evaluation = pipeline.evaluate(loader)
            if pipeline.is_main:
                print(
                    f"epoch {epoch}: step {last.step}, loss {last.loss:.4f}, "
                    f"whole data {evaluation.loss:.4f}"
                )
        weights = pipeline.state_dict()  # by the uncut model's names
        make_model().load_state_dict(weights)


def _seeded() -> torch.Generator:
    """Shuffle alike on every worker."""
    return torch.Generator().manual_seed(1)


if __name__ == "__main__":
    main()

"""A model of timm with averaged weights (EMA), trained in a pipeline.

Run it with python, or with torchrun --nproc-per-node 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import timm
import torch
from torch import Tensor, nn

import hocket

DECAY = 0.9


def make_model() -> Any:
    """A small vision transformer; yours has `pretrained=True`."""
    sizes: dict[str, Any] = {"img_size": 32, "num_classes": 4, "depth": 1}
    return timm.create_model("test_vit", **sizes, dynamic_img_size=False)


def make_batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Images (8, 3, 32, 32) whose brightness is their class (8,)."""
    draw = torch.Generator().manual_seed(1)  # alike on every worker
    for _ in range(10):
        classes = torch.randint(4, (8,), generator=draw)
        images = torch.rand(8, 3, 32, 32, generator=draw)
        yield images + classes[:, None, None, None], classes


def main() -> None:
    """Train, evaluate both, and put the averages into a model of its own."""
    torch.manual_seed(0)  # the same weights on every worker
    with hocket.Pipeline(
        make_model(),
        nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        ema_decay=DECAY,
        example=next(make_batches()),
        num_microbatches=2,
    ) as pipeline:
        for _ in pipeline.train(make_batches()):
            pass
        trained = pipeline.evaluate(make_batches())
        averaged = pipeline.evaluate(make_batches(), use_ema=True)
        weights = pipeline.state_dict(ema=True)  # on every worker
        if pipeline.is_main:
            print(f"trained {trained.loss:.4f}, averaged {averaged.loss:.4f}")
            make_model().load_state_dict(weights)
            torch.save(weights, "averaged.pt")


if __name__ == "__main__":
    main()

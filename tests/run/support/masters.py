"""Weights in bfloat16 with float32 masters: a loop that does it, and workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import hocket

_SIZE: Final = 16
NUM_PARTS: Final = 4  # microbatches of a batch, over all replicas and shards

Batch = tuple[Tensor, Tensor]


class TiedNet(nn.Module):
    """The head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(_SIZE, _SIZE, bias=False)
        self.body = nn.Sequential(nn.GELU(), nn.Linear(_SIZE, _SIZE), nn.GELU())
        self.head = nn.Linear(_SIZE, _SIZE)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.head(self.body(self.embed(x)))


def make_net(kind: str = "plain") -> nn.Module:
    """A net in bfloat16; the same each time."""
    torch.manual_seed(0)
    if kind == "tied":
        return TiedNet().to(torch.bfloat16)
    layers = [nn.Linear(_SIZE, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32)]
    net = nn.Sequential(*layers, nn.GELU(), nn.Linear(32, 32), nn.Linear(32, 8))
    return net.to(torch.bfloat16)


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy, in float32."""
    return nn.functional.cross_entropy(output.float(), targets)


def batches(num: int) -> list[Batch]:
    """Batches of 16 samples."""
    dice = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(16, _SIZE, generator=dice).to(torch.bfloat16),
            torch.randint(8, (16,), generator=dice),
        )
        for _ in range(num)
    ]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Small steps, most of which are lost if they are added to bfloat16."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer with states."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def masters_loop(
    net: nn.Module,
    data: Sequence[Batch],
    make_optimizer: Any = sgd,
    *,
    clip_norm: float | None = None,
    accumulate: int = 1,
    delay: int = 0,
) -> tuple[dict[str, Tensor], list[float]]:
    """Train as a loop with masters does.

    Args:
        net: in bfloat16; trained in place.
        data: the batches, all of them of one size.
        make_optimizer: of the masters.
        clip_norm: of all gradients.
        accumulate: batches for an update.
        delay: the updates that forwards and backwards are behind.

    Returns:
        The masters by name, and the loss of each step.
    """
    named = dict(net.named_parameters())
    masters = {name: p.detach().float() for name, p in named.items()}
    optimizer = make_optimizer([*masters.values()])
    rounded = [{n: x.bfloat16() for n, x in masters.items()}]
    losses = []
    for step in range(len(data) // accumulate):
        net.load_state_dict(rounded[max(0, step - delay)], strict=False)
        for x in masters.values():
            x.grad = torch.zeros_like(x)
        own = data[step * accumulate : (step + 1) * accumulate]
        losses.append(sum(_backwards(net, masters, own)))
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(masters.values(), clip_norm)
        optimizer.step()
        rounded.append({n: x.bfloat16() for n, x in masters.items()})
    net.load_state_dict(rounded[-1], strict=False)
    return masters, losses


def _backwards(
    net: nn.Module, masters: dict[str, Tensor], data: Sequence[Batch]
) -> Iterator[float]:
    """Add up the gradients of all microbatches in those of masters; yield losses."""
    for inputs, targets in data:
        parts = zip(inputs.chunk(NUM_PARTS), targets.chunk(NUM_PARTS), strict=True)
        for part, wanted in parts:
            loss = loss_of(net(part), wanted) / (NUM_PARTS * len(data))
            loss.backward()
            yield loss.item()
            for name, p in net.named_parameters():
                assert p.grad is not None
                masters[name].grad += p.grad  # type: ignore[operator]
                p.grad = None


def make_pipeline(net: nn.Module, **options: Any) -> hocket.Pipeline:
    """A pipeline of a net with masters, unless another precision is given."""
    given = {"precision": "bfloat16-weights", "optimizer": sgd, **options}
    pipelines = given.get("num_replicas", 1) * given.get("num_shards", 1)
    given.setdefault("num_microbatches", NUM_PARTS // pipelines)
    return hocket.Pipeline(net, loss_of, example=batches(1)[0], **given)


def train_all(cases: Sequence[dict[str, Any]], folder: str) -> list[list[float]]:
    """Train several pipelines; save their masters and weights. Return their losses."""
    torch.set_num_threads(1)
    found, world = [], hocket.join_world()
    for i, case in enumerate(cases):
        options = dict(case)
        kind, num_steps = options.pop("kind", "plain"), options.pop("num_steps")
        if options.pop("adamw", False):
            options["optimizer"] = adamw
        pipeline = make_pipeline(make_net(kind), world=world, **options)
        results = pipeline.train(batches(num_steps * options.get("accumulate", 1)))
        found.append([result.loss for result in results])
        pipeline.save(Path(folder) / f"{i}")
        state = pipeline.state_dict()
        if pipeline.is_main:
            untied = {n: x.clone() for n, x in state.items() if n != "head.weight"}
            save_file(untied, Path(folder) / f"{i}.st")
        pipeline.close()
    world.close()
    return found

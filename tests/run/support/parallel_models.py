"""A small transformer that its user parallelises over a tp axis, on four workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.nn import functional

import hocket
from hocket.run.cluster.world import World

_WIDTH: Final = 16
_WORDS: Final = 32
DECAY: Final = 0.5
NUM_PARTS: Final = 4  # microbatches of a batch, over all replicas

Batch = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """As many heads as the projections that are here have."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (
            nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Attend to all words."""
        q, k, v = (
            f(x).unflatten(-1, (-1, 4)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        scores = (q @ k.transpose(-1, -2) / 2).softmax(-1)
        return self.o((scores @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then two layers, each beside a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(_WIDTH, 64), nn.GELU(), nn.Linear(64, _WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape."""
        x = x + self.attention(self.n1(x))
        return x + self.mlp(self.n2(x))


class Net(nn.Module):
    """Words to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_WORDS, _WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(_WIDTH, _WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits."""
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_net() -> nn.Module:
    """A net in float64; the same each time."""
    torch.manual_seed(0)
    return Net().double()


def plan_of(kind: str) -> dict[str, ParallelStyle]:
    """What is parallelised: heads and inner layers; or norms along the words, too."""
    split = Shard(1)
    plan: dict[str, ParallelStyle] = {
        f"layers.*.attention.{name}": ColwiseParallel() for name in "qkv"
    }
    plan["layers.*.mlp.0"] = ColwiseParallel()
    ends = ("layers.*.attention.o", "layers.*.mlp.2")
    if kind == "tensor":
        return plan | {name: RowwiseParallel() for name in ends}
    whole = PrepareModuleInput(
        input_layouts=(split,), desired_input_layouts=(Replicate(),)
    )
    return plan | {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=split),
        "layers.*.n1": SequenceParallel(use_local_output=True),
        "layers.*.n2": SequenceParallel(use_local_output=True),
        "layers.*.attention": whole,
        "layers.*.mlp": whole,
        **{name: RowwiseParallel(output_layouts=split) for name in ends},
        "head": ColwiseParallel(input_layouts=split, output_layouts=Replicate()),
    }


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of all words."""
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def batches(num: int) -> list[Batch]:
    """Batches of four samples of eight words."""
    dice = torch.Generator().manual_seed(1)
    shape = (2, 4, 8)
    pairs = [torch.randint(_WORDS, shape, generator=dice) for _ in range(num)]
    return [(pair[0], pair[1]) for pair in pairs]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """AdamW; its foreach form refuses DTensors beside other tensors."""
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


def train(cases: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Train each case with four workers, and report what this one has seen."""
    world = hocket.join_world()
    return [
        _trained(world, case, Path(folder) / str(i)) for i, case in enumerate(cases)
    ]


def _trained(world: World, case: dict[str, Any], folder: Path) -> dict[str, Any]:
    tp_size, options = case["tp"], case["options"]
    shape = (world.world_size // tp_size, tp_size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "tp"))
    net = make_net()
    parallelize_module(net, mesh["tp"], plan_of(case["plan"]))
    replicas = options.get("num_replicas", 1)
    data = batches(4)
    with hocket.Pipeline(
        net,
        loss_of,
        example=data[0],
        num_microbatches=NUM_PARTS // replicas,
        optimizer=adamw,
        world=world,
        ema_decay=DECAY,
        **options,
    ) as pipeline:
        steps = [pipeline.step(batch) for batch in data[:2]]
        losses = [x.loss for x in steps]
        norms = [x.grad_norm for x in steps]
        state, averaged = pipeline.state_dict(), pipeline.state_dict(ema=True)
        evaluated = pipeline.evaluate([data[3]]).loss
        pipeline.save(folder)
        later = pipeline.step(data[2]).loss, pipeline.step(data[2]).loss
        pipeline.load(folder)
        again = pipeline.step(data[2]).loss, pipeline.step(data[2]).loss
        stages = pipeline.plan.costs.stages
        return {
            "losses": losses,
            "norms": norms,
            "evaluated": evaluated,
            "later": later,
            "again": again,
            "weight_bytes": sum(x.weight_bytes for x in stages),
            "state": {name: x.tolist() for name, x in state.items()},
            "averaged": {name: x.tolist() for name, x in averaged.items()},
        }

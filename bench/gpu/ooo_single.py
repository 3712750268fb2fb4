"""A training step of one GPU, out of order: first that it is exact, then how fast.

Each net and contestant is a part of `bench.gpu.all`, and a process of its own: eager,
`torch.compile`, one CUDA graph of the eager step and one of the compiled step, and
hocket's graph on two lanes, on one, and with weight gradients in the next step where
that is fastest. LSTMs are measured fused and as their steps in time; "kernels" says
what was kept. Without a GPU it runs on the CPU with small sizes and without the
contestants that need a GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from bench.gpu.checked import NEEDS_A_GPU, TOLERANCE, Checks, Row, Setting, synchronize
from bench.measure import spread
from bench.models import Block

NUM_CHECKED_STEPS: Final = 20
NUM_ROUNDS: Final = 15
STEPS_IN_TURN: Final = 10
NUM_WARM_UP: Final = 11  # torch's own number for graphs with side streams
SEED: Final = 0
Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Net:
    """A net and its batch.

    Args:
        make: makes the net, or one of its kind that a CPU trains.
        batch: makes a batch on the CPU, of so many samples.
        full: samples on a GPU.
        small: samples on a CPU.
    """

    make: Callable[[bool], nn.Module]
    batch: Callable[[int, bool], tuple[Tensor, Tensor]]
    full: int = 32
    small: int = 2


class LstmNet(nn.Module):
    """Tokens to the logits of the next ones, by two layers of LSTM."""

    def __init__(self, width: int, num_tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.last = nn.Linear(width, num_tokens)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        out: Tensor = self.last(self.lstm(self.embedding(x))[0])
        return out


def transformer(is_small: bool) -> nn.Module:
    """Six layers of width 256, for sequences of 128; or two layers."""
    blocks = [Block(256) for _ in range(2 if is_small else 6)]
    return nn.Sequential(nn.Embedding(1000, 256), *blocks, nn.Linear(256, 1000))


def vision(name: str) -> Callable[[bool], nn.Module]:
    """Return what makes a net of torchvision, or a few layers of its kind."""

    def make(is_small: bool) -> nn.Module:
        from torchvision import models

        if not is_small:
            net: nn.Module = getattr(models, name)(weights=None)
        elif name == "densenet121":
            net = models.DenseNet(8, (2, 2), 8)
        elif name == "resnet50":
            net = models.ResNet(models.resnet.Bottleneck, [1] * 4, width_per_group=8)
        else:
            layer = models.mobilenetv3.InvertedResidualConfig
            layers = [layer(16, 3, 32, 16, True, "HS", 2, 1, 1.0)] * 2
            net = models.MobileNetV3(layers, 32)
        return net

    return make


def images(num: int, is_small: bool) -> tuple[Tensor, Tensor]:
    """Images of 224 pixels, or of 64."""
    size = 64 if is_small else 224
    return torch.randn(num, 3, size, size), torch.randint(0, 1000, (num,))


def tokens(num: int, is_small: bool) -> tuple[Tensor, Tensor]:
    """Sequences of 128 tokens, or of 8."""
    length = 8 if is_small else 128
    found = torch.randint(0, 1000, (num, length + 1))
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


NETS: Final = {
    "transformer": Net(transformer, tokens, full=8),
    "lstm": Net(
        lambda is_small: LstmNet(64 if is_small else 512, 1000), tokens, full=32
    ),
    "mobilenet_v3_large": Net(vision("mobilenet_v3_large"), images),
    "resnet50": Net(vision("resnet50"), images),
    "densenet121": Net(vision("densenet121"), images),
}


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy over classes, or over the tokens of all positions."""
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def exactness(setting: Setting) -> Row:
    """Weights in float64 beside those of the eager step, by AdamW, with BatchNorm."""
    torch.manual_seed(SEED)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1),
        nn.Flatten(), nn.Linear(8 * 36, 4),
    ).to(setting.device, torch.float64)  # fmt: skip
    batches = [
        (
            torch.randn(4, 3, 8, 8, dtype=torch.float64, device=setting.device),
            torch.randint(0, 4, (4,), device=setting.device),
        )
        for _ in range(NUM_CHECKED_STEPS)
    ]
    eager = copy.deepcopy(net)
    optimizer = adamw(eager.parameters())
    torch.manual_seed(SEED)
    for x, y in batches:
        optimizer.zero_grad()
        loss(eager(x), y).backward()
        optimizer.step()
    with hocket.compile_step(net, loss, adamw, example=batches[0]) as step:
        torch.manual_seed(SEED)
        for batch in batches:
            step(batch)
        orders = [one.name for one in step.candidates]
    pairs = zip(net.parameters(), eager.parameters(), strict=True)
    worst = max(
        float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in pairs
    )
    return {"worst_error": worst, "orders": orders, "holds": worst <= TOLERANCE}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """AdamW, foreach: exact, and not the fastest."""
    return torch.optim.AdamW(parameters, 1e-3, foreach=True)


def fused(parameters: Any) -> torch.optim.Optimizer:
    """SGD with momentum in one kernel: the same for all contestants."""
    return torch.optim.SGD(parameters, 1e-3, momentum=0.9, fused=True)


class Autocast(nn.Module):
    """Runs a net in bfloat16 on a GPU."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Return the output in float32."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            out: Tensor = self.net(x)
        return out.float()


def measured(net: str, contestant: str, setting: Setting) -> Row:
    """Seconds of one contestant's step, and what it says of itself."""
    if not setting.on_gpu and contestant in THEIRS and contestant != "eager":
        return NEEDS_A_GPU
    model, batch = _made(net, setting)
    facts: Row = {}
    if contestant in THEIRS:
        step = THEIRS[contestant](model, batch)
    else:
        step, facts = hocket_step(model, batch, OURS[contestant])
    seconds = _seconds(step, setting)
    return {"step": spread(seconds), **facts}


def filled_cache(net: str, setting: Setting) -> Row:
    """One compiled step, so that a later process finds Inductor's code."""
    if not setting.on_gpu:
        return NEEDS_A_GPU
    compiled_step(*_made(net, setting))()
    synchronize(setting.device)
    return {}


def _made(net: str, setting: Setting) -> tuple[nn.Module, Any]:
    """The model in bfloat16, and its batch, on the device."""
    torch.manual_seed(SEED)
    one, is_small = NETS[net], not setting.is_full
    x, y = one.batch(one.small if is_small else one.full, is_small)
    batch = x.to(setting.device), y.to(setting.device)
    return Autocast(one.make(is_small)).to(setting.device), batch


def plain_step(model: nn.Module, batch: Any, run: Any = None) -> Step:
    """Return torch's own step."""
    optimizer = fused(model.parameters())
    forward = model if run is None else run

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(forward(batch[0]), batch[1]).backward()
        optimizer.step()

    return step


def compiled_step(model: nn.Module, batch: Any) -> Step:
    """Return torch's own step of a compiled model."""
    return plain_step(model, batch, torch.compile(model))


def graphed(step: Step) -> Step:
    """Capture a step as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(NUM_WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return partial(_replayed, graph, step)


def _replayed(graph: torch.cuda.CUDAGraph, step: Step) -> None:
    """Replay a graph of a step, whose weights live as long as this is there."""
    del step
    graph.replay()


def hocket_step(
    model: nn.Module, batch: Any, options: Mapping[str, Any]
) -> tuple[Step, dict[str, Any]]:
    """Return hocket's step, and the orders that it tried."""
    begin_s = perf_counter()
    step = hocket.compile_step(model, loss, fused, example=batch, **options)
    step.submit(batch)  # the first one is eager
    facts = {
        "compile_s": round(perf_counter() - begin_s, 2),
        "num_units": step.schedule.program.num_stages,
        "orders": [
            {
                "name": one.name,
                "kernels": one.kernels,
                "measured_ms": round(one.measured_s * 1e3, 4),
                "predicted_ms": round(one.predicted.step_s * 1e3, 4),
                "peak_bytes": one.peak_bytes,
            }
            for one in step.candidates
        ],
    }
    return lambda: step.submit(batch), facts


def _seconds(step: Step, setting: Setting) -> list[float]:
    """Return the seconds of a step in each round, after one to warm up."""
    seconds, num = [], setting.size(STEPS_IN_TURN, 1)
    for _ in range(1 + setting.size(NUM_ROUNDS, 3)):
        synchronize(setting.device)
        begin_s = perf_counter()
        for _ in range(num):
            step()
        synchronize(setting.device)
        seconds.append((perf_counter() - begin_s) / num)
    return seconds[1:]


THEIRS: Final[Mapping[str, Callable[[nn.Module, Any], Step]]] = {
    "eager": plain_step,
    "compile": compiled_step,
    "graph": lambda model, batch: graphed(plain_step(model, batch)),
    "graph of compile": lambda model, batch: graphed(compiled_step(model, batch)),
}
OURS: Final[Mapping[str, Mapping[str, Any]]] = {
    "hocket": {},
    "hocket, one lane": {"num_lanes": 1},
    "hocket, across steps": {"across_steps": True},
}
_IN_TABLE: Final = ("graph", "graph of compile", "hocket")
IN_TABLE: Final = [f"{net}, {one}" for net in NETS for one in _IN_TABLE]
FURTHER: Final = [
    f"{net}, {one}" for net in NETS for one in (*THEIRS, *OURS) if one not in _IN_TABLE
]
FILLS_CACHE: Final = [f"{net}, cache" for net in NETS]
CHECKS: Final[Checks] = {
    "compile_step, exact": exactness,
    **{f"{net}, cache": partial(filled_cache, net) for net in NETS},
    **{
        f"{net}, {one}": partial(measured, net, one)
        for net in NETS
        for one in (*THEIRS, *OURS)
    },
}

"""A training step of one GPU, out of order: first that it is exact, then how fast.

    python -m bench.gpu.ooo_single [--nets resnet50,lstm] [--size full|small]
                                   [--autotune NET] [--output FILE]

For each net, in turn: eager, `torch.compile`, one CUDA graph of the eager step and one
of the compiled step, and hocket's graph on one lane, on two, and on two with weight
gradients in the next step where that is fastest. LSTMs are measured fused and as their
steps in time; "kernels" says what was kept. Takes under ten minutes: results are
written after each net, and no net begins after nine. Without a GPU it runs on the CPU
with small sizes and without the contestants that need a GPU, which shows only that the
script works.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from bench.gpu.checked import run_check, synchronize
from bench.gpu.machine import gpus
from bench.measure import environment, paired_ratio, spread, write_result
from bench.models import Block

RESULTS: Final = Path(__file__).parent / "results"
TOLERANCE: Final = 1e-10
NUM_CHECKED_STEPS: Final = 20
NUM_ROUNDS: Final = 15
STEPS_IN_TURN: Final = 10
NUM_WARM_UP: Final = 11  # torch's own number for graphs with side streams
MOST_S: Final = 540.0  # after so long, no other net begins
SEED: Final = 0
Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Net:
    """A net and its batch.

    Args:
        make: makes the net.
        batch: makes a batch on the CPU, of so many samples.
        full: samples on a GPU.
        small: samples on a CPU.
    """

    make: Callable[[], nn.Module]
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


def transformer() -> nn.Module:
    """Six layers of width 256, for sequences of 128."""
    blocks = [Block(256) for _ in range(6)]
    return nn.Sequential(nn.Embedding(1000, 256), *blocks, nn.Linear(256, 1000))


def vision(name: str) -> Callable[[], nn.Module]:
    """Return what makes a net of torchvision, with random weights."""

    def make() -> nn.Module:
        import torchvision

        net: nn.Module = getattr(torchvision.models, name)(weights=None)
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
    "densenet121": Net(vision("densenet121"), images),
    "mobilenet_v3_large": Net(vision("mobilenet_v3_large"), images),
    "resnet50": Net(vision("resnet50"), images),
    "transformer": Net(transformer, tokens, full=8),
    "lstm": Net(lambda: LstmNet(512, 1000), tokens, full=32),
}


def main() -> None:
    """Check and measure each net, and write what is there after each."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", default=",".join(NETS))
    parser.add_argument("--size", choices=("full", "small"), default=None)
    parser.add_argument("--autotune", default="mobilenet_v3_large")
    parser.add_argument("--output", type=Path, default=RESULTS / "ooo_single.json")
    arguments = parser.parse_args()
    is_small = (arguments.size or ("full" if on_gpu else "small")) == "small"
    begin_s, rows = perf_counter(), {"exactness": run_check("exactness", exactness)}
    for name in arguments.nets.split(","):
        if perf_counter() - begin_s > MOST_S:
            rows[name] = {"holds": False, "error": "skipped: the time is over"}
        else:
            setting = Setting(name, is_small, has_autotune=name == arguments.autotune)
            rows[name] = run_check(name, setting.measured)
        print(name, rows[name])
        where = environment() | gpus()
        write_result(arguments.output, {"environment": where, **rows})
    if not all(row["holds"] for row in rows.values()):
        raise SystemExit("something failed: see above")


def device() -> torch.device:
    """Return the GPU, or the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy over classes, or over the tokens of all positions."""
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def exactness() -> dict[str, Any]:
    """Weights in float64 beside those of the eager step, by AdamW, with BatchNorm."""
    torch.manual_seed(SEED)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1),
        nn.Flatten(), nn.Linear(8 * 36, 4),
    ).to(device(), torch.float64)  # fmt: skip
    batches = [
        (
            torch.randn(4, 3, 8, 8, dtype=torch.float64, device=device()),
            torch.randint(0, 4, (4,), device=device()),
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


@dataclass(frozen=True, slots=True)
class Setting:
    """One net, and who is measured on it.

    Args:
        name: the net's.
        is_small: whether sizes are those of a CPU.
        has_autotune: whether `torch.compile` also tunes its kernels, for minutes.
    """

    name: str
    is_small: bool
    has_autotune: bool

    def measured(self) -> dict[str, Any]:
        """Median seconds of all contestants, in turn."""
        net, torch_device = NETS[self.name], device()
        torch.manual_seed(SEED)
        x, y = net.batch(net.small if self.is_small else net.full, self.is_small)
        batch = x.to(torch_device), y.to(torch_device)
        model = Autocast(net.make()).to(torch_device)
        failed: dict[str, str] = {}
        steps: dict[str, Step] = {}
        facts: dict[str, Any] = {}
        for name, make in self.contestants(model, batch, facts):
            try:
                steps[name] = make()
                steps[name]()
                synchronize(torch_device)
            except Exception as error:
                steps.pop(name, None)
                failed[name] = f"{type(error).__name__}: {error}"[:500]
        seconds = in_turn(steps, torch_device)
        rows = {name: spread(own) for name, own in seconds.items()}
        ours = [name for name in seconds if name.startswith("hocket")]
        others = [name for name in seconds if name not in ours]
        best = min(others, key=lambda name: rows[name]["median_ms"])
        gains = {name: paired_ratio(seconds[best], seconds[name]) for name in ours}
        return {
            "holds": not failed and bool(ours),
            "step": rows,
            "failed": failed,
            "best_other": best,
            "best_other_over": gains,
            **facts,
        }

    def contestants(
        self, model: nn.Module, batch: Any, facts: dict[str, Any]
    ) -> Iterator[tuple[str, Callable[[], Step]]]:
        """Yield each contestant's name, and what makes its step."""
        yield "eager", lambda: plain_step(copy.deepcopy(model), batch)
        if torch.cuda.is_available():
            yield "compile", lambda: compiled_step(model, batch, "default")
            yield "graph", lambda: graphed(plain_step(copy.deepcopy(model), batch))
            mode = "max-autotune-no-cudagraphs" if self.has_autotune else "default"
            yield (
                f"graph of compile ({mode})",
                lambda: graphed(compiled_step(model, batch, mode)),
            )
        ours: dict[str, dict[str, Any]] = {
            "hocket, lanes: 1": {"num_lanes": 1},
            "hocket, lanes: 2": {},
            "hocket, lanes: 2, across steps": {"across_steps": True},
        }
        for name, options in ours.items():
            yield name, partial(hocket_step, model, batch, options, name, facts)


def plain_step(model: nn.Module, batch: Any, run: Any = None) -> Step:
    """Return torch's own step."""
    optimizer = fused(model.parameters())
    forward = model if run is None else run

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(forward(batch[0]), batch[1]).backward()
        optimizer.step()

    return step


def compiled_step(model: nn.Module, batch: Any, mode: str) -> Step:
    """Return torch's own step of a compiled copy."""
    own = copy.deepcopy(model)
    return plain_step(own, batch, torch.compile(own, mode=mode))


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
    model: nn.Module,
    batch: Any,
    options: Mapping[str, Any],
    name: str,
    facts: dict[str, Any],
) -> Step:
    """Return hocket's step, and note the orders that it tried."""
    begin_s = perf_counter()
    step = hocket.compile_step(
        copy.deepcopy(model), loss, fused, example=batch, **options
    )
    step.submit(batch)  # the first one is eager
    facts[name] = {
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
    return lambda: step.submit(batch)


def in_turn(
    steps: Mapping[str, Step], torch_device: torch.device
) -> dict[str, list[float]]:
    """Return the seconds of a step in each round; every other round goes backwards."""
    names, seconds = list(steps), {name: list[float]() for name in steps}
    for i in range(1 + NUM_ROUNDS):
        for name in names if i % 2 else names[::-1]:
            synchronize(torch_device)
            begin_s = perf_counter()
            for _ in range(STEPS_IN_TURN if torch_device.type == "cuda" else 1):
                steps[name]()
            synchronize(torch_device)
            num = STEPS_IN_TURN if torch_device.type == "cuda" else 1
            if i:
                seconds[name].append((perf_counter() - begin_s) / num)
    return seconds


if __name__ == "__main__":
    main()

"""What sharded pipelines make of what a plain loop does, on the workers of one job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import hocket
from hocket.run.cluster.world import World, join_world
from hocket.run.tune import build

NUM_STEPS: Final = 3
Make = Callable[[Any], torch.optim.Optimizer]
Changes = Callable[[int, nn.Sequential], None]


def nothing(step: int, net: nn.Sequential) -> None:
    """What most loops do before a step."""


class Scaled(nn.Module):
    """Its weight has one element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Scale."""
        return x * self.scale


def make_net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Layers of uneven shapes: 5 rows, and a weight of one element."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 5), nn.Tanh(), Scaled(), nn.Linear(5, 8), nn.Linear(8, 3)
    ).to(dtype)


def batches(dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    """Eight samples for each step."""
    rng = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(8, 6, generator=rng, dtype=torch.float64).to(dtype),
            torch.randn(8, 3, generator=rng, dtype=torch.float64).to(dtype),
        )
        for _ in range(NUM_STEPS)
    ]


def mse(output: Tensor, targets: Tensor) -> Tensor:
    """The mean square."""
    return ((output - targets) ** 2).mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Gradients show in the weights as they are."""
    return torch.optim.SGD(parameters, 0.1)


@contextmanager
def sharded(
    world: World, net: nn.Module, loss: Any = mse, optimizer: Make = sgd, **options: Any
) -> Iterator[hocket.Pipeline]:
    """A pipeline of one stage, which two workers hold together."""
    example = options.pop("example", None) or batches(next(net.parameters()).dtype)[0]
    given = {"num_microbatches": 2, "num_shards": 2, **options}
    with hocket.Pipeline(
        net, loss, optimizer=optimizer, example=example, world=world, **given
    ) as pipeline:
        yield pipeline


def plain(
    net: nn.Sequential,
    optimizer: Make,
    dtype: torch.dtype = torch.float64,
    before_step: Changes = nothing,
) -> dict[str, Tensor]:
    """The weights of a plain loop over the same four microbatches."""
    made = optimizer(list(net.parameters()))
    for step, (inputs, targets) in enumerate(batches(dtype)):
        before_step(step, net)
        for x, y in zip(inputs.split(2), targets.split(2), strict=True):
            (mse(net(x), y) / 4).backward()
        made.step()
        made.zero_grad()
    return net.state_dict()


def apart(
    world: World,
    optimizer: Make = sgd,
    dtype: torch.dtype = torch.float64,
    before_step: Changes = nothing,
) -> float:
    """How far the weights are from those of the plain loop."""
    expected = plain(make_net(dtype), optimizer, dtype, before_step)
    net = make_net(dtype)
    with sharded(world, net, optimizer=optimizer) as pipeline:
        for step, batch in enumerate(batches(dtype)):
            before_step(step, net)
            pipeline.step(batch)
        found = pipeline.state_dict()
    return max(float((found[name] - x).abs().max()) for name, x in expected.items())


def in_float32(world: World) -> float:
    """The type that models have as they are made."""
    return apart(world, dtype=torch.float32)


def in_bfloat16(world: World) -> float:
    """Weights and gradients of half precision."""
    return apart(world, dtype=torch.bfloat16)


def written(write: Callable[[Any], Any]) -> Callable[[World], float]:
    """A case: the loop writes weights before the second step."""

    def before_step(step: int, net: nn.Sequential) -> None:
        if step == 1:
            with torch.no_grad():
                write(net)

    return lambda world: apart(world, before_step=before_step)


def max_norm(world: World) -> float:
    """A forward that changes a weight."""
    net = nn.Sequential(nn.Embedding(9, 5, max_norm=0.5), nn.Linear(5, 3)).double()
    batch = torch.arange(8), batches()[0][1]
    with sharded(world, net, example=batch) as pipeline:
        return pipeline.step(batch).loss


def channels_last(world: World) -> float:
    """A weight whose memory is in another order."""
    conv = nn.Conv2d(3, 4, 3)
    conv.weight.data = conv.weight.data.to(memory_format=torch.channels_last)
    net = nn.Sequential(conv, nn.Flatten(), nn.Linear(16, 3)).double()
    batch = torch.randn(8, 3, 4, 4).double(), batches()[0][1]
    with sharded(world, net, example=batch) as pipeline:
        return pipeline.step(batch).loss


def second_pipeline(world: World, *, copies_first: bool = False) -> float:
    """Of a model whose weights are in shards, or were."""
    net = make_net()
    with sharded(world, net) as pipeline:
        pipeline.step(batches()[0])
        if copies_first:
            pipeline.gather_into(net)
    with sharded(world, net) as pipeline:
        return pipeline.step(batches()[1]).loss


def second_step(world: World) -> float:
    """The loss of the second step, of one pipeline."""
    with sharded(world, make_net()) as pipeline:
        return [pipeline.step(batch).loss for batch in batches()][1]


def compiled(world: World) -> float:
    """Another kind of run, of weights that are released."""
    net = make_net()
    with sharded(world, net) as pipeline:
        pipeline.step(batches()[0])
    with hocket.compile_step(net, mse, sgd, example=batches()[0]) as step:
        return step(batches()[0]).loss


def frozen_on_one(world: World) -> float:
    """One worker freezes a weight for a step: it has no gradient, others have."""

    def before_step(step: int, net: nn.Sequential) -> None:
        first: Any = net[0]
        is_frozen = step == 1 and world.rank == 1
        first.weight.requires_grad_(requires_grad=not is_frozen)

    return apart(world, before_step=before_step)


def another_optimizer(world: World) -> None:
    """The loop's own, over the same weights, which never have gradients."""
    net = make_net()
    other = sgd(net.parameters())
    with sharded(world, net) as pipeline:
        pipeline.step(batches()[0])
        other.step()


def freezes(world: World) -> None:
    """Layers that freeze while training runs."""
    policy = hocket.freeze.Listed({1: 1}, every_steps=2, layers="*")
    with sharded(world, make_net(), freeze=policy, shapes={}):
        pass


class Scales(torch.optim.Optimizer):
    """Reads numbers of each weight and gradient, in one way or another."""

    def __init__(self, parameters: Any, kind: str) -> None:
        super().__init__(parameters, {"kind": kind})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take the norms as tensors or numbers; draw numbers; or assign `data`."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                match group["kind"]:
                    case "norms":
                        p.sub_(0.1 * p.grad * (p.norm() / (p.grad.norm() + 1)))
                    case "numbers":
                        share = p.norm().item() / (p.grad.norm().item() + 1)
                        p.sub_(0.1 * share * p.grad)
                    case "draws":
                        p.sub_(0.1 * (p.grad + torch.randn_like(p)))
                    case "data":
                        p.data = p.data - 0.1 * p.grad


def few(make: Callable[[list[Any]], torch.optim.Optimizer]) -> Callable[[World], float]:
    """A case: an optimizer of the first layer's weights, found by identity."""

    def compare(world: World) -> float:
        nets = make_net(), make_net()

        def optimizer_of(net: nn.Sequential) -> Make:
            own = {id(x) for x in net[0].parameters()}
            return lambda given: make([x for x in given if id(x) in own])

        expected = plain(nets[0], optimizer_of(nets[0]))
        with sharded(world, nets[1], optimizer=optimizer_of(nets[1])) as pipeline:
            for batch in batches():
                pipeline.step(batch)
            found = pipeline.state_dict()
        return max(float((found[name] - x).abs().max()) for name, x in expected.items())

    return compare


def kind(name: str) -> Callable[[World], float]:
    """A case: an optimizer that reads numbers."""
    return lambda world: apart(world, lambda parameters: Scales(parameters, name))


def torchs(name: str) -> Callable[[World], float]:
    """A case: an optimizer of torch's, of the matrices."""
    made = getattr(torch.optim, name, torch.optim.AdamW)
    return lambda world: apart(
        world, lambda parameters: made([x for x in parameters if x.dim() == 2], lr=0.01)
    )


def of_dtensors(world: World) -> None:
    """A model whose first layer the user has sharded over both workers."""
    net = make_net()
    fully_shard(net[0], mesh=init_device_mesh("cpu", (2,)))
    with sharded(world, net, num_shards=1, num_replicas=2):
        pass


def parallel_net(axis: str = "tp") -> nn.Sequential:
    """A net whose first layer is parallelised over both workers."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    net = make_net()
    parallelize_module(net[0], mesh, ColwiseParallel())
    return net


def parallel(axis: str, **options: Any) -> Callable[[World], float]:
    """A case: a pipeline of such a net."""

    def case(world: World) -> float:
        net = parallel_net(axis)
        with sharded(world, net, **{"num_shards": 1, **options}):
            return 0.0

    return case


def of_two_axes(world: World) -> float:
    """One layer over both workers, another over one."""
    net = parallel_net()
    axes = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "tp"))
    parallelize_module(net[-1], axes["tp"], ColwiseParallel())
    with sharded(world, net, num_shards=1):
        return 0.0


def beside_parallel(world: World) -> float:
    """A teacher with DTensors."""
    teachers = {"t": hocket.Teacher(parallel_net())}
    with sharded(world, make_net(), num_shards=1, teachers=teachers):
        return 0.0


def emulated_parallel(_: World) -> float:
    """A net with DTensors in the oracle."""
    order = hocket.make_schedule("gpipe", num_devices=1, num_microbatches=2)
    hocket.emulate(order.program, parallel_net(), mse, sgd, batches(torch.float64))
    return 0.0


def compiled_parallel(_: World) -> float:
    """A net with DTensors in one captured step."""
    example = batches(torch.float64)[0]
    hocket.compile_step(parallel_net(), mse, sgd, example=example)
    return 0.0


def waving_parallel(world: World) -> float:
    """A net with DTensors in two waves."""
    with hocket.Waves(parallel_net(), mse, optimizer=sgd, world=world):
        return 0.0


class Weighted(nn.Module):
    """A loss over the whole batch, with a weight for each output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        """The weighted mean square."""
        return ((output - targets) ** 2 * self.weight).mean()


def whole_batch(world: World) -> float:
    """How far losses are apart where each op gathers, L among them, and where not."""

    def losses() -> tuple[list[float], int]:
        loss: Any = hocket.WholeBatch(Weighted())
        with sharded(world, make_net(), loss, schedule="gpipe") as pipeline:
            found = [pipeline.step(batch).loss for batch in batches()]
            return found, str(pipeline.plan.schedule).count("UNSHARD")

    few = losses()
    with patch.object(build, "choose_gathers", lambda *_: "op"):
        many = losses()
    assert (few[1], many[1]) == (1, 5), (few, many)  # F, F, L, B, B
    return max(abs(a - b) for a, b in zip(few[0], many[0], strict=True))


CASES: Final[dict[str, Callable[[World], Any]]] = {
    "float32": in_float32,
    "bfloat16": in_bfloat16,
    "clamped": written(lambda net: net[0].weight.clamp_(-0.1, 0.1)),
    "filled": written(lambda net: nn.init.constant_(net[0].weight, 0.1)),
    "filled data": written(lambda net: net[0].weight.data.zero_()),
    "one element": written(lambda net: net[2].scale.mul_(0.5)),
    "max_norm": max_norm,
    "channels_last": channels_last,
    "second step": second_step,
    "second pipeline": second_pipeline,
    "second pipeline of copies": lambda world: second_pipeline(
        world, copies_first=True
    ),
    "compiled": compiled,
    "frozen on one": frozen_on_one,
    "another optimizer": another_optimizer,
    "freeze": freezes,
    "norms": kind("norms"),
    "numbers": kind("numbers"),
    "draws": kind("draws"),
    "data": kind("data"),
    "by identity": few(lambda own: torch.optim.Adam(own, 0.01)),
    "by identity, with a state": few(lambda own: torch.optim.Adagrad(own, 0.01)),
    "Muon": torchs("Muon"),
    "Adafactor": torchs("Adafactor"),
    "DTensors": of_dtensors,
    "experts": parallel("ep"),
    "tp twice": of_two_axes,
    "tp in a teacher": beside_parallel,
    "tp in emulate": emulated_parallel,
    "tp in waves": waving_parallel,
    "tp in compile_step": compiled_parallel,
    "tp and shards": parallel("tp", num_shards=2),
    "tp and replicas": parallel("tp", num_replicas=2),
    "tp and old weights": parallel("tp", schedule="pipedream-2bw"),
    "tp and auto": parallel("tp", schedule="auto", precision="float16"),
    "whole batch": whole_batch,
}


def run(*names: str) -> dict[str, Any]:
    """What each case returns, or the error that it raises."""
    torch.set_num_threads(1)
    world = join_world()
    found = {}
    for name in names or CASES:
        try:
            found[name] = CASES[name](world)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    world.close()
    return found

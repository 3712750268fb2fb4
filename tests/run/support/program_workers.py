"""Workers that run one program after the other, beside the emulator."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.errors import SchemaError
from hocket.run.cluster.world import World
from hocket.run.comm.transports import TransportName
from hocket.run.data.batch import BatchOutput
from hocket.run.engine.program_run import ProgramRun
from tests.run.support.joined import join
from tests.run.support.rank_0_oracle import compared_on_rank_0
from tests.run.support.worker_pool import serve_texts

WIDTH = 4
NUM_STEPS = 5


class Branching(nn.Module):
    """Three blocks, of which the last reads the outputs of both others."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1))
        self.b = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        self.c = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        """Add up the inputs, and run the blocks."""
        for other in more:
            x = x + other
        first = self.a(x)
        second = self.b(first)
        return self.c(first + torch.tanh(second))


class Chain(nn.Module):
    """Blocks that follow each other."""

    def __init__(self, seed: int, num_blocks: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1))
            for _ in range(num_blocks)
        )

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        """Add up the inputs, and run the blocks."""
        for other in more:
            x = x + other
        for block in self.blocks:
            x = block(x)
        return x


def make_models(program: Program) -> tuple[dict[str, nn.Module], dict[str, list[str]]]:
    """Make the model of each net, and say where it is cut."""
    models: dict[str, nn.Module] = {}
    cuts: dict[str, list[str]] = {}
    for i, net in enumerate(program.nets):
        size = sum(stage.net == net.name for stage in program.stages)
        if size == 3:
            models[net.name], cuts[net.name] = Branching(i).double(), ["b", "c"]
        else:
            models[net.name] = Chain(i, size).double()
            cuts[net.name] = [f"blocks.{k}" for k in range(1, size)]
        if not any(x.trainable for x in program.stages if x.net == net.name):
            models[net.name].eval()
    return models, cuts


def per_sample(
    output: Tensor, targets: Tensor, *others: Tensor | BatchOutput
) -> dict[str, Tensor]:
    """Return a mean over samples."""
    fit = F.mse_loss(output, targets)
    near = sum((_apart(output, other) for other in others), torch.zeros(()))
    return {"loss": fit + 0.5 * near, "fit": fit}


def _apart(output: Tensor, other: Tensor | BatchOutput) -> Tensor:
    """Return how far outputs are from another net's.

    Where it is of the whole batch, its own rows are compared with all others.
    """
    if isinstance(other, BatchOutput):
        torch.testing.assert_close(other.own, other.all[other.rows])
        return F.cross_entropy(output @ other.all.tanh().T, other.rows)
    return F.mse_loss(output, other)


def contrast(output: Tensor, targets: Tensor, *others: Tensor) -> Tensor:
    """Compare all samples with each other.

    A number added to all keys changes this, as it would not without the tanh: the
    gradient of a bias would be rounding errors, which Adam makes large.
    """
    rows = torch.arange(len(output))
    logits = [output @ key.tanh().T for key in (targets, *others)]
    return sum((F.cross_entropy(x, rows) for x in logits), torch.zeros(()))


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make an optimizer that is sensitive to small differences."""
    return torch.optim.AdamW(parameters, lr=1e-2)


def make_batches(program: Program) -> list[tuple[Any, Any]]:
    """Make one batch per step, of samples that do not divide evenly."""
    most = max(net.num_microbatches for net in program.nets) * program.num_pipelines
    size = 2 * most * max(1, len(program.copies and program.nets)) + 1
    generator = torch.Generator().manual_seed(7)

    def draw() -> Tensor:
        return torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)

    return [(draw(), draw()) for _ in range(NUM_STEPS)]


def arguments(program: Program) -> dict[str, Any]:
    """Return models, losses and optimizers of each net that is no copy."""
    models, cut_at = make_models(program)
    losses: dict[str, Any] = {}
    optimizers: dict[str, Any] = {}
    for net in program.nets:
        stages = [i for i, x in enumerate(program.stages) if x.net == net.name]
        facts = program.stages[stages[0]]
        if facts.trainable:
            optimizers[net.name] = adamw
            if not program.gradient_targets[stages[-1]]:
                losses[net.name] = contrast if net.batch_loss else per_sample
        elif facts.follows:
            optimizers[net.name] = hocket.Momentum(0.7)
    copied = {program.stages[x].net for group in program.copies for x in group[1:]}
    found = {
        "models": models,
        "losses": losses,
        "optimizers": optimizers,
        "cut_at": cut_at,
    }
    return {
        name: {net: x for net, x in by_net.items() if net not in copied}
        for name, by_net in found.items()
    }


def difference(
    world: World, text: str, clip_norm: float | None, transport: TransportName = "auto"
) -> float:
    """Run a program; the largest relative difference of any number to the emulator."""
    schedule = Schedule.parse(text)
    program, batches = schedule.program, make_batches(schedule.program)
    given = arguments(program)
    alone = copy.deepcopy(given)
    with ProgramRun(
        schedule,
        **given,
        example=batches[0],
        clip_norm=clip_norm,
        transport=transport,
        sanitize=len(schedule.lanes) > program.num_devices,
        world=world,
    ) as run:
        found = [result.losses_of for result in run.train(batches)]
        states = run.state_dict()
    reported = {"losses": found, "states": states}
    return compared_on_rank_0(
        world, reported, lambda: _far(program, alone, clip_norm, found, states)
    )


def _far(
    program: Program,
    alone: dict[str, Any],
    clip_norm: float | None,
    found: Sequence[Mapping[str, Mapping[str, float]]],
    states: Mapping[str, Mapping[str, Tensor]],
) -> float:
    """The largest relative difference of any number to the emulator."""
    batches = make_batches(program)
    history = hocket.emulate(program, **alone, batches=batches, clip_norm=clip_norm)
    names = list(alone["models"])
    worst = 0.0
    for own, other in zip(found, history, strict=True):
        expected = {names[0]: other} if len(names) == 1 else other
        for net, named in expected.items():
            for name, value in named.items():
                copies = [x for x in own if x == net or x not in names]
                total = sum(own[x][name] for x in copies)
                worst = max(worst, abs(total - value) / max(1.0, abs(value)))
    for net, model in alone["models"].items():
        for name, value in model.state_dict().items():
            error = (states[net][name] - value).abs().max() / value.abs().max()
            worst = max(worst, float(error))
    return worst


def run_all(
    orders: list[str], clip_norm: float | None = None, transport: TransportName = "auto"
) -> list[float]:
    """Run some programs in one job."""
    world = join()
    found = [difference(world, text, clip_norm, transport) for text in orders]
    world.close()
    return found


def serve(folder: str) -> None:
    """Run the programs that appear in a folder, one by one."""
    torch.set_num_threads(1)

    def answer(world: World, text: str) -> str:
        clip_text, _, order = text.partition("\n")
        clip_norm = float(clip_text) if clip_text else None
        return repr(difference(world, order, clip_norm))

    serve_texts(folder, answer)


def refused_differences(text: str) -> dict[str, str]:
    """Make runs that differ from rank 1 on in one thing; return each error."""
    world = join()
    errors = {}
    for what in ("schedule", "weights", "updates", "seed"):
        differs = what if world.rank else ""
        swapped = text.replace("1B0 1B1", "1B1 1B0")
        schedule = Schedule.parse(swapped if differs == "schedule" else text)
        given = arguments(schedule.program)
        if differs == "weights":
            given["models"]["n0"].blocks[0][0].bias.data += 1.0
        if differs == "updates":
            given["optimizers"]["n0"] = partial(torch.optim.AdamW, lr=2e-2)
        example = make_batches(schedule.program)[0]
        try:
            ProgramRun(
                schedule,
                **given,
                example=example,
                seed=int(differs == "seed"),
                world=world,
            )
        except SchemaError as error:
            errors[what] = str(error)
    world.close()
    return errors

"""Every way in, with the model, the batch and another net on the host or the device.

A cell is named by its entry point and by where the three are: `train mdh` has the model
on the host, the batch on the device and the other net on the host; `-` is no such net.
"""

from __future__ import annotations

import gc
import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hocket
from hocket.freeze.measuring import Plasticity
from hocket.recipes.config.resolve import resolve
from hocket.recipes.training.train import train_recipe
from hocket.run.cluster.world import World, join_world
from hocket.run.device.cpu import CpuDevice
from hocket.run.outoforder import compile_step
from hocket.sharing.running import share as share_module
from hocket.sharing.waves import waves as waves_module
from tests.run.support.cached_workers import Rows, always_pays, make_chain
from tests.run.support.comparison import difference
from tests.run.support.exported_once import export_once
from tests.run.support.freezing_workers import OneMore, measure_briefly
from tests.run.support.short_measurements import measure_shortly
from tests.run.support.stand_in_device import register
from tests.run.support.started import started
from tests.run.support.teacher_models import (
    LOSSES,
    adamw,
    make_batches,
    make_student,
    make_teacher,
)

NUM_STEPS: Final = 2
Found = dict[str, Any]  # tensors and numbers


@dataclass(frozen=True)
class Places:
    """Where the parts of a cell are.

    Args:
        world: the job; its device is the one that trains.
        model: "h" for the host, "d" for that device.
        batch: the same, of all batches.
        other: the same, of another net; "-" for none.
    """

    world: World
    model: str
    batch: str
    other: str

    def put(self, value: Any, where: str) -> Any:
        """Move a module, or what a structure holds."""
        if where == "h":
            return value
        if isinstance(value, nn.Module):
            return value.to(self.world.device)
        move = lambda x: x.to(self.world.device)  # noqa: E731
        return pytree.tree_map_only(Tensor, move, value)

    def batches(self, num: int = NUM_STEPS) -> list[Any]:
        """Batches of vectors and classes."""
        return [self.put(batch, self.batch) for batch in make_batches(num)]

    def pipeline(self, **options: Any) -> hocket.Pipeline:
        """A pipeline of the student, with what a cell asks for."""
        return started(
            self.put(options.pop("model", None) or make_student(), self.model),
            options.pop("loss", F.cross_entropy),
            adamw,
            options.pop("example", None) or self.batches(1)[0],
            world=self.world,
            **{"schedule": "1f1b", "num_microbatches": 2, **options},
        )


def train(places: Places, loss: str = "distil", **teacher: Any) -> Found:
    """Train, evaluate with metrics, return outputs; with a teacher, or without."""
    options: dict[str, Any] = {}
    if places.other != "-":
        kind = "momentum" if teacher.get("update") else "frozen"
        net = places.put(make_teacher(kind), places.other)
        options["teachers"] = {"teacher": hocket.Teacher(net, **teacher)}
        options["loss"] = LOSSES[loss]
    with places.pipeline(**options) as pipeline:
        losses = [x.loss for x in pipeline.train(places.batches())]
        batches = places.batches(4)[-2:]
        evaluated = pipeline.evaluate(batches, accuracy)
        outputs = pipeline.outputs(batches)
        return {
            "losses": [*losses, evaluated.loss, *evaluated.metrics.values()],
            "outputs": outputs,
            **pipeline.state_dict(),
        }


def accuracy(output: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """The share of right classes."""
    return {"accuracy": (output.argmax(1) == targets).double().mean()}


def moving(places: Places) -> Found:
    """A teacher that follows the student, of which the loss reads the whole batch."""
    moves = hocket.Momentum(0.9)
    return train(places, "contrast-with-all", update=moves, whole_batch=True)


class Weighted(nn.Module):
    """Classes with weights, which are a buffer, and a scale that is trained."""

    def __init__(self) -> None:
        super().__init__()
        weights = torch.linspace(0.5, 1.5, 6).double()
        self.weights = nn.Buffer(weights)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        """The weighted cross-entropy, and the distance of the scale from 2."""
        each = F.cross_entropy(output * self.scale, targets, reduction="none")
        return (each * self.weights[targets]).mean() + (self.scale - 2).square()


def own_loss(places: Places) -> Found:
    """A loss with a buffer and a parameter of its own."""
    loss = places.put(Weighted(), places.other)
    with places.pipeline(loss=loss) as pipeline:
        losses = [x.loss for x in pipeline.train(places.batches())]
        return {"losses": losses, **pipeline.state_dict()}


def saved(places: Places) -> Found:
    """Save after one step, and train the second one twice: on, and from the file."""
    found: list[Found] = []
    first, second = places.batches()
    with tempfile.TemporaryDirectory() as folder:
        with places.pipeline() as pipeline:
            pipeline.step(first)
            pipeline.save(folder)
            pipeline.step(second)
            found.append(pipeline.state_dict())
            into = places.put(make_student(), places.other)
            pipeline.gather_into(into)
            found.append({k: x.cpu() for k, x in into.state_dict().items()})
        with places.pipeline() as pipeline:
            pipeline.load(folder)
            pipeline.step(second)
            found.append(pipeline.state_dict())
    assert all(torch.equal(x, one[k]) for one in found[1:] for k, x in found[0].items())
    return found[0]


def frozen(places: Places, cache: hocket.Cache | None = None, **more: Any) -> Found:
    """Freeze layers while training runs, and cut the model again."""
    loader = hocket.SampleLoader(Rows(), 16, seed=2)
    found: list[Any] = []
    with places.pipeline(
        model=make_chain(),
        example=places.put(loader.example(), places.batch),
        num_microbatches=4,
        cache=cache,
        **{"shapes": {}, "freeze": OneMore(every_steps=2), **more},
    ) as pipeline:
        for _ in range(3):
            given = places.put([*loader], places.batch) if cache is None else loader
            for x in pipeline.train(given):
                found += [x.loss, x.num_frozen]
        return {"losses": found, **pipeline.state_dict()}


def cached(places: Places) -> Found:
    """Freeze layers, and keep what they compute."""
    always_pays()
    with tempfile.TemporaryDirectory() as folder:
        cache = hocket.Cache(Path(folder), ram_bytes=1 << 20, disk_bytes=1 << 20)
        return frozen(places, cache)


def recut(places: Places) -> Found:
    """Freeze layers on two workers: layers go between them, then they are replicas."""
    return frozen(places, shapes={2: (1, 2)})


def by_activations(places: Places) -> Found:
    """Freeze by how activations change, which go from worker to worker."""
    policy = Plasticity(window=2, patience=1, tolerance=9.0, every_steps=2)
    return frozen(places, freeze=policy)


def filled(places: Places) -> Found:
    """Fill two workers' waits with forwards of another net; they change nothing."""
    rows: list[int] = []
    torch.manual_seed(7)
    net = places.put(nn.Linear(6, 2).double().eval(), places.other)
    samples = places.put(make_batches(1)[0][0], places.batch)

    def take(done: range, output: Tensor) -> None:
        assert output.shape == (len(done), 2)
        rows.extend(done)

    fill = hocket.Fill(net, samples, take, max_slowdown=1.0)
    with places.pipeline(fill=fill, num_microbatches=4) as pipeline:
        losses = [x.loss for x in pipeline.train(places.batches(4))]
        return {"losses": losses, **pipeline.state_dict()}


def planned(places: Places) -> Found:
    """Plan from what is measured on the device; and for hardware, from counts alone."""
    model, batch = places.put(make_student(), places.model), places.batches(1)[0]
    asked: dict[str, Any] = {"num_devices": 1, "optimizer": adamw}
    loss: dict[str, Any] = {"loss": F.cross_entropy}
    measured = hocket.plan(model, batch, world=places.world, **asked, **loss)
    with_loss, without = (
        hocket.plan(model, batch, hardware="a100-80g", **asked, **more)
        for more in (loss, {})
    )
    assert with_loss.best is not None
    assert without.best is not None
    assert with_loss.best.step_s > without.best.step_s, "the loss was not counted"
    return {"num": [len(measured.outcomes), len(with_loss.outcomes)]}


def compiled(places: Places) -> Found:
    """One captured step of a device: a model on the host trains there."""
    model = places.put(make_student(), places.model)
    with hocket.compile_step(
        model, F.cross_entropy, adamw, example=places.batches(1)[0], num_lanes=1
    ) as step:
        losses = [step(batch).loss for batch in places.batches(3)]
    return {"losses": losses, **{k: x.cpu() for k, x in model.state_dict().items()}}


def waves(places: Places) -> Found:
    """Two waves of one job."""
    model = places.put(make_student(), places.model)
    with hocket.Waves(
        model, F.cross_entropy, optimizer=adamw, sync="exact", world=places.world
    ) as pair:
        losses = [x.loss for x in pair.train(places.batches(3))]
        losses.append(pair.evaluate(places.batches(1)).loss)
        return {"losses": losses, **{k: x.cpu() for k, x in pair.state_dict().items()}}


def shared(places: Places) -> Found:
    """Two jobs that share the device; a job moves its model, as a plain loop does."""

    def make(job: hocket.JobContext) -> tuple[Any, Any]:
        model = make_student().to(job.device)
        optimizer = adamw(model.parameters())

        def step(batch: Any) -> float:
            x, y = (part.to(job.device) for part in batch)
            optimizer.zero_grad()
            with job.forward():
                loss = F.cross_entropy(model(x), y)
            with job.backward():
                loss.backward()
            optimizer.step()
            return loss.item()

        return step, places.batches(5)

    jobs = [hocket.Job("a", make), hocket.Job("b", make)]
    found: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(share_module, "_device_of", lambda device: places.world.device)
        for mode in ("turns", "free"):
            report = hocket.share(jobs, mode=mode)
            report.check()
            assert all(job.static_bytes > 0 for job in report.jobs)
            found += [x for job in report.jobs for x in job.losses]
    return {"losses": found}


def recipe(places: Places) -> Found:
    """`hocket train` of a recipe, on this device."""
    sets = {
        "model": {"num_blocks": 1, "width": 8, "mlp_width": 8},
        "training": {"num_epochs": 1, "batch_size": 600, "evaluate_every_epochs": 1},
        "optimizer": {"num_warmup_steps": 1},
        "pipeline": {"num_workers": places.world.world_size, "num_microbatches": 2},
    }
    given = [f"{a}.{b}={x}" for a, own in sets.items() for b, x in own.items()]
    resolved = resolve("digits-vit", given)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "recipe.toml").write_text(resolved.to_toml())
        found = train_recipe(resolved.recipe, Path(folder), world=places.world)
    return {"loss": [found.loss, *found.metrics.values()]}


ENTRIES: Final[dict[str, Callable[[Places], Found]]] = {
    "train": train,
    "moving": moving,
    "loss": own_loss,
    "save": saved,
    "freeze": frozen,
    "cache": cached,
    "recut": recut,
    "activations": by_activations,
    "fill": filled,
    "plan": planned,
    "compile_step": compiled,
    "waves": waves,
    "share": shared,
    "recipe": recipe,
}


def cells(entry: str, others: str = "-") -> list[str]:
    """All cells of an entry point."""
    return [f"{entry} {''.join(x)}" for x in itertools.product("hd", "hd", others)]


def lanes_of(
    device: torch.device, num_lanes: int, *, timeout_s: float, sanitize: bool = False
) -> CpuDevice:
    """Lanes that play on the device."""
    lanes = CpuDevice(num_lanes, budget_bytes=1 << 40, timeout_s=timeout_s)
    lanes.torch_device = device  # type: ignore[misc]  # a CPU's is another one
    return lanes


def run_cells(*asked: str) -> dict[str, float | str]:
    """Run cells on the device and once on the CPU; the differences, or the errors."""
    device = register()
    torch.set_num_threads(1)
    gc.freeze()  # the collector skips what is imported
    measure_briefly()
    patch = pytest.MonkeyPatch()
    measure_shortly(patch)
    export_once(patch)  # of a place
    there = replace(join_world(device="cpu"), device=device)
    here = replace(there, device=torch.device("cpu"))
    patch.setattr(compile_step, "open_device", lanes_of)
    patch.setattr(waves_module, "open_device", lanes_of)
    patch.setattr(
        import_module("hocket.sharing.running.share"), "open_device", lanes_of
    )
    known: dict[str, Found] = {}
    found: dict[str, float | str] = {}
    for cell in asked:
        entry, places = cell.split()
        model, batch, other = [*places]
        key = f"{entry} {other == '-'}"
        if key not in known:
            plain = Places(here, "h", "h", "-" if other == "-" else "h")
            known[key] = ENTRIES[entry](plain)
        try:
            actual = ENTRIES[entry](Places(there, model, batch, other))
        except Exception as error:
            found[cell] = f"{type(error).__name__}: {error}"
        else:
            found[cell] = _largest(actual, known[key])
    return found


def _largest(actual: Found, expected: Found) -> float:
    assert actual.keys() == expected.keys()
    pairs = (
        (torch.as_tensor(actual[k]), torch.as_tensor(x)) for k, x in expected.items()
    )
    return max(difference(a.cpu(), x) for a, x in pairs)

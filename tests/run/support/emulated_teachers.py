"""Workers that train with the losses of papers; compared with the emulator."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hocket
from hocket.run.cluster.world import World
from hocket.run.stage.net_output import with_teachers
from tests.run.support.joined import join
from tests.run.support.rank_0_oracle import compared_on_rank_0
from tests.run.support.started import started

WIDTH: Final = 8
_NUM_TOKENS: Final = 5


class Encoder(nn.Module):
    """A transformer with dropout, for sequences with padding."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH, padding_idx=0)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.2, batch_first=True)
            for _ in range(num_blocks)
        )
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """From words to logits, the mean over words that are no padding."""
        is_word = tokens_BT != 0
        x = self.embedding(tokens_BT)
        for block in self.blocks:
            x = block(x, src_key_padding_mask=~is_word)
        kept = is_word.to(x.dtype)[:, :, None]
        return self.head((x * kept).sum(1) / kept.sum(1))


def mlp(*, predicts: bool) -> nn.Sequential:
    """Make a net with batch norms; a student has a predictor behind it."""
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.BatchNorm1d(WIDTH),
            nn.Tanh(),
        ]
    layers.append(nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(*layers, *([nn.Linear(WIDTH, WIDTH)] if predicts else []))


def sentences(num: int) -> list[tuple[Tensor, Tensor]]:
    """Draw words with padding behind them, and classes; batches are uneven."""
    rng = torch.Generator().manual_seed(2)
    found = []
    for i in range(num):
        size = 9 - i % 2
        words = torch.randint(1, 11, (size, _NUM_TOKENS), generator=rng)
        length = torch.randint(2, _NUM_TOKENS + 1, (size, 1), generator=rng)
        words = words * (torch.arange(_NUM_TOKENS) < length)
        found.append((words, torch.randint(4, (size,), generator=rng)))
    return found


def views(num: int) -> list[tuple[Tensor, Tensor]]:
    """Draw first views, and behind them second views."""
    rng = torch.Generator().manual_seed(2)
    return [
        (torch.randn(12, WIDTH, generator=rng, dtype=torch.float64), torch.zeros(12))
        for _ in range(num)
    ]


def lars(parameters: Any) -> torch.optim.Optimizer:
    """Make an optimizer whose steps depend on each layer's norm."""
    return hocket.Lars(parameters, lr=0.5, weight_decay=1e-3)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make an optimizer that is sensitive to small differences."""
    return torch.optim.AdamW(parameters, lr=1e-2)


LOSSES: Final[dict[str, Callable[[], Any]]] = {
    "distillation": partial(hocket.Distillation, temperature=2.0, weight=0.5),
    "byol": hocket.Byol,
    "moco": hocket.MocoV3,
    "dino": hocket.Dino,
    "near": lambda: near,
}
_OVER_BATCH: Final = ("byol", "moco", "dino")  # each sample's term reads all outputs


def train_all(cases: list[dict[str, Any]], folder: str) -> list[float]:
    """Train each case; return the largest difference of a weight or a buffer."""
    world = join()
    return [_difference(world, case, Path(folder)) for case in cases]


def _difference(world: World, case: dict[str, Any], folder: Path) -> float:
    torch.manual_seed(7)
    loss, delay = LOSSES[case["loss"]](), case.get("delay")
    student: nn.Module
    net: nn.Module
    update: hocket.Momentum | None = None
    num_batches = case.get("accumulate", 1)  # of each update
    if case["loss"] == "distillation":
        data = sentences(case["num_steps"])
        student, net = Encoder(2), Encoder(2)
    else:
        data = views(case["num_steps"] * num_batches)
        update = hocket.Momentum(0.9)
        student, net = (
            mlp(predicts=case["loss"] in ("byol", "moco")),
            mlp(predicts=False),
        )
    dtype = torch.float32 if case.get("is_float32") else torch.float64
    student, net = student.to(dtype), net.to(dtype)
    data = [(x.to(dtype) if x.is_floating_point() else x, y) for x, y in data]
    models = {"model": copy.deepcopy(student), "teacher": copy.deepcopy(net)}
    optimizer = lars if case.get("is_lars") else adamw
    with started(
        student,
        loss,
        optimizer,
        data[0],
        schedule=case["schedule"],
        num_microbatches=3,
        teachers={
            "teacher": hocket.Teacher(
                net,
                update=update,
                delay=delay,
                mode=case["mode"],
                whole_batch=case["loss"] in _OVER_BATCH,
            )
        },
        accumulate=num_batches,
        profile_dir=folder / "profiles",
        world=world,
    ) as pipeline:
        for _ in pipeline.train(data):
            pass
        state = pipeline.state_dict()
        program = pipeline.plan.schedule.program
        names = pipeline.plan.stage_names
    first = sum(stage.net == "teacher" for stage in program.stages)
    cut_at = {
        "teacher": [x.removeprefix("teacher.") for x in names[1:first]],
        "model": list(names[first + 1 :]),
    }

    whole, joined = _as_one_batch(program, data, num_batches)

    def difference() -> float:
        return _far(case, models, whole, cut_at, joined, state)

    return compared_on_rank_0(world, state, difference)


def _as_one_batch(
    program: hocket.Program, data: list[Any], num: int
) -> tuple[hocket.Program, list[Any]]:
    """Several batches of equal sizes are one, of as many times the microbatches."""
    nets = (replace(x, num_microbatches=x.num_microbatches * num) for x in program.nets)
    groups = (data[i : i + num] for i in range(0, len(data), num))
    joined = [tuple(map(torch.cat, zip(*group, strict=True))) for group in groups]
    return replace(program, nets=tuple(nets)), joined


def near(output: Tensor, targets: Tensor, teachers: Mapping[str, Any]) -> Tensor:
    """Compare each sample with the teacher's output of it."""
    del targets
    return F.mse_loss(output, teachers["teacher"].own)


def _far(
    case: dict[str, Any],
    models: Mapping[str, nn.Module],
    program: hocket.Program,
    cut_at: dict[str, list[str]],
    data: list[Any],
    state: dict[str, Tensor],
) -> float:
    """The largest relative difference of a weight or buffer to the emulator's."""
    loss, update = LOSSES[case["loss"]](), None
    if case["loss"] != "distillation":
        update = hocket.Momentum(0.9)
    optimizer = lars if case.get("is_lars") else adamw
    hocket.emulate(
        program,
        {
            name: x.train(name == "model" or case["mode"] == "train")
            for name, x in models.items()
        },
        {"model": with_teachers(loss, ["teacher"])},
        {"model": optimizer} | ({} if update is None else {"teacher": update}),
        data,
        cut_at=cut_at,
    )
    expected = dict(models["model"].state_dict())
    if update is not None:
        own = models["teacher"].state_dict().items()
        expected |= {f"teacher.{name}": x for name, x in own}
    assert [*expected] == [*state]
    return max(
        float((state[name] - x).abs().max() / x.abs().max().clamp(min=1e-3))
        for name, x in expected.items()
        if x.is_floating_point()
    )

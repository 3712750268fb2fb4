"""What the workers of the refusal tests do: train what must not be trained so.

Each pipeline is made on all workers; what each raised is returned by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hocket
from tests.run.support.joined import join, reported

WIDTH: Final = 6
NUM_STEPS: Final = 3
BATCH: Final = 8


class Layer(nn.Module):
    """A linear layer, to be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Remembers(Layer):
    """Adds its last output to its next input."""

    hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x if self.hidden is None else x + self.hidden.mean())
        self.hidden = out.detach()
        return out


class Recomputes(Layer):
    """In a checkpoint, from some forward in training on."""

    def __init__(self, *, use_reentrant: bool, after: int = 0) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.num_left = after

    def forward(self, x: Tensor) -> Tensor:
        self.num_left -= self.training
        if self.num_left >= 0:
            return super().forward(x)
        out: Tensor = checkpoint(super().forward, x, use_reentrant=self.use_reentrant)
        return out


class LooksUp(Layer):
    """Adds a row of a table, whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.table((x[:, 0] > 0).long())


class Insists(torch.optim.SGD):
    """Says that it can do without a closure, and cannot."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "I need a closure"
        return super().step(closure)


class Searches(torch.optim.SGD):
    """Evaluates the loss again and again."""

    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        super().step()
        return closure()


def contrast(output: Tensor, targets: Tensor) -> Tensor:
    """Each sample against all others of the batch."""
    score_BB = F.normalize(output, dim=-1) @ F.normalize(output, dim=-1).T
    return F.cross_entropy(10 * score_BB, torch.arange(len(output)))


def train_all(names: list[str], folder: str) -> dict[str, list[str]]:
    """Train each case; return what this worker raised, or nothing."""
    world = join()
    settings = {"world": world, "profile_dir": Path(folder).parent / "profiles"}
    return {name: reported(partial(CASES[name], settings)) for name in names}


def _case(
    module: Callable[[], nn.Module] = Layer,
    change: Callable[[nn.Module], object] | None = None,
    schedule: str = "pipedream-2bw",
    **more: Any,
) -> Callable[[dict[str, Any]], None]:
    """Train a model with this module in it, changed before the last step."""

    def train(settings: dict[str, Any]) -> None:
        torch.manual_seed(0)
        layers = Layer(), module(), *(Layer() for _ in range(4))
        model = nn.Sequential(*layers).double()
        data = list(batches())
        wanted: dict[str, Any] = {
            "schedule": schedule,
            "cut": ["3"],
            "num_microbatches": 2,
            "optimizer": partial(torch.optim.SGD, lr=0.1),
            **settings,
            **more,
        }
        loss = wanted.pop("loss", F.mse_loss)
        with hocket.Pipeline(model, loss, example=data[0], **wanted) as pipeline:
            for batch in data[:-1]:
                pipeline.step(batch)
            if change is not None:
                change(model)
            pipeline.step(data[-1])

    return train


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """What all train on."""
    rng = torch.Generator().manual_seed(1)
    for _ in range(NUM_STEPS):
        x, y = torch.randn(2, BATCH, WIDTH, generator=rng, dtype=torch.float64)
        yield x, y


def _frozen(model: nn.Module) -> None:
    model.get_submodule("1.linear").requires_grad_(False)


def _sees_sums(model: nn.Module) -> None:
    weight = model.get_parameter("1.linear.weight")
    weight.register_post_accumulate_grad_hook(lambda p: None)


CASES: Final[dict[str, Callable[[dict[str, Any]], None]]] = {
    "all is well": _case(),
    "state": _case(Remembers),
    "checkpoint": _case(partial(Recomputes, use_reentrant=False)),
    "both, flushed": _case(
        lambda: nn.Sequential(Remembers(), Recomputes(use_reentrant=True)),
        schedule="1f1b",
    ),
    # In the second step; the two tries of the first, and the dry run, are undone.
    "checkpoint, later, reentrant": _case(
        partial(Recomputes, use_reentrant=True, after=3)
    ),
    "recompute": _case(recompute="all"),
    "frozen": _case(change=_frozen),
    "frozen, flushed": _case(change=_frozen, schedule="1f1b"),
    "sums seen, one replica": _case(change=_sees_sums, schedule="1f1b"),
    "sums seen": _case(change=_sees_sums, schedule="1f1b", num_replicas=2, cut=None),
    "sparse, one replica": _case(LooksUp, schedule="1f1b"),
    "sparse": _case(LooksUp, schedule="1f1b", num_replicas=2, cut=None),
    "closure": _case(optimizer=partial(Searches, lr=0.1)),
    "closure, hidden": _case(optimizer=partial(Insists, lr=0.1)),
    "2bw": _case(num_microbatches=1),
    "wpipe": _case(schedule="wpipe", num_microbatches=1),
    "wpipe-overlapped": _case(schedule="wpipe-overlapped", num_microbatches=1),
    "contrast": _case(loss=contrast, schedule="1f1b"),
    "contrast, whole": _case(loss=contrast, num_microbatches=1, schedule="1f1b"),
    "contrast, per microbatch": _case(loss=hocket.PerMicrobatch(contrast)),
}

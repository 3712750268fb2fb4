"""What a case is: a small script of the plain loop, and what each way to run it gives.

A case is written once, as somebody writes a loop in plain torch: the model, the loss,
the optimizer, some batches, and what the loop does between two steps. `ways.py` runs it
by hocket, `plain.py` as it stands, and `test_matrix.py` compares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

# Ways to run a case, and the heads of their columns.
WAYS: Final = {
    "own-1": "own forward, 1 worker",
    "own-2": "own forward, 2 workers",
    "seq-1": "Sequential, 1 worker",
    "seq-2": "Sequential, 2 workers",
    "compile": "`compile_step`",
    "teacher": "with a teacher",
    "freeze": "`freeze=`",
    "wpipe": "WPipe",
    "2bw": "2BW",
}
ALL: Final = " ".join(WAYS)
OWN: Final = (
    "own-1 own-2 teacher freeze wpipe 2bw"  # run the form with a forward of its own
)
PIPELINES: Final = f"{OWN} seq-1 seq-2"


TOLERANCE: Final = 1e-10


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one way to run a case must give: the plain loop's numbers, or an error.

    Args:
        kind: "equal"; "refused"; "open", where neither is so today; or "none", where
            the way cannot run the case.
        text: what the error names; what happens today; why the way cannot run it.
        error: of an open one: a text of the error that is raised today, if one is.
        tolerance: how far equal numbers may be apart.
    """

    kind: str
    text: str = ""
    error: str = ""
    tolerance: float = TOLERANCE


EQUAL: Final = Verdict("equal")


def in_float32(why: str) -> Verdict:
    """The plain loop's numbers, but for a rounding of float32; says which."""
    return Verdict("equal", why, tolerance=1e-7)


def refused(names: str) -> Verdict:
    """An error of hocket's whose message holds this text."""
    return Verdict("refused", names)


def still_open(today: str, *, error: str = "") -> Verdict:
    """Neither equal nor refused as it should be: says what happens today."""
    return Verdict("open", today, error)


def unsuited(why: str) -> Verdict:
    """The way cannot run the case."""
    return Verdict("none", why)


def mse(output: Tensor, targets: Tensor) -> Tensor:
    """The mean square."""
    return ((output - targets) ** 2).mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Gradients show in the weights as they are."""
    return torch.optim.SGD(parameters, 0.1)


def nothing(step: int, net: Any) -> None:
    """What most loops do between two steps."""


@dataclass
class Script:
    """A plain loop, made anew for each run.

    Args:
        net: the model; of an `nn.Sequential`, the form with a forward of its own is
            made by itself (`own_form`).
        batches: one for each step; eight samples, as a rule.
        loss: of a microbatch; one with weights of its own is a module.
        optimizer: makes the optimizer.
        before_step: called with the step and the model before each step.
        after_step: the same, after each.
        num_microbatches: in the pipelines.
        cut: where stage 1 begins; the middle of an `nn.Sequential`, when not given.
        layers: which modules may freeze, as `hocket.freeze` takes it.
        frozen: the modules that the first of them freezes.
        shared: the places of positional inputs that all samples share.
        scheduler: of the learning rate.
        clip_norm: of the gradients.
        options: further arguments of the pipeline that change no number.
        seen: what the script's own functions note while training runs, by name.
        evaluates: whether to evaluate at the end, and to compare that, too.
        metric: of a microbatch, in evaluation.
        own_alike: whether the user's modules hold in the end, on one worker, what
            `state_dict()` gives.
        teacher_alike: whether the loop does to a teacher, too, what it does to the
            model between two steps. Not with modes, which `hocket.Teacher` says.
    """

    net: nn.Module
    batches: Sequence[tuple[Any, Any]]
    loss: Callable[..., Any] = mse
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    before_step: Callable[[int, Any], None] = nothing
    after_step: Callable[[int, Any], None] = nothing
    num_microbatches: int = 2
    cut: str = ""
    layers: str = "*"
    frozen: tuple[str, ...] = ()
    shared: tuple[int, ...] = ()
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None
    clip_norm: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, list[Any]] = field(default_factory=dict)
    evaluates: bool = True
    metric: Callable[[Any, Any], Tensor] | None = None
    own_alike: bool = True
    teacher_alike: bool = True

    def __post_init__(self) -> None:
        """Put the model into float64, and name what is not given."""
        self.net.double().train()
        children = [name for name, _ in self.net.named_children()]
        if isinstance(self.net, nn.Sequential):
            self.cut = self.cut or children[len(children) // 2]
        self.frozen = self.frozen or tuple(children[:1])

    @property
    def own_loss(self) -> Any:
        """The user's own loss, without what it is declared as."""
        return getattr(self.loss, "loss", self.loss)


@dataclass(frozen=True, slots=True)
class Case:
    """One situation.

    Args:
        name: of the function that makes the script.
        what: one line for the table.
        make: makes the script.
        verdicts: by way, where the plain loop's numbers are not what comes.
    """

    name: str
    what: str
    make: Callable[[], Script]
    verdicts: Mapping[str, Verdict]

    @property
    def has_sequential(self) -> bool:
        """Whether there are two forms of the model."""
        return _makes_sequential(self.make)

    def verdict(self, way: str) -> Verdict:
        """What a way to run it must give."""
        if way.startswith("seq") and not self.has_sequential:
            return unsuited("the model is no Sequential")
        return self.verdicts.get(way, EQUAL)


@cache
def _makes_sequential(make: Callable[[], Script]) -> bool:
    return type(make().net) is nn.Sequential


def case(
    what: str, verdicts: Mapping[str, Verdict] | None = None
) -> Callable[[Callable[[], Script]], Case]:
    """Make a case of a function that returns a script.

    Args:
        what: one line for the table.
        verdicts: by ways, separated by blanks: what they give, where that is not the
            plain loop's numbers.
    """
    by_way = {
        way: verdict
        for ways, verdict in (verdicts or {}).items()
        for way in ways.split()
    }
    assert by_way.keys() <= WAYS.keys(), by_way

    def made(make: Callable[[], Script]) -> Case:
        return Case(make.__name__, what, make, by_way)

    return made


class Own(nn.Sequential):
    """The same modules, called by a forward that is not `nn.Sequential`'s."""

    def forward(self, x: Any) -> Any:
        """Call each."""
        for module in self:
            x = module(x)
        return x


def own_form(net: nn.Module) -> nn.Module:
    """The same model with a forward of its own: the same modules, hooks, names."""
    if type(net) is not nn.Sequential:
        return net
    found = Own()
    found.__dict__.update(net.__dict__)
    return found


def batches(
    width: int = 6, out: int = 3, *, num: int = 4, size: int = 8
) -> list[tuple[Tensor, Tensor]]:
    """Vectors, and targets of another size; the same each time."""
    rng = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, width, generator=rng, dtype=torch.float64),
            torch.randn(size, out, generator=rng, dtype=torch.float64),
        )
        for _ in range(num)
    ]


def chain(*modules: nn.Module) -> Any:
    """Four layers, or these, from 6 to 3; the same each time."""
    torch.manual_seed(0)
    given = modules or (nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    net = nn.Sequential(*given, nn.Linear(8, 3))
    for module in net.modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
    return net

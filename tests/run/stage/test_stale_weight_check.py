"""What would go wrong with old weights is found before it does, and named."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from hocket.errors import ModelError
from hocket.model.capture.capture import capture
from hocket.model.stages.cut import StageModule, cut
from hocket.run.stage.stale_weight_check import check_stale_weights

CPU: Final = torch.device("cpu")
WIDTH: Final = 6


def stage_of(*modules: nn.Module) -> StageModule:
    """A stage that runs these modules as they are, between linear layers."""
    torch.manual_seed(0)
    around = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(around[0], *modules, around[1]).double()
    captured = capture(model, (values(),), capture="sequential")
    (stage,) = cut(captured, ())
    return stage.train()


def values() -> Tensor:
    """One microbatch."""
    rng = torch.Generator().manual_seed(1)
    return torch.randn(4, WIDTH, generator=rng, dtype=torch.float64)


def look(stage: StageModule, delay: int = 1) -> None:
    """Try it out on new leaves each time, as a stage in the middle gets them."""

    def forward() -> Any:
        return stage(values().requires_grad_())

    check_stale_weights(stage, forward, device=CPU, delay=delay)


class Layer(nn.Module):
    """A linear layer, to be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Remembers(Layer):
    """A recurrent layer that keeps its hidden values on itself."""

    hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        before = 0 if self.hidden is None else self.hidden
        out = super().forward(x + before)
        self.hidden = out.detach()
        return out


class RemembersItsGraph(Remembers):
    """Where even the gradient would go back into the forward before."""

    def forward(self, x: Tensor) -> Tensor:
        out = Layer.forward(self, x if self.hidden is None else x + self.hidden)
        self.hidden = out
        return out


class Counts(Layer):
    """Does something else in every second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.state["calls"] += 1
        return super().forward(x) * (1 + self.state["calls"] % 2)


class KeepsList(Layer):
    """Its results depend on how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.mean().item())
        return super().forward(x) + len(self.seen)


class KeepsElsewhere(Layer):
    """Nothing on the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.next: Callable[[], int] = iter(range(100)).__next__

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.next()


class KeepsWeights(Layer):
    """What it made of its weights in the first forward serves all others."""

    turned: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.turned is None:
            self.turned = self.linear.weight.t().clone()
        return torch.relu(x @ self.turned)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (Remembers, "1.hidden"),
        (RemembersItsGraph, "1.hidden"),
        (Counts, "1.state"),
        (KeepsList, "1.seen"),
        (KeepsWeights, "1.turned"),
        (KeepsElsewhere, "in no attribute of its modules"),
    ],
)
def test_state_between_forwards_is_refused_by_name(
    module: type[nn.Module], name: str
) -> None:
    """With the module's path in the uncut model; and it may do so without a delay."""
    stage = stage_of(module())
    with pytest.raises(ModelError) as raised:
        look(stage, delay=2)
    assert f"keeps state between forwards ({name})" in str(raised.value)
    assert "stage 0 reads weights that are 2 updates old" in str(raised.value)
    assert '"1f1b"' in str(raised.value)
    look(stage, delay=0)


class Checkpointed(Layer):
    """Two layers, of which nothing is kept for the backward."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(Layer(), Layer())
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        return out


class InSegments(Checkpointed):
    """The other function of torch's."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint_sequential(
            self.inner, 2, x, use_reentrant=self.use_reentrant
        )
        return out


class Reversed(torch.autograd.Function):
    """A user's own checkpoint, which torch knows nothing of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        out: Tensor = layer(x)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.layer(x), grad)
        return x.grad, None


class Own(Layer):
    """A layer in a checkpoint of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Layer()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Reversed.apply(x, self.inner)  # type: ignore[no-untyped-call]
        return out


class WithoutModule(Layer):
    """A checkpoint around a function that reads a weight."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(
            lambda x: torch.relu(x @ self.linear.weight), x, use_reentrant=False
        )
        return out


@pytest.mark.parametrize(
    ("module", "what"),
    [
        (Checkpointed(use_reentrant=True), "1.inner runs again"),
        (Checkpointed(use_reentrant=False), "1.inner runs again"),
        (InSegments(use_reentrant=True), "1.inner.0 runs again"),
        (InSegments(use_reentrant=False), "1.inner.0 runs again"),
        (Own(), "1.inner runs again"),
        (WithoutModule(), "something in it reads its weights again"),
    ],
)
def test_a_backward_that_reads_weights_is_refused(module: nn.Module, what: str) -> None:
    """It would find the newest weights, and be wrong without a word."""
    with pytest.raises(ModelError) as raised:
        look(stage_of(module))
    assert f"in the backward {what}, where the newest weights" in str(raised.value)
    assert "recomputation belongs to the stage" in str(raised.value)
    assert 'recompute="all"' in str(raised.value)


class Cached(Layer):
    """Keeps a reference to a weight, beside the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.linear.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kept[0]


def test_weights_in_other_places_are_refused() -> None:
    """Old weights could not be put there."""
    with pytest.raises(ModelError, match=r"finds 1\.linear\.weight otherwise than as"):
        look(stage_of(Cached()))


class TakesNotes(Layer):
    """Keeps what only its user reads: the last output, and how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.history: list[float] = []
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.last = super().forward(x)
        self.history.append(self.last.mean().item())
        return self.last


class Memoizes(Layer):
    """Makes a constant when it is first asked for one."""

    ramp: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.ramp is None:
            self.ramp = torch.arange(x.shape[1], dtype=x.dtype)
        return super().forward(x) + self.ramp


class CountsInBuffer(Layer):
    """Its forward reads a buffer and changes it: buffers have one version."""

    count: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        out = super().forward(x) * self.count.clone() + self.mean
        self.mean = self.mean / 2 + out.detach().mean(0)
        return out


class Recurrent(nn.Module):
    """torch's own, which keeps its weights in a list as well."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lstm(x.unsqueeze(1))[0]
        return out.squeeze(1)


class Twice(Layer):
    """One weight in two places, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.linear.weight
        self.again.bias.requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.again(super().forward(x))
        return out


class Offloads(Layer):
    """Hooks on what is kept for the backward may well be: they read no weights."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().forward(x)


@pytest.mark.parametrize(
    "module",
    [
        TakesNotes,
        Memoizes,
        CountsInBuffer,
        Recurrent,
        Twice,
        Offloads,
        lambda: nn.Dropout(0.5),
        lambda: nn.BatchNorm1d(WIDTH),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True),
    ],
)
def test_what_is_a_function_of_its_weights_passes_untouched(module: Any) -> None:
    """Notes, constants made once, buffers, random numbers: all is as before."""
    stage = stage_of(module())
    buffers = {name: x.clone() for name, x in stage.named_buffers()}
    parameters = {name: (p, p.detach().clone()) for name, p in stage.named_parameters()}
    notes = [dict(vars(part)) for part in stage.modules()]
    first = next(stage.parameters())
    first.grad = torch.ones_like(first)
    random = torch.get_rng_state()

    look(stage)

    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(first.grad, torch.ones_like(first))
    for name, p in stage.named_parameters():
        assert p is parameters[name][0], name
        assert torch.equal(p, parameters[name][1]), name
        assert p is first or p.grad is None, name
    for name, buffer in stage.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    for part, before in zip(stage.modules(), notes, strict=True):
        assert list(vars(part)) == list(before)
        assert all(vars(part)[name] is value for name, value in before.items())


def test_captured_operators_are_not_tried() -> None:
    """They are a function of their weights by themselves; nothing is run."""
    captured = capture(Layer().double(), (values(),), capture="export")
    (stage,) = cut(captured, ())
    ran: list[None] = []
    check_stale_weights(stage, lambda: ran.append(None), device=CPU, delay=1)
    assert not ran


def test_an_error_of_the_users_own_stays_his() -> None:
    """What fails in the first try fails as it would have without."""
    stage = stage_of(nn.Identity())

    def forward() -> Any:
        raise KeyError("his")

    with contextlib.suppress(KeyError):
        check_stale_weights(stage, forward, device=CPU, delay=1)
        pytest.fail("nothing was raised")

"""Inputs, targets and outputs of other forms than one tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import hocket
from tests.conformance.script import (
    ALL,
    PIPELINES,
    Script,
    batches,
    case,
    chain,
    mse,
    refused,
)


def _as_tensor(output: Tensor, targets: Any) -> Tensor:
    return mse(output, torch.as_tensor(targets))


@case(
    "targets in a list, one entry for each sample",
    {
        "own-1 own-2 seq-1 seq-2 teacher freeze wpipe 2bw": refused(
            "targets is a list of 8 entries"
        )
    },
)
def list_targets() -> Script:
    """As a loader without a collate function gives them."""
    data = [(x, y.tolist()) for x, y in batches()]
    return Script(chain(), data, loss=_as_tensor)


@case("targets in a NumPy array")
def array_targets() -> Script:
    """The first dimension is the samples."""
    data = [(x, y.numpy()) for x, y in batches()]
    return Script(chain(), data, loss=_as_tensor)


class Several(nn.Module):
    """Takes several arguments."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(
        self, x: Tensor, other: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        x = torch.tanh(self.a(x))
        return self.b(x if other is None else x + other) * scale


@case("inputs in a dict")
def dict_inputs() -> Script:
    """Arguments by name."""
    data = [({"x": x, "other": x[:, :1].expand(8, 8).clone()}, y) for x, y in batches()]
    return Script(Several(), data, cut="b")


@case("inputs in a tuple, with None and a number")
def tuple_inputs() -> Script:
    """The same in each batch."""
    return Script(Several(), [((x, None, 0.5), y) for x, y in batches()], cut="b")


@case(
    "a number among the inputs that differs from batch to batch",
    {"freeze": refused("args[2] is 1.5")},
)
def changing_number() -> Script:
    """As the time of a diffusion step, where it is a float."""
    data = [((x, None, 1 + i / 2), y) for i, (x, y) in enumerate(batches())]
    return Script(Several(), data, cut="b")


@case("a last batch of fewer samples")
def uneven_batch() -> Script:
    """Five of eight."""
    data = batches()
    return Script(chain(), [*data, (data[0][0][:5], data[0][1][:5])])


class Tokens(nn.Module):
    """An embedding, a norm over words, a mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.embed(x)))).mean(1)


@case("integer inputs")
def tokens() -> Script:
    """Words of a text."""
    rng = torch.Generator().manual_seed(3)
    data = [(torch.randint(11, (8, 5), generator=rng), y) for _, y in batches()]
    return Script(Tokens(), data, cut="head")


class Mixes(nn.Module):
    """Mixes positions by a matrix that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(mask @ x)))


def _sequences(length: int, mask: Any) -> list[Any]:
    rng = torch.Generator().manual_seed(3)
    return [
        (
            (torch.randn(8, length, 4, generator=rng, dtype=torch.float64), mask),
            torch.randn(8, length, 3, generator=rng, dtype=torch.float64),
        )
        for _ in range(4)
    ]


@case(
    "a (T, T) mask that all samples share",
    {"own-1 own-2 compile teacher freeze wpipe 2bw": refused("args[1] has 6")},
)
def shared_mask() -> Script:
    """Given as it is."""
    mask = torch.ones(6, 6, dtype=torch.float64).tril()
    return Script(Mixes(), _sequences(6, mask), cut="b")


@case(
    "a (T, T) mask where T is the number of samples",
    {"own-1 own-2 teacher freeze wpipe 2bw": refused("the first dimension of args[1]")},
)
def square_mask() -> Script:
    """Its rows could be the samples, and are not."""
    mask = torch.ones(8, 8, dtype=torch.float64).tril()
    return Script(
        Mixes(), _sequences(8, mask), num_microbatches=8, cut="b", shared=(1,)
    )


@case("a (T, T) mask that all samples share, declared as `Shared`")
def declared_mask() -> Script:
    """Where T is the number of samples."""
    mask = hocket.Shared(torch.ones(8, 8, dtype=torch.float64).tril())
    return Script(Mixes(), _sequences(8, mask), num_microbatches=8, cut="b")


class Flat(nn.Module):
    """A view that only strides of channels_last allow."""

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1).view(x.shape[0], -1)


@case("channels_last across a cut")
def channels_last() -> Script:
    """The view behind it needs these strides."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), Flat(), nn.Linear(144, 3)
    )
    net.to(memory_format=torch.channels_last)
    rng = torch.Generator().manual_seed(3)
    data = []
    for _, y in batches():
        x = torch.randn(8, 3, 6, 6, generator=rng, dtype=torch.float64)
        data.append((x.to(memory_format=torch.channels_last), y))
    return Script(net, data, cut="2")


class Transposed(nn.Module):
    """Hands on a transposed tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, 2, 4).transpose(1, 2)


class Back(nn.Module):
    """Views what only a transposed tensor allows."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).view(-1, 8)


@case("a transposed tensor across a cut")
def transposed() -> Script:
    """The view behind it needs these strides."""
    net = chain(nn.Linear(6, 8), Transposed(), Back(), nn.Tanh())
    return Script(net, batches(), cut="2")


class Outputs(nn.Module):
    """Returns a dict of a tensor, a tuple and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = torch.tanh(self.a(x))
        return {"logits": self.b(h), "features": (x, h), "size": 3}


@case(
    "an output of nested dicts and tuples",
    {"teacher": refused("must hold tensors only")},
)
def nested_outputs() -> Script:
    """The loss reads all of them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Outputs())

    def loss(output: Any, targets: Tensor) -> Tensor:
        features = torch.stack([x.square().mean() for x in output["features"]])
        return mse(output["logits"], targets) + features.sum() / output["size"]

    return Script(net, batches(), loss=loss)


class Graph(nn.Module):
    """Multiplies by a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return self.b(torch.tanh(torch.sparse.mm(adjacency, self.a(x))))


@case(
    "a sparse input",
    {
        "own-1 own-2 compile teacher freeze wpipe 2bw": refused(
            "args[1] is a sparse_coo tensor"
        )
    },
)
def sparse_input() -> Script:
    """Of one microbatch."""
    matrix = torch.eye(8, dtype=torch.float64).to_sparse()
    data = [((x, matrix), y) for x, y in batches()]
    return Script(Graph(), data, num_microbatches=1, cut="b")


class ReadsTokens(nn.Module):
    """Takes what a tokenizer of transformers returns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.inner = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.words(input_ids) * attention_mask[..., None]
        return self.last(torch.tanh(self.inner(x.sum(1))))


@case("a `BatchEncoding` of transformers as batch")
def batch_encoding() -> Script:
    """A mapping by its methods alone."""
    from transformers import BatchEncoding

    rng = torch.Generator().manual_seed(3)
    data = []
    for _, y in batches():
        words = torch.randint(11, (8, 5), generator=rng)
        mask = torch.ones(8, 5, dtype=torch.float64)
        given = BatchEncoding({"input_ids": words, "attention_mask": mask})
        data.append((given, y))
    return Script(ReadsTokens(), data, cut="last", frozen=("words",))


@case(
    "a nested (jagged) input",
    {ALL: refused("args[0] is a nested tensor")},
)
def nested_input() -> Script:
    """Samples of different lengths in one tensor."""
    rng = torch.Generator().manual_seed(3)
    data = []
    for _, y in batches():
        parts = [torch.randn(i + 2, 6, generator=rng).double() for i in range(8)]
        data.append((torch.nested.nested_tensor(parts, layout=torch.jagged), y))

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return mse(torch.stack([x.mean(0) for x in output.unbind()]), targets)

    return Script(chain(), data, loss=loss, num_microbatches=1)


@case(
    "an input that comes out of a graph", {PIPELINES: refused("comes out of a graph")}
)
def input_of_graph() -> Script:
    """A layer of the loop's own made it."""
    torch.manual_seed(3)
    outer = nn.Linear(6, 6).double()
    return Script(chain(), [(outer(x).tanh(), y) for x, y in batches()])


def _with_gradients(net: nn.Module, *, place: int = 0, **options: Any) -> Script:
    """The loop reads gradients of the inputs, or of the targets, behind each step."""
    data = batches()
    seen: dict[str, list[Any]] = {"grads": []}

    def before_step(step: int, _: Any) -> None:
        data[step][place].grad = None
        data[step][place].requires_grad_()

    def after_step(step: int, _: Any) -> None:
        found = data[step][place].grad
        seen["grads"] += (
            [] if found is None else found.round(decimals=9).flatten().tolist()
        )

    script = Script(net, data, before_step=before_step, seen=seen, **options)
    script.after_step = after_step
    return script


@case(
    "`x.grad` of inputs that want a gradient",
    {"freeze": refused("args[0] wants a gradient (requires_grad) at step 2")},
)
def input_gradients() -> Script:
    """As saliency maps are made; the loop reads it behind the step."""
    return _with_gradients(chain())


@case(
    "`x.grad` where the first layers are frozen from the start",
    {"own-2 seq-2 wpipe freeze": refused("args[0] wants a gradient (requires_grad)")},
)
def input_gradients_of_frozen() -> Script:
    """As adversarial prompts for a frozen net are trained."""
    net = chain()
    net[0].requires_grad_(requires_grad=False)
    return _with_gradients(net, frozen=("0",))


class Around(nn.Module):
    """Adds its input again at the end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))) + x)


@case(
    "`x.grad` of an input that two stages read",
    {
        "own-2": refused("several workers read it"),
        "freeze": refused("args[0] wants a gradient (requires_grad) at step 2"),
    },
)
def input_gradients_of_several() -> Script:
    """Each worker would have a part of it."""
    return _with_gradients(Around(), cut="b")


@case(
    "`y.grad` of targets that want a gradient",
    {PIPELINES: refused("gradients come back through outputs alone")},
)
def target_gradients() -> Script:
    """As learned targets are."""
    return _with_gradients(chain(), place=1)

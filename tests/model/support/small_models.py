"""Small models with all that is hard to cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
)

from hocket.model.capture.capture import Captured
from tests.model.support.stages_by_hand import Case

Nested = tuple[Tensor, dict[str, Any]]


class Block(nn.Module):
    """A residual block as in ResNet, with in-place additions and ReLUs."""

    def __init__(self, width_in: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            conv = nn.Conv2d(width_in, width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += self.shortcut(x)
        return cast(Tensor, self.relu(y))


class ResNet(nn.Module):
    """Four blocks in two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(Block(4, 4), Block(4, 4))
        self.layer2 = nn.Sequential(Block(4, 8, 2), Block(8, 8))
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(torch.relu_(self.bn(self.conv(x)))))
        return cast(Tensor, self.fc(x.mean((2, 3))))


class UNet(nn.Module):
    """Skips over several stages, nested inputs, and outputs from everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(1, 4, 3, padding=1)
        self.down2 = nn.Conv2d(4, 4, 3, padding=1)
        self.middle = nn.Conv2d(4, 4, 3, padding=1)
        self.up2 = nn.Conv2d(8, 4, 3, padding=1)
        self.up1 = nn.Conv2d(8, 4, 3, padding=1)
        self.out = nn.Conv2d(5, 1, 1)

    def forward(
        self, x: Tensor, *, scale: float, add: bool = True, extra: dict[str, Any]
    ) -> dict[str, Any]:
        a = F.relu(self.down1(x))
        b = F.relu(self.down2(F.max_pool2d(a, 2)))
        m = F.relu(self.middle(F.max_pool2d(b, 2)))
        y = F.relu(self.up2(torch.cat([b, F.interpolate(m, scale_factor=2)], 1)))
        y = F.relu(self.up1(torch.cat([a, F.interpolate(y, scale_factor=2)], 1)))
        out = self.out(torch.cat([y, x], 1)) * scale
        if add:
            out = out + extra["more"][0]
        return {"out": out, "middle": m, "input": x, "three": 3, "rest": (None, [b])}


class Stateful(nn.Module):
    """Buffers changed in every way, a constant, no_grad, values made in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.bn = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.3)
        self.never = nn.Parameter(torch.zeros(3))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.full((width,), 2.0), persistent=False)
        self.mean: Tensor
        self.count: Tensor
        self.scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y += x
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        self.count += 1
        with torch.no_grad():
            still = torch.sin(y) * torch.tensor([3.0]).to(y) * self.mean
        weights = torch.zeros_like(x)
        weights[:, 0] = 1
        weights[:, 1:].add_(x[:, :1].detach())
        five = torch.zeros(x.shape[0], 1, dtype=x.dtype)
        five += 5
        y = torch.relu_(self.bn(y * self.scale))
        y = self.dropout(y)
        return y + still * weights + five


class Odd(nn.Module):
    """Tied weights, an LSTM, an unused module, and children with awkward names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Stateful(6)
        self.second = Stateful(6)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.first.linear.weight
        self.unused = nn.Linear(2, 2)
        self.index = nn.Linear(6, 2)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = x * (1 - mask.to(x.dtype))[:, None]
        y = self.second(self.first(x))
        y, _ = self.lstm(y[:, None] + 0 * x[:, None])
        return self.index(self.tied(y[:, 0])), x


class Repeated(nn.Module):
    """One module called three times, and a batch norm called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.again = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.bn = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.again(self.bn(self.first(x))))
        return cast(Tensor, self.last(self.again(self.again(x))))


class Modes(nn.Module):
    """Another path in evaluation, a frozen batch norm, frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.bn = nn.BatchNorm1d(6)
        weights = [nn.Parameter(torch.randn(6, 6)) for _ in range(3)]
        self.weights = nn.ParameterList(weights)
        self.only_training = nn.Linear(6, 6)
        self.norm = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.frozen(x))
        for i, weight in enumerate(self.weights):
            x = torch.tanh(x @ weight.t())
            if self.training and i == 1:
                x = F.dropout(x, 0.5) + self.only_training(x)
        return cast(Tensor, self.norm(x))


class Dense(nn.Module):
    """Every layer reads all layers before it, as in DenseNet."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4 * (i + 1), 4) for i in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(F.relu(layer(torch.cat(features, 1)), inplace=True))
        return features[-1]


class Pair(nn.Module):
    """Takes and returns a nested structure, as a part of a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, pair: Nested) -> Nested:
        x, rest = pair
        return self.linear(x) + rest["mask"], {"mask": rest["mask"] * 2, "none": None}


class LooksAtData(nn.Module):
    """Decides by a value, so that it cannot be captured, but can be run."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, pair: Nested) -> dict[str, Tensor]:
        x, _ = pair
        sign = 1 if x.sum().item() > 0 else -1
        return {"logits": sign * self.linear(x)}


class Query(nn.Module):
    """Begins with calls on parameters alone: a normalised query, normalised weights."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(4, 8))
        self.norm = nn.LayerNorm(8)
        self.keys = weight_norm(nn.Linear(6, 8))
        self.middle = weight_norm(nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        query = F.dropout(self.norm(self.query), 0.1, self.training)
        keys = self.keys(x)
        y = torch.softmax(query @ keys.transpose(-1, -2), -1) @ keys
        return cast(Tensor, self.head(self.middle(y).mean(1)))


class Experts(nn.Module):
    """Each sample goes to the expert that its numbers say: no shape is known inside."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(
            nn.Linear(width, width) for _ in range(num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen == number).squeeze(-1)
            if len(rows):
                y.index_add_(0, rows, expert(x[rows]) * weight[rows, None])
        return y


class Mixture(nn.Module):
    """Experts around residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Linear(6, 8)
        self.experts = nn.ModuleList(Experts(8, 2) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for experts, norm in zip(self.experts, self.norms, strict=True):
            x = x + experts(norm(x))
        return cast(Tensor, self.head(x))


def mlp() -> Case:
    """A Sequential in a Sequential, with ReLUs in place."""
    inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())
    parts = (nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Dropout(0.2), inner)
    more = (nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))
    return Case(nn.Sequential(*parts, *more), (torch.randn(4, 4),), smallest=2)


def pairs() -> Case:
    """Structures between the children of a Sequential, one of them used twice."""
    again = Pair()
    model = nn.Sequential(Pair(), again, nn.Identity(), again, LooksAtData())
    return Case(model, ((torch.randn(4, 6), {"mask": torch.randn(4, 6)}),))


def unet() -> Case:
    """Keywords in another order than the signature's."""
    extra = {"more": [torch.randn(4, 1, 8, 8)]}
    keywords = {"extra": extra, "add": True, "scale": 2.0}
    return Case(UNet(), (torch.randn(4, 1, 8, 8),), keywords)


def modes() -> Case:
    """Its batch norm stays in evaluation mode while the model trains."""
    model = Modes()
    model.bn.eval()
    return Case(model, (torch.randn(4, 6),))


def encoder() -> Case:
    """torch's own transformer."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return Case(nn.TransformerEncoder(layer, 3), (torch.randn(4, 5, 8),))


def gpt2(attention: str, num_layers: int = 2) -> Case:
    """Tied embeddings."""
    config = GPT2Config(
        n_layer=num_layers,
        n_embd=32,
        n_head=4,
        vocab_size=50,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    ids = torch.randint(0, 50, (4, 8))
    model = GPT2LMHeadModel._from_config(config, attn_implementation=attention)
    return Case(model.train(), (), {"input_ids": ids, "use_cache": False})


def bert(attention: str) -> Case:
    """A mask that depends on the batch."""
    config = BertConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=50,
        max_position_embeddings=16,
    )
    mask = torch.ones(4, 8, dtype=torch.long)
    mask[0, 5:] = mask[2, 6:] = 0
    inputs = {"input_ids": torch.randint(0, 50, (4, 8)), "attention_mask": mask}
    kind = BertForSequenceClassification
    model = kind._from_config(config, attn_implementation=attention)
    return Case(model.train(), (), inputs)


def vit(attention: str) -> Case:
    """Patches, a class token, a dict-like output."""
    config = ViTConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_dropout_prob=0.1,
    )
    pixels = torch.randn(4, 1, 8, 8)
    kind = ViTForImageClassification
    model = kind._from_config(config, attn_implementation=attention)
    return Case(model.train(), (), {"pixel_values": pixels})


CASES: Final[dict[str, Callable[[], Case]]] = {
    "mlp": mlp,
    "pairs": pairs,
    "resnet": lambda: Case(ResNet(), (torch.randn(4, 1, 8, 8),)),
    "unet": unet,
    "odd": lambda: Case(
        Odd(), (torch.randn(4, 6), torch.randint(0, 2, (4,))), smallest=2
    ),
    "repeated": lambda: Case(Repeated(), (torch.randn(4, 6),), smallest=2),
    "modes": modes,
    "dense": lambda: Case(Dense(), (torch.randn(4, 4),)),
    "query": lambda: Case(Query(), (torch.randn(4, 5, 6),)),
    "experts": lambda: Case(Mixture(), (torch.randn(6, 6),)),
    "encoder": encoder,
    "gpt2-sdpa": lambda: gpt2("sdpa"),
    "gpt2-eager": lambda: gpt2("eager"),
    "bert-sdpa": lambda: bert("sdpa"),
    "bert-eager": lambda: bert("eager"),
    "vit-sdpa": lambda: vit("sdpa"),
    "vit-eager": lambda: vit("eager"),
}


@cache
def captured_case(name: str) -> tuple[Case, Captured]:
    """A case in float64 and its capture, made once for all tests."""
    case = CASES[name]().double()
    return case, case.capture()

"""Batches of other lengths than the example's are followed, or refused by name."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.errors import ModelError
from tests.run.support.forked import answers_of
from tests.run.support.started import started

pytestmark = pytest.mark.timeout(240)

LENGTHS: Final = (5, 7, 4, 7, 9)
WAYS: Final[dict[str, dict[str, Any]]] = {
    "split backwards": {"schedule": "zb-h1"},
    "recomputed": {"schedule": "1f1b", "recompute": "all"},
    "replicas": {"schedule": "1f1b", "num_replicas": 2},
    "shards": {"schedule": "1f1b", "num_shards": 2},
}


class Reads(nn.Module):
    """Positions, a causal mask, a norm with statistics; a table of 16 places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(11, 8), nn.Embedding(16, 8)
        self.norm, self.mix = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, words: Tensor) -> Tensor:
        """(samples, length) -> (samples, length, 3)."""
        length = words.shape[1]
        x = self.words(words) + self.places(torch.arange(length))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        causal = torch.ones(length, length, dtype=x.dtype).tril() / length
        return self.head(torch.tanh(causal @ self.mix(x)))


def texts(*lengths: int) -> list[tuple[Tensor, Tensor]]:
    """A batch of 8 texts for each length, with a class for each word."""
    rng = torch.Generator().manual_seed(1)
    made = (torch.randint(11, (8, length), generator=rng) for length in lengths)
    return [(words, words % 3) for words in made]


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """A mean over words."""
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def make_pipeline(net: nn.Module, **options: Any) -> hocket.Pipeline:
    """Trains it by SGD, two microbatches a step, of texts of five words."""

    def optimizer(weights: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(weights, 0.1)

    options.setdefault("num_microbatches", 2)
    return started(net, loss, optimizer, texts(5)[0], **options)


def train_plain(net: nn.Module, num_parts: int) -> list[float]:
    """The plain loop, whose microbatches are as many."""
    step, losses = torch.optim.SGD(net.parameters(), 0.1), []
    for words, targets in texts(*LENGTHS):
        step.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for x, y in zip(words.chunk(num_parts), targets.chunk(num_parts), strict=True):
            part = loss(net(x), y) / num_parts
            part.backward()
            total += part.detach()
        step.step()
        losses.append(float(total))
    return losses


def entry_train(way: str) -> dict[str, Any]:
    """Train on texts of several lengths, and evaluate on some of others."""
    net = Reads().double()
    if way in ("replicas", "shards"):  # statistics are of a replica's samples
        net.norm.eval()
    with make_pipeline(net, **WAYS[way]) as pipeline:
        losses = [result.loss for result in pipeline.train(texts(*LENGTHS))]
        evaluated = pipeline.evaluate(texts(12, 3)).loss
        weights = pipeline.state_dict()
    return {
        "losses": losses,
        "evaluated": evaluated,
        "weights": {name: x.flatten().tolist() for name, x in weights.items()},
    }


@pytest.mark.parametrize("way", WAYS)
def test_two_workers_train_as_the_plain_loop(way: str, tmp_path: Path) -> None:
    """Losses, weights, statistics and evaluation, to 1e-10."""
    answers = answers_of(f"{__name__}:entry_train", way, folder=tmp_path)
    net = Reads().double()
    is_spread = way in ("replicas", "shards")
    if is_spread:
        net.norm.eval()
    losses = train_plain(net, 4 if is_spread else 2)
    net.eval()
    with torch.no_grad():
        means = [(loss(net(x), y).item()) for x, y in texts(12, 3)]
    for answer in answers:
        assert answer["losses"] == pytest.approx(losses, rel=1e-10)
        assert answer["evaluated"] == pytest.approx(sum(means) / 2, rel=1e-10)
        for name, x in net.state_dict().items():
            known = x.flatten().tolist()
            assert answer["weights"][name] == pytest.approx(known, rel=1e-10, abs=1e-12)


def test_a_model_is_captured_once_for_all_lengths(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also where evaluation comes first; modes stay as the user has set them."""
    net = Reads().double()
    net.norm.eval()
    with caplog.at_level(logging.INFO, "hocket"), make_pipeline(net) as pipeline:
        (found,) = [pipeline.outputs([texts(6)[0]])]
        assert not net.norm.training
        assert net.training
        assert torch.equal(found, net.eval()(texts(6)[0][0]).detach())
        net.train().norm.eval()
        before = net.norm.running_mean
        assert before is not None
        before = before.clone()
        for _ in pipeline.train(texts(7, 5, 8)):
            pass
        assert torch.equal(net.norm.running_mean, before)  # type: ignore[arg-type]
    captures = [x for x in caplog.messages if x.startswith("capturing the model for")]
    assert len(captures) == 1


def test_steps_that_overlap_are_drained_first() -> None:
    """A flush-free order has old weights in flight when a longer text comes."""
    net, plain = Reads().double(), Reads().double()
    for one in (net, plain):
        one.norm.eval()
    with make_pipeline(net, schedule="pipedream-2bw") as pipeline:
        losses = [result.loss for result in pipeline.train(texts(*LENGTHS))]
    weights = [x.detach().clone() for x in plain.parameters()]
    late: list[float] = []
    for words, targets in texts(*LENGTHS):
        now = [x.detach().clone() for x in plain.parameters()]
        with torch.no_grad():
            for x, old in zip(plain.parameters(), weights, strict=True):
                x.copy_(old)
        plain.zero_grad()
        whole = loss(plain(words), targets)
        whole.backward()
        late.append(whole.item())
        with torch.no_grad():
            for x, value in zip(plain.parameters(), now, strict=True):
                x.copy_(value - 0.1 * x.grad)  # type: ignore[operator]
        weights = now
    assert losses == pytest.approx(late, rel=1e-10)


class Gone(nn.Sequential):
    """Whose forward is its own."""

    def forward(self, words: Tensor) -> Tensor:
        """(samples, length) -> (samples, length, 3)."""
        for layer in self:
            words = layer(words)
        return words + 0.0


def layers() -> list[nn.Module]:
    """A class for each word."""
    torch.manual_seed(0)
    return [nn.Embedding(11, 8), nn.Linear(8, 3)]


@pytest.mark.parametrize("kind", [Gone, nn.Sequential])
def test_a_model_that_is_gone_is_named(kind: type[nn.Sequential]) -> None:
    """Its graph is all that is left."""
    pipeline = make_pipeline(kind(*layers()).double())
    with pytest.raises(ModelError, match="keep the model in a variable"):
        pipeline.step(texts(6)[0])
    pipeline.step(texts(5)[0])


def test_a_sequential_is_tried() -> None:
    """Its modules are called as they are; a batch that they refuse changes nothing."""
    net = nn.Sequential(*layers()).double()
    with make_pipeline(net) as pipeline:
        for length in (6, 1, 9):
            pipeline.step(texts(length)[0])
    net = nn.Sequential(nn.Linear(6, 3)).double()
    batch = torch.zeros(8, 5, 6).double(), torch.zeros(8, 5, dtype=torch.int64)
    with started(net, loss, (lambda x: torch.optim.SGD(x, 0.1)), batch) as pipeline:
        first = pipeline.step(batch).loss
        with pytest.raises(ModelError, match=r"cannot take both: mat1 and mat2 shapes"):
            pipeline.step((torch.zeros(8, 5, 7).double(), batch[1]))
        assert pipeline.step(batch).loss < first


def test_lengths_that_a_model_cannot_have_are_named() -> None:
    """A table has 16 places. One word, which broadcasts, has a graph of its own."""
    net = Limited().double()
    net.norm.eval()
    own = copy.deepcopy(net)
    data = texts(6, 1, 6)
    with make_pipeline(net) as pipeline:
        losses = [result.loss for result in pipeline.train(data)]
        with pytest.raises(ModelError, match="ValueError: too long"):
            pipeline.step(texts(17)[0])
    step = torch.optim.SGD(own.parameters(), 0.1)
    for (words, targets), found in zip(data, losses, strict=True):
        step.zero_grad()
        whole = loss(own(words), targets)
        whole.backward()
        step.step()
        assert found == pytest.approx(whole.item(), rel=1e-10)


class Limited(Reads):
    """Refuses long texts, as models of the transformers library do."""

    def forward(self, words: Tensor) -> Tensor:
        """(samples, length) -> (samples, length, 3)."""
        if words.shape[1] > self.places.num_embeddings:
            raise ValueError("too long")
        return super().forward(words)


class Odd(Reads):
    """Scales texts of an odd length."""

    def forward(self, words: Tensor) -> Tensor:
        """(samples, length) -> (samples, length, 3)."""
        return super().forward(words) * (2.0 if words.shape[1] % 2 else 0.5)


def test_a_forward_that_decides_by_lengths_has_several_graphs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each has one of both factors."""
    net, plain = Odd().double(), Odd().double()
    for one in (net, plain):
        one.norm.eval()
    step = torch.optim.SGD(plain.parameters(), 0.1)
    lengths = [7, 6, 9, 4, 5, 8, 5, 6, 7, 6]
    with caplog.at_level(logging.INFO, "hocket"), make_pipeline(net) as pipeline:
        for words, targets in texts(*lengths):
            step.zero_grad()
            whole = loss(plain(words), targets)
            whole.backward()
            step.step()
            result = pipeline.step((words, targets))
            assert result.loss == pytest.approx(whole.item(), rel=1e-10)
    captures = [x for x in caplog.messages if x.startswith("capturing the model for")]
    assert len(captures) == 2


class Fixed(nn.Module):
    """An LSTM, whose graph is one of so many words."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(11, 8), nn.Linear(8, 3)
        self.mix = nn.LSTM(8, 8, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        """(samples, length) -> (samples, length, 3)."""
        return self.head(self.mix(self.words(words))[0])


def test_only_so_many_graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each length, that of the example among them; all still serve."""
    monkeypatch.setattr("hocket.run.nets.forms._MOST", 3)
    net = Fixed().double()
    with make_pipeline(net) as pipeline:
        for batch in texts(2, 9):
            pipeline.step(batch)
        with pytest.raises(ModelError, match="and 3 graphs of it are kept already"):
            pipeline.step(texts(10)[0])
        for batch in texts(5, 9, 2):
            pipeline.step(batch)


def distilled(output: Tensor, targets: Tensor, teachers: Any) -> Tensor:
    """The loss, and the distance from the teacher."""
    return loss(output, targets) + ((output - teachers["t"].own) ** 2).mean()


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_a_teacher_in_evaluation_mode_is_followed(momentum: float | None) -> None:
    """Past bug: captured again, its norms were taken to be in evaluation mode."""
    net, teacher = Reads().double(), Reads().double().eval()
    net.norm.eval()
    if momentum is None:
        with torch.no_grad():
            for x in teacher.parameters():
                x.mul_(0.5)
    own, old = copy.deepcopy(net), copy.deepcopy(teacher)
    update = None if momentum is None else hocket.Momentum(momentum)
    pipeline = started(
        net,
        distilled,
        (lambda weights: torch.optim.SGD(weights, 0.1)),
        texts(5)[0],
        teachers={"t": hocket.Teacher(teacher, update=update)},
    )
    with pipeline:
        losses = [result.loss for result in pipeline.train(texts(*LENGTHS))]
    step, plain = torch.optim.SGD(own.parameters(), 0.1), []
    for words, targets in texts(*LENGTHS):
        step.zero_grad()
        with torch.no_grad():
            seen = old(words)
        whole = loss(own(words), targets) + ((own(words) - seen) ** 2).mean()
        whole.backward()
        step.step()
        plain.append(whole.item())
        with torch.no_grad():
            for x, other in zip(old.parameters(), own.parameters(), strict=True):
                if momentum is not None:
                    x.lerp_(other, 1 - momentum)
    assert losses == pytest.approx(plain, rel=1e-10)


class Many(Reads):
    """Scales what it computes of more than a few texts."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def forward(self, words: Tensor) -> Tensor:
        """(samples, length) -> (samples, length, 3)."""
        return super().forward(words) * (2.0 if len(words) > self.most else 0.5)


@pytest.mark.parametrize("most", [3, 8, 11])
def test_a_forward_that_decides_by_the_number_of_samples(most: int) -> None:
    """Past bug: a graph of 13 samples was played with microbatches of four."""
    net = Many(most).double()
    net.norm.eval()
    own = copy.deepcopy(net)
    with make_pipeline(net) as pipeline:
        found = pipeline.step(texts(5)[0]).loss
    (words, targets), parts = texts(5)[0], []
    for x, y in zip(words.chunk(2), targets.chunk(2), strict=True):
        parts.append(loss(own(x), y).item() / 2)
    assert found == pytest.approx(sum(parts), rel=1e-10)

"""The residual network and the translator: sizes, and what each output may see."""

from __future__ import annotations

from typing import Final

import pytest
import torch
from torch import Tensor

from hocket.recipes.models.resnet import ResNet
from hocket.recipes.models.seq2seq import Seq2Seq

PAD: Final = 0


def make_resnet(num_blocks: int = 3, width: int = 16) -> ResNet:
    """For CIFAR-10."""
    torch.manual_seed(0)
    return ResNet(num_channels=3, num_classes=10, width=width, num_blocks=num_blocks)


def make_seq2seq(num_layers: int = 2) -> Seq2Seq:
    """A small one."""
    torch.manual_seed(0)
    return Seq2Seq(
        num_source_words=11,
        num_target_words=13,
        width=8,
        num_layers=num_layers,
        padding=PAD,
    )


def sentences() -> tuple[Tensor, Tensor]:
    """Two to read and two to write, the first of each shorter."""
    source = torch.tensor([[4, 5, 3, PAD, PAD], [4, 6, 7, 8, 3]])
    return source, torch.tensor([[2, 5, 6, PAD], [2, 7, 8, 9]])


@pytest.mark.parametrize(("num_blocks", "thousands"), [(3, 270), (9, 850)])
def test_resnets_are_the_papers(num_blocks: int, thousands: int) -> None:
    """0.27 and 0.85 million parameters (table 6), and a percent for the projections."""
    count = sum(p.numel() for p in make_resnet(num_blocks).parameters())
    assert thousands * 1000 <= count <= 1.03 * thousands * 1000


def test_every_parameter_of_a_resnet_takes_part() -> None:
    """Its output has its shape, and each parameter's gradient is not zero."""
    model = make_resnet(1, width=4)
    output = model(torch.randn(5, 3, 32, 32))
    output.square().sum().backward()
    assert output.shape == (5, 10)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_every_parameter_of_a_translator_takes_part(num_layers: int) -> None:
    """Likewise, however many layers."""
    model = make_seq2seq(num_layers)
    output = model(*sentences())
    output.square().sum().backward()
    assert output.shape == (2, 4, 13)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_a_translator_never_looks_ahead_in_what_it_writes() -> None:
    """Another word changes the scores at its place and after it, none before."""
    model = make_seq2seq()
    source, target = sentences()
    changed = target.clone()
    changed[1, 2] = 10
    before, after = model(source, target), model(source, changed)
    assert torch.equal(before[1, :2], after[1, :2])
    assert not torch.equal(before[1, 2], after[1, 2])
    assert not torch.equal(before[1, 3], after[1, 3])


def test_a_translator_reads_every_word() -> None:
    """Each word of the source may change each word that is written."""
    model = make_seq2seq()
    source, target = sentences()
    for place in range(5):
        changed = source.clone()
        changed[1, place] = 9
        moved = model(source, target)[1] - model(changed, target)[1]
        assert (moved.abs().sum(-1) > 0).all()


def test_nobody_looks_at_padding() -> None:
    """The attention to filling words is zero: only real ones are weighed."""
    model = make_seq2seq()
    asking, read = torch.randn(2, 4, 8), torch.randn(2, 5, 8)
    hidden = torch.tensor([[False, False, False, True, True], [False] * 5])
    other = read.clone()
    other[0, 3:] = 100.0
    found, same = (
        model.attention(asking, read, hidden),
        model.attention(asking, other, hidden),
    )
    assert torch.equal(found, same)


def test_a_sentence_is_translated_alike_in_any_company() -> None:
    """A row does not depend on the others: batches may be cut anywhere."""
    model = make_seq2seq().eval()
    source, target = sentences()
    together = model(source, target)
    alone = torch.cat([model(source[i : i + 1], target[i : i + 1]) for i in range(2)])
    torch.testing.assert_close(together, alone)

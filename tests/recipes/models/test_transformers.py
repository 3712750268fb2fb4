"""The recipes' models: shapes, what each token may see, and that they can be cut."""

from __future__ import annotations

from typing import Final

import pytest
import torch
from torch import Tensor, nn

from examples.zoo.text import NUM_BYTE_VALUES, Gpt, generate
from hocket.recipes.models.make import Blocks, Pooling, VisionTransformer

BLOCKS: Final = Blocks(width=16, num_blocks=2, num_heads=4, mlp_width=24)
WINDOW: Final = 12


def make_vit(pooling: Pooling = Pooling.TOKEN) -> VisionTransformer:
    """Images of 8 x 8 pixels in three colours, five classes."""
    torch.manual_seed(0)
    return VisionTransformer(
        image_side=8,
        num_channels=3,
        num_classes=5,
        patch_size=4,
        blocks=BLOCKS,
        pooling=pooling,
    )


def make_gpt(*, tie_weights: bool = False) -> Gpt:
    """A small one."""
    torch.manual_seed(0)
    return Gpt(window_bytes=WINDOW, blocks=BLOCKS, tie_weights=tie_weights)


def some_bytes(num_rows: int) -> Tensor:
    """Windows of bytes."""
    return torch.randint(0, NUM_BYTE_VALUES, (num_rows, WINDOW))


CASES: Final = {
    "vit, token": (make_vit(), torch.randn(3, 3, 8, 8), (3, 5)),
    "vit, mean": (make_vit(Pooling.MEAN), torch.randn(3, 3, 8, 8), (3, 5)),
    "gpt": (make_gpt(), some_bytes(3), (3, WINDOW, NUM_BYTE_VALUES)),
    "gpt, tied": (
        make_gpt(tie_weights=True),
        some_bytes(3),
        (3, WINDOW, NUM_BYTE_VALUES),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_takes_part(name: str) -> None:
    """The output has its shape, and each parameter's gradient is not zero."""
    model, inputs, shape = CASES[name]
    model.zero_grad()
    output = model(inputs)
    output.square().sum().backward()

    assert output.shape == shape
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.abs().sum() > 0, parameter_name


@pytest.mark.parametrize("name", CASES)
def test_can_be_captured_for_any_batch_size(name: str) -> None:
    """The graph of one batch size computes every other: what cutting stands on."""
    model, inputs, shape = CASES[name]
    batch = torch.export.Dim("batch", min=1, max=1024)
    program = torch.export.export(model, (inputs,), dynamic_shapes=({0: batch},))
    captured = program.module()
    for rows in (1, 3, 7):
        more = inputs[torch.arange(rows) % len(inputs)]
        assert torch.equal(captured(more), model(more))
        assert captured(more).shape == (rows, *shape[1:])


def test_a_gpt_never_looks_ahead() -> None:
    """Another byte changes the scores at its place and after it, none before."""
    model = make_gpt()
    bytes_1T = some_bytes(1)
    changed = bytes_1T.clone()
    place = 5
    changed[0, place] = (changed[0, place] + 1) % NUM_BYTE_VALUES
    before, after = model(bytes_1T), model(changed)

    assert torch.equal(before[:, :place], after[:, :place])
    assert not torch.equal(before[:, place], after[:, place])
    assert not torch.equal(before[:, -1], after[:, -1])


def test_a_vit_looks_everywhere() -> None:
    """Any pixel may change the class: each patch reaches the token at the head."""
    model = make_vit()
    image = torch.randn(1, 3, 8, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(image).sum(), image)
    assert (gradient != 0).all()


def test_a_vit_knows_places() -> None:
    """The same patches in another order are another image."""
    model = make_vit(Pooling.MEAN)
    image = torch.randn(1, 3, 8, 8)
    assert not torch.allclose(model(image), model(image.roll(4, dims=-1)), atol=1e-4)


def test_tied_weights_are_one_tensor() -> None:
    """And fewer parameters by just that tensor."""
    tied, untied = make_gpt(tie_weights=True), make_gpt()
    assert tied.head.weight is tied.embedding.weight
    assert count(untied) - count(tied) == untied.head.weight.numel()


def test_dropout_draws_in_training_only() -> None:
    """Evaluation is the same each time."""
    blocks = Blocks(width=16, num_blocks=1, num_heads=2, mlp_width=16, dropout=0.5)
    stack = blocks.make(causal=False)
    x_BTW = torch.randn(2, 3, 16)
    assert not torch.equal(stack.train()(x_BTW), stack(x_BTW))
    assert torch.equal(stack.eval()(x_BTW), stack(x_BTW))


def test_generated_text_follows_its_seed() -> None:
    """As many bytes as asked, beyond the window too, and the same for the same seed."""
    model = make_gpt()
    texts = [
        generate(model, b"hello", 3 * WINDOW, torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    ]
    assert [len(text) for text in texts] == [3 * WINDOW] * 3
    assert texts[0] == texts[1] != texts[2]


def test_a_certain_model_writes_what_it_knows() -> None:
    """A head that allows one byte only: text is drawn from the scores."""
    model = make_gpt()
    with torch.no_grad():
        model.norm.weight.zero_()
        model.norm.bias.fill_(1.0)
        model.head.weight.zero_()
        model.head.weight[ord("a")] = 100.0
    assert generate(model, b"x", 5, torch.Generator()) == b"aaaaa"


def count(model: nn.Module) -> int:
    """The number of a model's parameters, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())

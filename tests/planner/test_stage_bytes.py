"""What layers keep, hold and use together, by hand."""

from __future__ import annotations

from hocket.planner.stages import add_layers
from hocket.planner.work import HeldBytes, LayerCost


def layer(weight_grad_work_bytes: int = 7) -> LayerCost:
    """A linear layer: keeps its input, and then its output's gradient besides."""
    return LayerCost(
        "linear",
        forward_s=1.0,
        input_grad_s=1.0,
        weight_grad_s=1.0,
        received_bytes=10,
        received_grad_bytes=10,
        kept_input_bytes=10,
        forward_work_bytes=10,
        backward_work_bytes=17,
        split=HeldBytes(
            weight_grad_held_bytes=10,
            held_input_bytes=10,
            input_grad_work_bytes=10,
            weight_grad_work_bytes=weight_grad_work_bytes,
        ),
    )


def test_what_is_kept_and_held() -> None:
    """The stage's input is a message, and counted as such."""
    layers = [layer()] * 3
    assert add_layers(layers, None).activation_bytes == 20
    assert add_layers(layers, None).weight_grad_held_bytes == 50


def test_the_most_on_the_way_back() -> None:
    """Whole, layers give back what they kept; in I, what they hold grows.

    The last layer begins with a gradient that is a message; each other one with one
    that the layer behind it has made.
    """
    layers = [layer()] * 3
    assert add_layers(layers, None).backward_work_bytes == 17
    # the last: 10; the middle: 20 - 10 held more, 10 + 10; the first: 20 more, 10 + 10
    assert add_layers(layers, None).input_grad_work_bytes == 40


def test_the_most_in_w() -> None:
    """The last layer's work; when it is another's turn, that one has given back."""
    assert add_layers([layer()] * 3, None).weight_grad_work_bytes == 7
    wide = layer(weight_grad_work_bytes=30)
    assert add_layers([layer(), wide, layer()], None).weight_grad_work_bytes == 10
    assert (
        add_layers([layer(weight_grad_work_bytes=0)], None).weight_grad_work_bytes == 0
    )

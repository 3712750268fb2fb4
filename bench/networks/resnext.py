"""ResNeXt by depth, counted by hand: groups of convolutions as matrix products.

    image ─ stem ─┬─ 1x1 ─ 3x3 in groups ─ 1x1 ─(+)─ ... ─ mean ─ head
                  └────────── shortcut ─────────┘

A convolution is the product of its windows with its filters; one in groups has as many
FLOPs and weights as its groups together. What cuDNN reaches of a device's peak in many
small groups, the count does not know. Each convolution has a batch normalization.

Source: Xie et al., arXiv:1611.05431, table 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from examples.zoo.resnext_depths import resnext_blocks
from hocket.planner.published.catalogue import CountedLayer, Product

_STATES: Final = 1  # of SGD with momentum, per weight
_EXPANSION: Final = 4  # of what goes out of a block, over its first width
_WIDTHS: Final = (64, 128, 256, 512)


def resnext(
    depth: int,
    *,
    num_groups: int = 32,
    group_width: int = 4,
    num_classes: int = 102,
    side: int = 224,
) -> tuple[CountedLayer, ...]:
    """A stem, blocks, and a head.

    Args:
        depth: layers with weights.
        num_groups: the groups of each 3 x 3 convolution.
        group_width: channels of each group in the first part; doubled in each other.
        num_classes: the number of classes.
        side: pixels of an image.

    Raises:
        RecipeError: as `resnext_blocks`.
    """
    return (
        _stem(side),
        *_blocks(resnext_blocks(depth), num_groups, group_width, side // 4),
        _head(num_classes, side // 32),
    )


@dataclass(frozen=True, slots=True)
class _Convolution:
    """A convolution and its normalization.

    Args:
        side: pixels of what goes out.
        before: channels that come in.
        channels: the output channels.
        kernel: pixels of a window's side.
        num_groups: the groups of channels.
    """

    side: int
    before: int
    channels: int
    kernel: int = 1
    num_groups: int = 1

    @property
    def product(self) -> Product:
        """Return the product of windows and filters."""
        window = self.kernel**2 * self.before // self.num_groups
        return Product(self.side**2, window, self.channels)

    @property
    def num_out(self) -> int:
        """Return the number of outputs, per sample."""
        return self.side**2 * self.channels


def _stem(side: int) -> CountedLayer:
    """7 x 7 with stride 2, and the largest of each 3 x 3 with stride 2."""
    convolution = _Convolution(side // 2, 3, 64, kernel=7)
    out = convolution.num_out
    return CountedLayer(
        "stem",
        (convolution.product,),
        other_floats=6 * out + out // 4,
        kept_floats=2 * out + out // 4,
        received_floats=3 * side**2,
        num_weights=2 * 64,
        num_states=_STATES,
    )


def _blocks(
    counts: list[int], num_groups: int, group_width: int, side: int
) -> Iterator[CountedLayer]:
    before = 64
    for part, (count, width) in enumerate(zip(counts, _WIDTHS, strict=True)):
        inner = num_groups * group_width * 2**part
        for number in range(count):
            halves = part > 0 and number == 0
            name = f"layer{part + 1}.{number}"
            yield _block(
                name, before, inner, _EXPANSION * width, num_groups, side, halves
            )
            before = _EXPANSION * width
            if halves:
                side //= 2


def _block(
    name: str,
    before: int,
    inner: int,
    after: int,
    num_groups: int,
    side: int,
    halves: bool,
) -> CountedLayer:
    """Count a block; its forward keeps each convolution's, norm's and ReLU's input."""
    end = side // 2 if halves else side
    convolutions = [
        _Convolution(side, before, inner),
        _Convolution(end, inner, inner, kernel=3, num_groups=num_groups),
        _Convolution(end, inner, after),
    ]
    inside = sum(x.num_out for x in convolutions[:2])
    out = convolutions[2].num_out
    other, kept = 5 * inside + 8 * out, 2 * inside + 2 * out
    if before != after:
        convolutions.append(_Convolution(end, before, after))
        other, kept = other + 3 * out, kept + out
    return CountedLayer(
        name,
        tuple(x.product for x in convolutions),
        other_floats=other,
        kept_floats=kept,
        received_floats=before * side**2,
        num_weights=sum(2 * x.channels for x in convolutions),
        num_states=_STATES,
    )


def convolution_layer(
    name: str, before: int, after: int, side: int, end: int
) -> CountedLayer:
    """Count a block of two 3 x 3 convolutions, as in ResNet-18 and 34.

    Args:
        name: of the block.
        before: channels that come in.
        after: channels that go out.
        side: pixels of what comes in.
        end: pixels of what goes out.
    """
    convolutions = [
        _Convolution(end, before, after, kernel=3),
        _Convolution(end, after, after, kernel=3),
    ]
    out = convolutions[1].num_out
    other, kept = 13 * out, 4 * out
    if before != after:
        convolutions.append(_Convolution(end, before, after))
        other, kept = other + 3 * out, kept + out
    return CountedLayer(
        name,
        tuple(x.product for x in convolutions),
        other_floats=other,
        kept_floats=kept,
        received_floats=before * side**2,
        num_weights=sum(2 * x.channels for x in convolutions),
        num_states=_STATES,
    )


def _head(num_classes: int, side: int) -> CountedLayer:
    width = _EXPANSION * _WIDTHS[-1]
    return CountedLayer(
        "head",
        (Product(1, width, num_classes),),
        other_floats=width * side**2,
        kept_floats=width,
        received_floats=width * side**2,
        num_weights=num_classes,
        num_states=_STATES,
    )

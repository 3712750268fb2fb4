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

from hocket.errors import ShapeError
from hocket.planner.published.networks import CountedLayer, Product

Blocks = tuple[int, int, int, int]  # in each of the four parts

_STATES: Final = 1  # of SGD with momentum, per weight
_EXPANSION: Final = 4  # of what goes out of a block, over its first width
_WIDTHS: Final = (64, 128, 256, 512)
_BY_DEPTH: Final[dict[int, Blocks]] = {
    14: (1, 1, 1, 1),
    26: (2, 2, 2, 2),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
_LEAST_MULTIPLE: Final = 194  # four times the blocks of ResNeXt-50


def resnext_blocks(depth: int) -> Blocks:
    """Return how many blocks each of the four parts has.

    Up to 152 as published; beyond that a multiple of ResNeXt-50's 3, 4, 6 and 3, the
    largest that has no more than `depth` layers, as WPipe's ResNeXt-200, 302, 500 and
    800 were made.

    Args:
        depth: layers with weights; three in each block, and two more.

    Raises:
        ShapeError: none has so many; names those that there are.
    """
    if depth in _BY_DEPTH:
        return _BY_DEPTH[depth]
    if depth < _LEAST_MULTIPLE:
        known = ", ".join(map(str, _BY_DEPTH))
        raise ShapeError(
            f"no ResNeXt has depth {depth}: there are {known}, and all from "
            f"{_LEAST_MULTIPLE} on"
        )
    first, second, third, fourth = _BY_DEPTH[50]
    times = (depth - 2) // 3 // (first + second + third + fourth)
    return first * times, second * times, third * times, fourth * times


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
        ShapeError: as `resnext_blocks`.
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
    counts: Blocks, num_groups: int, group_width: int, side: int
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

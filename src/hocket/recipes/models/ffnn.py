"""A feed-forward network: images as vectors, layers of one width, a head.

Shapes: B images, C channels, S side in pixels, K classes.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn


class Ffnn(nn.Module):
    """Images (B, C, S, S) to class scores (B, K).

    Args:
        num_inputs: C x S x S.
        num_classes: K.
        width: features of each layer.
        num_layers: layers with a ReLU behind each; out-of-order backprop's FFNN-16 has
            16 of width 4096.

    Source: Oh et al., EuroSys'22, section 8.
    """

    def __init__(
        self, *, num_inputs: int, num_classes: int, width: int, num_layers: int
    ) -> None:
        super().__init__()
        widths = [num_inputs, *[width] * num_layers]
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(before, after), nn.ReLU())
                for before, after in pairwise(widths)
            )
        )
        self.head = nn.Linear(width, num_classes)

    def forward(self, image_BCSS: Tensor) -> Tensor:
        """Score the classes."""
        score_BK: Tensor = self.head(self.layers(image_BCSS.flatten(1)))
        return score_BK

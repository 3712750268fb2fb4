"""Seeds the generator per layer, so that random numbers do not depend on the cut."""

from __future__ import annotations

from collections.abc import Callable


class LayerSeeds:
    """Seeds the generator before each layer that draws random numbers.

    A layer is numbered in the uncut model, so that it draws the same numbers in
    whatever stage it runs.

    Attributes:
        seed: takes a layer's number and seeds the generator that the layer draws from;
            None where random numbers are drawn as they come.
    """

    __slots__ = ("seed",)

    def __init__(self) -> None:
        self.seed: Callable[[int], None] | None = None

    def before(self, layer: int) -> None:
        """Called by the stage's code before the first draw of a layer."""
        if self.seed is not None:
            self.seed(layer)

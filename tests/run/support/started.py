"""Pipelines of two microbatches, as most tests want them."""

from __future__ import annotations

from typing import Any

from torch import nn

import hocket


def started(
    model: nn.Module, loss: Any, optimizer: Any, example: Any, **options: Any
) -> hocket.Pipeline:
    """Make a pipeline of two microbatches, unless the options say otherwise."""
    return hocket.Pipeline(
        model,
        loss,
        optimizer=optimizer,
        example=example,
        **{"num_microbatches": 2, **options},
    )

"""How all weights would be updated, as text: what workers compare before they begin.

Each worker makes the optimizers of its own stages alone, from what its own process was
told. Here every worker makes one for stand-ins of all parameters, which must come out
the same:

    AdamW, StepLR
    betas=(0.9, 0.999) lr=0.001 ...   a.weight a.bias
    betas=(0.9, 0.999) lr=0.0001 ...  b.weight
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch import Tensor, nn

from hocket.model.profile.optimizer_bytes import small_copies
from hocket.run.weights.settings import Parameters, TrainingSettings

_PLAIN: Final = (bool, int, float, str, tuple, type(None))


def update_text(settings: TrainingSettings, parameters: Mapping[str, Tensor]) -> str:
    """The optimizer and the learning-rate schedule, with all their numbers.

    Args:
        settings: make them.
        parameters: all that are trained, on any worker, by name.

    Returns:
        Text; empty where stand-ins are too small for the user's functions.
    """
    small = small_copies(parameters)
    if not small:
        return ""
    with contextlib.suppress(Exception):  # of the user's; their own call will tell
        return "\n".join(_lines(settings, small))
    return ""


def _lines(settings: TrainingSettings, small: dict[str, nn.Parameter]) -> Iterator[str]:
    optimizer = settings.make_optimizer(Parameters(small))
    scheduler = settings.make_scheduler(optimizer)
    yield f"{type(optimizer).__name__}, {type(scheduler).__name__}"
    names = {id(x): name for name, x in small.items()}
    for group in optimizer.param_groups:
        members = " ".join(names.get(id(x), "?") for x in group["params"])
        yield (
            " ".join(
                f"{key}={_text(value)}"
                for key, value in sorted(group.items())
                if key != "params"
            )
            + f"  {members}"
        )


def _text(value: Any) -> str:
    if isinstance(value, Tensor):  # a learning rate may be one
        return str(value.tolist())
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__

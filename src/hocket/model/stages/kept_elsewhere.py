"""Refuses modules that read what a module of another stage keeps.

The other stage may be another worker's, where nothing is kept, or what an earlier
forward has left; and on one worker it has run another microbatch in between.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hocket.errors import ModelError
from hocket.model.capture.attribute_writes import (
    COLLECTIONS,
    AttributeSnapshot,
    preserve_attributes,
)
from hocket.model.capture.captured import Captured
from hocket.model.guards.reached import used_by_forward
from hocket.model.stages.stage import KEPT_ELSEWHERE, StageModule
from hocket.model.trace.observe import preserve_state


def refuse_kept(captured: Captured, stages: Sequence[StageModule]) -> None:
    """Refuse an attribute that forwards change, and that another stage reads.

    It is told by its name in the code of the other module's forward, which has no
    other value of that name itself.

    Args:
        captured: the model, which runs once, and stays as it is.
        stages: all of its stages.

    Raises:
        ModelError: names the attribute, and who reads it.
    """
    stage_of = {id(part): stage.index for stage in stages for part in stage.modules()}
    parts = [x for x in captured.model.named_modules() if id(x[1]) in stage_of]
    model, (args, kwargs) = captured.model, captured.example.call()
    if len(stages) == 1 or len(parts) < 2:
        return
    with preserve_attributes(model), preserve_state(captured.state), torch.no_grad():
        before = AttributeSnapshot(model)
        model(*args, **kwargs)
        for name in before.changed():
            path, _, attribute = name.rpartition(".")
            keeper = model.get_submodule(path)
            value, home = vars(keeper).get(attribute), stage_of.get(id(keeper))
            if not isinstance(value, (torch.Tensor, *COLLECTIONS)):
                continue  # numbers and None may be the same in modules apart
            for other, reader in parts:
                is_same = getattr(reader, attribute, value) is value
                is_apart = home not in (None, stage_of[id(reader)])
                if is_same and is_apart and attribute in used_by_forward(type(reader)):
                    raise ModelError(
                        f"{other} reads {name}, which each forward changes, and is in "
                        f"stage {stage_of[id(reader)]}, not {home}. {KEPT_ELSEWHERE}"
                    )

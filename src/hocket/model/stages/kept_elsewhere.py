"""Refuses modules that read what a module of another stage keeps.

The other stage may be another worker's, where nothing is kept, or what an earlier
forward has left; and on one worker it has run another microbatch in between. The model
runs once to find out, where its code sets attributes or modules share collections.
"""

from __future__ import annotations

import dis
from collections import Counter
from collections.abc import Sequence
from types import FunctionType

import torch
from torch import nn

from hocket.errors import ModelError
from hocket.model.capture.attribute_writes import (
    COLLECTIONS,
    AttributeSnapshot,
    preserve_attributes,
)
from hocket.model.capture.captured import Captured
from hocket.model.guards.reached import own_attributes, used_by_forward
from hocket.model.stages.stage import KEPT_ELSEWHERE, StageModule
from hocket.model.trace.observe import preserve_state


def refuse_kept(captured: Captured, stages: Sequence[StageModule]) -> None:
    """Refuse an attribute that forwards change, and that another stage reads.

    It is known by its name in the code of the other module's forward, which has no
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
    if len(stages) == 1 or not _may_share([module for _, module in parts]):
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


def _may_share(modules: Sequence[nn.Module]) -> bool:
    """Whether a forward sets an attribute, or several modules have one collection."""
    if any(map(_sets_attributes, {type(x) for x in modules})):
        return True
    own = [
        {id(x) for x in own_attributes(m).values() if isinstance(x, COLLECTIONS)}
        for m in modules
    ]
    counts = Counter(x for ids in own for x in ids)
    return any(count > 1 for count in counts.values())


def _sets_attributes(kind: type[nn.Module]) -> bool:
    """Whether code of the user's own, which `forward` may call, sets an attribute."""
    names = used_by_forward(kind)
    functions = [
        value
        for base in kind.__mro__
        if not base.__module__.startswith("torch.")
        for name, value in vars(base).items()
        if name in names and isinstance(value, FunctionType)
    ]
    return any(
        step.opname == "STORE_ATTR"
        for x in functions
        for step in dis.get_instructions(x)
    )

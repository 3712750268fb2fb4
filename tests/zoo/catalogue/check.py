"""Captures one architecture and compares its stages with the uncut model.

python -m tests.zoo.catalogue.check llama mixtral     one line of JSON for each
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

import torch

from hocket.errors import HocketError
from tests.model.support.model_snapshot import ModelSnapshot
from tests.model.support.stages_by_hand import worst_difference
from tests.zoo.catalogue.entries import all_names, is_installed, library_of, make


@dataclass(frozen=True, slots=True)
class Row:
    """What was seen of an architecture.

    Args:
        name: the architecture.
        library: where it is from.
        num_layers: the layers that it can be cut between.
        as_is: how many calls of modules run as they are.
        difference: the largest difference of outputs, gradients and buffers in one, two
            and three stages, relative; None if it was refused.
        any_batch: whether stages run with any number of samples.
        changed: what the capture changed in the model.
        refused: the first line of the error; empty if there was none.
    """

    name: str
    library: str
    num_layers: int = 0
    as_is: int = 0
    difference: float | None = None
    any_batch: bool = False
    changed: tuple[str, ...] = ()
    refused: str = ""


def check(name: str) -> Row:
    """Capture it, train it in stages, and compare."""
    torch.manual_seed(0)
    case = make(name)
    before = ModelSnapshot.of(case.model)
    try:
        captured = case.capture()
    except HocketError as error:
        return Row(name, library_of(name), refused=str(error).splitlines()[0])
    changed = tuple(before.changes(case.model))
    counts = [n for n in (1, 2, 3) if n <= len(captured.layers)]
    if not captured.any_batch:
        raise AssertionError(captured.fixed_batch)
    worst = max(worst_difference(case, captured, n) for n in counts)
    return Row(
        name,
        library_of(name),
        len(captured.layers),
        sum(x.op == "call_module" for x in captured.training.trace.calls),
        worst,
        captured.any_batch,
        changed,
    )


if __name__ == "__main__":
    for wanted in sys.argv[1:] or all_names():
        if is_installed(wanted):
            sys.stdout.write(json.dumps(asdict(check(wanted))) + "\n")
            sys.stdout.flush()

"""One net on one worker: an outline without values, and the stages that run here.

outline   a b c d e f     on meta: names, shapes, types, the work; never values
cut       a b c | d e f   this worker runs the first stage and keeps a b c
cut again a b | c d | e f c is sent to the worker of the second stage, and is gone
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any
from weakref import ref

from torch import Tensor

from hocket.errors import ModelError
from hocket.model.capture.captured import Captured
from hocket.model.stages.cut import StageModule, check_as_is, cut, names_in_stages
from hocket.model.stages.on_tensors import on_tensors
from hocket.model.stages.routes import Flows


class NetOnWorker:
    """A net that is captured once, and cut any number of times.

    Args:
        name: the net's name in the program.
        captured: the captured model. Only its tensors are kept, until the first cut
            decides which are needed here.

    Attributes:
        outline: the model's structure on `meta`.
        stages: the stages that run here, by their number in the net.
    """

    def __init__(self, name: str, captured: Captured) -> None:
        self.name = name
        self.outline = on_tensors(captured, {})
        self._model = ref(captured.model)  # whose modules the user may change
        self.stages: dict[int, StageModule] = {}
        self._tensors = dict(captured.state.tensors)
        self._names: dict[tuple[int, ...], tuple[frozenset[str], ...]] = {}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The parameters and buffers that are here, by first name."""
        self._tensors |= _tensors_of(self.stages.values(), self._first_name)
        return dict(self._tensors)

    def names(self, boundaries: Sequence[int]) -> tuple[frozenset[str], ...]:
        """Return the first names of what each stage of a cut uses."""
        cut_at = tuple(boundaries)
        if cut_at not in self._names:
            self._names[cut_at] = names_in_stages(self.outline, cut_at)
        return self._names[cut_at]

    def num_bytes(self) -> dict[tuple[str, str], int]:
        """Return the bytes of each parameter and buffer of the net, by (net, name)."""
        tensors = self.outline.state.tensors.items()
        return {(self.name, name): x.nbytes for name, x in tensors}

    def cut(
        self,
        boundaries: Sequence[int],
        here: Collection[int],
        received: Mapping[str, Tensor] | None = None,
        flows: Flows | None = None,
    ) -> tuple[StageModule, ...]:
        """Make the stages that run here; release what they do not use.

        Parameters that stay are the same objects as before, so that they keep
        their optimizer state.

        Args:
            boundaries: the layers at which stages 1, 2, ... begin.
            here: the stages that run on this worker.
            received: the tensors that other workers sent, by first name.
            flows: see `hocket.model.stages.cut.cut`.

        Returns:
            All stages; those of other workers are on `meta`.

        Raises:
            ModelError: a stage uses a tensor that is not here; or the cut is
                impossible.
        """
        given = self.tensors | dict(received or {})
        names = self.names(boundaries)
        needed = {name for number in here for name in names[number]}
        missing = sorted(needed - given.keys())
        if missing:
            raise ModelError(
                f"stages {', '.join(map(str, sorted(here)))} of net {self.name} use "
                f"{missing[0]} (and {len(missing) - 1} more names), which this worker "
                "does not hold: receive it from one that does (plan_moves)"
            )
        check_as_is(self.outline, boundaries, flows)
        tensors = {name: given[name] for name in needed}
        own = on_tensors(self.outline, tensors, self._model())
        stages = cut(own, boundaries, flows)
        self.stages = {number: stages[number] for number in here}
        self._tensors = _tensors_of(self.stages.values(), self._first_name)
        return stages

    def adopt(self, stages: Mapping[int, StageModule]) -> None:
        """Keep stages that were cut elsewhere; release what they do not use."""
        self.stages = dict(stages)
        self._tensors = _tensors_of(self.stages.values(), self._first_name)

    def state_dict(self) -> dict[str, Tensor]:
        """Return this worker's part of the uncut model's `state_dict()`."""
        state = self.outline.state
        names = state.first_name.items()
        tensors = self.tensors
        return {
            name: tensors[first]
            for name, first in names
            if first in tensors and name in state.persistent
        }

    @property
    def _first_name(self) -> Mapping[str, str]:
        return self.outline.state.first_name


def _tensors_of(
    stages: Collection[StageModule] | Any, first_name: Mapping[str, str]
) -> dict[str, Tensor]:
    """Return the tensors that stages keep, by first name."""
    found: dict[str, Tensor] = {}
    for stage in stages:
        for name, x in (
            *stage.named_parameters(remove_duplicate=False),
            *stage.named_buffers(remove_duplicate=False),
        ):
            found[first_name[name]] = x
    return found

"""Keeps the versions of a stage's weights from before its last updates.

A stage of delay 1 computes step t with the weights after `max(0, t - 1)` updates. Each
version is a set of leaves; autograd saves these, and not the parameters:

                     version 3        version 4        version 5
    step 4's F, B    old leaves       new leaves ═ parameters
      its last B     dropped          (forwards of step 5 may be on their way here)
    its U
      copy                            old leaves       copy
      optimizer.step                  old leaves       new leaves ═ parameters

So the newest version is the live weights themselves, and a stage of delay d holds d
copies more, one less from a step's last backward to its update. What has been computed
from a version is never changed in place: that would raise in the backward, or for some
layers be silently wrong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, Protocol, cast

from torch import Tensor, nn

from hocket.errors import ModelError
from hocket.model.capture.no_checkpointing import NoCheckpointing, around_old_weights

Leaves = dict[str, Tensor]


class VersionSource(Protocol):
    """A weight of the stage that another stage updates (`weights/stale_ties`)."""

    @property
    def delay(self) -> int:
        """How many updates behind the newest it is read."""

    @property
    def num_bytes(self) -> int:
        """The bytes of all versions here but the live weights."""

    def read(self, step: int) -> Tensor:
        """Return the leaf that a step reads."""

    def set_old(self, old: Sequence[Tensor]) -> None:
        """Load other old versions, as `WeightVersions.set_old`."""


class WeightVersions:
    """The versions of its weights that a stage may still read.

    Args:
        module: the stage's module. The optimizer updates its parameters.
        delay: how many updates behind the newest it reads; 0 if only its shared weights
            are stale.
        tied: the weights that other stages update, by name.
        follows: whether all weights move, as those of a momentum teacher; else those
            that want a gradient.

    Attributes:
        delay: the largest of any weight.
        num_updates: the stage's updates since training began.
    """

    def __init__(
        self,
        module: nn.Module,
        delay: int,
        tied: Mapping[str, VersionSource] | None = None,
        *,
        follows: bool = False,
    ) -> None:
        self._own_delay = delay
        self._tied = {} if tied is None else tied
        self.delay: Final = max([delay, *(x.delay for x in self._tied.values())])
        named = module.named_parameters()
        trained = {name: p for name, p in named if follows or p.requires_grad}
        old = trained.keys() - self._tied.keys() if delay else set()
        self._trained = {name: p for name, p in trained.items() if name in old}
        places = {n: p for n, p in trained.items() if n in old or n in self._tied}
        self._in_places = places
        self.find_places(module)
        self._placed: Leaves | None = None  # the version in the parameters' places
        self._old: deque[Leaves] = deque()  # the oldest first
        self._newest: Leaves | None = None  # until it is read
        self._of_step: dict[int, Leaves] = {}  # what steps under way read
        self._ended: set[int] = set()  # steps that ended before earlier ones
        self._first = 0  # the first step that may still read
        self._complete: dict[int, Leaves] = {}  # gradients of steps that must wait
        self.num_updates = 0
        self._guard = around_old_weights(self.delay)
        # Each step has its own leaves of shared weights. And stages that share a weight
        # may run the same modules, whose places the other one fills in between.
        self._fills_always = bool(self._tied)

    def find_places(self, module: nn.Module) -> None:
        """Find where a stage has its parameters, before the first forward reads any."""
        self._places = ParameterSlots(module, self._in_places)

    def put(self, step: int) -> NoCheckpointing:
        """Let the stage compute with the weights that a step reads.

        They stay in place until another version is needed, or `take_out`: the next
        forwards mostly read the same, and there are many places.

        Args:
            step: the step's number since training began.

        Returns:
            A context to enter around the forward: it forbids activation checkpointing,
            whose backward would read another version.
        """
        leaves = self._read_by(step)
        if leaves is self._placed and not self._fills_always:
            return self._guard
        tied = {name: source.read(step) for name, source in self._tied.items()}
        self._places.fill(leaves | tied)
        self._placed = leaves
        return self._guard

    def take_out(self) -> None:
        """Put the parameters back in their places."""
        if self._placed is not None:
            self._places.empty()
            self._placed = None

    @property
    def in_place(self) -> Sequence[Tensor]:
        """The weights that are in the parameters' places, if these are old ones."""
        return () if self._placed is None else [*self._placed.values()]

    def read(self, name: str, step: int) -> Tensor:
        """Return the leaf of one of its own weights that another stage's step reads."""
        self._fills_always = True
        return self._read_by(step)[name]

    def complete(self, step: int) -> None:
        """Move a step's gradients to the parameters, after its last backward.

        Its gradients go to the parameters, or wait until the updates of earlier steps
        are made. Versions that no step reads any more are released.
        """
        leaves = self._read_by(step)
        del self._of_step[step]
        grads = {n: leaf.grad for n, leaf in leaves.items() if leaf.grad is not None}
        for leaf in leaves.values():
            leaf.grad = None
        if self.is_next(step):
            self._place(grads)
        else:
            self._complete[step] = grads
        if self._tied:
            self.take_out()  # they are released
        self._ended.add(step)
        while self._first in self._ended:
            self._ended.remove(self._first)
            self._first += 1
        first = max(0, self._first - self._own_delay)
        while self._old and self.num_updates - len(self._old) < first:
            if self._old.popleft() is self._placed:
                self.take_out()

    def is_next(self, step: int) -> bool:
        """Return whether a step's gradients are those of the next update."""
        return step <= self.num_updates

    def before_update(self) -> None:
        """Keep the present weights: the update will change a copy of them."""
        self._old.append(self._newest_leaves())
        self._newest = None
        for parameter in self._trained.values():
            parameter.data = parameter.detach().clone()

    def after_update(self) -> None:
        """Increment the weight version."""
        self.num_updates += 1
        if self.num_updates in self._complete:
            self._place(self._complete.pop(self.num_updates))

    def old(self) -> list[dict[str, Tensor]]:
        """Return the old versions that later steps will still read.

        Only between steps. Not copies: they change with later updates.
        """
        return [{n: leaf.detach() for n, leaf in old.items()} for old in self._old]

    def set_old(self, old: Sequence[Mapping[str, Tensor]]) -> None:
        """Load old versions; the parameters are the newest.

        Args:
            old: the result of `old`; fewer if there were fewer updates. Copied.
        """
        for name, source in self._tied.items():
            source.set_old([values[name] for values in list(old)[-source.delay :]])
        own = list(old)[-self._own_delay :] if self._own_delay else []
        self._newest = None
        self._of_step.clear()
        self._old = deque(
            {n: _leaf(values[n].detach().clone(), p) for n, p in self._trained.items()}
            for values in own
        )

    def resume_from(self, num_updates: int) -> None:
        """Set the number of updates, after other weights were loaded."""
        self._newest = None
        self._of_step.clear()
        self._ended.clear()
        self._first = self.num_updates = num_updates

    @property
    def num_bytes(self) -> int:
        """The bytes of all versions but the live weights."""
        tied = sum(source.num_bytes for source in self._tied.values())
        return tied + sum(x.nbytes for old in self._old for x in old.values())

    def _place(self, grads: Leaves) -> None:
        for name, grad in grads.items():
            self._trained[name].grad = grad

    def _read_by(self, step: int) -> Leaves:
        """Return the leaves that a step reads: no two steps have the same at a time.

        Steps that read one version have leaves of their own in its memory, so that
        their gradients stay apart.
        """
        leaves = self._of_step.get(step)
        if leaves is None:
            leaves = self._version_of(step)
            if any(leaves is other for other in self._of_step.values()):
                leaves = {n: _leaf(x.detach(), x) for n, x in leaves.items()}
            self._of_step[step] = leaves
        return leaves

    def _version_of(self, step: int) -> Leaves:
        back = self.num_updates - max(0, step - self._own_delay)
        if back <= 0 or not self._old:
            return self._newest_leaves()
        return self._old[max(0, len(self._old) - back)]

    def _newest_leaves(self) -> Leaves:
        if self._newest is None:
            self._newest = {n: _leaf(p.data, p) for n, p in self._trained.items()}
        return self._newest


def _leaf(value: Tensor, like: Tensor) -> Tensor:
    """Return a leaf whose gradients add up in the same type as another's."""
    value.requires_grad_().grad_dtype = like.grad_dtype
    return value


class ParameterSlots:
    """The places of trained parameters; one parameter may be in several modules.

    Filling them exchanges entries of the modules' own dicts; the parameters stay the
    same objects.

    Args:
        module: the stage.
        trained: its parameters by name.
    """

    def __init__(self, module: nn.Module, trained: Mapping[str, nn.Parameter]) -> None:
        names = {id(parameter): name for name, parameter in trained.items()}
        self._slots = [
            (_entries(part), key, names[id(parameter)], parameter)
            for part in module.modules()
            for key, parameter in part._parameters.items()
            if id(parameter) in names
        ]

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Let the module compute with these tensors, by name, until `empty`."""
        for slots, key, name, _ in self._slots:
            slots[key] = tensors[name]

    def empty(self) -> None:
        """Put the parameters back."""
        for slots, key, name, parameter in self._slots:
            # Old weights, also those of another stage, are no parameters.
            if slots[key] is not parameter and isinstance(slots[key], nn.Parameter):
                raise ModelError(
                    f"{name} was replaced between two steps, while its place held an "
                    "older version of it: copy the values in place (`with "
                    "torch.no_grad(): old.copy_(new)`), or make a new pipeline"
                )
            slots[key] = parameter

    @contextmanager
    def filled(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the module compute with these tensors for a while."""
        try:
            self.fill(tensors)
            yield
        finally:
            self.empty()


def _entries(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's own parameters, by name; any tensor may replace them."""
    return cast("dict[str, Tensor | None]", module._parameters)

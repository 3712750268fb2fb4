"""Runs one order of a step again and again: op by op, or as one captured graph.

On a device with graphs, the step is captured once. The graph reads the tensors that it
was captured with: a batch is copied into them, and rates are changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from hocket.core.op import Op
from hocket.run.device.device import Device, Work
from hocket.run.outoforder.play.step_player import StepPlayer, StepValues, Tensors

_TIMEOUT_S = 600.0


class StepReplay:
    """Runs steps of one order.

    Where W and U of a step run in the next one, what these read is kept until then. A
    graph reads it from tensors that stay the same, into which it copies it at its end.

    Args:
        player: plays the order.
        given: the tensors of the step. Their values may change in between, and on a
            device with graphs they stay the same tensors.
        device: the device.
        changing: the names of given tensors that the next step overwrites: rates, and
            on a device with graphs the batch.
    """

    def __init__(
        self,
        player: StepPlayer,
        given: Tensors,
        device: Device,
        changing: frozenset[str] = frozenset(),
    ) -> None:
        self._player, self._given, self._device = player, given, device
        self._changing = changing
        self._results: Mapping[str, Tensor] = {}
        self._replay: Work | None = None
        self._old: StepValues | None = None
        self._is_open = False  # whether W and U of a step wait for the next one

    def capture(self) -> None:
        """Capture the step as a graph; a step runs first, so weights change."""
        lane = self._device.lanes[0]
        self._play_eagerly(self._given)  # for the libraries' workspaces of each lane
        if self._is_open:
            self._play()
        self._device.synchronize(_TIMEOUT_S)
        self._replay = self._device.capture_graph(lane, self._play)

    def run(self, given: Tensors | None = None) -> Mapping[str, Tensor]:
        """Run one step; return its losses, by the names of their values.

        Args:
            given: other tensors, where no graph is captured.
        """
        is_first = self._player.carries and not self._is_open
        if self._replay is None or is_first:
            return self._play_eagerly(self._given if given is None else given)
        self._device.fork()
        self._device.lanes[0].submit(self._replay, label="step")
        self._device.join()
        return self._results

    def watch(
        self,
        given: Tensors,
        around: Callable[[dict[str, Tensor], Op, Callable[[], None]], None],
    ) -> Mapping[str, Tensor]:
        """Play one step op by op, with all its W and U; return its losses.

        Args:
            given: the tensors of the step.
            around: runs each op, given what the ops before it have made, by name.
        """
        values = StepValues(given, {})

        def run(lane: int, op: Op, play: Callable[[], None]) -> None:
            around(values.store, op, play)

        results = self._player.play_part(values, None, run)
        if self._player.carries:
            self._player.play_part(None, values, run)
        return results

    def finish(self) -> None:
        """Run the W and U that wait for the next step."""
        if self._is_open and self._old is not None:
            self._player.play_part(None, self._copy_of_old(self._old))
        self.forget()

    def forget(self) -> None:
        """Drop the W and U that wait for the next step: the weights are others now."""
        self._is_open = False

    def _play_eagerly(self, given: Tensors) -> Mapping[str, Tensor]:
        new = StepValues(given, {})
        old = self._copy_of_old(self._old) if self._is_open and self._old else None
        results = self._player.play_part(new, old)
        if self._player.carries:
            self._keep(new)
            self._is_open = True
        return results

    def _play(self) -> None:
        assert self._old is not None or not self._player.carries
        new = StepValues(self._given, {})
        old = None if self._old is None else self._copy_of_old(self._old)
        self._results = self._player.play_part(new, old)
        if self._player.carries:
            self._keep(new)

    def _copy_of_old(self, old: StepValues) -> StepValues:
        """Return the same tensors, in a store that a step may empty."""
        store = dict(old.store)
        if not self._device.has_graphs:
            old.store.clear()  # each is freed where it is read last
        return StepValues(old.given, store)

    def _keep(self, new: StepValues) -> None:
        """Keep what the next step reads of this one."""
        if self._old is not None and self._device.has_graphs:
            for name in self._changing:
                self._old.given[name].copy_(new.given[name])
            for name, tensor in new.store.items():
                self._old.store[name].copy_(tensor)
            return
        copies = {name: new.given[name].clone() for name in self._changing}
        self._old = StepValues({**new.given, **copies}, new.store)

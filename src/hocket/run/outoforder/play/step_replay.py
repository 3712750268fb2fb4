"""Runs one order of a step again and again: op by op, or as one captured graph.

On a device with graphs, the step is captured once. The graph reads the tensors that it
was captured with: a batch is copied into them, and rates are changed in place.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hocket.run.device.device import Device, Work
from hocket.run.outoforder.play.step_player import StepPlayer, Tensors

_TIMEOUT_S = 600.0


class StepReplay:
    """Runs steps of one order.

    Args:
        player: plays the order.
        given: the tensors of the step. Their values may change in between, and on a
            device with graphs they stay the same tensors.
        device: the device.
    """

    def __init__(self, player: StepPlayer, given: Tensors, device: Device) -> None:
        self._player, self._given, self._device = player, given, device
        self._results: Mapping[str, Tensor] = {}
        self._replay: Work | None = None

    def capture(self) -> None:
        """Capture the step as a graph; a step runs first, so weights change."""
        lane = self._device.lanes[0]
        self._player.play(self._given)  # for the libraries' workspaces of each lane
        self._device.synchronize(_TIMEOUT_S)
        self._replay = self._device.capture_graph(lane, self._play)

    def run(self, given: Tensors | None = None) -> Mapping[str, Tensor]:
        """Run one step; return its losses, by the names of their values.

        Args:
            given: other tensors, where no graph is captured.
        """
        if self._replay is None:
            return self._player.play(self._given if given is None else given)
        self._device.fork()
        self._device.lanes[0].submit(self._replay, label="step")
        self._device.join()
        return self._results

    def _play(self) -> None:
        self._results = self._player.play(self._given)

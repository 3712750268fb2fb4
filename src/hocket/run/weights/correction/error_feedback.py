"""Error feedback: corrects a stale update when the right gradient is known.

Update `t` should have used the gradient at `W(t)`, and used the one at `W(t-d)`. Update
`t + d` is the one that uses the gradient at `W(t)`. So by then it is known, but for the
batch, what update `t` should have been; the difference is added:

    u(t)     what the optimizer would add to the weights, from the gradient at W(t-d)
    e(t)  =  u(t) - u(t-d)       the error that update t-d made
    W(t+1) = W(t) + u(t) + e(t)

Each update is thus applied twice, and once taken back `d` updates later. What has been
applied is the sum of all `u` and the last `d` of them once more: nothing is lost, and
nothing piles up. Before the first update there was none: `u(t) = 0` for `t < 0`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import final

from torch import Tensor, nn

from hocket.run.weights.correction.correction import Correction, CorrectionState
from hocket.run.weights.correction.moved import moved_by


@final
class ErrorFeedback(Correction):
    """Adds the error of the update `delay` updates ago to each update.

    Works on what an optimizer does to the weights, so with any optimizer. Keeps `delay`
    tensors like the weights, and one more while it updates.

    Source: after Zmushko et al., arXiv:2606.30634, which names the idea: error feedback
    for a delay of 1, with any optimizer. Only its abstract was available: the form
    above, the extension to longer delays and the first updates are ours.

    Args:
        parameters: the stage's trained parameters, by name.
        delay: the stage's delay in updates, above 0.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], delay: int) -> None:
        self._parameters = parameters
        self._num_updates = 0
        self._updates: dict[str, deque[Tensor]] = {
            name: deque(maxlen=delay) for name in parameters
        }

    def step(self, step: Callable[[], object]) -> None:
        """Update, and correct an earlier update."""
        for name, update in moved_by(step, self._parameters).items():
            earlier = self._updates[name]
            error = update - earlier[0] if len(earlier) == earlier.maxlen else update
            self._parameters[name].detach().add_(error)
            earlier.append(update)  # and the oldest is forgotten
        self._num_updates += 1

    def predicted(self) -> None:
        """Return None: forwards read the weights as they are."""

    def state_dict(self) -> CorrectionState:
        """Return the last `delay` updates of each parameter."""
        return {
            "num_updates": self._num_updates,
            "kept": {name: list(kept) for name, kept in self._updates.items()},
        }

    def load_state_dict(self, state: CorrectionState) -> None:
        """Restore a state; fewer updates mean that training began recently."""
        self._num_updates = state["num_updates"]
        for name, kept in self._updates.items():
            kept.clear()
            kept.extend(x.clone() for x in state["kept"].get(name, []))

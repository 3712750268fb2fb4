"""Weight prediction: forwards read the weights that their gradients will update.

The gradient of step `t` is computed with the weights `W(t-d)` and applied to `W(t)`.
They are predicted along the optimizer's own direction `v` when `W(t-d)` is made, and
the prediction is read in its place:

    forward and backward of step t read  W(t-d) + d * v(t-d)     instead of  W(t-d)
    the gradient is applied to           W(t)

    SGD with momentum    v = -lr * momentum_buffer
    Adam, AdamW          v = -lr * (m / (sqrt(n) + eps) + weight_decay * W), m and n the
                         two averages without their bias
    any other            v = W(t-d) - W(t-d-1)

The rate is the next update's. The weights before the first update are read as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from hocket.run.weights.correction.correction import Correction, CorrectionState

_ADAMS: Final = (Adam, AdamW)

# (weights, the group's options, the parameter's state, updates ahead) -> predicted
# weights; None before the first update.
_Ahead = Callable[[Tensor, dict[str, Any], dict[str, Any], int], Tensor | None]


@final
class WeightPrediction(Correction):
    """Lets forwards read the predicted weights after `delay` updates.

    With SGD with momentum, Adam and AdamW nothing is kept; with any other optimizer the
    last update of each weight, one tensor like it.

    Source: after Chen et al., "SpecTrain", arXiv:1809.02839 (momentum); Guan et al.,
    "XPipe", arXiv:1911.04610 (Adam), and "PipeOptim", arXiv:2312.00839 (by optimizer),
    known here from abstracts. Ours are that forward and backward of a step read one and
    the same prediction, that decoupled weight decay is predicted too, and the rule for
    all other optimizers.

    Args:
        parameters: the stage's trained parameters, by name.
        optimizer: the stage's optimizer.
        delay: the stage's delay in updates, above 0.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer, delay: int
    ) -> None:
        self._parameters = parameters
        self._optimizer = optimizer
        self._delay = delay
        self._num_updates = 0
        self._ahead = _ahead_of(optimizer)
        self._moved: dict[str, Tensor] = {}  # by the last update

    def step(self, step: Callable[[], object]) -> None:
        """Update, and keep what moved if the optimizer's state does not give it."""
        if self._ahead is None:
            self._moved = moved_by(step, self._parameters)
        else:
            step()
        self._num_updates += 1

    def predicted(self) -> dict[str, Tensor]:
        """Return the predicted weights after `delay` updates."""
        groups = {
            id(p): group
            for group in self._optimizer.param_groups
            for p in group["params"]
        }
        return {
            name: self._one_ahead(name, p, groups.get(id(p)))
            for name, p in self._parameters.items()
        }

    def state_dict(self) -> CorrectionState:
        """Return each parameter's last update, if the optimizer does not give it."""
        return {
            "num_updates": self._num_updates,
            "kept": {name: [moved] for name, moved in self._moved.items()},
        }

    def load_state_dict(self, state: CorrectionState) -> None:
        """Restore a state."""
        self._num_updates = state["num_updates"]
        self._moved = {
            name: kept[-1].clone()
            for name, kept in state["kept"].items()
            if name in self._parameters and kept
        }

    def _one_ahead(
        self, name: str, parameter: nn.Parameter, group: dict[str, Any] | None
    ) -> Tensor:
        weights = parameter.detach()
        if self._ahead is not None and group is not None:
            state = self._optimizer.state.get(parameter, {})
            found = self._ahead(weights, group, state, self._delay)
            return weights.clone() if found is None else found
        if name in self._moved:
            return weights.add(self._moved[name], alpha=self._delay)
        return weights.clone()


def predicts_from_state(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's state alone predicts its next updates."""
    return _ahead_of(optimizer) is not None


def _ahead_of(optimizer: Optimizer) -> _Ahead | None:
    """Return the prediction from the optimizer's state, if it has one.

    Classes derived from the known ones may compute otherwise, so they have none.
    """
    groups = optimizer.param_groups
    if any(p.is_complex() for group in groups for p in group["params"]):
        return None
    if type(optimizer) is SGD and all(group["momentum"] > 0 for group in groups):
        return _with_momentum
    if type(optimizer) in _ADAMS and not any(group["amsgrad"] for group in groups):
        return _with_adam
    return None


def _with_momentum(
    weights: Tensor, group: dict[str, Any], state: dict[str, Any], num_updates: int
) -> Tensor | None:
    """Predict SGD with momentum; for a constant gradient, Nesterov's is the same."""
    moved = state.get("momentum_buffer")
    if moved is None:
        return None
    return weights.sub(moved, alpha=float(group["lr"]) * num_updates)


def _with_adam(
    weights: Tensor, group: dict[str, Any], state: dict[str, Any], num_updates: int
) -> Tensor | None:
    if not state:
        return None
    step = float(state["step"])
    beta1, beta2 = (float(beta) for beta in group["betas"])
    rate = float(group["lr"]) * num_updates
    size = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
    decay = group["weight_decay"] if group["decoupled_weight_decay"] else 0.0
    ahead = weights.mul(1 - rate * decay)
    return ahead.addcdiv_(state["exp_avg"], size, value=-rate / (1 - beta1**step))


def moved_by(
    step: Callable[[], object], parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Call a step, and return what it added to each parameter, by name."""
    moved = {name: p.detach().clone() for name, p in parameters.items()}
    step()
    for name, parameter in parameters.items():
        torch.sub(parameter.detach(), moved[name], out=moved[name])
    return moved

"""Muon for the matrices inside a transformer, AdamW for all the rest."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from hocket.run.weights.settings import Parameters
from hocket.teacher.lars import Closure, closure_loss

_INSIDE: Final = "blocks."  # embeddings and heads have matrices too, but not there


class MuonAndAdamw(torch.optim.Optimizer):
    """One optimizer of two; both have the same learning rate.

    Muon's steps are scaled to the size of AdamW's, so that they can share it.

    Args:
        parameters: of a stage.
        lr: the learning rate.
        weight_decay: per step, as a share of the weights and of the learning rate.

    Source: Jordan, https://kellerjordan.github.io/posts/muon/; Liu et al.,
    arXiv:2502.16982, section 2.2, for the scale.
    """

    def __init__(
        self, parameters: Parameters, *, lr: float, weight_decay: float
    ) -> None:
        inside: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, p in parameters.named():
            (inside if name.startswith(_INSIDE) and p.dim() == 2 else others).append(p)
        self._parts: list[torch.optim.Optimizer] = []
        if inside:
            self._parts.append(
                torch.optim.Muon(
                    inside,
                    lr=lr,
                    weight_decay=weight_decay,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        if others:
            self._parts.append(
                torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay, fused=True)
            )
        # The same groups and the same state, not copies: a schedule of the learning
        # rate changes the parts' own.
        groups = [group for part in self._parts for group in part.param_groups]
        super().__init__(groups, {})
        for part in self._parts:
            part.state = self.state

    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient.

        Args:
            closure: computes the loss again, if given.

        Returns:
            The closure's loss.
        """
        loss = closure_loss(closure)
        for part in self._parts:
            part.step()
        return loss

"""The step of the jobs in this folder: half precision, and batches in chunks.

batch ──┬─ chunk 0: forward, backward ─┐
└─ chunk 1: forward, backward ─┴─▶ one update, of the mean gradient
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hocket import JobContext


class Loop:
    """Updates an optimizer from chunks of a batch.

    Args:
        job: the job, whose gates forwards and backwards pass.
        optimizer: the optimizer.
        amp: computes in half precision (float16 with a loss scale on a GPU, bfloat16 on
            a CPU).
        clip_norm: the largest norm of the gradient; None for any.
    """

    def __init__(
        self,
        job: JobContext,
        optimizer: torch.optim.Optimizer,
        *,
        amp: bool = False,
        clip_norm: float | None = None,
    ) -> None:
        self.job, self.optimizer, self.clip_norm = job, optimizer, clip_norm
        kind = job.device.type
        # torch's cache of casts is one for all threads, and any of them empties it.
        cast: dict[str, Any] = {
            "device_type": kind,
            "enabled": amp,
            "cache_enabled": False,
        }
        self.autocast: Callable[[], Any] = lambda: torch.autocast(**cast)
        self.scaler: Any = torch.amp.GradScaler(kind, enabled=amp and kind == "cuda")

    def update(
        self,
        chunks: Sequence[Any],
        sizes: Sequence[int],
        loss_of: Callable[[Any], Tensor],
    ) -> Tensor:
        """Train on chunks, with one update; return the mean loss over their samples.

        Args:
            chunks: the chunks.
            sizes: the numbers of their samples.
            loss_of: returns the mean loss over the samples of a chunk.
        """
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.job.device)
        for chunk, size in zip(chunks, sizes, strict=True):
            with self.job.forward(), self.autocast():
                loss = loss_of(chunk) * (size / sum(sizes))
            with self.job.backward():
                self.scaler.scale(loss).backward()
            total += loss.detach()
        if self.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            weights = [p for g in self.optimizer.param_groups for p in g["params"]]
            torch.nn.utils.clip_grad_norm_(weights, self.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return total

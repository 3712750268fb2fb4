"""Losses and metrics of an evaluation: sums over samples on a worker, means over all.

    on each last stage   DeviceSums: add_losses, add_metrics, ... read ─┐ gathered
    on every worker      EvaluationSums(parts).result() ◀──────────────┘

A metrics function that fails is not called again. The evaluation goes on to its end, so
that no worker waits for another, and then every worker raises MetricsError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hocket.errors import DataError, MetricsError, ModelError
from hocket.model.trace.per_sample import unshared
from hocket.run.data.loss import TOTAL
from hocket.run.diagnostics.job_folder import Json

Metrics = Callable[[Any, Any], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Means over all samples of a loader; of a `TokenMean`, over all that count.

    Args:
        loss: what is trained.
        losses: every scalar that the loss function names.
        metrics: every scalar that the metrics function names; of one that it leaves out
            for some microbatches, the mean over the samples of the others.
        num_samples: how many samples they are means over.
    """

    loss: float
    losses: dict[str, float]
    metrics: dict[str, float]
    num_samples: int


class DeviceSums:
    """Sums over samples, on a last stage.

    They stay where the model computes: to read one there is to wait until all that was
    handed to an accelerator is done, and to leave it without work meanwhile.

    Args:
        metrics: as for `Pipeline.evaluate`.

    Attributes:
        error: the first error of `metrics`.
    """

    def __init__(self, metrics: Metrics | None = None) -> None:
        self.error: Exception | None = None
        self._call = metrics
        self._losses: dict[str, Tensor] = {}
        self._metrics: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}  # samples of each metric
        self._num_samples = 0
        self._weight = 0.0  # the sum of the losses' weights

    def add_losses(self, named: Mapping[str, Tensor], weight: float) -> None:
        """Add means of so much weight."""
        self._weight += weight
        _add(named, self._losses, weight)

    def add_samples(self, output: Any, targets: Any, count: int) -> None:
        """Count samples, and add their metrics."""
        self._num_samples += count
        if self._call is not None and self.error is None:
            try:
                means = named_means(self._call(output, unshared(targets)))
            except Exception as error:
                self.error = error
            else:
                _add(means, self._metrics, count)
                for name in means:
                    self._counts[name] = self._counts.get(name, 0) + count

    def read(self) -> dict[str, Json]:
        """Return the sums as JSON can hold them."""
        error = self.error
        return {
            "losses": {name: x.item() for name, x in self._losses.items()},
            "metrics": {name: x.item() for name, x in self._metrics.items()},
            "counts": {**self._counts},
            "count": self._num_samples,
            "weight": self._weight,
            "error": None if error is None else f"{type(error).__name__}: {error}",
        }


def _add(named: Mapping[str, Tensor], to: dict[str, Tensor], count: float) -> None:
    for name, value in named.items():
        more = torch.as_tensor(value, dtype=torch.float64) * count
        to[name] = to[name] + more if name in to else more


@dataclass(frozen=True, slots=True)
class EvaluationSums:
    """What all workers have summed up.

    Args:
        parts: what `DeviceSums.read` returned, by rank.
        error: this worker's own error of the metrics function.
    """

    parts: Sequence[Any]
    error: Exception | None

    def result(self) -> EvaluationResult:
        """Return the means, the same on every worker.

        Raises:
            MetricsError: the metrics function failed on a worker; on all of them.
            DataError: there were no samples.
        """
        for rank, part in enumerate(self.parts):
            if part["error"] is not None:
                raise MetricsError(
                    f"the metrics function failed on rank {rank}: {part['error']}. "
                    "Nothing else was stopped: the pipeline can be used as before"
                ) from self.error
        num_samples = sum(part["count"] for part in self.parts)
        weight = sum(part["weight"] for part in self.parts)
        if num_samples == 0:
            raise DataError(
                "the loader to evaluate on is empty; the pipeline can be used as before"
            )
        losses, metrics, counts = (
            _added([part[key] for part in self.parts])
            for key in ("losses", "metrics", "counts")
        )
        losses = {name: value / (weight or 1.0) for name, value in losses.items()}
        metrics = {name: value / counts[name] for name, value in metrics.items()}
        return EvaluationResult(losses[TOTAL], losses, metrics, num_samples)


def _added(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def check_metrics(metrics: object) -> None:
    """Raise ModelError unless the metrics can be called.

    Raises:
        ModelError: it is no function.
    """
    if metrics is not None and not callable(metrics):
        raise ModelError(
            "metrics must be one function, metrics(output, targets), which returns a "
            f"dict of named means over samples; got a {type(metrics).__name__}"
        )


def named_means(value: object) -> dict[str, Tensor]:
    """Return a metrics function's result as scalars in float64.

    Args:
        value: a mapping from names to numbers, or to tensors of one element.

    Raises:
        ModelError: it is anything else.
    """
    if not isinstance(value, Mapping):
        raise ModelError(
            "metrics(output, targets) must return a dict of named means over the "
            "microbatch's samples, such as {'accuracy': correct.double().mean()}; got "
            f"a {type(value).__name__}"
        )
    return {str(name): _mean(str(name), x) for name, x in value.items()}


def _mean(name: str, value: Any) -> Tensor:
    try:
        mean = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        mean = None
    if mean is None or mean.numel() != 1:
        found = f"a {type(value).__name__}"
        if isinstance(value, Tensor):
            found = f"a tensor of shape {tuple(value.shape)}"
        raise ModelError(
            f"the metric {name!r} must be one number, the mean over the microbatch's "
            f"samples; got {found}"
        )
    return mean.reshape(())

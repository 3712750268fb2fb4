"""Frozen layers from the model's first on, and the form of what they compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from hocket.errors import ModelError
from hocket.freeze.cache.shard import Key
from hocket.model.trace.per_sample import num_rows, take_rows, unshared
from hocket.run.data.batch import Microbatch
from hocket.run.elastic.cache.output_rows import OutputRows
from hocket.run.stage.runner import StageRunner

_SAME: Final = 1e-3  # relative; of what differs by rounding alone


@dataclass(frozen=True, slots=True)
class FrozenPart:
    """Frozen layers, from the model's first on.

    Args:
        runner: runs them.
        digest: see `prefix_digest`.
        kept_as: the type that floating-point numbers are kept in; None: as computed.
        rows: the forms of their outputs, by that of the inputs.
    """

    runner: StageRunner
    digest: bytes
    kept_as: str | None
    rows: dict[int, OutputRows] = field(default_factory=dict)

    def keys(self, data: int, form: int, samples: Sequence[int]) -> list[Key]:
        """Return the keys of samples.

        Args:
            data: a digest of the data set and its draw.
            form: the form of the samples' inputs.
            samples: their rows in the data set.
        """
        return [Key(self.digest, data, form, sample) for sample in samples]

    def add_form(
        self, form: int, microbatch: Microbatch, begun: Begun | None = None
    ) -> OutputRows:
        """Find the form of the outputs for microbatches like one.

        Args:
            form: the form of the inputs.
            microbatch: the microbatch.
            begun: what is kept of it behind the first layers, so that only those that
                follow run.

        Raises:
            ModelError: outputs cannot be kept by sample.
        """
        begun = Begun(self.runner) if begun is None else begun
        outputs = run_stage(begun.runner, microbatch, begun.received)
        module = self.runner.module
        rows = OutputRows.of(
            outputs,
            module.outputs,
            microbatch.num_samples,
            self.kept_as,
            is_fixed=module.fixed_samples > 0,
        )
        if not self.rows:
            _refuse_dependent(begun, microbatch, outputs, rows)
        self.rows[form] = rows
        return rows


@dataclass(frozen=True, slots=True)
class Begun:
    """A microbatch of which the first layers' outputs are known.

    Args:
        runner: runs the layers behind them.
        received: those outputs; none where the runner runs all layers.
        rows: their form, in which no sample depends on another.
    """

    runner: StageRunner
    received: tuple[Tensor, ...] = ()
    rows: OutputRows | None = None

    def repeated(self, rows_of: Tensor) -> tuple[Tensor, ...]:
        """Return what is received for a microbatch of some of its samples.

        Args:
            rows_of: the samples.
        """
        if self.rows is None:
            return self.received
        return self.rows.taken(self.received, rows_of)


def run_stage(
    runner: StageRunner, microbatch: Microbatch, received: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Run a stage's forward, without gradients."""
    with torch.no_grad():
        return tuple(runner.evaluate(microbatch, received))


def _refuse_dependent(
    begun: Begun,
    microbatch: Microbatch,
    outputs: Sequence[Tensor],
    rows: OutputRows,
) -> None:
    """Refuse layers whose output of a sample depends on others in its microbatch.

    The first half of the samples is computed once more, beside copies of itself.

    Raises:
        ModelError: by how much they differ.
    """
    size = microbatch.num_samples
    half = size // 2
    if not half and None in rows.columns:
        raise ModelError(
            "the frozen layers have outputs without samples, and with one sample in a "
            "microbatch it cannot be seen whether they depend on it"
        )
    again = torch.arange(size) % max(half, 1)
    leaves = [
        leaf if num_rows(leaf) is None else take_rows(leaf, again)
        for leaf in microbatch.marked
    ]
    copies = replace(microbatch, leaves=tuple(unshared(leaves)))
    other = run_stage(begun.runner, copies, begun.repeated(again))
    for x, y, column in zip(outputs, other, rows.columns, strict=True):
        count = len(x) if column is None else half * column.shape[0]
        a, b = x[:count].double(), y[:count].double()
        distance, norm = (a - b).norm().item(), a.norm().item()
        if not distance <= _SAME * norm:
            raise ModelError(
                f"the frozen layers' outputs of {half} samples differ by "
                f"{distance / norm if norm else distance:.3g} (relative) when the "
                "other samples of their microbatch are others, so they cannot be kept "
                "by sample"
            )

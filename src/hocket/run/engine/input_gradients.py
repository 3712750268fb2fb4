"""Refuses inputs that want a gradient, where no worker has all of it.

A loop that calls `x.requires_grad_()` on a batch reads `x.grad` behind the step, on the
worker whose stages read `x`: their backwards add to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hocket.core.program import Program
from hocket.errors import ModelError
from hocket.model.stages.stage import StageModule
from hocket.model.trace.per_sample import tensors_in
from hocket.run.data.step_batch import NetBatches


class InputGradientCheck:
    """Detects arguments that want a gradient, of which a part would be missing.

    A net that is not trained gives none, as under `torch.no_grad()`.

    Args:
        program: says where each stage is, and whether it is trained.
        modules: all stages.
        num_replicas: copies of the pipeline, each of which has its own samples.
    """

    def __init__(
        self, program: Program, modules: Sequence[StageModule], num_replicas: int
    ) -> None:
        self._why: dict[tuple[str, int], str] = {}
        for net in {stage.net for stage in program.stages if stage.trainable}:
            stages = [n for n, stage in enumerate(program.stages) if stage.net == net]
            for leaf in {leaf for n in stages for leaf in modules[n].batch_inputs}:
                readers = {n: modules[n] for n in stages if _reads(modules[n], leaf)}
                faults = _faults(program, readers, num_replicas)
                self._why[net, leaf] = "; ".join(faults)

    def check(
        self, batches: Sequence[NetBatches], names: Sequence[str], step: int
    ) -> None:
        """Check the batches of a step.

        Args:
            batches: all of them.
            names: of the model's arguments.
            step: the step's number, for the error.

        Raises:
            ModelError: the gradient of an argument would not be whole; says why.
        """
        for net, work in (item for nets in batches for item in nets.items()):
            for place, leaf in enumerate(work.microbatches[0].leaves):
                why = self._why.get((net, place))
                if why and any(x.requires_grad for x in tensors_in(leaf)):
                    raise ModelError(
                        f"{names[place]} wants a gradient (requires_grad) at step "
                        f"{step}, which would not be whole: {why}. Detach it, and "
                        "compute its gradient by the model itself, between two steps"
                    )


def _reads(module: StageModule, leaf: int) -> bool:
    return leaf in module.batch_inputs


def _faults(
    program: Program, readers: Mapping[int, StageModule], num_replicas: int
) -> Iterator[str]:
    """Say what of an argument's gradient would be missing, of the stages that read it.

    The example shows which gradients are sent back. It may have wanted none.
    """
    if len({program.stages[number].device for number in readers}) > 1:
        yield f"stages {', '.join(map(str, readers))} read it, on several workers"
    if num_replicas > 1:
        yield f"each of {num_replicas} replicas computes that of its own samples"
    for number, module in readers.items():
        weights = any(parameter.requires_grad for parameter in module.parameters())
        has_backward = weights or any(value.requires_grad for value in module.inputs)
        if not (program.stages[number].trainable and has_backward):
            yield f"stage {number}, which reads it, is frozen and has no backward"
        elif any(
            not x.requires_grad and x.dtype.is_floating_point for x in module.outputs
        ):
            yield f"stage {number} sends values for which no gradient comes back"

"""Refuses what the engine cannot do exactly; each with its reason and a way out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from hocket.core.gates import describe, early_updates, flushes, gates_of
from hocket.core.op import BACKWARDS, STEP_ENDS, WHOLE_OR_SPLIT_BACKWARD, Kind, Op
from hocket.core.program import Program
from hocket.core.schedule import Schedule
from hocket.errors import ConfigError, ModelError
from hocket.model.stages.stage import StageModule
from hocket.model.trace.per_sample import tensors_in
from hocket.run.data.step_batch import NetBatches
from hocket.run.stage.split.layers.accumulate import has_hooks
from hocket.run.weights.settings import TrainingConfig
from hocket.run.weights.stale_ties.stale_tie import StaleTie


def refuse_settings(settings: TrainingConfig, schedule: Schedule) -> None:
    """See that settings go with an order; all go with one that has no body.

    Args:
        settings: how to train.
        schedule: the order.

    Raises:
        ConfigError: they do not; says all reasons.
    """
    if schedule.program.loss_stages and settings.accumulate > 1:
        raise ConfigError(
            f"accumulate is {settings.accumulate}: a loss over the whole batch sees "
            "one batch; take larger batches, and as many more microbatches"
        )
    if not schedule.body:
        return
    if faults := [*_faults(settings, schedule)]:
        raise ConfigError(
            f"{'; '.join(faults)}. Or take an order that ends each step before the "
            'next begins, such as schedule="1f1b"'
        )


def refuse_delays(schedule: Schedule) -> None:
    """See that no stage reads older weights, of which DTensors have no copies.

    Raises:
        ConfigError: one does.
    """
    if any(stage.delay for stage in schedule.program.stages):
        raise ConfigError(
            "a model with DTensors has no older versions of weights (an assignment to "
            "`data` does nothing on a DTensor), and stages of this order read some: "
            'take an order that ends each step, such as schedule="1f1b"'
        )


def refuse_shared(stale_ties: Iterable[StaleTie], schedule: Schedule) -> None:
    """See that the first of the stages that share a weight can update it for all.

    Args:
        stale_ties: the weights of stages that cannot update them together.
        schedule: says their delays, and in which order their backwards come.

    Raises:
        ModelError: it cannot; names the stages, the weight and their delays.
    """
    for tie in stale_ties:
        if why := _why_not_tied(tie, schedule):
            raise ModelError(
                f"stages {', '.join(map(str, tie.stages))} share {tie.name}, but "
                f"{why}. Untie the weight, cut the model so that one stage holds it, "
                'or take another order: "wpipe" or "pipedream", where the first stages '
                'have the largest delay, "pipedream-2bw", where all are 1, or one that '
                'ends each step before the next begins, such as "1f1b"'
            )


def refuse_beside_masters(
    stale_ties: Iterable[StaleTie], following: Iterable[str]
) -> None:
    """Refuse what would lose a part of each update in bfloat16.

    Args:
        stale_ties: weights of stages with several delays.
        following: nets whose weights follow those of another net.

    Raises:
        ModelError: there are some.
    """
    why = [
        f"stages {', '.join(map(str, tie.stages))} share {tie.name} with several "
        "delays, and send each other its gradients in bfloat16 (or untie it)"
        for tie in stale_ties
    ]
    why += [
        f"the weights of net {net} follow others, and in bfloat16 a move of less than "
        "1/512 of a weight is lost, so that it may never move"
        for net in following
    ]
    if why:
        raise ModelError(f"{'; '.join(why)}: take float32 and precision='bfloat16'")


def refuse_early_reads(shared: Mapping[str, Sequence[int]], schedule: Schedule) -> None:
    """See that one update of a weight that stages of a device share is enough.

    The stage that updates last, in a step, updates it for all. Where steps overlap,
    its U (and R) must come behind all of the step's gradients of the weight, and before
    the next step's forwards.

    Args:
        shared: the stages that hold each shared weight.
        schedule: an order with a body.

    Raises:
        ModelError: a gradient comes too late, or a forward too early; names both ops.
    """
    for name, stages in shared.items():
        if pair := _disordered(stages, schedule):
            raise ModelError(
                f"stages {', '.join(map(str, stages))} share {name}, but {pair[0]} "
                f"comes before {pair[1]}: the weight would be updated without all of "
                "its gradients, or read too old. Untie it, cut the model so that one "
                "stage holds it, or take another order; in reverse-first-k a k of at "
                f"most {sorted(stages)[1]} works"
            )


def _disordered(stages: Sequence[int], schedule: Schedule) -> tuple[Op, Op] | None:
    """Return two ops of stages that share a weight on one lane, in the wrong order."""
    program = schedule.program
    devices = {program.stages[stage].device for stage in stages}
    lanes = [schedule.lanes[i] for device in devices for i in schedule.lanes_of(device)]
    if len(lanes) > 1 or any(program.stages[stage].delay for stage in stages):
        return None  # held by several lanes, or old weights: these have other rules
    ops = [op for op in lanes[0].ops if op.stage in stages]
    owner = [op.stage for op in ops if op.kind is Kind.UPDATE and not op.step][-1]
    place = {op: i for i, op in enumerate(ops)}
    pairs = (pair for op in ops for pair in _in_order(op, owner))
    wrong = (
        (second, first)
        for first, second in pairs
        if second in place and place.get(first, len(ops)) > place[second]
    )
    return next(wrong, None)


def _in_order(op: Op, owner: int) -> Iterator[tuple[Op, Op]]:
    """Yield ops that must come one before the other, of a shared weight's holders."""
    if op.kind is Kind.FORWARD and op.step:
        yield Op(Kind.UPDATE, owner, None, op.step - 1), op
    elif op.kind in WHOLE_OR_SPLIT_BACKWARD:
        for kind in STEP_ENDS:
            yield op, Op(kind, owner, None, op.step)


def _why_not_tied(tie: StaleTie, schedule: Schedule) -> str:
    first = tie.stages[0]
    stages = schedule.program.stages
    if not 0 < stages[first].delay == tie.delay:
        delays = ", ".join(str(stages[stage].delay) for stage in tie.stages)
        return (
            f"their delays are {delays}: to update it for all, stage {first}, the "
            "first of them, must have the largest, and that must be above 0"
        )
    for number in schedule.lanes_of(stages[first].device):
        newest = dict.fromkeys(tie.stages, 0)
        for op in schedule.lanes[number].ops:
            if op.kind not in BACKWARDS or op.stage not in newest:
                continue
            newest[op.stage] = op.step
            if op.step < max(newest.values()):
                return (
                    f"device {stages[first].device} has {op} behind backwards of step "
                    f"{max(newest.values())}: the gradients of two steps would mix"
                )
    return ""


def refuse_hooks(
    program: Program, modules: Mapping[int, nn.Module], when: str = ""
) -> None:
    """Refuse hooks of parameters that are not called, or see a part of a gradient.

    Old weights get the gradients of their stage, and call none. And what adds up behind
    a backward is, with replicas or shards, the gradient of one of them.

    Args:
        program: says which stages have a delay.
        modules: stages by number.
        when: where an error begins: with the step.

    Raises:
        ModelError: a parameter has a hook; names the first.
    """
    trained = [n for n in modules if program.stages[n].trainable]
    every = ((n, *named) for n in trained for named in modules[n].named_parameters())
    for stage, name, parameter in every:
        if parameter._post_accumulate_grad_hooks and program.num_pipelines > 1:
            raise ModelError(
                f"{when}{name} has a post-accumulate-grad hook, which sees a part of "
                f"the sum: of 1 of {program.num_pipelines} replicas and shards. Let "
                "the optimizer's step do what it does, or a hook by `register_hook`"
            )
        if program.stages[stage].delay and has_hooks(parameter):
            raise ModelError(
                f"{when}{name} has a hook on its gradient, but stage {stage} computes "
                "with old weights: copies, of which the hook knows nothing. Let the "
                "optimizer's step do what the hook does, or take an order that ends "
                'each step before the next begins, such as schedule="1f1b"'
            )


class InputReads(NamedTuple):
    """Which of the batch's arguments a stage reads.

    Args:
        places: the positions of the leaves that it reads.
        gives_all: whether its backward computes all of an argument's gradient.
    """

    places: tuple[int, ...]
    gives_all: bool


def input_reads(
    program: Program, modules: Sequence[StageModule]
) -> tuple[InputReads, ...]:
    """Return what each stage reads of the batch; nothing refers to the modules.

    Args:
        program: says whether a stage is trained.
        modules: all stages. What they send back is what the example has shown.
    """
    found = []
    for stage, module in zip(program.stages, modules, strict=True):
        trains = any(x.requires_grad for x in module.parameters())
        takes = any(x.requires_grad for x in module.inputs)
        sent = [x for x in module.outputs if x.dtype.is_floating_point]
        gives = stage.trainable and all(x.requires_grad for x in sent)
        found.append(InputReads(module.batch_inputs, gives and (trains or takes)))
    return tuple(found)


def refuse_input_gradients(
    program: Program,
    reads: Sequence[InputReads],
    batch: NetBatches,
    names: Sequence[str],
) -> None:
    """Refuse an argument that wants a gradient (`x.grad`) which no worker has whole.

    Elsewhere the backwards of the stages that read it add to it. A net that is not
    trained gives it none, as under `torch.no_grad()`.

    Args:
        program: says where each stage is, and whether it is trained.
        reads: the result of `input_reads`.
        batch: one batch of each net.
        names: the names of the model's arguments.

    Raises:
        ModelError: names the first, and says what would be missing.
    """
    trained = {stage.net for stage in program.stages if stage.trainable}
    pairs = [*zip(program.stages, reads, strict=True)]
    for net, work in ((net, batch[net]) for net in trained & batch.keys()):
        num_replicas = len(work.everywhere) // len(work.microbatches)
        for place, leaf in enumerate(work.microbatches[0].leaves):
            if not any(x.requires_grad for x in tensors_in(leaf)):
                continue
            readers = [x for x in pairs if x[0].net == net and place in x[1].places]
            is_apart = len({stage.device for stage, _ in readers}) * num_replicas > 1
            if is_apart or not all(read.gives_all for _, read in readers):
                raise ModelError(
                    f"{names[place]} wants a gradient (requires_grad) at step "
                    f"{work.step.number}, which would not be whole: several workers "
                    "read it, or a stage that does is frozen or gets no gradient back "
                    "for what it sends. Detach it, and let the model itself compute "
                    "its gradient between two steps"
                )


def _faults(settings: TrainingConfig, schedule: Schedule) -> Iterator[str]:
    if flushes(schedule):
        yield from _faults_ahead(settings, schedule)
        return
    if settings.accumulate > 1:
        yield (
            f"accumulate is {settings.accumulate}: without flushes each batch is a "
            "step; take larger batches, and as many more microbatches"
        )
    if settings.precision == "float16":
        yield (
            'precision is "float16": whether a step overflowed is known only when '
            'others have been begun with its weights; take "bfloat16"'
        )
    if settings.clip_norm is not None:
        gates = gates_of(schedule, clips=True)
        for op in early_updates(schedule, gates):
            gate = next(gate for gate in gates if op.stage in gate)
            yield (
                f"clip_norm: {op} comes before gradients of "
                f"{describe(gate, schedule.program)}, whose norm it needs: move it "
                "behind them, or leave clip_norm out"
            )


def _faults_ahead(settings: TrainingConfig, schedule: Schedule) -> Iterator[str]:
    """Refuse a loss scale on devices without gradients, which show an overflow."""
    program = schedule.program
    trained = {stage.device for stage in program.stages if stage.trainable}
    frozen = sorted({*range(program.num_devices)} - trained)
    if settings.precision == "float16" and frozen:
        yield (
            f'precision is "float16", and device {frozen[0]} has no stage that is '
            "trained: it works for the next batch before it could know whether a step "
            'overflowed; take "bfloat16", or cut the model so that it trains some'
        )

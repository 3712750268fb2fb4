"""Reverse first-k: reduce the gradients first that the next forward needs first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Final

from hocket.core.op import Kind, Op
from hocket.core.schedule import Lane, Schedule
from hocket.errors import ShapeError
from hocket.schedules.entry import Entry, Shape


def reverse_first_k(
    shape: Shape, *, k: int | None = None, barrier: bool = False
) -> Schedule:
    """Compute the first k weight gradients last, each reduced as soon as it is there.

    For data parallelism. Each replica is one device, and its stages are the buckets of
    gradients. Reductions share one link, first in, first out. In the usual order, the
    first bucket's gradients are computed and reduced last, and the next forward, which
    begins with that bucket, waits for all reductions. Here the first bucket is reduced
    while the weight gradients of the next ones are computed. U of a bucket waits for
    that bucket's R, and the next F of a bucket for its U, and for nothing else:

        lane   ... B2 I1 I0 W0 W1 U2 U0 F0 U1 F1 F2 ...      k = 2 of 3 buckets
        link         └ R2 ────── └ R0 ─ └ R1 ──

    With several microbatches, only the last one's weight gradients are reordered. Every
    F reads the newest weights, so that the result does not depend on k.

    Bubble: 0 if reductions take no time. Memory: one microbatch's activations; those
    that the first k weight gradients read are held until the end of the backward.

    >>> shape = Shape(1, 1, stages_per_device=3, num_steps=3, num_replicas=2)
    >>> print(reverse_first_k(shape, k=2))  # doctest: +NORMALIZE_WHITESPACE
    repeats 2
    d0  0F0 1F0 2F0 2B0 2R 1I0 0I0 0W0 0R 1W0 1R |: 2U 0U 0F0@1 1U 1F0@1 2F0@1
          2B0@1 2R@1 1I0@1 0I0@1 0W0@1 0R@1 1W0@1 1R@1 2U@1 0U@1 0F0@2 1U@1
          1F0@2 2F0@2 2B0@2 2R@2 1I0@2 0I0@2 0W0@2 0R@2 1W0@2 1R@2 :| 2U@2 0U@2
          1U@2

    Source: Oh et al., "Out-Of-Order BackProp", EuroSys'22, doi 10.1145/3492321.3519563,
    "reverse first-k scheduling". Its artifact gives reductions priorities, and lets
    only the first k cross from one step into the next.

    Args:
        shape: one device per replica; its stages are the buckets.
        k: how many buckets' weight gradients come last, in forward order; half of them
            when not given.
        barrier: whether each step ends before the next begins, as
            DistributedDataParallel's do.

    Raises:
        ShapeError: several devices per replica, or k is no number of buckets.
    """
    num_buckets = shape.stages_per_device
    if shape.num_devices != 1:
        raise ShapeError(
            "reverse-first-k puts the whole model on each device, got num_devices="
            f"{shape.num_devices} per replica: use num_devices=1 and num_replicas="
            f"{shape.num_devices * shape.num_replicas}, or a pipeline such as 1f1b"
        )
    k = num_buckets // 2 if k is None else k
    if not 0 <= k <= num_buckets:
        raise ShapeError(
            f"k={k} of {num_buckets} buckets: use 0 (the usual order) to {num_buckets}"
        )
    program = replace(shape.chain(), num_steps=1)
    forwards = [Op(Kind.FORWARD, bucket, 0) for bucket in range(num_buckets)]
    backwards = tuple(_behind_first_forwards(shape, k))
    # In the order in which reductions end; those of the first k stand before their F.
    updates = [*reversed(range(k, num_buckets)), *range(k)]
    ends = [Op(Kind.UPDATE, bucket) for bucket in updates]
    if barrier or shape.num_steps == 1:
        lane = Lane(0, 0, (*forwards, *backwards, *ends))
        return Schedule(program, (lane,)).with_num_steps(shape.num_steps)
    between = tuple(
        chain(ends[: num_buckets - k], _merged(ends[num_buckets - k :], forwards))
    )
    ops = [*forwards, *backwards]
    begin = len(ops)
    for step in range(1, shape.num_steps):
        ops += [op.later(step - (op.kind is Kind.UPDATE)) for op in between]
        ops += [op.later(step) for op in backwards]
    end = len(ops)
    ops += [op.later(shape.num_steps - 1) for op in ends]
    return Schedule(
        replace(program, num_steps=shape.num_steps),
        (Lane(0, 0, tuple(ops)),),
        ((begin, end),),
        shape.num_steps - 1,
    )


def _behind_first_forwards(shape: Shape, k: int) -> Iterator[Op]:
    """Yield a step's ops from the first backward to the last reduction."""
    buckets, m = range(shape.stages_per_device), shape.num_microbatches
    is_reduced = shape.num_replicas * shape.num_shards > 1
    for microbatch in range(m - 1):
        for bucket in reversed(buckets):
            yield Op(Kind.BACKWARD, bucket, microbatch)
        for bucket in buckets:
            yield Op(Kind.FORWARD, bucket, microbatch + 1)
    last = [Op(Kind.BACKWARD, bucket, m - 1) for bucket in reversed(buckets[k:])]
    inputs = [Op(Kind.BACKWARD_INPUT, bucket, m - 1) for bucket in reversed(range(k))]
    weights = [Op(Kind.BACKWARD_WEIGHT, bucket, m - 1) for bucket in range(k)]
    for op in (*last, *inputs, *weights):
        yield op
        if is_reduced and op.kind is not Kind.BACKWARD_INPUT:
            yield Op(Kind.REDUCE, op.stage)


def _merged(updates: Iterable[Op], forwards: Iterable[Op]) -> Iterator[Op]:
    """Yield each forward behind the update of its bucket, if it has one here."""
    due = {op.stage: op for op in updates}
    for forward in forwards:
        if forward.stage in due:
            yield due[forward.stage]
        yield forward


ENTRY: Final = Entry(
    reverse_first_k,
    lambda _, __: 0.0,  # one device works all the time, if reductions take none
    lambda _, __: 1.0,  # a backward comes before the next microbatch's forward
    stages_per_device=4,
    is_data_parallel=True,
)

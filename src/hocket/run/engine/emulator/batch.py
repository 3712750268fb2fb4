"""Computes one step in the emulator: forwards, losses, backwards.

A net's forward of a microbatch runs when its output is first read.

Nets between which gradients flow are one group. The losses of a group are added up and
differentiated at once: those of one microbatch; or, where one of its losses is over the
whole batch, those of one replica, or of all replicas.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hocket.core.program import Net, Program
from hocket.run.data.batch import BatchOutput, Microbatch, joined
from hocket.run.data.loss import TOTAL, count_of, losses_of, zero_losses
from hocket.run.engine.emulator.net import EmulatedNet, leaves_of
from hocket.run.engine.programs.net_setup import connected_nets


@dataclass(slots=True)
class Step:
    """Computes the losses and gradients of one step.

    Args:
        nets: the captured nets, by name.
        facts: each net's entry in the program, by name.
        losses: the losses of the nets that have one.
        parts: the microbatches of all replicas, by net.
        num_replicas: the replicas of the program.
        seed: the run's seed.
        step: from 0.
    """

    nets: Mapping[str, EmulatedNet]
    facts: Mapping[str, Net]
    losses: Mapping[str, Callable[..., Any]]
    parts: Mapping[str, Sequence[Microbatch]]
    num_replicas: int
    seed: int
    step: int
    sums: dict[str, dict[str, float]] = field(default_factory=dict)
    _outputs: dict[tuple[str, int], Any] = field(default_factory=dict)

    def output(self, name: str, number: int) -> Any:
        """Return a net's output for one microbatch, counted over all replicas."""
        key = name, number
        if key not in self._outputs:
            net, part = self.nets[name], self.parts[name][number]
            sources = [self._read(name, [number], x) for x in net.plan.inputs]
            leaves = leaves_of(sources, part)
            self._outputs[key] = net.forward(leaves, self.seed, self.step, number)
        return self._outputs[key]

    def run_group(self, group: Sequence[str]) -> None:
        """Compute the losses and backwards of a group of nets; add up the gradients.

        Args:
            group: the names of its nets.
        """
        ends = [name for name in group if name in self.losses]
        if not ends:
            return
        for rows in self._rows(group):
            found = [x for name in ends for x in self._losses(name, rows[name])]
            total = reduce(Tensor.add, found)
            if total.requires_grad:
                total.backward()
            for key in [(name, number) for name in group for number in rows[name]]:
                self._outputs.pop(key, None)

    def _rows(self, group: Sequence[str]) -> Iterator[Mapping[str, range]]:
        """Yield microbatches by net whose losses are differentiated at once."""
        if not any(self.facts[name].batch_loss for name in group):
            for number in range(len(self.parts[group[0]])):
                yield {name: range(number, number + 1) for name in group}
            return
        over_replicas = any(self.facts[name].loss_over_replicas for name in group)
        together = self.num_replicas if over_replicas else 1
        for begin in range(0, self.num_replicas, together):
            counts = {name: self.facts[name].num_microbatches for name in group}
            yield {
                name: range(begin * count, (begin + together) * count)
                for name, count in counts.items()
            }

    def _losses(self, name: str, rows: range) -> Iterator[Tensor]:
        """Yield the weighted losses of some microbatches of one net."""
        facts = self.facts[name]
        each = facts.num_microbatches if facts.batch_loss else 1
        if facts.loss_over_replicas:
            each *= self.num_replicas
        for begin in rows[::each]:
            yield self._loss(name, range(begin, begin + each))

    def _loss(self, name: str, rows: range) -> Tensor:
        """Return the loss of some microbatches, weighted by samples or targets."""
        parts = [self.parts[name][number] for number in rows]
        output = joined([self.output(name, number) for number in rows])
        others = [self._read(name, rows, x) for x in self.nets[name].plan.loss_inputs]
        targets = joined([part.targets for part in parts])
        loss = self.losses[name]
        with self.nets[name].around_loss(rows[0]):
            named = losses_of(loss, output, targets, *others)
        total = sum(count_of(loss, part) for part in self.parts[name])
        weight = sum(count_of(loss, part) for part in parts) / (total or 1.0)
        if not weight:
            named = zero_losses(named, output)
        sums = self.sums.setdefault(name, {})
        for key, value in named.items():
            sums[key] = sums.get(key, 0.0) + value.item() * weight
        return named[TOTAL] * weight

    def _read(self, name: str, rows: Sequence[int], source: str) -> Any:
        """Return what some microbatches of a net together read of another net's output.

        Microbatches of nets nest: one of them is made of those that begin in it, or is
        a part of the last one that begins at or before it.
        """
        parts, others = self.parts[name], self.parts[source]
        own_net, net = self.facts[name], self.facts[source]
        is_whole = source in self.nets[name].plan.whole_loss_inputs
        if own_net.num_microbatches == net.num_microbatches and not is_whole:
            return joined([self.output(source, number) for number in rows])
        begins, other_begins = _begins(parts), _begins(others)
        begin, end = begins[rows[0]], begins[rows[-1] + 1]
        if is_whole:
            numbers = range(len(others))
        else:
            first = bisect_right(other_begins, begin) - 1
            numbers = range(first, bisect_left(other_begins, end))
        value = joined([self.output(source, number) for number in numbers])
        at = other_begins[numbers[0]]
        if is_whole:
            return BatchOutput(value, torch.arange(begin - at, end - at))
        if (at, other_begins[numbers[-1] + 1]) == (begin, end):
            return value
        cut = slice(begin - at, end - at)
        return pytree.tree_map_only(Tensor, lambda leaf: leaf[cut], value)


def _begins(parts: Sequence[Microbatch]) -> list[int]:
    """Return the first row of each microbatch of all replicas, and the last's end."""
    return list(accumulate((part.num_samples for part in parts), initial=0))


def gradient_groups(program: Program) -> list[list[str]]:
    """Return groups of nets between which gradients flow."""
    stages = program.stages
    flows = [(a, b) for a, b in program.flows if stages[a].trainable]
    return connected_nets(program, [x for x in flows if stages[x[1]].trainable])

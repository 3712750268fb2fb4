"""One step of the emulator: forwards when they are asked for, losses, backwards.

Nets between which gradients flow are one group. The losses of a group are added up and
differentiated at once: those of one microbatch; or, where one of its losses is over the
whole batch, those of one replica, or of all replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hocket.core.program import Net, Program
from hocket.run.data.batch import Microbatch
from hocket.run.data.join import joined
from hocket.run.data.loss import TOTAL, losses_of, sum_of
from hocket.run.data.token_mean import count_of, zero_losses
from hocket.run.engine.emulator.net import EmulatedNet, leaves_of


@dataclass(slots=True)
class Step:
    """One step's work.

    Args:
        nets: by name.
        facts: the nets of the program, by name.
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
        """A net's output for one microbatch, counted over all replicas."""
        key = name, number
        if key not in self._outputs:
            net, part = self.nets[name], self.parts[name][number]
            sources = [self.output(source, number) for source in net.plan.inputs]
            leaves = leaves_of(sources, part)
            self._outputs[key] = net.forward(leaves, self.seed, self.step, number)
        return self._outputs[key]

    def run_group(self, group: Sequence[str]) -> None:
        """Losses and backwards of the nets of one group; gradients are added up.

        Args:
            group: the names of its nets.
        """
        ends = [name for name in group if name in self.losses]
        if not ends:
            return
        for rows in self._rows(group):
            total = sum_of([x for name in ends for x in self._losses(name, rows[name])])
            if total.requires_grad:
                total.backward()
            for key in [(name, number) for name in group for number in rows[name]]:
                self._outputs.pop(key, None)

    def _rows(self, group: Sequence[str]) -> Iterator[Mapping[str, range]]:
        """The microbatches of each net whose losses are differentiated at once."""
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
        """The weighted losses of some microbatches of one net."""
        facts = self.facts[name]
        each = facts.num_microbatches if facts.batch_loss else 1
        if facts.loss_over_replicas:
            each *= self.num_replicas
        for begin in rows[::each]:
            yield self._loss(name, range(begin, begin + each))

    def _loss(self, name: str, rows: range) -> Tensor:
        """The loss of some microbatches together, weighted by samples or targets."""
        parts = [self.parts[name][number] for number in rows]
        output, *others = (
            joined([self.output(x, i) for i in self._same_rows(name, rows, x)])
            for x in (name, *self.nets[name].plan.loss_inputs)
        )
        targets = joined([part.targets for part in parts])
        loss = self.losses[name]
        named = losses_of(loss, output, targets, *others)
        total = sum(count_of(loss, part) for part in self.parts[name])
        weight = sum(count_of(loss, part) for part in parts) / (total or 1.0)
        if not weight:
            named = zero_losses(named, output)
        sums = self.sums.setdefault(name, {})
        for key, value in named.items():
            sums[key] = sums.get(key, 0.0) + value.item() * weight
        return named[TOTAL] * weight

    def _same_rows(self, name: str, rows: range, source: str) -> range:
        """The microbatches of another net that hold the same part of the batch."""
        own, other = (self.facts[x].num_microbatches for x in (name, source))
        if own == other:
            return rows
        return range(rows.start // own * other, rows.stop // own * other)


def gradient_groups(program: Program, names: Sequence[str]) -> list[list[str]]:
    """The nets between which gradients flow, in groups.

    Args:
        program: the whole.
        names: all nets, in order.
    """
    group_of = {name: [name] for name in names}
    for a, b in program.flows:
        source, target = program.stages[a], program.stages[b]
        first, second = group_of[source.net], group_of[target.net]
        if source.trainable and target.trainable and first is not second:
            first += second
            group_of.update(dict.fromkeys(second, first))
    groups = {id(group): group for group in group_of.values()}
    return [sorted(group, key=list(names).index) for group in groups.values()]

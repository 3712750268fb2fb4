"""The nets of a program, captured and cut for the workers that run it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hocket.core.program import Program
from hocket.errors import ConfigError, ModelError
from hocket.model.capture.capture import Captured, capture
from hocket.model.stages.cut import boundaries_from_names
from hocket.model.stages.outline import Outline
from hocket.model.stages.stage import StageModule
from hocket.model.trace.example import Example
from hocket.model.trace.state import saved_tensors
from hocket.run.data.batch import BatchOutput, digest, form_of, split_batch, to_capture
from hocket.run.data.loss import TokenMean
from hocket.run.engine.gather import holders_of
from hocket.run.engine.plan import short_hash
from hocket.run.engine.programs.by_net import (
    NetArguments,
    net_inputs,
    nets_in_order,
)
from hocket.run.engine.programs.loss_state import with_loss
from hocket.run.engine.programs.net_setup import (
    NetSetup,
    cut_net,
    example_output,
    nets_of_batch,
    stages_of,
    whole_batch_sources,
)
from hocket.run.engine.programs.part_sizes import part_sizes
from hocket.run.engine.same_everywhere import losses_of_random_outputs
from hocket.run.nets.followed import FollowedNet
from hocket.run.stage.net_output import NetOutput, example_of
from hocket.run.weights.momentum import FollowerUpdate
from hocket.run.weights.settings import (
    TrainingConfig,
)
from hocket.run.weights.update_text import update_text


class ProgramNets:
    """All nets of a program.

    Args:
        program: the whole.
        given: what the nets are made from; copies take what the first is made from.
        example: a batch.

    Attributes:
        setups: each net, as workers are set up from it.
        settings: how to train; nets differ in their optimizers alone.
        digests: what all workers must have alike.
        losses: each net's losses of random outputs, which they must have alike, too.
        outlines: the outline of each model, once for all copies.
        sizes_of: the sizes of a batch's microbatches, by model.
        holders: the rank that holds each name of a state, by model.
        followed: what lets the stages follow changes of the users' models.
        forms: what each model's batches must be like, once for all copies.
        cannot_follow: why they cannot; empty if they can.

    Raises:
        ConfigError: no net is trained; or one with copies has a `TokenMean`.
        ShapeError: there are other numbers of stages than the program has.
        ModelError: a model cannot be cut so; or a flow leads to where no output of
            another net can go.
        DataError: the example is no batch, or smaller than the microbatches.
    """

    def __init__(self, program: Program, given: NetArguments, example: Any) -> None:
        self._program = program
        for name, loss in given.losses.items():
            if isinstance(loss, TokenMean) and given.merged.shares[name][1:]:
                raise ConfigError(
                    f"net {name} has copies, and TokenMean does not count the targets "
                    "of copies together: take replicas (num_replicas), or a loss that "
                    "is a mean over samples"
                )
        if not given.settings:
            raise ConfigError("no net is trained: give optimizers, or use emulate")
        self.settings = next(iter(given.settings.values()))
        self.outlines = {name: Outline.of(given.models[name]) for name in given.names}
        self._outputs: dict[str, NetOutput] = {}
        # Of each net whose outputs are read, and how many samples it is of.
        self._examples: dict[str, tuple[Any, int]] = {}
        self.sizes_of = part_sizes(given.merged.program)
        self.digests: dict[str, str] = {"settings": short_hash(self.settings.text)}
        self.losses: dict[str, dict[str, float]] = {}
        self.setups: list[NetSetup] = []
        self.followed: list[FollowedNet] = []
        self.forms: dict[str, Example | None] = {}
        self.cannot_follow = (
            "nets of this program have copies, each with modules of its own: change it "
            "before the run is made"
            if len(given.names) < len(program.nets)
            else ""
        )
        for name in nets_in_order(program, [net.name for net in program.nets]):
            first = nets_of_batch(program, name)[0]
            batch = example[first] if isinstance(example, Mapping) else example
            model = given.models[first]
            if name != first:
                model = copy.deepcopy(model)
            self.setups.append(self._set_up(given, name, first, model, batch))
        self.holders = {
            net.name: holders_of(
                program,
                {
                    number: tuple(saved_tensors(module))
                    for number, module in zip(
                        stages_of(program, net.name), net.modules, strict=True
                    )
                },
            )
            for net in self.setups
        }

    def _add_digests(
        self,
        captured: Captured,
        name: str,
        settings: TrainingConfig | None,
        follows: FollowerUpdate | None,
    ) -> None:
        tensors = dict(captured.state.tensors)
        self.digests[f"model of net {name}"] = captured.digest
        self.digests[f"weights of net {name}"] = f"{digest(tensors):08x}"
        if settings is not None:
            trained = {key: x for key, x in tensors.items() if x.requires_grad}
            text = update_text(settings, trained)
            self.digests[f"updates of net {name}"] = short_hash(text)
        if follows is not None:
            self.digests[f"updates of net {name}"] = short_hash(follows.text)

    def forget_modules(self) -> None:
        """Free the stages of other workers."""
        self.setups.clear()
        self._examples.clear()

    def _example(self, net: str, num_samples: int) -> Any:
        """Return an example of a net's output for so many samples."""
        return example_of(*self._examples[net], num_samples)

    def _set_up(
        self,
        given: NetArguments,
        name: str,
        first: str,
        model: nn.Module,
        example: Any,
    ) -> NetSetup:
        program = self._program
        cut_at = tuple(given.cuts.get(first, ()))
        loss, settings = given.losses.get(first), given.settings.get(first)
        update = given.optimizers.get(first)
        follows = update if isinstance(update, FollowerUpdate) else None
        inputs, loss_inputs = net_inputs(program, name, has_loss=loss is not None)
        counts = {net.name: net.num_microbatches for net in program.nets}
        num_parts = sum(counts[net] for net in nets_of_batch(program, name))
        sizes_of = self.sizes_of[first]
        num_parts *= program.num_pipelines
        part, *_ = split_batch(example, num_parts, sizes_of=sizes_of)
        leaves = [
            x
            for net in inputs
            for x in pytree.tree_leaves(self._example(net, part.num_samples))
        ]
        part, args, kwargs = to_capture(model, example, num_parts, sizes_of, leaves)
        read = [self._example(net, part.num_samples) for net in loss_inputs]
        captured = capture(model, args, kwargs, cut=cut_at)
        if loss is not None:
            captured = with_loss(captured, loss, part.targets, read)
        if name == first:
            self.forms[name] = form_of(example)
            self._add_digests(captured, name, settings, follows)
        numbers = stages_of(program, name)
        modules = cut_net(program, name, captured, cut_at)
        _check_readers(name, modules, len(leaves))
        trains = any(program.stages[number].trainable for number in numbers)
        if name == first:
            boundaries = boundaries_from_names(captured, cut_at)
            flows = [(source, x.index) for x in modules for source in x.received]
            self.followed.append(
                FollowedNet(
                    captured,
                    boundaries,
                    flows,
                    numbers,
                    trains=trains or model.training,
                )
            )
        last = numbers[-1]
        nets = {program.stages[b].net for a, b in program.flows if a == last}
        if nets or program.net_of(last).batch_loss:
            output = example_output(captured, training=trains or model.training)
            self._examples[name] = output, part.num_samples
            self._outputs[name] = NetOutput.of(output, name)
        others: dict[int, tuple[NetOutput, ...]] = {}
        if inputs:
            others[numbers[0]] = tuple(self._outputs[net] for net in inputs)
        if loss_inputs:
            whole = whole_batch_sources(program, name)
            others[last] = tuple(
                replace(self._outputs[net], is_whole=net in whole)
                for net in loss_inputs
            )
        if loss is not None and name == first:
            read = list(map(_as_read, read, others.get(last, ())))
            cpu = torch.device("cpu")
            found = losses_of_random_outputs(loss, captured, part.targets, read, cpu)
            self.losses[f"loss of net {name}"] = found
        return NetSetup(
            name,
            modules,
            captured.state.parameter_names,
            loss,
            settings,
            follows,
            training=trains or model.training,
            seed_name=first,
            others=others,
            output=self._outputs.get(name),
        )


def _as_read(output: Any, form: NetOutput) -> Any:
    """Return what a loss gets of another net's output."""
    if not form.is_whole:
        return output
    rows = torch.arange(len(pytree.tree_leaves(output)[0]))
    return BatchOutput(output, rows)


def _check_readers(name: str, modules: Sequence[StageModule], num_leaves: int) -> None:
    """See that only the first stage reads outputs of other nets as inputs.

    Raises:
        ModelError: a later one does, to which they do not flow.
    """
    for module in modules[1:]:
        if any(place < num_leaves for place in module.batch_inputs):
            raise ModelError(
                f"stage {module.index} of net {name} reads an output of another net, "
                "which flows to the net's first stage only: cut the model behind it"
            )

"""Follows what a training loop changes in its model between steps.

    net.block.rate = 0.3      the block runs as it is from now on
    net.drop.eval()           the same; its mode is what the user has set
    net.head = Other()        refused, if either has weights
    net.block.requires_grad_(False)       gets no gradient from now on
    a batch of longer texts   the model is captured again, for any length
    a batch of another task   the same, for this one

A graph has fixed what the model was when it was captured. Before each step that is
compared (`hocket.model.guards`). What has changed is read by modules; each of them runs
as it is from then on, in the stage that has all of it. A module that is cut apart is
captured again, with numbers that have changed as tensors. Nothing is compared with
other workers here: the digest of all changes travels in the step's header.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Final

import torch
from torch import Tensor, nn

from hocket.errors import HocketError, ModelError
from hocket.model.capture.captured import Captured
from hocket.model.capture.sequential import prefixes
from hocket.model.guards.guards import Guards, ModelChange, Noted, note_changes
from hocket.model.guards.reached import used_by_forward
from hocket.model.stages.cut import AsIsError, check_as_is, cut
from hocket.model.stages.outline import on_tensors
from hocket.model.stages.recut import Placed, calls_alike, placed_again
from hocket.model.stages.reroute import runs_modules
from hocket.model.stages.routes import Flows
from hocket.model.trace.example import PLAIN, Example, Form, is_number
from hocket.model.trace.state import named_tensors
from hocket.run.nets.forms import KnownForms
from hocket.run.nets.live_model import LiveModel
from hocket.run.stage.compiled.function import is_compiled
from hocket.run.stage.runner import StageRunner

CACHED: Final = "outputs of frozen layers are cached (`cache`)"


class FollowedNet:
    """A net's model, as its stages on this worker follow it.

    Args:
        captured: the captured model. Nothing of it is kept but its structure; the
            model is referred to weakly.
        boundaries: the layers at which stages 1, 2, ... begin.
        flows: see `hocket.model.stages.cut.cut`.
        numbers: the net's stages in the program.
        trains: whether its modules have the modes that the user sets.

    Attributes:
        digest: a digest of all changes so far; equal on all workers.
        stages: the numbers of its stages in the program.
    """

    def __init__(
        self,
        captured: Captured,
        boundaries: Sequence[int],
        flows: Flows,
        numbers: Sequence[int],
        *,
        trains: bool = True,
    ) -> None:
        self.digest = 0
        self._trains = trains
        self._noted: Noted = {}  # and not followed yet
        self._live = LiveModel(captured.model)
        self._guards = Guards(captured.model)
        self._boundaries = boundaries
        self._flows = flows
        self.stages = numbers
        self._numbers: set[str] = set()  # attributes that stages read as tensors
        self._captured = on_tensors(captured, {}, live=nn.Module())
        self._first = self._placed  # others are cut where it was
        self._forms = KnownForms(self._first)

    def cut_at(self, boundaries: Sequence[int], flows: Flows) -> None:
        """Note another cut, which has followed all changes so far.

        It has put weights and buffers of other workers into the user's modules.
        """
        self._guards.changes()
        self._boundaries, self._flows = boundaries, flows
        self._first = self._placed
        self._forms = KnownForms(self._first)
        self.stages = range(self.stages[0], self.stages[0] + len(boundaries) + 1)

    def forget(self, runners: Mapping[int, StageRunner]) -> None:
        """Note what forwards have changed, as modules that run as they are may do.

        They may begin to do so at any step: with a codebook that is replaced now and
        then, or statistics that are kept from some step on.

        Args:
            runners: this worker's stages, by number.
        """
        self._take_out_versions(runners)
        self._guards.forget()

    def evaluating(self) -> AbstractContextManager[None]:
        """Put the user's own model into evaluation mode, for losses that read it."""
        return self._live.evaluating()

    def runs_with(self, form: Form) -> bool:
        """Whether the stages are right for a batch of this form."""
        return self._forms.covers(self._captured, form)

    def follow_form(self, form: Form, step: int) -> bool:
        """Let the model take batches of another form; no step is under way.

        The dimensions that differ from the example's are open from then on, and floats
        are tensors, where its code lets them; else it is captured for this form alone.
        Of an `nn.Sequential`, modules run as they are: it is only tried.

        Args:
            form: the next batch's, for which `runs_with` is false.
            step: the next step.

        Returns:
            Whether the stages are to be cut again.

        Raises:
            ModelError: the model cannot take them; says why. Nothing has changed.
        """
        with self._live.training():
            found = self._forms.follow(
                self._placed,
                form,
                step,
                partial(self._capture, self._numbers),
                partial(self._captured_with, self._numbers),
                lambda kept: check_as_is(*kept, self._flows),
            )
        if found is not None:
            self._captured, self._boundaries = found
        return found is not None

    @property
    def _placed(self) -> Placed:
        return Placed(self._captured, self._boundaries)

    def check_samples(self, sizes: Collection[int], step: int) -> None:
        """Refuse numbers of samples that the stages are not right for in training.

        Raises:
            ModelError: a microbatch has such a number. Nothing has changed.
        """
        right_for = self._captured.right_for[self._trains]
        for size in sizes:
            if fault := right_for.fault_of_samples(size):
                where = f"at step {step} the model cannot take a microbatch of {size}"
                raise ModelError(f"{where}: {fault}")

    def note(self, cannot: str, step: int, runners: Mapping[int, StageRunner]) -> None:
        """Note what the loop has changed since this was last called.

        Args:
            cannot: why nothing can be followed now; empty if it can.
            step: the next step.
            runners: this worker's stages, by number.

        Raises:
            ModelError: something has changed, and cannot be followed now.
        """
        self._take_out_versions(runners)
        changes = self._guards.changes()
        trace = self._captured.training.trace
        captured = {span.path for span in trace.spans.values()} if cannot else set()
        for change in changes if cannot else ():
            # What is outside is read when a module runs, if that runs as it is.
            is_read_live = change.is_outside and not self._readers(change) & captured
            # Cached layers are evaluated.
            if not (is_read_live or (change.is_switch and cannot is CACHED)):
                raise _refused(change, step, cannot)
        note_changes(self._noted, changes)

    def follow(
        self,
        step: int,
        runners: Mapping[int, StageRunner],
        *,
        evaluates: bool,
        may_freeze: bool,
    ) -> None:
        """Let the stages that run here follow what was noted.

        Args:
            step: the next step.
            runners: this worker's stages, by number.
            evaluates: whether an evaluation is next, for which the modes that the user
                has set have no meaning, nor has what is trained.
            may_freeze: whether the net may be cut again in another way.

        Raises:
            ModelError: a change cannot be followed; names it, both values and the step.
        """
        changes = [x for x in self._noted.values() if not (evaluates and x.is_switch)]
        if not changes:
            return
        known = self._captured.as_is
        before, split = set(known), list[ModelChange]()
        for change in changes:
            del self._noted[change.name, change.kind]
            if change.is_switch and not self._trains:
                self._refuse_training(change, step)
                continue
            if not change.is_outside:  # which may well differ by rank
                self.digest = zlib.crc32(str(change).encode(), self.digest)
            if not self._runs_as_is(change, step, runners, may_freeze=may_freeze):
                split.append(change)
        if split:
            self._capture_again(split, step)
        traces = self._captured.training.trace, self._captured.evaluation.trace
        new = known.keys() - before
        is_new = any(not one.runs_as_is(path) for one in traces for path in new)
        is_new |= any(is_compiled(x.module) for x in self._own(runners).values())
        if split or is_new or any(change.kind == "trained" for change in changes):
            # A forward with hooks computes from its weights what it did without.
            is_known = all(change.name.endswith("_hooks") for change in changes)
            self.cut_again(runners, is_known=is_known)

    def _runs_as_is(
        self,
        change: ModelChange,
        step: int,
        runners: Mapping[int, StageRunner],
        *,
        may_freeze: bool,
    ) -> bool:
        """Let what reads a change run as it is; return whether stages can do that."""
        if change.kind == "trained":
            self._check_trained(change, step, may_freeze=may_freeze)
            return True
        if change.kind:
            self._replace(change, step, runners)
        if change.kind in ("parameter", "buffer") or self._set_number(change, runners):
            return True
        captured, model = self._captured, self._live.model
        owners = self._readers(change)
        if owners and owners <= captured.as_is.keys():
            return True
        wanted = captured.as_is | dict.fromkeys(owners, str(change))
        try:
            if model is not None:
                check_as_is(
                    replace(captured, model=model, as_is=wanted),
                    self._boundaries,
                    self._flows,
                )
        except AsIsError as error:
            if may_freeze or change.name.endswith("_hooks"):
                raise _refused(change, step, str(error)) from error
            return False
        captured.as_is.update(wanted)
        return True

    def _readers(self, change: ModelChange) -> set[str]:
        """Return the modules whose calls read a change.

        What is in a list of modules, or in a module of which only other methods are
        called, is read by the innermost call around it.
        """
        return {_innermost(path, self._called) for path in change.owners}

    @property
    def _called(self) -> set[str]:
        """The modules that are called, besides the model."""
        trace = self._captured.training.trace
        keys = chain(trace.spans, *trace.modules.values())
        return {key.partition("@")[0] for key in keys} - {""}

    def _check_trained(
        self, change: ModelChange, step: int, *, may_freeze: bool
    ) -> None:
        """Refuse what the loop may not freeze.

        Raises:
            ModelError: layers freeze by a policy; or nothing would be trained.
        """
        model = self._live.model
        if may_freeze:
            raise _refused(change, step, "layers freeze by the policy of `freeze=`")
        if model is not None and not any(x.requires_grad for x in model.parameters()):
            raise _refused(change, step, "nothing of the model would be trained")

    def _refuse_training(self, change: ModelChange, step: int) -> None:
        """Refuse to train a part of what is evaluated, if its forward reads its mode.

        Raises:
            ModelError: the change puts such a module into training mode.
        """
        model = self._live.model
        if model is None or not change.is_mode or change.now == "False":
            return
        part = dict(model.named_modules()).get(change.name.rpartition(".")[0])
        if part is not None and "training" in used_by_forward(type(part)):
            why = (
                'this teacher runs in evaluation mode. Give Teacher(..., mode="train"),'
                " and put the modules that are not to train yet into evaluation mode"
            )
            raise _refused(change, step, why)

    def _set_number(
        self, change: ModelChange, runners: Mapping[int, StageRunner]
    ) -> bool:
        """Give the stages a number that they read as a tensor; whether it is one."""
        value = self._live.number(change.name)
        if change.name not in self._numbers or value is None:
            return False
        for runner in self._own(runners).values():
            named = dict(runner.module.named_buffers())
            if change.name in named:
                named[change.name].fill_(value)
        return True

    def _capture_again(self, changes: Sequence[ModelChange], step: int) -> None:
        """Capture the model again, without values, as it is now.

        Numbers that have changed become tensors, where that captures the same calls:
        the next change of one costs no capture.
        """
        as_is, number = self._captured.as_is, self._live.number
        named = {x.name for x in changes if x.name.rpartition(".")[0] not in as_is}
        names = {x for x in named | self._numbers if number(x) is not None}
        example = self._captured.example
        for numbers, given in ((names, example), (set[str](), self._plain(example))):
            try:
                found = self._captured_with(numbers, given)
            except (HocketError, TypeError, ValueError, RuntimeError) as error:
                why = error
            else:
                self._captured, self._boundaries = found
                self._numbers = numbers
                self._forms = KnownForms(found)
                return
        raise _refused(changes[0], step, str(why)) from why

    def _plain(self, example: Example) -> Example:
        """Return an example with some float where it has a tensor for one."""
        first = self._first.captured.example.leaves
        pairs = zip(example.leaves, first, strict=True)
        leaves = [0.5 if is_number(x) and isinstance(a, PLAIN) else x for x, a in pairs]
        return replace(example, leaves=tuple(leaves))

    def _captured_with(self, numbers: Collection[str], example: Example) -> Placed:
        """Return the captured model, some numbers as tensors.

        With values in their place it must make the same calls.

        Raises:
            ModelError: its stages cannot be what they are; see `placed_again`.
        """
        old = self._captured
        found = self._capture(numbers, example)
        plain = self._plain(example)
        if numbers or plain.form.values != example.form.values:
            # Of the others the code is given no number: `calls_alike`.
            owners = set(chain(*map(prefixes, numbers)))
            if {x for x in self._guards.asking if x in owners or x not in self._called}:
                raise ModelError("its code may ask whether a number is a tensor")
            at = {x: self._live.number(x) for x in numbers}
            if not calls_alike(found, self._capture((), plain), but_numbers=at):
                raise ModelError("with a tensor for a number it makes other calls")
        found, boundaries = placed_again(found, self._first, self._flows)
        old.as_is.update(found.as_is)
        return Placed(replace(found, as_is=old.as_is), boundaries)

    def _capture(self, numbers: Collection[str], example: Example) -> Captured:
        return self._live.captured(numbers, example, self._captured.trained)

    def _replace(
        self, change: ModelChange, step: int, runners: Mapping[int, StageRunner]
    ) -> None:
        """Take a buffer in place of another; refuse what an optimizer does not know."""
        path, _, name = change.name.rpartition(".")
        if change.kind == "type":
            if self._boundaries or any(x.versions for x in runners.values()):
                why = (
                    "messages, old weights and other workers' checkpoints have the "
                    "type of before: make a new pipeline"
                )
                raise _refused(change, step, why)
            return
        model, below = self._live.model, self._captured.state.below(change.name)
        modules = {} if model is None else dict(model.named_modules())
        has_weights = any(
            True for x in (modules.get(change.name),) if x for _ in x.parameters()
        )
        if change.kind == "module" and not (has_weights or below):
            return
        held = modules[path]._buffers.get(name) if path in modules else None
        known = self._captured.state.tensors.get(change.name)
        is_alike = (
            change.kind == "buffer"
            and held is not None
            and known is not None
            and (held.shape, held.dtype) == (known.shape, known.dtype)
        )
        if not is_alike:
            raise _refused(
                change,
                step,
                "the pipeline's optimizer and checkpoints are made for what was there: "
                "change its values in place (`with torch.no_grad(): old.copy_(new)`), "
                "or make a new pipeline",
            )
        for runner in self._own(runners).values():
            parts = dict(runner.module.named_modules())
            if path in parts and name in parts[path]._buffers:
                parts[path]._buffers[name] = held

    def _take_out_versions(self, runners: Mapping[int, StageRunner]) -> None:
        """Put the user's parameters back, where the user's modules hold old weights."""
        for runner in self._own(runners).values():
            if runner.versions is not None and runs_modules(runner.module):
                runner.versions.take_out()

    def _own(self, runners: Mapping[int, StageRunner]) -> dict[int, StageRunner]:
        """Return the net's stages among this worker's, by their number in the net."""
        return {i: runners[x] for i, x in enumerate(self.stages) if x in runners}

    def cut_again(
        self, runners: Mapping[int, StageRunner], *, is_known: bool = False
    ) -> None:
        """Cut this worker's stages again, of the very same weights.

        Args:
            runners: this worker's stages, by number.
            is_known: whether it is known that they may compute with old weights.
        """
        own = self._own(runners)
        first_name = self._captured.state.first_name
        tensors: dict[str, Tensor] = {}
        for runner in own.values():
            for name in self._numbers:
                value = self._live.number(name)
                # On the host, as a float is: from there operators round it as one.
                tensors[name] = torch.tensor(value, dtype=torch.float64)
            held = named_tensors(runner.module).items()
            tensors |= {first_name[x]: t for x, t in held if x not in self._numbers}
        captured = on_tensors(self._captured, tensors, live=self._live.model)
        captured = replace(captured, trained=frozenset(captured.state.trained))
        stages = cut(captured, self._boundaries, self._flows, own.keys())
        for stage in stages:
            own[stage.index].adopt(stage, is_checked=is_known)


def _innermost(path: str, called: Collection[str]) -> str:
    """Return the path itself, or that of the innermost called module around it."""
    while path and path not in called:
        path = path.rpartition(".")[0]
    return path


def _refused(change: ModelChange, step: int, why: str) -> ModelError:
    return ModelError(f"before step {step}, {change}, which cannot be followed: {why}")

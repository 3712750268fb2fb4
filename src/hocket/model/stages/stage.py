"""A stage of a cut model: a module that computes one contiguous part of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils._pytree import tree_map_only

from hocket.errors import ModelError
from hocket.model.stages.emit import Code
from hocket.model.stages.layer_seeds import LayerSeeds
from hocket.model.stages.parameter_paths import Home
from hocket.model.trace.local import is_sharded, landed
from hocket.model.trace.per_sample import tensors_in
from hocket.model.trace.sizes import OpenSizes
from hocket.model.trace.value import SentTensor

KEPT_ELSEWHERE: Final = (
    "If a module reads what another one has kept (in an attribute, a list, a dict, a "
    "hook): the other may run elsewhere. Return it there, and give it as an argument"
)
_NUM_KEPT: Final = 8  # sizes of batches whose constants are kept


class StageModule(nn.Module):
    """One stage. Its parameters are the uncut model's own, under their own names.

    `stage(*inputs, *batch)` takes the values from other stages, in the order of
    `inputs`, then the batch's tensors at the positions `batch_inputs`. It returns a
    tuple in the order of `outputs`; the last stage returns what the model returns.

    A value enters a stage once, from one other stage; it may be sent to several. The
    gradient of an output is the sum of those that come back from all of these.

    Made by `hocket.model.stages.cut.cut`.

    Args:
        index: which stage of the model, from 0.
        num_stages: how many there are.
        batch_inputs: which leaves of the flattened batch `(args, kwargs)` it reads.
        received: the values from each stage that it receives from, by its number.
        sent: the values for each stage that it sends to, by its number.
        outputs: all values that it sends, each once.
        random_layers: the layers of the uncut model that draw random numbers in
            training.
        right_for: what numbers of samples that is in each mode (`True` for training).
        size_at: which argument has the number of samples, and in which dimension.
        lengths_at: the same for the other sizes that constants are made of.
        rebuild: puts the outputs into the model's own structure, by mode (`True` for
            training), where the model returns one in that mode.
        fixed_buffers: the first names of the model's buffers that training does not
            change, also of those in other stages. It may change all others, also those
            that a forward sets where none was.
        runs_backward: whether its forward in training runs a backward of its own, as
            forces do, which are gradients of an energy.

    Attributes:
        inputs: all values that it receives: those of the first stage in `received`,
            then those of the second, and so on.
        layer_seeds: seeds the generator before each of `random_layers`.
    """

    def __init__(
        self,
        *,
        index: int,
        num_stages: int,
        batch_inputs: tuple[int, ...],
        received: Mapping[int, tuple[SentTensor, ...]],
        sent: Mapping[int, tuple[SentTensor, ...]],
        outputs: tuple[SentTensor, ...],
        random_layers: tuple[int, ...],
        right_for: Mapping[bool, OpenSizes],
        size_at: tuple[int, int] | None,
        lengths_at: tuple[tuple[int, int], ...],
        rebuild: Mapping[bool, Callable[[Any], Any]],
        fixed_buffers: frozenset[str],
        runs_backward: bool,
    ) -> None:
        super().__init__()
        self.index = index
        self.num_stages = num_stages
        self.batch_inputs = batch_inputs
        self.received = received
        self.sent = sent
        self.inputs = tuple(x for values in received.values() for x in values)
        self.outputs = outputs
        self.random_layers = random_layers
        self.layer_seeds = LayerSeeds()
        self._right_for = right_for
        self.size_at = size_at
        self.lengths_at = lengths_at
        self.fixed_buffers = fixed_buffers
        self.runs_backward = runs_backward
        self._rebuild = rebuild
        # The whole model, where it runs as it is: the stage has its children. As the
        # modes, in a tuple, for nn.Module registers what is assigned by itself.
        self.whole: tuple[nn.Module, ...] = ()
        # The mode of each module in training, while the stage evaluates.
        self._modes: tuple[tuple[nn.Module, bool], ...] = ()
        self._mode_runs: dict[bool, _Run] = {}
        self._is_parallel = False  # whether some of its parameters are DTensors

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move the stage to a device; with DTensors, which torch would replace, not."""
        return self if self._is_parallel else super().to(*args, **kwargs)

    def set_code(self, code: Mapping[bool, Code], homes: Mapping[str, Home]) -> None:
        """Give the stage its work, once its parameters are in place.

        Args:
            code: the code of each mode, `True` for training.
            homes: each parameter's and buffer's home, by first name.
        """
        self._is_parallel = any(map(is_sharded, self.parameters()))
        for mode, one in code.items():
            buffers = one.constants.buffers if one.constants else ()
            self._mode_runs[mode] = _Run(
                one,
                [homes[name] for name in one.state],
                [homes[name] for name in buffers],
                self.size_at,
                self.lengths_at,
            )

    @property
    def is_last(self) -> bool:
        """Whether it is the model's last stage, whose output goes to a loss."""
        return self.index == self.num_stages - 1

    @property
    def training_code(self) -> Code:
        """The code that `forward` runs in training."""
        return self.code_in(training=True)

    def code_in(self, *, training: bool) -> Code:
        """Return the code that `forward` runs in a mode."""
        return self._mode_runs[training].code

    def set_code_in(self, code: Code, *, training: bool) -> None:
        """Run other code in a mode, on the very same state."""
        run = self._mode_runs[training]
        self._mode_runs[training] = replace(run, code=code)

    def set_training_code(self, code: Code) -> None:
        """Run other code in training, on the very same state."""
        self.set_code_in(code, training=True)

    def arguments_in(
        self, values: Sequence[Any], device: torch.device, *, training: bool
    ) -> tuple[Any, ...]:
        """Return the state and constants that the code in a mode takes.

        Args:
            values: the arguments of `forward`; of tensors, only the shapes matter.
            device: the device of the constants.
            training: the mode.
        """
        run = self._mode_runs[training]
        state = [home[name] for home, name in run.state]
        if run.code.constants is None:
            return tuple(state)
        return (*state, *run.constants(device, values))

    def with_training_code(self, code: Code) -> Self:
        """Return a stage in training that runs other code, on the same state."""
        other = copy(self)
        other._mode_runs = {True: replace(self._mode_runs[True], code=code)}
        other.training = True
        return other

    def forward(self, *values: Tensor) -> Any:
        """Compute the stage for one microbatch.

        Raises:
            ModelError: a number of samples that the captured model does not run with;
                or a module misses something.
        """
        self._check_size(values)
        try:
            out = self._mode_runs[self.training](values)
            if self._is_parallel:
                out = tree_map_only(Tensor, landed, out)
            return self.rebuilt(out)
        except (AttributeError, KeyError) as error:
            raise ModelError(
                f"stage {self.index} failed with {type(error).__name__}: {error}. "
                f"{KEPT_ELSEWHERE}"
            ) from error

    def rebuilt(self, out: Any) -> Any:
        """Return the code's outputs in the model's own structure in this mode."""
        rebuild = self._rebuild.get(self.training)
        return out if rebuild is None else rebuild(out)

    @property
    def is_fixed(self) -> bool:
        """Whether it runs with the example's number of samples only."""
        return self._right_for[True].only > 0

    def train(self, mode: bool = True) -> Self:
        """Set train or eval mode; no effect if unchanged.

        In training, modules that run as they are have the modes that the user set.
        """
        if mode is self.training:
            return self
        modes = self._modes
        if not mode:
            parts = (*self.modules(), *self.whole)
            self._modes = tuple((part, part.training) for part in parts)
        super().train(mode)
        for part in self.whole:
            part.train(mode)
        for part, was in modes if mode else ():
            part.training = was
        return self

    def adopt(self, other: Self) -> None:
        """Become another stage, of the same values; the mode stays."""
        training = self.training
        vars(self).update(vars(other))
        self.training = training

    def extra_repr(self) -> str:
        """Shown by `print(stage)`."""
        place = f"{self.index} of {self.num_stages}"
        return f"{place}, receives {len(self.inputs)}, sends {len(self.outputs)}"

    def _check_size(self, values: tuple[Tensor, ...]) -> None:
        if self.size_at is None:
            return
        size = _num_samples(values, self.size_at)
        if fault := self._right_for[self.training].fault_of_samples(size):
            raise ModelError(
                f"stage {self.index} got num_samples={size}, which the model cannot "
                f"take: {fault}"
            )


def _num_samples(values: Sequence[Any], size_at: tuple[int, int]) -> int:
    argument, dim = size_at
    value = values[argument]
    return value.shape[dim] if isinstance(value, Tensor) else len(value)


@dataclass(slots=True)
class _Run:
    """One mode of a stage, with its state and cached constants.

    Args:
        code: the code to call.
        state: the homes of its parameters and buffers.
        buffers: the homes of the buffers that its constants depend on.
        size_at: which value has the number of samples, and in which dimension.
        lengths_at: the same for the other sizes that constants are made of.
        kept: constants, by all that they depend on.
    """

    code: Code
    state: list[Home]
    buffers: list[Home]
    size_at: tuple[int, int] | None
    lengths_at: tuple[tuple[int, int], ...]
    kept: dict[tuple[Any, ...], tuple[Any, ...]] = field(default_factory=dict)

    def __call__(self, values: tuple[Tensor, ...]) -> Any:
        code = self.code
        first = values[0]
        is_tensor = isinstance(first, Tensor)
        device = first.device if is_tensor else tensors_in(values)[0].device
        # Read where it is kept, for `torch.func.functional_call` puts others there.
        state = [home[name] for home, name in self.state]
        if code.constants is None:
            return code.function(code.objects, device, *state, *values)
        constants = self.constants(device, values)
        return code.function(code.objects, device, *state, *constants, *values)

    def constants(self, device: torch.device, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return the constants for these values, cached by size, device and buffers."""
        num_samples = 0
        if self.size_at is not None:
            num_samples = _num_samples(values, self.size_at)
        sizes = (num_samples, *(values[i].shape[dim] for i, dim in self.lengths_at))
        buffers = [home[name] for home, name in self.buffers]
        key = (device, sizes, *((id(x), x._version) for x in buffers))
        found = self.kept.get(key)
        return self._made(key, buffers) if found is None else found

    def _made(self, key: tuple[Any, ...], buffers: list[Tensor]) -> tuple[Any, ...]:
        constants = self.code.constants
        assert constants is not None
        device, sizes, *_ = key
        # Made in evaluation, they may serve training: no inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            made = constants.function(self.code.objects, device, *sizes, *buffers)
        if any(map(is_fake, made)):  # while a graph is traced
            return made
        if len(self.kept) == _NUM_KEPT:
            del self.kept[next(iter(self.kept))]
        self.kept[key] = made
        return made

"""Units of sharded weights: what is gathered, released and reduced together."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor, nn

from hocket.errors import ModelError
from hocket.model.trace.state import gradient_type
from hocket.run.weights.masters import has_master

if TYPE_CHECKING:  # importing them takes a second
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

_NUMBER: Final = re.compile(r"\d+")


class _Unit(nn.Module):
    """Holds the weights that are gathered and reduced together; never called."""

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        super().__init__()
        for i, weight in enumerate(weights):
            self.register_parameter(str(i), weight)

    def now(self) -> list[nn.Parameter]:
        """Return its parameters as they are now: whole, or shards (DTensors)."""
        return [cast(nn.Parameter, x) for x in self._parameters.values()]


class UnitRoot(nn.Module):
    """Holds all units. FSDP makes what they share when it is first called."""

    def __init__(self, units: Sequence[_Unit]) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)

    def forward(self) -> None:
        """Do nothing."""


class GatheredUnit:
    """The weights of one unit, and how many stages have them whole.

    Args:
        weights: the model's parameters.
        mesh: the workers that hold them together.
        masters: whether the shards of those in bfloat16 are float32 masters.
    """

    def __init__(
        self, weights: Sequence[nn.Parameter], mesh: DeviceMesh, *, masters: bool
    ) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.weights = tuple(weights)
        # The loop may freeze some later, and each reduction has the same parts.
        self.trained = tuple(x for x in weights if x.requires_grad)
        self._has_masters = masters and has_master(weights[0])
        policy, kept = MixedPrecisionPolicy(), weights
        if self._has_masters:
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            kept = [nn.Parameter(x.detach().float()) for x in weights]
        self.module = _Unit(kept)
        # False: what is whole stays so until it is resharded.
        made = fully_shard(
            self.module, mesh=mesh, reshard_after_forward=False, mp_policy=policy
        )
        made.set_reshard_after_backward(False)
        # The sum, for losses have their shares; of single precision, too, where FSDP
        # would multiply in the reduction, which gloo cannot.
        made.set_gradient_divide_factor(1.0)
        made.set_force_sum_reduction_for_comms(enable=True)
        self.unit: FSDPModule = made
        self.shards = self.module.now()
        self.num_users = 0
        self.pending: Any = None  # a gather that was started
        self._wholes: list[nn.Parameter] = []
        self._copies: list[Tensor] = []  # whole weights, which `gather_into` writes
        first = self.weights[0]  # of one type, as all of the unit
        self._one = torch.full((), math.nan, dtype=first.dtype, device=first.device)
        self._released = [self._one.expand(weight.shape) for weight in self.weights]
        self._note_versions()
        self.release()

    def start(self) -> None:
        """Start to gather.

        Raises:
            ModelError: a weight was replaced or written since it was released.
        """
        here = self._copies or self._released
        for weight, known in zip(self.weights, here, strict=True):
            if weight.data_ptr() != known.data_ptr():
                raise ModelError(_lost(weight, "replaced while it was sharded"))
        self._refuse_writes("written while it was sharded")
        self.pending = self.unit.unshard(async_op=True)

    def take(self) -> None:
        """Wait for what was started; let the model read it."""
        pending, self.pending = self.pending, None
        pending.wait()
        self._wholes = self.module.now()
        copies, self._copies = self._copies, []
        if not all(map(torch.equal, copies, self._wholes)):
            raise ModelError(
                "weights that `gather_into` wrote were changed, and would be lost: "
                "the values that are trained are in shards (num_shards). Change them "
                "by `load`, or in another model"
            )
        for weight, whole in zip(self.weights, self._wholes, strict=True):
            weight.data = whole.data
        self._note_versions()

    def _refuse_writes(self, how: str) -> None:
        """Refuse weights that were written where no write is kept.

        Torch refuses most writes to what is expanded; not `fill_`, nor those to a
        single element.

        Raises:
            ModelError: one was written; says how.
        """
        if self._copies:
            return  # `take` compares them
        for weight, version in zip(self.weights, self._versions, strict=True):
            if weight._version != version:
                raise ModelError(_lost(weight, how))
        # Of what is written as `.data` there is no version. A GPU would be waited for.
        if self._one.device.type == "cpu" and not self._one.isnan():
            raise ModelError(_lost(self.weights[0], how))

    def _note_versions(self) -> None:
        self._versions = [weight._version for weight in self.weights]

    def allocate(self) -> None:
        """Give the model memory for whole weights, until the next gather."""
        # Not `empty_like`, which would keep the strides of what is released.
        self._copies = [
            torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in self.weights
        ]
        for weight, memory in zip(self.weights, self._copies, strict=True):
            weight.data = memory

    def release(self) -> None:
        """Release what was gathered: the model reads NaN until the next gather.

        Raises:
            ModelError: an array of NumPy has the memory of a weight; or a weight was
                written while it was whole.
        """
        self._refuse_writes("changed in place by a forward, a backward or a hook")
        try:
            self.unit.reshard()
        except RuntimeError as error:
            raise ModelError(
                "the memory of a gathered weight cannot be released "
                f"({error}): NumPy has it, since .numpy() was called on the weight, "
                "or it is shared between processes. Call .clone() before"
            ) from error
        for weight, nothing in zip(self.weights, self._released, strict=True):
            weight.data = nothing
        self._note_versions()

    def reduce(self) -> None:
        """Reduce the gradients of the whole weights; take them from the model."""
        for weight in self.trained:
            if weight.grad is None:
                weight.grad = torch.zeros(
                    weight.shape, dtype=gradient_type(weight), device=weight.device
                )
        for weight, whole in zip(self.weights, self._wholes, strict=True):
            whole.grad_dtype = weight.grad_dtype
            whole.grad, weight.grad = weight.grad, None
        for part in _param_groups(self.unit):
            part.post_backward()

    def finish(self) -> None:
        """Let the device wait for what was reduced."""
        for part in _param_groups(self.unit):
            part.finalize_backward()


def _lost(weight: Tensor, how: str) -> str:
    return (
        f"a weight of shape {tuple(weight.shape)} was {how}, and that would be lost: "
        "its values are in shards (num_shards), which `load` and the optimizer change"
    )


def units_of(
    stages: Mapping[int, Mapping[str, nn.Parameter]], *, masters: bool
) -> dict[Any, list[nn.Parameter]]:
    """Return the weights of each unit: of one layer and type, and of the same stages.

    Where there are masters, those that have one, and those that have none, are apart.

    Args:
        stages: the parameters of each stage, by name.
        masters: whether there are masters.

    Raises:
        ModelError: a weight cannot be sharded.
    """
    users: dict[int, list[int]] = {}
    for stage, named in stages.items():
        for weight in named.values():
            users.setdefault(id(weight), []).append(stage)
    units: dict[Any, list[nn.Parameter]] = {}
    seen = set[int]()
    for named in stages.values():
        for name, weight in named.items():
            if id(weight) in seen:
                continue
            seen.add(id(weight))
            _refuse(name, weight)
            kind = weight.dtype, masters and has_master(weight)
            key = tuple(users[id(weight)]), _layer_of(name), kind
            units.setdefault(key, []).append(weight)
    return units


def _refuse(name: str, weight: nn.Parameter) -> None:
    why = ""
    if not weight.dim():
        why = (
            "is a scalar, which has no dimension to cut: make it a tensor of shape (1,)"
        )
    elif not weight.dtype.is_floating_point:
        why = f"is of {weight.dtype}, and weights are floating-point numbers"
    elif weight.dtype.itemsize < 2:
        why = f"is of {weight.dtype}, which has no reduction: use bfloat16 or wider"
    elif not weight.is_contiguous():
        why = (
            "is not contiguous, as with channels_last, and FSDP keeps no other order "
            "in memory: call .contiguous() on the model's weights before"
        )
    elif type(weight) is not nn.Parameter:
        why = f"is a {type(weight).__name__}, which torch may not cut"
    if why:
        raise ModelError(
            f"{name} {why}; or make the pipeline with num_shards=1: it stays whole"
        )


def _layer_of(name: str) -> str:
    """Return the layer that a parameter is of: its name up to the first number."""
    parts = name.split(".")
    for i, part in enumerate(parts[:-1]):
        if _NUMBER.fullmatch(part):
            return ".".join(parts[: i + 1])
    return parts[0] if len(parts) > 1 else ""


def _param_groups(unit: FSDPModule) -> Sequence[Any]:
    """Return FSDP's own part of a unit, which reduces without a backward of its own.

    torch has no public way: its pipelines, too, call these (torch 2.11 to 2.14,
    torch.distributed.pipelining.stage, `perform_reduce_grad`).
    """
    state: Any = unit._get_fsdp_state()
    many = getattr(state, "_fsdp_param_groups", None)
    if many is not None:
        return tuple(many)
    return (state._fsdp_param_group,)

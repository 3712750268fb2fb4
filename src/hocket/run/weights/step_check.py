"""Detects optimizers whose update of a parameter depends on other parameters.

Each stage has its own optimizer, which does not see the parameters of other stages. An
optimizer that, say, limits the norm of the whole update then trains to different
weights. A few steps on small copies compare the two:

    one optimizer      a.weight a.bias   b.weight b.bias    movement of each parameter
    one per stage      a.weight a.bias │ b.weight b.bias    must be equal
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hocket.errors import ConfigError
from hocket.model.profile.optimizer_bytes import small_copies
from hocket.model.trace.local import part_of, whole
from hocket.run.stage.seed import preserve_generators, seed_generators
from hocket.run.weights.settings import Parameters, TrainingConfig

_SCALES: Final = (1.0, 1.0, 1e3, 1.0)  # of each step's gradients, to exceed any limit
_NEAR: Final = 1e-6  # relative to how far a parameter moves
_NEAR_IN_HALF: Final = 0.1  # where a step computes in half precision, in another order
_HALF: Final = (torch.bfloat16, torch.float16)
_MIN_NORM: Final = 1e-30
_CPU: Final = torch.device("cpu")


def refuse_joint_steps(
    settings: TrainingConfig, parts: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Refuse an optimizer that updates all parameters otherwise than stage by stage.

    Optimizers that fail on small copies, or draw random numbers, are not checked.

    Args:
        settings: the settings that construct the optimizer.
        parts: the parameters of each part of a net that may be a stage by itself, by
            what to call the part.

    Raises:
        ConfigError: names the parameter that differs most, and by how much.
    """
    trained = {
        place: {name: x for name, x in part.items() if x.requires_grad}
        for place, part in parts.items()
    }
    named = {name: x for part in trained.values() for name, x in part.items()}
    if sum(map(bool, trained.values())) < 2:
        return
    shares: dict[str, float] = {}
    with preserve_generators(_CPU), contextlib.suppress(Exception):
        together = _moves(settings, named, named, seed=0)
        filled = filter(None, trained.values())
        by_part = [_moves(settings, part, named, seed=0) for part in filled]
        by_stage = {name: x for moves in by_part for name, x in moves.items()}
        found = _relative_differences(together, by_stage)
        if max(found.values()) > _NEAR:
            again = _relative_differences(
                together, _moves(settings, named, named, seed=1)
            )
            shares = {} if max(again.values()) > _NEAR else found
    name = max(shares, key=shares.__getitem__, default="")
    if name and shares[name] > _NEAR:
        place = next(where for where, part in trained.items() if name in part)
        raise ConfigError(
            f"the optimizer trains to other weights by stage: in {len(_SCALES)} steps "
            f"on small copies of the parameters, {name} ({place}) moves by "
            f"{together[name].norm():.6g} where one optimizer has all of them, and by "
            f"{by_stage[name].norm():.6g} where each stage has its own (they differ by "
            f"{shares[name]:.3g} of the first). A step looks at several parameters at "
            "once: use an optimizer that updates each parameter by itself; to limit "
            "the norm of all gradients, clip_norm=; or train on one device"
        )


def refuse_shard_steps(
    settings: TrainingConfig,
    part: Mapping[str, Tensor],
    every: Mapping[str, Tensor],
    shards: Mapping[str, Tensor],
) -> None:
    """Refuse an optimizer that updates shards otherwise than whole parameters.

    Such as one that decides by `p.grad.norm().item()`, which is the norm of a shard.
    All workers that hold the shards must call this. Optimizers that fail on small
    copies that are whole are not checked.

    Args:
        settings: the settings that construct the optimizer.
        part: the parameters of a stage, by name.
        every: those of its net.
        shards: this worker's part of each of the stage's (DTensors).

    Raises:
        ConfigError: names the parameter that differs most, and by how much; or it
            draws random numbers, or cannot step shards.
    """
    part, every = (
        {
            # Rounding of half precision, which may differ, is no fault.
            name: torch.empty(x.shape, dtype=torch.float64, device="meta")
            for name, x in named.items()
            if x.requires_grad
        }
        for named in (part, every)
    )
    if not part:
        return
    like = shards[next(iter(part))]
    with preserve_generators(_CPU):
        try:
            with _HalfPrecision() as half:
                expected, other = (_moves(settings, part, every, x) for x in (0, 1))
        except Exception:
            return
        advice = "take an optimizer that can, such as AdamW, or num_shards=1"
        if max(_relative_differences(expected, other).values()) > _NEAR:
            raise ConfigError(
                "the optimizer draws random numbers, and each worker would draw the "
                f"same for its shard of a weight: {advice}"
            )
        try:
            found = _moves(settings, part, every, 0, lambda x: part_of(x, like), whole)
        except Exception as error:
            raise ConfigError(
                f"the optimizer cannot step sharded weights, which are DTensors "
                f"({str(error).splitlines()[0]}): {advice}"
            ) from error
    shares = _relative_differences(expected, found)
    name = max(shares, key=shares.__getitem__)
    if not shares[name] <= (_NEAR_IN_HALF if half.is_used else _NEAR):
        raise ConfigError(
            f"the optimizer trains sharded weights to others: in {len(_SCALES)} steps "
            f"on small copies of the parameters, {name} moves by "
            f"{expected[name].norm():.6g}, and in shards by {found[name].norm():.6g} "
            f"(they differ by {shares[name]:.3g} of the first). Of a DTensor, .item() "
            "and float() of a norm or a sum are those of this worker's shard: let the "
            "step compute with tensors alone, or take num_shards=1"
        )


def _moves(
    settings: TrainingConfig,
    part: Mapping[str, Tensor],
    every: Mapping[str, Tensor],
    seed: int,
    cut: Callable[[Tensor], Tensor] = lambda x: x,
    joined: Callable[[Tensor], Tensor] = lambda x: x,
) -> dict[str, Tensor]:
    """Return by how much some steps change small copies; equal for equal names.

    Args:
        settings: the settings that construct the optimizer.
        part: the parameters that one optimizer gets.
        every: those of the net.
        seed: seeds the random numbers that the optimizer draws.
        cut: what the optimizer gets of a tensor.
        joined: the tensor again, of what it got.
    """
    rngs = {x: torch.Generator().manual_seed(zlib.crc32(x.encode())) for x in every}
    small, start, slopes = dict[str, nn.Parameter](), {}, {}
    for name, x in small_copies(every).items():
        x.data.copy_(torch.randn(x.shape, generator=rngs[name]))
        slopes[name] = torch.randn(x.shape, generator=rngs[name])
        start[name] = x.detach().clone()
        small[name] = nn.Parameter(cut(x.detach()))
    own = {name: small[name] for name in part}
    seed_generators(_CPU, seed)
    optimizer = settings.make_stage_optimizer(Parameters(own), Parameters(small))
    for scale in _SCALES:
        for name, x in small.items():
            noise = torch.randn(x.shape, generator=rngs[name])
            x.grad = cut((scale * (slopes[name] + 0.1 * noise)).to(x.dtype))
        optimizer.step()
    return {
        name: joined(x.detach()).to(start[name].device) - start[name]
        for name, x in own.items()
    }


class _HalfPrecision(TorchDispatchMode):
    """Notes whether any operator computes in half precision, as those of Muon do."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.is_used = False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator, and look at what it returns."""
        found = func(*args, **(kwargs or {}))
        tensors = (x for x in tree_leaves(found) if isinstance(x, Tensor))
        self.is_used |= any(x.dtype in _HALF for x in tensors)
        return found


def _relative_differences(
    one: Mapping[str, Tensor], other: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return how far changes are apart, as shares of the first."""
    return {
        name: float((x - other[name]).norm() / x.norm().clamp(min=_MIN_NORM))
        for name, x in one.items()
    }

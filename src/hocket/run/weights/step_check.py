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
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from hocket.errors import ConfigError
from hocket.model.profile.optimizer_bytes import small_copies
from hocket.run.stage.seed import preserve_generators, seed_generators
from hocket.run.weights.settings import Parameters, TrainingConfig

_SCALES: Final = (1.0, 1.0, 1e3, 1.0)  # of each step's gradients, to exceed any limit
_NEAR: Final = 1e-6  # relative to how far a parameter moves
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


def _moves(
    settings: TrainingConfig,
    part: Mapping[str, Tensor],
    whole: Mapping[str, Tensor],
    *,
    seed: int,
) -> dict[str, Tensor]:
    """Return by how much some steps change small copies; equal for equal names.

    Args:
        settings: the settings that construct the optimizer.
        part: the parameters that one optimizer gets.
        whole: those of the net.
        seed: seeds the random numbers that the optimizer draws.
    """
    small = small_copies(whole)
    own = {name: small[name] for name in part}
    rngs = {name: _generator(name) for name in small}
    slopes = {}
    for name, x in small.items():
        x.data.copy_(torch.randn(x.shape, generator=rngs[name]))
        slopes[name] = torch.randn(x.shape, generator=rngs[name])
    start = {name: x.detach().clone() for name, x in small.items()}
    seed_generators(_CPU, seed)
    optimizer = settings.make_stage_optimizer(Parameters(own), Parameters(small))
    for scale in _SCALES:
        for name, x in small.items():
            noise = torch.randn(x.shape, generator=rngs[name])
            x.grad = (scale * (slopes[name] + 0.1 * noise)).to(x.dtype)
        optimizer.step()
    return {name: x.detach() - start[name] for name, x in own.items()}


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def _relative_differences(
    one: Mapping[str, Tensor], other: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return how far changes are apart, as shares of the first."""
    return {
        name: float((x - other[name]).norm() / x.norm().clamp(min=_MIN_NORM))
        for name, x in one.items()
    }

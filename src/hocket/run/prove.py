"""Trains a small model on all devices of a job, and beside them as a plain loop does.

pipeline, all workers   float64, 6 steps ─┬─ the weights are compared: 1e-10
plain loop, rank 0      float64, 6 steps ─┘
both again in float32, timed              ── samples per second
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from datetime import UTC, datetime
from statistics import median
from typing import Final

import torch
from torch import Tensor, nn

from hocket import cuda
from hocket.model.profile.precision import timed_rounds
from hocket.run.cluster.world import World, join_world
from hocket.run.diagnostics.job_folder import Json
from hocket.run.pipeline import Pipeline

TOLERANCE: Final = 1e-10  # of float64, relative to a tensor's largest value
_NUM_EXACT: Final = 6  # steps
_NUM_TIMED: Final = 12
_NUM_WARM: Final = 4  # of those
_WIDTHS: Final = {"cpu": 128, "cuda": 1024}
_SAMPLES: Final = 32  # per microbatch
_MAX_NORM: Final = 1.0


class _Block(nn.Module):
    """A residual block, (samples, width) to (samples, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


def prove() -> dict[str, Json]:
    """Train on this job's workers; call it on each of them.

    Returns:
        What an issue report needs: devices, versions, the difference, both speeds. On
        other ranks than 0 the same without what rank 0 alone measures.

    Raises:
        RunError: training failed; no worker hangs.
    """
    with closing(join_world()) as world:
        device = world.device
        name = cuda.device_name(device) if device.type == "cuda" else "cpu"
        size = f"{2 * world.world_size} residual blocks of {_WIDTHS[device.type]}"
        found: dict[str, Json] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "devices": world.gather_json(name, "devices"),
            "backend": world.backend.value,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "model": size,
        }
        weights, _ = _piped(world, torch.float64, _NUM_EXACT)
        _, piped_s = _piped(world, torch.float32, _NUM_TIMED)
        num_samples = len(_batch(world, torch.float32)[0])
        found["pipeline_samples_per_s"] = num_samples / piped_s
        if world.rank == 0:
            expected, _ = _plain(world, torch.float64, _NUM_EXACT)
            apart = {n: _difference(weights[n], x.cpu()) for n, x in expected.items()}
            name = max(apart, key=apart.__getitem__)
            found |= {"difference": apart[name], "differs_most": name}
            found["is_equal"] = apart[name] <= TOLERANCE
            _, plain_s = _plain(world, torch.float32, _NUM_TIMED)
            found["plain_samples_per_s"] = num_samples / plain_s
        world.barrier("proved")
        return found


def _model(world: World, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    width = _WIDTHS[world.device.type]
    return nn.Sequential(*(_Block(width) for _ in range(2 * world.world_size))).to(
        dtype
    )


def _batch(world: World, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    shape = (2, 2 * world.world_size * _SAMPLES, _WIDTHS[world.device.type])
    x, y = torch.randn(shape, generator=rng).to(dtype)
    return x, y


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def _piped(
    world: World, dtype: torch.dtype, num_steps: int
) -> tuple[dict[str, Tensor], float]:
    """Return the weights after some steps of the pipeline, and the seconds of one."""
    batch = _batch(world, dtype)
    with Pipeline(
        _model(world, dtype),
        nn.functional.mse_loss,
        optimizer=_adamw,
        example=batch,
        num_microbatches=2 * world.world_size,
        clip_norm=_MAX_NORM,
        world=world,
    ) as pipeline:
        seconds = [x.seconds for x in pipeline.train([batch] * num_steps)]
        return pipeline.state_dict(), median(seconds[_NUM_WARM:])


def _plain(
    world: World, dtype: torch.dtype, num_steps: int
) -> tuple[dict[str, Tensor], float]:
    """Return the same of a plain loop on one device."""
    x, y = (part.to(world.device) for part in _batch(world, dtype))
    model = _model(world, dtype).to(world.device)
    optimizer = _adamw(model.parameters())
    seconds: list[float] = []
    for span in timed_rounds(seconds, x.device, num_steps - _NUM_WARM, _NUM_WARM):
        with span:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORM)
            optimizer.step()
    return model.state_dict(), median(seconds)


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found.cpu() - expected).abs().max() / expected.abs().max())

"""One job on one accelerator: in two waves, and with its bubbles filled."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor, nn

import hocket
from bench.gpu.checked import (
    TOLERANCE,
    Checks,
    Row,
    Setting,
    exactly,
    here,
    relative_error,
    synchronize,
)
from bench.measure import spread
from bench.models import transformer
from bench.share.jobs import LARGE, SMALL, Size

NUM_CHECKED: Final = 6  # steps, an even number
NUM_TURNS: Final = 5
STEPS_IN_TURN: Final = 6
NUM_TOKENS: Final = 32
NUM_PARTS: Final = 2  # microbatches, also of the plain loop
WAVES: Final = ("exact", "wave")


def wave_weights_are_exact(setting: Setting) -> Row:
    """Weights in float64: "exact" is the plain loop; "wave" is itself in turn."""
    exactly()
    size = _size(setting)
    expected = {"exact": _plain_weights(size), "wave": _wave_weights(size, overlaps=0)}
    worst = {}
    for sync in WAVES:
        found = _wave_weights(size, sync, overlaps=1)
        pairs = ((x, expected[sync][key]) for key, x in found.items())
        worst[sync] = max(relative_error(*pair) for pair in pairs)
    return {"worst_error": worst, "holds": max(worst.values()) <= TOLERANCE}


def measured(sync: str, setting: Setting) -> Row:
    """Seconds of a step of the plain loop, or of one kind of waves."""
    exactly()
    size = _size(setting)
    if sync == "plain":
        return {"step": spread(_seconds_of_plain(size))}
    return {"step": spread(_seconds_of_waves(size, sync))}


def fill(setting: Setting) -> Row:
    """A pipeline of two workers with its bubbles filled."""
    row = filled(setting.size(6, 2))
    return row | {"holds": row["exact"]}


CHECKS: Final[Checks] = {
    "waves, exact weights": wave_weights_are_exact,
    "fill": fill,
    **{f"waves, {sync}": partial(measured, sync) for sync in ("plain", *WAVES)},
}


def filled(num_rounds: int) -> dict[str, Any]:
    """A pipeline of two workers alone and with its bubbles filled, in turn.

    The workers share one GPU, or have one each.
    """
    if torch.cuda.device_count() == 1:
        os.environ["HOCKET_BACKEND"] = "gloo"  # of the workers: NCCL refuses one GPU
    with tempfile.TemporaryDirectory() as folder:
        found = hocket.launch(
            "bench.fill.run:worker",
            ["computing", num_rounds],
            num_workers=2,
            run_dir=Path(folder),
            timeout_s=120.0,
        )
    row = dict(found[0])
    return {"job": row.pop("case"), "contestant": "fill", **row} | {
        "exact": row["same_losses"]
    }


def _size(setting: Setting) -> Size:
    return LARGE if setting.is_full else SMALL


def _model(size: Size, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return transformer(size.width).to(here(), dtype)


def _batch(size: Size, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(size.num_samples, NUM_TOKENS, size.width, generator=rng)
    return x.to(here(), dtype), torch.zeros(size.num_samples, device=here())


def _loss(output: Tensor, targets: Tensor) -> Tensor:
    del targets
    return output.square().mean()


_ADAMW: Final = partial(torch.optim.AdamW, lr=1e-4)


def _waves(model: nn.Module, sync: Any) -> hocket.Waves:
    return hocket.Waves(
        model, _loss, optimizer=_ADAMW, sync=sync, num_microbatches=NUM_PARTS
    )


def _wave_weights(
    size: Size, sync: str = "wave", *, overlaps: int
) -> Mapping[str, Tensor]:
    """Weights after some steps, of which `overlaps` says whether they overlap."""
    batches = [_batch(size, torch.float64, i) for i in range(NUM_CHECKED)]
    with _waves(_model(size, torch.float64), sync) as waves:
        if overlaps:
            for _ in waves.train(batches):
                pass
        else:
            for batch in batches:
                waves.step(batch)
        return waves.state_dict()


def _plain_weights(size: Size) -> Mapping[str, Tensor]:
    model = _model(size, torch.float64)
    optimizer = _ADAMW(model.parameters())
    for i in range(NUM_CHECKED):
        _plain_step(model, optimizer, _batch(size, torch.float64, i))
    return model.state_dict()


def _plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]
) -> None:
    """Take one step over microbatches."""
    for x in batch[0].chunk(NUM_PARTS):
        (_loss(model(x), batch[1]) * len(x) / len(batch[0])).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _seconds_of_plain(size: Size) -> list[float]:
    model, batch = _model(size, torch.float32), _batch(size, torch.float32)
    optimizer = _ADAMW(model.parameters())

    def turn() -> None:
        for _ in range(STEPS_IN_TURN):
            _plain_step(model, optimizer, batch)

    return _seconds(turn)


def _seconds_of_waves(size: Size, sync: str) -> list[float]:
    batch = _batch(size, torch.float32)
    with _waves(_model(size, torch.float32), sync) as waves:

        def turn() -> None:
            for _ in waves.train([batch] * STEPS_IN_TURN):
                pass

        return _seconds(turn)


def _seconds(turn: Any) -> list[float]:
    """Return the seconds of a step in each turn, after one to warm up."""
    found = []
    for _ in range(1 + NUM_TURNS):
        begin_s = perf_counter()
        turn()
        synchronize(here())
        found.append((perf_counter() - begin_s) / STEPS_IN_TURN)
    return found[1:]

"""torch without hocket: the calls that the CUDA adapter stands on, and what they cost.

Where one of these fails, the parts after it are not to blame.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Final

import torch

from bench.gpu.checked import (
    NEEDS_A_GPU,
    Row,
    Setting,
    by_name,
    seconds_of,
    synchronize,
)

SLEEP_CYCLES: Final = 50_000_000  # some 30 ms
GIGA: Final = 1e9


def events(setting: Setting) -> Row:
    """Two events with times around some work."""
    if not setting.on_gpu:
        return NEEDS_A_GPU
    begin, end = (torch.Event(setting.device, enable_timing=True) for _ in range(2))
    x = torch.ones(1 << 20, device=setting.device)
    begin.record()
    x.mul_(2)
    end.record()
    end.synchronize()
    return {"elapsed_ms": begin.elapsed_time(end), "done": end.query()}


def launches(setting: Setting) -> Row:
    """What one small kernel costs the host, and the device."""
    x = torch.ones(1, device=setting.device)
    number = setting.size(10_000, 100)
    seconds_of(setting.device, lambda: x.add_(1))
    synchronize(setting.device)
    begin_s = time.perf_counter()
    for _ in range(number):
        x.add_(1)
    host_s = time.perf_counter() - begin_s
    synchronize(setting.device)
    whole_s = time.perf_counter() - begin_s
    return {"host_us": host_s / number * 1e6, "whole_us": whole_s / number * 1e6}


def generators(setting: Setting) -> Row:
    """A seed gives the same numbers; a state can be kept and restored."""
    generator = torch.Generator(setting.device).manual_seed(7)

    def draw() -> torch.Tensor:
        return torch.rand(4, generator=generator, device=setting.device)

    state = generator.get_state()
    first = draw()
    generator.set_state(state)
    return {"holds": torch.equal(first, draw()), "state_bytes": state.numel()}


def streams_overlap(setting: Setting) -> Row:
    """Two sleeping kernels on two streams take as long as one."""
    if not setting.on_gpu:
        return NEEDS_A_GPU
    streams = [torch.cuda.Stream(setting.device) for _ in range(2)]

    def sleep_on(used: list[torch.cuda.Stream]) -> None:
        for stream in used:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SLEEP_CYCLES)

    sleep_on(streams)
    one_s = seconds_of(setting.device, lambda: sleep_on(streams[:1]))
    two_s = seconds_of(setting.device, lambda: sleep_on(streams))
    return {"ratio": two_s / one_s, "holds": two_s < 1.3 * one_s}


def copies(setting: Setting) -> Row:
    """GB/s between host and device, from pinned memory and from memory that is not."""
    num_bytes = setting.size(256, 1) << 20
    there = torch.empty(num_bytes, dtype=torch.uint8, device=setting.device)
    found = {}
    for name, pinned in (("pinned", setting.on_gpu), ("pageable", False)):
        here = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        for way, to, source in (("up", there, here), ("down", here, there)):
            copy = partial(to.copy_, source, non_blocking=True)
            copy()
            best_s = min(seconds_of(setting.device, copy) for _ in range(3))
            found[f"{name}_{way}_gb_per_s"] = num_bytes / best_s / GIGA
    return found


def products(setting: Setting) -> Row:
    """TFLOP/s of square products: what the machine can do at best."""
    side = setting.size(8192, 64)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(side, side, device=setting.device, dtype=dtype)
        multiply = partial(torch.mm, a, a)
        multiply()
        best_s = min(seconds_of(setting.device, multiply) for _ in range(3))
        found[f"{dtype}".removeprefix("torch.") + "_tflops"] = 2e-12 * side**3 / best_s
    return found


CHECKS: Final = by_name(events, launches, generators, streams_overlap, copies, products)

"""Where a step waits for the device, what it allocates, and what the GPU does in it."""

from __future__ import annotations

import gzip
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile

import hocket
from bench.gpu.checked import NEEDS_A_GPU, Row, Setting, by_name, synchronize
from bench.gpu.one_worker import Batch, batch_on, perceptron, pipeline_on

WIDTH: Final = 1024
NUM_WARM: Final = 3
NUM_STEPS: Final = 5
NUM_PROFILED: Final = 2
TRACE: Final = "trace.json.gz"
TABLE_ROWS: Final = 25


def host_waits(setting: Setting) -> Row:
    """Every line that waits for the device in a step, and how often; none should.

    Waits of torch.distributed are not among them.
    """
    if not setting.on_gpu:
        return NEEDS_A_GPU
    with _warm_pipeline(setting) as (pipeline, batch):
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                pipeline.step(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = Counter(
        f"{Path(one.filename).as_posix()}:{one.lineno}: {one.message}" for one in caught
    )
    return {"places": dict(places.most_common()), "holds": not places}


def allocations(setting: Setting) -> Row:
    """A step allocates nothing from the driver once the first ones have."""
    if not setting.on_gpu:
        return NEEDS_A_GPU
    from_driver, retries = [], []
    with _warm_pipeline(setting) as (pipeline, batch):
        for _ in range(NUM_STEPS):
            pipeline.step(batch)
            stats = torch.cuda.memory_stats(setting.device)
            from_driver.append(stats["num_device_alloc"])
            retries.append(stats["num_alloc_retries"])
    return {
        "num_device_alloc": from_driver,
        "num_alloc_retries": retries,
        "peak_bytes": stats["allocated_bytes.all.peak"],
        "reserved_bytes": stats["reserved_bytes.all.peak"],
        "holds": from_driver[0] == from_driver[-1],
    }


def profiled(setting: Setting) -> Row:
    """Two steps under torch's profiler; the trace lies beside the rows."""
    activities = [ProfilerActivity.CPU]
    if setting.on_gpu:
        activities.append(ProfilerActivity.CUDA)
    with (
        _warm_pipeline(setting) as (pipeline, batch),
        profile(activities=activities) as profiler,
    ):
        for _ in range(NUM_PROFILED):
            pipeline.step(batch)
        synchronize(setting.device)
    plain = setting.folder / "trace.json"
    profiler.export_chrome_trace(str(plain))
    with plain.open("rb") as source, gzip.open(setting.folder / TRACE, "wb") as to:
        shutil.copyfileobj(source, to)
    plain.unlink()
    order = "self_cuda_time_total" if setting.on_gpu else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=order, row_limit=TABLE_ROWS)
    return {"trace": TRACE, "table": table.splitlines()}


CHECKS: Final = by_name(host_waits, allocations, profiled)


@contextmanager
def _warm_pipeline(setting: Setting) -> Iterator[tuple[hocket.Pipeline, Batch]]:
    width = setting.size(WIDTH, 16)
    batch = batch_on(setting.device, width)
    model = perceptron(width).to(setting.device)
    with pipeline_on(setting.device, model, batch) as pipeline:
        for _ in range(NUM_WARM):
            pipeline.step(batch)
        yield pipeline, batch

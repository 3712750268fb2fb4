"""Iterate over the part of each batch that this worker needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hocket.run.cluster.layout import Layout
from hocket.run.data.reads import ReadSpec
from hocket.run.data.sample_loader import PartLoader
from hocket.run.engine.executor import Executor
from hocket.run.engine.plan import Plan


def worker_loader(
    loader: Iterable[Any],
    executor: Executor,
    plan: Plan,
    layout: Layout,
    device: torch.device,
) -> Iterable[Any]:
    """Return what one worker iterates over: what it needs of a PartLoader, or all.

    Args:
        loader: any iterable; one that is no PartLoader yields whole batches.
        executor: this worker's stages.
        plan: with the number of microbatches.
        layout: this worker's place.
        device: where the tensors go.
    """
    if not isinstance(loader, PartLoader):
        return loader
    runners = executor.runners.values()
    program = plan.schedule.program
    net = program.nets[-1]
    reads_all = net.batch_loss or program.whole_batch_flows
    num_replicas = 1 if reads_all else layout.num_replicas
    reads = ReadSpec(
        inputs=any(runner.module.batch_inputs for runner in runners),
        targets=any(x.loss.function or x.loss.batch_function for x in runners),
        num_microbatches=net.num_microbatches * layout.num_replicas // num_replicas,
        num_replicas=num_replicas,
        replica=layout.replica % num_replicas,
        device=device,
    )
    return loader.parts(reads)

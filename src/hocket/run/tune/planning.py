"""`hocket.plan`: predicts training on devices that need not be present."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from hocket.core.hardware import Catalogue, Hardware, LinkKind, load_catalogue
from hocket.errors import PlanError
from hocket.model.capture.capture import capture
from hocket.model.capture.captured import Captured
from hocket.model.profile.optimizer_bytes import optimizer_bytes
from hocket.model.profile.work import counted_work
from hocket.options import CorrectionName, PrecisionName
from hocket.planner.cluster import Cluster
from hocket.planner.rank import Search, rank
from hocket.planner.ranking.ranking import Ranking
from hocket.planner.work import ModelCosts
from hocket.run.cluster.world import World, single_process_world
from hocket.run.data.batch import call_arguments, count_samples
from hocket.run.data.loss import TOTAL, LossFunction, losses_of
from hocket.run.device.memory import host_bytes
from hocket.run.tune.profile_workers import ProfileConfig, profile_workers, resized
from hocket.run.weights.correction.cost import correction_cost
from hocket.run.weights.settings import OptimizerFactory, Parameters, TrainingConfig

_SHARED_MEMORY: Final = "shared-memory"
_NETWORK: Final = "100gb"


def plan(
    model: nn.Module,
    batch: Any,
    loss: LossFunction | None = None,
    *,
    num_devices: int,
    hardware: str | None = None,
    links: str | None = None,
    num_nodes: int = 1,
    network: str | None = None,
    optimizer: OptimizerFactory = torch.optim.AdamW,
    batch_size: int | None = None,
    precision: str = "float32",
    memory_bytes: int | None = None,
    correction: CorrectionName = "none",
    hardware_file: str | Path | None = None,
    search: Search | None = None,
    world: World | None = None,
) -> Ranking:
    """Predict every way to train a model on so many devices; the best first.

    With `hardware`, nothing is run and no device is needed: seconds come from the
    FLOPs and bytes of every operator. Without it, the model is profiled here, on this
    machine's GPU or CPU, and every device is assumed to be equal to it; some cuts are
    also run, on a CPU, to measure their ops in place.

    Args:
        model: any module; on the meta device it takes no memory.
        batch: an example `(inputs, targets)`, as for `Pipeline`.
        loss: as for `Pipeline`; the sum of the outputs when not given.
        num_devices: the number of all devices.
        hardware: the kind of device, such as "a100-80g".
        links: the link between devices of one node, such as "nvlink", "pcie" or
            "pcie4"; when not given, the fastest that the device has, and shared memory
            on a CPU.
        num_nodes: the number of nodes, each with equally many devices.
        network: the link between nodes; "100gb" when not given.
        optimizer: as for `Pipeline`; AdamW when not given.
        batch_size: samples per step, over all replicas; the example's when not given.
        precision: "float32", "tf32", "bfloat16" or "float16" (with autocast).
        memory_bytes: the memory of each device, if it is not most of the device's own.
        correction: as for `Pipeline`: its memory on stages with old weights counts, if
            `search` includes such.
        hardware_file: a TOML file with more devices and links, or other numbers.
        search: which candidates to consider.
        world: the job of this process, all of whose workers call this: as many as
            `num_devices`. They then measure together, with real messages. By default
            this process represents all. Either way a process on a CPU keeps the memory
            that it frees from then on (HOCKET_KEEP_FREED_MEMORY=0: it does not).

    Returns:
        A ranking of all candidates; it prints as a table, the choice and its picture.

    Raises:
        PlanError: a name is unknown; the message gives the nearest. Or the job has
            another number of workers, or its links are named.
        CaptureError: the model cannot be captured.
        DataError: the batch is no pair, or its tensors disagree.
        ConfigError: there is no such correction.
    """
    search = Search() if search is None else search
    _check_correction(correction, search)
    catalogue = load_catalogue(None if hardware_file is None else Path(hardware_file))
    device = None if hardware is None else catalogue.device(hardware)
    if device is not None:
        device.reached_flops(precision)  # refuses a precision that it has not
    _check_world(world, num_devices, hardware, links)
    cluster = _cluster(
        catalogue, device, links, network, num_devices, num_nodes, memory_bytes
    )
    args, kwargs = call_arguments(batch[0])
    num_samples = count_samples(batch)
    captured = capture(model, args, kwargs)
    trained = _trained(captured)
    states = optimizer_bytes(trained, lambda named: optimizer(Parameters(named)))
    size = num_samples if batch_size is None else batch_size
    settings = TrainingConfig(optimizer=optimizer, correction=correction)
    corrected = correction_cost(settings, trained)
    if device is not None:
        finish = None if loss is None else _finish(loss, batch[1], num_samples)
        work: ModelCosts = counted_work(
            captured,
            device,
            states,
            finish=finish,
            precision=precision,
            correction=corrected,
        )
        return rank(work, cluster, size, search)
    wanted = ProfileConfig(
        captured,
        batch[1],
        loss,
        replace(settings, precision=_measurable(precision)),
        states,
        size,
        num_devices,
        search.stages_per_device,
        corrected,
    )
    workers = single_process_world(_own_device()) if world is None else world
    found = profile_workers(wanted, workers)
    cluster = replace(cluster, ring=found.ring, shares_cores=found.shares_cores)
    return rank(found.work, cluster, size, search, found.trials)


def _measurable(precision: str) -> PrecisionName:
    if precision == "tf32":
        raise PlanError(
            "tf32 is how a GPU multiplies float32: name the hardware to plan for it, "
            "or measure with float32, bfloat16 or float16"
        )
    return cast(PrecisionName, precision)  # TrainingConfig refuses others


def _check_correction(correction: str, search: Search) -> None:
    """Refuse a correction if no weights are stale.

    Raises:
        PlanError: no order with a delay is included.
    """
    if correction != "none" and not search.max_delay and search.schedules is None:
        raise PlanError(
            f"correction {correction!r} has no effect while max_delay is 0: no order "
            "with old weights is looked at; allow them with search=Search(max_delay=1)"
        )


def _own_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _check_world(
    world: World | None, num_devices: int, hardware: str | None, links: str | None
) -> None:
    if world is None:
        return
    if links is not None:
        raise PlanError(
            f"links={links!r}: the messages of these workers are measured; leave links "
            "away, or leave world away to plan for other links"
        )
    if hardware is not None:
        raise PlanError(
            f"hardware={hardware!r} needs no workers: leave world away, or the hardware"
        )
    if world.world_size != num_devices:
        raise PlanError(
            f"the job has {world.world_size} workers, the plan is for {num_devices} "
            f"devices: ask for num_devices={world.world_size}, or leave world away"
        )


def _cluster(
    catalogue: Catalogue,
    device: Hardware | None,
    links: str | None,
    network: str | None,
    num_devices: int,
    num_nodes: int,
    memory_bytes: int | None,
) -> Cluster:
    """Return the cluster; without a kind of device, of devices like this machine's."""
    if device is None:
        name = "this machine's device"
        own: tuple[str, ...] = (_SHARED_MEMORY,)
        most = _own_memory(num_devices // max(1, num_nodes))
    else:
        name, own, most = device.name, device.links, device.usable_bytes
    return Cluster(
        num_devices,
        most if memory_bytes is None else memory_bytes,
        _link(catalogue, links, own),
        catalogue.link(network or _NETWORK) if num_nodes > 1 else None,
        num_nodes,
        name,
    )


def _link(catalogue: Catalogue, name: str | None, own: tuple[str, ...]) -> LinkKind:
    """Return a link by name; `nvlink` and `pcie` are the device's own."""
    if name is None:
        if not own:
            raise PlanError(
                f"the device names no links: say which, one of "
                f"{', '.join(catalogue.links)}"
            )
        return catalogue.link(own[0])
    found = next((link for link in own if link.startswith(name.lower())), name)
    return catalogue.link(found)


def _trained(captured: Captured) -> dict[str, Tensor]:
    return {name: x for name, x in captured.state.tensors.items() if x.requires_grad}


def _finish(
    loss: LossFunction, targets: Any, num_samples: int
) -> Callable[[Any, int], Tensor]:
    """Return the loss of a microbatch of any size, with repeated targets."""

    def finish(output: Any, size: int) -> Tensor:
        wanted = resized(targets, num_samples, size)
        return losses_of(loss, output, wanted)[TOTAL]

    return finish


def _own_memory(num_sharing: int) -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory * _USABLE)
    return int(host_bytes() / max(1, num_sharing) * _USABLE)


_USABLE: Final = 0.9

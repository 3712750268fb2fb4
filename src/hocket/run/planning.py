"""`hocket.plan`: what to expect of a model on devices that need not be there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.errors import PlanError
from hocket.model.capture import capture
from hocket.model.captured import Captured
from hocket.model.clock import clock_of
from hocket.model.measure import profile
from hocket.model.optimizer_bytes import optimizer_bytes
from hocket.model.work import counted_work, measured_work
from hocket.plan.hardware import Catalogue, Hardware, LinkKind, load_catalogue
from hocket.planner.cluster import Cluster
from hocket.planner.rank import Search, rank
from hocket.planner.ranking import Ranking
from hocket.planner.work import Work
from hocket.run.batch import call_arguments, count_samples
from hocket.run.device_memory import host_bytes
from hocket.run.loss import TOTAL, LossFunction, losses_of
from hocket.run.settings import OptimizerFactory, Parameters

_SHARED_MEMORY: Final = "shared-memory"
_NETWORK: Final = "100gb"
_NUM_UPDATES: Final = 3
_GRADIENT: Final = 1e-3  # of each element; zeros take AdamW twice as long on a CPU


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
    hardware_file: str | Path | None = None,
    search: Search | None = None,
) -> Ranking:
    """Predict every way to train a model on so many devices; the best first.

    With `hardware`, nothing is run and no device is needed: seconds come from the
    FLOPs and bytes of every operator. Without it, the model is profiled here, on this
    machine's GPU or CPU, and that is what each of the devices is taken to be.

    Args:
        model: any module; on the meta device it takes no memory.
        batch: an example `(inputs, targets)`, as for `Pipeline`.
        loss: as for `Pipeline`; the sum of the outputs stands for it when not given.
        num_devices: all of them.
        hardware: the kind of device, such as "a100-80g".
        links: between devices of one node, such as "nvlink", "pcie" or "pcie4"; the
            fastest that the device has when not given, and shared memory on a CPU.
        num_nodes: that the devices are in, evenly.
        network: between nodes; "100gb" when not given.
        optimizer: as for `Pipeline`; AdamW when not given.
        batch_size: samples per step, over all replicas; the example's when not given.
        precision: "float32", "tf32", "bfloat16" or "float16" (with autocast). For
            profiles, what they are measured in: only "float32".
        memory_bytes: that the model may have on each device, where it is not most of
            the device's.
        hardware_file: a TOML file with more devices and links, or other numbers.
        search: which candidates are looked at.

    Returns:
        What can be printed: a table of all ways, the choice, and its picture.

    Raises:
        PlanError: a name that is not known; the message tells the nearest.
        CaptureError: the model cannot be captured.
        DataError: the batch is no pair, or its tensors disagree.
    """
    catalogue = load_catalogue(None if hardware_file is None else Path(hardware_file))
    device = None if hardware is None else catalogue.device(hardware)
    if device is not None:
        device.reached_flops(precision)  # refuses a precision that it has not
    cluster = _cluster(
        catalogue, device, links, network, num_devices, num_nodes, memory_bytes
    )
    args, kwargs = call_arguments(batch[0])
    num_samples = count_samples(batch)
    captured = capture(model, args, kwargs)
    states = _state_bytes(captured, optimizer)
    finish = None if loss is None else _finish(loss, batch[1], num_samples)
    size = num_samples if batch_size is None else batch_size
    work: Work
    if device is None:
        work = _measured(captured, states, optimizer, finish, size, num_devices)
    else:
        work = counted_work(
            captured, device, states, finish=finish, precision=precision
        )
    return rank(work, cluster, size, search)


def _cluster(
    catalogue: Catalogue,
    device: Hardware | None,
    links: str | None,
    network: str | None,
    num_devices: int,
    num_nodes: int,
    memory_bytes: int | None,
) -> Cluster:
    """The devices; without a kind, like this machine's."""
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
    """A link by name; `nvlink` and `pcie` are the device's own."""
    if name is None:
        if not own:
            raise PlanError(
                f"the device names no links: say which, one of "
                f"{', '.join(catalogue.links)}"
            )
        return catalogue.link(own[0])
    found = next((link for link in own if link.startswith(name.lower())), name)
    return catalogue.link(found)


def _state_bytes(captured: Captured, optimizer: OptimizerFactory) -> dict[str, int]:
    tensors = captured.state.tensors.items()
    trained = {name: x for name, x in tensors if x.requires_grad}
    return optimizer_bytes(trained, lambda named: optimizer(Parameters(named)))


def _finish(
    loss: LossFunction, targets: Any, num_samples: int
) -> Callable[[Any, int], Tensor]:
    """The loss of a microbatch of any size: rows of the example's targets repeat."""

    def finish(output: Any, size: int) -> Tensor:
        def resized(leaf: Tensor) -> Tensor:
            if not leaf.dim() or leaf.shape[0] != num_samples:
                return leaf
            return leaf[torch.arange(size, device=leaf.device) % num_samples]

        wanted = pytree.tree_map_only(Tensor, resized, targets)
        return losses_of(loss, output, wanted)[TOTAL]

    return finish


def _measured(
    captured: Captured,
    states: Mapping[str, int],
    optimizer: OptimizerFactory,
    finish: Callable[[Any, int], Tensor] | None,
    batch_size: int,
    num_devices: int,
) -> Work:
    """Profiles of a smaller and of a larger microbatch, here and now."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    largest = max(1, batch_size // num_devices)
    sizes = {max(1, largest // 8), largest}
    if captured.fixed_batch:
        sizes = {captured.example.num_samples}
    profiles = {
        size: profile(
            captured,
            captured.example.resized(size).leaves,
            device=device,
            finish=None if finish is None else _for_size(finish, size),
        )
        for size in sorted(sizes)
    }
    return measured_work(
        captured,
        profiles,
        states,
        update_s_per_byte=_update_s_per_byte(captured, optimizer, states, device),
    )


def _for_size(
    finish: Callable[[Any, int], Tensor], size: int
) -> Callable[[Any], Tensor]:
    return lambda output: finish(output, size)


def _update_s_per_byte(
    captured: Captured,
    optimizer: OptimizerFactory,
    states: Mapping[str, int],
    device: torch.device,
) -> float:
    """From steps on copies of all weights."""
    copies = {
        name: nn.Parameter(x.detach().to(device).clone())
        for name, x in captured.state.tensors.items()
        if x.requires_grad
    }
    if not copies:
        return 0.0
    stepped = optimizer(Parameters(copies))
    clock = clock_of(device)
    seconds = []
    for _ in range(_NUM_UPDATES + 1):
        for copy in copies.values():
            copy.grad = torch.full_like(copy, _GRADIENT)
        begin = clock()
        stepped.step()
        seconds.append(clock() - begin)
    num_bytes = 2 * sum(x.nbytes for x in copies.values()) + sum(states.values())
    return median(seconds[1:]) / num_bytes


def _own_memory(num_sharing: int) -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory * _USABLE)
    return int(host_bytes() / max(1, num_sharing) * _USABLE)


_USABLE: Final = 0.9

"""The networks of published pipelines by name, for `hocket plan`.

    hocket plan bert-24 --devices 4 --hardware v100-16g
    hocket plan deep-bert-96 --layout 4x2 --hardware v100-16g --max-delay 1

They are counted by hand, so there is no model to run: a kind of device must be named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from hocket.core.hardware import load_catalogue
from hocket.errors import PlanError
from hocket.planner.cluster import Cluster
from hocket.planner.counted import CountedCosts
from hocket.planner.experiments.networks import (
    Layer,
    bert,
    deep_bert,
    dense,
    gpt3_medium,
    recurrent,
)
from hocket.planner.experiments.resnext import resnext
from hocket.planner.rank import Search, rank
from hocket.planner.ranking import Ranking

_SCORED: Final = 20  # masked words of a sentence


@dataclass(frozen=True, slots=True)
class Network:
    """What can be planned by its name.

    Args:
        make: its layers.
        batch_size: samples per step, as in its experiment.
        summary: what it is.
    """

    make: Callable[[], tuple[Layer, ...]]
    batch_size: int
    summary: str


def _berts() -> dict[str, Network]:
    batch_sizes = {12: 480, 24: 320, 36: 380, 48: 320}
    fine_tuned = {
        f"bert-{n}": Network(
            partial(bert, n, num_scored=0), 96, f"BERT, {n} blocks, two classes"
        )
        for n in batch_sizes
    }
    pre_trained = {
        f"bert-{n}-pretraining": Network(
            partial(bert, n, num_scored=_SCORED),
            batch_size,
            f"BERT, {n} blocks, {_SCORED} masked words",
        )
        for n, batch_size in batch_sizes.items()
    }
    return fine_tuned | pre_trained


def _of_wpipe() -> dict[str, Network]:
    """By depth, with 32 samples per device."""
    berts = {
        f"deep-bert-{n}": Network(
            partial(deep_bert, n), 32 * devices, f"BERT-base with {n} blocks"
        )
        for n, devices in ((96, 8), (192, 8), (384, 64), (768, 64))
    }
    images = {
        f"resnext-{n}": Network(
            partial(resnext, n, group_width=width),
            32 * devices,
            f"ResNeXt-{n} 32x{width}d, 224 x 224 pixels",
        )
        for n, width, devices in (
            *((50, 4, 8), (101, 8, 8), (200, 4, 8)),
            *((302, 4, 8), (500, 4, 64), (800, 4, 64)),
        )
    }
    return berts | images


NETWORKS: Final[Mapping[str, Network]] = {
    **_berts(),
    **_of_wpipe(),
    "gpt3-medium": Network(
        partial(gpt3_medium, 512), 32, "GPT-3 Medium, 24 blocks, 512 tokens"
    ),
    "rnn-16": Network(
        partial(recurrent, 16, 1024, 64), 256, "LSTM, 16 layers, 64 tokens"
    ),
    "ffnn-16": Network(partial(dense, 16, 4096), 4096, "16 layers of width 4096"),
}


def plan_network(
    name: str,
    *,
    num_devices: int,
    hardware: str | None,
    links: str | None = None,
    num_nodes: int = 1,
    network: str | None = None,
    batch_size: int | None = None,
    precision: str | None = None,
    memory_bytes: int | None = None,
    hardware_file: Path | None = None,
    search: Search | None = None,
) -> Ranking:
    """Predict every way to train one of `NETWORKS`; as `hocket.plan`, without a model.

    Args:
        name: of the network.
        num_devices: all of them.
        hardware: the kind of device.
        links: between devices of one node; the device's fastest when not given.
        num_nodes: that the devices are in, evenly.
        network: between nodes; "100gb" when not given.
        batch_size: samples per step; the experiment's when not given.
        precision: of matrix products; float32 when not given.
        memory_bytes: of each device, for the model.
        hardware_file: more devices and links.
        search: which candidates are looked at.

    Raises:
        PlanError: a name that is not known, or no kind of device.
    """
    if name not in NETWORKS:
        raise PlanError(
            f"no network is named {name!r}; there are {', '.join(NETWORKS)}"
        )
    entry = NETWORKS[name]
    if hardware is None:
        raise PlanError(
            f"{name} is counted by hand and cannot be measured here: name a kind of "
            "device, such as --hardware v100-16g"
        )
    catalogue = load_catalogue(hardware_file)
    device = catalogue.device(hardware)
    precision = precision or "float32"
    device.reached_flops(precision)  # refuses a precision that it has not
    if links is None and not device.links:
        raise PlanError(f"{device.name} names no links: say which with --links NAME")
    cluster = Cluster(
        num_devices,
        device.usable_bytes if memory_bytes is None else memory_bytes,
        catalogue.link(links or device.links[0], device),
        catalogue.link(network or "100gb") if num_nodes > 1 else None,
        num_nodes,
        device.name,
    )
    ops = tuple(layer.ops() for layer in entry.make())
    work = CountedCosts(f"{name} ({entry.summary})", ops, device, precision)
    return rank(work, cluster, batch_size or entry.batch_size, search)

"""The networks of published pipelines by name, for `hocket plan`.

    hocket plan bert-24 --devices 4 --hardware v100-16g
    hocket plan deep-bert-96 --layout 4x2 --hardware v100-16g --max-delay 1

They are counted by hand, so there is no model to run: a kind of device must be named.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from hocket.core.hardware import load_catalogue
from hocket.errors import PlanError
from hocket.nearest import nearest
from hocket.planner.counted import CountedCosts
from hocket.planner.published.counted_layer import CountedLayer, Product
from hocket.planner.rank import PlanConfig, Progress, rank
from hocket.planner.ranking.ranking import Ranking


@dataclass(frozen=True, slots=True)
class Network:
    """A network that can be planned by its name.

    Args:
        batch_size: samples per step, as in its experiment.
        summary: what it is.
        groups: the layers that follow each other `times` times, numbered from `first`.
    """

    batch_size: int
    summary: str
    groups: Sequence[Mapping[str, Any]]

    def make(self) -> tuple[CountedLayer, ...]:
        """Return its layers, in order."""
        return tuple(
            _layer(layer, number)
            for group in self.groups
            for number in range(group["first"], group["first"] + group["times"])
            for layer in group["layers"]
        )


def _layer(entry: Mapping[str, Any], number: int) -> CountedLayer:
    """Return a layer; `{}` in its name becomes the number."""
    name, products = entry["name"].format(number), entry["products"]
    made = tuple(Product(*product) for product in products)
    return CountedLayer(**{**entry, "name": name, "products": made})


def _read() -> dict[str, Network]:
    text = (files(__package__) / "networks.toml").read_text(encoding="utf-8")
    return {name: Network(**entry) for name, entry in tomllib.loads(text).items()}


NETWORKS: Final[Mapping[str, Network]] = _read()


def plan_network(
    name: str, config: PlanConfig, progress: Progress | None = None
) -> Ranking:
    """Predict every way to train one of `NETWORKS`; as `hocket.plan`, without a model.

    Args:
        name: the network's name.
        config: the devices, and the candidates to consider; the batch size is the
            experiment's when not given.
        progress: see `rank`.

    Raises:
        PlanError: a name that is not known, or no kind of device.
    """
    if name not in NETWORKS:
        raise PlanError(f"no network is named {name!r}; {nearest(name, NETWORKS)}")
    entry = NETWORKS[name]
    if config.hardware is None:
        raise PlanError(
            f"{name} is counted by hand and cannot be measured here: name a kind of "
            "device, such as --hardware v100-16g"
        )
    file = config.hardware_file
    catalogue = load_catalogue(None if file is None else Path(file))
    device = catalogue.device(config.hardware)
    precision = config.precision or "float32"
    device.reached_flops(precision)  # refuses a precision that it has not
    cluster = config.cluster(catalogue, device, device.usable_bytes)
    ops = tuple(layer.ops() for layer in entry.make())
    work = CountedCosts(f"{name} ({entry.summary})", ops, device, precision)
    size = config.batch_size or entry.batch_size
    return rank(work, cluster, size, config.search, progress=progress)

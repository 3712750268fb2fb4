"""The networks of published pipelines, and results of published experiments, by name.

    hocket plan bert-24 --devices 4 --hardware v100-16g
    hocket plan deep-bert-96 --layout 4x2 --hardware v100-16g --max-delay 1

They are counted by hand, so there is no model to run: a kind of device must be named.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

import numpy as np

from hocket.errors import PlanError
from hocket.nearest import nearest
from hocket.planner.rank import PlanConfig, Progress, rank
from hocket.planner.ranking.report import Ranking
from hocket.planner.work import Affine, CountedCosts, LayerOps, Ops, Weights

_FLOAT: Final = 4  # bytes
_STATES: Final = 2  # of Adam, per weight
_NOTHING: Final = Affine(0.0, 0.0)
_SUFFIX: Final = ".json"


# A layer that is counted by hand, without a framework.
#
# It is its matrix products, and the bytes that everything else reads and writes:
#
#     attention   x ─▶ q k v ─▶ scores ─▶ context ─▶ out        per sample and token
#     mlp         x ─▶ wide ─▶ narrow                           of a transformer's block
#
# Attention and MLP are layers of their own, so that a cut may go between them. All
# numbers are float32, as the experiments were.
@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product of one sample: `rows` x `inner` times `inner` x `columns`.

    Args:
        rows: the rows, which grow with the samples.
        inner: the inner dimension of both factors.
        columns: the columns of the second factor.
        has_weights: the second factor is weights, and not another activation.
        num_times: done one after another, each waiting for the one before.
    """

    rows: int
    inner: int
    columns: int
    has_weights: bool = True
    num_times: int = 1


@dataclass(frozen=True, slots=True)
class CountedLayer:
    """The operators and weights of one layer.

    Args:
        name: the layer's name.
        products: the matrix products, in order.
        other_floats: numbers that all else reads and writes in a forward, per sample.
        kept_floats: from the forward for the backward, per sample.
        received_floats: numbers of its input, per sample.
        num_weights: beside those of the products.
        num_states: the optimizer's state per weight.
    """

    name: str
    products: tuple[Product, ...]
    other_floats: int
    kept_floats: int
    received_floats: int
    num_weights: int = 0
    num_states: int = _STATES

    @property
    def weights(self) -> int:
        """The number of trained weights."""
        own = (p.inner * p.columns for p in self.products if p.has_weights)
        return self.num_weights + sum(own)

    def ops(self) -> LayerOps:
        """Return the operators for `CountedCosts`."""
        other = _FLOAT * self.other_floats
        forward = [_product(p) for p in self.products for _ in range(p.num_times)]
        forward.append(_Op(0.0, 0.0, other))
        back = [
            _product(p)
            for p in self.products
            # of a factor that is no weights, the gradient, too
            for _ in range(p.num_times * (1 if p.has_weights else 2))
        ]
        back.append(_Op(0.0, 0.0, 2 * other))
        weight_grads = [_all_times(p) for p in self.products if p.has_weights]
        num_bytes = _FLOAT * self.weights
        received = Affine(0.0, _FLOAT * self.received_floats)
        states = self.num_states * num_bytes
        weights = Weights(self.name, num_bytes, num_bytes, states)
        return LayerOps(
            self.name,
            _ops(forward),
            _ops(back),
            _ops([*back, *weight_grads]),
            activation_bytes=Affine(0.0, _FLOAT * self.kept_floats),
            kept_input_bytes=_NOTHING,
            received_bytes=received,
            received_grad_bytes=received,
            weights=(weights,),
        )


@dataclass(frozen=True, slots=True)
class _Op:
    """One operator: FLOPs and bytes per sample, and bytes whatever the samples."""

    flops: float
    fixed_bytes: float
    sample_bytes: float


def _product(product: Product) -> _Op:
    rows, inner, columns = product.rows, product.inner, product.columns
    second = _FLOAT * inner * columns
    moved = _FLOAT * rows * (inner + columns)
    if product.has_weights:
        return _Op(2.0 * rows * inner * columns, second, moved)
    return _Op(2.0 * rows * inner * columns, 0.0, moved + second)


def _all_times(product: Product) -> _Op:
    """Return one operator for the weights' gradient of all times: nothing waits."""
    op, times = _product(product), product.num_times
    return _Op(times * op.flops, op.fixed_bytes, times * op.sample_bytes)


def _ops(ops: list[_Op]) -> Ops:
    nothing = [0.0] * len(ops)
    fixed, per_sample = [op.fixed_bytes for op in ops], [op.sample_bytes for op in ops]
    return Ops(
        np.array([nothing, [op.flops for op in ops]]),
        np.array([fixed, per_sample]),
        np.array([nothing, per_sample]),
    )


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
    device, precision = config.device, config.precision or "float32"
    if device is None:
        raise PlanError(
            f"{name} is counted by hand and cannot be measured here: name a kind of "
            "device, such as --hardware v100-16g"
        )
    cluster = config.cluster()
    ops = tuple(layer.ops() for layer in entry.make())
    work = CountedCosts(f"{name} ({entry.summary})", ops, device, precision)
    size = config.batch_size or entry.batch_size
    return rank(work, cluster, size, config.search, progress=progress)


def read_results(name: str) -> dict[str, Any]:
    """Read one experiment's results, as `bench/published.py` wrote them down.

    Returns:
        "experiments", simulated; "measured"; and "tables", the same for people: each
        has a "title", lines above it; "rows" of cells, the head first; and a "legend",
        one paragraph below it.

    Raises:
        PlanError: there is none of this name; names those that there are.
    """
    entries = (entry.name for entry in files(__package__).iterdir())
    names = sorted(x.removesuffix(_SUFFIX) for x in entries if x.endswith(_SUFFIX))
    if name not in names:
        raise PlanError(f"no experiment is named {name!r}; {nearest(name, names)}")
    text = (files(__package__) / f"{name}{_SUFFIX}").read_text(encoding="utf-8")
    results: dict[str, Any] = json.loads(text)
    return results

"""The data-parallel experiments: their networks, and what the simulation claims."""

from __future__ import annotations

import pytest

from bench.networks.single_convolutions import gpt_products, resnet_convolutions
from bench.ooo_data.experiments import NETWORKS, NUM_HOSTS, TRAINED, simulated, table


@pytest.mark.parametrize(
    ("depth", "num_layers", "num_weights", "num_products"),
    [(50, 54, 25.50e6, 4.089e9), (101, 105, 44.44e6, 7.801e9)],
)
def test_resnets_have_their_known_sizes(
    depth: int, num_layers: int, num_weights: float, num_products: float
) -> None:
    """Weights and multiplications of torchvision's, without normalizations."""
    layers = resnet_convolutions(depth)
    products = (p for layer in layers for p in layer.products)
    found = sum(p.rows * p.inner * p.columns for p in products)
    assert len(layers) == num_layers
    assert sum(layer.weights for layer in layers) == pytest.approx(
        num_weights, rel=1e-3
    )
    assert found == pytest.approx(num_products, rel=1e-3)


def test_gpt_has_the_weights_of_its_paper() -> None:
    """GPT-3 Medium has 350 million, the embedding counted once."""
    assert sum(layer.weights for layer in gpt_products()) == pytest.approx(
        353e6, rel=1e-2
    )


@pytest.mark.long
def test_is_never_slower_than_ddp_with_its_best_buckets() -> None:
    """On no number of hosts and no network; on one host there is nothing to gain."""
    results = [*simulated()]
    assert len(results) == len(TRAINED) * (1 + (len(NUM_HOSTS) - 1) * len(NETWORKS))
    assert min(result.over_best for result in results) > 0.999
    assert max(x.over_ddp for x in results if x.num_hosts == 1) < 1.01
    assert {len(row) for row in table(results)} == {11}

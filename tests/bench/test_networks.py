"""Networks counted by hand, against what their papers and closed forms say."""

from __future__ import annotations

import pytest

from bench.networks.transformers import bert, dense, gpt3_medium, recurrent
from bench.networks.write import networks, text_of
from bench.published import PACKAGED
from hocket.core.hardware import load_catalogue
from hocket.planner.published.catalogue import NETWORKS, CountedLayer
from hocket.planner.work import CountedCosts

# In millions, from the papers.
PARAMETERS = {
    "BERT base (arXiv:1810.04805, section 3)": (bert(12, num_scored=0), 110),
    "BERT large (arXiv:1810.04805, section 3)": (bert(24, num_scored=0), 340),
    "GPT-3 Medium (arXiv:2005.14165, table 2.1)": (gpt3_medium(2048)[:-1], 350),
}


@pytest.mark.parametrize("name", list(PARAMETERS))
def test_networks_have_as_many_parameters_as_published(name: str) -> None:
    """Within 3 %: papers round, and count positions and heads in their own way."""
    layers, millions = PARAMETERS[name]
    assert sum(layer.weights for layer in layers) == pytest.approx(
        millions * 1e6, rel=0.03
    )


def flops(layer: CountedLayer) -> tuple[float, float, float]:
    """Of F, I and W, for one sample."""
    ops = layer.ops()
    forward, back = ops.forward.total_flops(1), ops.input_grad.total_flops(1)
    return forward, back, ops.backward.total_flops(1) - back


def test_a_block_has_the_flops_of_the_closed_forms() -> None:
    """24 T H^2 + 4 T^2 H forward, twice the attention in I, none of it in W.

    Qi et al., arXiv:2401.10241, table 1.
    """
    tokens, width = 128, 1024
    _, attention, mlp, *_ = bert(24, num_scored=0)
    forward, back, weight = (
        sum(pair) for pair in zip(flops(attention), flops(mlp), strict=True)
    )
    products, scores = 24 * tokens * width**2, 4 * tokens**2 * width
    assert forward == products + scores
    assert back == products + 2 * scores
    assert weight == products


def test_a_dense_layer_takes_as_long_thrice() -> None:
    """F, I and W are the same product, and a large one is bound by its FLOPs."""
    device = load_catalogue().device("v100-16g")
    (layer,) = dense(1, 4096)
    (cost,) = CountedCosts("dense", (layer.ops(),), device, "float32").layers(1024)
    product_s = 2 * 1024 * 4096**2 / device.reached_flops("float32")
    assert cost.weight_grad_s == pytest.approx(product_s, rel=0.01)
    assert cost.forward_s == pytest.approx(product_s, rel=0.1)
    assert cost.input_grad_s == pytest.approx(product_s, rel=0.1)


def test_a_recurrent_layer_waits_for_itself_but_in_w() -> None:
    """One operator per token in F and I; all of W at once."""
    (layer,) = recurrent(1, 256, 50)
    ops = layer.ops()
    assert ops.forward.flops.shape[1] == 50 + 2
    assert ops.input_grad.flops.shape[1] == 50 + 2
    assert ops.backward.flops.shape[1] == 50 + 2 + 2
    forward, back, weight = flops(layer)
    assert forward == back == weight == 2 * 50 * 256 * 1024 * 2


def test_the_packaged_networks_are_the_counted_ones() -> None:
    """`hocket plan` reads what `bench.networks.write` writes."""
    packaged = (PACKAGED / "networks.toml").read_text(encoding="utf-8")
    assert packaged == text_of(networks())
    for name, network in networks().items():
        assert NETWORKS[name].make() == network.layers
